"""Input files: the list that paths, globs, folders and URLs give, and their bytes. fsspec opens them all.

The list is sorted, so it is the same at every start. Nothing here knows of rows.
"""

import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias, cast

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from whimbrel.bulk.arrow import pa
from whimbrel.errors import SetupError, WhimbrelError

FormatName: TypeAlias = Literal["parquet", "arrow", "jsonl", "csv", "text"]

_fsspec: Final[Any] = fsspec  # it has no type hints

_FORMATS: Final[Mapping[str, FormatName]] = {
    ".parquet": "parquet", ".arrow": "arrow", ".ipc": "arrow", ".feather": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".csv": "csv", ".txt": "text",
}  # fmt: skip
_COMPRESSIONS: Final[Mapping[str, str]] = {".gz": "gzip", ".zst": "zstd"}
"""Compressions of files of lines. Parquet and Arrow have their own within."""
_BLOCK_BYTES: Final = 2**20
_OF_FILES: Final = (OSError, EOFError, zlib.error, pa.ArrowException)
"""Errors of files on this machine. Other file systems have errors of their own."""
_TAKES: Final = f"It takes {', '.join(_FORMATS)}, and files of lines with .gz or .zst."


class InputFile(NamedTuple):
    """A file of the input."""

    path: str
    """Path or URL, as it was given or found, without a password."""
    url: str
    """Path or URL to open."""
    format: FormatName
    compression: str
    size: int

    @property
    def is_lines(self) -> bool:
        return self.format not in ("parquet", "arrow")


def find_files(inputs: Iterable[str], *, without: Path) -> list[InputFile]:
    """Return the files of paths, globs, folders and URLs, in their order, those of a folder sorted by path.

    A folder gives the files whose names end as a format's, at any depth, but no hidden ones and none in `without`. Raises
    SetupError.
    """
    found: dict[str, InputFile] = {}
    """Files by their URL or absolute path, so that none is read twice."""
    for given in inputs:
        if not given:
            raise SetupError("an input has no name.")
        files = list(_find(given, without))
        if not files:
            raise SetupError(f"{_redact(given)} has no files to read.", hint=_TAKES)
        for file in files:
            found.setdefault(file.url if "://" in file.url else os.path.abspath(file.url), file)
    return list(found.values())


def _find(given: str, without: Path) -> Iterator[InputFile]:
    fs, path = _locate(given)
    with _named(given):
        if _format_of(path) and fs.isfile(path):
            urls = [given]
        elif fs.isdir(path):
            names = _walk(path) if _is_local(fs) else fs.find(path)
            shown = [name for name in names if not _is_hidden(name.removeprefix(path)) and _format_of(name)]
            urls = [_url_of(given, path, name) for name in sorted(shown)]
        elif any(character in path for character in "*?["):
            urls = [_url_of(given, path, name) for name in sorted(_glob(fs, path))]
        elif fs.exists(path):
            urls = [given]
        else:
            raise SetupError(f"there is no file {_redact(given)}.")
    for url in urls:
        if not (_is_local(fs) and Path(_locate(url)[1]).resolve().is_relative_to(without.resolve())):
            yield _describe(url)


def _is_local(fs: Any) -> bool:
    return "file" in fs.protocol


def _walk(root: str) -> Iterator[str]:
    """Yield the files below a folder of this machine, also behind links; no hidden folder, and none twice. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    seen = set[str]()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else sorted(name for name in folders if not _is_hidden(name))
        if real not in seen:
            yield from (os.path.join(folder, name) for name in names)
        seen.add(real)


def _glob(fs: Any, pattern: str) -> Iterator[str]:
    """Yield the files of a glob, hidden ones only if it names them."""
    start = re.split(r"[*?[]", pattern)[0].rfind("/") + 1
    for name in cast("list[str]", fs.glob(pattern)):
        if fs.isfile(name) and (_is_hidden(pattern[start:]) or not _is_hidden(name[start:])):
            yield name


def _locate(url: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it. Raises SetupError."""
    if "://" not in url:
        return _fsspec.filesystem("file"), os.path.abspath(url)
    with _named(url):
        return _fsspec.core.url_to_fs(url)


def _url_of(given: str, path: str, name: str) -> str:
    """Return the URL of a file that was found below `path`, in the way that this was given."""
    if "://" not in given:
        return name if os.path.isabs(given) else os.path.relpath(name)
    links = given.split("::")  # of a chain, such as zip://folder::file:///archive.zip
    place = next(index for index, link in enumerate(links) if "://" in link)
    protocol, _, rest = links[place].partition("://")
    host = rest.partition("/")[0]
    if "://" in name:
        links[place] = name
    elif host and path.lstrip("/").partition("/")[0] not in (host, host.partition("@")[0]):  # it is no part of the path
        links[place] = f"{protocol}://{host}/{name.lstrip('/')}"
    else:
        links[place] = f"{protocol}://{name if rest.startswith('/') else name.lstrip('/')}"
    return "::".join(links)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _format_of(path: str) -> tuple[FormatName, str] | None:
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix, "")
    found = _FORMATS.get(os.path.splitext(stem)[1] if compression else suffix)
    return None if found is None or (compression and found in ("parquet", "arrow")) else (found, compression)


def _describe(url: str) -> InputFile:
    fs, path = _locate(url)
    kind = _format_of(path)
    if kind is None:
        raise SetupError(f"cannot tell the format of {_redact(url)}.", hint=_TAKES)
    with _named(url):
        about = fs.info(path)
    if about["type"] != "file":
        raise SetupError(f"cannot read {_redact(url)}: it is no file of data.")
    return InputFile(_redact(url), url, *kind, int(about["size"] or 0))


@contextmanager
def _named(url: str) -> Generator[None]:
    """Turn any error of a file system, each of which has its own, into a SetupError that names the URL."""
    try:
        yield
    except WhimbrelError:
        raise
    except Exception as error:
        raise SetupError(f"cannot read {_redact(url)}: {_reason(error)}.") from None


def _redact(url: str) -> str:
    return re.sub(r"(?<=//)[^/@]*@", "", url)


def _reason(error: Exception) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return " ".join(text.split()).rstrip(" .") or type(error).__name__


def state_of(file: InputFile) -> tuple[object, ...]:
    """Return what tells that a file changed meanwhile: size and time, or the tag of an object store. Raises SetupError."""
    with reading(file):
        fs, path = _locate(file.url)
        fs.invalidate_cache()
        about = fs.info(path)
        return about.get("size"), *(str(about.get(name)) for name in ("mtime", "LastModified", "ETag", "etag", "updated"))


@contextmanager
def reading(file: InputFile) -> Generator[None]:
    """Turn errors of a file's system or format into a SetupError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, WhimbrelError) or not (isinstance(error, _OF_FILES) or "://" in file.url):
            raise
        raise SetupError(f"cannot read {file.path}: {_reason(error)}.") from None


@contextmanager
def open_file(file: InputFile) -> Generator[BinaryIO]:
    """Open the bytes of a file as they are stored."""
    fs, path = _locate(file.url)
    with fs.open(path, "rb") as stream:  # an archive closes its files when its file system goes, which is kept here
        yield stream


@contextmanager
def open_lines(file: InputFile) -> Generator[io.BufferedReader]:
    """Open the bytes of a file of lines, without its compression. They can be sought forward."""
    with open_file(file) as raw:
        if file.compression == "gzip":
            with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                yield io.BufferedReader(cast(Any, stream), _BLOCK_BYTES)
        elif file.compression == "zstd":
            with pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd") as stream:
                yield io.BufferedReader(cast(Any, _Forward(stream)), _BLOCK_BYTES)
        else:
            yield cast(io.BufferedReader, raw)


class _Forward(io.RawIOBase):
    """A stream that cannot seek, as a raw stream that can skip."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._stream.readinto(buffer)


def skip_to(stream: io.BufferedReader, offset: int) -> None:
    """Go on to a byte of a stream that stands at its beginning."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset > 0:
        block = stream.read(min(offset, _BLOCK_BYTES))
        if not block:
            return
        offset -= len(block)


def sha256_of(file: InputFile) -> str:
    """Return the SHA-256 of a file's bytes. Raises SetupError."""
    with reading(file), open_file(file) as stream:
        digest = hashlib.sha256()
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
        return digest.hexdigest()
