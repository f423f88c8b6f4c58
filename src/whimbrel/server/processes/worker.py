"""An HTTP worker: the app on the supervisor's socket, and a RemoteEngine for each model."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop

from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.errors import Unavailable
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry, render_error
from whimbrel.server.http.listener import Server
from whimbrel.server.processes.channel import AsyncChannel, ProtocolError
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, control_socket, exit_process, max_segments, raise_file_limit
from whimbrel.server.processes.messages import (
    AbortRequests,
    ControlWorker,
    Drain,
    Drained,
    EngineDown,
    EngineUp,
    Heartbeat,
    ModelConfig,
    Quarantine,
    ReportWorker,
    Started,
    WorkerConfig,
)
from whimbrel.server.processes.remote_engine import RemoteEngine
from whimbrel.server.processes.shared_memory import StatusBoard, map_memory
from whimbrel.telemetry import logs, metrics, otel

_log = logging.getLogger("whimbrel")

_BEAT_SECONDS: Final = 1.0
_NUM_FDS: Final[dict[type, int]] = {WorkerConfig: 1, EngineUp: 2}
"""The number of descriptors that come with a message."""


class Worker:
    """One worker process; `run` it in an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._told: asyncio.Queue[tuple[ControlWorker, list[int]]] = asyncio.Queue()
        self._control = AsyncChannel[ControlWorker](sock, ControlWorker, on_message=self._hear, on_end=_supervisor_gone)
        self._engines: dict[int, RemoteEngine] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until told to stop."""
        work, fds = await self._told.get()
        assert isinstance(work, WorkerConfig)
        self._work = work
        end_logs = logs.configure(work.logs, process=work.name, secrets=work.guards.api_keys)
        end_spans = otel.start() if work.otel else None
        metrics.use_directory(Path(os.environ[metrics.DIRECTORY]), work.name)
        self._served = ModelRegistry(num_models=work.num_models)
        for _ in range(work.num_known):
            model, _ = await self._told.get()
            assert isinstance(model, ModelConfig)
            await self._add(model)
        self._server = Server(create_app(self._served, guards=work.guards), fds[0], work.guards, render_error)
        self._keep(self._beat())
        self._keep(self._obey())
        serving = asyncio.ensure_future(self._server.serve())
        self._say(Started())
        await serving
        if end_spans is not None:
            await asyncio.to_thread(end_spans)
        end_logs()

    def _say(self, message: ReportWorker) -> None:
        self._control.send(message)

    def _hear(self, message: ControlWorker) -> None:
        self._told.put_nowait((message, [self._control.take_fd() for _ in range(_NUM_FDS.get(type(message), 0))]))

    async def _obey(self) -> None:
        """The supervisor's messages, one after another: a model is loaded before its engines are attached."""
        while True:
            message, fds = await self._told.get()
            if isinstance(message, ModelConfig):
                await self._add(message)
            elif isinstance(message, EngineUp):
                board = StatusBoard(map_memory(fds[1], message.board_bytes))
                self._engines[message.model].plan = message.plan
                self._engines[message.model].attach(message.replica, socket.socket(fileno=fds[0]), board)
            elif isinstance(message, EngineDown):
                if (engine := self._engines.get(message.model)) is not None:
                    engine.down(message)
            elif isinstance(message, Quarantine):
                self._engines[message.model].quarantine(message.digest)
            elif isinstance(message, Drain):
                self._keep(self._drain())
            elif isinstance(message, AbortRequests):
                for engine in self._engines.values():
                    engine.fail_all(Unavailable("the server has stopped.", retry_after=5.0))
            else:
                self._server.stop()

    async def _add(self, model: ModelConfig) -> None:
        if model.model in self._engines:  # known from an earlier life of its engine
            return
        card = await asyncio.to_thread(
            read_card, Path(model.folder), model.card_name, pooling=model.pooling, reranker=model.reranker
        )
        engine = await asyncio.to_thread(
            RemoteEngine,
            self._work.index,
            card,
            model.plan,
            Path(model.folder),
            num_replicas=self._work.num_replicas,
            max_segments=max_segments(max(self._work.num_workers, self._work.num_models * self._work.num_replicas)),
            on_quarantine=lambda digest: self._say(Quarantine(model.model, digest)),
            broken=_broken,
        )
        self._engines[model.model] = engine
        self._served.add(model.model, engine)

    async def _drain(self) -> None:
        self._served.draining = True
        await self._served.wait_until_idle()
        self._say(Drained())

    async def _beat(self) -> None:
        while True:
            self._say(Heartbeat())
            await asyncio.sleep(_BEAT_SECONDS)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(_end_if_failed)


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """Without its background tasks a worker is of no use: the supervisor starts another."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the worker failed. This is a bug.", exc_info=error)
        exit_process(1)


def _broken(error: ProtocolError) -> None:
    _log.critical("an engine sent what cannot be read (%s); this worker ends.", error)
    exit_process(CHANNEL_BROKEN)


def _supervisor_gone(error: ProtocolError | None) -> None:
    if error is not None:
        _log.critical("the supervisor sent what cannot be read (%s); this worker ends.", error)
    exit_process(0 if error is None else CHANNEL_BROKEN)


async def _main(sock: socket.socket) -> None:
    await Worker(sock).run()
    exit_process(0)  # neither threads that still tokenise nor clients that came in the last moment matter any more


def main() -> None:
    """The process."""
    raise_file_limit()
    tune_glibc_malloc()
    uvloop.run(_main(control_socket()))


if __name__ == "__main__":
    main()
