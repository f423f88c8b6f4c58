"""JSON Schema (draft 2020-12) of the file of settings, made from the table of settings, for editors."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from whimbrel.server.config_file import SECTIONS
from whimbrel.server.keys import key_schema
from whimbrel.server.settings_table import MODEL_TABLE, Setting


def config_schema() -> dict[str, Any]:
    """Return the schema. A file that it refuses is refused by `whimbrel serve` too; that checks more."""
    tables: dict[str, Any] = {name: _table(rows) for name, rows in SECTIONS.items()}
    tables["models"] = {"type": "object", "additionalProperties": _table(MODEL_TABLE)}
    tables["keys"] = {"type": "object", "additionalProperties": key_schema()}
    described = {
        "server": "Address, security, logs and metrics.",
        "limits": "Limits on clients.",
        "defaults": "Settings of every model that does not state them itself.",
        "models": "A table for each model, by the name that clients use.",
        "keys": "A table for each API key, by its name in metrics and logs.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of whimbrel serve",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"description": described[name]} | table for name, table in tables.items()},
    }


def _table(rows: Mapping[str, Setting]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {key: _value(row) for key, row in rows.items()}}


def _value(row: Setting) -> dict[str, Any]:
    """Return the schema of a value. TOML has no null: a key without a value is left out."""
    schema = msgspec.json.schema(row.type, schema_hook=lambda _: {"type": "string"})
    kind = next(each for each in schema.get("anyOf", [schema]) if each.get("type") != "null")
    if get_origin(row.kind) is Literal:
        kind = {"enum": list(get_args(row.kind))}
    elif kind["type"] == "string" and row.default != "":
        kind = {"minLength": 1} | kind
    elif kind["type"] == "array":
        kind = kind | {"items": {"minLength": 1} | kind["items"]}
    elif kind["type"] == "object":
        values = {"minLength": 1 if row.holds_paths else 0} | kind["additionalProperties"]
        kind = kind | {"propertyNames": {"minLength": 1}, "additionalProperties": values}
    default = {"default": row.default} if row.default is not None and not row.computed else {}
    by_default = f" Default: {row.computed}." if row.computed else ""
    return {"description": row.text + by_default} | kind | default
