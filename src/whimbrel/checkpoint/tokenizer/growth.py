"""Growth of texts in a tokenizer: how much longer its steps may make a text. Pure.

A small tokenizer.json could make a short text take gigabytes. Every step that can lengthen a text is bounded here, by a weight
for each character: the number of characters that it becomes at most. What Unicode's normal forms and lower case add, 18
characters for one at most, is not counted for characters of the text, only for those that a step writes.
"""

import re
import warnings
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast
from unicodedata import normalize

from whimbrel.checkpoint.json_file import JSON
from whimbrel.errors import CheckpointError

_FILE: Final = "tokenizer.json"
_MAX_GROWTH: Final = 16
"""Characters that a character may become, besides Unicode's own expansions."""
_MAX_PRECOMPILED: Final = 32
"""Characters of one entry in SentencePiece's map. NFKC needs 18."""
_MAX_BYTE_LEVELS: Final = 2
_MAX_PREPENDING: Final = 4
_MAX_SPECIAL: Final = 64
"""Tokens that a post-processor may add to a text."""
_PARTS: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Part of tokenizer.json -> key of the steps in its sequences."""


def check_growth(file: JSON) -> None:
    """Raise CheckpointError if the tokenizer may make texts much longer."""
    for part in ("normalizer", "decoder"):
        growth = _growth(list(steps_of(file, part)))
        if growth > _MAX_GROWTH:
            message = f"makes of one character up to {growth:,.0f}; the limit is {_MAX_GROWTH}."
            raise CheckpointError(message, file=_FILE, key=part)
    kinds = [step.get("type") for step in steps_of(file, "pre_tokenizer")]
    if kinds.count("ByteLevel") > _MAX_BYTE_LEVELS or kinds.count("Metaspace") > _MAX_PREPENDING:
        raise CheckpointError("lengthens the words of a text again and again.", file=_FILE, key="pre_tokenizer")
    for step in steps_of(file, "post_processor"):
        for name in ("single", "pair"):
            _check_template(step, name)


def steps_of(file: JSON, part: str) -> Iterator[JSON]:
    """Yield the steps of a part in order, those within sequences too."""
    waiting: list[Any] = [file.get(part)]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue  # none, or the backend refuses it
        inner = cast(JSON, step).get(_PARTS[part])
        if isinstance(inner, list) and cast(JSON, step).get("type", "Sequence") == "Sequence":
            waiting += reversed(cast(list[Any], inner))
        else:
            yield cast(JSON, step)


def _growth(steps: Sequence[JSON]) -> float:
    """Return the most characters that one becomes. The steps are looked at from the last to the first."""
    weights, others, maps = dict[str, float](), 1.0, 0

    def weigh(text: object) -> float:
        """Return the number of characters that a text becomes in the later steps."""
        forms = (str(text), normalize("NFKD", str(text)))
        return max(sum(weights.get(character, others) for character in form) for form in forms)

    for step in reversed(steps):
        kind = step.get("type")
        if kind == "Replace":
            pattern, written = step.get("pattern"), weigh(step.get("content", ""))
            literal = cast(JSON, pattern).get("String") if isinstance(pattern, dict) else pattern
            if isinstance(literal, str) and literal:
                weights |= {each: max(weights.get(each, others), written / len(literal)) for each in literal}
            elif isinstance(pattern, dict) and _has_width(cast(JSON, pattern).get("Regex")):
                others = max(others, written)
                weights = {each: max(weight, written) for each, weight in weights.items()}
            else:  # it may write between any two characters
                weights, others = _more(weights, others, written)
        elif kind in ("Prepend", "BertNormalizer"):  # a text is cut at special tokens first
            weights, others = _more(weights, others, weigh(step.get("prepend", "") if kind == "Prepend" else "  "))
        elif kind == "ByteLevel":
            weights, others = {}, 4 * max([others, *weights.values()])
        elif kind == "Precompiled":
            longest, maps = _longest(step.get("precompiled_charsmap")), maps + 1
            if maps > 1 or longest > _MAX_PRECOMPILED:
                weights, others = {}, longest * max([others, *weights.values()])
    return max([others, *weights.values()])


def _more(weights: Mapping[str, float], others: float, amount: float) -> tuple[dict[str, float], float]:
    return {each: weight + amount for each, weight in weights.items()}, others + amount


def _has_width(regex: object) -> bool:
    """Return whether each match has a character, as far as Python's parser can tell. The backend's syntax is a larger one."""
    if not isinstance(regex, str):
        return False
    known = re.sub(r"\\[pP]\{\^?\w+\}", r"\\w", regex)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re._parser.parse(known).getwidth()[0] > 0  # pyright: ignore
    except (re.error, RecursionError, OverflowError):
        return False


def _longest(charsmap: object) -> int:
    """Return the length of the longest text in SentencePiece's map: the size of a trie, the trie, texts that end with NUL."""
    try:
        data = b64decode(charsmap) if isinstance(charsmap, str) else bytes(cast(list[int], charsmap or ()))
    except (ValueError, TypeError):
        return 0  # the backend refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(sum(byte & 0xC0 != 0x80 for byte in text) for text in texts)


def _check_template(step: JSON, name: str) -> None:
    pieces: Any = step.get(name)
    if step.get("type") != "TemplateProcessing" or not isinstance(pieces, list):
        return
    named = [(kind, fields.get("id")) for piece in cast(list[JSON], pieces) for kind, fields in piece.items()]
    texts = [each for kind, each in named if kind == "Sequence"]
    known: JSON = step.get("special_tokens") or {}
    added = sum(len(known.get(each, {}).get("ids", ())) for kind, each in named if kind == "SpecialToken")
    if len(set(texts)) < len(texts) or added > _MAX_SPECIAL:
        message = f"{name} holds a text twice, or {added:,} tokens; the limit is {_MAX_SPECIAL}."
        raise CheckpointError(message, file=_FILE, key="post_processor")
