"""TOML files: the lines of all keys, and one clear line for a file that cannot be read."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whimbrel.errors import SetupError
from whimbrel.server.toml_file import MAX_BYTES, KeyPath, dotted, find_lines, read_toml

ODD = r"""# a comment = [
[server]
"port" = 1  # [x]
text = @
[not.a.table]
key = 1 \@ "
@
'lit.eral' = ~
[neither]
~
a.b . "c d" = { e = 1.5, "f" = [ "}", { g = 1 } ], h.i = 2 }
list = [
  "one", # ]
  [2, { three = ~x~ }],
]
[models."o/m".prompts]
query = 'query: '
["quoted ] header"]
day = 1979-05-27T07:32:00Z
[[many]]
x = 1
[[many]]
x = 2
[ spaced . out ]
y = 1
"""
"""A document in which @ and ~ stand for the quotes of long texts."""


def test_lines_of_keys_that_are_hard_to_find() -> None:
    text = ODD.replace("@", '"' * 3).replace("~", "'" * 3)
    tomllib.loads(text)
    lines = {dotted(*key): line for key, line in find_lines(text).items()}
    assert lines == {
        "server": 2, "server.port": 3, "server.text": 4, 'server."lit.eral"': 8, "server.a": 11, "server.a.b": 11,
        'server.a.b."c d"': 11, 'server.a.b."c d".e': 11, 'server.a.b."c d".f': 11, 'server.a.b."c d".h': 11,
        'server.a.b."c d".h.i': 11, "server.list": 12, "models": 16, 'models."o/m"': 16, 'models."o/m".prompts': 16,
        'models."o/m".prompts.query': 17, '"quoted ] header"': 18, '"quoted ] header".day': 19, "many": 20, "many.x": 21,
        "spaced": 24, "spaced.out": 24, "spaced.out.y": 25,
    }  # fmt: skip


# Documents of known lines: each statement is written with the lines that it must have.

BARE = st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True)
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x7f", exclude_categories=["Cc", "Cs"]), max_size=8)
TRICKY = st.sampled_from(["#", "[a]", "= 1", "}", '"', "'", "\\", "]]", "\n", "a.b = {", '"""', "'''", ",", "[[", "\ttab"])
TEXTS = st.lists(ANY_TEXT | TRICKY, max_size=4).map("".join)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@st.composite
def keys(draw: st.DrawFn) -> tuple[str, str]:
    """A name, and a way to write it."""
    if draw(st.booleans()):
        name = draw(BARE)
        return name, name
    name = draw(TEXTS)
    return (name, f"'{name}'") if name.isprintable() and "'" not in name and draw(st.booleans()) else (name, quoted(name))


@st.composite
def strings(draw: st.DrawFn) -> str:
    text = draw(TEXTS)
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return quoted(text)
    lines = draw(st.lists(st.just(text), min_size=1, max_size=3))
    if kind == 1 and "'''" not in text and not text.endswith("'"):
        return "'''\n" + "\n".join(lines) + draw(st.sampled_from(["", "'", "''"])) + "'''"
    escaped = "\n".join(quoted(line)[1:-1] for line in lines)
    return '"""\n' + escaped + draw(st.sampled_from(["", '"', '""', '\\"""'])) + '"""'


SCALARS = st.sampled_from(["1", "-1.5e3", "true", "inf", "0x1F", "1979-05-27", "07:32:00", "1979-05-27 07:32:00.5+01:00"])
SPACES = st.sampled_from(["", " ", "\t "])
ARRAYS = st.recursive(
    SCALARS | strings() | st.just("{ a = 1, b.c = [ 1, 2 ] }") | st.just('{ "}" = "]" }'),
    lambda inner: st.tuples(st.lists(inner, max_size=3), st.sampled_from([", ", ",\n  # ] comment \"\n  "])).map(
        lambda made: "[ " + made[1].join(made[0]) + " ]"
    ),
    max_leaves=6,
)  # fmt: skip

VALUES = ARRAYS.map(lambda value: f"[{value}]" if value[0] == "{" else value)


@st.composite
def inline_tables(draw: st.DrawFn, depth: int = 2) -> tuple[str, list[tuple[KeyPath, int]]]:
    """An inline table, and the keys in it with the number of line breaks before each."""
    text, found, known = "{ ", list[tuple[KeyPath, int]](), set[str]()
    for _ in range(draw(st.integers(0, 3))):
        name, written = draw(keys())
        if name in known:
            continue
        text += ", " if known else ""
        known.add(name)
        start = text.count("\n")
        found.append(((name,), start))
        if depth and draw(st.booleans()):
            inner, below = draw(inline_tables(depth - 1))
            found += [((name, *key), start + line) for key, line in below]
        else:
            inner = draw(VALUES)
        text += f"{written}{draw(SPACES)}={draw(SPACES)}{inner}"
    return text + " }", found


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[KeyPath, int]]:
    text, lines = "", dict[KeyPath, int]()
    table: KeyPath = ()
    for number in range(draw(st.integers(0, 6))):
        text += draw(st.sampled_from(["", "\n", '# [comment] = "\n', "  "]))
        here = text.count("\n") + 1
        name, written = draw(keys())
        name, written = f"{name}{number}", quoted(f"{name}{number}") if written[0] in "\"'" else f"{written}{number}"
        kind = draw(st.integers(0, 4))
        if kind == 0:
            sub, sub_written = draw(keys())
            table = (name, sub)
            lines[(name,)] = lines[table] = here
            text += f"[{draw(SPACES)}{written}{draw(SPACES)}.{draw(SPACES)}{sub_written} ]"
        elif kind == 1 and draw(st.booleans()):
            table = (name,)
            lines[table] = here
            text += f"[[{written}]]"
        else:
            key: KeyPath = (*table, name)
            lines[key] = here
            if kind == 2:
                last, last_written = draw(keys())
                key, written = (*key, last), f"{written} . {last_written}"
                lines[key] = here
            value, below = draw(inline_tables()) if kind == 3 else (draw(VALUES), [])
            lines |= {(*key, *each): here + line for each, line in below}
            text += f"{written} = {value}"
        text += draw(SPACES) + draw(st.sampled_from(["\n", " # comment ]\n"]))
    return text, lines


def paths(value: Any, above: KeyPath = ()) -> set[KeyPath]:
    if isinstance(value, list) and above and value and all(isinstance(each, dict) for each in value):
        value = value[0]  # a table of arrays
    if not isinstance(value, dict):
        return set()
    return {found for key, each in value.items() for found in ((*above, key), *paths(each, (*above, key)))}


@settings(max_examples=200, deadline=None)
@given(documents())
def test_lines_are_those_of_documents_that_are_written_with_known_ones(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, lines = document
    content = tomllib.loads(text)
    found = find_lines(text)
    assert found == lines
    in_arrays = {key for key in paths(content) if key not in found}
    assert all(any(key[:end] in found for end in range(1, len(key))) for key in in_arrays)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*"[]{}=.,\"'\\#\n a1", '"""', "'''", "a = ", "[a]\n", "\r\n", "é", "\x00", "\t", "\u202e", "\u2028", "b = 1\n"]
        ),
        max_size=30,
    ).map("".join)
)
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(text.encode())
    message = ""
    try:
        document = read_toml(file)
    except SetupError as error:
        message = str(error)
    if message:
        assert message.startswith(str(file))
        assert message.isprintable()
        return
    assert set(document.lines) >= {(key,) for key in document.content}
    assert all(1 <= line <= text.count("\n") + 1 for line in document.lines.values())


WRONG: list[tuple[bytes, str]] = [
    (b"[server]\nport = 1\nport = 2\n", ":3: port is stated twice."),
    (b"[server]\n[limits]\n[server]\n", ":3: [server] is stated twice."),
    (b"a = { b = 1, b = 2 }", ":1: b is stated twice."),
    (b"a = [\n 1,\n]\na = [\n 2,\n]\n", ": a key is stated twice."),
    (b"[models.e5]\nprompts = { a = 'x' }\n[models.e5.prompts]\n", ":3: [models.e5.prompts] is stated twice."),
    (b"[server\nport = 1", ":1: this is no TOML: "), (b"port 1", ":1: this is no TOML"), (b"a = tru\n", ":1: this is no TOML"),
    (b'a = "x\nb = 1', ":1: this is no TOML"), (b"\n\na = [1,", ":3: this is no TOML"), (b"a = 'x", ":1: this is no TOML"),
    (b"\n\xff = 1", ":2: this is not UTF-8."), (b"\xff\xfe[\x00s\x00", ":1: this is not UTF-8."), (b"a = \x00", ":1: this is no TOML"),
    (b"a = " + b"[" * 100_000, " is nested too deeply."), (b"a = " + b"9" * 5000, "no TOML"), (b"a = 1\rb = 2", ":1: this is no TOML"),
    (b"#" * (MAX_BYTES + 1), " has more than 8 MiB"), (b"a = 1 b = 2", ":1: this is no TOML"), (b"{}", ":1: this is no TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), WRONG, ids=[says for _, says in WRONG])
def test_a_file_that_cannot_be_read_is_one_line(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_bytes(data)
    with pytest.raises(SetupError) as error:
        read_toml(tmp_path / "w.toml")
    assert str(error.value).startswith(f"{tmp_path}/w.toml")
    assert says in str(error.value)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="it is a folder"):
        read_toml(tmp_path)
    with pytest.raises(SetupError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    if os.getuid():
        (tmp_path / "locked.toml").touch(mode=0)
        with pytest.raises(SetupError, match="Permission denied"):
            read_toml(tmp_path / "locked.toml")
    with pytest.raises(SetupError, match="more than 8 MiB"):
        read_toml(Path("/dev/zero"))


def test_a_byte_order_mark_and_carriage_returns_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    file.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 1\r\n")
    document = read_toml(file)
    assert document.content == {"server": {"port": 1}}
    assert document.where("server", "port") == f"{file}:2"
    assert document.where("server", "host") == f"{file}:1"
    assert document.where("nowhere") == str(file)
