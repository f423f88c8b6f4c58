"""Router modules, which send queries and documents through different modules.

A Router stands first, or after a model that its routes share. `checkpoint/reader.py` reads a route like any list of modules.

Source: sentence_transformers/base/modules/router.py (6.2), where Asym is its old name.
"""

import ast
from pathlib import Path
from typing import Final, cast

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers.modules import KINDS, Rows, module_kind, module_path
from whimbrel.types.request import InputType

_FILES: Final = ("router_config.json", "config.json")
_TASKS: Final[tuple[InputType | None, ...]] = (None, "query", "document")


def read_router(folder: Path, path: str) -> tuple[dict[str, Rows], dict[InputType | None, str]]:
    """Return (route -> its modules; input type, or None for texts without one -> route). Raises CheckpointError."""
    name = next((name for name in _FILES if (folder / path / name).exists()), _FILES[0])
    config = JsonFile.read(folder, f"{path}/{name}" if path else name)
    config.reject_unknown_keys({"types", "structure", "parameters"})
    types = cast(dict[str, object], config.get("types", dict))
    kinds = {module: module_kind(config, "types", kind, KINDS) for module, kind in types.items()}
    rows = dict[str, Rows]()
    for route, names in cast(dict[str, object], config.get("structure", dict)).items():
        if not isinstance(names, list) or any(name not in kinds for name in cast(list[object], names)):
            raise config.error(f"{route} must be a list of modules that have a type, is {names!r:.80}.", "structure")
        rows[route] = [(kinds[name], module_path(folder, path, config, "structure", name)) for name in cast(list[str], names)]
    if not rows:
        raise config.error("names no route.", "structure")
    route_of = _route_of(JsonFile(config.name, config.get("parameters", dict, {})), list(rows))
    if unreachable := rows.keys() - set(route_of.values()):
        raise config.error(f"no query and no document takes the route {min(unreachable)!r}.", "structure")
    return rows, route_of


def _route_of(parameters: JsonFile, routes: list[str]) -> dict[InputType | None, str]:
    """Return the route of each input type, in the Router's order: mapping, name of task or modality, default."""
    parameters.reject_unknown_keys({"allow_empty_key", "default_route", "route_mappings"})
    mapped = _mappings(parameters, routes)
    default = parameters.data.get("default_route")
    if default is None and parameters.get("allow_empty_key", bool, True):
        default = routes[0]
    if default is not None and default not in routes:
        raise parameters.error(f"{default!r} is no route; routes: {', '.join(routes)}.", "default_route")
    route_of = dict[InputType | None, str]()
    for task in _TASKS:
        keys = ((task, "text"), (task, None), (None, "text"), (None, None))
        choices = [mapped[key] for key in keys if key in mapped]
        choices += [route for route in (task, "text") if route in routes]
        if task is None and isinstance(default, str):
            choices.append(default)
        if choices:
            route_of[task] = choices[0]
    return route_of


def _mappings(parameters: JsonFile, routes: list[str]) -> dict[tuple[object, object], str]:
    """Return the mapping of (task, modality) to route. A key is a tuple as Python prints it."""
    key = "route_mappings"
    routes_by_pair = dict[tuple[object, object], str]()
    for text, route in cast(dict[str, object], parameters.get(key, dict, {})).items():
        try:
            pair: object = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pair = None
        if not isinstance(pair, tuple) or len(cast(tuple[object, ...], pair)) != 2:
            raise parameters.error(f"{text!r:.80} is no pair of a task and a modality.", key)
        if not isinstance(route, str) or route not in routes:
            raise parameters.error(f"{route!r:.80} is no route; routes: {', '.join(routes)}.", key)
        routes_by_pair[cast(tuple[object, object], pair)] = route
    return routes_by_pair
