"""Supervisor of a server: owns the socket and all other processes, and restarts the processes that die.

Theory of operation. One event loop, without PyTorch. Every child has a channel to the supervisor, and only the end of its
process counts as its death. Each life of a worker or an engine gets new channels between the two. An engine that does not load
again, or keeps dying, waits longer before each restart, and the workers are told. The watchdog (children.py) finds processes
that hang; the supervisor kills them.
"""

import asyncio
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec

from whimbrel.checkpoint import packaged
from whimbrel.errors import SetupError
from whimbrel.server.budgets import Budgets
from whimbrel.server.http.tls import TlsFiles
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import pair
from whimbrel.server.processes.child_process import CHANNEL_BROKEN
from whimbrel.server.processes.children import TICK_SECONDS, EngineChild, Watchdog, WorkerChild, describe_exit
from whimbrel.server.processes.quarantine import QuarantineList
from whimbrel.server.processes.service_manager import ALIVE, READY, STOPPING, ServiceManager
from whimbrel.server.processes.shared_memory import StatusBoard, allocate, map_memory
from whimbrel.telemetry import metrics
from whimbrel.telemetry.trace import count, gauge
from whimbrel.types.machine_limits import usable_memory
from whimbrel.types.plan import Options

_log = logging.getLogger("whimbrel")

_STOP_SECONDS: Final = 5.0
_COUNT_BYTES: Final = 4
_MIN_DRAIN_SECONDS: Final = 0.5
"""Seconds that a worker may take to report that it has no requests."""
_BLAME: Final = dict.fromkeys((-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP), 0.25) | {CHANNEL_BROKEN: 0.0}
"""Weight of a death as evidence against the text that ran alone, by the exit code of the engine; 1 for all others."""


class Supervisor:
    """Supervisor of one server; `run` it in an event loop."""

    def __init__(
        self,
        options: messages.ServeOptions,
        listener: socket.socket,
        *,
        on_load: Callable[[int, messages.Phase | messages.BytesRead], None],
        on_ready: Callable[[list[messages.Planned]], None],
    ) -> None:
        """`on_load` gets a model's index and the steps of its first replica's load; `on_ready` gets all models at the end."""
        self._options = options
        self._listener = listener
        self._connections, _ = allocate(_COUNT_BYTES * options.num_workers)
        """Memory in which each worker counts its connections."""
        self._on_load = on_load
        self._on_ready = on_ready
        self._engines = [
            EngineChild(f"engine-{model}-{replica}", model=model, replica=replica)
            for model, each in enumerate(options.models)
            for replica in range(each.num_replicas)
        ]
        self._workers = [WorkerChild(f"worker-{index}", index=index) for index in range(options.num_workers)]
        self._children: list[EngineChild | WorkerChild] = [*self._engines, *self._workers]
        self._quarantined = [QuarantineList() for _ in options.models]
        self._was_ready = False
        self._draining = False
        self._stopped = asyncio.Event()
        self._exit_code = 0
        self._error: SetupError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchdog = Watchdog(options.step_seconds)
        self._manager = ServiceManager()

    async def run(self) -> int:
        """Run all processes until a signal ends them. Return the exit code. Raises SetupError if one cannot be started."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A server without TLS ends with its terminal, unless nohup has started it. With TLS, SIGHUP ends nothing.
            if name != signal.SIGHUP or self._options.tls is not None or signal.getsignal(name) != signal.SIG_IGN:
                loop.add_signal_handler(name, self._on_signal, name)
        self._budgets_fd, self._budgets = _make_budgets(self._options)
        with metrics.directory() as self._metrics_folder:
            metrics.use_directory(self._metrics_folder, "supervisor")
            counting = metrics.Metrics()
            gauge("memory_limit_bytes", usable_memory())
            try:
                for child in self._children:
                    self._start_task(self._live(child))
                self._start_task(self._watch())
                await self._stopped.wait()
            finally:
                await self._end()
                counting.close()
                os.close(self._budgets_fd)
        if self._error is not None:
            raise self._error
        return self._exit_code

    # Children

    def _start_task(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the supervisor failed. This is a bug.", exc_info=error)
            self._finish(1)

    async def _live(self, child: EngineChild | WorkerChild) -> None:
        while not self._stopped.is_set():
            try:
                if isinstance(child, EngineChild):
                    await self._start_engine(child)
                else:
                    await self._start_worker(child)
                code = await child.wait()
            except OSError as error:  # no process, file or memory is free
                child.kill()
                if child.channel is not None:
                    await child.wait()
                child.error = SetupError(f"{child.name} cannot be started: {error.strerror or error}.")
                code = 1
            if self._stopped.is_set() or (self._draining and isinstance(child, WorkerChild) and child.drained):
                return
            await asyncio.sleep(max(self._handle_death(child, code), 0.0 if child.error is None else 1.0))

    def _handle_death(self, child: EngineChild | WorkerChild, code: int) -> float:
        """Handle the death of a child. Return the seconds to wait before its next life."""
        had_been_ready, child.ready = child.ready, False
        metrics.process_ended(child.name)
        reason = child.kill_reason or (child.error.message if child.error is not None else describe_exit(code))
        if not self._was_ready and not had_been_ready:
            self._fail(child.error or SetupError(f"{child.name} ended while it started: {reason}."))
            return 0.0
        if self._draining:
            self._end_if_drained()
        delay = child.backoff.died(lived=perf_counter() - child.ready_since if had_been_ready else None)
        _log.error("%s: %s; it is started again%s.", child.name, reason, f" in {delay:.1f} s" if delay else "")
        if isinstance(child, EngineChild):
            count("engine_restarts", model=child.served_name)
            self._report_down(child, code, reason, delay)
        else:
            self._budgets.clear_column(child.index)
            count("worker_restarts")
        return delay

    # Engines

    async def _start_engine(self, engine: EngineChild) -> None:
        await engine.start(self._metrics_folder, partial(self._handle_engine, engine), secrets=self._options.limits.api_keys)
        engine.started_at = perf_counter()
        model = self._pinned(engine.model)
        options: Options = {**model.options, "replica": engine.replica, "num_replicas": model.num_replicas}
        engine.send(messages.Load(replace(model, options=options), engine.name, self._options.logs))

    def _pinned(self, number: int) -> messages.ModelOptions:
        """Return the options of a model. Later engines take the files of the first."""
        model, planned = self._options.models[number], self._planned(number)
        if planned is None or model.model in (None, packaged.NAME):
            return model
        is_gone = planned.plan.commit and not Path(planned.folder).is_dir()
        return replace(model, model=f"{planned.card_name}@{planned.plan.commit}" if is_gone else planned.folder)

    def _planned(self, number: int) -> messages.Planned | None:
        return next((each.planned for each in self._engines if each.model == number and each.planned is not None), None)

    def _handle_engine(self, engine: EngineChild, message: messages.ReportEngine) -> None:
        if isinstance(message, messages.Phase | messages.BytesRead):
            if not self._was_ready and not engine.replica:
                self._on_load(engine.model, message)
        elif isinstance(message, messages.Planned):
            first = self._planned(engine.model) or message
            engine.planned = msgspec.structs.replace(message, card_name=first.card_name)  # that of a link, not of its target
            self._refuse_shared_names()
            self._tell_workers(messages.ModelConfig(engine.model, engine.planned))
        elif isinstance(message, messages.Ready):
            self._engine_ready(engine, message)
        else:
            engine.error = SetupError(message.message, hint=message.hint)

    def _refuse_shared_names(self) -> None:
        """Fail if two models have a name in common. Their plans have the names, also those that no option gives."""
        plans = {engine.model: engine.planned.plan for engine in self._engines if engine.planned is not None}
        names = Counter(name for plan in plans.values() for name in {plan.served_name, *plan.aliases})
        if shared := [name for name, models in names.items() if models > 1]:
            self._fail(SetupError(f"two models are named {shared[0]}.", hint="give every model a --served-name of its own"))

    def _engine_ready(self, engine: EngineChild, message: messages.Ready) -> None:
        assert engine.channel is not None
        assert engine.planned is not None
        engine.planned = msgspec.structs.replace(engine.planned, plan=message.plan)
        engine.ready, engine.ready_since = True, perf_counter()
        engine.load_seconds = engine.ready_since - engine.started_at
        engine.backoff.ready()
        if engine.board_fd >= 0:
            os.close(engine.board_fd)
        engine.board_fd = engine.channel.take_fd()
        engine.board = StatusBoard(map_memory(os.dup(engine.board_fd)))
        engine.last_down = None
        self._gauge_engines(engine)
        gauge("max_batch_tokens", message.plan.max_batch_tokens, model=message.plan.served_name)
        for worker in self._workers:
            self._connect(engine, worker)
        self._report_ready()

    def _connect(self, engine: EngineChild, worker: WorkerChild) -> None:
        if not engine.ready or worker.channel is None or engine.channel is None or engine.planned is None:
            return
        ours, theirs = pair()
        engine.send(messages.Attach(worker.index), ours.detach())
        up = messages.EngineUp(engine.model, engine.replica, engine.planned.plan)
        worker.send(up, theirs.detach(), os.dup(engine.board_fd))

    def _gauge_engines(self, engine: EngineChild) -> None:
        gauge("engines_up", sum(each.ready for each in self._engines if each.model == engine.model), model=engine.served_name)

    def _report_down(self, engine: EngineChild, code: int, reason: str, delay: float) -> None:
        self._gauge_engines(engine)
        blame = 1.0 if engine.kill_reason else _BLAME.get(code, 1.0)
        failing = engine.backoff.failing
        reason = f"{engine.name} {'keeps failing' if failing else 'is restarting'}: {reason}"
        engine.last_down = messages.EngineDown(
            engine.model, engine.replica, reason, blame, failing, delay + engine.load_seconds
        )
        self._tell_workers(engine.last_down)

    # Workers

    def _tell_workers(self, message: msgspec.Struct) -> None:
        for worker in self._workers:
            worker.send(message)

    async def _start_worker(self, worker: WorkerChild) -> None:
        await worker.start(self._metrics_folder, partial(self._handle_worker, worker), secrets=self._options.limits.api_keys)
        worker.last_message, worker.drained = perf_counter(), False
        worker.connected.clear()
        known = {engine.model: engine.planned for engine in self._engines if engine.planned is not None}
        config = messages.WorkerConfig(self._options, known, worker.name, worker.index)
        worker.send(config, *map(os.dup, (self._listener.fileno(), self._connections, self._budgets_fd)))
        for engine in self._engines:
            if engine.ready:
                self._connect(engine, worker)
            elif engine.last_down is not None:
                worker.send(engine.last_down)
        for model, quarantined in enumerate(self._quarantined):
            for digest in quarantined.refused(perf_counter()):
                worker.send(messages.Quarantine(model, digest))

    def _handle_worker(self, worker: WorkerChild, message: messages.ReportWorker) -> None:
        worker.last_message = perf_counter()
        match message:
            case messages.Notice("started"):
                worker.ready, worker.ready_since = True, perf_counter()
                worker.backoff.ready()
                if self._draining:
                    worker.send(messages.Notice("drain"))
                self._report_ready()
            case messages.Connected(model, replica):
                worker.connected.add((model, replica))
                self._report_ready()
            case messages.Notice("drained"):
                worker.drained = True
                self._end_if_drained()
            case messages.Quarantine():
                self._quarantine(message, worker)
            case _:  # it is alive
                pass

    def _end_if_drained(self) -> None:
        if all(worker.drained or worker.channel is None for worker in self._workers):
            self._finish(0)

    def _quarantine(self, message: messages.Quarantine, finder: WorkerChild) -> None:
        """Tell all other workers, now and when they start, to refuse a text that crashes engines."""
        self._quarantined[message.model].add(message.digest, perf_counter())
        for engine in self._engines:
            if engine.model == message.model:
                engine.backoff.explained()
        for worker in self._workers:
            if worker is not finder:
                worker.send(message)

    def _report_ready(self) -> None:
        """Tell that the server answers requests, once, when every worker sends them to every engine."""
        engines = {(engine.model, engine.replica) for engine in self._engines}
        if not self._was_ready and all(worker.ready and worker.connected >= engines for worker in self._workers):
            self._was_ready = True
            self._manager.tell(READY)
            self._on_ready([engine.planned for engine in self._engines if engine.replica == 0 and engine.planned is not None])

    # Watchdog

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._manager.tell(ALIVE)
            self._watchdog.tick()
            for child in self._children:
                if child.kill_reason is None and (reason := self._watchdog.hang_reason(child)):
                    child.kill(reason)

    # End

    def _on_signal(self, name: signal.Signals) -> None:
        if name == signal.SIGHUP and self._options.tls is not None:
            self._reload_certificate(self._options.tls)
            return
        if self._draining:
            _log.warning("%s again: ending at once", name.name)
            self._finish(128 + name)
            return
        self._draining = True
        self._manager.tell(STOPPING)
        if not any(worker.ready for worker in self._workers):
            self._finish(0)
            return
        self._tell_workers(messages.Notice("drain"))
        self._start_task(self._limit_drain())

    def _reload_certificate(self, files: TlsFiles) -> None:
        try:
            files.load()
        except SetupError as error:
            _log.error("SIGHUP: the certificate is kept: %s", error)
            return
        _log.info("SIGHUP: new connections get the certificate as it is now in %s", files.certfile)
        self._tell_workers(messages.Notice("reload certificate"))

    async def _limit_drain(self) -> None:
        await asyncio.sleep(max(self._options.drain_seconds, _MIN_DRAIN_SECONDS))
        _log.error("requests were left after %.0f s of draining; they are answered with 503.", self._options.drain_seconds)
        self._tell_workers(messages.Notice("abort"))
        self._exit_code = 1
        await asyncio.sleep(_STOP_SECONDS)
        self._finish(1)

    def _fail(self, error: SetupError) -> None:
        self._error = self._error or error
        self._finish(1)

    def _finish(self, code: int) -> None:
        self._exit_code = max(self._exit_code, code)
        self._stopped.set()

    async def _end(self) -> None:
        """Tell all processes to end, and kill those that still run after a while."""
        for task in self._tasks:
            task.cancel()
        children = [child for child in (*self._workers, *self._engines) if child.process is not None]
        at_once = self._error is not None or self._exit_code > 1
        for child in children:
            late = self._exit_code == 1 and isinstance(child, EngineChild)  # it still computes requests that were aborted
            if child.ready and not at_once and not late:
                child.send(messages.Notice("stop"))
            else:
                child.kill()
        if waits := [asyncio.ensure_future(child.process.wait()) for child in children if child.process is not None]:
            await asyncio.wait(waits, timeout=_STOP_SECONDS)
            for child in children:
                child.kill()
            await asyncio.wait(waits)


def _make_budgets(options: messages.ServeOptions) -> tuple[int, Budgets]:
    """Return the descriptor of the memory of all keys' budgets, and the budgets in it. Raises SetupError."""
    keys, num_workers = options.limits.keys, options.num_workers
    try:
        fd, memory = allocate(Budgets.memory_size(keys, num_workers))
    except (OSError, ValueError) as error:
        raise SetupError(f"there is no memory for the budgets of {len(keys):,} keys: {error}.") from None
    return fd, Budgets(keys, memory, num_columns=num_workers)
