"""Tokenizer configuration and vocabulary files.

Reads tokenizer_config.json and the files beside it into a `TokenizerCard`. Every key must be known.

Source: transformers/tokenization_utils_base.py, `_from_pretrained`, tokenization_utils_tokenizers.py, and
models/auto/tokenization_auto.py (5.23).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from whimbrel.checkpoint.json_file import JSON, JsonFile, find_file, read_json
from whimbrel.checkpoint.tokenizer.classes import CLASSES, find_mismatch
from whimbrel.checkpoint.tokenizer.reading import with_reading
from whimbrel.errors import CheckpointError
from whimbrel.types.card import AddedToken, TokenizerCard, TokenizerClass
from whimbrel.types.choices import TokenizerReading

_VOCABULARY, _WORDS, _PAIRS, _MERGES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"
_SETTINGS, _CLASS = "tokenizer_config.json", "tokenizer_class"
_AS_IT_IS: Final = f'to have tokenizer.json read as it is, write into {_SETTINGS}: "{_CLASS}": "PreTrainedTokenizerFast"'
_NO_VOCABULARY: Final = "not found; load and save the tokenizer once with transformers to make it."
# Keys of tokenizer_config.json that do not change the ids of a single text. For add_bos_token and add_eos_token, which may, see
# reading.py, and for code on the hub _ENDING.
_INERT: Final = """
    add_bos_token add_eos_token backend chat_template clean_up_tokenization_spaces do_basic_tokenize errors from_slow
    full_tokenizer_file is_local local_files_only max_length name_or_path never_split pad_to_multiple_of pad_token_type_id
    padding_side processor_class remove_space return_special_tokens_mask sp_model_kwargs spaces_between_special_tokens
    special_tokens_map_file stride tokenizer_file tokenizer_type trim_offsets truncation truncation_strategy
    unk_id use_default_system_prompt use_fast vocab_file vocab_size
""".split()
_USED: Final = """
    add_prefix_space added_tokens_decoder additional_special_tokens auto_map do_lower_case extra_special_tokens init_inputs
    keep_accents legacy max_len model_input_names model_max_length model_specific_special_tokens split_by_punct
    split_special_tokens strip_accents tokenize_chinese_chars tokenizer_class truncation_side vocab_type extra_ids
""".split()
_EXTRA: Final = ("additional_special_tokens", "extra_special_tokens")
_ROLES: Final = {f"{role}_token": role for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}

_TOKENIZER_CLASSES: Final[Mapping[str, TokenizerClass]] = {
    **CLASSES,
    **{f"{name}Fast": kind for name, kind in CLASSES.items()},
    "TokenizersBackend": "tokenizer.json",
}
_TYPES: Final[Mapping[TokenizerClass, str]] = {
    "AlbertTokenizer": "albert",
    "BertTokenizer": "bert distilbert electra ernie mobilebert nomic_bert",
    "CamembertTokenizer": "camembert",
    "DebertaV2Tokenizer": "deberta-v2",
    "GPT2Tokenizer": "gpt2 opt phi starcoder2",
    "GemmaTokenizer": "gemma gemma2 gemma3_text",
    "MPNetTokenizer": "mpnet",
    "Qwen2Tokenizer": "qwen2_moe qwen3 qwen3_moe",
    "RobertaTokenizer": "data2vec-text roberta roberta-prelayernorm",
    "T5Tokenizer": "mt5 t5",
    "XLMRobertaTokenizer": "gte jina_embeddings_v3 xlm-roberta xmod",
    "tokenizer.json": "deepseek_v3 eurobert lfm2 lfm2_moe llama",
}
_IMPLIED: Final[Mapping[str, TokenizerClass]] = {
    model_type: kind for kind, model_types in _TYPES.items() for model_type in model_types.split()
}
_FILE_ALONE: Final = """
    ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoeshared hyperclovax internlm2
    internlm3 iquestcoder mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert
    modernbert-decoder nemotron olmo2 olmo3 persimmon phi3 phimoe xlm-roberta-xl
""".split()
_FORCED: Final[Mapping[str, TokenizerClass]] = {"qwen2": "Qwen2Tokenizer", **dict.fromkeys(_FILE_ALONE, "tokenizer.json")}
"""Model type -> tokenizer class, regardless of tokenizer_class."""
_ENDING: Final = ("tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast")
"""Code of gte-Qwen2 and stella. If add_eos_token is true, it appends an eos token that their tokenizer.json does not."""
_SENTINELS: Final = 100
"""Number of T5's tokens for masked spans of text."""
_NEED_A_SPACE_FLAG: Final = """
    AlbertTokenizer CamembertTokenizer DebertaV2Tokenizer GPT2Tokenizer RobertaTokenizer XLMRobertaTokenizer
""".split()
"""Classes that do not take a null for add_prefix_space as their default."""
_WITH_TYPES: Final = ("BertTokenizer", "DebertaV2Tokenizer")
"""Classes that give token types unless model_input_names says otherwise."""


def read_tokenizer_file(root: Path) -> JsonFile:
    """Return tokenizer.json, or the vocabulary in vocab.txt (WordPiece) or vocab.json and merges.txt (BPE) as its model."""
    if (root / _VOCABULARY).exists():
        return JsonFile.read(root, _VOCABULARY)
    model: dict[str, Any]
    if (root / _WORDS).exists():
        model = {"type": "WordPiece", "vocab": {word: number for number, word in enumerate(_lines(root, _WORDS))}}
    elif (root / _PAIRS).exists() and (root / _MERGES).exists():
        merges = [line for line in _lines(root, _MERGES) if line and not line.startswith("#version")]
        model = {"type": "BPE", "vocab": read_json(root, _PAIRS), "merges": merges}
    else:
        raise CheckpointError(_NO_VOCABULARY, file=_VOCABULARY)
    return JsonFile(_VOCABULARY, {"model": model, "added_tokens": []})


def _lines(root: Path, file: str) -> list[str]:
    try:
        text = find_file(root, file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}.", file=file) from None
    return text.removesuffix("\n").split("\n")


def read_tokenizer(
    folder: Path,
    path: str,
    config: JsonFile,
    tokenizer: JsonFile,
    *,
    reading: TokenizerReading | None,
    lowercase: bool,
    pairs: bool = False,
) -> TokenizerCard:
    """Return the card of the tokenizer at `path` in the checkpoint's folder. Raises CheckpointError.

    `lowercase` is Sentence Transformers' do_lower_case; `pairs`: the model scores pairs of texts without a template.
    """
    tokenizer.reject_unknown_keys(_USED, _INERT, _ROLES, _own_roles(tokenizer))
    tokenizer.require_values({"split_special_tokens": (False, None), "keep_accents": (False, None), "init_inputs": ([], None)})
    tokenizer.require_values({"vocab_type": ("spm", None)})
    root = folder / path
    file = read_tokenizer_file(root)
    kind, origin = _tokenizer_class(root, config, tokenizer)
    if kind == "tokenizer.json" and not (root / "tokenizer.json").exists():
        raise CheckpointError(_NO_VOCABULARY, file=_VOCABULARY)
    truncation = cast(JSON, file.data.get("truncation") or {})
    sides: Mapping[str, Literal["right", "left"]] = {"right": "right", "left": "left"}
    added = tokenizer.data.get("added_tokens_decoder")
    inputs = tokenizer.get("model_input_names", list, ["token_type_ids"] if kind in _WITH_TYPES else [])
    roles, extra = _special_tokens(root, tokenizer, legacy=added is None)
    if kind == "T5Tokenizer":
        extra = _with_sentinels(tokenizer, extra or ())
    if tokenizer.data.get("add_prefix_space", True) is None and kind in _NEED_A_SPACE_FLAG:
        raise tokenizer.error("null is not supported; must be true, false or absent.", "add_prefix_space")
    card = TokenizerCard(
        tokenizer_class=kind,
        truncate=tokenizer.choice("truncation_side", sides, str(truncation.get("direction", "right")).lower()),
        lowercase=lowercase,
        do_lower_case=tokenizer.get("do_lower_case", bool, kind != "DebertaV2Tokenizer"),
        strip_accents=tokenizer.get("strip_accents", bool, None),
        tokenize_chinese_chars=tokenizer.get("tokenize_chinese_chars", bool, True),
        add_prefix_space=tokenizer.get("add_prefix_space", bool, None),
        legacy=tokenizer.get("legacy", bool, False),
        split_by_punct=tokenizer.get("split_by_punct", bool, False),
        ends=_ends(tokenizer),
        second_type="token_type_ids" in inputs,
        special_tokens=roles,
        extra_tokens=extra,
        legacy_tokens=tuple(JsonFile.read_optional(root, "added_tokens.json").data) if added is None else (),
        added_tokens=None if added is None else _added_tokens(tokenizer),
    )
    card = with_reading(card, folder, config, tokenizer, file.data, path=path, chosen=reading, pairs=pairs)
    if card.reading == "transformers":
        _refuse_mismatch(root, file, kind, origin, config.get("model_type", str, ""))
    return card


def _tokenizer_class(root: Path, config: JsonFile, tokenizer: JsonFile) -> tuple[TokenizerClass, str]:
    """Return the class that AutoTokenizer chooses, and the file and key from which it follows."""
    model_type = config.get("model_type", str, "")
    if model_type == "mistral" and (root / "tekken.json").exists():
        raise CheckpointError("is not read by Whimbrel; if tokenizer.json says the same, remove it.", file="tekken.json")
    if model_type in _FORCED:
        return _FORCED[model_type], f"that of every model_type {model_type!r} ({config.name}), whatever {_CLASS} says"
    owner = tokenizer if tokenizer.data.get(_CLASS) is not None else config
    if owner.data.get(_CLASS) is None:
        if model_type not in _IMPLIED:
            message = f"is missing, and model_type {model_type!r:.80} implies no class that Whimbrel knows."
            raise tokenizer.error(message, _CLASS, _AS_IT_IS)
        return _IMPLIED[model_type], f"the default of model_type {model_type!r} ({config.name}), as no {_CLASS} is stated"
    kind = owner.choice(_CLASS, _TOKENIZER_CLASSES)
    stated = f"named in {owner.name}: {_CLASS} is {owner.data[_CLASS]!r}"
    is_llama = kind == "LlamaTokenizer" and (root / _VOCABULARY).exists()
    if is_llama and '"ByteLevel"' in find_file(root, _VOCABULARY).read_text(encoding="utf-8"):
        return "tokenizer.json", stated  # many checkpoints with another tokenizer name this class
    return kind, stated


def _refuse_mismatch(root: Path, file: JsonFile, kind: TokenizerClass, origin: str, model_type: str) -> None:
    """Raise CheckpointError if the class reads another kind of vocabulary. transformers may make wrong ids of it, silently."""
    if (mismatch := find_mismatch(file.data, kind)) is None:
        return
    found, reads = mismatch
    if model_type in _FORCED:
        hint = f"save the model with a tokenizer of the class {kind}, which no setting replaces"
    elif (root / _VOCABULARY).exists():
        hint = _AS_IT_IS
    else:
        hint = "load and save the tokenizer once with transformers, by the class that it was made for, to write tokenizer.json"
    names = [name for name in (_VOCABULARY, _WORDS, _PAIRS) if (root / name).exists()]
    message = f"is of the kind {found}; {kind} reads {reads}. This class is {origin}."
    raise CheckpointError(message, file=names[0], key="model", hint=hint)


def _ends(tokenizer: JsonFile) -> bool:
    """Return whether custom code appends the eos token to each text."""
    code = cast(JSON, tokenizer.get("auto_map", dict, {}))
    if not code:
        return False
    names = cast(list[object], code.get("AutoTokenizer")) if isinstance(code.get("AutoTokenizer"), list) else [None]
    if not all(isinstance(name, str) and name.rpartition("--")[2] in _ENDING for name in names):
        raise tokenizer.error("this tokenizer needs code of its own; custom code is not run.", "auto_map")
    tokenizer.require_values({"add_bos_token": (False, None)})
    return tokenizer.get("add_eos_token", bool, False)


def _special_tokens(
    root: Path, tokenizer: JsonFile, *, legacy: bool
) -> tuple[Mapping[str, AddedToken | None], tuple[AddedToken, ...] | None]:
    """Return (role -> special token, custom roles last; those without a role). `legacy`: special_tokens_map.json overrides."""
    old_key, key = _EXTRA
    stated = dict(tokenizer.data)
    if old_key in stated and not stated.get(key):
        stated[key] = stated.pop(old_key)
    own = {name: stated[name] for name in _own_roles(tokenizer)}
    own |= _pop_roles(stated, key)
    if legacy:
        stated |= _special_tokens_map(root, stated)
        own |= _pop_roles(stated, key)
    own = own or cast(JSON, stated.get("model_specific_special_tokens") or {})
    if clashes := own.keys() & _ROLES:
        raise tokenizer.error(f"{min(clashes)} is no name for a token of the model's own.", key)
    roles = {role: _token(tokenizer, name, stated[name]) for name, role in _ROLES.items() if name in stated}
    roles |= {name: _token(tokenizer, name, value) for name, value in own.items()}
    if key not in stated and stated.get(old_key) is None:
        return roles, None
    extra = cast(list[Any], stated[key] if key in stated else stated[old_key]) or []
    tokens = (_token(tokenizer, key, value) for value in extra)
    return roles, tuple(token for token in tokens if token is not None)


def _with_sentinels(tokenizer: JsonFile, extra: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
    """Return the special tokens without a role, and T5's sentinels if none of them is among these."""
    count = tokenizer.get("extra_ids", int, _SENTINELS)
    stated = sum("<extra_id_" in token["content"] for token in extra)
    if count not in (0, _SENTINELS) or stated not in (0, count):
        given = f"{stated} tokens <extra_id_N> in additional_special_tokens"
        raise tokenizer.error(f"{count} is not supported with {given}; must be {_SENTINELS}.", "extra_ids")
    return extra if stated else (*extra, *({"content": f"<extra_id_{i}>", "special": True} for i in range(count)))


def _own_roles(tokenizer: JsonFile) -> list[str]:
    """Return the keys of custom roles, such as image_token."""
    items = tokenizer.data.items()
    return [key for key, value in items if key.endswith("_token") and isinstance(value, str) and key not in _ROLES]


def _pop_roles(stated: JSON, key: str) -> JSON:
    """Remove and return the extra tokens that are an object, whose keys are custom roles."""
    return cast(JSON, stated.pop(key)) if isinstance(stated.get(key), dict) else {}


def _special_tokens_map(root: Path, stated: JSON) -> JSON:
    file = JsonFile.read_optional(root, "special_tokens_map.json")
    file.reject_unknown_keys(_ROLES, _EXTRA)
    tokens: Any = file.data.get("extra_special_tokens")
    if not isinstance(tokens, list):
        return file.data
    before = cast(list[Any], stated.get("extra_special_tokens") or [])
    after = [{**cast(JSON, token), "special": True} if isinstance(token, dict) else token for token in cast(list[Any], tokens)]
    return file.data | {"extra_special_tokens": before + [token for token in after if token not in before]}


def _token(tokenizer: JsonFile, key: str, value: Any) -> AddedToken | None:
    if value is None or isinstance(value, str):
        return None if value is None else {"content": value, "special": True}
    if not isinstance(value, dict) or not isinstance(cast(JSON, value).get("content"), str):
        raise tokenizer.error(f"must be a string, is {value!r}.", key)
    return _flags(cast(JSON, value))


def _added_tokens(tokenizer: JsonFile) -> tuple[AddedToken, ...]:
    key = "added_tokens_decoder"
    tokens = cast(JSON, tokenizer.get(key, dict))
    for number, fields in tokens.items():
        if not number.isdigit() or not isinstance(fields, dict) or not isinstance(cast(JSON, fields).get("content"), str):
            raise tokenizer.error(f"{number}: {fields!r} is no added token.", key)
    return tuple({"id": int(number), **_flags(tokens[number])} for number in sorted(tokens, key=int))


def _flags(fields: JSON) -> AddedToken:
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: fields[name] for name in flags if name in fields}
