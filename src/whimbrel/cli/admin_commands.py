"""Commands of an operator on the models of a server that runs: load, unload and ps. They call its admin routes."""

import os
from pathlib import Path
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import msgspec
import typer

from whimbrel.cli import console
from whimbrel.cli.models_on_disk import size
from whimbrel.cli.shared_options import SERVER_PANEL, AsJson, flag, option
from whimbrel.errors import ModelNotFound, SetupError
from whimbrel.server.app.admin import ADMIN_MODELS
from whimbrel.server.settings_table import MODEL_TABLE, nearest

KEY_VARIABLE: Final = "WHIMBREL_ADMIN_KEY"
_URL: Final = "http://127.0.0.1:8000"
_HEAD: Final = ("STATE", "REVISION", "DTYPE", "DEVICE", "MEMORY", "KEEP", "IN FLIGHT")
_REVISION_LETTERS: Final = 14
_CONNECT_SECONDS: Final = 10.0

Url = Annotated[str, option("URL", f"The server. Its key is in {KEY_VARIABLE}.", "--url", panel=SERVER_PANEL)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model for clients.", show_default=False)]


def load(
    name: Name,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint folder or Hub id. [default: that of the model NAME]".replace("[", r"\[")
        ),
    ] = None,
    *,
    assignments: Annotated[
        list[str] | None,
        option("KEY=VALUE", "Any key of a model in the file of settings. Repeatable.", "--set", panel=SERVER_PANEL),
    ] = None,
    any_numbers: Annotated[
        bool, flag("--any", "Also a model whose results are not those of the one that it replaces.", panel=SERVER_PANEL)
    ] = False,
    no_wait: Annotated[bool, flag("--no-wait", "Return at once, while the model is loaded.", panel=SERVER_PANEL)] = False,
    url: Url = _URL,
    as_json: AsJson = False,
) -> None:
    table: dict[str, Any] = {"name": name, "wait": not no_wait} | dict(map(_read_assignment, assignments or ()))
    if any_numbers:
        table["min_cosine"] = "any"
    if source is not None:
        source, _, revision = (
            (str(Path(source).expanduser().resolve()), "", "") if _is_folder(source) else source.partition("@")
        )
        table |= {"source": source} | ({"revision": revision} if revision else {})
    told = call(url, "POST", ADMIN_MODELS, table)
    if as_json:
        console.print_json(told)
    elif no_wait:
        typer.echo(f"{name} is being loaded; whimbrel ps shows it.")
    else:
        replaced = f", in place of {told['replaced_revision']}" if told.get("replaced_revision") else ""
        state = "loaded by its first request" if told["state"] == "unloaded" else told["state"]
        typer.echo(f"{told['name']} is {state}: revision {told['revision']}{replaced}.")


def unload(name: Name, *, url: Url = _URL, as_json: AsJson = False) -> None:
    told = call(url, "DELETE", f"{ADMIN_MODELS}/{quote(name)}")
    if as_json:
        console.print_json(told)
    else:
        in_flight = f" after {console.count(told['in_flight'], 'request')} in flight" if told.get("in_flight") else ""
        typer.echo(f"{name} is served no more, and ends{in_flight}.")


def ps(*, url: Url = _URL, as_json: AsJson = False) -> None:
    told = call(url, "GET", ADMIN_MODELS)
    if as_json:
        console.print_json(told)
        return
    rows = [(each["name"], _cells(each)) for each in told["models"]]
    write = console.row_writer(_HEAD, ["NAME", *(name for name, _ in rows)], [cells for _, cells in rows])
    write("NAME", _HEAD)
    for (name, cells), each in zip(rows, told["models"], strict=True):
        write(name, cells)
        if each["error"]:
            typer.echo(f"      {each['error']}")
    for name, reason in told["failed"].items():
        typer.echo(f"{name} was not loaded: {reason}")
    limit, used = told["memory"]["limit_bytes"], told["memory"]["used_bytes"]
    taken = ", ".join(f"{size(num_bytes)} on {device}" for device, num_bytes in used.items()) or "none"
    typer.echo(f"Memory of models: {taken}{f', of {size(limit)} on each device' if limit else ''}.")


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    keep = "always" if model["keep_seconds"] is None else f"{model['keep_seconds']:g} s"
    memory = size(model["memory_bytes"]) if model["memory_bytes"] else "-"
    revision = model["revision"][:_REVISION_LETTERS] or "-"
    return model["state"], revision, model["dtype"] or "-", model["device"] or "-", memory, keep, str(model["in_flight"])


def _is_folder(source: str) -> bool:
    return Path(source).expanduser().is_dir()


def _read_assignment(text: str) -> tuple[str, Any]:
    """Return a key of a model's table and its value. Raises SetupError."""
    key, equals, value = text.partition("=")
    if key not in MODEL_TABLE or not equals:
        near = nearest(key, MODEL_TABLE)
        hint = f"did you mean {near}?" if near and near != key else f"keys: {', '.join(MODEL_TABLE)}"
        raise SetupError(f"--set takes KEY=VALUE with a key of a model, not {text!r:.80}.", hint=hint)
    if value.lstrip().startswith("{"):
        try:
            return key, msgspec.json.decode(value)
        except ValueError as error:
            raise SetupError(f"--set {key}: {error}.", hint='e.g. --set \'prompts={"query": "query: "}\'') from None
    return key, MODEL_TABLE[key].read_text(value, f"--set {key}")


def call(url: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Return the answer of an admin route. Raises SetupError with the reason of the server."""
    import httpx2

    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise SetupError(f"{KEY_VARIABLE} is not set.", hint="it holds a key whose table in the server's file has admin = true")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    content = None if body is None else msgspec.json.encode(body)
    timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)  # a model may be large
    try:
        answer = httpx2.request(
            method, f"{url.rstrip('/')}{path}", headers=headers, content=content, timeout=timeout, follow_redirects=False
        )
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        raise SetupError(
            f"{url} does not answer: {str(error).removesuffix('.')}.", hint="--url takes a server, as http://127.0.0.1:8000"
        ) from None
    try:
        told = cast(dict[str, Any], answer.json())
        if answer.is_success:
            return told
        message, code = str(told["error"]["message"]), told["error"].get("code")
    except (ValueError, LookupError, TypeError):
        message, code = f"status {answer.status_code}", None
    hint = "whimbrel ps lists the models" if code == ModelNotFound.code else _HINTS.get(answer.status_code)
    raise SetupError(f"{url}: {message.removesuffix('.')}.", hint=hint)


_HINTS: Final = {
    401: f"{KEY_VARIABLE} holds no key of this server",
    403: "the key's table in the server's file needs admin = true",
    404: "a server without a key that has admin = true has no admin routes",
}
