"""Answers that are no success -> errors of whimbrel.errors, whatever dialect the server speaks; and what to try again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from whimbrel.errors import (
    BodyTimeout,
    ComputeError,
    DeadlineExceeded,
    EngineCrash,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NonFinite,
    NotFound,
    OutOfMemory,
    Overloaded,
    TooLarge,
    TooLong,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    WhimbrelError,
)

_KINDS: Final = (
    InvalidRequest, TooLong, TooLarge, ModelNotFound, NotFound, UnsupportedMediaType, BodyTimeout, Unauthorized, Forbidden,
    DeadlineExceeded, ComputeError, NonFinite, EngineCrash, OutOfMemory,
)  # fmt: skip
_BY_CODE: Final[Mapping[object, type[WhimbrelError]]] = {kind.code: kind for kind in _KINDS}
_BY_STATUS: Final[Mapping[int, type[WhimbrelError]]] = {
    401: Unauthorized, 403: Forbidden, 404: NotFound, 408: BodyTimeout, 413: TooLarge, 504: DeadlineExceeded,
}  # fmt: skip
_GATEWAYS: Final = frozenset({502, 503})
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 8.0
_UNREACHABLE: Final = "unreachable"
_MAX_UNREACHED: Final = 2
"""Tries to reach a server that does not answer at all, after the first: it may not be there."""
_MOST_PATIENCE: Final = 60.0
"""Who asks for more than so many seconds is told so at once."""


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> WhimbrelError:
    """What the status and, if it can be read, the body say."""
    message, param, code = _details(content)
    message = message or f"the server answered {status}: {content[:200].decode(errors='replace')}"
    if status == 429:
        error: WhimbrelError = Overloaded(message, retry_after=_seconds(headers.get("retry-after"), 1.0))
    elif status in _GATEWAYS:
        error = Unavailable(message, retry_after=_seconds(headers.get("retry-after"), 0.0))
    else:
        fallback = _BY_STATUS.get(status) or (InvalidRequest if status < 500 else WhimbrelError)
        error = _BY_CODE.get(code, fallback)(message)
    # the message has the path of the fault in it already
    error.status, error.param, error.code = status, param, str(code) if isinstance(code, str) else error.code
    error.message = message.removeprefix(f"{param}: ") if param else message
    should_retry = headers.get("x-should-retry")
    error.retry = error.retry if should_retry is None else should_retry == "true"
    return error


def unreachable(url: object, error: Exception) -> Unavailable:
    """There was no answer."""
    reason = str(error).rstrip(".") or type(error).__name__
    found = Unavailable(f"no answer from {url}: {reason}. Is the server running?", retry_after=0.0)
    found.code = _UNREACHABLE
    return found


def seconds_until_retry(error: WhimbrelError, tries: int, max_retries: int) -> float | None:
    """How long to wait before the next try, after so many; None: there is none."""
    again = error.retry if error.retry is not None else error.status in (408, 429) or error.status >= 500
    limit = min(max_retries, _MAX_UNREACHED) if error.code == _UNREACHABLE else max_retries
    if not again or tries > limit or error.status in (501, 507):
        return None
    asked = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
    if asked > _MOST_PATIENCE:
        return None
    backoff = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.0)  # noqa: S311
    return max(asked, backoff)


def _details(content: bytes) -> tuple[str, str | None, object]:
    """(message, param, code) of a body in any dialect."""
    try:
        body: Any = msgspec.json.decode(content)
    except ValueError:
        return "", None, None
    if not isinstance(body, dict):
        return "", None, None
    outer = cast(dict[str, Any], body)
    error = outer.get("error")
    found = cast(dict[str, Any], error) if isinstance(error, dict) else outer
    message: object = error if isinstance(error, str) else found.get("message") or found.get("detail")
    param = found.get("param")
    text = message if isinstance(message, str) else "" if message is None else msgspec.json.encode(message).decode()
    return text, param if isinstance(param, str) else None, found.get("code")


def _seconds(header: str | None, default: float) -> float:
    """A date or nonsense counts as the default."""
    if header is None or not header.replace(".", "", 1).isdecimal():
        return default
    return float(header)
