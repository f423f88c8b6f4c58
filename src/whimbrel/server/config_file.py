"""The file of settings: its tables, and the configuration that it makes with flags and variables.

    [server]        the groups Server, Security, and Logs and metrics of the settings
    [limits]        the groups Limits and HTTP
    [defaults]      the group Model: for every model of the server
    [models.NAME]   a model: the same keys, and those that only a model of a file has
    [keys.NAME]     an API key

Every key is checked against the table of settings (settings_table.py), also where a flag or a variable goes before it. Paths
are relative to the file's folder. Of these only folders of models and adapters are looked up.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.errors import SetupError
from whimbrel.server.keys import ApiKey, read_keys
from whimbrel.server.settings import ModelTable, Settings
from whimbrel.server.settings_table import (
    MODEL_TABLE,
    OF_MODELS,
    TABLE,
    Section,
    Setting,
    Stated,
    merged,
    nearest,
    stated,
    values_of,
    without_clients_key,
)
from whimbrel.server.toml_file import KeyPath, TomlFile, dotted, read_toml

FILE_VARIABLE: Final = "WHIMBREL_CONFIG"
SECTIONS: Final[Mapping[Section, Mapping[str, Setting]]] = {
    name: {key: row for key, row in TABLE.items() if row.section == name} for name in ("server", "limits", "defaults")
}
"""Keys of the tables that hold settings."""
TABLES: Final = (*SECTIONS, "models", "keys")
_OTHER_WORDS: Final = {"served_name": "names", "adapter": "adapters"}
"""Settings of the command line that a file states in a model's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that a server is told by a file, flags and variables. Equal if it tells the same, wherever it stands."""

    settings: Settings
    """Settings of the server, and those of models that the command line names."""
    models: Mapping[str, ModelTable] = field(default_factory=dict[str, ModelTable])
    """Models of the file by the first of their names, each with all of its settings."""
    keys: tuple[ApiKey, ...] = ()
    file: Path | None = field(default=None, compare=False)
    sources: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str], compare=False)
    """Place in which each value that is no default is stated, by its key, or by `models`, the model and the key."""

    def source(self, *keys: str) -> str:
        """Return the place of a value, or the file's name if none is known."""
        return self.sources.get(keys, str(self.file))


def read_config(path: Path | None, given: Mapping[str, Any], assignments: Iterable[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration of a file, flags (None in `given`: not given), --set (`KEY=VALUE`) and variables.

    Without a `path` the file is the one that WHIMBREL_CONFIG names, if any. Raises SetupError with the place of the fault.
    """
    over = stated(given, assignments, environ)
    if (file := find_file(path, environ)) is None:
        return Config(settings=Settings(**values_of(over)), sources=_sources_of(over))
    document = read_toml(file)
    for name in document.content:
        if name not in TABLES:
            raise _unknown_table(document, name)
    sections = {name: _read_table(document, (name,), rows) for name, rows in SECTIONS.items()}
    keys = read_keys(_table(document, ("keys",)), document.where)
    found = merged({key: each for section in sections.values() for key, each in section.items()}, over)
    found = without_clients_key(found) if keys else found
    of_all = {key: each for key, each in over.items() if key in OF_MODELS}
    tables = {name: merged(sections["defaults"], _read_model(document, name), of_all) for name in _table(document, ("models",))}
    _refuse_shared_names(document, {name: table.get("names", ((), ""))[0] for name, table in tables.items()})
    return Config(
        settings=Settings(**values_of(found)),
        models={name: ModelTable(**values_of(table)) for name, table in tables.items()},
        keys=keys,
        file=file,
        sources=_sources_of(found)
        | dict(chain(*(_sources_of(table, "models", name).items() for name, table in tables.items()))),
    )


def find_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file of settings: the one that is given, or else that of the variable. Raises SetupError."""
    stated_path = environ.get(FILE_VARIABLE)
    if path is None and stated_path is not None and not stated_path.strip():
        raise SetupError(f"{FILE_VARIABLE} is empty.", hint="leave it unset for no file")
    return Path(stated_path) if path is None and stated_path is not None else path


def _sources_of(found: Stated, *above: str) -> dict[KeyPath, str]:
    return {(*above, key): source for key, (_, source) in found.items()}


def _table(document: TomlFile, at: KeyPath) -> Mapping[str, Any]:
    """Return a table of the document, an empty one if there is none. Raises SetupError if something else stands there."""
    value: Any = document.content
    for name in at:
        value = value.get(name, {})
    if not isinstance(value, dict):
        of_model = "; a model is a table of its own, [models.NAME]" if at[0] == "models" else ""
        kind = "a list" if isinstance(value, list) else f"{value!r:.80}"
        table = "models.NAME" if at == ("models",) else dotted(*at)
        raise SetupError(f"{document.name(*at)} is {kind}; it takes a table{of_model}.", hint=f"[{table}]")
    return cast(dict[str, Any], value)


def _read_table(document: TomlFile, at: KeyPath, rows: Mapping[str, Setting]) -> dict[str, tuple[Any, str]]:
    """Return the values of a table, each with its place. Raises SetupError."""
    folder, found = document.path.absolute().parent, dict[str, tuple[Any, str]]()
    for key, value in _table(document, at).items():
        if key not in rows and at[0] == "models" and isinstance(value, dict):
            quoted = dotted("models", ".".join((*at[1:], key)))
            raise SetupError(f"{document.name(*at, key)} is not known.", hint=f"a name with dots has quotes: [{quoted}]")
        if key not in rows:
            raise _unknown_key(document, at, key, rows)
        read = rows[key].read_toml(value, document.name(*at, key))
        found[key] = _under(folder, read), document.where(*at, key)
    return found


def _under(folder: Path, value: Any) -> Any:
    """Return a value whose relative paths are of `folder`."""
    if isinstance(value, dict):
        return {name: _under(folder, each) for name, each in cast(dict[str, Any], value).items()}
    return folder / os.path.expanduser(value) if isinstance(value, Path) else value  # unlike Path's it has no errors


def _read_model(document: TomlFile, name: str) -> dict[str, tuple[Any, str]]:
    """Return the values of a model's table. Raises SetupError."""
    at = ("models", name)
    found = _read_table(document, at, MODEL_TABLE)
    source, place = found.get("source", (None, ""))
    folder = None if source is None else _find_folder(document, source, document.name(*at, "source"))
    if folder is not None:
        found["source"] = str(folder), place
    if "revision" in found and (source is None or folder is not None or "@" in source):
        what = "the packaged model" if source is None else "a folder" if folder is not None else f"{source}, which names one"
        raise SetupError(
            f"{document.name(*at, 'revision')} is stated beside {what}.", hint="a hub id has revisions: owner/name"
        )
    for adapter, path in (found.get("adapters", ({}, ""))[0]).items():
        if not path.is_dir():
            raise SetupError(f"{document.name(*at, 'adapters', adapter)}: there is no folder {path}.", hint=_RELATIVE)
    return found


_HUB_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9._-]+(@[^\s@]+)?")
_RELATIVE: Final = "a path is relative to the file's folder"


def _find_folder(document: TomlFile, source: str, place: str) -> Path | None:
    """Return the folder that a source names, or None for a hub id. Raises SetupError for a path that leads to no folder."""
    folder = document.path.absolute().parent / os.path.expanduser(source)
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(source):
        raise SetupError(f"{place}: there is no folder {folder}.", hint=f"{_RELATIVE}; a hub id looks like owner/name")
    if Path(source).is_dir():
        raise SetupError(f"{place}: {source} is a folder of the working directory, and no folder {folder}.", hint=_RELATIVE)
    return None


def _refuse_shared_names(document: TomlFile, names: Mapping[str, Iterable[str]]) -> None:
    """Raise SetupError if clients could not tell two models apart, or not name one."""
    known: dict[str, KeyPath] = {}
    for model, further in names.items():
        for name, at in ((model, ("models", model)), *((each, ("models", model, "names")) for each in further)):
            if not name.strip() or name != name.strip() or not name.isprintable():
                raise SetupError(f"{document.name(*at)}: {name!r:.80} is no name of a model.", hint="e.g. [models.e5]")
            if (other := known.setdefault(name, at)) is not at:
                place = f"{dotted(*other)} ({document.where(*other)})"
                raise SetupError(
                    f"{document.name(*at)}: another model, or this one, has the name {dotted(name)} already: {place}.",
                    hint="give every model names of its own",
                )


def _unknown_table(document: TomlFile, name: str) -> SetupError:
    if name in TABLE or name in MODEL_TABLE:
        return SetupError(f"{document.name(name)} stands in no table.", hint=_place_of(name))
    near = nearest(name, TABLES)
    tables = ", ".join(f"[{each}]" for each in SECTIONS)
    hint = f"did you mean {near}?" if near else f"the tables are {tables}, [models.NAME] and [keys.NAME]"
    return SetupError(f"{document.name(name)} is not known.", hint=hint)


def _unknown_key(document: TomlFile, at: KeyPath, key: str, rows: Mapping[str, Setting]) -> SetupError:
    place = document.name(*at, key)
    if key in TABLE and TABLE[key].is_secret:
        return SetupError(f"{place} is a secret, which no file of settings holds.", hint=f'{key}_file = "PATH"')
    if key in TABLE or key in MODEL_TABLE:
        return SetupError(f"{place} is no key of [{dotted(*at)}].", hint=_place_of(key))
    if near := nearest(key, rows):
        return SetupError(f"{place} is not known.", hint=f"did you mean {near}?")
    near = nearest(key, {**TABLE, **MODEL_TABLE})
    hint = f"did you mean {near}? {_place_of(near)}" if near else "whimbrel config show lists all keys"
    return SetupError(f"{place} is not known.", hint=hint)


def _place_of(key: str) -> str:
    """Return the hint that tells in which table a key stands."""
    section = TABLE[key].section if key in TABLE else None
    if section is None:
        return f"[models.NAME] has {_OTHER_WORDS.get(key, key)}"
    return f"{key} stands in [{section}]" + (" or [models.NAME]" if section == "defaults" else "")
