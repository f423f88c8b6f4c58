"""What Client and AsyncClient have in common: how they are made, and what an answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whimbrel.client.dialect import DialectName, encode_of
from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import to_error
from whimbrel.client.settings import DEFAULT_URL, Settings, checked_urls
from whimbrel.client.task import Reply
from whimbrel.client.verbs import Target
from whimbrel.errors import WhimbrelError


class BaseClient:
    """A client that cannot ask yet."""

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
        """`base_url`: or several, of servers of the same model, of which the least busy is asked, and another if one fails.
        `dialect`: what the server speaks. `timeout`: in seconds, of each try. `max_retries`: after 429, 503, broken connections
        and the like; after a timeout, or where no server was ever reached, there are at most two. `max_in_flight`: requests of
        long lists at a time. `max_items`: texts of a request. `progress`: a bar for lists of several requests; None: where
        stderr is a terminal. Raises InvalidRequest."""
        urls = checked_urls(base_url)
        self._settings = Settings(urls, api_key, timeout, max_retries, max_in_flight, max_items, progress)
        encode_of(dialect)
        self._target = Target(dialect, model)
        self._start()

    def _start(self) -> None:
        """Make ready to ask."""


def outcome(servers: Endpoints, url: str, status: int, headers: Mapping[str, str], content: bytes) -> Reply | WhimbrelError:
    """What an answer of the server at `url` is."""
    if status != 200:
        return to_error(url, status, headers, content)
    servers.answered(url)
    return Reply(content, headers)
