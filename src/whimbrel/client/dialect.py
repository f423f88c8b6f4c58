"""Which dialect of a server's is spoken, and the verbs that it has."""

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
"""The other verbs are Whimbrel's own alone."""


def encode_of(dialect: str) -> Encode:
    """How it asks for vectors. Raises InvalidRequest."""
    if dialect not in _ENCODE:
        raise InvalidRequest(f"{dialect!r} is not known; it takes {', '.join(_ENCODE)}.", param="dialect")
    return _ENCODE[dialect]


def rerank_of(dialect: str) -> Rerank:
    """How it asks for the scores of documents. Raises InvalidRequest."""
    if dialect not in _RERANK:
        raise InvalidRequest(f"the dialect {dialect} has no 'rerank'; {', '.join(_RERANK)} have.", param="dialect")
    return _RERANK[dialect]


def only_ours(dialect: str, verb: str) -> None:
    """Raises InvalidRequest where another dialect is spoken."""
    if dialect != "whimbrel":
        raise InvalidRequest(f"the dialect {dialect} has no {verb!r}; Whimbrel's own has.", param="dialect")
