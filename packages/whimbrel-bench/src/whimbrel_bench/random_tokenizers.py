"""Tokenizers of random models: tokenizer.json and tokenizer_config.json in the layout of real models, over given words.

Every word of `words` is one token where a space precedes it. Anything else falls back to letters, signs and bytes. Pure.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

_SPACE: Final = "\u2581"
_SIGNS: Final = string.ascii_letters + string.digits + string.punctuation
_QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Source: tokenizer.json of Qwen/Qwen3-Embedding-0.6B."""
_NO_LENGTH: Final = 1000000000000000019884624838656
"""The value of `model_max_length` where a tokenizer has no limit of its own."""


def _chains(words: Sequence[str], space: str) -> tuple[list[str], list[list[str]]]:
    """Return the pieces and merges that build each word from the left: after a space first, and then without one.

    A merge of a word after a space has a lower rank than all without, so a word is never torn by another one's letters.
    """
    pieces: dict[str, None] = {}
    merges: dict[tuple[str, str], None] = {}
    for prefix in (space, ""):
        for each in words:
            word = prefix + each
            for end in range(1, len(word)):
                merges[word[:end], word[end]] = None
                pieces[word[: end + 1]] = None
    return list(pieces), [list(pair) for pair in merges]


def _token(number: int, content: str, **more: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags, **more}


def _file(model: Json, added: Sequence[Json], **parts: Json | None) -> Json:
    empty: Json = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        **empty,
        **parts,
        "model": model,
    }


def _config(added: Sequence[Json], tokenizer_class: str, roles: Mapping[str, str | None], **more: Any) -> Json:
    decoder = {str(each["id"]): {key: value for key, value in each.items() if key != "id"} for each in added}
    return {
        "added_tokens_decoder": decoder,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LENGTH,
        "tokenizer_class": tokenizer_class,
        **roles,
        **more,
    }


def _template(single: Sequence[str], pair: Sequence[str], ids: Mapping[str, int]) -> Json:
    """Return a post-processor. A or B stands for a text, with `:1` for the second type."""

    def part(word: str) -> Json:
        name, _, kind = word.partition(":")
        key = "Sequence" if name in ("A", "B") else "SpecialToken"
        return {key: {"id": name, "type_id": int(kind or 0)}}

    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ids.items()}
    return {
        "type": "TemplateProcessing",
        "single": [part(word) for word in single],
        "pair": [part(word) for word in pair],
        "special_tokens": special,
    }


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **more: Any) -> Json:
    fields: Json = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    fields |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **fields, **more, "vocab": dict(vocab), "merges": merges}


def llama(words: Sequence[str]) -> tuple[Json, Json]:
    """Pieces with bytes for unknown characters, as Llama 2's and Mistral's: <s> before a text."""
    special = ["<unk>", "<s>", "</s>"]
    pieces, merges = _chains(words, _SPACE)
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*special, *every_byte, _SPACE, *_SIGNS, *pieces]))}
    added = [_token(number, content) for number, content in enumerate(special)]
    spaces = [{"type": "Prepend", "prepend": _SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    file = _file(
        _bpe(vocab, merges, unk_token=special[0], fuse_unk=True, byte_fallback=True),
        added,
        normalizer={"type": "Sequence", "normalizers": spaces},
        post_processor=_template(["<s>", "A"], ["<s>", "A", "<s>:1", "B:1"], {"<s>": 1}),
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<s>"}
    return file, _config(added, "LlamaTokenizer", roles, add_bos_token=True, add_eos_token=False, legacy=True)


def _byte_signs() -> list[str]:
    """Return the sign that stands for each byte. Source: OpenAI's GPT-2, encoder.py (bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def qwen3(words: Sequence[str]) -> tuple[Json, Json]:
    """Byte pairs, as those of Qwen3's embedding models: <|endoftext|> after a text."""
    pieces, merges = _chains(words, "\u0120")
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*_byte_signs(), *pieces]))}
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = [_token(len(vocab) + number, content) for number, content in enumerate(names)]
    end = names[0]
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    trim = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    template = _template(["A", end], ["A", end, "B:1", f"{end}:1"], {end: len(vocab)})
    file = _file(
        _bpe(vocab, merges),
        added,
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bytes_]},
        post_processor={"type": "Sequence", "processors": [trim, template]},
    )
    roles = {"bos_token": None, "eos_token": names[2], "pad_token": end, "unk_token": None}
    more = {"add_bos_token": False, "add_prefix_space": False, "errors": "replace", "split_special_tokens": False}
    return file, _config(added, "Qwen2Tokenizer", roles, **more)


def xlm_roberta(words: Sequence[str], markers: Sequence[str] = ()) -> tuple[Json, Json]:
    """Pieces with scores, as XLM-RoBERTa's, and further tokens after <mask>."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = dict.fromkeys(
        [_SPACE, *_SIGNS, *(_SPACE + word for word in words), *(_SPACE + sign for sign in string.punctuation)]
    )
    scores = [[piece, -1.0 if len(piece) > 1 else -8.0] for piece in pieces]
    vocab: list[list[Any]] = [*([piece, 0.0] for piece in special), *scores, ["<mask>", 0.0]]
    added = [_token(number, content) for number, content in enumerate(special)]
    added.append(_token(len(vocab) - 1, "<mask>", lstrip=True))
    added += [_token(len(vocab) + number, marker, normalized=True, special=False) for number, marker in enumerate(markers)]
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
    pair = ["<s>", "A", "</s>", "</s>", "B", "</s>"]
    file = _file(
        {"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": False},
        added,
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        post_processor=_template(["<s>", "A", "</s>"], pair, {"<s>": 0, "</s>": 2}),
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
    roles |= {"cls_token": "<s>", "mask_token": "<mask>"}
    return file, _config(added, "XLMRobertaTokenizer", roles)


def wordpiece(words: Sequence[str]) -> tuple[Json, Json]:
    """Words and letters, as BERT's without special tokens around a text, for tables of vectors."""
    pieces = dict.fromkeys(
        ["[UNK]", *(word.lower() for word in words), *_SIGNS.lower(), *(f"##{sign}" for sign in _SIGNS.lower())]
    )
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    model |= {"vocab": {piece: number for number, piece in enumerate(pieces)}}
    added = [_token(0, "[UNK]")]
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    file = _file(model, added, normalizer=normalizer, pre_tokenizer={"type": "BertPreTokenizer"})
    return file, {}


def vocabulary_size(file: Json) -> int:
    """Return the number of ids that a tokenizer.json may give."""
    return max(len(file["model"]["vocab"]), *(token["id"] + 1 for token in file["added_tokens"]))
