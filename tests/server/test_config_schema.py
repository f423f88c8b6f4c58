"""JSON Schema of the file of settings: it says what the reader takes, and every example of the pages fits both."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import trustme

from docs_code import Block, blocks_of
from whimbrel.cli.serve_options import check_config
from whimbrel.errors import SetupError
from whimbrel.server.config_file import SECTIONS, read_config
from whimbrel.server.config_schema import config_schema
from whimbrel.server.settings_table import MODEL_TABLE, Setting

ROOT = Path(__file__).parents[2]
SCHEMA = config_schema()
VALIDATOR = jsonschema_rs.Draft202012Validator(SCHEMA)
TABLES: Final[Mapping[str, Mapping[str, Setting]]] = {**SECTIONS, "models": MODEL_TABLE}
KEYS = [(table, key) for table, rows in TABLES.items() for key in rows]
VALUES: Final[list[Any]] = [
    "", "auto", "cpu", "cuda:1", "cuda:x", "float32", "int8", "mean", "qwen3", "file", "json", "debug", "always", "10m", "10 m", "a/b",
    0, 1, 2, 257, 65535, 65536, 86400, 86401, 2**20, 2**20 + 1, 2**40, 2**40 + 1, -1, 0.05, 0.1, 1.5, 1e9, 1e10, 3.0,
    True, False, [], ["a"], [1], [""], ["a", "b"], {}, {"a": "b"}, {"a": 1}, {"a": ""}, {"": "a"}, "a@b", "main",
]  # fmt: skip


def properties(table: str) -> dict[str, Any]:
    found = SCHEMA["properties"][table]
    return (found["additionalProperties"] if table == "models" else found)["properties"]


def test_the_schema_is_one() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert jsonschema_rs.meta.is_valid(SCHEMA)
    json.dumps(SCHEMA)
    for table, rows in TABLES.items():
        assert list(properties(table)) == list(rows)


@pytest.mark.parametrize(("table", "key"), KEYS, ids=[f"{table}.{key}" for table, key in KEYS])
def test_the_schema_takes_what_the_reader_takes(table: str, key: str) -> None:
    row, described = TABLES[table][key], properties(table)[key]
    validator = jsonschema_rs.Draft202012Validator(described)
    assert described["description"].startswith(row.text)
    assert "null" not in json.dumps(described)
    if "default" in described:
        assert validator.is_valid(described["default"])
    for value in VALUES:
        try:
            row.read_toml(value, key)
            is_read = True
        except SetupError:
            is_read = False
        assert validator.is_valid(value) == is_read, value


def test_editors_are_told_choices_bounds_and_defaults() -> None:
    server, model = properties("server"), properties("models")
    assert server["port"] == {
        "description": "Port to listen on. 0 takes any free port.", "type": "integer", "minimum": 0, "maximum": 65535, "default": 8000,
    }  # fmt: skip
    assert model["dtype"]["enum"] == ["auto", "float32", "bfloat16", "float16", "int8"]
    assert model["dtype"]["default"] == "auto"
    assert "Default: from the checkpoint." in model["max_length"]["description"]
    assert model["keep"]["examples"] == ["always", "90s", "10m", "2h", "1d"]
    assert not {"api_key", "ssl_keyfile_password"} & server.keys()


WRONG = [
    "[sever]",
    "[server]\nprot = 1",
    "[models]\na = 1",
    "[models.a]\nd = 1",
    "[defaults]\nsource = 'a/b'",
    "[server]\napi_key = 'k'",
    "[keys.a]\nadmin = true",
    "[keys.a]\nhash = 'sha256:0'",
    f"[keys.a]\nhash = 'sha256:{'0' * 64}'\nmodel = ['a']",
    f"[keys.a]\nhash = 'sha256:{'0' * 64}'\ntokens_per_day = 0",
]


@pytest.mark.parametrize("text", WRONG)
def test_unknown_keys_are_no_part_of_the_schema(text: str) -> None:
    assert not VALIDATOR.is_valid(tomllib.loads(text))
    assert VALIDATOR.is_valid({})


# Examples

BLOCKS = [
    (page, block)
    for pattern in ("*.md", "docs/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    for block in blocks_of(page.read_text(encoding="utf-8"))
    if block.language == "toml"
]


def test_there_are_examples() -> None:
    pages = {page.relative_to(ROOT).as_posix() for page, _ in BLOCKS}
    assert pages >= {"README.md", "docs/deploy/config.md"}


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page.stem}:{block.line}" for page, block in BLOCKS])
def test_examples_of_the_pages_are_right(page: Path, block: Block, tmp_path: Path) -> None:
    content = tomllib.loads(block.code)
    VALIDATOR.validate(content)
    assert len(content) or "#" in block.code
    file = tmp_path / "whimbrel.toml"
    file.write_text(block.code)
    write_files_of(content, tmp_path)
    config = read_config(file, {}, (), {})
    if "not run" not in block.notes:
        check_config(config, lambda _: None)


def write_files_of(content: Mapping[str, Any], folder: Path) -> None:
    """Make the folders of adapters and models, and the files of secrets, that an example names."""
    for model in content.get("models", {}).values():
        for path in [
            *model.get("adapters", {}).values(),
            *filter(lambda each: each.startswith("."), [model.get("source", "")]),
        ]:
            (folder / path).mkdir(parents=True, exist_ok=True)
    certificate = trustme.CA().issue_cert("localhost")
    pem = {"ssl_certfile": certificate.cert_chain_pems[0].bytes(), "ssl_keyfile": certificate.private_key_pem.bytes()}
    for key, value in content.get("server", {}).items():
        if key.endswith(("_file", "certfile", "keyfile")):
            (folder / value).parent.mkdir(parents=True, exist_ok=True)
            (folder / value).write_bytes(pem.get(key, b"secret\n"))
            (folder / value).chmod(0o600)
