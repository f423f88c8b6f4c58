"""jina-embeddings-v3, small and random: its adapters in the layouts of the hub's own code, of the converted checkpoint
(jinaai/jina-embeddings-v3-hf) and of what PEFT saves; and the reference, transformers' model with an adapter merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model

from checkpoints.encoders import xlmr_tokenizer
from checkpoints.files import edit_json, write_json

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
INSTRUCTIONS = dict.fromkeys(TASKS, "") | {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}
RANK, ALPHA, WIDTH, INNER, LAYERS = 4, 1, 48, 96, 2
CODE = "jinaai/xlm-roberta-flash-implementation--"
CONFIG: dict[str, Any] = {
    "_name_or_path": "jinaai/jina-embeddings-v3",
    "architectures": ["XLMRobertaModel"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": CODE + "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": CODE + "modeling_lora.XLMRobertaLoRA",
        "AutoModelForMaskedLM": CODE + "modeling_xlm_roberta.XLMRobertaForMaskedLM",
        "AutoModelForPreTraining": CODE + "modeling_xlm_roberta.XLMRobertaForPreTraining",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": True,
    "lora_adaptations": TASKS,
    "lora_alpha": ALPHA,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": RANK,
    "matryoshka_dimensions": [16, 32, 48],
    "max_position_embeddings": 130,
    "model_type": "xlm-roberta",
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": INSTRUCTIONS,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.30.2",
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": True,
    "use_flash_attn": True,
}
PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": None,
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.0,
    "target_modules": [
        "word_embeddings", "token_type_embeddings", "q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "dense",
    ],
}  # fmt: skip
SAVED_PEFT: dict[str, Any] = PEFT | {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.21.2", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": None, "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
LAYOUTS = ["stacked", "converted", "saved by PEFT"]

Matrices = Mapping[str, tuple[Tensor, Tensor]]
"""A (rank, in) and B (out, rank) by the name of the module in transformers; of tables, in is their length."""


def draw(*shape: int) -> Tensor:
    return 0.2 * torch.randn(shape)


@cache
def model() -> JinaEmbeddingsV3Model:
    """Without adapters."""
    torch.manual_seed(7)
    sizes = {key: value for key, value in CONFIG.items() if "size" in key or key.startswith(("num_", "max_"))}
    model = JinaEmbeddingsV3Model(JinaEmbeddingsV3Config(**sizes, vocab_size=len(xlmr_tokenizer()))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(*parameter.shape) + ("norm" in name.lower() and name.endswith("weight")))
    return model


@cache
def adapter(task: str, layout: str) -> Matrices:
    """One that changes all modules that are adapted. Queries, keys and values share an A, unless PEFT made it."""
    torch.manual_seed(TASKS.index(task) + 10)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model().named_modules():
        if isinstance(module, torch.nn.Embedding):
            matrices[name] = draw(RANK, module.num_embeddings), draw(module.embedding_dim, RANK)
        elif isinstance(module, torch.nn.Linear):
            shared = name.endswith(("k_proj", "v_proj")) and layout != "saved by PEFT"
            a = matrices[f"{name.rsplit('.', 1)[0]}.q_proj"][0] if shared else draw(RANK, module.in_features)
            matrices[name] = a, draw(module.out_features, RANK)
    return matrices


@cache
def merged(task: str | None, layout: str) -> JinaEmbeddingsV3Model:
    """The reference."""
    if task is None:
        return model()
    state = dict(model().state_dict())
    for name, (a, b) in adapter(task, layout).items():
        delta = ALPHA / RANK * (b @ a)
        state[f"{name}.weight"] = state[f"{name}.weight"] + (delta.T if name.startswith("embeddings") else delta)
    other = JinaEmbeddingsV3Model(model().config).eval()
    other.load_state_dict(state)
    return other


def on_the_hub(name: str) -> str:
    for here, there in [("embeddings.LayerNorm", "emb_ln"), ("layers.", "encoder.layers."), ("self_attn.o_proj", "mixer.out_proj"),
                        ("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2")]:  # fmt: skip
        name = name.replace(here, there)
    return f"roberta.{name}"


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of a layer in one."""
    out = dict(tensors)
    for name in tensors:
        if "q_proj" in name:
            out[name.replace("self_attn.q_proj", "mixer.Wqkv")] = torch.cat(
                [out.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            )
    return out


def write(folder: Path, layout: str, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer = xlmr_tokenizer()
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer", model_max_length=130)
    weights = {on_the_hub(name): tensor for name, tensor in joined(model().state_dict()).items() if "position" not in name}
    native = {} if layout == "stacked" else {"architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3"}
    if layout == "stacked":
        weights = stack(weights)
    else:
        for task in TASKS:
            write_folder(folder / task.replace(".", "_").replace("-", "_"), task, layout)
    write_json(folder / "config.json", CONFIG | {"vocab_size": len(tokenizer)} | native | config)
    if native:
        edit_json(folder / "config.json", auto_map=None)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True})
    kinds = ["custom_st.Transformer", "sentence_transformers.models.Pooling", "sentence_transformers.models.Normalize"]
    names = [("transformer", ""), ("pooler", "1_Pooling"), ("normalizer", "2_Normalize")]
    modules = [
        {"idx": i, "name": n, "path": p, "type": kind} for i, ((n, p), kind) in enumerate(zip(names, kinds, strict=True))
    ]
    modules[0]["kwargs"] = ["task"]
    write_json(folder / "modules.json", modules)
    versions = {"sentence_transformers": "3.1.0", "transformers": "4.41.2", "pytorch": "2.3.1+cu121"}
    sentence = {"__version__": versions, "prompts": INSTRUCTIONS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", sentence)


def stack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All adapters beside each weight, as torch's parametrizations are saved."""
    out: dict[str, Tensor] = dict(weights)
    stacked: dict[str, list[list[Tensor]]] = {}
    for task in TASKS:
        matrices = adapter(task, "stacked")
        ups = joined({name: b for name, (_, b) in matrices.items()})
        for name, up in ups.items():
            down = matrices[name.replace("mixer.Wqkv", "self_attn.q_proj")][0]
            pair = [down.T, up.T] if name.startswith("embeddings") else [down, up]
            stacked.setdefault(on_the_hub(name), []).append(pair)
    for name, pairs in stacked.items():
        at = f"{name}.parametrizations.weight"
        out[f"{at}.original"] = out.pop(f"{name}.weight")
        out |= {f"{at}.0.lora_A": torch.stack([a for a, _ in pairs]), f"{at}.0.lora_B": torch.stack([b for _, b in pairs])}
    return out


def write_folder(folder: Path, task: str, layout: str) -> None:
    folder.mkdir()
    write_json(folder / "adapter_config.json", PEFT if layout == "converted" else SAVED_PEFT)
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in adapter(task, layout).items():
        at = on_the_hub(name) if layout == "converted" else f"base_model.model.{name}"
        kinds = ("lora_embedding_A", "lora_embedding_B") if "embeddings" in name else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"{at}.{kind}": tensor.clone() for kind, tensor in zip(kinds, (a, b), strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
