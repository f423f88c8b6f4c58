"""TOML files with the lines of their tables and keys, which tomllib does not tell."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from whimbrel.errors import SetupError

KeyPath: TypeAlias = tuple[str, ...]
"""Names from the top of a document to a table or a key."""
MAX_BYTES: Final = 8 * 2**20
MAX_SHOWN: Final = 80
_TOKEN: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?!")|\'\'\'.*?\'\'\'(?!')|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[ \t\r]+|[\w-]+|.''', re.DOTALL
)
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_AT_LINE: Final = re.compile(r" \(at line (\d+), column \d+\)$")
_TWICE: Final = re.compile(r"Cannot (?:overwrite|declare|redefine|mutate)|Duplicate inline table key '(?P<key>.*)'")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A document and the places of its keys."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(repr=False)

    def where(self, *keys: str) -> str:
        """Return the file and the line of a key, or of the innermost table around it whose line is known."""
        known = next((self.lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in self.lines), None)
        return str(self.path) if known is None else f"{self.path}:{known}"

    def name(self, *keys: str) -> str:
        """Return the place and the name of a key, as errors begin."""
        return f"{self.where(*keys)}: {dotted(*keys)}"


def dotted(*keys: str) -> str:
    """Return a key as TOML writes it. Long names are cut, and characters that no terminal shows are escaped."""
    return ".".join(_shown(key if len(key) <= MAX_SHOWN else f"{key[:MAX_SHOWN]}...") for key in keys)


def _shown(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=not key.isprintable())


def read_toml(path: Path) -> TomlFile:
    """Read a file of at most MAX_BYTES. A byte order mark is skipped. Raises SetupError, with the line of the fault."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else error.strerror or error
        raise SetupError(f"cannot read {path}: {reason}.", hint="--config takes a file of settings (TOML)") from None
    if len(data) > MAX_BYTES:
        raise SetupError(f"{path} has more than {MAX_BYTES // 2**20} MiB, which no file of settings needs.")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SetupError(f"{path}:{line}: this is not UTF-8.", hint="save the file as UTF-8") from None
    try:
        return TomlFile(path, tomllib.loads(text), find_lines(text))
    except RecursionError:
        raise SetupError(f"{path} is nested too deeply.") from None
    except ValueError as error:
        raise _explain(path, text, str(error)) from None


def find_lines(text: str) -> dict[KeyPath, int]:
    """Return the line at which each table and key of a valid document first stands. Keys in tables of arrays are left out."""
    lines: dict[KeyPath, int] = {}
    tokens = _Tokens(text)
    table: KeyPath = ()
    for first in tokens:
        if first == "[":
            line, table = tokens.line, _read_key(tokens, first, "]")
            _note(lines, table, line)
        elif first not in ("\n", "]"):  # the last bracket of [[...]]
            _read_pair(tokens, first, table, lines)
    return lines


class _Tokens(Iterator[str]):
    """Tokens of a document without spaces and comments. `next` is the one that comes, `line` that of the last one."""

    def __init__(self, text: str) -> None:
        self._found = (found[0] for found in _TOKEN.finditer(text) if found[0][0] not in " \t\r#")
        self._next_line = self.line = 1
        self.next = next(self._found, "")

    def __next__(self) -> str:
        if not (token := self.next):
            raise StopIteration
        self.line = self._next_line
        self._next_line += token.count("\n")
        self.next = next(self._found, "")
        return token


def _read_pair(tokens: _Tokens, first: str, table: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Note a key that begins with the token `first`, and the keys within its value."""
    line, key = tokens.line, (*table, *_read_key(tokens, first, "="))
    _note(lines, key, line, len(table))
    if tokens.next == "{":
        next(tokens)
        for each in tokens:
            if each == "}":
                break
            if each not in (",", "\n"):
                _read_pair(tokens, each, key, lines)
    elif tokens.next == "[":
        depth = 0
        for each in tokens:
            depth += (each in ("[", "{")) - (each in ("]", "}"))
            if not depth:
                break
    else:
        while tokens.next not in ("", "\n", ",", "}"):
            next(tokens)


def _read_key(tokens: _Tokens, first: str, end: str) -> KeyPath:
    """Return the names of a key up to the token after it."""
    parts = [first]
    for part in tokens:
        if part == end:
            break
        parts.append(part)
    return tuple(_unquoted(part) for part in parts if part not in (".", "["))


def _unquoted(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    return tomllib.loads(f"key = {part}")["key"] if part[0] == '"' else part


def _note(lines: dict[KeyPath, int], key: KeyPath, line: int, known: int = 0) -> None:
    """Note the line of a key and of the tables that its dots make."""
    for end in range(known + 1, len(key) + 1):
        lines.setdefault(key[:end], line)


def _explain(path: Path, text: str, message: str) -> SetupError:
    """Return the error over a document that tomllib refuses."""
    found = _AT_LINE.search(message)
    number = int(found[1]) if found else text.rstrip("\n").count("\n") + 1 if message.endswith("(at end of document)") else None
    where = str(path) if number is None else f"{path}:{number}"
    words = message.removesuffix(found[0] if found else " (at end of document)").removesuffix(".")
    if (twice := _TWICE.match(words)) is not None:
        stated = text.split("\n")[number - 1].partition("=")[0].partition("#")[0].strip()[:MAX_SHOWN] if number else ""
        stated = twice["key"] or ("" if stated[:1] in ("]", "}") else stated)  # the end of a value in several lines
        return SetupError(
            f"{where}: {(stated if stated.isprintable() else ascii(stated)) or 'a key'} is stated twice.",
            hint="a key and a table stand once in a file, and a table in braces is closed",
        )
    return SetupError(
        f"{where}: this is no TOML: {words[:1].lower()}{words[1:]}.", hint='a key is NAME = VALUE; texts have quotes: "text"'
    )
