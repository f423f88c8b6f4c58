"""Checkpoint files -> Card: what the checkpoint says about itself, and nothing that it does not.

Reads both layouts of Sentence Transformers (up to 5.3, and 5.4 and later). Every key must be known: it is used, or it is
known not to change a vector, or it must have the one value that is supported. Anything else raises `CheckpointError` with
file and key. Knows nothing of devices, options or weights' values.

Sources of the formats: sentence_transformers/base/modules/transformer.py, .../modules/pooling.py, .../dense.py (6.2) and
transformers' configuration files (5.x).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.types import Task

JSON: TypeAlias = dict[str, Any]
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "identity"]
PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """The transformer of the BERT family, as config.json describes it."""

    architecture: str
    prefix: str
    """What the names of the weights may begin with in a checkpoint of a larger model, e.g. "bert."."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    """Tokens for which there is a position embedding."""
    position_offset: int
    """Row of the position table for the first token: 0, or pad id + 1 in the RoBERTa family."""
    pad_id: int
    type_vocab_size: int
    layer_norm_eps: float
    activation: Activation


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the vectors of the tokens become one: modes are concatenated in this order."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(x @ weight.T + bias), plus x itself (or its projection) with `residual`."""

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over the pooled vector, eps 1e-5."""

    path: str
    dimension: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Division by the Euclidean norm."""


Head: TypeAlias = Dense | LayerNorm | Normalize


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """What the tokenizer's files say beyond tokenizer.json itself."""

    truncate: Literal["right", "left"]
    normalizer: JSON | None
    """Replaces tokenizer.json's normalizer where the other files overrule it; None: leave it."""


@dataclass(frozen=True, slots=True)
class Card:
    """Everything the checkpoint says that changes a vector."""

    name: str
    task: Task
    encoder: Encoder
    pooling: Pooling
    head: tuple[Head, ...]
    """Applied after pooling, in order; without a final Normalize, which is `normalize`."""
    normalize: bool
    dimension: int
    max_length: int
    """Tokens per text, special tokens included."""
    tokenizer: TokenizerCard
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt_name: str | None = None
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    similarity: str | None = None

    def prompt_text(self, name: str) -> str:
        """The text of the prompt called `name`. Raises InvalidRequest with the names there are."""
        if name in self.prompts:
            return self.prompts[name]
        names = ", ".join(sorted(self.prompts)) if self.prompts else "none"
        raise InvalidRequest(f"no prompt {name!r}; this model's prompts: {names}.", param="prompt_name")


# Keys that never change a vector: training, generation, bookkeeping.
_INERT_CONFIG: Final = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path architectures attention_probs_dropout_prob attn_implementation
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id directionality diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout_prob id2label initializer_range label2id language
    length_penalty max_length min_length model_type name no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache use_return_dict xla_device
""".split()
)

# Keys that would change a vector, with the only values that are supported.
_FIXED_CONFIG: Final[Mapping[str, tuple[object, ...]]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "add_pooling_layer": (True, False, None),
}

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# architecture -> (model_type, prefix of the encoder's weights, positions start after the padding id)
_ARCHITECTURES: Final[Mapping[str, tuple[str, str, bool]]] = {
    "BertModel": ("bert", "bert.", False),
    "BertForMaskedLM": ("bert", "bert.", False),
    "BertForPreTraining": ("bert", "bert.", False),
    "RobertaModel": ("roberta", "roberta.", True),
    "RobertaForMaskedLM": ("roberta", "roberta.", True),
    "XLMRobertaModel": ("xlm-roberta", "roberta.", True),
    "XLMRobertaForMaskedLM": ("xlm-roberta", "roberta.", True),
}

_DENSE_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}

_LEGACY_POOLING: Final[Mapping[str, PoolingMode]] = {  # in the order in which the modes are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES: Final = tuple(_LEGACY_POOLING.values())

_MODULES: Final[Mapping[str, str]] = {
    "sentence_transformers.models.Transformer": "Transformer",
    "sentence_transformers.models.Pooling": "Pooling",
    "sentence_transformers.models.Dense": "Dense",
    "sentence_transformers.models.LayerNorm": "LayerNorm",
    "sentence_transformers.models.Normalize": "Normalize",
    "sentence_transformers.models.Dropout": "Dropout",
    "sentence_transformers.base.modules.transformer.Transformer": "Transformer",
    "sentence_transformers.base.modules.dense.Dense": "Dense",
    "sentence_transformers.base.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "Pooling",
    "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm": "LayerNorm",
    "sentence_transformers.sentence_transformer.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.sentence_transformer.modules.dropout.Dropout": "Dropout",
}

_TRANSFORMER_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

_INERT_TOKENIZER: Final = frozenset(
    """
    add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens backend bos_token
    chat_template clean_up_tokenization_spaces cls_token do_basic_tokenize eos_token errors extra_special_tokens
    full_tokenizer_file is_local legacy local_files_only mask_token max_len max_length model_input_names
    model_specific_special_tokens name_or_path never_split pad_to_multiple_of pad_token pad_token_type_id padding_side
    processor_class return_special_tokens_mask sep_token
    sp_model_kwargs special_tokens_map_file stride tokenizer_class tokenizer_file trim_offsets truncation
    truncation_strategy unk_token use_fast vocab_file vocab_size
""".split()
)
_BERT_TOKENIZERS: Final = ("BertTokenizer", "BertTokenizerFast")


def read_card(folder: Path, name: str, *, pooling: PoolingMode | None = None) -> Card:
    """Read the card of the checkpoint in `folder`. `name` is what the model is called.

    `pooling` is what the user says of a checkpoint without modules.json, whose pooling is not written anywhere.
    Raises CheckpointError for anything missing, malformed or not supported.
    """
    config = _read_json(folder, "config.json")
    encoder = _encoder(config)
    spec = _modules(folder, encoder.hidden_size, pooling)
    transformer_file, transformer = _transformer_config(folder)
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    st_config = _sentence_transformers_config(folder)
    matryoshka_dimensions = tuple(_get(config, "config.json", "matryoshka_dimensions", list, []))
    return Card(
        name=name,
        task="embed",
        encoder=encoder,
        pooling=spec.pooling,
        head=spec.head,
        normalize=spec.normalize,
        dimension=spec.dimension,
        max_length=_max_length(encoder, transformer_file, transformer, tokenizer_config),
        tokenizer=_tokenizer(folder, tokenizer_config, lowercase=bool(transformer.get("do_lower_case", False))),
        prompts=st_config.get("prompts") or {},
        default_prompt_name=st_config.get("default_prompt_name"),
        matryoshka=bool(config.get("is_matryoshka", False)) or bool(matryoshka_dimensions),
        matryoshka_dimensions=matryoshka_dimensions,
        similarity=st_config.get("similarity_fn_name"),
    )


def _read_json(folder: Path, file: str) -> JSON:
    value = _parse_json(folder, file)
    if not isinstance(value, dict):
        raise CheckpointError(f"must be a JSON object, is {type(value).__name__}.", file=file)
    return cast(JSON, value)


def _parse_json(folder: Path, file: str) -> object:
    try:
        return json.loads((folder / file).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"not found in {folder}; is this a checkpoint's folder?", file=file) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({error}).", file=file) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}.", file=file) from None


_REQUIRED: Final = object()


def _get(data: JSON, file: str, key: str, kind: type | tuple[type, ...], default: object = _REQUIRED) -> Any:
    """data[key], checked to be of `kind`; a bool is no int. A missing key or null gives `default`, if there is one."""
    value = data.get(key)
    if value is None:
        if default is _REQUIRED:
            raise CheckpointError("is missing.", file=file, key=key)
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise CheckpointError(f"must be {wanted}, is {value!r}.", file=file, key=key)
    return value


def _positive(data: JSON, file: str, key: str, default: object = _REQUIRED) -> int:
    value = _get(data, file, key, int, default)
    if value <= 0:
        raise CheckpointError(f"must be positive, is {value}.", file=file, key=key)
    return value


def _choice(table: Mapping[str, Any], value: object, *, file: str, key: str) -> Any:
    if isinstance(value, str) and value in table:
        return table[value]
    raise CheckpointError(f"{value!r} is not supported; supported: {', '.join(table)}.", file=file, key=key)


def _refuse_unknown(data: JSON, known: frozenset[str] | set[str], *, file: str) -> None:
    for key in data:
        if key not in known:
            raise CheckpointError(
                f"this key (value {_short(data[key])}) is not known to Whimbrel, and may change the vectors.",
                file=file,
                key=key,
            )


def _refuse_other(data: JSON, fixed: Mapping[str, tuple[object, ...]], *, file: str) -> None:
    for key, allowed in fixed.items():
        if key in data and data[key] not in allowed:
            wanted = " or ".join(repr(value) for value in allowed if value is not None)
            raise CheckpointError(f"{_short(data[key])} is not supported; must be {wanted}.", file=file, key=key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _encoder(config: JSON) -> Encoder:
    file = "config.json"
    architectures = _get(config, file, "architectures", list)
    if len(architectures) != 1:
        raise CheckpointError(f"must name one architecture, is {architectures!r}.", file=file, key="architectures")
    model_type, prefix, after_padding = _choice(_ARCHITECTURES, architectures[0], file=file, key="architectures")
    if config.get("model_type") != model_type:
        raise CheckpointError(
            f"{config.get('model_type')!r} does not go with architecture {architectures[0]}; must be {model_type!r}.",
            file=file,
            key="model_type",
        )
    used = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "pad_token_id", "type_vocab_size", "layer_norm_eps", "is_matryoshka",
        "matryoshka_dimensions",
    }  # fmt: skip
    _refuse_unknown(config, used | _FIXED_CONFIG.keys() | _INERT_CONFIG, file=file)
    _refuse_other(config, _FIXED_CONFIG, file=file)
    hidden_size, num_heads = _positive(config, file, "hidden_size"), _positive(config, file, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"{num_heads} does not divide hidden_size {hidden_size}.", file=file, key="num_attention_heads")
    vocab_size = _positive(config, file, "vocab_size")
    pad_id = _get(config, file, "pad_token_id", int) if after_padding else _get(config, file, "pad_token_id", int, 0)
    if not 0 <= pad_id < vocab_size:
        raise CheckpointError(f"{pad_id} is outside the vocabulary of {vocab_size}.", file=file, key="pad_token_id")
    offset = pad_id + 1 if after_padding else 0
    max_positions = _positive(config, file, "max_position_embeddings") - offset
    if max_positions <= 0:
        raise CheckpointError(f"leaves no position after pad_token_id {pad_id}.", file=file, key="max_position_embeddings")
    return Encoder(
        architecture=architectures[0],
        prefix=prefix,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, file, "intermediate_size"),
        num_layers=_positive(config, file, "num_hidden_layers"),
        num_heads=num_heads,
        max_positions=max_positions,
        position_offset=offset,
        pad_id=pad_id,
        type_vocab_size=_positive(config, file, "type_vocab_size", 2),
        layer_norm_eps=float(_get(config, file, "layer_norm_eps", (int, float), 1e-12)),
        activation=_choice(_ACTIVATIONS, config.get("hidden_act", "gelu"), file=file, key="hidden_act"),
    )


@dataclass(slots=True)
class _Pipeline:
    """modules.json while it is being read."""

    dimension: int
    pooling: Pooling
    head: tuple[Head, ...] = ()
    normalize: bool = False


def _modules(folder: Path, hidden_size: int, pooling: PoolingMode | None) -> _Pipeline:
    file = "modules.json"
    if not (folder / file).exists():
        if pooling is None:
            raise CheckpointError(
                "not found, so nothing says how tokens are pooled; say it with --pooling (e.g. --pooling mean).", file=file
            )
        return _Pipeline(hidden_size, Pooling((pooling,), include_prompt=True))
    if pooling is not None:
        raise CheckpointError("says how tokens are pooled; leave out --pooling.", file=file)
    rows = _module_rows(folder)
    kinds = [kind for kind, _ in rows]
    if kinds[:2] != ["Transformer", "Pooling"] or "Transformer" in kinds[1:] or "Pooling" in kinds[2:]:
        raise CheckpointError(f"must begin with one Transformer and one Pooling, is {kinds}.", file=file)
    if rows[0][1] not in ("", "."):
        raise CheckpointError(f"the Transformer must lie at the top, not in {rows[0][1]!r}.", file=file, key="path")
    pipeline = _pooling(folder, rows[1][1], hidden_size)
    head = list[Head]()
    for kind, path in rows[2:]:
        head.append(_HEADS[kind](folder, path, pipeline.dimension))
        if isinstance(head[-1], Dense):
            pipeline.dimension = head[-1].out_features
    while head and isinstance(head[-1], Normalize):
        pipeline.normalize = True
        head.pop()
    pipeline.head = tuple(head)
    return pipeline


def _module_rows(folder: Path) -> list[tuple[str, str]]:
    file = "modules.json"
    rows = _parse_json(folder, file)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast(list[object], rows)):
        raise CheckpointError("must be a list of objects.", file=file)
    found: list[tuple[str, str]] = []
    for row in cast(list[JSON], rows):
        _refuse_unknown(row, {"idx", "name", "path", "type", "kwargs"}, file=file)
        _refuse_other(row, {"kwargs": ([], {}, None)}, file=file)
        path = _get(row, file, "path", str)
        if path.startswith(("/", "\\")) or ".." in Path(path).parts:
            raise CheckpointError(f"{path!r} leads out of the checkpoint's folder.", file=file, key="path")
        kind = _choice(_MODULES, row.get("type"), file=file, key="type")
        if kind != "Dropout":  # does nothing when a model is used
            found.append((kind, path))
    return found


def _pooling(folder: Path, path: str, hidden_size: int) -> _Pipeline:
    file = f"{path}/config.json"
    config = _read_json(folder, file)
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    _refuse_unknown(config, sizes | {"pooling_mode", "include_prompt"} | _LEGACY_POOLING.keys(), file=file)
    size_key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    if (size := _positive(config, file, size_key)) != hidden_size:
        raise CheckpointError(f"{size} is not the model's hidden_size {hidden_size}.", file=file, key=size_key)
    if "pooling_mode" in config:
        given = config["pooling_mode"]
        names = cast(list[object], given if isinstance(given, list) else [given])
        table = {mode: mode for mode in POOLING_MODES}
        modes: tuple[PoolingMode, ...] = tuple(_choice(table, name, file=file, key="pooling_mode") for name in names)
    else:
        modes = tuple(mode for key, mode in _LEGACY_POOLING.items() if _get(config, file, key, bool, False))
    if not modes:
        raise CheckpointError("names no pooling mode.", file=file, key="pooling_mode")
    include_prompt = _get(config, file, "include_prompt", bool, True)
    return _Pipeline(len(modes) * size, Pooling(modes, include_prompt))


def _refuse_token_level(config: JSON, file: str) -> None:
    names = ("sentence_embedding", None)
    _refuse_other(config, {"module_input_name": names, "module_output_name": names}, file=file)


def _dense(folder: Path, path: str, size: int) -> Dense:
    file = f"{path}/config.json"
    config = _read_json(folder, file)
    used = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
    _refuse_unknown(config, used | {"module_input_name", "module_output_name"}, file=file)
    _refuse_token_level(config, file)
    if (in_features := _positive(config, file, "in_features")) != size:
        raise CheckpointError(f"{in_features} is not the width {size} of what comes before.", file=file, key="in_features")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    return Dense(
        path=path,
        in_features=in_features,
        out_features=_positive(config, file, "out_features"),
        bias=_get(config, file, "bias", bool, True),
        activation=_choice(_DENSE_ACTIVATIONS, activation, file=file, key="activation_function"),
        residual=_get(config, file, "use_residual", bool, False),
    )


def _layer_norm(folder: Path, path: str, size: int) -> LayerNorm:
    file = f"{path}/config.json"
    config = _read_json(folder, file)
    _refuse_unknown(config, {"dimension"}, file=file)
    if (dimension := _positive(config, file, "dimension")) != size:
        raise CheckpointError(f"{dimension} is not the width {size} of what comes before.", file=file, key="dimension")
    return LayerNorm(path, dimension)


def _normalize(folder: Path, path: str, _: int) -> Normalize:
    file = f"{path}/config.json"
    if (folder / file).exists():
        config = _read_json(folder, file)
        _refuse_unknown(config, {"module_input_name", "module_output_name"}, file=file)
        _refuse_token_level(config, file)
    return Normalize()


_HEADS: Final[Mapping[str, Callable[[Path, str, int], Head]]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
}


def _transformer_config(folder: Path) -> tuple[str, JSON]:
    file = next((name for name in _TRANSFORMER_FILES if (folder / name).exists()), None)
    if file is None:
        return _TRANSFORMER_FILES[0], {}
    config = _read_json(folder, file)
    text_only = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    empty: tuple[object, ...] = ({}, None)
    fixed: dict[str, tuple[object, ...]] = {
        "transformer_task": ("feature-extraction", None),
        "modality_config": (text_only, None),
        "module_output_name": ("token_embeddings", None),
        "processing_kwargs": empty,
        "model_args": empty,
        "config_args": empty,
        "tokenizer_args": empty,
        "query_length": (None,),
        "document_length": (None,),
        "query_expansion": (None,),
    }
    _refuse_unknown(config, fixed.keys() | {"max_seq_length", "do_lower_case", "unpad_inputs"}, file=file)
    _refuse_other(config, fixed, file=file)
    _get(config, file, "do_lower_case", bool, False)
    return file, config


def _sentence_transformers_config(folder: Path) -> JSON:
    file = "config_sentence_transformers.json"
    if not (folder / file).exists():
        return {}
    config = _read_json(folder, file)
    used = {"prompts", "default_prompt_name", "similarity_fn_name"}
    _refuse_unknown(config, used | {"__version__", "model_type", "requirements"}, file=file)
    _refuse_other(config, {"model_type": ("SentenceTransformer", None)}, file=file)
    prompts = _get(config, file, "prompts", dict, {})
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise CheckpointError(f"prompt {name!r} must be a string, is {text!r}.", file=file, key="prompts")
    default = _get(config, file, "default_prompt_name", str, None)
    if default is not None and default not in prompts:
        raise CheckpointError(f"{default!r} is not among the prompts {list(prompts)}.", file=file, key="default_prompt_name")
    similarities = {name: name for name in ("cosine", "dot", "euclidean", "manhattan")}
    if config.get("similarity_fn_name") is not None:
        _choice(similarities, config["similarity_fn_name"], file=file, key="similarity_fn_name")
    return config


def _max_length(encoder: Encoder, file: str, transformer: JSON, tokenizer_config: JSON) -> int:
    """Sentence Transformers' rule, and never more than there are positions for."""
    if transformer.get("max_seq_length") is not None:
        stated = _positive(transformer, file, "max_seq_length")
    else:
        stated = int(_get(tokenizer_config, "tokenizer_config.json", "model_max_length", (int, float), encoder.max_positions))
    if stated <= 0:
        raise CheckpointError(f"must be positive, is {stated}.", file="tokenizer_config.json", key="model_max_length")
    return min(stated, encoder.max_positions)


def _tokenizer(folder: Path, config: JSON, *, lowercase: bool) -> TokenizerCard:
    file = "tokenizer_config.json"
    bert = {"do_lower_case", "strip_accents", "tokenize_chinese_chars"}
    _refuse_unknown(config, bert | {"model_max_length", "truncation_side"} | _INERT_TOKENIZER, file=file)
    sides: dict[str, Any] = {"right": "right", "left": "left"}
    normalizer = _read_json(folder, "tokenizer.json").get("normalizer")
    overruled = _overrule(normalizer, config)
    if lowercase and not _lowercases(overruled):
        steps = [{"type": "Lowercase"}, *([overruled] if overruled else [])]
        overruled = {"type": "Sequence", "normalizers": steps}
    return TokenizerCard(
        truncate=_choice(sides, config.get("truncation_side", "right"), file=file, key="truncation_side"),
        normalizer=None if overruled == normalizer else overruled,
    )


def _overrule(normalizer: JSON | None, config: JSON) -> JSON | None:
    """transformers' BertTokenizer builds its normalizer from tokenizer_config.json, whatever tokenizer.json says."""
    if config.get("tokenizer_class") not in _BERT_TOKENIZERS or (normalizer or {}).get("type") != "BertNormalizer":
        return normalizer
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": _get(config, "tokenizer_config.json", "tokenize_chinese_chars", bool, True),
        "strip_accents": _get(config, "tokenizer_config.json", "strip_accents", bool, None),
        "lowercase": _get(config, "tokenizer_config.json", "do_lower_case", bool, True),
    }


def _lowercases(normalizer: JSON | None) -> bool:
    if normalizer is None:
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(step) for step in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
