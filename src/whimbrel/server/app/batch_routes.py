"""Routes of OpenAI's Files and Batch API, over the folder of a server. They exist where the server has one.

A file is streamed to and from the disk. Everything belongs to the API key that made it: others get 404.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.types import Scope, Send

from whimbrel.dialects import JSON
from whimbrel.dialects.common.bodies import decode
from whimbrel.errors import InvalidRequest, NoStorage, PermissionDenied, TooLarge, Unavailable, UnsupportedMediaType
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.own_requests import OwnRequests
from whimbrel.server.app.request_context import RequestContext, context_of, sanitize
from whimbrel.server.app.routing import ROUTES_BY_PATH, ModelRegistry
from whimbrel.server.batches.multipart import MultipartParser, Part, boundary_of
from whimbrel.server.batches.records import KEPT_SECONDS, WINDOW, WINDOW_SECONDS, BatchList, FileDeleted, FileList, FileRecord
from whimbrel.server.batches.run import Window
from whimbrel.server.batches.runner import BatchRunner, Serving
from whimbrel.server.batches.store import Store, StoreLimits, Upload

FILES: Final = "/v1/files"
FILE: Final = "/v1/files/{file_id}"
CONTENT: Final = "/v1/files/{file_id}/content"
BATCHES: Final = "/v1/batches"
BATCH: Final = "/v1/batches/{batch_id}"
CANCEL: Final = "/v1/batches/{batch_id}/cancel"
BATCH_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    FILES: ("GET", "POST"),
    FILE: ("GET", "DELETE"),
    CONTENT: ("GET",),
    BATCHES: ("GET", "POST"),
    BATCH: ("GET",),
    CANCEL: ("POST",),
}
"""Methods of each path."""
OPENED_BY: Final = {template: FILES if template.startswith(FILES) else BATCHES for template in BATCH_METHODS}
"""Templates, each with the route that a key names to open it."""
_PATTERNS: Final = {template: re.compile(re.sub("{.*}", "[^/]+", template)) for template in BATCH_METHODS}
_MULTIPART_BYTES: Final = 2**16
"""Bytes that a body may have beside its file."""
_MAX_FIELD: Final = 1000
_MAX_BODY: Final = 2**20
_WRITE_BYTES: Final = 2**20
_READ_BYTES: Final = 2**18
_MAX_WINDOW: Final = Window()
_MIN_WINDOW_BYTES: Final = 2**16

Seconds = Annotated[int, Meta(ge=3600, le=KEPT_SECONDS)]


class ExpiresAfter(msgspec.Struct, frozen=True):
    anchor: Literal["created_at"]
    seconds: Seconds


class BatchRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: ExpiresAfter | None = None


def batch_template(path: str) -> str:
    """Return the template of a route of files or batches; empty if there is none."""
    if path in (FILES, BATCHES):
        return path
    return next((template for template, pattern in _PATTERNS.items() if pattern.fullmatch(path)), "")


class BatchRoutes:
    """The routes, and the runner of their batches."""

    def __init__(self, limits: ServerLimits, own: OwnRequests, served: ModelRegistry) -> None:
        self.store = Store(Path(limits.batch_dir), StoreLimits(limits.max_file_bytes, limits.max_files, limits.max_files_bytes))
        self._served = served
        serving = Serving(own.ask, own.key_of, self._window, limits.max_body_bytes)
        self._runner = BatchRunner(self.store, serving)

    def start(self) -> None:
        """Run batches from now on, if no other process does. The folder is to be prepared before."""
        self._runner.start()

    async def stop(self) -> None:
        """End the lines that run. Their batches go on in another process, or after the next start."""
        await self._runner.stop()

    def _window(self) -> Window:
        """Return the bounds of a batch's lines in flight: at most half of what a queue takes, so that others find room."""
        most = min((embedder.plan.max_queue_tokens for embedder in self._served), default=_MAX_WINDOW.max_bytes) // 2
        return Window(_MAX_WINDOW.max_lines, max(_MIN_WINDOW_BYTES, min(_MAX_WINDOW.max_bytes, most)))

    async def answer(self, template: str, scope: Scope, send: Send) -> None:
        """Answer a request to one of the routes. Raises WhimbrelError."""
        if self._served.draining and scope["method"] == "POST":
            raise Unavailable("the server is about to stop.", retry_after=5.0)
        context, path = context_of(scope), scope["path"]
        owner = "" if context.key is None else context.key.digest.hex()
        name = path.split("/")[3] if template not in (FILES, BATCHES) else ""
        if template == CONTENT:
            await self._send_content(name, owner, send)
            return
        try:
            match template, scope["method"]:
                case "/v1/files", "POST":
                    view = await self._upload(context, owner)
                case "/v1/batches", "POST":
                    view = await self._create(context, owner)
                case _, method:
                    view = await asyncio.to_thread(self._view, template, method, name, owner, scope["query_string"])
        except OSError as error:
            if isinstance(error, ConnectionError) or context.left:
                raise
            raise NoStorage(f"the server cannot use its folder of batches: {error.strerror or error}.") from None
        await _send_json(view, send)

    def _view(self, template: str, method: str, name: str, owner: str, query: bytes) -> Any:
        store = self.store
        match template, method:
            case "/v1/files", _:
                return self._list_files(owner, query)
            case "/v1/batches", _:
                page = _page(query, most=100, default=20)
                return page.of(BatchList, store.batches(owner)[::-1], store.view)
            case "/v1/files/{file_id}", "DELETE":
                store.delete_file(name, owner)
                return FileDeleted(id=name)
            case "/v1/files/{file_id}", _:
                return store.file(name, owner).view()
            case "/v1/batches/{batch_id}/cancel", _:
                store.cancel(store.batch(name, owner))
            case _:
                pass
        return store.view(store.batch(name, owner))

    def _list_files(self, owner: str, query: bytes) -> Any:
        page = _page(query, most=10_000, default=10_000)
        records = [each for each in self.store.files(owner) if page.purpose in (None, each.purpose)]
        records = records if page.order == "asc" else records[::-1]
        return page.of(FileList, records, FileRecord.view)

    async def _upload(self, context: RequestContext, owner: str) -> Any:
        headers = context.request_headers
        kind = headers.get(b"content-type", b"").decode("latin-1")
        boundary = boundary_of(kind)
        if boundary is None:
            raise UnsupportedMediaType(
                f"Content-Type is {sanitize(kind) or 'missing'}; send multipart/form-data with a boundary, "
                "and in it `purpose` and `file`."
            )
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedMediaType("a file is sent as it is, without a Content-Encoding.")
        context.max_body_bytes = self.store.limits.max_file_bytes + _MULTIPART_BYTES
        announced = headers.get(b"content-length")
        upload = await asyncio.to_thread(self.store.begin_upload, None if announced is None else int(announced))
        try:
            form = _Form(upload, MultipartParser(boundary))
            await form.read(context)
            filename, seconds = form.checked()
            record = await asyncio.to_thread(self.store.add_file, upload, owner, filename, seconds)
        finally:
            await asyncio.to_thread(upload.close)
        return record.view()

    async def _create(self, context: RequestContext, owner: str) -> Any:
        kind = context.request_headers.get(b"content-type", JSON.encode()).partition(b";")[0].strip().lower()
        if kind != JSON.encode():
            raise UnsupportedMediaType(f"Content-Type is {sanitize(kind.decode('latin-1'))}; send {JSON}.")
        context.max_body_bytes = _MAX_BODY
        body = decode(BatchRequest, await context.read_body())
        if body.endpoint not in ROUTES_BY_PATH:
            raise InvalidRequest(f"is {body.endpoint[:100]!r}, which is no POST route of this server.", param="endpoint")
        if context.key is not None and not context.key.opens(body.endpoint):
            raise PermissionDenied(f"the API key {context.key.name} may not use {body.endpoint}.")
        if body.completion_window != WINDOW:
            raise InvalidRequest(f"is {body.completion_window[:20]!r}; it takes {WINDOW}.", param="completion_window")
        if body.metadata is not None and len(body.metadata) > 16:
            raise InvalidRequest(f"has {len(body.metadata)} pairs; the limit is 16.", param="metadata")
        kept = KEPT_SECONDS if body.output_expires_after is None else body.output_expires_after.seconds
        record = await asyncio.to_thread(
            self.store.add_batch, owner, body.endpoint, body.input_file_id, body.metadata, kept, seconds=WINDOW_SECONDS
        )
        return await asyncio.to_thread(self.store.view, record)

    async def _send_content(self, file_id: str, owner: str, send: Send) -> None:
        file = await asyncio.to_thread(self.store.open_file, file_id, owner)
        try:
            size = os.fstat(file).st_size
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            sent = 0
            while sent < size:
                data = await asyncio.to_thread(os.pread, file, min(_READ_BYTES, size - sent), sent)
                if not data:
                    raise OSError(f"the file {file_id} is shorter than it was")
                sent += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": sent < size})
            if not size:
                await send({"type": "http.response.body", "body": b""})
        finally:
            os.close(file)


class _Form:
    """The fields and the file of an upload, as they come."""

    def __init__(self, upload: Upload, parser: MultipartParser) -> None:
        self._upload = upload
        self._parser = parser
        self._fields: dict[str, bytes] = {}
        self._part: Part | None = None
        self._filename: str | None = None
        self._unwritten: list[bytes] = []
        self._size = 0

    async def read(self, context: RequestContext) -> None:
        """Read a body to its end, and its file to the disk. Raises InvalidRequest, OSError and ClientDisconnect."""
        more = True
        while more:
            message = await context.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            for event in self._parser.feed(message.get("body", b"")):
                self._take(event)
            more = message.get("more_body", False)
            if self._size >= _WRITE_BYTES or not more:
                await asyncio.to_thread(self._upload.write, b"".join(self._unwritten))
                self._unwritten, self._size = [], 0
        self._parser.close()

    def _take(self, event: Part | bytes) -> None:
        if isinstance(event, Part):
            self._part = event
            if event.name == "file":
                if self._filename is not None:
                    raise InvalidRequest("is there twice; send one file.", param="file")
                self._filename = event.filename or "upload"
            elif event.name in self._fields:
                raise InvalidRequest("is there twice.", param=sanitize(event.name, 40))
            else:
                self._fields[event.name] = b""
            return
        assert self._part is not None
        if self._part.name == "file":
            self._unwritten.append(event)
            self._size += len(event)
            return
        value = self._fields[self._part.name] + event
        if len(value) > _MAX_FIELD:
            raise TooLarge(f"has more than {_MAX_FIELD:,} bytes.", param=sanitize(self._part.name, 40))
        self._fields[self._part.name] = value

    def checked(self) -> tuple[str, int]:
        """Return the name of the file, and the seconds for which it is kept. Raises InvalidRequest."""
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = fields.get("purpose")
        if purpose != "batch":
            told = "is missing" if purpose is None else f"is {purpose[:40]!r}"
            raise InvalidRequest(f"{told}; this server takes files for `batch`.", param="purpose")
        if self._filename is None:
            raise InvalidRequest("is missing.", param="file")
        seconds = fields.get("expires_after[seconds]", str(KEPT_SECONDS))
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise InvalidRequest("takes created_at.", param="expires_after[anchor]")
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10 and 3600 <= int(seconds) <= KEPT_SECONDS):
            raise InvalidRequest(f"takes seconds from 3600 to {KEPT_SECONDS}.", param="expires_after[seconds]")
        return sanitize(os.path.basename(self._filename) or "upload", 200), int(seconds)


class _Page(msgspec.Struct, frozen=True):
    """The part of a list that a query asks for."""

    limit: int
    after: str | None
    order: str
    purpose: str | None

    def of(self, kind: Callable[..., Any], records: Sequence[Any], view: Callable[[Any], Any]) -> Any:
        """Return the list of a kind with the views of these records. Raises InvalidRequest."""
        names: list[str] = [record.id for record in records]
        if self.after is not None and self.after not in names:
            raise InvalidRequest(f"is {self.after[:100]!r}, which is none of this list.", param="after")
        start = 0 if self.after is None else names.index(self.after) + 1
        names = names[start : start + self.limit]
        first, last = (names[0], names[-1]) if names else (None, None)
        more = start + self.limit < len(records)
        data = [view(record) for record in records[start : start + self.limit]]
        return kind(data=data, first_id=first, last_id=last, has_more=more)


def _page(query: bytes, *, most: int, default: int) -> _Page:
    """Return what a query asks for. Raises InvalidRequest."""
    try:
        stated = dict(parse_qsl(query.decode("latin-1"), max_num_fields=16))
    except ValueError:
        raise InvalidRequest("the query has more than 16 fields.") from None
    limit = stated.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"takes a number from 1 to {most:,}.", param="limit")
    order = stated.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("takes asc or desc.", param="order")
    return _Page(int(limit), stated.get("after"), order, stated.get("purpose"))


async def _send_json(view: Any, send: Send) -> None:
    body = msgspec.json.encode(view)
    headers = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
