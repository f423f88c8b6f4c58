"""Polls of a server: its health, its page of metrics, and its version."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

import httpx2
import msgspec

from whimbrel.client.error_mapping import redact_password, to_error, to_failure
from whimbrel_bench.backends import check_headers
from whimbrel_bench.top.page import Page, Samples, has_restarted, rates_between, read_page, summed, together
from whimbrel_bench.top.table import Figures, ServerFigures, State, make_figures

TIMEOUT: Final = 5.0
"""Seconds for each answer of a server."""
_MAX_BYTES: Final = 16 * 2**20
"""Largest answer that is read: 100 times the page of a large server."""


class Watch:
    """One server, and what the last poll found."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self.figures = ServerFigures(redact_password(url), "loading", "no answer yet.")
        self.page: Page | None = None
        """The latest page; None after a poll that found none."""
        self.rates: Samples | None = None
        """Rates between the latest two pages; None until there are two."""
        self._url = url
        self._http = http

    async def poll(self) -> None:
        """Ask the server once. A failure is a state."""
        before, old = self.page, self.figures
        try:
            health = await self._get("/health/ready")
            self.page = await self._read_page()
        except _Refusal as refusal:
            self._fail("refused", str(refusal))
            return
        except httpx2.HTTPError as error:
            self._fail("unreachable", _failure(self._url, error))
            return
        models = sorted(filter(None, summed(self.page.samples, "whimbrel_engines_up", "model")))
        found = ServerFigures(old.url, "up", version=old.version, models=models or old.models)
        if health.status_code != 200:
            found.state = "loading"
            found.reason = to_error(self._url, health.status_code, health.headers, health.content).message
        if before is None or not old.version or not found.models or has_restarted(before, self.page):
            found.version, found.models = await self._about(found.models)
        self.rates = rates_between(before, self.page) if before is not None else None
        found.seconds = self.page.received - before.received if before is not None else None
        found.figures = make_figures(self.page.samples, self.rates)
        self.figures = found

    def _fail(self, state: State, reason: str) -> None:
        self.page = self.rates = None
        self.figures = ServerFigures(self.figures.url, state, reason, self.figures.version, self.figures.models)

    async def _read_page(self) -> Page:
        reply = await self._get("/metrics", accept="text/plain")
        received = monotonic()
        if reply.status_code == 401:
            raise _Refusal("401: the API key is missing or wrong. Pass it with --api-key or WHIMBREL_API_KEY.")
        if reply.status_code != 200:
            error = to_error(self._url, reply.status_code, reply.headers, reply.content)
            raise _Refusal(f"{reply.status_code}: {error.message}")
        try:
            return read_page(reply.content.decode(), received=received)
        except ValueError as error:
            kind = reply.headers.get("content-type", "no content type").partition(";")[0]
            reason = f"/metrics answers with {kind}, {error}" if kind == "text/plain" else f"/metrics answers with {kind}"
            raise _Refusal(f"{reason}. Is this the URL of a Whimbrel server?") from None

    async def _about(self, known: list[str]) -> tuple[str, list[str]]:
        """Return the version of the server and the names of its models. Without the right to ask, the version is empty."""
        try:
            about = msgspec.json.decode((await self._get("/info")).content)
            served = [str(each["plan"]["served_name"]) for each in about["models"]]
            return str(about["version"]), served or known
        except (_Refusal, httpx2.HTTPError, ValueError, LookupError, TypeError):
            return "", known

    async def _get(self, path: str, **headers: str) -> _Reply:
        async with self._http.stream("GET", self._url + path, headers=headers) as response:
            content = b""
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise _Refusal(f"{path} answers with more than {_MAX_BYTES // 2**20} MiB.")
            return _Reply(response.status_code, response.headers, content)


class _Reply(msgspec.Struct, frozen=True):
    status_code: int
    headers: Any
    content: bytes


class _Refusal(Exception):
    """The server answers, but not with its metrics."""


def total(watches: Sequence[Watch]) -> Figures:
    """Return the figures of all servers that answer, together."""
    rates = [watch.rates for watch in watches if watch.rates is not None]
    pages = [watch.page.samples for watch in watches if watch.page is not None]
    return make_figures(together(pages), together(rates) if rates else None)


def _failure(url: str, error: httpx2.HTTPError) -> str:
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return f"no answer within {TIMEOUT:g} seconds."
    return to_failure(url, error, TIMEOUT).message


def open_http(urls: Sequence[str], api_key: str | None, *, verify: bool) -> httpx2.AsyncClient:
    """Return the HTTP client of all polls. Raises SetupError for a key that no header can carry."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    check_headers(headers)
    is_tls = any(url.startswith("https:") for url in urls)  # reading all certificates takes 36 ms
    return httpx2.AsyncClient(headers=headers, timeout=TIMEOUT, verify=verify and is_tls)
