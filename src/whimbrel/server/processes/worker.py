"""HTTP worker: the app on the supervisor's socket, and a RemoteEngine for each model."""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, Final

import uvloop

from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.errors import SetupError, Unavailable
from whimbrel.server.app.app import create_app
from whimbrel.server.app.guards import OPEN_ROUTES
from whimbrel.server.app.routing import ModelRegistry, render_error
from whimbrel.server.budgets import Budgets
from whimbrel.server.http.balance import Balance
from whimbrel.server.http.listener import Server
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, control_socket, exit_process, max_segments, raise_file_limit
from whimbrel.server.processes.remote_engine import RemoteEngine
from whimbrel.server.processes.replica import Replica
from whimbrel.server.processes.shared_memory import StatusBoard, map_memory
from whimbrel.telemetry import audit, logs, metrics, otel
from whimbrel.telemetry.trace import gauge

_log = logging.getLogger("whimbrel")

_BEAT_SECONDS: Final = 1.0
_NUM_FDS: Final[dict[type, int]] = {messages.WorkerConfig: 3, messages.EngineUp: 2}
"""The number of descriptors that come with a message."""


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._inbox: asyncio.Queue[tuple[messages.ControlWorker, list[int]]] = asyncio.Queue()
        self._control = AsyncChannel[messages.ControlWorker](
            sock, messages.ControlWorker, on_message=self._receive, on_end=partial(_exit, "the supervisor")
        )
        self._engines: dict[int, RemoteEngine] = {}
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
        self._served = ModelRegistry(num_models=len(options.models))
        for model, planned in config.known.items():
            await self._add_model(model, planned)
        self._app = app = create_app(self._served, guards=options.limits, budgets=self._map_budgets(fds[2]))
        counts = memoryview(map_memory(fds[1])).cast("i")
        balance = Balance(counts, config.index) if options.num_workers > 1 else None
        tls = options.tls and options.tls.load()
        self._server = Server(app, fds[0], options.limits, render_error, tls=tls, balance=balance)
        self._start_task(self._send_heartbeats())
        self._start_task(self._handle_messages())
        serving = asyncio.ensure_future(self._server.serve())
        self._control.send(messages.Notice("started"))
        await serving
        if end_spans is not None:
            await asyncio.to_thread(end_spans)
        if end_audit is not None:
            end_audit()
        end_logs()

    def _receive(self, message: messages.ControlWorker) -> None:
        self._inbox.put_nowait((message, [self._control.take_fd() for _ in range(_NUM_FDS.get(type(message), 0))]))

    async def _handle_messages(self) -> None:
        """Handle the supervisor's messages one after another: a model is loaded before its engines are attached."""
        while True:
            message, fds = await self._inbox.get()
            match message:
                case messages.ModelConfig(model, planned):
                    await self._add_model(model, planned)
                case messages.EngineUp(model):
                    board = StatusBoard(map_memory(fds[1]))
                    self._engines[model].plan = message.plan
                    self._engines[model].attach(message.replica, socket.socket(fileno=fds[0]), board)
                    self._control.send(messages.Connected(model, message.replica))
                case messages.EngineDown(model):
                    if model in self._engines:
                        self._engines[model].down(message)
                case messages.Quarantine(model, digest):
                    self._engines[model].quarantine(digest)
                case messages.Notice("drain"):
                    self._start_task(self._drain())
                case messages.Notice("abort"):
                    self._abort(Unavailable("the server has stopped.", retry_after=5.0))
                case messages.Notice("reload certificate"):
                    self._reload_certificate()
                case _:
                    self._server.stop()

    def _abort(self, error: Unavailable) -> None:
        self._app.refuse_line(error)
        for engine in self._engines.values():
            engine.fail_all(error)

    def _map_budgets(self, fd: int) -> Budgets:
        """Return the budgets in the supervisor's memory. The descriptor stays open: closing it would end its locks."""
        limits, num_workers = self._config.options.limits, self._config.options.num_workers
        return Budgets(limits.keys, mmap(fd, 0), fd=fd, num_columns=num_workers, column=self._config.index)

    async def _add_model(self, model: int, planned: messages.Planned) -> None:
        if model in self._engines:  # known from an earlier life of its engine
            return
        options = self._config.options
        card = await asyncio.to_thread(messages.read_planned_card, options.models[model], planned)
        segments = max_segments(max(options.num_workers, options.num_engines))
        replicas = [Replica(segments, partial(_exit, "an engine")) for _ in range(options.models[model].num_replicas)]
        make = partial(RemoteEngine, replicas=replicas, on_crash=partial(self._refuse_text, model))
        engine = await asyncio.to_thread(make, self._config.index, card, planned.plan, Path(planned.folder))
        self._engines[model] = engine
        self._served.add(model, engine)

    def _refuse_text(self, model: int, digest: bytes) -> None:
        self._control.send(messages.Quarantine(model, digest))

    def _reload_certificate(self) -> None:
        assert self._config.options.tls is not None
        try:
            self._server.tls = self._config.options.tls.load()
        except SetupError as error:  # the supervisor had read them, but they are being replaced
            _log.error("the certificate is kept: %s", error)

    async def _drain(self) -> None:
        self._served.draining = True
        await self._served.idle.wait()
        self._control.send(messages.Notice("drained"))

    async def _send_heartbeats(self) -> None:
        while True:
            self._control.send(messages.Notice("alive"))
            gauge("connections", len(self._server.places.taken))
            for engine in self._engines.values():
                gauge("queue_tokens", engine.queued_tokens, model=engine.plan.served_name)
            await asyncio.sleep(_BEAT_SECONDS)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
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
    except SetupError as error:
        _log.critical("the worker cannot start: %s", error)
        exit_process(1)
    exit_process(0)  # without waiting for threads that tokenize, or for clients that came in the last moment


def main() -> None:
    raise_file_limit()
    tune_glibc_malloc()
    uvloop.run(_main(control_socket()))
