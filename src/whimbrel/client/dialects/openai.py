"""OpenAI's dialect, from the client's side: what nearly every server of embeddings speaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from whimbrel.client.request_bodies import input_body, named, reject_options, size_of, text_list
from whimbrel.client.responses import checked, floats, in_order, join_outputs
from whimbrel.client.task import Reply, Task
from whimbrel.types.options import TextOptions
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs
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
    reject_options("openai", outputs, ("dense",), options, _OPTIONS)
    fields: dict[str, Any] = {"encoding_format": "base64", **named(model)}
    if options.get("dimensions") is not None:
        fields["dimensions"] = options.get("dimensions")
    return Task("/v1/embeddings", text_list(texts), partial(input_body, fields), _read, join_outputs, size_of)


def _read(reply: Reply, count: int) -> Outputs:
    rows = in_order(msgspec.json.decode(reply.content, type=_Answer).data, count)
    texts = [row.embedding for row in rows if isinstance(row.embedding, str)]
    if len(texts) == len(rows):
        return checked(Outputs(from_base64(texts)), ("dense",), count)
    return checked(Outputs(floats([row.embedding for row in rows], 2)), ("dense",), count)  # a server that knows no base64
