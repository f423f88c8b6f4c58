"""Models as they lie on the hub: config, modules, prompts and tokenizer of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.families import DECODER, ROBERTA, SIZES, T5, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import FAMILIES, e5_mistral, qwen

JSON = dict[str, Any]


TEXTS = [
    "", "a", "The whimbrel flies.", "l'été 雪飛 Ünïcode", "far far away in a year " * 20, "query: birds", "a  b\n\nc <mask> [SEP]",
]  # fmt: skip


WEB = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "


ARCTIC = "Represent this sentence for searching relevant passages: "


IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class Layout:
    """The parts of one model, and the files in which they show."""

    models: tuple[str, ...]
    family: str
    """A name in model/families.py."""
    name: str
    """The prefix of transformers' classes."""
    tokenizer: tuple[JSON, JSON]
    sizes: JSON
    pooling: str
    heads: tuple[Any, ...] = ("Normalize",)
    prompts: dict[str, str] = field(default_factory=dict)
    config: JSON = field(default_factory=dict)
    """Keys of the hub's config.json that differ from those that transformers writes today; None: a key that it lacks."""
    form: str = "Model"
    max_seq_length: int = 64
    flags: JSON = field(default_factory=dict)
    """Flags of the tokenizer that transformers 5 has to be told of, which transformers 4 read in the files."""


OLD = {"gradient_checkpointing": False, "position_embedding_type": "absolute", "use_cache": True, "torch_dtype": "float32"}


OLD_ROPE = {"rope_parameters": None, "layer_types": None, "torch_dtype": "bfloat16", "use_cache": False}


OLD_QWEN = OLD_ROPE | {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28, "rope_scaling": None}


PLACES = {"max_position_embeddings": 66, "vocab_size": 900}


OLD_T5 = {"n_positions": 512, "output_past": True, "is_encoder_decoder": True, "dense_act_fn": None, "is_gated_act": None}


TURNS = {"max_position_embeddings": 300, "vocab_size": 900, "rms_norm_eps": 1e-6}


LAYOUTS = {
    "bge": Layout(
        ("BAAI/bge-base-en-v1.5",), "bert", "Bert", FAMILIES["bert"][1], SIZES | PLACES, "cls",
        config=OLD | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    ),
    "arctic xs": Layout(
        ("Snowflake/snowflake-arctic-embed-xs",), "bert", "Bert", FAMILIES["bert"][1], SIZES | PLACES, "cls",
        prompts={"query": ARCTIC}, config=OLD,
    ),
    "e5": Layout(
        ("intfloat/multilingual-e5-small",), "bert", "Bert", FAMILIES["xlm-roberta"][1], SIZES | PLACES, "mean",
        config=OLD | {"tokenizer_class": "XLMRobertaTokenizer"},
    ),
    "e5 large": Layout(
        ("intfloat/multilingual-e5-base", "intfloat/multilingual-e5-large"), "roberta", "XLMRoberta", FAMILIES["xlm-roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", config=OLD | {"output_past": True},
    ),
    "bge m3": Layout(
        ("BAAI/bge-m3",), "roberta", "XLMRoberta", FAMILIES["xlm-roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 8194}, "cls",
        config=OLD | {"output_past": True}, max_seq_length=8192,
    ),
    "all roberta": Layout(
        ("sentence-transformers/all-roberta-large-v1",), "roberta", "Roberta", FAMILIES["roberta"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", config=OLD, form="ForMaskedLM",
    ),
    "camembert": Layout(
        ("dangvantuan/sentence-camembert-base",), "roberta", "Camembert", FAMILIES["camembert"][1],
        ROBERTA | PLACES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, "mean", heads=(), config=OLD,
    ),
    "distilbert": Layout(
        ("sentence-transformers/multi-qa-distilbert-cos-v1",), "distilbert", "DistilBert", FAMILIES["distilbert"][1],
        {"vocab_size": 900, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 66}, "mean",
        config={"sinusoidal_pos_embds": False, "tie_weights_": True},
    ),
    "all mpnet": Layout(
        ("sentence-transformers/all-mpnet-base-v2",), "mpnet", "MPNet", FAMILIES["mpnet"][1], ROBERTA | PLACES, "mean",
        config={"relative_attention_num_buckets": 32}, form="ForMaskedLM",
    ),
    "gtr t5": Layout(
        tuple(f"sentence-transformers/{kind}-t5-{size}" for kind in ("gtr", "sentence") for size in ("base", "large", "xl", "xxl")),
        "t5", "T5", FAMILIES["mt5"][1], T5 | {"vocab_size": 900}, "mean",
        heads=(("Dense", 32, IDENTITY, {"bias": False}), "Normalize"), config=OLD_T5,
    ),
    "whole flan t5": Layout(
        (), "t5_gated", "T5", FAMILIES["t5"][1], T5 | {"vocab_size": 900, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
        "mean", form="ForConditionalGeneration", config={"dense_act_fn": "gelu_new", "is_gated_act": True},
    ),
    "deberta": Layout(
        (), "deberta", "DebertaV2", FAMILIES["deberta-v2"][1],
        SIZES | {
            "vocab_size": 900, "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
            "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "max_relative_positions": -1,
        }, "mean", form="ForMaskedLM",
    ),
    "gte modernbert": Layout(
        ("Alibaba-NLP/gte-modernbert-base",), "modernbert", "ModernBert", FAMILIES["modernbert"][1],
        SIZES | {"local_attention": 8, "vocab_size": 900}, "cls", heads=(),
        config={"rope_parameters": None, "layer_types": None, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
                "global_attn_every_n_layers": 3, "position_embedding_type": "absolute", "layer_norm_eps": 1e-5,
                "reference_compile": False, "repad_logits_with_grad": False, "sparse_prediction": False},
    ),
    "qwen3": Layout(
        ("Qwen/Qwen3-Embedding-0.6B",), "qwen3", "Qwen3", qwen(suffix=True), DECODER | TURNS | {"head_dim": 16, "rope_theta": 1e6},
        "lasttoken", prompts={"query": WEB.rstrip(" "), "document": ""}, config=OLD_QWEN | {"rope_theta": 1000000},
        form="ForCausalLM", max_seq_length=200,
    ),
    "e5 mistral": Layout(
        ("intfloat/e5-mistral-7b-instruct",), "llama", "Mistral", e5_mistral(), DECODER | TURNS | {"sliding_window": 4096},
        "lasttoken", prompts={"web_search_query": WEB}, config=OLD_ROPE | {"rope_theta": 10000.0, "transformers_version": "4.34.0"},
        max_seq_length=100, flags={"add_bos_token": True, "add_eos_token": True},
    ),
    "bge gemma2": Layout(
        ("BAAI/bge-multilingual-gemma2",), "gemma2", "Gemma2", FAMILIES["gemma2"][1],
        DECODER | TURNS | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}, "lasttoken",
        prompts={"web_search_query": WEB}, config=OLD_ROPE | {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": None},
        max_seq_length=100,
    ),
    "embedding gemma": Layout(
        ("google/embeddinggemma-300m",), "gemma3", "Gemma3Text", FAMILIES["gemma3_text"][1],
        DECODER | TURNS | {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7, "use_bidirectional_attention": True}, "mean",
        heads=(("Dense", 96, IDENTITY, {"bias": False}), ("Dense", 48, IDENTITY, {"bias": False}), "Normalize"),
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "}, max_seq_length=100,
    ),
}  # fmt: skip


def write_layout(folder: Path, layout: Layout) -> None:
    write_model(folder, layout.name, layout.sizes, form=layout.form)
    write_json(folder / "tokenizer.json", layout.tokenizer[0])
    write_json(folder / "tokenizer_config.json", layout.tokenizer[1])
    edit_json(folder / "config.json", **layout.config)
    sentence_layout(
        folder, modes=(layout.pooling,), heads=layout.heads, prompts=layout.prompts or None,
        max_seq_length=layout.max_seq_length,
    )  # fmt: skip
