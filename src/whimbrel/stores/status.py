"""Statuses of HTTP that stores answer, as errors."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from whimbrel.errors import InvalidRequest, SetupError, TooLarge, Unavailable

PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
_OF_ROWS: Final = (400, 413, 422)


def raise_for_status(status: int, reason: str, headers: Mapping[str, Any] | None = None) -> NoReturn:
    """Raise Unavailable, InvalidRequest or SetupError for a status that is no success."""
    if status in PASSING:
        raise Unavailable(reason, retry_after=_seconds((headers or {}).get("retry-after"))) from None
    if status in (401, 403):
        hint = "the password is that of the URL, of --password-file, or of WHIMBREL_STORE_PASSWORD"
        raise SetupError(f"the store refused user or password ({status}): {reason}", hint=hint) from None
    if status == 413:
        raise TooLarge(reason) from None
    if status in _OF_ROWS:
        raise InvalidRequest(reason) from None
    raise SetupError(f"{reason} (status {status})") from None


def _seconds(value: Any) -> float:
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return 0.0
