"""Dialects that a client speaks, and the verbs of each.

A module per API: its functions turn the arguments of a verb into a Task. Verbs without a table here are Whimbrel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

from whimbrel.client.dialects import cohere, openai, tei, whimbrel
from whimbrel.client.task import Task
from whimbrel.errors import InvalidRequest
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs

DialectName: TypeAlias = Literal["whimbrel", "openai", "tei", "cohere"]
Encode: TypeAlias = Callable[[str | None, str | Iterable[Any], OutputName | Sequence[OutputName], TextOptions], Task[Outputs]]
Rerank: TypeAlias = Callable[[str | None, Any, Any, ScoreOptions], Task[Float32Array]]

_ENCODE: Final[dict[str, Encode]] = {
    "whimbrel": whimbrel.encode, "openai": openai.encode, "tei": tei.encode, "cohere": cohere.encode
}  # fmt: skip
_RERANK: Final[dict[str, Rerank]] = {"whimbrel": whimbrel.rerank, "tei": tei.rerank, "cohere": cohere.rerank}


def encoder_of(dialect: str) -> Encode:
    """Return the function that requests vectors in a dialect. Raises InvalidRequest."""
    if dialect not in _ENCODE:
        raise InvalidRequest(f"{dialect!r} is not known; it takes {', '.join(_ENCODE)}.", param="dialect")
    return _ENCODE[dialect]


def reranker_of(dialect: str) -> Rerank:
    """Return the function that requests the scores of documents in a dialect. Raises InvalidRequest."""
    if dialect not in _RERANK:
        raise InvalidRequest(f"the dialect {dialect} has no 'rerank'; {', '.join(_RERANK)} have.", param="dialect")
    return _RERANK[dialect]


def require_whimbrel(dialect: str, verb: str) -> None:
    """Raise InvalidRequest unless the dialect is Whimbrel's own."""
    if dialect != "whimbrel":
        raise InvalidRequest(f"the dialect {dialect} has no {verb!r}; Whimbrel's own has.", param="dialect")
