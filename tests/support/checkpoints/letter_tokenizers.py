"""Tokenizers whose tokens are single letters, so that a test can state ids, in the layouts of published models.

The files of each disagree in a way in which transformers 4, transformers 5 and tokenizer.json itself differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.files import write_json

JSON = dict[str, Any]

SPACE = "\u2581"
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *"ABC", *"12."]
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": [],
}  # fmt: skip
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def around(single: str, pair: str, ids: dict[str, int]) -> JSON:
    """The post-processor of "<s> A" and "<s> A B"."""

    def pieces(words: str) -> list[JSON]:
        kinds = [(word, "Sequence" if word in ("A", "B") else "SpecialToken") for word in words.split()]
        return [{kind: {"id": word, "type_id": 0}} for word, kind in kinds]

    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ids.items()}
    return {"type": "TemplateProcessing", "single": pieces(single), "pair": pieces(pair), "special_tokens": special}


def _file(special: list[str], letters: list[str], **parts: Any) -> JSON:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = {token: number for number, token in enumerate([*special, *letters])}
    model = _BPE | {"vocab": tokens} | parts.pop("model", {})
    added = [{"id": number, "content": token, **flags} for number, token in enumerate(special)]
    empty: JSON = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    about: JSON = {"version": "1.0", "truncation": None, "padding": None}
    return {**about, "added_tokens": added, **empty, **parts, "model": model}


def llama(**parts: Any) -> JSON:
    """Llama 2's: <unk> 0, <s> 1, </s> 2, the sign for a space 3, a 4, b 5."""
    prepend = {"type": "Prepend", "prepend": SPACE}
    whole = {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, _REPLACE]},
        "post_processor": around("<s> A", "<s> A <s> B", {"<s>": 1}),
        "model": {"unk_token": "<unk>", "fuse_unk": True},
    }
    return _file(["<unk>", "<s>", "</s>"], [SPACE, *LETTERS], **whole | parts)


def gemma(**parts: Any) -> JSON:
    """Gemma's: <pad> 0, <eos> 1, <bos> 2, <unk> 3, the sign for a space 4, a 5, b 6."""
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    whole = {
        "normalizer": _REPLACE,
        "pre_tokenizer": split,
        "post_processor": around("<bos> A", "<bos> A <bos> B", {"<bos>": 2}),
        "model": {"unk_token": "<unk>", "fuse_unk": True},
    }
    return _file(["<pad>", "<eos>", "<bos>", "<unk>"], [SPACE, *LETTERS], **whole | parts)


def byte_level(*special: str, **parts: Any) -> JSON:
    """Bytes after the special tokens: a space, a new line, a, b."""
    return _file([*special], ["Ġ", "Ċ", *LETTERS], **{"pre_tokenizer": _BYTES, "post_processor": _BYTES} | parts)


def bert(**parts: Any) -> JSON:
    """BERT's, whose normalizer keeps capitals and accents: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, a 4, ##a 36."""
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    words = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    whole = {
        "normalizer": {**normalizer, "strip_accents": None, "lowercase": False},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": around("[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]", {"[CLS]": 2, "[SEP]": 3}),
    }
    content = _file(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], [*LETTERS, *(f"##{letter}" for letter in LETTERS)], **whole | parts)
    return content | {"model": {"type": "WordPiece", "vocab": content["model"]["vocab"]} | words}


def xlm_roberta() -> JSON:
    """XLM-RoBERTa's without its map of characters and without a split at spaces: <s> 0, </s> 2, the sign for a space 4, a 5."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    processor = around("<s> A </s>", "<s> A </s> </s> B </s>", {"<s>": 0, "</s>": 2})
    content = _file(special, [], pre_tokenizer=space, post_processor=processor)
    pieces = [*([token, 0.0] for token in special), *([letter, -2.0] for letter in (SPACE, *LETTERS))]
    return content | {"model": {"type": "Unigram", "unk_id": 3, "vocab": pieces, "byte_fallback": False}}


_LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA = {
    "tokenizer_class": "GemmaTokenizer",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_BOTH = {"add_bos_token": True, "add_eos_token": True}
_END = "<|endoftext|>"
_ROBERTA = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}

LAYOUTS: dict[str, tuple[str, JSON, JSON]] = {
    "e5-mistral": ("mistral", llama(), _LLAMA | _BOTH | {"legacy": True}),
    "llama": ("llama", llama(), _LLAMA | _BOTH | {"legacy": True}),
    "llama without flags": ("llama", llama(post_processor=around("<s> A </s>", "A B", {"<s>": 1, "</s>": 2})), _LLAMA),
    "llama without a post-processor": ("llama", llama(post_processor=None), _LLAMA | _BOTH),
    "gemma": ("gemma", gemma(), _GEMMA | _BOTH),
    "qwen2": ("qwen2", byte_level(_END, "<|im_end|>"), _BOTH | {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": _END}),
    "deepseek": ("llama", byte_level("<s>", "</s>", "<unk>"), _LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}),
    "olmo2": ("olmo2", byte_level(_END), {"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": False, "add_eos_token": True, "eos_token": _END}),
    "bert in capitals": ("bert", bert(), {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
    "bert in lower case": (
        "bert", bert(normalizer={"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}, {"type": "StripAccents"}]}),
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    ),
    "roberta with a space": (
        "roberta", byte_level("<s>", "<pad>", "</s>", "<unk>", pre_tokenizer=_BYTES | {"add_prefix_space": True}, post_processor={
            "type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": True}),
        _ROBERTA | {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False},
    ),
    "xlm-roberta": ("xlm-roberta", xlm_roberta(), _ROBERTA | {"tokenizer_class": "XLMRobertaTokenizer"}),
}  # fmt: skip
"""Name -> model type, tokenizer.json and tokenizer_config.json."""


def write_tokenizer(folder: Path, name: str, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json of a layout. "ABSENT" takes a key of the latter away."""
    _, content, stated = LAYOUTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", {key: value for key, value in (stated | config).items() if value != "ABSENT"})
