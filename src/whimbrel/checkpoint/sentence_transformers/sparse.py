"""Sparse heads of SPLADE and BGE-M3.

In SPLADE, all tokens of a text count, [CLS] and [SEP] too: so in the models' training code (naver/splade) and cards, Sentence
Transformers and Text Embeddings Inference. vLLM leaves those two out, so its numbers are not those of the cards. In BGE-M3, the
tokens count that FlagEmbedding's code selects.

Sources: sentence_transformers/sparse_encoder/modules/splade_pooling.py (6.2) and the heads in
transformers/models/*/modeling_*.py (5.23); of "new", Alibaba-NLP/new-impl on the hub; of BGE-M3, FlagEmbedding's
inference/embedder/encoder_only/m3.py, `_process_token_weights` and `_process_colbert_vecs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from whimbrel.checkpoint.json_file import Fixed, JsonFile, find_file
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.checkpoint.torch_zip import tensor_shapes
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Encoder, Output, TokenizerCard
from whimbrel.types.heads import Activation, Dense, LayerNorm, MlmHead

FILL_MASK: Final[Fixed] = {
    "transformer_task": ("fill-mask",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}}, None),
}
"""Supported settings of a Transformer before SpladePooling."""


@dataclass(frozen=True, slots=True)
class _LanguageHead:
    """Names of a masked-language-model head's tensors."""

    dense: str | None
    """Layer before the decoder, which the norm follows; None: the decoder reads the hidden states."""
    norm: str
    decoder: str
    other_bias: str | None = ""
    """Second name that the decoder's bias may have; None: there is no bias."""
    table: str = "embeddings.word_embeddings.weight"
    activation: Activation | None = "gelu"
    """Activation, or None for the transformer's own."""


_LM_HEAD: Final = _LanguageHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
_CLS: Final = "cls.predictions"
_HEADS: Final[Mapping[str, _LanguageHead]] = {
    "bert": _LanguageHead(
        f"{_CLS}.transform.dense", f"{_CLS}.transform.LayerNorm", f"{_CLS}.decoder", f"{_CLS}.bias", activation=None
    ),
    "roberta": _LM_HEAD,
    "mpnet": _LM_HEAD,
    "electra": _LanguageHead("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    "distilbert": _LanguageHead("vocab_transform", "vocab_layer_norm", "vocab_projector", activation=None),
    "gte": _LanguageHead("lm_head.dense", "lm_head.norm", "lm_head.decoder", activation=None),
    "modernbert": _LanguageHead("head.dense", "head.norm", "decoder", table="embeddings.tok_embeddings.weight"),
    "lfm2": _LanguageHead(None, "", "lm_head", other_bias=None, table="embed_tokens.weight"),
}


def read_splade(config: JsonFile, encoder: Encoder, pooling: JsonFile, max_entries: int) -> Output:
    """Return SPLADE's output. config.json decides the head. `pooling` is SpladePooling's config, which may be empty."""
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    pooling.reject_unknown_keys(sizes, {"pooling_strategy", "activation_function", "chunk_size"})
    for key in sizes:
        pooling.require_values({key: (encoder.vocab_size, None)})
    if (names := _HEADS.get(encoder.family)) is None or encoder.causal:
        raise config.error("the language-modelling head of this architecture is not supported.", "architectures")
    biases = () if names.other_bias is None else tuple(filter(None, (f"{names.decoder}.bias", names.other_bias)))
    strategies: Mapping[str, Literal["max", "sum"]] = {"max": "max", "sum": "sum"}
    return Output(
        encoder.vocab_size,
        rows="vocabulary",
        token_head=_transform(config, encoder, names),
        vocabulary=MlmHead(
            weight=f"{names.decoder}.weight",
            table=names.table if config.get("tie_word_embeddings", bool, True) else None,
            biases=biases if encoder.family != "modernbert" or config.get("decoder_bias", bool, True) else (),
            in_features=encoder.embedding_size,
            out_features=encoder.vocab_size,
            strategy=pooling.choice("pooling_strategy", strategies, "max"),
            num_logs=pooling.choice("activation_function", {"relu": 1, "log1p_relu": 2}, "relu"),
        ),
        max_entries=max_entries,
    )


def _transform(config: JsonFile, encoder: Encoder, names: _LanguageHead) -> tuple[()] | tuple[Dense, LayerNorm]:
    if names.dense is None:
        return ()
    bias, activation = True, names.activation or encoder.activation
    if encoder.family == "modernbert":  # whose config alone states biases
        config.require_values({"classifier_activation": ("gelu", None)})
        bias = config.get("classifier_bias", bool, False)
    return (
        Dense(None, names.dense, encoder.hidden_size, encoder.embedding_size, bias=bias, activation=activation),
        LayerNorm(None, names.norm, encoder.embedding_size, encoder.norm_eps, encoder.norm_bias),
    )


_SPARSE, _COLBERT = "sparse_linear.pt", "colbert_linear.pt"
_NOT_LEXICAL: Final = ("cls", "eos", "pad", "unk")
"""Roles of tokens without a weight."""
_FRAME: Final = ("cls", "eos")
"""Roles of the tokens around a text."""


def read_m3(root: Path, encoder: Encoder, tokenizer: TokenizerCard) -> dict[Literal["sparse", "multi_vector"], Output]:
    """Return the outputs of BGE-M3 whose weights are in separate files."""
    outputs: dict[Literal["sparse", "multi_vector"], Output] = {}
    if (root / _SPARSE).exists():
        head = Dense(_SPARSE, "", encoder.hidden_size, _rows(root, _SPARSE), bias=True, activation="identity")
        if head.out_features != 1:
            raise CheckpointError(f"has {head.out_features} rows, must have 1.", file=_SPARSE, key="weight")
        ids, roles = read_vocabulary(root, tokenizer, encoder.vocab_size)
        ids_of = {role: ids[token] for role in _NOT_LEXICAL if (token := roles.get(role, "")) in ids}
        frame_ids = tuple(ids_of[role] for role in _FRAME if role in ids_of)
        skip_ids = tuple(ids_of.values())
        outputs["sparse"] = Output(1, rows="entry", head=(head,), activation="relu", skip_ids=skip_ids, frame_ids=frame_ids)
    if (root / _COLBERT).exists():
        head = Dense(_COLBERT, "", encoder.hidden_size, _rows(root, _COLBERT), bias=True, activation="identity")
        outputs["multi_vector"] = Output(
            head.out_features, rows="token", head=(head,), activation="normalize", skip_first=1, similarity="meanmaxsim"
        )
    return outputs


def _rows(root: Path, file: str) -> int:
    """Return the rows of the weight in a .pt file, which no config states."""
    shape = tensor_shapes(find_file(root, file), file).get("weight", ())
    if len(shape) != 2 or shape[0] < 1:
        raise CheckpointError("has no weight of two dimensions.", file=file, key="weight")
    return shape[0]
