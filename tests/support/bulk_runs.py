"""Bulk runs in this process: by an engine, or by a model that makes vectors of hashes and needs no PyTorch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from whimbrel.bulk.embedder import Answer, Embedder, RequestSizes
from whimbrel.bulk.job import Job, Totals
from whimbrel.bulk.manifest import ColumnNames
from whimbrel.bulk.pipeline import Pipeline
from whimbrel.bulk.run import run
from whimbrel.errors import InvalidRequest, NonFinite
from whimbrel.types.arrays import Int32Array
from whimbrel.types.result import Outputs

WIDTH = 8


class HashEmbedder:
    """Vectors of hashes. A text with `@@bad` is refused by its place, one with `@@nan` without it, and `@@cut` is cut."""

    model = "hashes"
    labels: tuple[str, ...] = ()

    def __init__(self, *, revision: str = "r1", seconds: float = 0.0, texts: int = 7) -> None:
        self.revision = revision
        self.settings: dict[str, Any] = {"dtype": "float32"}
        self.sizes = RequestSizes(texts, 10_000, 2)
        self.seen: list[str] = []
        self._seconds = seconds

    def run(self, texts: Sequence[Any]) -> Answer:
        time.sleep(self._seconds)
        for index, text in enumerate(texts):
            if "@@bad" in text:
                raise InvalidRequest("this text is bad.", item=index)
        if any("@@nan" in text for text in texts):
            raise NonFinite("the model gave NaN.")
        self.seen += texts
        cut_N = np.array(["@@cut" in text for text in texts], np.bool_)
        return Answer(Outputs(dense=np.stack([vector_of(text) for text in texts])), cut_N, sum(map(len, texts)))

    def token_offsets(self, texts: Sequence[str]) -> list[Int32Array]:
        return [np.array([[i, i + 1] for i in range(len(text))], np.int32).reshape(-1, 2) for text in texts]

    def check_chunks(self, tokens: int) -> None: ...

    def stop(self) -> None: ...


def vector_of(text: str) -> Any:
    digest = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(digest, np.uint32).astype(np.float32) / np.float32(2**32)


class Told:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows = 0.0

    def tell(self, text: str) -> None:
        self.lines.append(text)

    def start(self, totals: Totals) -> None: ...

    def advance(self, rows: float, tokens: int) -> None:
        self.rows += rows


def bulk(
    inputs: Sequence[Path | str] | Path | str,
    out: Path,
    embedder: Embedder | None = None,
    *,
    text: Sequence[str] = ("text",),
    id_column: str | None = None,
    keep: Sequence[str] | None = None,
    query: str | None = None,
    separator: str = "\n",
    load: Callable[[], AbstractContextManager[Embedder]] | None = None,
    runner: Callable[..., Any] = Pipeline,
    **job: Any,
) -> tuple[Totals, Told]:
    """Run a job with an embedder, or one that `load` gives."""
    given = [inputs] if isinstance(inputs, Path | str) else inputs
    names = ColumnNames(tuple(text), separator, id_column, None if keep is None else tuple(keep), query)
    totals, told = Totals(), Told()
    made = embedder or HashEmbedder()
    run(Job([str(each) for each in given], out, names, **job), load or (lambda: nullcontext(made)), told, totals, runner)
    return totals, told


def table_of(out: Path) -> pa.Table:
    """Return the rows of all parts."""
    parts = sorted(out.glob("part-*.parquet"))
    assert parts
    return pa.concat_tables([pq.read_table(part) for part in parts])


def dense_of(out: Path, name: str = "dense") -> Any:
    column = table_of(out).column(name).combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)


def faults_of(out: Path) -> list[tuple[str, int, str]]:
    """Return file, row and reason of the refused rows."""
    lines = [line for path in sorted((out / "errors").glob("part-*.jsonl")) for line in path.read_text().splitlines()]
    return [(Path(row["file"]).name, row["row"], row["reason"]) for row in map(json.loads, lines)]


def files_of(out: Path) -> dict[str, bytes]:
    """Return all files of a folder by their paths."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(number: int) -> Iterator[dict[str, Any]]:
    """Yield rows of some text, of which every fifth has the same."""
    for index in range(number):
        yield {"id": f"d{index}", "text": f"text {0 if index % 5 == 0 else index} " + "word " * (index % 17), "n": index}
