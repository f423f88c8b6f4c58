"""tokenizer_config.json and what lies beside it -> TokenizerCard. Every key must be known, as in `card_reader`.

Source: transformers/tokenization_utils_base.py, `_from_pretrained`, and models/auto/tokenization_auto.py (5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from whimbrel.card import TokenizerCard, TokenizerClass
from whimbrel.errors import CheckpointError
from whimbrel.json_file import JsonFile

JSON: TypeAlias = dict[str, Any]

# Keys of tokenizer_config.json that do not change the ids of a single text.
_INERT_TOKENIZER: Final = frozenset(
    """
    add_bos_token add_eos_token backend chat_template clean_up_tokenization_spaces
    do_basic_tokenize errors from_slow full_tokenizer_file is_local legacy local_files_only max_len
    max_length model_input_names model_specific_special_tokens name_or_path never_split pad_to_multiple_of
    pad_token_type_id padding_side processor_class return_special_tokens_mask sp_model_kwargs special_tokens_map_file
    stride tokenizer_file tokenizer_type trim_offsets truncation truncation_strategy use_fast vocab_file vocab_size
""".split()
)
_USED_TOKENIZER: Final = frozenset(
    """
    add_prefix_space added_tokens_decoder additional_special_tokens do_lower_case extra_special_tokens model_max_length
    split_special_tokens strip_accents tokenize_chinese_chars tokenizer_class truncation_side
""".split()
)
_SPECIAL_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_TOKENIZER_CLASSES: Final[Mapping[str, TokenizerClass]] = {
    "BertTokenizer": "BertTokenizer",
    "BertTokenizerFast": "BertTokenizer",
    "RobertaTokenizer": "RobertaTokenizer",
    "RobertaTokenizerFast": "RobertaTokenizer",
    "XLMRobertaTokenizer": "XLMRobertaTokenizer",
    "XLMRobertaTokenizerFast": "XLMRobertaTokenizer",
    "PreTrainedTokenizerFast": "tokenizer.json",
    "PreTrainedTokenizer": "tokenizer.json",
    "TokenizersBackend": "tokenizer.json",
}
_CLASS_OF_MODEL_TYPE: Final = {"bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}


def read_tokenizer(root: Path, config: JsonFile, tokenizer: JsonFile, *, lowercase: bool) -> TokenizerCard:
    """The tokenizer's part of the card, from config.json and tokenizer_config.json. Raises CheckpointError.

    `lowercase` is the do_lower_case of Sentence Transformers.
    """
    tokenizer.refuse_unknown(_USED_TOKENIZER, _INERT_TOKENIZER, {f"{role}_token" for role in _SPECIAL_TOKENS})
    tokenizer.refuse_other({"split_special_tokens": (False, None)})
    owner = tokenizer if tokenizer.data.get("tokenizer_class") is not None else config
    if not (root / "tokenizer.json").exists() and (root / "vocab.txt").exists():
        raise CheckpointError(
            "not found; load and save the tokenizer once with transformers to make it.", file="tokenizer.json"
        )
    truncation = cast(JSON, JsonFile.read(root, "tokenizer.json").data.get("truncation") or {})
    sides: Mapping[str, Literal["right", "left"]] = {"right": "right", "left": "left"}
    added = tokenizer.data.get("added_tokens_decoder")
    roles, extra = _named_tokens(root, tokenizer, legacy=added is None)
    return TokenizerCard(
        tokenizer_class=owner.choice(
            "tokenizer_class", _TOKENIZER_CLASSES, _CLASS_OF_MODEL_TYPE.get(config.data["model_type"], "TokenizersBackend")
        ),
        truncate=tokenizer.choice("truncation_side", sides, str(truncation.get("direction", "right")).lower()),
        lowercase=lowercase,
        do_lower_case=tokenizer.get("do_lower_case", bool, True),
        strip_accents=tokenizer.get("strip_accents", bool) if tokenizer.data.get("strip_accents") is not None else None,
        tokenize_chinese_chars=tokenizer.get("tokenize_chinese_chars", bool, True),
        add_prefix_space=tokenizer.get("add_prefix_space", bool)
        if tokenizer.data.get("add_prefix_space") is not None
        else None,
        special_tokens=roles,
        extra_tokens=extra,
        legacy_tokens=tuple(JsonFile.read_optional(root, "added_tokens.json").data) if added is None else (),
        added_tokens=None if added is None else _added_tokens(tokenizer),
    )


def _named_tokens(root: Path, tokenizer: JsonFile, *, legacy: bool) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Special tokens with a role and without: tokenizer_config.json's, overruled by special_tokens_map.json in checkpoints that
    do not list their added tokens."""
    stated = dict(tokenizer.data)
    if legacy:
        stated |= JsonFile.read_optional(root, "special_tokens_map.json").data
    roles = {role: _token(tokenizer, f"{role}_token", stated.get(f"{role}_token")) for role in _SPECIAL_TOKENS}
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value: Any = stated.get(key) or []
        tokens = cast(JSON, value).values() if isinstance(value, dict) else value
        extra += [token for token in (_token(tokenizer, key, item) for item in tokens) if token is not None]
    return {role: token for role, token in roles.items() if token is not None}, tuple(extra)


def _token(tokenizer: JsonFile, key: str, value: Any) -> str | None:
    content = cast(JSON, value).get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise tokenizer.error(f"must be a string, is {value!r}.", key)
    return content


def _added_tokens(tokenizer: JsonFile) -> tuple[Mapping[str, Any], ...]:
    key = "added_tokens_decoder"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    tokens: list[Mapping[str, Any]] = []
    for number, fields in cast(JSON, tokenizer.get(key, dict)).items():
        if not number.isdigit() or not isinstance(fields, dict) or not isinstance(cast(JSON, fields).get("content"), str):
            raise tokenizer.error(f"{number}: {fields!r} is no added token.", key)
        tokens.append({"id": int(number), **flags, **cast(JSON, fields)})
    return tuple(tokens)
