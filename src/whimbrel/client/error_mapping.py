"""What is no success -> errors of whimbrel.errors, whatever dialect the server speaks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import msgspec

from whimbrel.errors import (
    BodyTimeout,
    ComputeError,
    DeadlineExceeded,
    EngineCrash,
    Forbidden,
    InvalidRequest,
    Location,
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
    401: Unauthorized, 403: Forbidden, 404: NotFound, 408: BodyTimeout, 413: TooLarge, 415: UnsupportedMediaType,
    424: ComputeError, 504: DeadlineExceeded,
}  # fmt: skip
_GATEWAYS: Final = frozenset({502, 503})
UNREACHED: Final = "unreachable"
"""The code of what came to no connection."""
LOST: Final = "connection_lost"
"""Of a connection that ended before the answer did, as those do that a server closes while they are idle."""
TIMEOUT: Final = "timeout"
_TOO_MANY: Final = "maximum allowed batch size"
"""TEI has no status of its own for it."""
_PREFIX: Final = re.compile(r"((?:inputs?|texts|queries|query|documents)(?:\[\d+\])*): ")
"""How a message begins that names a place."""


def to_error(url: str, status: int, headers: Mapping[str, str], content: bytes) -> WhimbrelError:
    """What the status and, if it can be read, the body say; `url` was asked."""
    message, param, code = _details(content)
    message = message or _without_words(url, status, headers, content)
    if status == 401:
        message += " Here the key is the client's `api_key`."
    if status == 429:
        error: WhimbrelError = Overloaded(message, retry_after=_seconds(headers.get("retry-after"), 1.0))
    elif status in _GATEWAYS:
        error = Unavailable(message, retry_after=_seconds(headers.get("retry-after"), 0.0))
    else:
        fallback = _BY_STATUS.get(status) or (InvalidRequest if status < 500 else WhimbrelError)
        error = (TooLarge if _TOO_MANY in message else _BY_CODE.get(code, fallback))(message)
    # the message has the path of the fault in it already
    error.status, error.location, error.code = status, _location(param) if param else None, code or error.code
    error.message = message.removeprefix(f"{param}: ") if param else message
    should_retry = headers.get("x-should-retry")
    error.retry = error.retry if should_retry is None else should_retry == "true"
    return error


def to_failure(url: str, error: Exception, seconds: float) -> Unavailable:
    """There was no answer, or half of one, in so many seconds."""
    url, reason = without_password(url), str(error).rstrip(".") or type(error).__name__
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        is_tls = "SSL" in reason and "CERTIFICATE" not in reason
        hint = ("Does it speak HTTPS?" if is_tls else "Is the server running?") + _way_to(url)
        found, code = Unavailable(f"no answer from {url}: {reason}. {hint}", retry_after=0.0), UNREACHED
    elif isinstance(error, TimeoutError | httpx2.TimeoutException):
        hint = "Give more time (timeout), or fewer texts to a request (max_items)."
        found, code = Unavailable(f"no answer from {url} within {seconds:g} seconds. {hint}", retry_after=0.0), TIMEOUT
    else:
        found, code = Unavailable(f"the connection to {url} broke: {reason}.", retry_after=0.0), LOST
    found.code = code
    return found


def _way_to(url: str) -> str:
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return ""
    return f" It is asked through the proxy {without_password(proxy)}, as the environment says; NO_PROXY names who is not."


def closed() -> Unavailable:
    """The error of every verb of a client that was closed."""
    return Unavailable("the client is closed.")


def without_password(url: str) -> str:
    """As it may be shown."""
    return re.sub(r"(?<=//)[^/@]*@", "", url)


def _without_words(url: str, status: int, headers: Mapping[str, str], content: bytes) -> str:
    """Of an answer that does not say what is wrong, or not so that it can be read."""
    message = f"{without_password(url)} answered {status}"
    if 300 <= status < 400 and "location" in headers:
        return f"{message}: it is at {headers['location'][:200]}. Give the base URL of that place."
    if text := " ".join(content[:200].decode(errors="replace").split()):
        message += f": {text}"
    if "retry-after" in headers:
        message += f" (Retry-After: {headers['retry-after'][:40]})"
    return message + (". Are the base URL and the dialect right?" if status == 404 else ".")


def _details(content: bytes) -> tuple[str, str | None, str | None]:
    """(message, param, code) of a body in any dialect."""
    try:
        body: Any = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return "", None, None
    if not isinstance(body, dict):
        return "", None, None
    outer = cast(dict[str, Any], body)
    error = outer.get("error")
    found = cast(dict[str, Any], error) if isinstance(error, dict) else outer
    message: object = error if isinstance(error, str) else found.get("message") or found.get("detail")
    text = message if isinstance(message, str) else "" if message is None else msgspec.json.encode(message).decode()
    param, code = found.get("param"), found.get("code")
    if not isinstance(param, str):
        prefix = _PREFIX.match(text)
        param = prefix and prefix[1]
    return text, param, code if isinstance(code, str) else None


def _location(param: str) -> Location:
    """Return a place as servers write it; one that has another form is a field of that name."""
    match = _PLACE.fullmatch(param)
    return Location(match[1], int(match[2]) if match[2] else None, path=match[3]) if match else Location(param)


_PLACE: Final = re.compile(r"(\w+)(?:\[(\d{1,9})\])?((?:[\[.].*)?)", re.DOTALL)


def _seconds(header: str | None, default: float) -> float:
    """A number or a date. Nonsense counts as the default."""
    if header is None:
        return default
    if header.replace(".", "", 1).isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
        return max((until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, OverflowError):
        return default
