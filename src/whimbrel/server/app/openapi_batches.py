"""Files and batches in OpenAPI's terms, for servers that have these routes."""

from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from whimbrel import errors
from whimbrel.dialects import JSON as JSON_TYPE
from whimbrel.dialects.common.openai_errors import OpenAIError
from whimbrel.server.app.batch_routes import BATCH, BATCHES, CANCEL, CONTENT, FILE, FILES, BatchRequest
from whimbrel.server.batches.records import BatchList, BatchObject, FileDeleted, FileList, FileObject

JSON: TypeAlias = dict[str, Any]
TAG: Final = "Files and batches"
_REF: Final = "#/components/schemas/{name}"
_BINARY: Final = "application/octet-stream"


class _Operation(NamedTuple):
    method: str
    path: str
    summary: str
    kind: Any
    query: tuple[str, ...] = ()
    body: JSON | None = None


_UPLOAD: Final[JSON] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": _BINARY},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_QUERY: Final[JSON] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1},
    "order": {"enum": ["asc", "desc"]},
    "purpose": {"type": "string"},
}
_OPERATIONS: Final = (
    _Operation("get", FILES, "The files of the API key.", FileList, ("after", "limit", "order", "purpose")),
    _Operation("post", FILES, "Upload a file of requests.", FileObject, body={"multipart/form-data": {"schema": _UPLOAD}}),
    _Operation("get", FILE, "A file.", FileObject),
    _Operation("delete", FILE, "Remove a file.", FileDeleted),
    _Operation("get", CONTENT, "The bytes of a file.", None),
    _Operation("get", BATCHES, "The batches of the API key.", BatchList, ("after", "limit")),
    _Operation(
        "post", BATCHES, "Run the requests of a file.", BatchObject,
        body={JSON_TYPE: {"schema": {"$ref": _REF.format(name=BatchRequest.__name__)}}},
    ),
    _Operation("get", BATCH, "A batch and its counts.", BatchObject),
    _Operation("post", CANCEL, "End a batch.", BatchObject),
)  # fmt: skip
_REFUSALS: Final[tuple[type[errors.WhimbrelError], ...]] = (
    errors.InvalidRequest, errors.Unauthorized, errors.PermissionDenied, errors.NotFound, errors.BodyTimeout, errors.TooLarge,
    errors.UnsupportedMediaType, errors.WhimbrelError, errors.Unavailable, errors.NoStorage,
)  # fmt: skip


def with_batches(document: JSON) -> JSON:
    """Return a document of OpenAPI with the routes of files and batches."""
    kinds = (BatchRequest, BatchList, BatchObject, FileList, FileObject, FileDeleted)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, JSON] = {}
    for each in _OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _described(each)
    components = document["components"] | {"schemas": document["components"]["schemas"] | schemas}
    tags = [*document["tags"], {"name": TAG, "description": "OpenAI's files and batches."}]
    return document | {"paths": document["paths"] | paths, "components": components, "tags": tags}


def _described(operation: _Operation) -> JSON:
    kind = operation.kind
    content: JSON = {_BINARY: {}} if kind is None else {JSON_TYPE: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    refusal = {JSON_TYPE: {"schema": {"$ref": _REF.format(name=OpenAIError.__name__)}}}
    described: JSON = {
        "tags": [TAG],
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                str(error.status): {"description": (error.__doc__ or "An error.").strip(), "content": refusal}
                for error in _REFUSALS
            },
        },
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _names(operation.path)),
            *({"name": name, "in": "query", "schema": _QUERY[name]} for name in operation.query),
        ],
    }
    return described | ({} if operation.body is None else {"requestBody": {"required": True, "content": operation.body}})


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]
