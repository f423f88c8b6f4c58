"""Files as models on the hub have them, every key: they must be read. Sizes are small; the numbers are compared elsewhere.

Of each file only what its kind does not have anyway is listed. Where a model's own files could not be had, those of models
saved from it were; the others are from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpoints.files import write_json
from checkpoints.sentence_layout import OLD
from checkpoints.tokenizer_files import FAMILIES, qwen
from whimbrel.checkpoint.reader import read_card
from whimbrel.types.choices import PoolingOption

JSON = dict[str, Any]

WIDTH = 48
SIZES: JSON = {
    "hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 900,
}  # fmt: skip
ONE_LABEL: JSON = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
BERT: JSON = SIZES | {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "model_type": "bert", "pad_token_id": 0, "position_embedding_type": "absolute", "torch_dtype": "float32",
    "transformers_version": "4.28.1", "type_vocab_size": 2, "use_cache": True,
}  # fmt: skip
GOOGLE: JSON = {
    "directionality": "bidi", "gradient_checkpointing": False, "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
ROBERTA: JSON = BERT | {
    "architectures": ["RobertaModel"], "model_type": "roberta", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "type_vocab_size": 1,
}  # fmt: skip
XLMR: JSON = ROBERTA | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "output_past": True}
DISTILBERT: JSON = {
    "activation": "gelu", "architectures": ["DistilBertModel"], "attention_dropout": 0.1, "dim": WIDTH, "dropout": 0.1,
    "hidden_dim": 96, "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 4,
    "n_layers": 6, "output_hidden_states": True, "output_past": True, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 900,
}  # fmt: skip
MODERNBERT: JSON = SIZES | {
    "architectures": ["ModernBertModel"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
    "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean",
    "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
    "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-5, "pad_token_id": 1,
    "position_embedding_type": "absolute", "reference_compile": True, "repad_logits_with_grad": False, "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float16", "transformers_version": "4.48.0",
}  # fmt: skip
NEW: JSON = SIZES | {
    "architectures": ["NewModel"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": None, "hidden_act": "gelu",
    "auto_map": {"AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel"}, "hidden_dropout_prob": 0.1,
    **ONE_LABEL, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192, "model_type": "new",
    "pack_qkv": True, "pad_token_id": 0, "position_embedding_type": "rope", "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000, "torch_dtype": "float32", "transformers_version": "4.39.1", "type_vocab_size": 2,
    "unpad_inputs": True, "use_memory_efficient_attention": True,
}  # fmt: skip
MISTRAL: JSON = SIZES | {
    "architectures": ["MistralModel"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 32768, "model_type": "mistral", "num_key_value_heads": 2,
    "pad_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.34.0", "use_cache": False,
}  # fmt: skip
QWEN2: JSON = MISTRAL | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151643,
    "pad_token_id": None, "max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": False, "is_causal": False,  # which copies do not have
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    },
}  # fmt: skip
NEMOTRON: JSON = MISTRAL | {
    "_name_or_path": "nvidia/llama-3.2-nv-embedqa-1b-v2", "architectures": ["LlamaBidirectionalModel"], "attention_bias": False,
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    },
    "head_dim": 12, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama_bidirec", "pooling": "avg",
    "pretraining_tp": 1, "rope_theta": 500000.0, "sliding_window": None,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
GEMMA2: JSON = MISTRAL | {
    "architectures": ["Gemma2Model"], "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "model_type": "gemma2", "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "sliding_window_size": 4096,
}  # fmt: skip
GEMMA3: JSON = MISTRAL | {
    "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False, "attn_logit_softcapping": None,
    "dtype": "float32", "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "max_position_embeddings": 2048, "model_type": "gemma3_text",
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True,
}  # fmt: skip
TINYBERT: JSON = {"cell": {}, "emb_size": 312, "pre_trained": "", "structure": [], "training": ""}
NO_ADAPTERS: JSON = {"adapters": {"adapters": {}, "config_map": {}, "fusion_config_map": {}, "fusions": {}}}

WORDPIECE: JSON = {
    "do_basic_tokenize": True, "name_or_path": "x", "never_split": None, "special_tokens_map_file": "/root/.cache/x",
}  # fmt: skip
BATCHES: JSON = {
    "max_length": 8000, "pad_to_multiple_of": None, "pad_token_type_id": 0, "padding_side": "right", "stride": 0,
    "truncation_side": "right", "truncation_strategy": "longest_first",
}  # fmt: skip
CODE: JSON = {"model_args": {"trust_remote_code": True}}


@dataclass(frozen=True)
class Files:
    """The files of a model, and the settings that are read from them."""

    config: JSON
    tokenizer: str
    pooling: str | None = None
    """In modules.json; None: it has none."""
    max_length: int = 512
    dense: int | None = None
    tokenizer_config: JSON = field(default_factory=dict)
    transformer: JSON = field(default_factory=dict)
    files: JSON = field(default_factory=dict)
    stated: PoolingOption | None = None
    """Pooling that the user has to state, because no file does."""


PUBLISHED = {
    "sentence-transformers/LaBSE": Files(BERT | GOOGLE, "bert", "cls", 256, WIDTH, WORDPIECE | {"full_tokenizer_file": None}),
    "sentence-transformers/distiluse-base-multilingual-cased-v2": Files(DISTILBERT, "distilbert", "mean", 128, 32),
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": Files(XLMR, "xlm-roberta", "mean", 128),
    "BAAI/bge-large-zh-v1.5": Files(BERT | GOOGLE | ONE_LABEL | {"output_past": True, "bos_token_id": 0}, "bert", "cls"),
    "BAAI/bge-multilingual-gemma2": Files(GEMMA2, "gemma2", "lasttoken", 8192),
    "intfloat/multilingual-e5-large-instruct": Files(XLMR | {"export_model_type": "transformer"}, "xlm-roberta", "mean"),
    "intfloat/e5-mistral-7b-instruct": Files(MISTRAL, "mistral", "lasttoken", 4096),
    "Alibaba-NLP/gte-large-en-v1.5": Files(NEW, "bert", "cls", 8192, None, BATCHES | {"model_max_length": 32768}),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": Files(
        QWEN2, "qwen2", "lasttoken", 32768, None,
        {
            "add_eos_token": True, "add_prefix_space": False, "bos_token": None, "errors": "replace",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]},
        },
    ),
    "NovaSearch/stella_en_400M_v5": Files(NEW | {"rope_theta": 160000}, "bert", "mean", 512, 32),
    "nomic-ai/modernbert-embed-base": Files(MODERNBERT, "modernbert", "mean", 8192, None, {"extra_special_tokens": {}}),
    "jinaai/jina-embeddings-v2-base-en": Files(
        BERT | {
            "_name_or_path": "jinaai/jina-bert-implementation", "architectures": ["JinaBertForMaskedLM"], "emb_pooler": "mean",
            "attn_implementation": "torch", "feed_forward_type": "geglu", "model_max_length": 8192,
            "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
            "max_position_embeddings": 8192, "position_embedding_type": "alibi",
        },
        "bert", "mean", 8192, None, WORDPIECE | {"model_max_length": 2147483648}, CODE,
    ),
    "google/embeddinggemma-300m": Files(GEMMA3, "gemma3_text", "mean", 2048, 96),
    "nvidia/llama-3.2-nv-embedqa-1b-v2": Files(NEMOTRON, "llama", None, 131072),
    "allenai/specter2_base": Files(BERT | NO_ADAPTERS, "bert", None, 512, None, WORDPIECE, stated="cls"),
    "facebook/contriever": Files(BERT | {"architectures": ["Contriever"]}, "bert", None, 512, stated="mean"),
    "nreimers/TinyBERT_L-4_H-312_v2": Files(BERT | TINYBERT, "bert", None, 512, stated="mean"),
    "jhgan/ko-sroberta-multitask": Files(
        ROBERTA | {"tokenizer_class": "BertTokenizer"}, "bert", "mean", 128, None, {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_what_is_published_is_read(model: str, tmp_path: Path) -> None:
    made = PUBLISHED[model]
    content, stated = qwen(suffix=False) if made.tokenizer == "qwen2" else FAMILIES[made.tokenizer][1]
    write_json(tmp_path / "config.json", made.config)
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", stated | {"model_max_length": made.max_length} | made.tokenizer_config)
    if made.pooling is not None:
        write_modules(tmp_path, made, made.pooling)
    card = read_card(tmp_path, model, pooling=made.stated)
    assert card.max_length == made.max_length
    assert card.dense.modes == (made.pooling or made.stated or "mean",)
    assert card.dense.width == (made.dense or WIDTH)


def test_jina_reranker_v1_does_not_say_that_it_has_one_label(tmp_path: Path) -> None:
    content, stated = FAMILIES["roberta"][1]
    config = PUBLISHED["jinaai/jina-embeddings-v2-base-en"].config
    write_json(tmp_path / "config.json", config | {"architectures": ["JinaBertForSequenceClassification"]})
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", stated)
    card = read_card(tmp_path, "jinaai/jina-reranker-v1-turbo-en")
    assert (card.labels, card.outputs["scores"].activation) == (("LABEL_0",), "sigmoid")


def write_modules(folder: Path, made: Files, pooling: str) -> None:
    kinds = ["Transformer", "Pooling", *(["Dense"] if made.dense else []), "Normalize"]
    rows = [(kind, "" if kind == "Transformer" else f"{i}_{kind}") for i, kind in enumerate(kinds)]
    modules = [{"idx": i, "name": str(i), "path": path, "type": OLD + kind} for i, (kind, path) in enumerate(rows)]
    flags = {f"pooling_mode_{mode}_tokens": mode == pooling for mode in ("mean", "max", "mean_sqrt_len", "weightedmean")}
    flags |= {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_lasttoken": pooling == "lasttoken"}
    activation = "torch.nn.modules.activation.Tanh" if made.dense == WIDTH else "torch.nn.modules.linear.Identity"
    dense = {"in_features": WIDTH, "out_features": made.dense, "bias": True, "activation_function": activation}
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": WIDTH, "include_prompt": True} | flags)
    if made.dense:
        write_json(folder / "2_Dense/config.json", dense)
    settings = {"max_seq_length": made.max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", settings | made.transformer)
    sentence = {"__version__": {"sentence_transformers": "3.2.0", "transformers": "4.45.2", "pytorch": "2.4.1+cu121"}}
    said = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": None}
    write_json(folder / "config_sentence_transformers.json", sentence | said)
