"""Commands of an operator, as the supervisor carries them out: list, load, replace, unload, keep and fetch models."""

import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from whimbrel.dialects.common import openai_errors
from whimbrel.errors import InvalidRequest, ModelNotFound, SetupError, Unavailable, WhimbrelError
from whimbrel.server.processes.messages import Command, ModelOptions, ServeOptions
from whimbrel.server.processes.model_table import read_model
from whimbrel.server.processes.models import LEAST_AGREEMENT, Models

_log = logging.getLogger("whimbrel")

_T = TypeVar("_T")

_KEEP: Final = "5m"
"""The time for which a model that was pulled is kept, if the file states no other: Ollama's."""
_STATUS: Final = 422
"""Status of a model that cannot be loaded: the request is well formed."""


_BUG: Final = "a command failed. This is a bug."


class _Put(msgspec.Struct):
    """The keys of a request beside those of a model's table."""

    name: str
    wait: bool = True
    """False: answer at once, while the model is loaded."""
    min_cosine: Annotated[float, msgspec.Meta(ge=-1, le=1)] | Literal["any"] = LEAST_AGREEMENT


class _Named(msgspec.Struct):
    """The body of a request to llama-server's routes."""

    model: str


class _Keep(_Named):
    """The body of the action "keep"."""

    seconds: float | None
    """None: the model stays."""
    loads: bool


async def run_command(
    models: Models,
    options: ServeOptions,
    command: Command,
    *,
    start: Callable[[Any], object],
    fetch: Callable[[str], Awaitable[None]],
    draining: bool,
) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a command. `start` starts a task, `fetch` downloads a model."""
    try:
        if draining:
            raise Unavailable("the server is about to stop.", retry_after=5.0)
        return await _answer(models, options, command, start, fetch)
    except SetupError as error:
        hint = f" ({error.hint.removesuffix('.')})" if error.hint else ""
        told = WhimbrelError(f"{error.message.removesuffix('.')}{hint}.")
        told.status = error.status if error.status != SetupError.status else _STATUS
        told.code = error.code
        return told.status, openai_errors.render_error(told)
    except WhimbrelError as error:
        return error.status, openai_errors.render_error(error)
    except Exception as error:
        _log.critical(_BUG, exc_info=error)
        return 500, openai_errors.render_error(WhimbrelError(f"{type(error).__name__} in Whimbrel. This is a bug."))


async def _answer(
    models: Models,
    options: ServeOptions,
    command: Command,
    start: Callable[[Any], object],
    fetch: Callable[[str], Awaitable[None]],
) -> tuple[int, bytes]:
    match command.action:
        case "put":
            return await _put(models, options, command.body, start)
        case "list":
            told = _list(models, options)
        case "delete":
            told = _delete(models, command.body.decode())
        case "load" | "unload":
            told = _load_or_unload(models, command)
        case "keep":
            told = _keep(models, msgspec.json.decode(command.body, type=_Keep))
        case "pull":
            told = await _pull(models, options, command.body.decode(), fetch)
    return 200, msgspec.json.encode(told)


def _list(models: Models, options: ServeOptions) -> dict[str, Any]:
    memory = {"limit_bytes": options.memory, "used_bytes": models.loading.used()}
    rows = [each.describe() | {"served": each in models.served} for each in models.by_id.values()]
    return {"models": rows, "failed": models.failed, "memory": memory}


def _delete(models: Models, name: str) -> dict[str, Any]:
    if (model := models.delete(name)) is not None:
        return model.describe()
    if models.failed.pop(name, None) is not None:
        return {"name": name, "state": "unloaded"}
    raise ModelNotFound(f"no model {name[:100]!r} here.", param="model")


def _load_or_unload(models: Models, command: Command) -> dict[str, Any]:
    """Begin to load or unload a model whose names stay, as llama-server's routes do. Raises ModelNotFound, AlwaysKept."""
    name = _read(command.body, _Named).model
    if (model := models.named(name)) is None:
        raise ModelNotFound(f"no model {name[:100]!r} here.", param="model")
    if command.action == "load":
        models.want(model)
    else:
        models.unload(model)
    return {"success": True}


def _keep(models: Models, asked: _Keep) -> dict[str, Any]:
    if (model := models.named(asked.model)) is not None:
        models.keep(model, inf if asked.seconds is None else asked.seconds, loads=asked.loads)
    return {"success": True}


async def _pull(models: Models, options: ServeOptions, name: str, fetch: Callable[[str], Awaitable[None]]) -> dict[str, Any]:
    """Fetch a model from the hub and serve it under its id, unless a model has that name. Raises SetupError."""
    if models.named(name) is None:
        await fetch(name)
        await models.wait_until_free(lambda: {name})
        if models.named(name) is None:  # by another command meanwhile
            keep = {"keep": _KEEP} if options.defaults.keep_seconds is None else {}
            await models.put(read_model(name, {"source": name} | keep, defaults=options.defaults))
    return {"name": name}


def _read(body: bytes, kind: type[_T]) -> _T:
    """Return the body of a command. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body: {error}.") from None


async def _put(models: Models, options: ServeOptions, body: bytes, start: Callable[[Any], object]) -> tuple[int, bytes]:
    put, table = _read(body, _Put), _read(body, dict[str, Any])
    for key in _Put.__struct_fields__:
        table.pop(key, None)
    old = models.named(put.name)
    model = read_model(put.name, table, defaults=options.defaults, old=None if old is None else old.options)
    least = None if put.min_cosine == "any" else put.min_cosine
    if put.wait:
        return 200, msgspec.json.encode(await _load(models, model, least))
    models.check(model, least)
    start(_log_failure(_load(models, model, least)))
    return 202, msgspec.json.encode({"name": put.name, "state": "loading"})


async def _load(models: Models, model: ModelOptions, least: float | None) -> dict[str, Any]:
    old = models.named(model.names[0])
    replaced = None if old is None else old.revision
    new = await models.put(model, least_agreement=least)
    return new.describe() | {"replaced_revision": replaced}


async def _log_failure(loading: Any) -> None:
    try:
        await loading
    except SetupError as error:
        _log.error("a model is not loaded: %s", error.message)
    except Exception as error:
        _log.critical(_BUG, exc_info=error)
