"""tokenizer.json as transformers' tokenizer classes read it. Pure: JSON in, JSON out.

BertTokenizer, RobertaTokenizer and XLMRobertaTokenizer take the vocabulary from tokenizer.json and build everything else
themselves, from tokenizer_config.json and their own defaults; where the files disagree, the ids are those of the class. Other
checkpoints use the file as it is. In all, the tokens that tokenizer_config.json adds overrule those of the file.

Source: transformers/tokenization_utils_tokenizers.py and models/{bert,roberta,xlm_roberta}/tokenization_*.py (5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from whimbrel.card import TokenizerCard, TokenizerClass
from whimbrel.errors import CheckpointError

JSON: TypeAlias = dict[str, Any]

_FLAGS: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def read_as_class(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """tokenizer.json's content with what the checkpoint's tokenizer class makes of it. Raises CheckpointError.

    The model embeds `vocab_size` tokens; a special token that is not in the file gets an id if there is room below.
    """
    ids = _vocabulary(file)
    built = dict(file)
    if card.tokenizer_class != "tokenizer.json":
        built |= _BUILDERS[card.tokenizer_class](file, card, ids)
    built["added_tokens"] = _added_tokens(file, card, ids, vocab_size)
    if card.lowercase and not _lowercases(built.get("normalizer")):
        steps = [{"type": "Lowercase"}, *([built["normalizer"]] if built.get("normalizer") else [])]
        built["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return built


def _vocabulary(file: JSON) -> Mapping[str, int]:
    try:
        vocab: Any = file["model"]["vocab"]
        is_list = isinstance(vocab, list)
        ids: Any = {row[0]: i for i, row in enumerate(cast(list[Any], vocab))} if is_list else vocab
        return {**ids, **{token["content"]: token["id"] for token in _stated_tokens(file)}}
    except (KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError("holds no vocabulary.", file="tokenizer.json", key="model") from None


def _stated_tokens(file: JSON) -> list[JSON]:
    return file.get("added_tokens") or []


def _bert(file: JSON, card: TokenizerCard, ids: Mapping[str, int]) -> JSON:
    names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", **card.special_tokens}
    model = {"unk_token": names["unk"], "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "model": _model(file, "WordPiece", model),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": card.tokenize_chinese_chars,
            "strip_accents": card.strip_accents,
            "lowercase": card.do_lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(names["cls"], names["sep"], ids),
    }


def _roberta(file: JSON, card: TokenizerCard, ids: Mapping[str, int]) -> JSON:
    names = {"cls": "<s>", "sep": "</s>", **card.special_tokens}
    add_prefix_space = bool(card.add_prefix_space)
    model = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
        "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {
        "model": _model(file, "BPE", model),
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [names["sep"], _id(names["sep"], ids)],
            "cls": [names["cls"], _id(names["cls"], ids)],
            "trim_offsets": True,
            "add_prefix_space": add_prefix_space,
        },
    }


def _xlm_roberta(file: JSON, card: TokenizerCard, ids: Mapping[str, int]) -> JSON:
    names = {"bos": "<s>", "eos": "</s>", **card.special_tokens}
    scheme = "never" if card.add_prefix_space is False else "always"
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": True}
    return {
        "model": _model(file, "Unigram", {"unk_id": 3, "byte_fallback": False}),
        "normalizer": _charsmap(file.get("normalizer")),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": _template(names["bos"], names["eos"], ids),
    }


_BUILDERS: Final[Mapping[TokenizerClass, Callable[[JSON, TokenizerCard, Mapping[str, int]], JSON]]] = {
    "BertTokenizer": _bert,
    "RobertaTokenizer": _roberta,
    "XLMRobertaTokenizer": _xlm_roberta,
}


def _model(file: JSON, kind: str, fields: JSON) -> JSON:
    stated = file["model"].get("type", kind)
    if stated != kind:
        raise CheckpointError(
            f"{stated!r} does not go with the tokenizer class; must be {kind!r}.", file="tokenizer.json", key="model"
        )
    return file["model"] | {"type": kind} | fields


def _template(first: str, last: str, ids: Mapping[str, int]) -> JSON:
    """`first` before and `last` after a text, all of token type 0."""
    tokens = {token: {"id": token, "ids": [_id(token, ids)], "tokens": [token]} for token in (first, last)}
    begin, end = ({"SpecialToken": {"id": token, "type_id": 0}} for token in (first, last))
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, text, end],
        "pair": [begin, text, end, second, end],
        "special_tokens": tokens,
    }


def _id(token: str, ids: Mapping[str, int]) -> int:
    if token not in ids:
        raise CheckpointError(f"the special token {token!r} is not in the vocabulary.", file="tokenizer.json", key="model")
    return ids[token]


def _charsmap(normalizer: JSON | None) -> JSON | None:
    """The precompiled map of SentencePiece, alone: the class keeps nothing else of the normalizer."""
    steps: list[JSON] = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    return next((step for step in steps if step.get("type") == "Precompiled"), None)


def _added_tokens(file: JSON, card: TokenizerCard, ids: Mapping[str, int], vocab_size: int) -> list[JSON]:
    """The file's, overruled by those of tokenizer_config.json, and the special tokens that either names."""
    replaces = card.added_tokens is not None and card.tokenizer_class != "tokenizer.json"
    tokens: dict[str, JSON] = {} if replaces else {token["content"]: token for token in _stated_tokens(file)}
    for token in card.added_tokens or ():
        tokens[token["content"]] = dict(token)
    free = max([*ids.values(), *(token["id"] for token in tokens.values())], default=-1) + 1
    for name in (*card.special_tokens.values(), *card.extra_tokens):
        if name in tokens or (name not in ids and free >= vocab_size):
            continue
        tokens[name] = {"id": ids.get(name, free), "content": name, **_FLAGS}
        free += name not in ids
    for name in card.legacy_tokens:
        if name not in tokens:
            raise CheckpointError("this token is not in tokenizer.json.", file="added_tokens.json", key=name)
    return sorted(tokens.values(), key=lambda token: token["id"])


def _lowercases(normalizer: JSON | None) -> bool:
    if not normalizer:
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(step) for step in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
