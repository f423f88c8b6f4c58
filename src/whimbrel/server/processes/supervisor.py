"""Supervisor of a server: owns the socket and all other processes, and restarts the processes that die.

Theory of operation. One event loop, without PyTorch. Every child has a channel to the supervisor, and only the end of its
process counts as its death. Each life of a worker or an engine gets new channels between the two. An engine that does not load
again, or keeps dying, waits longer before each restart, and the workers are told. The watchdog (children.py) finds processes
that hang; the supervisor kills them. Which engines there are is the matter of the models (models.py).

At a SIGHUP the options are read again where they come from a file. They are taken as a whole or not at all.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel.server.http.tls import TlsFiles
from whimbrel.server.processes import messages
from whimbrel.server.processes.admin import run_command
from whimbrel.server.processes.child_process import CHANNEL_BROKEN
from whimbrel.server.processes.children import TICK_SECONDS, EngineChild, Watchdog, WorkerChild, describe_exit
from whimbrel.server.processes.downloads import Downloads
from whimbrel.server.processes.models import Models
from whimbrel.server.processes.reload import apply_models
from whimbrel.server.processes.running_model import RunningModel
from whimbrel.server.processes.service_manager import ALIVE, READY, RELOADING, STOPPING, ServiceManager
from whimbrel.server.processes.shared_budgets import SharedBudgets
from whimbrel.server.processes.shared_memory import allocate
from whimbrel.telemetry import logs, metrics
from whimbrel.telemetry.trace import count, gauge
from whimbrel.types.machine_limits import usable_memory

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
        read_again: Callable[[], messages.ServeOptions] | None = None,
    ) -> None:
        """`on_load` gets a model's index and the steps of its first replica's load; `on_ready` gets all models at the end.

        `read_again` gives the options as they are stated now, with what needs another start as it is. Raises SetupError.
        """
        self._options = options
        self._listener = listener
        self._connections, _ = allocate(_COUNT_BYTES * options.num_workers)
        """Memory in which each worker counts its connections."""
        self._on_ready = on_ready
        self._read_again = read_again
        self._reload: asyncio.Task[None] | None = None
        self._is_stale = False
        """True from a SIGHUP until the options are read again."""
        self._workers = [WorkerChild(f"worker-{index}", index=index) for index in range(options.num_workers)]
        self._models = Models(
            options,
            self._workers,
            live=self._live,
            start_task=self._start_task,
            on_load=lambda model, step: None if self._was_ready.is_set() else on_load(model, step),
            on_change=self._report_ready,
        )
        self._downloads = Downloads()
        self._first = list(self._models.served)
        """The models with which the server begins."""
        self._was_ready = asyncio.Event()
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
            # A server without file and TLS ends with its terminal, unless nohup has started it. With one, SIGHUP ends nothing.
            reloads = self._read_again is not None or self._options.tls is not None
            if name != signal.SIGHUP or reloads or signal.getsignal(name) != signal.SIG_IGN:
                loop.add_signal_handler(name, self._on_signal, name)
        self._budgets = SharedBudgets(self._options.limits.keys, len(self._workers))
        with metrics.directory() as self._metrics_folder:
            metrics.use_directory(self._metrics_folder, "supervisor")
            counting = metrics.Metrics()
            gauge("memory_limit_bytes", usable_memory())
            try:
                for worker in self._workers:
                    self._start_task(self._live(worker))
                for model in self._first:
                    self._start_task(self._begin(model))
                self._start_task(self._watch())
                await self._stopped.wait()
            finally:
                await self._end()
                counting.close()
                self._budgets.close()
        if self._error is not None:
            raise self._error
        return self._exit_code

    # Children

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the supervisor failed. This is a bug.", exc_info=error)
            self._finish(1)

    async def _begin(self, model: RunningModel) -> None:
        try:
            await self._models.begin(model)
        except SetupError as error:
            self._fail(error)

    async def _live(self, child: EngineChild | WorkerChild) -> None:
        """Run a child's process, again and again until the server ends, or the child is to end for good."""
        while not self._stopped.is_set():
            try:
                if isinstance(child, EngineChild):
                    await self._start_engine(child)
                else:
                    await self._start_worker(child)
                if child.ending.is_set():  # since its process began
                    child.kill()
                code = await child.wait()
            except OSError as error:  # no process, file or memory is free
                child.kill()
                if child.channel is not None:
                    await child.wait()
                child.error = SetupError(f"{child.name} cannot be started: {error.strerror or error}.")
                code = 1
            if self._stopped.is_set() or (self._draining and isinstance(child, WorkerChild) and child.drained):
                return
            if (delay := self._handle_death(child, code)) is None:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(child.ending.wait(), max(delay, 0.0 if child.error is None else 1.0))
                return

    def _handle_death(self, child: EngineChild | WorkerChild, code: int) -> float | None:
        """Handle the death of a child. Return the seconds to wait before its next life, None if it has none."""
        had_been_ready, child.ready = child.ready, False
        metrics.process_ended(child.name)
        reason = child.kill_reason or (child.error.message if child.error is not None else describe_exit(code))
        error = child.error or SetupError(f"{child.name} ended while it started: {reason}.")
        blame = 1.0 if child.kill_reason else _BLAME.get(code, 1.0)
        if isinstance(child, EngineChild):
            if not self._models.loading.engine_ended(child, error, was_ready=had_been_ready, blame=blame):
                return None
        elif not self._was_ready.is_set() and not had_been_ready:
            self._fail(error)
            return 0.0
        if self._draining:
            self._end_if_drained()
        delay = child.backoff.died(lived=perf_counter() - child.ready_since if had_been_ready else None)
        _log.error("%s: %s; it is started again%s.", child.name, reason, f" in {delay:.1f} s" if delay else "")
        if isinstance(child, EngineChild):
            count("engine_restarts", model=child.served_name)
            self._models.loading.report_down(child, reason, blame, delay)
        else:
            self._budgets.clear_column(child.index)
            self._downloads.end("its worker has ended", worker=child.index)
            count("worker_restarts")
            self._models.forget_worker(child)
        return delay

    # Engines

    async def _start_engine(self, engine: EngineChild) -> None:
        model = self._models.by_id[engine.model]
        await engine.start(
            self._metrics_folder, partial(self._models.loading.handle, engine), secrets=self._options.limits.api_keys
        )
        engine.started_at = perf_counter()
        weights = model.state != "planning"
        engine.send(messages.Load(model.load_options(engine), engine.name, self._options.logs, weights))

    # Workers

    async def _start_worker(self, worker: WorkerChild) -> None:
        await worker.start(self._metrics_folder, partial(self._handle_worker, worker), secrets=self._options.limits.api_keys)
        worker.last_message, worker.drained = perf_counter(), False
        self._models.forget_worker(worker)
        known, served = self._models.configs(), self._models.names()
        config = messages.WorkerConfig(self._options, known, served, worker.name, worker.index, self._budgets.places)
        worker.send(config, *map(os.dup, (self._listener.fileno(), self._connections, self._budgets.fd)))

    def _handle_worker(self, worker: WorkerChild, message: messages.ReportWorker) -> None:
        worker.last_message = perf_counter()
        match message:
            case messages.Notice("started"):
                worker.ready, worker.ready_since = True, perf_counter()
                worker.backoff.ready()
                if self._draining:
                    worker.send(messages.Notice("drain"))
                self._report_ready()
            case messages.Notice("drained"):
                worker.drained = True
                self._end_if_drained()
            case messages.Quarantine():
                self._quarantine(message, worker)
            case messages.Abandoned(uid):
                self._downloads.end("its client has left", worker=worker.index, uid=uid)
            case messages.Command():
                self._start_task(self._run_command(worker, message))
            case _:
                self._models.handle_worker(worker, message)

    async def _run_command(self, worker: WorkerChild, command: messages.Command) -> None:
        start, draining = self._start_task, self._draining
        fetch = partial(
            self._downloads.fetch, worker, command.uid,
            metrics_folder=self._metrics_folder, secrets=self._options.limits.api_keys,
        )  # fmt: skip
        status, body = await run_command(self._models, self._options, command, start=start, fetch=fetch, draining=draining)
        worker.send(messages.Outcome(command.uid, status, body))

    def _end_if_drained(self) -> None:
        if all(worker.drained or worker.channel is None for worker in self._workers):
            self._finish(0)

    def _quarantine(self, message: messages.Quarantine, finder: WorkerChild) -> None:
        """Tell all other workers, now and when they start, to refuse a text that crashes engines."""
        if (model := self._models.by_id.get(message.model)) is None:
            return
        model.quarantined.add(message.digest, perf_counter())
        for engine in model.engines:
            engine.backoff.explained()
        for worker in self._workers:
            if worker is not finder:
                worker.send(message)

    def _report_ready(self) -> None:
        """Tell that the server answers requests, once, when every worker sends them to every engine."""
        begun = all(model.state in ("ready", "unloaded") for model in self._first)
        if not self._was_ready.is_set() and begun and all(worker.ready for worker in self._workers):
            self._was_ready.set()
            self._manager.tell(READY)
            self._on_ready([model.planned for model in self._first if model.planned is not None])

    # Reload

    async def _reload_while_stale(self, read_again: Callable[[], messages.ServeOptions]) -> None:
        """Take the options as they are stated now, and once more if a SIGHUP has come meanwhile."""
        await self._was_ready.wait()
        while self._is_stale and not self._draining:
            self._is_stale = False
            self._manager.tell(RELOADING)
            try:
                await self._apply(await asyncio.to_thread(read_again))
            except SetupError as error:
                _log.error("SIGHUP: nothing is changed: %s%s", error.message, f" ({error.hint})" if error.hint else "")
            except Exception as error:
                _log.critical("SIGHUP: nothing is changed, for a bug.", exc_info=error)
            else:
                _log.info("SIGHUP: the server serves what its file states now")
            if not self._draining:
                self._manager.tell(READY)

    async def _apply(self, new: messages.ServeOptions) -> None:
        """Serve the models, keys, limits and certificate of new options. Raises SetupError; then all is as before."""
        if self._options.limits.needs_key and not new.limits.needs_key:
            raise SetupError("no API key is stated any more; a reload opens no server to everybody.", hint="restart it")
        self._budgets.renew(new.limits.keys)
        loading, memory = self._models.loading, self._models.loading.memory
        loading.memory = new.memory
        try:
            await apply_models(self._models, new.models)
        except BaseException:
            loading.memory = memory
            raise
        self._options = new
        logs.redact(new.limits.api_keys)
        self._tell_limits()

    def _tell_limits(self) -> None:
        options = self._options
        self._models.tell_workers(messages.Limits(options.limits, self._budgets.places, options.tls))

    # Watchdog

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._manager.tell(ALIVE)
            self._watchdog.tick()
            if not self._draining:
                self._models.unload_idle()
            for child in (*self._workers, *self._models.engines):
                if child.kill_reason is None and (reason := self._watchdog.hang_reason(child)):
                    child.kill(reason)

    # End

    def _on_signal(self, name: signal.Signals) -> None:
        if name == signal.SIGHUP and self._read_again is not None:
            self._is_stale = True
            if self._reload is None or self._reload.done():
                self._reload = self._start_task(self._reload_while_stale(self._read_again))
            return
        if name == signal.SIGHUP and self._options.tls is not None:
            self._reload_certificate(self._options.tls)
            return
        if self._draining:
            _log.warning("%s again: ending at once", name.name)
            self._finish(128 + name)
            return
        self._draining = True
        self._manager.tell(STOPPING)
        self._models.stop_loading("the server is about to stop.")
        self._downloads.end("the server is about to stop")
        if not any(worker.ready for worker in self._workers):
            self._finish(0)
            return
        self._models.tell_workers(messages.Notice("drain"))
        self._start_task(self._limit_drain())

    def _reload_certificate(self, files: TlsFiles) -> None:
        try:
            files.load()
        except SetupError as error:
            _log.error("SIGHUP: the certificate is kept: %s", error)
            return
        _log.info("SIGHUP: new connections get the certificate as it is now in %s", files.certfile)
        self._tell_limits()

    async def _limit_drain(self) -> None:
        await asyncio.sleep(max(self._options.drain_seconds, _MIN_DRAIN_SECONDS))
        _log.error("requests were left after %.0f s of draining; they are answered with 503.", self._options.drain_seconds)
        self._models.tell_workers(messages.Notice("abort"))
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
        children = [child for child in (*self._workers, *self._models.engines) if child.process is not None]
        at_once = self._error is not None or self._exit_code > 1
        for child in children:
            late = self._exit_code == 1 and isinstance(child, EngineChild)  # it still computes requests that were aborted
            if child.ready and not at_once and not late:
                child.send(messages.Notice("stop"))
            else:
                child.kill()
        running = [child for child in children if child.process is not None and child.process.returncode is None]
        if waits := [asyncio.ensure_future(child.process.wait()) for child in running if child.process is not None]:
            await asyncio.wait(waits, timeout=_STOP_SECONDS)
            for child in running:
                child.kill()
            await asyncio.wait(waits)
