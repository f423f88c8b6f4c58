"""Metadata keys: names that no code reads to make a vector, in whichever JSON file of a checkpoint they are.

Trainers, converters and hubs write them, and people by hand. Keys that only one file or architecture has are known to its
reader.
"""

from typing import Final

_WRITERS: Final = {
    "transformers, by save_pretrained": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class _commit_hash
        _experts_implementation _flash_attn_2_enabled _from_auto _from_model_config _from_pipeline _name_or_path _torch_dtype
        attn_implementation name_or_path torch_dtype transformers_version
    """,
    "transformers, arguments of from_pretrained": """
        cache_dir device_map force_download local_files_only low_cpu_mem_usage max_memory offload_folder offload_state_dict
        output_loading_info proxies resume_download token use_auth_token use_safetensors user_agent
        use_flash_attn weights_only
    """,
    "Unsloth": "unsloth_fixed unsloth_version",
    "trainers and trackers": """
        axolotl_config axolotl_version comet_url dataset dataset_name dataset_revision datasets epoch epochs eval_results
        fine_tuned_from finetuned_from git_commit git_hash git_sha global_step hub_model_id learning_rate mlflow_run_id
        num_train_epochs parent_model random_seed run_id run_name seed train_args train_batch_size train_dataset
        trained_with trainer training_args training_config training_data training_date training_dataset wandb wandb_entity
        wandb_project wandb_run_id wandb_url
    """,
    "versions of software": """
        __version__ cuda_version datasets_version diffusers_version framework framework_version onnxruntime_version
        optimum_version peft_version python_version pytorch_version sentence_transformers_version tokenizers_version
        torch_version trl_version
    """,
    "model cards and hubs": """
        author authors base_model base_model_relation citation co2 co2_eq_emissions comment comments contributors created
        created_at created_by
        creator date description developer developers doi download_url hf_repo homepage inference languages last_modified
        library library_name license license_link license_name license_url maintainer metrics model-index model_card
        model_creator model_description model_id model_index model_link model_name model_url model_version modelId new_version
        note notes organization original_model paper paper_url pipeline_tag publisher release_date repo_id repo_url repository
        source source_model tags thumbnail timestamp title updated_at url version widget
    """,
    "exporters": """
        _class_name _diffusers_version converted_by converted_from export_model_type neuron quantized_by transformers.js_config
    """,
}
METADATA: Final = frozenset(key for keys in _WRITERS.values() for key in keys.split())
