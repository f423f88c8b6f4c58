"""Files of settings, written from dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whimbrel.server.keys import hash_of

KEY_ENDING = "-s3cret"


def key_of(name: str) -> str:
    """Return the text of the key of this name in `write_settings`."""
    return f"{name}{KEY_ENDING}"


def write_settings(
    file: Path,
    *,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    **tables: Mapping[str, Any],
) -> Path:
    """Write tables of settings, and those of models and of keys by their names. Return the file, replaced at once."""
    stated = {name: {"hash": hash_of(key_of(name))} | dict(fields) for name, fields in (keys or {}).items()}
    named = {f"models.{json.dumps(name)}": table for name, table in (models or {}).items()}
    named |= {f"keys.{json.dumps(name)}": table for name, table in stated.items()}
    lines = [line for name, table in (tables | named).items() for line in ("", f"[{name}]", *_lines(table))]
    new = file.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    return new.replace(file)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_lines(value)) + " }"
    return json.dumps(value)
