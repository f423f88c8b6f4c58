"""Worker of a run on a cluster: an actor that holds an engine, reads a shard, and returns the bytes of its files.

It writes nothing. So a shard that runs twice, since its actor died or seemed to, is written once.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import gethostname
from typing import Any, Final

from whimbrel.bulk.arrow import Table, pa
from whimbrel.bulk.compute import TableForm, begin
from whimbrel.bulk.folder import record_of, shard_contents
from whimbrel.bulk.manifest import Shard, encode
from whimbrel.bulk.output_files import OutputFormat
from whimbrel.bulk.rows import RowReader
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.ray.sources import RemoteError, Source, load_same

ANSWER: Final = pa.schema(
    [
        pa.field("number", pa.int64()),
        pa.field("record", pa.binary()),
        pa.field("contents", pa.list_(pa.large_binary())),
        pa.field("tokens", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("hint", pa.string()),
    ]
)
"""A shard's number, its record as it is to be written, the bytes of its files, and its tokens; or an error."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Everything that a worker needs beside a shard."""

    source: Source
    cores: float | None
    form: TableForm
    reader: RowReader
    format: OutputFormat
    expected: Mapping[str, Any]
    """The `identity` of the first node, which all must have."""


class ShardWorker:
    """Computes shards. Ray Data calls it, in two threads at once, so that one shard is read or encoded while another runs."""

    def __init__(self, task: ShardTask) -> None:
        self._task = task
        self._error: RemoteError | None = None
        try:
            self._embedder = load_same(task.source, task.cores, task.expected)
            self._threads = ThreadPoolExecutor(self._embedder.sizes.in_flight)
        except WhimbrelError as error:
            self._error = RemoteError.of(error)

    def __call__(self, batch: Table) -> Iterator[Table]:
        for row in batch.to_pylist():
            yield pa.Table.from_pylist([{"number": row["number"]} | self._answer(Shard(**row))], schema=ANSWER)

    def _answer(self, shard: Shard) -> dict[str, Any]:
        error = self._error
        if error is None:
            try:
                return self._compute(shard)
            except WhimbrelError as raised:
                error = RemoteError.of(raised)
        return {"error": error.message, "hint": error.hint}

    def _compute(self, shard: Shard) -> dict[str, Any]:
        task, tokens = self._task, 0

        def advance(_: float, more: int) -> None:
            nonlocal tokens
            tokens += more

        try:
            (rows,) = task.reader.read([shard])
        except SetupError as error:
            hint = "all nodes need the same files, with the same times, at the same paths or URLs"
            raise SetupError(f"the node {gethostname()}: {error}", hint=hint) from None
        result = begin(rows, task.form, self._embedder, self._threads, advance).result()
        contents = shard_contents(shard, rows.path, result, kind=task.format, vectors=task.form.vectors)
        files = [content.in_memory() for content in contents]
        record = record_of(shard, rows.path, result, (file for file, _ in files))
        return {"record": encode(record), "contents": [data for _, data in files], "tokens": tokens}
