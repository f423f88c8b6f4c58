"""Function of `whimbrel store`: the rows of a bulk run's folder into a store, by the kind that its URL names."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from whimbrel.bulk.job import Totals, Watch
from whimbrel.stores.form import Distance, Store
from whimbrel.stores.location import Kind, Location, read_location
from whimbrel.stores.retry import Retry
from whimbrel.stores.source import open_run
from whimbrel.stores.transfer import RefusedRow, Transfer

STORES: Final[Mapping[Kind, tuple[str, str]]] = {
    "lancedb": ("whimbrel.stores.lancedb", "LanceStore"),
    "qdrant": ("whimbrel.stores.qdrant", "QdrantStore"),
    "postgresql": ("whimbrel.stores.postgres", "PostgresStore"),
    "opensearch": ("whimbrel.stores.opensearch", "OpenSearchStore"),
}
"""Module and class of each kind."""
WAIT_SECONDS: Final = 600.0


class Stored(NamedTuple):
    """The result of `store`."""

    rows: int
    """Rows of the parts that were read."""
    refused: list[RefusedRow]


class _Silent:
    """Watch that shows nothing."""

    def tell(self, text: str) -> None: ...
    def start(self, totals: Totals) -> None: ...
    def advance(self, rows: float, tokens: int) -> None: ...


def open_store(place: Location, table: str) -> Store:
    """Return a table, collection or index of a place. Raises SetupError if its client is not installed."""
    module, name = STORES[place.kind]
    made: Callable[..., Any] = getattr(import_module(module), name)
    return made(place, table)


def store(
    folder: str | Path,
    to: str,
    table: str,
    *,
    password: str | None = None,
    outputs: Sequence[str] = (),
    distance: Distance | None = None,
    index: bool = False,
    unfinished: bool = False,
    verify: bool = False,
    last_of_doubled: bool = False,
    first_part: int = 0,
    wait_seconds: float = WAIT_SECONDS,
    watch: Watch | None = None,
    totals: Totals | None = None,
    refuse: Callable[[RefusedRow], None] | None = None,
) -> Stored:
    """Write the rows of a run's folder into a store, each in place of one with the same id. Raises SetupError.

    `to` is a URL as `whimbrel store` takes it, and `table` the table, collection or index. Refused rows are returned, or go to
    `refuse` as they come.
    """
    place = read_location(to, password)
    found, counts, watching = list[RefusedRow](), totals or Totals(), watch or _Silent()
    source = open_run(Path(folder), outputs, unfinished=unfinished, verify=verify, last_of_doubled=last_of_doubled)
    if source.num_doubled:
        watching.tell(f"rows with the id of an earlier row: {source.num_doubled:,}; the last row of each id is kept")
    retry = Retry(wait_seconds, watching.tell)
    with closing(retry(lambda: open_store(place, table))) as opened:
        Transfer(source, opened, watching, counts, retry, refuse or found.append, distance, index, first_part).run()
    return Stored(counts.done, found)
