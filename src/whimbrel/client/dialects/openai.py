"""Client side of OpenAI's embeddings API, which most servers of embeddings implement."""

from collections.abc import Iterable
from typing import Any

import msgspec

from whimbrel.client.request_bodies import OutputNames, choose_output, item_writer, reject_options, text_list
from whimbrel.client.responses import Data, IndexedRow, check_outputs, float_array, join_outputs, sort_by_index
from whimbrel.client.task import Reply, Task
from whimbrel.types.options import TextOptions
from whimbrel.types.result import ListedModel, Outputs
from whimbrel.wire.json_base64 import from_base64
from whimbrel.wire.whole_numbers import decode_json


class _Row(IndexedRow):
    embedding: str | list[float]


def encode(model: str | None, texts: str | Iterable[Any], outputs: OutputNames, options: TextOptions) -> Task[Outputs]:
    choose_output("openai", outputs, ("dense",))
    reject_options("openai", options, ("dimensions",))
    write = item_writer("input", encoding_format="base64", model=model, dimensions=options.get("dimensions"))
    return Task("/v1/embeddings", text_list(texts), write, _read, join_outputs)


def _read(reply: Reply, count: int) -> Outputs:
    rows = sort_by_index(decode_json(Data[_Row], reply.content).data, count)
    texts = [row.embedding for row in rows if isinstance(row.embedding, str)]
    is_base64 = len(texts) == len(rows)  # there are servers without it
    dense = from_base64(texts) if is_base64 else float_array([row.embedding for row in rows], 2)
    return check_outputs(Outputs(dense), ("dense",), count)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


def read_models(content: bytes) -> list[ListedModel]:
    return [ListedModel(each.id, each.max_model_len) for each in decode_json(Data[_Model], content).data]
