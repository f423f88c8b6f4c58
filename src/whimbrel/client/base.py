"""Base of Client and AsyncClient: options with their checks, progress bar and reading of HTTP responses."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias, TypeVar, cast

import httpx2

from whimbrel.client.client_verbs import DialectName, Target
from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import to_error
from whimbrel.client.task import Reply
from whimbrel.errors import InvalidRequest, SetupError, WhimbrelError

H = TypeVar("H")
Advance: TypeAlias = Callable[[int], None]
"""Callback for the number of inputs that are done. Any thread may call it."""

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_CONNECT_SECONDS: Final = 5.0
_MAX_SECONDS: Final = 1_000_000


class BaseClient:
    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        dialect: DialectName = "whimbrel",
        timeout: float = 600.0,
        max_retries: int = 5,
        max_in_flight: int = 8,
        max_items: int = 512,
        progress: bool | None = None,
    ) -> None:
        """Check the options. No request is sent yet. Raises InvalidRequest.

        `base_url`: URL of the server, or a list of URLs of servers of the same model. A request goes to the least busy server,
            and to another if that one fails.
        `api_key`: key that is sent as a bearer token. Default: none.
        `model`: name of the model, needed if the server has several. Default: the server's model.
        `dialect`: API that the server speaks: "whimbrel" (default), "openai", "tei" or "cohere".
        `timeout`: seconds for each try of a request. Default: 600.
        `max_retries`: retries after 408, 429, most 5xx and dropped connections. Default: 5. After a timeout, or if the server
            never answered, there are at most 2.
        `max_in_flight`: maximum requests of a long list at a time. Default: 8.
        `max_items`: maximum texts in one request. Default: 512.
        `progress`: whether to show a progress bar on stderr. Default: if stderr is a terminal and there are several requests.
        """
        urls = parse_urls(base_url)
        self._settings = Settings(urls, api_key, timeout, max_retries, max_in_flight, max_items, progress)
        self._target = Target(dialect, model)
        self._is_view = False
        self._open()

    def for_model(self, model: str) -> Self:
        """Return this client for another model of the same servers. It shares the connections, which this client closes."""
        view = copy(self)
        view._target, view._is_view = replace(self._target, model=model), True
        return view

    def _open(self) -> None:
        """Prepare the connections."""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """State of one server."""

    url: str
    ready: bool
    """True if it answers requests now."""
    status: str
    """"ok", or the reason why it is not ready."""


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

    @property
    def connect_timeout(self) -> float:
        return min(self.timeout, _CONNECT_SECONDS)

    def __post_init__(self) -> None:
        timeout = cast(object, self.timeout)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_SECONDS:
            message = f"must be a number of seconds above 0, at most {_MAX_SECONDS:,}, is {timeout!r}."
            raise InvalidRequest(message, param="timeout")
        for name, least in (("max_retries", 0), ("max_in_flight", 1), ("max_items", 1)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidRequest(f"must be a whole number of at least {least}, is {value!r}.", param=name)
        key = cast(object, self.api_key)
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            message = "must be a string of printable ASCII characters, as an HTTP header takes them."
            raise InvalidRequest(message, param="api_key")

    def make_http(self, make: Callable[..., H]) -> H:
        """Return a new httpx2 client of the class `make`. Raises SetupError."""
        try:
            return make(
                headers={"authorization": f"Bearer {self.api_key}"} if self.api_key else {},
                timeout=httpx2.Timeout(self.timeout, connect=self.connect_timeout),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self.max_in_flight),
                # reading all certificates takes 36 ms, and only HTTPS needs them
                verify=any(httpx2.URL(url).scheme == "https" for url in self.urls),
            )
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:  # caused by environment variables
            names = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            raise SetupError(f"cannot make an HTTP client: {error}. Check the environment variables {names}.") from error


def parse_urls(base_url: object) -> tuple[str, ...]:
    urls = (base_url,) if isinstance(base_url, str) else base_url
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


def read_reply(endpoints: Endpoints, url: str, status: int, reply: Reply) -> Reply | WhimbrelError:
    """Return the response of the server at `url` as a reply or an error. A reply marks the server as up."""
    if status != 200:
        return to_error(url, status, reply.headers, reply.content)
    endpoints.mark_up(url)
    return reply


def url_of_health(url: str) -> str:
    return url.removesuffix("/v1").removesuffix("/v2") + "/health"


def health_of(url: str, answer: httpx2.Response | httpx2.RequestError) -> ServerHealth:
    """Return what a server says of itself. Other servers answer with the status alone."""
    if isinstance(answer, httpx2.RequestError):
        return ServerHealth(url, ready=False, status=f"not reached: {str(answer) or type(answer).__name__}")
    if answer.status_code == 200:
        return ServerHealth(url, ready=True, status="ok")
    return ServerHealth(url, ready=False, status=to_error(url, answer.status_code, {}, answer.content).message)


@contextmanager
def progress_bar(show: bool | None, total: int, num_requests: int) -> Generator[Advance]:
    """Show a bar on stderr. If `show` is None, only on a terminal and for several requests."""
    if sys.stderr is None or not (show or (show is None and num_requests > 1 and sys.stderr.isatty())):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(BarColumn(), MofNCompleteColumn(), "texts", TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
