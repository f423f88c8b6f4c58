"""What a client is told, and the bar that shows how far it is."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

import httpx2

from whimbrel.client.task import Reply
from whimbrel.errors import InvalidRequest

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a client talks to its servers."""

    urls: tuple[str, ...]
    model: str | None
    headers: dict[str, str]
    timeout: httpx2.Timeout
    max_retries: int
    max_in_flight: int
    max_items: int
    progress: bool | None

    @property
    def is_secure(self) -> bool:
        """Whether any server is asked by HTTPS; if none is, the 36 ms of reading all certificates are spared."""
        return any(urlsplit(url).scheme != "http" for url in self.urls)

    @classmethod
    def of(
        cls,
        base_url: str | Sequence[str],
        *,
        api_key: str | None,
        model: str | None,
        timeout: float,
        max_retries: int,
        max_in_flight: int,
        max_items: int,
        progress: bool | None,
    ) -> Settings:
        """Checked. Raises InvalidRequest."""
        urls = (base_url,) if isinstance(base_url, str) else tuple(base_url)
        if not urls:
            raise InvalidRequest("is empty; give at least one URL.", param="base_url")
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
                raise InvalidRequest(f"is {url!r}; it takes a URL as {DEFAULT_URL}.", param="base_url")
        numbers: dict[str, tuple[object, int]] = {
            "timeout": (timeout, 0),
            "max_retries": (max_retries, 0),
            "max_in_flight": (max_in_flight, 1),
            "max_items": (max_items, 1),
        }
        for name, (value, least) in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise InvalidRequest(f"must be a number of at least {least}, is {value!r}.", param=name)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        return cls(urls, model, headers, limits, max_retries, max_in_flight, max_items, progress)


class Advance(Protocol):
    """Told of inputs that are done."""

    def __call__(self, count: int, /) -> None: ...


@contextmanager
def progress_bar(show: bool | None, total: int, num_parts: int) -> Generator[Advance]:
    """On stderr; if nothing is said, where that is a terminal and there are several requests."""
    if not (show or (show is None and num_parts > 1 and sys.stderr.isatty())):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(BarColumn(), MofNCompleteColumn(), "texts", TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def halves(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of a part that was too large for the server."""
    middle = (start + stop) // 2
    yield start, middle
    yield middle, stop


def reply_of(response: httpx2.Response) -> Reply:
    """Of a success."""
    return Reply(response.content, response.headers)
