"""API documentation: /openapi.json and the page /docs, from the types of the dialects' routes.

The page has no scripts and loads nothing, so it works offline and under a strict content security policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any, Final, TypeAlias

import msgspec

from whimbrel import __version__, errors
from whimbrel.dialects import GET_ROUTES, ROUTES, Route, openai
from whimbrel.dialects import JSON as JSON_TYPE
from whimbrel.server.app.routing import ROUTES_BY_PATH

JSON: TypeAlias = dict[str, Any]

_BASE_URL: Final = "{base_url}"
_REF: Final = "#/components/schemas/{name}"
_GETS: Final = (
    ("/v1/models", "The models that are served (OpenAI).", openai.ModelsResponse),
    ("/v1/models/{model}", "One model.", openai.Model),
    ("/health", "Whether requests are answered: 200 or 503; also /health/ready, /ping and /.", None),
    ("/health/live", "Whether the process runs.", None),
    ("/info", "What the checkpoint says (card) and how it is run (plan); of one model also what TEI says.", None),
    ("/metrics", "Prometheus metrics.", None),
)
_ERRORS: Final = (
    (
        errors.InvalidRequest("is an empty list; give at least one text.", param="input"),
        "The request is wrong; the answer says where.",
    ),
    (errors.Unauthorized("the API key is missing or wrong."), "The API key is missing or wrong."),
    (errors.ModelNotFound("no model 'a' here; this server serves b.", param="model"), "No such model."),
    (errors.TooLarge("4,096 inputs; the limit is 2,048.", param="input"), "Too many bytes, inputs or tokens."),
    (errors.UnsupportedMediaType("Content-Type is missing."), "The body is not declared as a type that the route takes."),
    (errors.Overloaded("the queue is full.", retry_after=1), "The queue is full; `Retry-After` says when to come back."),
    (errors.ComputeError("the computation failed."), "The computation failed."),
    (errors.Unavailable("the engine is not running.", retry_after=1), "The engine is not running."),
)
"""One error of each kind with its description. Status and body depend on the dialect."""


def openapi_document() -> JSON:
    gets = [*_GETS, *((page.path, page.summary, page.response_type) for page in GET_ROUTES)]
    types = [each for route in ROUTES for each in (route.request_type, route.response_type)]
    types += [kind for _, _, kind in gets if kind is not None]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, JSON] = {path: {"post": _post(group.routes, group.media_types)} for path, group in ROUTES_BY_PATH.items()}
    for path, summary, kind in gets:
        paths.setdefault(path, {})["get"] = _get(path, summary, kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Whimbrel", "version": __version__, "summary": "Embeddings from pooling models."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


@cache
def openapi_json(root_path: str = "") -> bytes:
    """Return /openapi.json for a server under a prefix. It takes some 50 ms to make, once per process."""
    return msgspec.json.encode(openapi_document() | ({"servers": [{"url": root_path}]} if root_path else {}))


def docs_html(base_url: str) -> str:
    """Return /docs for a server that the client calls by this URL."""
    return _docs_template().replace(_BASE_URL, escape(base_url))


@cache
def _docs_template() -> str:
    return docs_page(openapi_document(), base_url=_BASE_URL)


def _content(kinds: Sequence[Any], media_types: Sequence[str] = ()) -> JSON:
    refs, _ = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema = refs[0] if len(refs) == 1 else {"oneOf": list(refs)}
    return {each: {"schema": schema} for each in media_types or (JSON_TYPE,)}


def _post(routes: Sequence[Route], media_types: Sequence[str]) -> JSON:
    body = _content([route.request_type for route in routes], media_types)
    body[JSON_TYPE]["examples"] = {route.summary: {"value": msgspec.json.decode(route.example)} for route in routes}
    answer: JSON = {"description": "The answer.", "content": _content([route.response_type for route in routes])}
    answer["content"] |= {kind: {} for route in routes for kind in route.accepts}
    return {
        "summary": " Or: ".join(route.summary for route in routes),
        "requestBody": {"required": True, "content": body},
        "responses": {"200": answer} | _errors(routes),
    }


def _errors(routes: Sequence[Route]) -> dict[str, JSON]:
    """Return the errors of some routes by status, with an example from each dialect."""
    responses: dict[str, JSON] = {}
    for route in routes:
        for error, text in _ERRORS:
            answer = responses.setdefault(str(route.status(error)), {"description": text})
            if text not in answer["description"]:
                answer["description"] += f" {text}"
            if body := route.render_error(error):
                examples = answer.setdefault("content", {}).setdefault(JSON_TYPE, {}).setdefault("examples", {})
                examples.setdefault(route.summary, {"value": msgspec.json.decode(body)})
    return dict(sorted(responses.items()))


def _get(path: str, summary: str, kind: type | None) -> JSON:
    answer: JSON = {"description": "The answer."}
    operation: JSON = {"summary": summary, "responses": {"200": answer}}
    if kind is not None:
        answer["content"] = _content([kind])
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1.5rem; font-size: 1.15rem }
h2 b { font-size: .75rem; padding: .15rem .5rem; border-radius: .3rem; background: var(--soft); margin-right: .6rem }
table { border-collapse: collapse; width: 100%; font-size: .92rem }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line) }
th { font-weight: 600 } code, pre { font: .88rem/1.45 ui-monospace, monospace }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; overflow-x: auto }
summary { cursor: pointer; margin: .8rem 0 .4rem }
"""


def docs_page(document: JSON, *, base_url: str) -> str:
    """Return the OpenAPI document as a page to read, with a curl command for each route."""
    sections = [
        _section(method.upper(), path, operation, document["components"]["schemas"], base_url)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Whimbrel API</title><style>{_STYLE}</style>"
        f"<h1>Whimbrel {escape(__version__)}</h1><p>Machine-readable: <a href=/openapi.json>/openapi.json</a>. "
        "With an API key, send <code>Authorization: Bearer KEY</code>.</p>" + "".join(sections) + "</html>"
    )


def _section(method: str, path: str, operation: JSON, schemas: JSON, base_url: str) -> str:
    parts = [f"<h2><b>{method}</b><code>{escape(path)}</code></h2><p>{_inline(operation['summary'])}</p>"]
    commands = [command := f"curl {base_url}{path}"]
    if (request := operation.get("requestBody")) is not None:
        content = request["content"][JSON_TYPE]
        commands = [f"{command} -H 'Content-Type: application/json' \\\n  -d '{body}'" for body in _examples(content)]
        parts.append(_fields("Request", content["schema"], schemas))
    answer, *refusals = operation["responses"].items()
    if (contents := answer[1].get("content")) is not None:
        parts.append(_fields("Answer", contents[JSON_TYPE]["schema"], schemas))
        if others := ", ".join(f"`{kind}`" for kind in contents if kind != JSON_TYPE):
            parts.append(f"<p>{_inline(f'With another `Accept`: {others}.')}</p>")
    if refusals:
        rows = "".join(f"<tr><td>{status}<td>{_inline(error['description'])}<td>{_bodies(error)}" for status, error in refusals)
        parts.append(f"<details><summary>Errors</summary><table>{rows}</table></details>")
    parts += [f"<pre>{escape(command)}</pre>" for command in commands]
    return "".join(parts)


def _bodies(error: JSON) -> str:
    examples = _examples(error.get("content", {}).get(JSON_TYPE, {}))
    return "<br>".join(f"<code>{escape(body)}</code>" for body in dict.fromkeys(examples))


def _examples(content: JSON) -> list[str]:
    return [msgspec.json.encode(each["value"]).decode() for each in content.get("examples", {}).values()]


def _fields(title: str, schema: JSON, schemas: JSON) -> str:
    if "oneOf" in schema:  # dialects that share a path
        return "".join(_fields(title, each, schemas) for each in schema["oneOf"])
    if "$ref" not in schema:
        return f"<details open><summary>{title}</summary><p>{escape(_type(schema, schemas))}</details>"
    struct = schemas[schema["$ref"].rsplit("/", 1)[-1]]
    required = set(struct.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}<td>{escape(_type(field, schemas))}"
        f"<td>{_inline(field.get('description', ''))}"
        for name, field in struct["properties"].items()
    )
    return f"<details open><summary>{title}</summary><table><tr><th>field<th>type<th>meaning{rows}</table></details>"


def _type(schema: JSON, schemas: JSON) -> str:
    if "$ref" in schema:
        struct = schemas[schema["$ref"].rsplit("/", 1)[-1]]
        inner = ", ".join(f"{name}: {_type(field, schemas)}" for name, field in struct["properties"].items())
        return "{" + inner + "}"
    if "anyOf" in schema:
        return " | ".join(_type(option, schemas) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " | ".join(msgspec.json.encode(value).decode() for value in schema["enum"] if value is not None)
    if schema.get("type") == "array":
        return f"[{_type(schema.get('items', {}), schemas)}]"
    return str(schema.get("type", "any"))


def _inline(text: str) -> str:
    """Return the text as HTML, with <code> in place of backquotes."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
