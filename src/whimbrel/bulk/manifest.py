"""Manifest of a run, and the records of its finished shards: their form, and the differences of two.

A manifest says everything that the bytes of the output depend on, and nothing else: no time, no host, no folder.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from whimbrel import __version__
from whimbrel.bulk.arrow import pa
from whimbrel.errors import SetupError
from whimbrel.types.seq import Pair

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
VERSIONS: Final = {"whimbrel": __version__, "pyarrow": pa.__version__}
"""Versions of packages, of which others may write other bytes."""
_RESTART: Final = "go on with the old ones, write into another folder, or start anew with --restart"


Text: TypeAlias = str | Pair
"""A text, or a query and the text that is scored for it."""


class Input(msgspec.Struct, frozen=True):
    """A file of the input."""

    path: str
    size: int
    sha256: str
    rows: int
    cuts: tuple[tuple[int, int], ...]
    """Row and byte at which each shard of the file begins; of a table the byte is 0."""


class Shard(NamedTuple):
    """Consecutive rows of one file."""

    number: int
    file: int
    """Index of the file."""
    start: int
    stop: int
    offset: int
    """Byte at which the first row begins, in a file of lines."""

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}"


class ColumnNames(msgspec.Struct, frozen=True):
    """Columns of the input that a run reads."""

    text: tuple[str, ...]
    separator: str
    """Text between the texts of several columns."""
    id: str | None
    keep: tuple[str, ...] | None
    """Columns that are copied; None: all others."""
    query: str | None = None
    """Column with the query that the text is scored for; None: the text runs alone."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns that the model reads."""
        return self.text if self.query is None else (*self.text, self.query)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Columns that are named."""
        return (*self.texts, *([self.id] if self.id else []), *(self.keep or ()))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the output depends on."""

    format: int = FORMAT
    model: str
    revision: str
    options: dict[str, Any]
    """Options, versions, and settings of the model (`model_*`) that change the output."""
    schema: str
    """Copied columns as Arrow writes a schema, in base64."""
    outputs: dict[str, Any]
    """Outputs with their width; 0 for sparse vectors. `labels` names the classes of scores."""
    inputs: tuple[Input, ...]
    digest: str = ""
    """SHA-256 of the manifest without it: rows would be lost by one that was edited."""

    def shards(self) -> Iterator[Shard]:
        index = 0
        for number, file in enumerate(self.inputs):
            stops = [*(row for row, _ in file.cuts), file.rows][1:] if file.cuts else []
            for (start, offset), stop in zip(file.cuts, stops, strict=True):
                yield Shard(index, number, start, stop, offset)
                index += 1


class OutputFile(msgspec.Struct, frozen=True):
    path: str
    """Path in the folder of the run."""
    size: int
    sha256: str


class Record(msgspec.Struct, frozen=True):
    """A finished shard."""

    input: str
    start: int
    stop: int
    done: int
    """Rows of the input that have an output."""
    cut: int
    """Those of which the model read only a part."""
    refused: int
    files: tuple[OutputFile, ...]


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def with_digest(manifest: Manifest) -> Manifest:
    plain = msgspec.structs.replace(manifest, digest="")
    return msgspec.structs.replace(plain, digest=hashlib.sha256(encode(plain)).hexdigest())


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None if it has none. Raises SetupError for one that cannot be read."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            hint = "use the version of whimbrel that wrote it, or start anew with --restart"
            raise SetupError(f"{path} is of format {version}; this version reads {FORMAT}.", hint=hint)
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest != with_digest(manifest):
            raise SetupError(f"{path} was changed after it was written.", hint="start anew with --restart")
        return manifest
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} is no manifest: {error}.", hint="start anew with --restart") from None


def read_record(path: Path) -> Record | None:
    """Return a record; None if there is none, or if it is not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise SetupError with the names and values of everything that differs between two runs into one folder."""
    names = dict.fromkeys([*old, *new])
    differing = [name for name in names if old.get(name) != new.get(name)]
    if differing:
        told = "; ".join(f"{name} was {_tell(old.get(name))}, is {_tell(new.get(name))}" for name in differing[:5])
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise SetupError(f"{folder} was begun with other settings: {told}{more}.", hint=_RESTART)


def check_inputs(folder: Path, old: tuple[Input, ...], new: list[tuple[str, int, str]]) -> None:
    """Raise SetupError that names the first file which differs: `new` has path, size and SHA-256 of each."""
    before, now = [file.path for file in old], [path for path, *_ in new]
    set_before, set_now = set(before), set(now)
    if added := [path for path in now if path not in set_before]:
        raise SetupError(f"{folder} was begun without {added[0]}.", hint=_RESTART)
    if gone := [path for path in before if path not in set_now]:
        raise SetupError(f"{folder} was begun with {gone[0]} too.", hint=_RESTART)
    if before != now:
        raise SetupError(f"{folder} was begun with the same files in another order.", hint=_RESTART)
    for file, (path, size, sha256) in zip(old, new, strict=True):
        if size != file.size:
            raise SetupError(f"{path} has changed: it had {file.size:,} bytes and has {size:,}.", hint=_RESTART)
        if sha256 != file.sha256:
            raise SetupError(f"{path} has changed: it has as many bytes, but others.", hint=_RESTART)


def _tell(value: Any) -> str:
    return "not set" if value is None else f"{value!r:.60}" if isinstance(value, str) else f"{value}"
