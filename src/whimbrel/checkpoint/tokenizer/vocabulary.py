"""Vocabulary files.

Reads tokenizer.json, or the vocabulary files of older checkpoints. Those have the model only; `classes.py` builds the rest as
the checkpoint's tokenizer class does. Source:
transformers/tokenization_utils_tokenizers.py and models/*/tokenization_*.py (5.23).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whimbrel.checkpoint.json_file import JsonFile, find_file, read_json
from whimbrel.errors import CheckpointError

_FILE, _WORDS, _PAIRS, _MERGES = "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"


def read_tokenizer_file(root: Path) -> JsonFile:
    """Return tokenizer.json, or its equivalent from vocab.txt (WordPiece) or vocab.json and merges.txt (byte pairs).

    Raises CheckpointError.
    """
    if (root / _FILE).exists():
        return JsonFile.read(root, _FILE)
    model: dict[str, Any]
    if (root / _WORDS).exists():
        model = {"type": "WordPiece", "vocab": {word: number for number, word in enumerate(_lines(root, _WORDS))}}
    elif (root / _PAIRS).exists() and (root / _MERGES).exists():
        merges = [line for line in _lines(root, _MERGES) if line and not line.startswith("#version")]
        model = {"type": "BPE", "vocab": read_json(root, _PAIRS), "merges": merges}
    else:
        raise CheckpointError("not found; load and save the tokenizer once with transformers to make it.", file=_FILE)
    return JsonFile(_FILE, {"model": model, "added_tokens": []})


def _lines(root: Path, file: str) -> list[str]:
    try:
        text = find_file(root, file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}.", file=file) from None
    return text.removesuffix("\n").split("\n")
