"""The error tree. Every error that a user can cause states the fault, its place, the limit and the fix.

The statement of a class gives its HTTP status and its code, a stable word for programs. Each dialect renders errors in its own
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from enum import Enum
from typing import Final, Self, TypeAlias, TypedDict, Unpack

import msgspec


class Location(msgspec.Struct, frozen=True):
    """The place of a fault in a request. Its text is a path, e.g. "input[3][1]"."""

    field: str
    item: int | None = None
    """Index into the field."""
    part: int | None = None
    """Index into the item: a text of a pair, or a token id."""
    path: str = ""
    """Anything deeper, as text."""

    def __str__(self) -> str:
        indices = "".join(f"[{index}]" for index in (self.item, self.part) if index is not None)
        return f"{self.field}{indices}{self.path}"

    def below(self, path: str) -> Location:
        """Return the location at `path` within this one."""
        return msgspec.structs.replace(self, path=self.path + path)


Locate: TypeAlias = Callable[[Location], Location]
"""A map from locations in the field `input` to what a caller calls them."""


def locate_pairs(queries: str, documents: str, *, single: tuple[bool, bool] = (False, False)) -> Locate:
    """Return the map to two fields that hold the parts of pairs; a field that is `single` has no items."""

    def locate(location: Location) -> Location:
        part = 1 if location.part is None else location.part
        return Location((queries, documents)[part], None if single[part] else location.item)

    return locate


OPTIONS: Final[Mapping[str, str | None]] = {"truncate": 'truncate="right"', "input_type": 'input_type="query" or "document"'}
"""The options that hints name, as Python spells them. A dialect has its own spelling; None: it has no such option."""


class Hint(Enum):
    """The end of a message that names the option to use: a key of OPTIONS, and the sentence around it."""

    TRUNCATE = "truncate", " Pass {} to cut it."
    TRUNCATE_PAIR = "truncate", " Pass {} to cut them."
    INPUT_TYPE = "input_type", "; say {}."

    def sentence(self, options: Mapping[str, str | None] = OPTIONS) -> str:
        """Return the hint in the spelling of `options`, or nothing if they have no such option."""
        name, text = self.value
        option = options.get(name, OPTIONS[name])
        return "" if option is None else text.format(option)


class TruncationWarning(UserWarning):
    """Texts were cut to the model's limit, which the call did not ask for."""


class Place(TypedDict, total=False):
    """The place of a fault: a field `param`, by default `input`, with an item and its part; or a `location` as a whole."""

    param: str | None
    item: int | None
    part: int | None
    location: Location | None


class WhimbrelError(Exception):
    """Base of all errors raised by Whimbrel."""

    status: int = 500
    code: str = "internal_error"
    retry: bool | None = None
    """True if a client should send the same request again; None: as the status suggests."""

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None, retry: bool | None = None) -> None:
        """Set what a kind of error has in place of its base's."""
        for name, value in {"status": status, "code": code, "retry": retry}.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, **place: Unpack[Place]) -> None:
        location, param, item = place.get("location"), place.get("param"), place.get("item")
        if param is not None or item is not None:
            location = Location(param or "input", item, place.get("part"))
        super().__init__(f"{location}: {message}" if location else message)
        self.message = message
        self.location = location

    @property
    def param(self) -> str | None:
        """The path of the fault in the request, e.g. "input[3]"."""
        return None if self.location is None else str(self.location)

    def at(self, location: Location) -> Self:
        """Return the same error at another place."""
        moved = copy(self)
        moved.location = location
        moved.args = (f"{location}: {self.message}",)
        return moved

    def relocated(self, locate: Locate | None) -> Self:
        """Return an error over the inputs at the place that `locate` gives; any other error, and without `locate`, itself."""
        if locate is None or self.location is None or self.location.field != "input":
            return self
        location = locate(self.location)
        return self if location == self.location else self.at(location)


class InvalidRequest(WhimbrelError, ValueError, status=400, code="invalid_value"):
    """The request is wrong; sending it again will not help."""

    def __init__(self, statement: str, *, hint: Hint | None = None, **place: Unpack[Place]) -> None:
        super().__init__(statement if hint is None else statement + hint.sentence(), **place)
        self.statement = statement
        self.hint = hint


class MalformedHTTP(InvalidRequest, code="malformed_http"):
    """Bytes that are no HTTP/1.1 request, or not a whole one. Every dialect says so with status 400."""


class TooLong(InvalidRequest, code="context_length_exceeded"):
    """One text has more tokens than the model takes, and truncation is off."""

    model_limit: int | None = None
    """The model's own limit in tokens, if it is the one that is exceeded."""


class TooLarge(InvalidRequest, status=413, code="request_too_large"):
    """The request as a whole has too many bytes, inputs or tokens."""


class UnsupportedMediaType(InvalidRequest, status=415, code="unsupported_media_type"):
    """The body is not declared as a type that the route takes."""


class ModelNotFound(InvalidRequest, status=404, code="model_not_found"):
    """The request names a model that this server does not serve."""

    model: str | None = None
    """The name that the request gives."""


class NotFound(InvalidRequest, status=404, code="not_found"):
    """The path has no route."""


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"):
    """The path has a route for another method."""


class HeadersTooLarge(InvalidRequest, status=431, code="headers_too_large"):
    """Too many headers, or too many bytes in them."""


class BodyTimeout(InvalidRequest, status=408, code="body_timeout"):
    """The body stalled, or came more slowly than the server waits for."""


class Unauthorized(WhimbrelError, status=401, code="invalid_api_key"):
    """The API key is missing or wrong."""


class Forbidden(WhimbrelError, status=403, code="forbidden"):
    """The Host or Origin header is not one that this server answers."""


class PermissionDenied(Forbidden, code="permission_denied"):
    """The API key may not use this route or this model."""


class Overloaded(WhimbrelError, status=429, code="overloaded"):
    """The queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The API key has used up one of its budgets; `retry_after` is in seconds."""


class Unavailable(WhimbrelError, status=503, code="unavailable"):
    """The engine is not running (yet, or any more); `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(WhimbrelError, status=504, code="deadline_exceeded", retry=False):
    """The request's deadline has passed; texts that had not run were dropped."""


class ComputeError(WhimbrelError, code="compute_error", retry=False):
    """The device failed on this request; the engine goes on."""


class NonFinite(ComputeError, code="non_finite"):
    """The model gave NaN or infinity for one of the texts."""


class EngineCrash(ComputeError, code="engine_crash"):
    """The engine died each time that one of the texts was on the device alone."""


class OutOfMemory(ComputeError, status=507, code="out_of_memory"):
    """One text alone does not fit into the device's memory."""


class NoStorage(WhimbrelError, status=507, code="no_storage", retry=False):
    """The server's disk has no room for a file."""


class CheckpointError(WhimbrelError, code="checkpoint_error"):
    """The checkpoint cannot be served as it is. `file` and `key` name the setting that prevents it, `hint` the remedy."""

    def __init__(self, message: str, *, file: str, key: str | None = None, hint: str | None = None) -> None:
        where = f"{file}: {key}: " if key is not None else f"{file}: "
        super().__init__(where + message)
        self.file = file
        self.key = key
        self.hint = hint


class SetupError(WhimbrelError, code="setup_error"):
    """An option, a missing package or the machine prevents a start. `hint` names the remedy."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def relocating(locate: Locate | None) -> Generator[None]:
    """Relocate the errors that are raised within."""
    try:
        yield
    except WhimbrelError as error:
        if (moved := error.relocated(locate)) is error:
            raise
        raise moved.with_traceback(error.__traceback__) from error.__cause__
