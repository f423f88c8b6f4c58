"""Error responses and failed connections as errors of `whimbrel.errors`, for servers of any dialect."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import msgspec

from whimbrel import errors
from whimbrel.errors import InvalidRequest, Location, Overloaded, TooLarge, Unavailable, WhimbrelError

_ERROR_TYPES: Final = (
    InvalidRequest, TooLarge, errors.TooLong, errors.ModelNotFound, errors.NotFound, errors.UnsupportedMediaType,
    errors.BodyTimeout, errors.Unauthorized, errors.Forbidden, errors.PermissionDenied, errors.DeadlineExceeded,
    errors.ComputeError, errors.NonFinite, errors.EngineCrash, errors.OutOfMemory,
)  # fmt: skip
_BY_CODE: Final[Mapping[object, type[WhimbrelError]]] = {each.code: each for each in _ERROR_TYPES}
_BY_STATUS: Final[Mapping[int, type[WhimbrelError]]] = {
    401: errors.Unauthorized, 403: errors.Forbidden, 404: errors.NotFound, 408: errors.BodyTimeout, 413: TooLarge,
    415: errors.UnsupportedMediaType, 424: errors.ComputeError, 504: errors.DeadlineExceeded,
}  # fmt: skip
UNREACHED: Final = "unreachable"
"""Error code of a connection that could not be made."""
LOST: Final = "connection_lost"
"""Error code of a connection that ended before the response did. Servers close idle connections."""
TIMEOUT: Final = "timeout"
_BATCH_TOO_LARGE: Final = "maximum allowed batch size"
"""Words of TEI's message, which has no status of its own."""
_PREFIX: Final = re.compile(r"((?:inputs?|texts|queries|query|documents)(?:\[\d+\])*): ")
"""Location at the start of a message."""
_LOCATION: Final = re.compile(r"(\w+)(?:\[(\d{1,9})\])?((?:[\[.].*)?)", re.DOTALL)


def to_error(url: str, status: int, headers: Mapping[str, str], content: bytes) -> WhimbrelError:
    """Return the error that a response of the server at `url` stands for. An unreadable body is quoted."""
    message, param, code = _parse_error(content)
    message = message or _default_message(url, status, headers, content)
    if status == 401:
        message += " Pass the key to the client as `api_key`."
    if status == 429:
        kind = errors.RateLimited if code == errors.RateLimited.code else Overloaded
        error: WhimbrelError = kind(message, retry_after=_seconds(headers.get("retry-after"), 1.0))
    elif status in (502, 503):
        error = Unavailable(message, retry_after=_seconds(headers.get("retry-after"), 0.0))
    else:
        fallback = _BY_STATUS.get(status) or (InvalidRequest if status < 500 else WhimbrelError)
        error = (TooLarge if _BATCH_TOO_LARGE in message else _BY_CODE.get(code, fallback))(message)
    # the message begins with the location already
    error.status, error.location, error.code = status, _location(param) if param else None, code or error.code
    error.message = message.removeprefix(f"{param}: ") if param else message
    should_retry = headers.get("x-should-retry")
    error.retry = error.retry if should_retry is None else should_retry == "true"
    return error


def to_failure(url: str, error: Exception, seconds: float) -> Unavailable:
    """Return the error for a missing or incomplete response within `seconds`."""
    url, reason = redact_password(url), str(error).rstrip(".") or type(error).__name__
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        is_tls = "SSL" in reason and "CERTIFICATE" not in reason
        hint = ("Does it speak HTTPS?" if is_tls else "Is the server running?") + _proxy_hint(url)
        code, message = UNREACHED, f"no answer from {url}: {reason}. {hint}"
    elif isinstance(error, TimeoutError | httpx2.TimeoutException):
        hint = "Increase `timeout`, or reduce `max_items` for fewer texts in a request."
        code, message = TIMEOUT, f"no answer from {url} within {seconds:g} seconds. {hint}"
    else:
        code, message = LOST, f"the connection to {url} broke: {reason}."
    failure = Unavailable(message, retry_after=0.0)
    failure.code = code
    return failure


def _proxy_hint(url: str) -> str:
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return ""
    return f" The request went through the proxy {redact_password(proxy)} of the environment. NO_PROXY excludes hosts."


def client_closed() -> Unavailable:
    return Unavailable("the client is closed.")


def redact_password(url: str) -> str:
    return re.sub(r"(?<=//)[^/@]*@", "", url)


def _default_message(url: str, status: int, headers: Mapping[str, str], content: bytes) -> str:
    message = f"{redact_password(url)} answered {status}"
    if 300 <= status < 400 and "location" in headers:
        return f"{message}: it moved to {headers['location'][:200]}. Use the base URL of that address."
    if text := " ".join(content[:200].decode(errors="replace").split()):
        message += f": {text}"
    if "retry-after" in headers:
        message += f" (Retry-After: {headers['retry-after'][:40]})"
    return message + (". Are the base URL and the dialect right?" if status == 404 else ".")


def _parse_error(content: bytes) -> tuple[str, str | None, str | None]:
    """Return (message, param, code) of an error body in any dialect."""
    try:
        body: Any = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return "", None, None
    outer = cast(dict[str, Any], body)
    error = outer.get("error")
    fields = cast(dict[str, Any], error) if isinstance(error, dict) else outer
    message: object = error if isinstance(error, str) else fields.get("message") or fields.get("detail")
    text = message if isinstance(message, str) else "" if message is None else msgspec.json.encode(message).decode()
    param, code = fields.get("param"), fields.get("code")
    if not isinstance(param, str):
        prefix = _PREFIX.match(text)
        param = prefix and prefix[1]
    return text, param, code if isinstance(code, str) else None


def _location(param: str) -> Location:
    """Parse a location such as input[3]. Any other text counts as the name of a field."""
    match = _LOCATION.fullmatch(param)
    return Location(match[1], int(match[2]) if match[2] else None, path=match[3]) if match else Location(param)


def _seconds(header: str | None, default: float) -> float:
    """Return the seconds of a Retry-After header, a number or a date. Anything else counts as the default."""
    if header is None:
        return default
    if header.replace(".", "", 1).isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
        return max((until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, OverflowError):
        return default
