"""Variants of a model that are compared: its dtype, and the form in which its vectors are stored and searched. Pure.

A variant is written as words joined by "+": `bfloat16`, `dim:256+binary`, `muvera+rescore:100`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from whimbrel.errors import SetupError
from whimbrel.types.choices import DTYPES

Precision: TypeAlias = Literal["float32", "int8", "binary"]

_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(DTYPES, "the dtype of the model"),
    "int8-vectors": "documents' vectors in int8",
    "binary": "vectors of one bit per column",
    "dim:N": "the first N columns (Matryoshka)",
    "pooled:F": "about 1 / F of a document's token vectors",
    "muvera": "one vector in place of token vectors",
    "rescore:N": "the N best ranked again by the model's vectors in full",
}
"""Words of variants, and the meaning of each."""
_LIMIT: Final = 2**20


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of one system, beside its model."""

    dtype: str | None = None
    """None: the model's own, as the plan chooses it."""
    precision: Precision = "float32"
    dimensions: int | None = None
    pool_factor: float | None = None
    """None: as the checkpoint says."""
    muvera: bool = False
    rescored: int = 0
    """Number of best documents that are ranked again by vectors in full; 0: none."""

    @property
    def is_plain(self) -> bool:
        """True if nothing is said of the vectors."""
        return self == Variant(self.dtype)

    def __str__(self) -> str:
        words = [
            self.dtype,
            f"dim:{self.dimensions}" if self.dimensions else None,
            f"pooled:{self.pool_factor:g}" if self.pool_factor else None,
            "muvera" if self.muvera else None,
            {"float32": None, "int8": "int8-vectors", "binary": "binary"}[self.precision],
            f"rescore:{self.rescored}" if self.rescored else None,
        ]
        return "+".join(filter(None, words))


def _whole(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _LIMIT:
        raise ValueError(text)
    return number


def _factor(text: str) -> float:
    number = float(text)
    if not 1 <= number <= _LIMIT:
        raise ValueError(text)
    return number


_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    **{dtype: {"dtype": dtype} for dtype in DTYPES},
    "int8-vectors": {"precision": "int8"},
    "binary": {"precision": "binary"},
    "muvera": {"muvera": True},
}
_WITH_NUMBER: Final[Mapping[str, tuple[str, Callable[[str], int | float]]]] = {
    "dim": ("dimensions", _whole),
    "pooled": ("pool_factor", _factor),
    "rescore": ("rescored", _whole),
}


def read_variants(text: str | None, dtype: str | None = None) -> tuple[Variant, ...]:
    """Return the variants of a list such as "float32,int8,dim:128+binary"; `dtype` is that of those which name none.

    Without a list there is one variant, the model as it is. Raises SetupError.
    """
    parts = [each.strip() for each in text.split(",")] if text is not None else [""]
    if text is not None and not all(parts):
        raise SetupError(f"--compare {text!r} has an empty variant.", hint=f"a variant is of {', '.join(_WORDS)}, joined by +")
    read = [_read(part) if part else Variant() for part in parts]
    return tuple(dict.fromkeys(replace(each, dtype=each.dtype or dtype) for each in read))


def _read(text: str) -> Variant:
    fields: dict[str, Any] = {}
    for word in text.lower().split("+"):
        for name, value in _word(word, text).items():
            if name in fields:
                raise SetupError(f"--compare: {text!r} says the {name} twice.", hint="separate variants by commas")
            fields[name] = value
    variant = Variant(**fields)
    if variant.muvera and variant.precision != "float32":
        hint = "compare muvera, or a precision of the token vectors"
        raise SetupError(f"--compare: {text!r}: encodings of MUVERA have lengths, which fewer bits do not keep.", hint=hint)
    if variant.rescored and not (variant.muvera or variant.precision != "float32"):
        raise SetupError(
            f"--compare: {text!r} ranks by vectors in full already.", hint="rescore goes with binary, int8-vectors or muvera"
        )
    return variant


def _word(word: str, text: str) -> Mapping[str, Any]:
    word = word.strip()
    if word in _FIXED:
        return _FIXED[word]
    name, _, number = word.partition(":")
    if name in _WITH_NUMBER:
        field, read = _WITH_NUMBER[name]
        try:
            return {field: read(number)}
        except ValueError:
            raise SetupError(f"--compare: {word!r} has no number from 1 on.", hint=f"for example {name}:2") from None
    known = "; ".join(f"{each}: {meaning}" for each, meaning in _WORDS.items() if each not in DTYPES)
    raise SetupError(f"--compare: {word!r} in {text!r} is not known.", hint=f"a dtype ({', '.join(DTYPES)}); {known}")
