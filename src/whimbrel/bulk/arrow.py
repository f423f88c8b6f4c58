"""Modules of pyarrow as values of any type, since it has no type hints, and the names of its classes for annotations."""

from typing import Any, Final, TypeAlias

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]

pa: Final[Any] = pyarrow
pc: Final[Any] = pyarrow.compute
pq: Final[Any] = pyarrow.parquet

Array: TypeAlias = Any
DataType: TypeAlias = Any
Field: TypeAlias = Any
RecordBatch: TypeAlias = Any
Schema: TypeAlias = Any
Table: TypeAlias = Any
