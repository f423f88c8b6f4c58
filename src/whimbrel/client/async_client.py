"""Client for asyncio. Tasks of the call send a long list in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Concatenate, Self

import httpx2

from whimbrel.client import base, client_verbs
from whimbrel.client.base import Advance, BaseClient, ServerHealth, Settings
from whimbrel.client.client_verbs import P, R, Verb
from whimbrel.client.endpoints import Endpoints, RetryPolicy
from whimbrel.client.error_mapping import client_closed, to_failure
from whimbrel.client.responses import flatten
from whimbrel.client.task import Part, Reply, Task
from whimbrel.errors import WhimbrelError
from whimbrel.types.options import copy_signature, warn_of_truncation


def _async_method(verb: Verb[P, R]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    async def method(self: AsyncClient, *args: P.args, **options: P.kwargs) -> R:
        result, num_truncated = await self._run(verb, *args, **options)  # pyright: ignore[reportPrivateUsage]
        warn_of_truncation(num_truncated, options)
        return result

    return copy_signature(method, verb)


class AsyncClient(BaseClient):
    """Client for asyncio. Its verbs are coroutines with the options, results and errors of Client.

    Use it as an async context manager, or await `close`. Each event loop that uses it has its own connections.
    """

    embed = _async_method(client_verbs.embed)
    sparse = _async_method(client_verbs.sparse)
    multi_vector = _async_method(client_verbs.multi_vector)
    muvera = _async_method(client_verbs.muvera)
    encode = _async_method(client_verbs.encode)
    score = _async_method(client_verbs.score)
    rerank = _async_method(client_verbs.rerank)
    explain = _async_method(client_verbs.explain)
    classify = _async_method(client_verbs.classify)
    token_classify = _async_method(client_verbs.token_classify)
    tokenize = _async_method(client_verbs.tokenize)
    models = _async_method(client_verbs.models)
    info = _async_method(client_verbs.info)

    async def health(self) -> list[ServerHealth]:
        """Return whether each server is ready, in the order of the base URLs. Tries once, and raises nothing for a server."""
        http, seconds = self._loop_connections().http, self._settings.connect_timeout

        async def ask(url: str) -> ServerHealth:
            try:
                return base.health_of(url, await http.get(base.url_of_health(url), timeout=seconds))
            except httpx2.RequestError as error:
                return base.health_of(url, error)

        return list(await asyncio.gather(*map(ask, self._settings.urls)))

    async def close(self) -> None:
        """Send no more requests and close the connections of this event loop."""
        loops, self._connections = self._connections, None
        if loops is not None and not self._is_view and (connections := loops.get(asyncio.get_running_loop())) is not None:
            await connections.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def _open(self) -> None:
        self._connections: dict[asyncio.AbstractEventLoop, _Connections] | None = {}

    def _loop_connections(self) -> _Connections:
        if self._connections is None:
            raise client_closed()
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            others = {each: connections for each, connections in self._connections.items() if not each.is_closed()}
            self._connections = others | {loop: _Connections(self._settings)}
        return self._connections[loop]

    async def _run(self, verb: Verb[P, R], *args: P.args, **options: P.kwargs) -> tuple[R, int]:
        """Return the result of a verb, and how many texts the servers cut."""
        connections = self._loop_connections()
        task = verb(self._target, *args, **options)
        parts = await self._send(connections, task)
        if task.needs_whole(parts):
            parts = await self._send(connections, replace(task, whole=True))
        return task.combine(parts)

    async def _send(self, connections: _Connections, task: Task[Any]) -> list[Part]:
        spans = list(task.spans(self._settings.max_items))
        with base.progress_bar(self._settings.progress, len(task.items), len(spans)) as advance:
            fanout = _Fanout(task, connections, advance)
            return await fanout.send_all(spans) if len(spans) > 1 else flatten([await fanout.send(*span) for span in spans])


class _Connections:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.endpoints = Endpoints(settings.urls)
        self.http = settings.make_http(httpx2.AsyncClient)
        self.slots = asyncio.Semaphore(settings.max_in_flight)


@dataclass(frozen=True, slots=True, eq=False)
class _Fanout:
    task: Task[Any]
    connections: _Connections
    advance: Advance

    async def send_all(self, spans: Sequence[tuple[int, int]]) -> list[Part]:
        """Send several requests at a time and return the parts. An error or a cancellation cancels the others."""
        sends = [asyncio.ensure_future(self.send(*span)) for span in spans]
        try:
            return flatten(await asyncio.gather(*sends))
        finally:
            for each in sends:
                each.cancel()
            await asyncio.wait(sends)

    async def send(self, start: int, stop: int) -> list[Part]:
        """Send the items from `start` to `stop` and return their parts: several if the server took only halves."""
        try:
            async with self.connections.slots:
                reply = await self._post_with_retries(self.task.write(self.task.items[start:stop]))
        except WhimbrelError as error:
            return flatten([await self.send(*half) for half in self.task.split(error, start, stop)])
        part = self.task.part(reply, stop - start)
        self.advance(stop - start)
        return [part]

    async def _post_with_retries(self, body: bytes) -> Reply:
        retries = RetryPolicy(self.connections.endpoints, self.connections.settings.max_retries)
        while not self.connections.http.is_closed:
            with self.connections.endpoints.acquire() as url:
                reply = await self._post(url, body, retries.headers(self.connections.settings.timeout))
            if isinstance(reply, Reply):
                return reply
            await asyncio.sleep(retries.next_delay(url, reply))
        raise client_closed()

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> Reply | WhimbrelError:
        seconds = self.connections.settings.timeout
        headers = {"content-type": self.task.media_type} | headers
        try:
            async with asyncio.timeout(seconds):
                place, method = base.join_url(url, self.task.path), self.task.method
                response = await self.connections.http.request(method, place, content=body or None, headers=headers)
        except (httpx2.RequestError, TimeoutError) as error:
            return to_failure(url, error, seconds)
        reply = Reply(response.content, response.headers)
        return base.read_reply(self.connections.endpoints, url, response.status_code, reply)
