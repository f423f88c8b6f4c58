"""Client: the engine's verbs over HTTP."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Semaphore, Thread
from time import monotonic
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


def _sync_method(verb: Callable[Concatenate[Target, P], Task[R]]) -> Callable[Concatenate[Client, P], R]:
    """The method that asks what a verb asks, and returns the answer."""

    def method(self: Client, *args: P.args, **options: P.kwargs) -> R:
        return self._run(verb, *args, **options)  # pyright: ignore[reportPrivateUsage]

    verbs.copy_signature(method, verb)
    return method


class Client(BaseClient):
    """A server's model. Use it as a context manager, or call `close`; safe to share between threads, and usable after a fork.

    The verbs and their options are those of Engine. Long lists go in several requests at a time. Raises the errors of
    whimbrel.errors as the server means them; Unavailable if it cannot be reached.
    """

    embed = _sync_method(verbs.embed)
    sparse = _sync_method(verbs.sparse)
    multi_vector = _sync_method(verbs.multi_vector)
    muvera = _sync_method(verbs.muvera)
    encode = _sync_method(verbs.encode)
    score = _sync_method(verbs.score)
    rerank = _sync_method(verbs.rerank)
    explain = _sync_method(verbs.explain)
    classify = _sync_method(verbs.classify)
    token_classify = _sync_method(verbs.token_classify)

    def close(self) -> None:
        """Ask nothing more, and close the connections; those that wait for an answer as soon as it is there."""
        line, self._line = self._line, None
        if line is not None and line.pid == os.getpid():
            line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._line: _Connections | None = _Connections(self._settings)

    def _run(self, verb: Callable[Concatenate[Target, P], Task[R]], *args: P.args, **options: P.kwargs) -> R:
        line = self._line
        if line is None:
            raise closed()
        if line.pid != os.getpid():  # after a fork: connections and locks are those of the parent
            line = self._line = _Connections(self._settings)
        task = verb(self._target, *args, **options)
        spans = list(task.spans(self._settings.max_items))
        with (
            line.under_way() as ended,
            progress_bar(self._settings.progress, len(task.items), len(spans)) as advance,
        ):
            run = _Fanout(task, line, advance, ended)
            parts = run.ask_all(spans) if len(spans) > 1 else flatten([run.ask(*span) for span in spans])
        return task.combine(parts)


class _Connections:
    """A process's connections to the servers. They are closed when nobody has them: neither the client nor a request."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.settings = settings
        self.servers = Endpoints(settings.urls)
        self.http = settings.connections(httpx2.Client)
        self.room = Semaphore(settings.max_in_flight)
        """For parts of long lists; other requests have a thread of their caller's."""
        self._lock = Lock()
        self._holders = 1
        self._runs: set[Event] = set()

    @contextmanager
    def held(self) -> Generator[None]:
        """While a request is under way. Raises Unavailable."""
        with self._lock:
            if not self._holders:
                raise closed()
            self._holders += 1
        try:
            yield
        finally:
            self._let_go()

    @contextmanager
    def under_way(self) -> Generator[Event]:
        """While a verb is; what is given says that it has ended, or that the client is closed. Raises Unavailable."""
        ended = Event()
        with self.held():
            self._runs.add(ended)
            try:
                yield ended
            finally:
                self._runs.discard(ended)
                ended.set()

    def close(self) -> None:
        """The client has it no more."""
        for ended in tuple(self._runs):
            ended.set()
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            is_last = not self._holders
        if is_last:
            self.http.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Fanout:
    """A task on its way."""

    task: Task[Any]
    line: _Connections
    advance: Advance
    ended: Event

    def ask_all(self, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """Several at a time; after an error no more begin.

        The threads are daemons, and nobody waits for them after an interrupt: an answer may be minutes away.
        """
        futures: list[Future[list[Any]]] = [Future() for _ in spans]
        waiting = deque(zip(futures, spans, strict=True))
        for _ in range(min(self.line.settings.max_in_flight, len(spans))):
            Thread(target=self._work, args=(waiting,), name="whimbrel-client", daemon=True).start()
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done and (error := future.exception()):
                raise error
        return flatten([future.result() for future in futures])

    def _work(self, waiting: deque[tuple[Future[list[Any]], tuple[int, int]]]) -> None:
        while True:
            try:
                future, span = waiting.popleft()
            except IndexError:
                return
            try:
                with self.line.held(), self.line.room:
                    future.set_result(self.ask(*span))
            except BaseException as error:
                future.set_exception(error)

    def ask(self, start: int, stop: int) -> list[Any]:
        """The answer for some of the items, in parts."""
        try:
            reply = self._send(self.task.write(self.task.items[start:stop]))
        except WhimbrelError as error:
            return flatten([self.ask(*half) for half in self.task.split(error, start, stop)])
        part = self.task.part(reply, stop - start)
        self.advance(stop - start)
        return [part]

    def _send(self, body: bytes) -> Reply:
        """Ask one server or another until there is an answer."""
        tries = RetryPolicy(self.line.servers, self.line.settings.max_retries)
        while not self.ended.is_set():
            with self.line.servers.acquire() as url:
                found = self._try(url, body)
            if isinstance(found, Reply):
                return found
            self.ended.wait(tries.next_delay(url, found))
        raise closed()

    def _try(self, url: str, body: bytes) -> Reply | WhimbrelError:
        seconds = self.line.settings.timeout
        until = monotonic() + seconds
        headers, pieces = {"content-type": self.task.media_type}, list[bytes]()
        try:
            with self.line.http.stream("POST", address(url, self.task.path), content=body, headers=headers) as response:
                for piece in response.iter_bytes():  # each has a timeout of its own
                    pieces.append(piece)
                    if monotonic() > until:
                        raise TimeoutError
        except (httpx2.RequestError, TimeoutError) as error:
            return to_failure(url, error, seconds)
        return outcome(self.line.servers, url, response.status_code, response.headers, b"".join(pieces))
