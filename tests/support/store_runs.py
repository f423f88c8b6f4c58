"""Folders of bulk runs with all kinds of vectors, to be stored, and a store in memory that fails as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bulk_runs import HashEmbedder, bulk, write_lines
from whimbrel.bulk.embedder import Answer
from whimbrel.stores.form import ALL_WRITTEN, Outcome, StoreForm
from whimbrel.types.result import Outputs, Ragged, Sparse

WIDTH = 8
VOCABULARY = 50


class AllEmbedder(HashEmbedder):
    """Dense, sparse and token vectors that follow from the text; of length 1, as models give them."""

    def __init__(self, *outputs: str, scale: float = 1.0) -> None:
        super().__init__()
        self._names = outputs or ("dense", "sparse", "multi_vector")
        self._scale = scale

    def run(self, texts: Sequence[Any]) -> Answer:
        answer = super().run(texts)
        rows = [Row.of(text) for text in texts]
        counts = [len(row.tokens) for row in rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        found = {
            "dense": np.stack([row.dense for row in rows]) * np.float32(self._scale),
            "sparse": Sparse(
                np.concatenate([row.ids for row in rows]),
                np.concatenate([row.weights for row in rows]),
                np.arange(0, 5 * len(rows) + 1, 5, dtype=np.int64),
            ),
            "multi_vector": Ragged(np.concatenate([row.tokens for row in rows]), offsets),
        }
        outputs: Any = {name: found[name] for name in self._names}
        return Answer(Outputs(**outputs), answer.cut_N, answer.num_tokens)


class Row(NamedTuple):
    """Vectors of a text."""

    dense: Any
    ids: Any
    weights: Any
    tokens: Any

    @classmethod
    def of(cls, text: str) -> Row:
        rng = np.random.default_rng(list(text.encode()))
        dense = _unit(rng.normal(size=(1, WIDTH)))[0]
        ids = np.sort(rng.choice(VOCABULARY, 5, replace=False)).astype(np.int32)
        tokens = _unit(rng.normal(size=(1 + len(text) % 3, WIDTH)))
        return cls(dense, ids, rng.uniform(0.1, 2, 5).astype(np.float32), tokens)

    @property
    def sparse(self) -> Any:
        row = np.zeros(VOCABULARY, np.float32)
        row[self.ids] = self.weights
        return row

    def maxsim(self, other: Row) -> float:
        """Return the score of `other`'s tokens for those of this one."""
        return float((self.tokens @ other.tokens.T).max(axis=1).sum())


def _unit(rows: Any) -> Any:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def write_run(folder: Path, number: int, *outputs: str, shard_rows: int = 20, scale: float = 1.0, **job: Any) -> Path:
    """Write a run of `number` rows with a few columns beside the vectors, and return its folder."""
    rows = [{"id": f"d{index}", "text": text_of(index), "n": index, "tags": f"t{index % 3}"} for index in range(number)]
    path = write_lines(folder / "rows.jsonl", rows)
    bulk(path, folder / "run", AllEmbedder(*outputs, scale=scale), **{"id_column": "id", "shard_rows": shard_rows} | job)
    return folder / "run"


def text_of(index: int) -> str:
    return f"text {index}" + " word" * (index % 4)


class MemoryStore:
    """A table in memory. `fail` is called with the keys of each write, and may raise, or return an outcome."""

    max_rows = 16
    max_bytes = 2**20

    def __init__(self, fail: Callable[[list[Any]], Outcome | None] = lambda keys: None) -> None:
        self.rows: dict[Any, dict[str, Any]] = {}
        self.form: StoreForm | None = None
        self.calls = 0
        self.finished = 0
        self.closed = 0
        self._fail = fail

    def prepare(self, form: StoreForm) -> None:
        self.form = form

    def write(self, rows: Any) -> Outcome:
        assert self.form is not None
        self.calls += 1
        assert rows.column_names == self.form.names or sorted(rows.column_names) == sorted(self.form.names)
        keys = rows.column(self.form.key).to_pylist()
        outcome = self._fail(keys) or ALL_WRITTEN
        left_out = {keys[index] for index in outcome.again} | {each.key for each in outcome.refused}
        self.rows |= {key: row for key, row in zip(keys, rows.to_pylist(), strict=True) if key not in left_out}
        return outcome

    def finish(self, *, index: bool) -> None:
        self.finished += 1

    def close(self) -> None:
        self.closed += 1
