"""Common base of Client and AsyncClient: constructor, progress bar and reading of HTTP responses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from whimbrel.client.dialects import DialectName, encoder_of
from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import to_error
from whimbrel.client.settings import DEFAULT_URL, Settings, parse_urls
from whimbrel.client.task import Reply
from whimbrel.client.verbs import Target
from whimbrel.errors import WhimbrelError

Advance: TypeAlias = Callable[[int], None]
"""Callback for the number of inputs that are done. Any thread may call it."""


class BaseClient:
    """Client without verbs."""

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
        encoder_of(dialect)
        self._target = Target(dialect, model)
        self._open()

    def _open(self) -> None:
        """Prepare the connections."""


def read_reply(
    endpoints: Endpoints, url: str, status: int, headers: Mapping[str, str], content: bytes
) -> Reply | WhimbrelError:
    """Return the response of the server at `url` as a reply or an error. A reply marks the server as up."""
    if status != 200:
        return to_error(url, status, headers, content)
    endpoints.mark_up(url)
    return Reply(content, headers)


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
