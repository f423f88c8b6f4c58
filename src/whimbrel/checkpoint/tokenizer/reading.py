"""Choice between the readings of a tokenizer's files.

By default a tokenizer is read as transformers 5 reads it. Where transformers 4 has other special tokens, the version that made
the model decides. If the files do not tell it, they are refused (ADR 26).

transformers 4 makes the special tokens of a Llama, Gemma, GPT-NeoX or Cohere tokenizer from `add_bos_token` and `add_eos_token`
and ignores the post-processor. transformers 5 ignores the flags beside a tokenizer.json, and never writes them.

Source: `update_post_processor` in transformers/models/llama/tokenization_llama_fast.py (4.57), and `_from_pretrained` and
`save_pretrained` in transformers/tokenization_utils_base.py (5.23).
"""

import json
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.json_file import JSON, JsonFile
from whimbrel.checkpoint.tokenizer.classes import CLASSES, flags_template, read_tokens
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.types.card import TokenizerCard
from whimbrel.types.choices import TOKENIZER_READINGS, TokenizerReading

Kind: TypeAlias = Literal["single", "pair"]
Frame: TypeAlias = tuple[int | str, ...]
"""Ids of special tokens around A, or around A and B, which stand for texts."""

_FILE, _SENTENCE = "tokenizer.json", "config_sentence_transformers.json"
_FLAGS: Final = ("add_bos_token", "add_eos_token")
_DEFAULT_FLAGS: Final[Mapping[str, tuple[bool, bool]]] = {
    **dict.fromkeys(("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer"), (True, False)),
    "GPTNeoXTokenizer": (False, False),
}
"""Classes of transformers 4 that go by the flags, with the flags' defaults."""
_TYPES: Final = {
    "GPTNeoXTokenizer": "olmo2",
    "GemmaTokenizer": "gemma gemma2 gemma3_text",
    "LlamaTokenizer": "deepseek_v3 ernie4_5 ernie4_5_moe llama ministral mistral mixtral persimmon phi3 phimoe",
}
_IMPLIED: Final = {model_type: name for name, model_types in _TYPES.items() for model_type in model_types.split()}
"""Model type -> class of transformers 4 that goes by the flags, where no class is stated."""
_KINDS: Final[tuple[Kind, ...]] = ("single", "pair")
_NO_LIMIT: Final = 2**31


def find_reading(option: str | None) -> TokenizerReading | None:
    """Return the reading that the user chose, or None for None and "auto". Raises SetupError for another value."""
    readings: dict[object, TokenizerReading] = {reading: reading for reading in TOKENIZER_READINGS}
    reading = readings.get(option)
    if reading is None and option not in (None, "auto"):
        raise SetupError(f"no tokenizer {option!r}.", hint=f"--tokenizer takes auto, {', '.join(TOKENIZER_READINGS)}")
    return reading


def with_reading(
    card: TokenizerCard,
    folder: Path,
    config: JsonFile,
    tokenizer: JsonFile,
    file: JSON,
    *,
    path: str,
    chosen: TokenizerReading | None,
    pairs: bool,
) -> TokenizerCard:
    """Return the card with its reading: the `chosen` one, or if that is None the one that the files tell.

    Raises CheckpointError if they disagree and do not tell which reading is right, or lack what it needs.
    """
    has_file = (folder / path / _FILE).exists()
    if chosen in ("file", "transformers-4") and not has_file:
        raise CheckpointError(f"not found, so it cannot be read as --tokenizer {chosen} says; leave that out.", file=_FILE)
    if chosen in ("file", "transformers"):
        return replace(card, reading=chosen)
    name = _class_name(config, tokenizer)
    if chosen is not None and name not in (*CLASSES, *_DEFAULT_FLAGS, None):
        message = f"transformers 4 has no class {name!r}, or Whimbrel does not know how it reads {_FILE}."
        raise tokenizer.error(message, "tokenizer_class", "--tokenizer file or transformers reads it")
    old = replace(
        card,
        tokenizer_class=card.tokenizer_class if name is None else CLASSES.get(name, "tokenizer.json"),
        legacy=tokenizer.get("legacy", bool, True),
        flags=None if card.ends else _flags(name, tokenizer),
        reading="transformers-4",
    )
    if chosen is not None or old.flags is None or not has_file:
        return card if chosen is None else old
    if (readings := _differing(old, old.flags, file, _KINDS if pairs else _KINDS[:1])) is None:
        return card
    by_flags, by_file = readings
    versions = _versions(folder, config, tokenizer)
    said = " and ".join(f"{name} says transformers {version}" for name, version in versions.items())
    if versions and all(_major(version) < 5 for version in versions.values()):
        return replace(old, reason=f"{by_flags} by its flags, not {by_file} by the post-processor: {said}")
    if stated := [flag for flag in _FLAGS if flag in tokenizer.data]:
        values = ", ".join(f"{flag} {json.dumps(tokenizer.data[flag])}" for flag in stated)
        raise tokenizer.error(
            f"with {values}, transformers 4 makes {by_flags} of a text. By the post-processor of {_FILE}, transformers 5 "
            f"makes {by_file}; it never writes these flags. The files do not tell with which the model was made"
            f"{f': {said}' if said else ''}.",
            stated[-1],
            f"--tokenizer transformers-4 makes {by_flags}, --tokenizer transformers {by_file}; in Python tokenizer=...; "
            "the vectors differ, so ask who made the model, or compare with vectors that are known to be right",
        )
    return card


def _differing(old: TokenizerCard, flags: tuple[bool, bool], file: JSON, kinds: tuple[Kind, ...]) -> tuple[str, str] | None:
    """Return what flags and post-processor make of a text or a pair, in words. None if they agree, or for want of a token."""
    tokens, _ = read_tokens(file, old, _NO_LIMIT)
    roles = [role for role, flag in zip(("bos", "eos"), flags, strict=True) if flag]
    if any(tokens.names.get(role) not in tokens.ids for role in roles):
        return None
    by_flags = flags_template(flags, tokens)
    frames = [(_frame(by_flags, kind), _frame(file.get("post_processor"), kind)) for kind in kinds]
    texts = {number: token for token, number in tokens.ids.items()}
    return next(((_words(one, texts), _words(other, texts)) for one, other in frames if one != other), None)


def _class_name(config: JsonFile, tokenizer: JsonFile) -> str | None:
    """Return the class that transformers 4 chooses, without "Fast". None if none is stated and none of the flags is implied."""
    for owner in (tokenizer, config):
        if owner.data.get("tokenizer_class") is not None:
            return owner.get("tokenizer_class", str).removesuffix("Fast")
    return _IMPLIED.get(config.get("model_type", str, ""))


def _flags(name: str | None, tokenizer: JsonFile) -> tuple[bool, bool] | None:
    """Return the flags of a class that goes by them. A null is false, as in transformers 4."""
    if name not in _DEFAULT_FLAGS:
        return None
    defaults = zip(_FLAGS, _DEFAULT_FLAGS[name], strict=True)
    begins, ends = (tokenizer.get(flag, bool, default and flag not in tokenizer.data) for flag, default in defaults)
    return begins, ends


def _versions(folder: Path, config: JsonFile, tokenizer: JsonFile) -> dict[str, str]:
    """Return the versions of transformers with which the checkpoint's files were written."""
    of_sentence: Any = JsonFile.read_optional(folder, _SENTENCE).data.get("__version__")
    saved_by_5 = "5" if "backend" in tokenizer.data else None  # a key that no earlier version writes
    stated = {
        config.name: config.data.get("transformers_version"),
        tokenizer.name: tokenizer.data.get("transformers_version", saved_by_5),
        _SENTENCE: cast(JSON, of_sentence).get("transformers") if isinstance(of_sentence, dict) else None,
    }
    return {name: version for name, version in stated.items() if isinstance(version, str) and _major(version)}


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) < 4 else 0


def _frame(post_processor: object, kind: Kind) -> Frame:
    """Return what a post-processor makes of a text or a pair. Raises CheckpointError if it is malformed."""
    try:
        steps = list(_steps(post_processor))
        if len(steps) > 1:
            raise CheckpointError("has several steps that add tokens.", file=_FILE, key="post_processor")
        frame = tuple(_step(steps[0], kind)) if steps else ()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        raise CheckpointError("is malformed.", file=_FILE, key="post_processor") from None
    return frame or (("A",) if kind == "single" else ("A", "B"))


def _steps(step: Any) -> Generator[JSON]:
    """Yield the steps of a post-processor that add tokens."""
    if step is None or step["type"] == "ByteLevel":
        return
    if step["type"] != "Sequence":
        yield step
    for inner in step["processors"] if step["type"] == "Sequence" else ():
        yield from _steps(inner)


def _step(step: JSON, kind: Kind) -> Generator[int | str]:
    if step["type"] == "TemplateProcessing":
        for piece in step[kind]:
            ((shape, fields),) = piece.items()
            yield from [str(fields["id"])] if shape == "Sequence" else map(int, step["special_tokens"][fields["id"]]["ids"])
        return
    (_, sep), (_, cls) = step["sep"], step["cls"]  # BertProcessing and RobertaProcessing
    second = [sep] if step["type"] == "RobertaProcessing" else []
    yield from [cls, "A", sep, *([*second, "B", sep] if kind == "pair" else [])]


def _words(frame: Frame, texts: Mapping[int, str]) -> str:
    """Return a frame in words, e.g. "<s> A </s>"."""
    return "'" + " ".join(each if isinstance(each, str) else texts.get(each, f"<{each}>") for each in frame) + "'"
