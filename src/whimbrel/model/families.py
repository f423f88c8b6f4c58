"""Tensor names of each model family.

A part that a family lacks is None; the norms that it names tell where its norms are. {i} is the index of the layer. Names omit
the prefix of a larger model ("bert.", "model."), which `Weights` removes, and ".weight". A name that no two families give to a
part of a kind stands where that part is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast


@dataclass(frozen=True, slots=True)
class WeightNames:
    prefixes: tuple[str, ...]
    """Prefixes of the names in a checkpoint of a larger model."""
    words: str
    qkv: tuple[str, ...]
    """Projection of queries, keys and values: one tensor, or one of each."""
    out: str
    up: tuple[str, ...]
    """First linear layers of the MLP: (up), or if gated (gate, up) or one tensor of both."""
    down: str
    unused: tuple[str, ...]
    """Patterns of tensors that hidden states do not depend on: pre-training heads and tables of constants."""
    up_first: bool = False
    """The joint tensor of gate and up starts with up."""
    qkv_by_key: bool = False
    """The joint tensor of queries, keys and values holds each key head after its queries, and before its value."""
    word_copies: tuple[str, ...] = ()
    """Names of copies of the table of words, any of which may stand for it."""
    positions: str | None = None
    types: str | None = None
    embedding_norm: str | None = None
    projection: str | None = None
    """Linear layer from the width of the tables to that of the model, if they differ."""
    relative: str | None = None
    """Table of biases of relative positions, or of relative positions themselves."""
    q_norm: str | None = None
    k_norm: str | None = None
    whole_norms: bool = False
    """`q_norm` and `k_norm` are LayerNorms with biases over all heads together, not over each head."""
    attention_in: str | None = None
    attention_out: str | None = None
    """Norm before the residual add of the attention."""
    attention_inner_sum: str | None = None
    """Norm after an inner residual add; its result is added to the residual once more."""
    attention_sum: str | None = None
    """Norm after the residual add of the attention."""
    mlp_in: str | None = None
    mlp_out: str | None = None
    mlp_sum: str | None = None
    first_attention_in: bool = True
    """The first layer has `attention_in` too."""
    final: str | None = None
    router: str | None = None
    experts: str | None = None
    """Prefix of the experts."""
    expert_layers: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Layers of a gated expert."""
    correction: str | None = None
    """Tensor that is added to the scores of gated experts for their choice."""
    adapters: WeightNames | None = None
    """Names in adapters' own folders. A part that these adapters leave as it is has an empty name."""
    in_transformers: WeightNames | None = None
    """Names of the layers in transformers' class, which adapters may have, if they are not those of the checkpoint."""
    alternative: WeightNames | None = None
    """Names of a second implementation of the same config."""

    def select(self, has: Callable[[str], bool], ending: str) -> WeightNames:
        """Return these names, or the alternative if the tensor of `down` in the first layer is missing."""
        return self.alternative if self.alternative and not has(f"{self.down.format(i=0)}.{ending}") else self

    def for_layer(self, part: WeightRole, i: int) -> list[str]:
        names = cast(str | tuple[str, ...], getattr(self, part))
        return [name.format(i=i) for name in ((names,) if isinstance(names, str) else names)]


WeightRole: TypeAlias = Literal["words", "types", "qkv", "out", "up", "down"]
"""Parts that adapters can modify."""


_CONSTANTS: Final = r"(.*\.)?embeddings\.(position_ids|token_type_ids)"
_TASK_HEADS: Final = (r"pooler\..*", _CONSTANTS, r"cls\..*", r"lm_head\..*")

_BERT: Final = WeightNames(
    prefixes=("bert.",),
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"encoder.layer.{{i}}.attention.self.{part}" for part in ("query", "key", "value")),
    out="encoder.layer.{i}.attention.output.dense",
    attention_sum="encoder.layer.{i}.attention.output.LayerNorm",
    up=("encoder.layer.{i}.intermediate.dense",),
    down="encoder.layer.{i}.output.dense",
    mlp_sum="encoder.layer.{i}.output.LayerNorm",
    unused=_TASK_HEADS,
)

_DEBERTA: Final = replace(
    _BERT,
    prefixes=("deberta.",),
    positions=None,
    qkv=tuple(f"encoder.layer.{{i}}.attention.self.{part}_proj" for part in ("query", "key", "value")),
    relative="encoder.rel_embeddings",
    unused=(*_TASK_HEADS, r"embeddings\.position_embeddings\..*", r"(lm|mask)_predictions\..*"),
)

_LLAMA: Final = WeightNames(
    prefixes=("model.",),
    words="embed_tokens",
    qkv=tuple(f"layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    out="layers.{i}.self_attn.o_proj",
    attention_in="layers.{i}.input_layernorm",
    up=("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    down="layers.{i}.mlp.down_proj",
    mlp_in="layers.{i}.post_attention_layernorm",
    final="norm",
    unused=(r"lm_head\..*", r"(.*\.)?rotary_emb\..*"),
)

_IN_TRANSFORMERS: Final[Mapping[str, Any]] = {part: getattr(_LLAMA, part) for part in ("qkv", "out", "up", "down")}
"""Names that transformers gives to the layers of models whose code on the Hub joins matrices."""

_NOMIC: Final = WeightNames(
    prefixes=("nomic_bert.", "bert."),
    words="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    qkv=("encoder.layers.{i}.attn.Wqkv",),
    out="encoder.layers.{i}.attn.out_proj",
    attention_sum="encoder.layers.{i}.norm1",
    up=("encoder.layers.{i}.mlp.fc12", "encoder.layers.{i}.mlp.fc11"),
    down="encoder.layers.{i}.mlp.fc2",
    mlp_sum="encoder.layers.{i}.norm2",
    unused=(*_TASK_HEADS, r"rotary_emb\..*"),
)

_JINA_COLBERT: Final = replace(
    _NOMIC,
    prefixes=("roberta.",),
    qkv=("encoder.layers.{i}.mixer.Wqkv",),
    out="encoder.layers.{i}.mixer.out_proj",
    up=("encoder.layers.{i}.mlp.fc1",),
    down="encoder.layers.{i}.mlp.fc2",
    unused=(*_NOMIC.unused, r"linear\.weight"),
)

_IN_JINA_V3: Final = replace(_JINA_COLBERT, **{**_IN_TRANSFORMERS, "up": ("layers.{i}.mlp.fc1",), "down": "layers.{i}.mlp.fc2"})
_JINA_ADAPTERS: Final = replace(
    _JINA_COLBERT,
    prefixes=("roberta.", "base_model.model.", "base_model.model.roberta."),
    qkv=tuple(f"encoder.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    unused=(r"pooler\.dense\..*",),
    alternative=replace(_IN_JINA_V3, unused=(r"pooler\.dense\..*",)),
)
_GTE: Final = replace(
    _BERT,
    prefixes=("new.", "gte."),
    positions=None,
    qkv=("encoder.layer.{i}.attention.qkv_proj",),
    out="encoder.layer.{i}.attention.o_proj",
    attention_sum="encoder.layer.{i}.attn_ln",
    up=("encoder.layer.{i}.mlp.up_gate_proj",),
    up_first=True,
    down="encoder.layer.{i}.mlp.down_proj",
    mlp_sum="encoder.layer.{i}.mlp_ln",
    unused=(*_TASK_HEADS, r"classifier\..*", r"embeddings\.rotary_emb\.\w+"),
)

_JINA_CODE: Final = replace(
    _BERT,
    positions=None,
    q_norm="encoder.layer.{i}.attention.self.layer_norm_q",
    k_norm="encoder.layer.{i}.attention.self.layer_norm_k",
    whole_norms=True,
    attention_inner_sum=_BERT.attention_sum,
    attention_sum="encoder.layer.{i}.layer_norm_1",
    up=("encoder.layer.{i}.mlp.up_gated_layer",),
    up_first=True,
    down="encoder.layer.{i}.mlp.down_layer",
    mlp_sum="encoder.layer.{i}.layer_norm_2",
)

_QWEN3: Final = replace(_LLAMA, q_norm="layers.{i}.self_attn.q_norm", k_norm="layers.{i}.self_attn.k_norm")

_LFM2: Final = replace(
    _LLAMA,
    prefixes=("model.", "lfm2."),
    out="layers.{i}.self_attn.out_proj",
    q_norm="layers.{i}.self_attn.q_layernorm",
    k_norm="layers.{i}.self_attn.k_layernorm",
    attention_in="layers.{i}.operator_norm",
    up=("layers.{i}.feed_forward.w1", "layers.{i}.feed_forward.w3"),
    down="layers.{i}.feed_forward.w2",
    mlp_in="layers.{i}.ffn_norm",
    final="embedding_norm",
)

_GEMMA2: Final = replace(
    _LLAMA,
    attention_out="layers.{i}.post_attention_layernorm",
    mlp_in="layers.{i}.pre_feedforward_layernorm",
    mlp_out="layers.{i}.post_feedforward_layernorm",
)

_T5: Final = WeightNames(
    prefixes=("transformer.",),
    words="shared",
    word_copies=("encoder.embed_tokens",),
    qkv=tuple(f"encoder.block.{{i}}.layer.0.SelfAttention.{part}" for part in "qkv"),
    out="encoder.block.{i}.layer.0.SelfAttention.o",
    relative="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    attention_in="encoder.block.{i}.layer.0.layer_norm",
    up=("encoder.block.{i}.layer.1.DenseReluDense.wi",),
    down="encoder.block.{i}.layer.1.DenseReluDense.wo",
    mlp_in="encoder.block.{i}.layer.1.layer_norm",
    final="encoder.final_layer_norm",
    unused=(r"decoder\..*", r"lm_head\..*", r"classification_head\..*"),
)


def _with_linear_adapters(names: WeightNames) -> WeightNames:
    """Return names of a family whose own adapters are in PEFT's folders and change the linear layers alone."""
    return replace(names, adapters=replace(names, prefixes=("base_model.model.",), words="", unused=()))


FAMILIES: Final[Mapping[str, WeightNames]] = {
    "bert": _BERT,
    "roberta": replace(_BERT, prefixes=("roberta.",)),
    "electra": replace(
        _BERT,
        prefixes=("electra.",),
        projection="embeddings_project",
        unused=(*_TASK_HEADS, r"(discriminator|generator)_\w+\..*"),
    ),
    "distilbert": replace(
        _BERT,
        prefixes=("distilbert.",),
        types=None,
        qkv=tuple(f"transformer.layer.{{i}}.attention.{part}_lin" for part in "qkv"),
        out="transformer.layer.{i}.attention.out_lin",
        attention_sum="transformer.layer.{i}.sa_layer_norm",
        up=("transformer.layer.{i}.ffn.lin1",),
        down="transformer.layer.{i}.ffn.lin2",
        mlp_sum="transformer.layer.{i}.output_layer_norm",
        unused=(_CONSTANTS, r"vocab_\w+\..*", r"vocab_\w+"),
    ),
    "mpnet": replace(
        _BERT,
        prefixes=("mpnet.",),
        types=None,
        qkv=tuple(f"encoder.layer.{{i}}.attention.attn.{part}" for part in "qkv"),
        out="encoder.layer.{i}.attention.attn.o",
        attention_sum="encoder.layer.{i}.attention.LayerNorm",
        relative="encoder.relative_attention_bias",
    ),
    "deberta": _DEBERTA,
    "deberta_placed": replace(_DEBERTA, positions=_BERT.positions),
    "nomic_bert": replace(_NOMIC, in_transformers=replace(_NOMIC, **_IN_TRANSFORMERS)),
    "nomic_bert_ungated": replace(
        _NOMIC,
        up=("encoder.layers.{i}.mlp.fc1",),
        router="encoder.layers.{i}.mlp.router.layer",
        experts="encoder.layers.{i}.mlp.experts",
    ),
    "jina_bert": replace(
        _BERT,
        positions=None,
        up=("encoder.layer.{i}.mlp.gated_layers",),
        down="encoder.layer.{i}.mlp.wo",
        mlp_sum="encoder.layer.{i}.mlp.layernorm",
        alternative=_JINA_CODE,
    ),
    "jina_bert_ungated": replace(_BERT, positions=None),
    "jina_embeddings_v3": replace(
        _JINA_COLBERT, unused=_NOMIC.unused, adapters=_JINA_ADAPTERS, in_transformers=replace(_IN_JINA_V3, unused=_NOMIC.unused)
    ),
    "jina_colbert": _JINA_COLBERT,
    "jina_reranker": replace(_JINA_COLBERT, unused=_NOMIC.unused, positions=_BERT.positions),
    "gte": replace(_GTE, in_transformers=replace(_GTE, **_IN_TRANSFORMERS)),
    "modernbert": WeightNames(
        prefixes=("model.",),
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        qkv=("layers.{i}.attn.Wqkv",),
        out="layers.{i}.attn.Wo",
        attention_in="layers.{i}.attn_norm",
        first_attention_in=False,
        up=("layers.{i}.mlp.Wi",),
        down="layers.{i}.mlp.Wo",
        mlp_in="layers.{i}.mlp_norm",
        final="final_norm",
        unused=(r"head\..*", r"decoder\..*"),
    ),
    "llama": _LLAMA,
    "qwen3": _with_linear_adapters(_QWEN3),
    "eurobert": _with_linear_adapters(replace(_LLAMA, unused=(*_LLAMA.unused, r"dense\..*"))),
    "internlm2": replace(
        _LLAMA,
        words="tok_embeddings",
        qkv=("layers.{i}.attention.wqkv",),
        qkv_by_key=True,
        out="layers.{i}.attention.wo",
        attention_in="layers.{i}.attention_norm",
        up=("layers.{i}.feed_forward.w1", "layers.{i}.feed_forward.w3"),
        down="layers.{i}.feed_forward.w2",
        mlp_in="layers.{i}.ffn_norm",
        unused=(r"output\..*", r"(.*\.)?rotary_emb\..*"),
    ),
    "deepseek": replace(
        _LLAMA, router="layers.{i}.mlp.gate", experts="layers.{i}.mlp", correction="layers.{i}.mlp.gate.e_score_correction_bias"
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        router="layers.{i}.feed_forward.gate",
        experts="layers.{i}.feed_forward",
        expert_layers=("w1", "w3", "w2"),
        correction="layers.{i}.feed_forward.expert_bias",
    ),
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "static": WeightNames(prefixes=(), words="", qkv=(), out="", up=(), down="", unused=()),
    "t5": _T5,
    "t5_gated": replace(_T5, up=tuple(f"encoder.block.{{i}}.layer.1.DenseReluDense.wi_{part}" for part in "01")),
    "gemma3": replace(_GEMMA2, q_norm=_QWEN3.q_norm, k_norm=_QWEN3.k_norm),
}
