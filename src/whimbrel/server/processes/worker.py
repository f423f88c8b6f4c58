"""HTTP worker: the app on the supervisor's socket, and a RemoteEngine for each model."""

import asyncio
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from itertools import count
from mmap import mmap
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import uvloop

from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.errors import CheckpointError, SetupError, Unavailable, WhimbrelError
from whimbrel.server.app.admin import AdminAction, Tell
from whimbrel.server.app.app import create_app
from whimbrel.server.app.guards import OPEN_ROUTES
from whimbrel.server.app.routing import ModelRegistry, render_error
from whimbrel.server.budgets import Budgets
from whimbrel.server.http.balance import Balance
from whimbrel.server.http.listener import Server
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError, close_fds
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, control_socket, exit_process, max_segments, raise_file_limit
from whimbrel.server.processes.remote_engine import RemoteEngine
from whimbrel.server.processes.replica import Replica
from whimbrel.server.processes.shared_memory import StatusBoard, map_memory
from whimbrel.telemetry import audit, logs, metrics, otel
from whimbrel.telemetry.trace import gauge

_log = logging.getLogger("whimbrel")

_BEAT_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 5.0
"""Time until a tokenizer that could not be loaded is tried again."""
_LEAST_CHANNELS: Final = 8
"""Channels among which a worker shares its segments of shared memory at least, as models may be added."""
_NUM_FDS: Final[dict[type, int]] = {messages.WorkerConfig: 3, messages.EngineUp: 2}
"""The number of descriptors that come with a message."""


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._inbox: asyncio.Queue[tuple[messages.ControlWorker, list[int]]] = asyncio.Queue()
        self._control = AsyncChannel[messages.ControlWorker](
            sock, messages.ControlWorker, on_message=self._receive, on_end=partial(_exit, "the supervisor")
        )
        self._engines: dict[int, RemoteEngine] = {}
        self._named: set[str] = set()
        """Names of models whose queues were reported."""
        self._forgotten: set[int] = set()
        """Models that were released before they were prepared."""
        self._commands: dict[int, tuple[asyncio.Future[messages.Outcome], Tell | None]] = {}
        self._uids = count(random.getrandbits(48))  # the lives of a worker must not share uids
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        config, fds = await self._inbox.get()
        assert isinstance(config, messages.WorkerConfig)
        self._config = config
        options = config.options
        end_logs = logs.configure(options.logs, process=config.name, secrets=options.limits.api_keys)
        end_spans = otel.start() if options.otel else None
        end_audit = audit.start(Path(options.audit_log), unlogged=OPEN_ROUTES) if options.audit_log else None
        metrics.use_directory(Path(os.environ[metrics.DIRECTORY]), config.name)
        self._served = ModelRegistry()
        self._names = config.served
        self._switch()
        for each in config.models:
            if each.model in config.served.models:
                await self._prepare(each)
        listener, connections, self._budgets_fd = fds  # the last stays open: closing it would end its locks
        self._budgets = Budgets(
            options.limits.keys, mmap(self._budgets_fd, 0), fd=self._budgets_fd, places=config.places,
            num_columns=options.num_workers, column=config.index,
        )  # fmt: skip
        self._app = app = create_app(self._served, guards=options.limits, budgets=self._budgets, command=self._command)
        counts = memoryview(map_memory(connections)).cast("i")
        balance = Balance(counts, config.index) if options.num_workers > 1 else None
        tls = options.tls and options.tls.load()
        self._server = Server(app, listener, options.limits, render_error, tls=tls, balance=balance)
        self._start_task(self._send_heartbeats())
        self._start_task(self._handle_messages())
        serving = asyncio.ensure_future(self._server.serve())
        self._control.send(messages.Notice("started"))
        if app.batches is not None:
            app.batches.start()
        for each in config.models:
            if each.model not in config.served.models:
                self._start_task(self._prepare(each))
        await serving
        if end_spans is not None:
            await asyncio.to_thread(end_spans)
        if end_audit is not None:
            end_audit()
        end_logs()

    def _receive(self, message: messages.ControlWorker) -> None:
        self._inbox.put_nowait((message, [self._control.take_fd() for _ in range(_NUM_FDS.get(type(message), 0))]))

    async def _handle_messages(self) -> None:
        """Handle the supervisor's messages one after another, without waiting for anything."""
        while True:
            message, fds = await self._inbox.get()
            match message:
                case messages.Served():
                    self._names = message
                    self._switch()
                case messages.Limits():
                    self._renew(message)
                case messages.EngineUp():
                    self._attach(message, *fds)
                case (
                    messages.ModelConfig()
                    | messages.EngineDown()
                    | messages.Quarantine()
                    | messages.Release()
                    | messages.Resides()
                ):
                    self._handle_model(message)
                case messages.Fetched() | messages.Outcome():
                    self._note_command(message)
                case messages.Notice("drain"):
                    self._start_task(self._drain())
                case messages.Notice("abort"):
                    self._abort(Unavailable("the server has stopped.", retry_after=5.0))
                case _:
                    self._server.stop()

    def _handle_model(self, message: messages.OfModel) -> None:
        engine = self._engines.get(message.model)
        match message:
            case messages.ModelConfig():
                self._start_task(self._prepare(message))
            case messages.Release(model, forget):
                self._release(model, forget=forget)
            case messages.EngineDown():
                if engine is not None:
                    engine.down(message)
            case messages.Quarantine(_, digest):
                if engine is not None:
                    engine.quarantine(digest)
            case messages.Resides(_, residence):
                if engine is not None:
                    engine.told = residence

    def _abort(self, error: Unavailable) -> None:
        self._app.refuse_line(error)
        for engine in self._engines.values():
            engine.fail_all(error)

    async def _prepare(self, config: messages.ModelConfig) -> None:
        """Load the tokenizer of a model, and tell the supervisor. If that fails it is tried again, until the model has gone."""
        try:
            await self._add_model(config)
        except (WhimbrelError, OSError) as error:
            _log.error("the tokenizer of %s cannot be loaded: %s", config.options.names[0], error)
            self._control.send(messages.Prepared(config.model, str(error)))
            if config.model not in self._forgotten:
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, lambda: self._start_task(self._prepare(config)))
        else:
            self._switch()

    async def _add_model(self, config: messages.ModelConfig) -> None:
        """Load the tokenizer of a model, of the files that its engines have. Raises WhimbrelError, OSError."""
        model, own, planned = config.model, config.options, config.planned
        if model not in self._engines:
            card = await asyncio.to_thread(messages.read_planned_card, own, planned)
            options = self._config.options
            segments = max_segments(max(options.num_workers, 2 * options.num_engines, _LEAST_CHANNELS))
            make = partial(
                RemoteEngine,
                replicas=[Replica(segments, partial(_exit, "an engine")) for _ in range(own.num_replicas)],
                on_crash=partial(self._refuse_text, model),
                on_wanted=None if own.keep_seconds is None else partial(self._control.send, messages.Wanted(model)),
            )
            engine = await asyncio.to_thread(make, self._config.index, card, planned.plan, Path(planned.folder))
            await asyncio.to_thread(messages.check_files, planned)
            self._engines[model] = engine
        self._control.send(messages.Prepared(model))
        if model in self._forgotten:
            self._release(model, forget=True)

    def _switch(self) -> None:
        """Let the names of models lead to those that are served now."""
        known: list[RemoteEngine] = []
        for model, further in self._names.models.items():
            if (engine := self._engines.get(model)) is not None:
                engine.plan = replace(engine.plan, aliases=further)
                known.append(engine)
        self._served.switch(known, num_models=self._names.num_expected)

    def _attach(self, message: messages.EngineUp, channel: int, board: int) -> None:
        if (engine := self._engines.get(message.model)) is None:  # it was forgotten meanwhile
            close_fds((channel, board))
            return
        engine.plan = replace(message.plan, aliases=engine.plan.aliases)
        engine.attach(message.replica, socket.socket(fileno=channel), StatusBoard(map_memory(board)))
        self._control.send(messages.Connected(message.model, message.replica))

    def _release(self, model: int, *, forget: bool) -> None:
        released = partial(self._control.send, messages.Released(model))
        if (engine := self._engines.get(model)) is None:
            if forget:
                self._forgotten.add(model)
            released()
        elif forget:
            self._start_task(self._forget(model, engine, released))
        else:
            engine.release(released)

    async def _forget(self, model: int, engine: RemoteEngine, released: Callable[[], None]) -> None:
        await engine.close()
        self._engines.pop(model, None)
        released()

    async def _command(self, action: AdminAction, body: bytes, tell: Tell | None = None) -> tuple[int, bytes]:
        """Have the supervisor carry out an operator's command. Return the status and the body of the answer."""
        uid, answer = next(self._uids), asyncio.get_running_loop().create_future()
        self._commands[uid] = answer, tell
        self._control.send(messages.Command(uid, action, body))
        try:
            outcome = await answer
        except asyncio.CancelledError:
            if tell is not None:
                self._control.send(messages.Abandoned(uid))
            raise
        return outcome.status, outcome.body

    def _note_command(self, message: messages.Fetched | messages.Outcome) -> None:
        if message.uid not in self._commands:  # it was of an earlier life of this worker
            return
        answer, tell = self._commands[message.uid]
        if isinstance(message, messages.Outcome):
            del self._commands[message.uid]
            if not answer.done():  # the client may have left
                answer.set_result(message)
        elif tell is not None:
            tell(message.digest, message.total, message.completed)

    def _refuse_text(self, model: int, digest: bytes) -> None:
        self._control.send(messages.Quarantine(model, digest))

    def _renew(self, message: messages.Limits) -> None:
        """Take other keys and limits, and the certificate as it is now, between two events of the loop."""
        limits = message.limits
        try:
            self._server.tls = message.tls and message.tls.load()
        except SetupError as error:  # the supervisor had read its files, but they are being replaced
            _log.error("the certificate is kept: %s", error)
        logs.redact(limits.api_keys)
        self._budgets.renew(limits.keys, message.places, mmap(self._budgets_fd, 0))
        self._app.renew_limits(limits)
        self._server.limits = limits

    async def _drain(self) -> None:
        self._served.draining = True
        if self._app.batches is not None:
            await self._app.batches.stop()
        await self._served.idle.wait()
        self._control.send(messages.Notice("drained"))

    async def _send_heartbeats(self) -> None:
        while True:
            use = {model: messages.Usage(each.in_flight, each.last_used) for model, each in self._engines.items()}
            self._control.send(messages.Alive(perf_counter(), use))
            gauge("connections", len(self._server.places.taken))
            queued = Counter(dict.fromkeys(self._named, 0))
            for engine in self._engines.values():
                queued[engine.plan.served_name] += engine.queued_tokens
            self._named = set(queued)
            for name, tokens in queued.items():
                gauge("queue_tokens", tokens, model=name)
            await asyncio.sleep(_BEAT_SECONDS)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_end_if_failed)


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """End a worker that lost a background task; the supervisor starts another."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the worker failed. This is a bug.", exc_info=error)
        exit_process(1)


def _exit(peer: str, error: ProtocolError | None) -> None:
    """End a worker whose channel to `peer` has ended, or was closed for an error."""
    if error is not None:
        _log.critical("%s sent what cannot be read (%s); this worker ends.", peer, error)
    exit_process(0 if error is None else CHANNEL_BROKEN)


async def _main(sock: socket.socket) -> None:
    try:
        await Worker(sock).run()
    except (SetupError, CheckpointError, OSError) as error:
        _log.critical("the worker cannot start: %s", error)
        exit_process(1)
    exit_process(0)  # without waiting for threads that tokenize, or for clients that came in the last moment


def main() -> None:
    raise_file_limit()
    tune_glibc_malloc()
    uvloop.run(_main(control_socket()))
