"""Jobs: everything that a user says of a run but its model, and the counts and the progress of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whimbrel.bulk.chunks import Chunking
from whimbrel.bulk.columns import NumberType
from whimbrel.bulk.manifest import ColumnNames, Record
from whimbrel.bulk.output_files import OutputFormat


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a user says of a run, but its model."""

    inputs: Sequence[str]
    out: Path
    names: ColumnNames
    dtype: NumberType = "float32"
    format: OutputFormat = "parquet"
    chunking: Chunking | None = None
    shard_rows: int | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options that change the output, for the manifest."""
    restart: bool = False
    verify: bool = False


@dataclass(slots=True)
class Totals:
    """Counts of a run's folder: of all its shards, also those of earlier runs."""

    shards: int = 0
    shards_done: int = 0
    rows: int = 0
    """Rows of the input, and lines that hold no row."""
    rows_before: int = 0
    """Those of shards that earlier runs had finished."""
    done: int = 0
    cut: int = 0
    refused: int = 0

    def add(self, record: Record) -> None:
        """Count a finished shard."""
        self.shards_done += 1
        self.done += record.done
        self.cut += record.cut
        self.refused += record.refused


class Watch(Protocol):
    """A reader of a run's progress. Any thread may call it."""

    def tell(self, text: str) -> None: ...
    def start(self, totals: Totals) -> None: ...
    def advance(self, rows: float, tokens: int) -> None: ...
