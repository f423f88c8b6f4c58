"""The error tree. Every error a user can cause says what is wrong, where, the limit and the fix.

    WhimbrelError                      500
    +-- InvalidRequest (ValueError)    400   the request is wrong; `param` is the path of the fault
    |   +-- TooLong                    400   one text has more tokens than the model takes
    |   +-- TooLarge                   413   too many bytes, inputs or tokens in one request
    |   +-- UnsupportedMediaType       415
    |   +-- HeadersTooLarge            431
    |   +-- ModelNotFound              404
    |   +-- NotFound                   404   no such route
    |   +-- MethodNotAllowed           405
    |   +-- BodyTimeout                408   the body came too slowly
    +-- Unauthorized                   401
    +-- Forbidden                      403   the Host or Origin is not one that this server answers
    +-- Overloaded                     429   the queue is full; `retry_after` says when to come back
    +-- Unavailable                    503   the engine is starting, restarting, draining or closed
    +-- DeadlineExceeded               504   the time that the caller gave is over
    +-- ComputeError                   500   the batch failed on the device; the engine lives
    |   +-- NonFinite                  500   the model gave NaN or infinity for this text
    |   +-- EngineCrash                500   the engine dies of this text
    |   +-- OutOfMemory                507   this text alone does not fit into the device's memory
    +-- CheckpointError                -     the checkpoint cannot be served; names file and key
    +-- SetupError                     -     an option, a package or the machine does not allow it

`status` is an HTTP status, `code` a stable word for programs. Each dialect renders errors in its own shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Final, Self

_FIELD: Final = re.compile(r"\w+")
_INPUT: Final = re.compile(r"input(?:\[(\d+)\])?(?:\[(\d+)\])?")


class WhimbrelError(Exception):
    """Base of all errors raised by Whimbrel."""

    status: int = 500
    code: str = "internal_error"
    retry: bool | None = None
    """What a client should do with the same request again; None: as its status suggests."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.message = message
        self.param = param
        """The path of the fault in the request, e.g. "input[3]"."""

    def at(self, param: str) -> Self:
        """The same error, of another place."""
        moved = copy(self)
        moved.param = param
        moved.args = (f"{param}: {self.message}",)
        return moved

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error in the words of an API, whose field for one of ours `names` says where it has another name."""
        field = _FIELD.match(self.param or "")
        if self.param is None or field is None or field[0] not in names:
            return self
        return self.at(names[field[0]] + self.param[field.end() :])


class InvalidRequest(WhimbrelError, ValueError):
    """The request is wrong; sending it again will not help."""

    status = 400
    code = "invalid_value"


class TooLong(InvalidRequest):
    """One text has more tokens than the model takes, and truncation is off."""

    code = "context_length_exceeded"


class TooLarge(InvalidRequest):
    """The request as a whole has too many bytes, inputs or tokens."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as a type that the route takes."""

    status = 415
    code = "unsupported_media_type"


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    """There is no such route."""

    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    """The route exists, with another method."""

    status = 405
    code = "method_not_allowed"


class HeadersTooLarge(InvalidRequest):
    """Too many headers, or too many bytes in them."""

    status = 431
    code = "headers_too_large"


class BodyTimeout(InvalidRequest):
    """The body stalled, or came more slowly than the server waits for."""

    status = 408
    code = "body_timeout"


class Unauthorized(WhimbrelError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(WhimbrelError):
    """The Host or Origin header is not one that this server answers."""

    status = 403
    code = "forbidden"


class Overloaded(WhimbrelError):
    """The queue is full; `retry_after` is in seconds."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(WhimbrelError):
    """The engine is not running (yet, or any more); `retry_after` is in seconds."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(WhimbrelError):
    """The time that the caller gave is over; what had not run did not run."""

    status = 504
    code = "deadline_exceeded"
    retry = False


class ComputeError(WhimbrelError):
    """The device failed on this request; the engine goes on."""

    code = "compute_error"
    retry = False


class NonFinite(ComputeError):
    """The model gave NaN or infinity for one of the texts."""

    code = "non_finite"


class EngineCrash(ComputeError):
    """The engine died each time that one of the texts was on the device alone."""

    code = "engine_crash"


class OutOfMemory(ComputeError):
    """One text alone does not fit into the device's memory."""

    status = 507
    code = "out_of_memory"


class CheckpointError(WhimbrelError):
    """The checkpoint cannot be served as it is. `file` and `key` say which statement is in the way."""

    code = "checkpoint_error"

    def __init__(self, message: str, *, file: str, key: str | None = None) -> None:
        where = f"{file}: {key}: " if key is not None else f"{file}: "
        super().__init__(where + message)
        self.file = file
        self.key = key


class SetupError(WhimbrelError):
    """An option, a missing package or the machine is in the way of starting. `hint` says what to do."""

    code = "setup_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def relocating(name: Callable[..., str] | None) -> Generator[None]:
    """Errors within are `relocated`; None: they are not."""
    try:
        yield
    except WhimbrelError as error:
        if name is None or (moved := relocated(error, name)) is error:
            raise
        raise moved.with_traceback(error.__traceback__) from error.__cause__


def relocated(error: WhimbrelError, name: Callable[..., str]) -> WhimbrelError:
    """An error of the inputs, by another name: that of all of them, of one, or of one's part. Any other error as it is."""
    found = _INPUT.fullmatch(error.param or "")
    return error if found is None else error.at(name(*(int(number) for number in found.groups() if number is not None)))
