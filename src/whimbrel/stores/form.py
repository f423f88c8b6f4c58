"""Form of the rows that a store gets: the key, the columns beside it, and the vectors with their widths and distances."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from whimbrel.bulk.arrow import DataType, Field, Table, pa

Distance: TypeAlias = Literal["cosine", "dot"]
VectorKind: TypeAlias = Literal["dense", "sparse", "multi_vector"]
VECTORS: Final[dict[str, VectorKind]] = {
    "dense": "dense",
    "sparse": "sparse",
    "multi_vector": "multi_vector",
    "muvera": "dense",
}
"""Outputs that are vectors; scores are numbers like other columns."""
KEY: Final = "row_key"
"""Column of the key where the id of a run does not name a row: in runs without ids, and of chunks."""


class VectorColumn(NamedTuple):
    """A column of vectors."""

    name: str
    kind: VectorKind
    width: int
    """Numbers of a vector; 0 for sparse ones."""
    half: bool
    """True for float16, else float32."""
    distance: Distance
    """Measure for search. Sparse vectors have the dot product."""


@dataclass(frozen=True, slots=True)
class StoreForm:
    """Columns of a table, collection or index."""

    key: str
    """Name of the column whose values name the rows, text or whole numbers."""
    fields: tuple[Field, ...]
    """Columns beside the vectors, the key among them."""
    vectors: tuple[VectorColumn, ...]

    @property
    def key_type(self) -> DataType:
        return next(field.type for field in self.fields if field.name == self.key)

    @property
    def names(self) -> list[str]:
        return [*(field.name for field in self.fields), *(vector.name for vector in self.vectors)]


class Refused(NamedTuple):
    """A row that was not written."""

    key: str
    reason: str


class Outcome(NamedTuple):
    """Answer of a store that may take some rows and not others."""

    refused: list[Refused]
    again: list[int]
    """Indices of rows to send again later."""
    reason: str = ""
    """Reason for that."""


ALL_WRITTEN: Final = Outcome([], [])


class Store(Protocol):
    """A table, collection or index that takes rows by their key, in place of those that it has of the same key.

    Methods raise Unavailable for a fault that may pass, InvalidRequest for rows that are refused together, and SetupError
    where all rows would fail.
    """

    max_rows: int
    """Largest number of rows in a call of `write`."""
    max_bytes: int
    """About the largest size of these in memory."""

    def prepare(self, form: StoreForm) -> None:
        """Create the table, or check that the one that there is has this form."""
        ...

    def write(self, rows: Table) -> Outcome:
        """Write rows with the columns of the form, all of different keys. When it returns, they are kept."""
        ...

    def finish(self, *, index: bool) -> None:
        """Make the rows searchable, with `index` through an index of the dense vectors. Called when all are written."""
        ...

    def close(self) -> None: ...


def plain_type(kind: DataType) -> DataType:
    """Return the type in which stores get a column: no dictionaries, no large or view types of text."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    is_text = pa.types.is_large_string(kind) or str(kind) == "string_view"
    return pa.string() if is_text else kind


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
