"""OpenAI's dialect, from the client's side: what nearly every server of embeddings speaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from whimbrel.client.bodies import input_body, listed_texts, refuse_options, size_of
from whimbrel.client.task import Reply, Task
from whimbrel.types import Float32Array, OutputName, Outputs
from whimbrel.verbs import TextOptions
from whimbrel.wire import from_base64

_OPTIONS: Final = ("dimensions",)


class _Row(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


def encode(
    model: str | None, texts: str | Iterable[Any], outputs: OutputName | Sequence[OutputName], options: TextOptions
) -> Task[Outputs]:
    """Dense vectors of texts."""
    refuse_options("openai", outputs, ("dense",), options, _OPTIONS)
    fields: dict[str, Any] = {"encoding_format": "base64"}
    if model is not None:  # servers of one model do not ask for its name
        fields["model"] = model
    if options.get("dimensions") is not None:
        fields["dimensions"] = options.get("dimensions")
    return Task("/v1/embeddings", listed_texts(texts), partial(input_body, fields), _read, join_dense, size_of)


def _read(reply: Reply, count: int) -> Outputs:
    rows = sorted(msgspec.json.decode(reply.content, type=_Answer).data, key=lambda row: row.index)
    if [row.index for row in rows] != list(range(count)):
        raise ValueError(f"{len(rows)} rows for {count} texts, or their numbers are wrong")
    texts = [row.embedding for row in rows if isinstance(row.embedding, str)]
    if len(texts) == len(rows):
        return Outputs(from_base64(texts))
    return Outputs(matrix([row.embedding for row in rows]))  # a server that knows no base64


def matrix(rows: Sequence[Any]) -> Float32Array:
    """Lists of numbers, of one length -> (N, D). Raises ValueError."""
    found = np.array(rows, np.float32)
    if found.ndim != 2:
        raise ValueError("rows of unequal width, or empty")
    return found


def join_dense(parts: list[Outputs]) -> Outputs:
    """Of several requests."""
    return Outputs(np.concatenate([part.dense for part in parts if part.dense is not None]))
