"""Settings of a client, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import httpx2

from whimbrel.errors import InvalidRequest, SetupError

H = TypeVar("H")

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_CONNECT_SECONDS: Final = 5.0
_MAX_SECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a client. Times are in seconds. Raises InvalidRequest."""

    urls: tuple[str, ...]
    api_key: str | None
    timeout: float
    max_retries: int
    max_in_flight: int
    max_items: int
    progress: bool | None

    def __post_init__(self) -> None:
        if not 0 < _number(self.timeout) <= _MAX_SECONDS:
            message = f"must be a number of seconds above 0, at most {_MAX_SECONDS:,}, is {self.timeout!r}."
            raise InvalidRequest(message, param="timeout")
        for name, least in (("max_retries", 0), ("max_in_flight", 1), ("max_items", 1)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidRequest(f"must be a whole number of at least {least}, is {value!r}.", param=name)
        key = cast(object, self.api_key)
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise InvalidRequest(
                "must be a string of printable ASCII characters, as an HTTP header takes them.", param="api_key"
            )

    def make_http(self, make: Callable[..., H]) -> H:
        """Return a new httpx2 client of the class `make`. Raises SetupError."""
        try:
            return make(
                headers={"authorization": f"Bearer {self.api_key}"} if self.api_key else {},
                timeout=httpx2.Timeout(self.timeout, connect=min(self.timeout, _CONNECT_SECONDS)),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self.max_in_flight),
                # reading all certificates takes 36 ms, and only HTTPS needs them
                verify=any(httpx2.URL(url).scheme == "https" for url in self.urls),
            )
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:  # caused by environment variables
            names = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            raise SetupError(f"cannot make an HTTP client: {error}. Check the environment variables {names}.") from error


def parse_urls(base_url: str | Sequence[str]) -> tuple[str, ...]:
    """Return the base URLs without duplicates. Raises InvalidRequest."""
    urls = cast(object, (base_url,) if isinstance(base_url, str) else base_url)
    if not isinstance(urls, tuple | list) or not urls:
        raise InvalidRequest(f"must be a URL or a list of URLs, is {urls!r}.", param="base_url")
    return tuple(dict.fromkeys(map(_parse_url, cast("Sequence[object]", urls))))


def _parse_url(value: object) -> str:
    try:
        url = httpx2.URL(value) if isinstance(value, str) else None
        host = url.host.encode("idna") if url else b""
    except (httpx2.InvalidURL, UnicodeError):
        url, host = None, b""
    is_plain = url is not None and url.scheme in ("http", "https") and not url.query and not url.fragment
    if not isinstance(value, str) or url is None or not is_plain or not host or not 0 < (url.port or 80) < 2**16:
        raise InvalidRequest(f"is {value!r}; it takes a URL such as {DEFAULT_URL}.", param="base_url")
    return value.rstrip("/")


def join_url(url: str, path: str) -> str:
    """Return the URL of a path. A version that ends the base URL and begins the path, as OpenAI's /v1, appears once."""
    version = path[:3]
    return url + (path[3:] if version in ("/v1", "/v2") and url.endswith(version) else path)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
