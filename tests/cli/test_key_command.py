"""`whimbrel key`: keys, their hashes and tables, and what of them is shown where."""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from pathlib import Path

import orjson
import pytest

from command import error, run
from whimbrel.cli.serve import serve
from whimbrel.errors import SetupError
from whimbrel.server.config_file import Config
from whimbrel.server.keys import read_keys
from whimbrel.server.settings_table import read_settings

HASH = "sha256:" + "0" * 64


def test_the_key_goes_to_the_terminal_and_its_table_to_the_file() -> None:
    done = run("key", "search")
    found = re.search(rb"whimbrel_[0-9a-f]{48}", done.stderr)
    assert found is not None
    assert b"whimbrel_" not in done.stdout
    (key,) = read_keys(tomllib.loads(done.stdout.decode())["keys"], "keys.toml")
    assert (key.name, key.digest) == ("search", sha256(found[0]).digest())


def test_names_are_quoted_where_toml_asks_for_it_and_made_up_where_none_is_given() -> None:
    assert list(tomllib.loads(run("key", "team@example.com").stdout.decode())["keys"]) == ["team@example.com"]
    made = [orjson.loads(run("key", "--json").stdout) for _ in range(2)]
    assert len({each["name"] for each in made}) == len({each["key"] for each in made}) == 2
    assert all(each["hash"] == f"sha256:{sha256(each['key'].encode()).hexdigest()}" for each in made)
    assert "cannot be the name of a key" in error("key", "two words")
    assert "whimbrel_" not in error("key", "whimbrel_" + "0" * 48)


@pytest.mark.parametrize(("key", "warned"), [("a-key-that-exists-already", False), ("short", True)])
def test_a_key_that_exists_is_hashed_from_stdin(key: str, warned: bool) -> None:
    done = run("key", "--hash", stdin=f" {key} \n")
    assert done.stdout.decode() == f"sha256:{sha256(key.encode()).hexdigest()}\n"
    assert (b"warning: fewer than 20 characters" in done.stderr) == warned
    assert key.encode() not in done.stderr


@pytest.mark.parametrize("stdin", ["", "\n", "nö\n", "a\x07b"])
def test_stdin_without_a_key_is_an_error(stdin: str) -> None:
    assert b"stdin holds no API key" in run("key", "--hash", stdin=stdin, code=1).stderr


def test_the_table_of_the_page_is_right() -> None:
    page = (Path(__file__).parents[2] / "docs/deploy/security.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (key,) = read_keys(tomllib.loads(block)["keys"], lambda *_: "security.md")
    assert key.digest == sha256(b"a-key-that-exists-already").digest()
    assert key.has_budget


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"models": ["all-MiniLM-L6-v2"]}, "names the model all-MiniLM-L6-v2, which is not served"), ({"routes": ["/v1/embed/"]}, "names the route /v1/embed/,")],
)  # fmt: skip
def test_a_server_does_not_start_with_keys_for_what_it_has_not(fields: dict[str, object], message: str) -> None:
    keys = read_keys({"a": {"hash": HASH} | fields}, lambda *_: "keys.toml")
    with pytest.raises(SetupError, match=message) as told:
        serve((), lambda: Config(settings=read_settings({"port": 0}, (), {}), keys=keys))
    assert "did you mean" in (told.value.hint or "")
