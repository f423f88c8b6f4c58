"""Table of one model: its options by name, as an operator states them in a request or a file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.processes.messages import ModelOptions
from whimbrel.server.settings_table import TABLE
from whimbrel.types.plan import Options

_OWN: Final = ("pooling", "reranker", "adapter", "keep")
"""Settings of a model that are no options of its engine by that name."""
_ENGINE: Final = tuple(key for key, row in TABLE.items() if row.group == "Model" and key not in _OWN)
_KEEP: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")
_UNITS: Final = {"s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Table(msgspec.Struct):
    """Keys of the table that are no settings."""

    source: str | None = None
    revision: str | None = None
    names: tuple[str, ...] = ()
    replicas: int = 1
    keep: str | int | float = "always"
    adapters: dict[str, str] = {}
    pooling: str | None = None
    reranker: str | None = None


KEYS: Final = frozenset((*_Table.__struct_fields__, *_ENGINE))
"""All keys of a table."""


def read_keep(value: str | float) -> float | None:
    """Return the seconds for which an idle model is kept, None for "always". Raises SetupError."""
    if value == "always":
        return None
    found = _KEEP.fullmatch(str(value).strip().lower())
    if found is None or isinstance(value, bool):
        raise SetupError(f'keep takes "always" or a time, not {value!r}.', hint='e.g. keep = "10m", "90s" or 90')
    return float(found[1]) * _UNITS[found[2]]


def read_model(name: str, table: Mapping[str, Any], defaults: Options) -> ModelOptions:
    """Return the options of a model by its first name and its table, else by `defaults`. Raises SetupError."""
    if unknown := sorted(table.keys() - KEYS):
        raise SetupError(f"{unknown[0]} is no key of a model.", hint=f"a model has {', '.join(sorted(KEYS))}")
    try:
        own = msgspec.convert({key: table[key] for key in table.keys() & set(_Table.__struct_fields__)}, _Table)
    except msgspec.ValidationError as error:
        raise SetupError(f"the table of {name}: {error}.") from None
    if not name.strip() or not all(each.strip() for each in own.names):
        raise SetupError("a model's name is empty.")
    if not 1 <= own.replicas <= TABLE["replicas"].bounds["le"]:
        raise SetupError(f"replicas is {own.replicas}; it takes {TABLE['replicas'].takes}.")
    if own.revision is not None and own.source is None:
        raise SetupError("revision stands without source.", hint="name the model on the hub: source = owner/name")
    engine: Any = {key: TABLE[key].check(table[key], key, strict=True) for key in table.keys() & set(_ENGINE)}
    choices: dict[str, Any] = {
        key: None if table.get(key) is None else TABLE[key].check(table[key], key) for key in ("pooling", "reranker")
    }
    adapters = {each: str(Path(folder).expanduser().resolve()) for each, folder in own.adapters.items()}
    stated: Any = dict(defaults) | engine | {"adapters": adapters, "served_name": name}
    stated["aliases"] = tuple(dict.fromkeys(each for each in own.names if each != name))
    return ModelOptions(
        f"{own.source}@{own.revision}" if own.revision else own.source,
        choices["pooling"],
        Options(**stated),
        choices["reranker"],
        own.replicas,
        read_keep(own.keep),
    )
