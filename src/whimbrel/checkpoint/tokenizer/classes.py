"""Tokenizer classes of transformers.

Rebuilds tokenizer.json as a class reads it. Most classes take only the vocabulary from the file. They build the other parts
from tokenizer_config.json and their own defaults. Decoders' classes keep the post-processor too. Checkpoints without a class
use the whole file. In every case, the added tokens of tokenizer_config.json replace those of tokenizer.json.

Source: transformers/tokenization_utils_tokenizers.py and models/*/tokenization_*.py (5.23).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, cast, get_args

from whimbrel.checkpoint.json_file import JSON
from whimbrel.errors import CheckpointError
from whimbrel.types.card import AddedToken, TokenizerCard, TokenizerClass

_ROLES: Final = list[str](("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SPACE: Final = "\u2581"
_CAMEMBERT_EXTRA: Final = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")
_MASK_TAKES_SPACE: Final = ("CamembertTokenizer", "MPNetTokenizer")
"""Classes whose <mask> strips the spaces before it by default."""
_OLD_MASK_TAKES_SPACE: Final = (*_MASK_TAKES_SPACE, "AlbertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer")
"""The same in transformers 4."""
_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLASSES: Final[Mapping[str, TokenizerClass]] = {
    **{name: name for name in get_args(TokenizerClass) if name != "tokenizer.json"},
    **dict.fromkeys(("DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"), "BertTokenizer"),
    "PreTrainedTokenizer": "tokenizer.json",
}
"""Name of a class in transformers, without "Fast" -> the class that reads its files."""


def read_as_class(file: JSON, card: TokenizerCard, vocab_size: int) -> JSON:
    """Return tokenizer.json as the checkpoint's tokenizer class reads it. Raises CheckpointError.

    The model embeds `vocab_size` tokens. An added token outside the vocabulary gets an id if there is one below `vocab_size`.
    """
    tokens, added = read_tokens(file, card, vocab_size)
    kind = _DEFINITIONS[card.tokenizer_class]
    frame = {"post_processor": template(*kind.frame, tokens)} if kind.frame else {}
    return lowercased(file | frame | (kind.build(file, card, tokens) if kind.build else {}) | {"added_tokens": added}, card)


def lowercased(built: JSON, card: TokenizerCard) -> JSON:
    """Return tokenizer.json with Sentence Transformers' do_lower_case as its first step, if the card says so."""
    if card.lowercase and not _lowercases(built.get("normalizer")):
        steps = [{"type": "Lowercase"}, *([built["normalizer"]] if built.get("normalizer") else [])]
        return built | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    return built


@dataclass(frozen=True, slots=True)
class Tokens:
    """Special tokens by role, and ids of all tokens."""

    names: Mapping[str, str]
    ids: Mapping[str, int]

    def name(self, role: str) -> str:
        if role not in self.names:
            message = "must not be null with this tokenizer class."
            raise CheckpointError(message, file="tokenizer_config.json", key=f"{role}_token")
        return self.names[role]

    def id(self, role: str) -> int:
        name = self.name(role)
        if name not in self.ids:
            raise CheckpointError(f"the special token {name!r} is not in the vocabulary.", file="tokenizer.json", key="model")
        return self.ids[name]


def read_tokens(file: JSON, card: TokenizerCard, vocab_size: int) -> tuple[Tokens, list[JSON]]:
    """Return the tokens of a class of transformers, and the added ones as tokenizer.json has them."""
    special = _special_tokens(file, card)
    added = _added_tokens(file, card, special.values(), vocab_size)
    ids = {**vocabulary(file), **{token["content"]: token["id"] for token in added}}
    return Tokens({role: token["content"] for role, token in special.items()}, ids), added


def _bert(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    model = {"unk_token": tokens.name("unk"), "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": card.tokenize_chinese_chars}
    return {
        "model": _model(file, "WordPiece", model),
        "normalizer": normalizer | {"strip_accents": card.strip_accents, "lowercase": card.do_lower_case},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }


def _mpnet(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    return _bert(file, card, tokens) | {"post_processor": _roberta_processing(tokens, add_prefix_space=False)}


def _roberta(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    post_processor = _roberta_processing(tokens, add_prefix_space=bool(card.add_prefix_space))
    return _gpt2(file, card, tokens) | {"post_processor": post_processor}


def _unigram(file: JSON, card: TokenizerCard, _: Tokens, unk_id: int, *, always: bool = False) -> JSON:
    """Return the parts that classes with a SentencePiece model have in common. `always`: a space comes first in any case."""
    words = metaspace("never" if card.add_prefix_space is False and not always else "always", split=True)
    return {
        "model": _model(file, "Unigram", {"unk_id": unk_id, "byte_fallback": False}),
        "normalizer": _charsmap(file.get("normalizer")),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, words]},
        "decoder": words,
    }


def _camembert(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    unk = tokens.name("unk")
    return _unigram(file, card, tokens, next((i for i, (token, _) in enumerate(file["model"]["vocab"]) if token == unk), 0))


def _albert(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    quotes = [{"type": "Replace", "pattern": {"String": quote}, "content": '"'} for quote in ("``", "''")]
    steps: list[JSON | None] = [*quotes, {"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"} if card.do_lower_case else None, _charsmap(file.get("normalizer"))]
    return _unigram(file, card, tokens, 1) | {
        "normalizer": {"type": "Sequence", "normalizers": [step for step in steps if step is not None]},
        "post_processor": file.get("post_processor") or template(*_CLS_SEP, tokens),
    }


def _deberta(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    unk = tokens.name("unk")
    unk_id = next((i for i, (token, score) in enumerate(file["model"]["vocab"]) if token == unk and score == 0.0), None)
    if unk_id is None:
        raise CheckpointError(f"holds no {unk!r} with the score 0.", file="tokenizer.json", key="model")
    spaces = {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "}
    steps: list[JSON] = [{"type": "Lowercase"}] if card.do_lower_case else []
    steps += [spaces, {"type": "NFC"}, {"type": "Strip", "strip_left": False, "strip_right": True}]
    marks: list[JSON] = [{"type": "Punctuation", "behavior": "Isolated"}] if card.split_by_punct else []
    words = metaspace("first" if card.add_prefix_space is False else "always", split=True)
    return _unigram(file, card, tokens, unk_id) | {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*marks, words]},
        "decoder": words,
    }


def _gpt2(file: JSON, card: TokenizerCard, _: Tokens) -> JSON:
    return {
        "model": _model(file, "BPE", _BPE | {"continuing_subword_prefix": "", "end_of_word_suffix": ""}),
        "normalizer": None,
        "pre_tokenizer": _byte_level(card, use_regex=True),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def _qwen2(file: JSON, card: TokenizerCard, tokens: Tokens) -> JSON:
    split = {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    return {
        **_gpt2(file, card, tokens),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _byte_level(card, use_regex=False)]},
        **({"post_processor": template("A eos", "A eos B:1 eos:1", tokens)} if card.ends else {}),
    }


def _llama(file: JSON, card: TokenizerCard, _: Tokens) -> JSON:
    scheme = "never" if card.add_prefix_space is False else "always" if card.legacy else "first"
    return {
        "model": _model(file, "BPE", _BPE | {"fuse_unk": True, "byte_fallback": True}),
        "normalizer": None,
        "pre_tokenizer": metaspace(scheme, split=False),
        "decoder": _bytes_decoder(strips=card.add_prefix_space is not False),
    }


def _gemma(file: JSON, _: TokenizerCard, tokens: Tokens) -> JSON:
    space = {"String": " "}
    return {
        "model": _model(file, "BPE", _BPE | {"fuse_unk": True, "byte_fallback": True, "unk_token": tokens.name("unk")}),
        "normalizer": {"type": "Replace", "pattern": space, "content": SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": _bytes_decoder(strips=False),
    }


class _Definition(NamedTuple):
    build: Callable[[JSON, TokenizerCard, Tokens], JSON] | None
    """Builder of the parts of tokenizer.json that the class overrides."""
    vocabulary: str | None
    """Kind of vocabulary that the class reads; None: any."""
    tokens: Mapping[str, str]
    """Default special tokens by role."""
    frame: tuple[str, str] | None = None
    """Special tokens of a text and of a pair, as `template` takes them, unless `build` gives a post-processor."""


_BYTES, _PIECES = "byte-level BPE", "BPE over pieces"
_SPACES: Final = {_BYTES: "\u0120", _PIECES: SPACE}
"""Kind of BPE -> sign for a space in its tokens."""
_FAIRSEQ: Final = dict(zip(_ROLES, "<s> </s> <unk> </s> <pad> <s> <mask>".split(), strict=True))
_BRACKETS: Final = dict(zip(_ROLES, "[CLS] [SEP] [UNK] [SEP] [PAD] [CLS] [MASK]".split(), strict=True))
_OF_BERT: Final = {role: token for role, token in _BRACKETS.items() if role not in ("bos", "eos")}
_OF_T5: Final = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_CLS_SEP: Final = ("cls A sep", "cls A sep B:1 sep:1")
_BOS_EOS: Final = ("bos A eos", "bos A eos eos B eos")
_ENDOFTEXT: Final = "<|endoftext|>"
_DEFINITIONS: Final[Mapping[TokenizerClass, _Definition]] = {
    "tokenizer.json": _Definition(None, None, {}),
    "AlbertTokenizer": _Definition(_albert, "Unigram", _BRACKETS | {"unk": "<unk>", "pad": "<pad>"}),
    "BertTokenizer": _Definition(_bert, "WordPiece", _OF_BERT, _CLS_SEP),
    "CamembertTokenizer": _Definition(_camembert, "Unigram", _FAIRSEQ, _BOS_EOS),
    "DebertaV2Tokenizer": _Definition(_deberta, "Unigram", _BRACKETS, _CLS_SEP),
    "GPT2Tokenizer": _Definition(_gpt2, _BYTES, dict.fromkeys(("bos", "eos", "unk"), _ENDOFTEXT)),
    "GemmaTokenizer": _Definition(_gemma, _PIECES, {role: f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")}),
    "LlamaTokenizer": _Definition(_llama, _PIECES, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
    "MPNetTokenizer": _Definition(_mpnet, "WordPiece", _FAIRSEQ | {"unk": "[UNK]"}),
    "Qwen2Tokenizer": _Definition(_qwen2, _BYTES, dict.fromkeys(("eos", "unk", "pad"), _ENDOFTEXT)),
    "RobertaTokenizer": _Definition(_roberta, _BYTES, _FAIRSEQ),
    "T5Tokenizer": _Definition(partial(_unigram, unk_id=2, always=True), "Unigram", _OF_T5, ("A eos", "A eos B eos")),
    "XLMRobertaTokenizer": _Definition(partial(_unigram, unk_id=3), "Unigram", _FAIRSEQ, _BOS_EOS),
}


def find_mismatch(file: JSON, kind: TokenizerClass) -> tuple[str, str] | None:
    """Return (kind of the vocabulary in tokenizer.json, kind that the class reads) if the class cannot read it."""
    if (reads := _DEFINITIONS[kind].vocabulary) is None:
        return None
    found = _vocabulary_kind(file)
    return None if found == reads or (found == "BPE" and reads in _SPACES) else (found, reads)


def _vocabulary_kind(file: JSON) -> str:
    """Return the kind of vocabulary. The oldest files do not name it. "BPE": with both signs for a space, or with neither."""
    vocab, model = vocabulary(file), cast(JSON, file["model"])
    unstated = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    if (kind := model.get("type", unstated)) != "BPE":
        return str(kind)
    signs = [name for name, sign in _SPACES.items() if any(sign in str(token) for token in vocab)]
    return signs[0] if len(signs) == 1 else "BPE"


_BPE: Final = {
    "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
    "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def _model(file: JSON, kind: str, fields: JSON) -> JSON:
    return file["model"] | {"type": kind} | fields


def _byte_level(card: TokenizerCard, *, use_regex: bool) -> JSON:
    flags = {"add_prefix_space": bool(card.add_prefix_space), "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def _bytes_decoder(*, strips: bool) -> JSON:
    """Return the decoder of pieces that may be bytes. `strips`: remove the space before the first word."""
    steps: list[JSON] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return {"type": "Sequence", "decoders": steps}


def metaspace(scheme: str, *, split: bool) -> JSON:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}


def _roberta_processing(tokens: Tokens, *, add_prefix_space: bool) -> JSON:
    sep, cls = ([tokens.name(role), tokens.id(role)] for role in ("sep", "cls"))
    return {"type": "RobertaProcessing", "sep": sep, "cls": cls, "trim_offsets": True, "add_prefix_space": add_prefix_space}


def template(single: str, pair: str, tokens: Tokens) -> JSON:
    """Return the post-processor of "cls A sep:1": special tokens by role, A or B for a text, and token types after a colon."""

    def piece(word: str) -> JSON:
        name, _, type_id = word.partition(":")
        kind, name = ("Sequence", name) if name in ("A", "B") else ("SpecialToken", tokens.name(name))
        return {kind: {"id": name, "type_id": int(type_id or 0)}}

    roles = sorted({word.partition(":")[0] for word in pair.split()} - {"A", "B"})
    ids = {tokens.name(role): tokens.id(role) for role in roles}
    return {
        "type": "TemplateProcessing",
        "single": [piece(word) for word in single.split()],
        "pair": [piece(word) for word in pair.split()],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()},
    }


def flags_template(flags: tuple[bool, bool], tokens: Tokens) -> JSON:
    """Return the post-processor that adds the tokens of `add_bos_token` and `add_eos_token`. Raises CheckpointError."""
    begins, ends = flags

    def around(text: str, type_id: str) -> str:
        return f"{f'bos{type_id} ' if begins else ''}{text}{type_id}{f' eos{type_id}' if ends else ''}"

    return template(around("A", ""), f"{around('A', '')} {around('B', ':1')}", tokens)


def _charsmap(normalizer: JSON | None) -> JSON | None:
    """Return SentencePiece's precompiled map, the only step of the normalizer that the class uses."""
    steps: list[JSON] = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    return next((step for step in steps if step.get("type") == "Precompiled"), None)


def vocabulary(file: JSON) -> Mapping[str, int]:
    """Return token -> id without added tokens. Raises CheckpointError."""
    try:
        vocab: Any = file["model"]["vocab"]
        return {row[0]: i for i, row in enumerate(cast(list[Any], vocab))} if isinstance(vocab, list) else {**vocab}
    except (KeyError, TypeError, IndexError):
        raise CheckpointError("holds no vocabulary.", file="tokenizer.json", key="model") from None


def unknown_token(card: TokenizerCard) -> str | None:
    stated = card.special_tokens.get("unk", {"content": _DEFINITIONS[card.tokenizer_class].tokens.get("unk")})
    return None if stated is None else stated["content"]


def _special_tokens(file: JSON, card: TokenizerCard) -> Mapping[str, AddedToken]:
    """Return the token of each role, in the order in which tokens get ids: from the card, else the class's default."""
    kind, old = card.tokenizer_class, card.reading == "transformers-4"
    has_padding = bool(file.get("padding")) and (old or kind != "GPT2Tokenizer")  # a class without a default padding token
    padding = {"pad": file["padding"]["pad_token"]} if has_padding else {}
    defaults = {role: {"content": token, "special": True} for role, token in {**padding, **_DEFINITIONS[kind].tokens}.items()}
    if old and kind == "GemmaTokenizer":
        del defaults["mask"]
    token_of = {**defaults, **card.special_tokens}
    roles = [role for role in _ROLES if role in token_of] + [role for role in token_of if role not in _ROLES]
    tokens = {role: token for role in roles if (token := token_of[role]) is not None}
    if kind in (_OLD_MASK_TAKES_SPACE if old else _MASK_TAKES_SPACE) and "mask" in tokens:
        tokens["mask"] = {"lstrip": True, **tokens["mask"]}
    return tokens


def _added_tokens(file: JSON, card: TokenizerCard, role_tokens: Collection[AddedToken], vocab_size: int) -> list[JSON]:
    """Return the added tokens in the order and with the ids of the tokenizers library.

    Tokens of tokenizer_config.json replace those of tokenizer.json. Special tokens in neither file follow. Of several special
    tokens with the same content, the last one counts.
    """
    kind, keeps = card.tokenizer_class, card.tokenizer_class == "tokenizer.json" or card.reading != "transformers"
    default = [{"content": token, "special": True} for token in _CAMEMBERT_EXTRA] if kind == "CamembertTokenizer" else []
    special = [*role_tokens, *(default if card.extra_tokens is None else card.extra_tokens)]
    in_file: list[AddedToken] = file.get("added_tokens") or []
    if not keeps:
        in_file = sorted(in_file, key=lambda token: token["id"]) if card.added_tokens is None else []
    tokens = {token["content"]: token for token in in_file}
    for token in card.added_tokens or ():
        before = tokens.get(token["content"])
        is_kept = card.reading == "transformers-4" and token.get("special") and before and _strips(before) == _strips(token)
        if not is_kept:  # a special token is not replaced for `normalized` alone
            tokens[token["content"]] = token
    new = list[AddedToken]()
    for token in special:
        if token["content"] not in tokens and token not in new:
            new.append(token)
    tokens |= {token["content"]: token for token in new}
    tokens |= {name: {**tokens[name], "special": True} for name in {token["content"] for token in role_tokens}}
    if kind == "Qwen2Tokenizer" and not keeps:  # the class adds all of them again
        tokens |= {token["content"]: {"content": token["content"], "special": True} for token in special}
    for name in card.legacy_tokens:
        if name not in tokens:
            raise CheckpointError("this token is not in tokenizer.json.", file="added_tokens.json", key=name)
    return list(with_ids(tokens.values(), file, vocab_size))


def _strips(token: AddedToken) -> list[bool]:
    return [bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip")]


def with_ids(tokens: Iterable[AddedToken], file: JSON, vocab_size: int) -> Iterator[JSON]:
    """Yield the tokens that the model embeds, with the ids of the tokenizers library, which ignores the ids in the files."""
    ids = vocabulary(file)
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
