"""Tokenizer classes of transformers.

Rebuilds tokenizer.json as these classes read it. Pure: JSON in, JSON out.

Most classes take the vocabulary from tokenizer.json and build everything else themselves, from tokenizer_config.json and their
own defaults; where the files disagree, the ids are those of the class. Decoders' classes take the post-processor too. Other
checkpoints use the file as it is. In all, the tokens that tokenizer_config.json adds overrule those of the file.

Source: transformers/tokenization_utils_tokenizers.py and models/*/tokenization_*.py (5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from whimbrel.errors import CheckpointError
from whimbrel.types.card import AddedToken, TokenizerCard, TokenizerClass

JSON: TypeAlias = dict[str, Any]

_ROLES: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SPACE: Final = "\u2581"

_FAIRSEQ: Final = {
    "bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>",
}  # fmt: skip
_DEFAULT_TOKENS: Final[Mapping[TokenizerClass, Mapping[str, str]]] = {
    "tokenizer.json": {},
    "AlbertTokenizer": {
        "bos": "[CLS]",
        "eos": "[SEP]",
        "unk": "<unk>",
        "sep": "[SEP]",
        "pad": "<pad>",
        "cls": "[CLS]",
        "mask": "[MASK]",
    },
    "BertTokenizer": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "CamembertTokenizer": _FAIRSEQ,
    "GPT2Tokenizer": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "GemmaTokenizer": {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    "LlamaTokenizer": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "MPNetTokenizer": _FAIRSEQ | {"unk": "[UNK]"},
    "Qwen2Tokenizer": {"eos": "<|endoftext|>", "unk": "<|endoftext|>", "pad": "<|endoftext|>"},
    "RobertaTokenizer": _FAIRSEQ,
    "XLMRobertaTokenizer": _FAIRSEQ,
}
"""Special tokens of a class, where no others are stated."""
_DEFAULT_EXTRA: Final[Mapping[TokenizerClass, tuple[str, ...]]] = {
    "CamembertTokenizer": ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")
}
_MASK_TAKES_SPACE: Final = ("CamembertTokenizer", "MPNetTokenizer")
"""Classes whose <mask> swallows the spaces before it, where its flags are not stated."""

_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_as_class(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json as the checkpoint's tokenizer class reads it. Raises CheckpointError.

    The model embeds `vocab_size` tokens; an added token that is not in the vocabulary gets an id if there is room below.
    """
    names = _special_tokens(file, card)
    added = _added_tokens(file, card, names.values(), vocab_size)
    built = dict(file)
    if card.tokenizer_class != "tokenizer.json":
        ids = {**_vocabulary(file), **{token["content"]: token["id"] for token in added}}
        tokens = _Tokens({role: token["content"] for role, token in names.items()}, ids)
        built |= _BUILDERS[card.tokenizer_class](file, card, tokens)
    built["added_tokens"] = added
    if card.lowercase and not _lowercases(built.get("normalizer")):
        steps = [{"type": "Lowercase"}, *([built["normalizer"]] if built.get("normalizer") else [])]
        built["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return built


def read_vocabulary(file: JSON, card: TokenizerCard, vocab_size: int) -> tuple[Mapping[str, int], Mapping[str, str]]:
    """(token -> id, added tokens included; role -> special token) of the tokenizer that `read_as_class` makes."""
    names = _special_tokens(file, card)
    added = _added_tokens(file, card, names.values(), vocab_size)
    ids = {**_vocabulary(file), **{token["content"]: token["id"] for token in added}}
    return ids, {role: token["content"] for role, token in names.items()}


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The special tokens and ids that a class needs."""

    names: Mapping[str, str]
    """Role -> token."""
    ids: Mapping[str, int]
    """Token -> id."""

    def name(self, role: str) -> str:
        if role not in self.names:
            raise CheckpointError(
                "must not be null with this tokenizer class.", file="tokenizer_config.json", key=f"{role}_token"
            )
        return self.names[role]

    def id(self, role: str) -> int:
        name = self.name(role)
        if name not in self.ids:
            raise CheckpointError(f"the special token {name!r} is not in the vocabulary.", file="tokenizer.json", key="model")
        return self.ids[name]


_Builder: TypeAlias = Callable[[JSON, TokenizerCard, _Tokens], JSON]


def _bert(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    model = {"unk_token": tokens.name("unk"), "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
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
        "post_processor": _template("cls A sep", "cls A sep B:1 sep:1", tokens),
    }


def _mpnet(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    return _bert(file, card, tokens) | {"post_processor": _roberta_processing(tokens, add_prefix_space=False)}


def _roberta(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    add_prefix_space = bool(card.add_prefix_space)
    return {
        "model": _model(file, "BPE", _BPE | {"continuing_subword_prefix": "", "end_of_word_suffix": ""}),
        "normalizer": None,
        "pre_tokenizer": _bytes(add_prefix_space=add_prefix_space),
        "post_processor": _roberta_processing(tokens, add_prefix_space=add_prefix_space),
    }


def _xlm_roberta(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    return {
        "model": _model(file, "Unigram", {"unk_id": 3, "byte_fallback": False}),
        "normalizer": _charsmap(file.get("normalizer")),
        "pre_tokenizer": _unigram_words(card),
        "post_processor": _template("bos A eos", "bos A eos eos B eos", tokens),
    }


def _camembert(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    unk = tokens.name("unk")
    built = _xlm_roberta(file, card, tokens)
    built["model"]["unk_id"] = next((i for i, (token, _) in enumerate(built["model"]["vocab"]) if token == unk), 0)
    return built


def _albert(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    quotes = [{"type": "Replace", "pattern": {"String": quote}, "content": '"'} for quote in ("``", "''")]
    steps: list[JSON | None] = [*quotes, {"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"} if card.do_lower_case else None, _charsmap(file.get("normalizer"))]
    return {
        "model": _model(file, "Unigram", {"unk_id": 1, "byte_fallback": False}),
        "normalizer": {"type": "Sequence", "normalizers": [step for step in steps if step is not None]},
        "pre_tokenizer": _unigram_words(card),
        "post_processor": file.get("post_processor") or _template("cls A sep", "cls A sep B:1 sep:1", tokens),
    }


def _gpt2(file: JSON, card: TokenizerCard, _: _Tokens) -> JSON:
    return {
        "model": _model(file, "BPE", _BPE | {"continuing_subword_prefix": "", "end_of_word_suffix": ""}),
        "normalizer": None,
        "pre_tokenizer": _bytes(add_prefix_space=bool(card.add_prefix_space)),
    }


def _qwen2(file: JSON, card: TokenizerCard, tokens: _Tokens) -> JSON:
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    add_prefix_space = bool(card.add_prefix_space)
    bytes_ = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": False}
    return {
        "model": _model(file, "BPE", _BPE | {"continuing_subword_prefix": "", "end_of_word_suffix": ""}),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        **({"post_processor": _template("A eos", "A eos B:1 eos:1", tokens)} if card.ends else {}),
    }


def _llama(file: JSON, card: TokenizerCard, _: _Tokens) -> JSON:
    scheme = "never" if card.add_prefix_space is False else "always" if card.legacy else "first"
    return {
        "model": _model(file, "BPE", _BPE | {"fuse_unk": True, "byte_fallback": True}),
        "normalizer": None,
        "pre_tokenizer": _metaspace(scheme, split=False),
    }


def _gemma(file: JSON, _: TokenizerCard, tokens: _Tokens) -> JSON:
    space = {"String": " "}
    return {
        "model": _model(file, "BPE", _BPE | {"fuse_unk": True, "byte_fallback": True, "unk_token": tokens.name("unk")}),
        "normalizer": {"type": "Replace", "pattern": space, "content": _SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
    }


_BUILDERS: Final[Mapping[TokenizerClass, _Builder]] = {
    "AlbertTokenizer": _albert,
    "BertTokenizer": _bert,
    "CamembertTokenizer": _camembert,
    "GPT2Tokenizer": _gpt2,
    "GemmaTokenizer": _gemma,
    "LlamaTokenizer": _llama,
    "MPNetTokenizer": _mpnet,
    "Qwen2Tokenizer": _qwen2,
    "RobertaTokenizer": _roberta,
    "XLMRobertaTokenizer": _xlm_roberta,
}
"""Tokenizer class -> builder of the parts that the class overrides."""

_BPE: Final = {
    "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
    "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def _model(file: JSON, kind: str, fields: JSON) -> JSON:
    stated = file["model"].get("type", kind)
    if stated != kind:
        raise CheckpointError(
            f"{stated!r} does not go with the tokenizer class; must be {kind!r}.", file="tokenizer.json", key="model"
        )
    return file["model"] | {"type": kind} | fields


def _bytes(*, add_prefix_space: bool) -> JSON:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def _unigram_words(card: TokenizerCard) -> JSON:
    scheme = "never" if card.add_prefix_space is False else "always"
    return {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _metaspace(scheme, split=True)]}


def _metaspace(scheme: str, *, split: bool) -> JSON:
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": split}


def _roberta_processing(tokens: _Tokens, *, add_prefix_space: bool) -> JSON:
    return {
        "type": "RobertaProcessing",
        "sep": [tokens.name("sep"), tokens.id("sep")],
        "cls": [tokens.name("cls"), tokens.id("cls")],
        "trim_offsets": True,
        "add_prefix_space": add_prefix_space,
    }


def _template(single: str, pair: str, tokens: _Tokens) -> JSON:
    """A template is words with a space between: the role of a special token, A or B for a text; each may have :1, its type."""
    used = sorted({word.partition(":")[0] for word in pair.split()} - {"A", "B"})
    return {
        "type": "TemplateProcessing",
        "single": [_piece(word, tokens) for word in single.split()],
        "pair": [_piece(word, tokens) for word in pair.split()],
        "special_tokens": {
            tokens.name(role): {"id": tokens.name(role), "ids": [tokens.id(role)], "tokens": [tokens.name(role)]}
            for role in used
        },
    }


def _piece(word: str, tokens: _Tokens) -> JSON:
    name, _, type_id = word.partition(":")
    known = {"type_id": int(type_id or 0)}
    if name in ("A", "B"):
        return {"Sequence": {"id": name, **known}}
    return {"SpecialToken": {"id": tokens.name(name), **known}}


def _charsmap(normalizer: JSON | None) -> JSON | None:
    """The precompiled map of SentencePiece, alone: the class keeps nothing else of the normalizer."""
    steps: list[JSON] = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    return next((step for step in steps if step.get("type") == "Precompiled"), None)


def _vocabulary(file: JSON) -> Mapping[str, int]:
    """The model's own tokens, without those that are added to them."""
    try:
        vocab: Any = file["model"]["vocab"]
        return {row[0]: i for i, row in enumerate(cast(list[Any], vocab))} if isinstance(vocab, list) else {**vocab}
    except (KeyError, TypeError, IndexError):
        raise CheckpointError("holds no vocabulary.", file="tokenizer.json", key="model") from None


def unknown_token(card: TokenizerCard) -> str | None:
    """Return the unknown token, if any."""
    stated = card.special_tokens.get("unk", {"content": _DEFAULT_TOKENS[card.tokenizer_class].get("unk")})
    return None if stated is None else stated["content"]


def _special_tokens(file: JSON, card: TokenizerCard) -> Mapping[str, AddedToken]:
    """Role -> token, in the order in which they get ids: those stated, or else those of the class."""
    kind = card.tokenizer_class
    takes_padding = bool(file.get("padding")) and kind != "GPT2Tokenizer"  # whose own default is none at all
    padding = {"pad": file["padding"]["pad_token"]} if takes_padding else {}
    defaults = {role: {"content": token, "special": True} for role, token in {**padding, **_DEFAULT_TOKENS[kind]}.items()}
    stated = {**defaults, **card.special_tokens}
    roles = [role for role in _ROLES if role in stated] + [role for role in stated if role not in _ROLES]
    tokens = {role: stated[role] for role in roles}
    named = {role: token for role, token in tokens.items() if token is not None}
    if kind in _MASK_TAKES_SPACE and "mask" in named:
        named["mask"] = {"lstrip": True, **named["mask"]}
    return named


def _added_tokens(file: JSON, card: TokenizerCard, names: Collection[AddedToken], vocab_size: int) -> list[JSON]:
    """Tokens that texts are searched for, in the order and with the ids in which tokenizers adds them: the file's, overruled by
    those of tokenizer_config.json, then special tokens that neither lists, the last of the same content in force."""
    default = ({"content": token, "special": True} for token in _DEFAULT_EXTRA.get(card.tokenizer_class, ()))
    special = [*names, *(default if card.extra_tokens is None else card.extra_tokens)]
    listed = {token["content"]: token for token in _listed_tokens(file, card)}
    new = list[AddedToken]()
    for token in special:
        if token["content"] not in listed and token not in new:
            new.append(token)
    tokens = listed | {token["content"]: token for token in new}
    tokens |= {name: {**tokens[name], "special": True} for name in {token["content"] for token in names}}
    if card.tokenizer_class == "Qwen2Tokenizer":  # which adds them all once more
        tokens |= {token["content"]: {"content": token["content"], "special": True} for token in special}
    for name in card.legacy_tokens:
        if name not in tokens:
            raise CheckpointError("this token is not in tokenizer.json.", file="added_tokens.json", key=name)
    return list(_with_ids(tokens.values(), file, vocab_size))


def _listed_tokens(file: JSON, card: TokenizerCard) -> Iterator[AddedToken]:
    listed: list[JSON] = file.get("added_tokens") or []
    if card.tokenizer_class == "tokenizer.json":
        yield from listed
    elif card.added_tokens is None:
        yield from sorted(listed, key=lambda token: token["id"])
    yield from card.added_tokens or ()


def _with_ids(tokens: Iterable[AddedToken], file: JSON, vocab_size: int) -> Iterator[JSON]:
    """tokenizers' own numbering, which does not look at the ids that are stated. Tokens without a row in the model's table are
    left out: transformers' models fail at them."""
    ids = _vocabulary(file)
    free = len(file["model"]["vocab"])
    for token in tokens:
        number = ids.get(token["content"], free)
        if token["content"] and (token["content"] in ids or number < vocab_size):
            free = max(free, number + 1)
            special = bool(token.get("special"))
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special}
            yield {**flags, **token, "id": number}


def _lowercases(normalizer: JSON | None) -> bool:
    if not normalizer:
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(step) for step in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
