"""AsyncClient: the engine's verbs over HTTP, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2

from whimbrel.client import verbs
from whimbrel.client.base import BaseClient, outcome
from whimbrel.client.endpoints import Endpoints
from whimbrel.client.error_mapping import closed, to_failure
from whimbrel.client.progress import Advance, progress_bar
from whimbrel.client.responses import flatten
from whimbrel.client.retries import RetryPolicy
from whimbrel.client.settings import Settings, address
from whimbrel.client.task import Reply, Task
from whimbrel.client.verbs import Target
from whimbrel.errors import WhimbrelError

P = ParamSpec("P")
R = TypeVar("R")


def _async_method(
    verb: Callable[Concatenate[Target, P], Task[R]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """The method that asks what a verb asks; its answer is awaited."""

    async def method(self: AsyncClient, *args: P.args, **options: P.kwargs) -> R:
        return await self._run(verb, *args, **options)  # pyright: ignore[reportPrivateUsage]

    verbs.copy_signature(method, verb)
    return method


class AsyncClient(BaseClient):
    """Client for asyncio: the same verbs, awaited. Use it as an async context manager, or await `close`.

    Each event loop that uses it has connections of its own.
    """

    embed = _async_method(verbs.embed)
    sparse = _async_method(verbs.sparse)
    multi_vector = _async_method(verbs.multi_vector)
    muvera = _async_method(verbs.muvera)
    encode = _async_method(verbs.encode)
    score = _async_method(verbs.score)
    rerank = _async_method(verbs.rerank)
    explain = _async_method(verbs.explain)
    classify = _async_method(verbs.classify)
    token_classify = _async_method(verbs.token_classify)

    async def close(self) -> None:
        """Ask nothing more, and close this loop's connections."""
        lines, self._lines = self._lines, None
        if lines is not None and (line := lines.get(asyncio.get_running_loop())) is not None:
            await line.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def _start(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Connections] | None = {}

    def _line(self) -> _Connections:
        """This event loop's. Raises Unavailable."""
        if self._lines is None:
            raise closed()
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            others = {each: line for each, line in self._lines.items() if not each.is_closed()}
            self._lines = others | {loop: _Connections.of(self._settings)}
        return self._lines[loop]

    async def _run(self, verb: Callable[Concatenate[Target, P], Task[R]], *args: P.args, **options: P.kwargs) -> R:
        line = self._line()
        task = verb(self._target, *args, **options)
        spans = list(task.spans(self._settings.max_items))
        with progress_bar(self._settings.progress, len(task.items), len(spans)) as advance:
            run = _Fanout(task, line, advance)
            parts = await run.ask_all(spans) if len(spans) > 1 else flatten([await run.ask(*span) for span in spans])
        return task.combine(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Connections:
    """An event loop's connections to the servers."""

    settings: Settings
    servers: Endpoints
    http: httpx2.AsyncClient
    room: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings) -> _Connections:
        http = settings.connections(httpx2.AsyncClient)
        return cls(settings, Endpoints(settings.urls), http, asyncio.Semaphore(settings.max_in_flight))


@dataclass(frozen=True, slots=True, eq=False)
class _Fanout:
    """A task on its way."""

    task: Task[Any]
    line: _Connections
    advance: Advance

    async def ask_all(self, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """Several at a time. After an error, or if it is cancelled, nothing is left behind."""
        asking = [asyncio.ensure_future(self.ask(*span)) for span in spans]
        try:
            return flatten(await asyncio.gather(*asking))
        finally:
            for each in asking:
                each.cancel()
            await asyncio.wait(asking)

    async def ask(self, start: int, stop: int) -> list[Any]:
        """The answer for some of the items, in parts."""
        try:
            async with self.line.room:
                reply = await self._send(self.task.write(self.task.items[start:stop]))
        except WhimbrelError as error:
            return flatten([await self.ask(*half) for half in self.task.split(error, start, stop)])
        part = self.task.part(reply, stop - start)
        self.advance(stop - start)
        return [part]

    async def _send(self, body: bytes) -> Reply:
        """Ask one server or another until there is an answer."""
        tries = RetryPolicy(self.line.servers, self.line.settings.max_retries)
        while not self.line.http.is_closed:
            with self.line.servers.acquire() as url:
                found = await self._try(url, body)
            if isinstance(found, Reply):
                return found
            await asyncio.sleep(tries.next_delay(url, found))
        raise closed()

    async def _try(self, url: str, body: bytes) -> Reply | WhimbrelError:
        seconds = self.line.settings.timeout
        headers = {"content-type": self.task.media_type}
        try:
            async with asyncio.timeout(seconds):
                response = await self.line.http.post(address(url, self.task.path), content=body, headers=headers)
        except (httpx2.RequestError, TimeoutError) as error:
            return to_failure(url, error, seconds)
        return outcome(self.line.servers, url, response.status_code, response.headers, response.content)
