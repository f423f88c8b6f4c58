"""Synchronous client. Threads of the call send a long list in parallel."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Lock, Semaphore, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Concatenate, Self

import httpx2

from whimbrel.client import base, client_verbs
from whimbrel.client.base import Advance, BaseClient, ServerHealth, Settings
from whimbrel.client.client_verbs import P, R, Verb
from whimbrel.client.endpoints import Endpoints, RetryPolicy
from whimbrel.client.error_mapping import client_closed, to_failure
from whimbrel.client.responses import flatten
from whimbrel.client.task import Answered, Part, Reply, Task
from whimbrel.errors import WhimbrelError
from whimbrel.types.options import copy_signature, warn_of_truncation


def _sync_method(verb: Verb[P, R]) -> Callable[Concatenate[Client, P], R]:
    def method(self: Client, *args: P.args, **options: P.kwargs) -> R:
        answered = self.run(verb, *args, **options)
        warn_of_truncation(answered.num_truncated, options)
        return answered.value

    return copy_signature(method, verb)


class Client(BaseClient):
    """Client of one or more servers of a model, with the verbs and options of Engine.

    Use it as a context manager, or call `close`. Threads may share it, and it may be used after a fork. Lists longer than
    `max_items` go in several requests, up to `max_in_flight` at a time. Verbs raise the errors of `whimbrel.errors`:
    InvalidRequest, TooLong and so on as the server reports them, and Unavailable if no server answers.
    """

    embed = _sync_method(client_verbs.embed)
    sparse = _sync_method(client_verbs.sparse)
    multi_vector = _sync_method(client_verbs.multi_vector)
    muvera = _sync_method(client_verbs.muvera)
    encode = _sync_method(client_verbs.encode)
    score = _sync_method(client_verbs.score)
    rerank = _sync_method(client_verbs.rerank)
    explain = _sync_method(client_verbs.explain)
    classify = _sync_method(client_verbs.classify)
    token_classify = _sync_method(client_verbs.token_classify)
    tokenize = _sync_method(client_verbs.tokenize)
    models = _sync_method(client_verbs.models)
    info = _sync_method(client_verbs.info)

    def health(self) -> list[ServerHealth]:
        """Return whether each server is ready, in the order of the base URLs. Tries once, and raises nothing for a server."""
        connections, found = self._open_connections(), list[ServerHealth]()
        for url in self._settings.urls:
            try:
                answer = connections.http.get(base.url_of_health(url), timeout=self._settings.connect_timeout)
            except httpx2.RequestError as error:
                answer = error
            found.append(base.health_of(url, answer))
        return found

    def close(self) -> None:
        """Send no more requests and close the connections. Requests in flight finish first.

        A verb with requests left to send raises Unavailable, also in other threads.
        """
        connections, self._connections = self._connections, None
        if connections is not None and not self._is_view and connections.pid == os.getpid():
            connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        self._connections: _Connections | None = _Connections(self._settings)

    def _open_connections(self) -> _Connections:
        connections = self._connections
        if connections is None:
            raise client_closed()
        if connections.pid != os.getpid():  # after a fork: connections and locks are those of the parent
            connections = self._connections = _Connections(self._settings)
        return connections

    def run(self, verb: Verb[P, R], *args: P.args, **options: P.kwargs) -> Answered[R]:
        """Return the result of a verb (`client_verbs.py`) with what the servers said beside it. Does not warn of cut texts."""
        connections = self._open_connections()
        task = verb(self._target, *args, **options)
        parts = self._send(connections, task)
        if task.needs_whole(parts):
            parts = self._send(connections, replace(task, whole=True))
        value, num_truncated = task.combine(parts)
        revisions = frozenset(part.revision for part in parts if part.revision)
        return Answered(value, num_truncated, sum(part.num_tokens for part in parts), revisions)

    def _send(self, connections: _Connections, task: Task[Any]) -> list[Part]:
        spans = list(task.spans(self._settings.max_items))
        with connections.keep_open() as end, base.progress_bar(self._settings.progress, len(task.items), len(spans)) as advance:
            fanout = _Fanout(task, connections, advance, end)
            return fanout.send_all(spans) if len(spans) > 1 else flatten([fanout.send(*span) for span in spans])


class _Connections:
    """Connections of one process to the servers. The last call closes them if the client is closed before it."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.endpoints = Endpoints(settings.urls)
        self.http = settings.make_http(httpx2.Client)
        self.slots = Semaphore(settings.max_in_flight)
        """Limit on the requests in flight of long lists. Single requests are not counted."""
        self._lock = Lock()
        self._is_closed = False
        self._calls: set[Event] = set()

    @contextmanager
    def keep_open(self) -> Generator[Event]:
        """Keep the connections open. The event is set when the block ends or the client is closed. Raises Unavailable."""
        end = Event()
        with self._lock:
            if self._is_closed:
                raise client_closed()
            self._calls.add(end)
        try:
            yield end
        finally:
            end.set()
            with self._lock:
                self._calls.discard(end)
                is_last = self._is_closed and not self._calls
            if is_last:
                self.http.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            calls = tuple(self._calls)
        for end in calls:
            end.set()
        if not calls:
            self.http.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Fanout:
    task: Task[Any]
    connections: _Connections
    advance: Advance
    end: Event

    def send_all(self, spans: Sequence[tuple[int, int]]) -> list[Part]:
        """Send several requests at a time and return the parts. After an error no more requests begin."""
        futures: list[Future[list[Part]]] = [Future() for _ in spans]
        queue = deque(zip(futures, spans, strict=True))
        for _ in range(min(self.connections.settings.max_in_flight, len(spans))):
            Thread(target=self._work, args=(queue,), name="whimbrel-client", daemon=True).start()
        # the threads are daemons, and an interrupt does not wait for them: a response may be minutes away
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done and (error := future.exception()):
                raise error
        return flatten([future.result() for future in futures])

    def _work(self, queue: deque[tuple[Future[list[Part]], tuple[int, int]]]) -> None:
        while True:
            try:
                future, span = queue.popleft()
            except IndexError:
                return
            try:
                with self.connections.keep_open(), self.connections.slots:
                    future.set_result(self.send(*span))
            except BaseException as error:
                future.set_exception(error)

    def send(self, start: int, stop: int) -> list[Part]:
        """Send the items from `start` to `stop` and return their parts: several if the server took only halves."""
        try:
            reply = self._post_with_retries(self.task.write(self.task.items[start:stop]))
        except WhimbrelError as error:
            return flatten([self.send(*half) for half in self.task.split(error, start, stop)])
        part = self.task.part(reply, stop - start)
        self.advance(stop - start)
        return [part]

    def _post_with_retries(self, body: bytes) -> Reply:
        retries = RetryPolicy(self.connections.endpoints, self.connections.settings.max_retries)
        while not self.end.is_set():
            with self.connections.endpoints.acquire() as url:
                reply = self._post(url, body, retries.headers(self.connections.settings.timeout))
            if isinstance(reply, Reply):
                return reply
            self.end.wait(retries.next_delay(url, reply))
        raise client_closed()

    def _post(self, url: str, body: bytes, headers: dict[str, str]) -> Reply | WhimbrelError:
        seconds = self.connections.settings.timeout
        deadline = monotonic() + seconds
        headers, chunks = {"content-type": self.task.media_type} | headers, list[bytes]()
        try:
            place, method = base.join_url(url, self.task.path), self.task.method
            with self.connections.http.stream(method, place, content=body or None, headers=headers) as response:
                for chunk in response.iter_bytes():  # httpx2 limits the time of each chunk only
                    chunks.append(chunk)
                    if monotonic() > deadline:
                        raise TimeoutError
        except (httpx2.RequestError, TimeoutError) as error:
            return to_failure(url, error, seconds)
        reply = Reply(b"".join(chunks), response.headers)
        return base.read_reply(self.connections.endpoints, url, response.status_code, reply)
