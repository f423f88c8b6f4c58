"""Models of a server while it runs: loaded, replaced, unloaded and watched, for the supervisor.

Theory of operation. Ids of models count up and are never used again. A model is loaded beside the others, in processes of its
own. No name leads to it until all its engines are up, every worker sends them requests, and its probe has passed. Then one
message to each worker switches all names at once, between two events of its loop. The workers let the old model go when its
last request has ended. So a request is answered by the model that it found, and by no other.

A model that is not always kept is loaded by its first request, which waits in its worker. It is unloaded in two steps: workers
send it nothing more and say when they have had all answers; then its engines end. A request that comes meanwhile waits, and has
it loaded again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.children import EngineChild, WorkerChild
from whimbrel.server.processes.model_loading import Loading
from whimbrel.server.processes.probe import refusal
from whimbrel.server.processes.running_model import RunningModel
from whimbrel.server.processes.served_models import ServedModels

_log = logging.getLogger("whimbrel")

_LEAST_RETRY_SECONDS: Final = 1.0
LEAST_AGREEMENT: Final = 0.99
"""Agreement with the model that is replaced, below which a new one is refused unless a request says otherwise."""


class Busy(SetupError, status=409, code="model_busy"):
    """A model of this name is being loaded already."""


class AlwaysKept(SetupError, status=409, code="always_kept"):
    """A model that is always kept would not be loaded again by a request."""


class Models(ServedModels):
    """All models of a server, and what may be done with them. For one event loop."""

    def __init__(
        self,
        options: messages.ServeOptions,
        workers: Sequence[WorkerChild],
        *,
        live: Callable[[EngineChild], Coroutine[Any, Any, None]],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_load: Callable[[int, messages.Phase | messages.BytesRead], None],
        on_change: Callable[[], None],
    ) -> None:
        """`live` runs an engine's process until it ends for good; `on_load` gets the steps of each model's first engine.

        `on_change` is called when a model is loaded or planned.
        """
        super().__init__(options.models, workers)
        self._start_task = start_task
        self._on_change = on_change
        self._reserved: set[str] = set()
        """Names of models that are being put."""
        self._freed = asyncio.Event()
        """Set when some of them are free again."""
        self.failed: dict[str, str] = {}
        """Models that could not be put, with the reasons, until they are."""
        self.loading = Loading(
            self, memory=options.memory, live=live, start_task=start_task, unload=self._unload, on_load=on_load
        )

    async def begin(self, model: RunningModel) -> None:
        """Load a model with which the server begins, or make its plan if its first request loads it. Raises SetupError."""
        if model.options.keep_seconds is None:
            await self.loading.load(model)
        else:
            await self.loading.plan(model)
            self._load_if_wanted(model)
        self._on_change()

    async def put(self, options: messages.ModelOptions, *, least_agreement: float | None = LEAST_AGREEMENT) -> RunningModel:
        """Serve a model under its names, in place of the one that has the first of them, if there is one.

        The old model answers until the new one can, and is let go afterwards. With `least_agreement` None the new model's
        results may be any. Raises SetupError; then all is as before.
        """
        self.check(options, least_agreement)
        with self.reserving(set(options.names)):
            new = self.add(options)
            try:
                await self.prepare(new, self.named(options.names[0]), least_agreement)
                await self.wait_until_there(new)  # a worker may have started meanwhile
            except BaseException as error:
                self.failed[options.names[0]] = str(error)
                await self.give_up([new])
                raise
            old = self.named(options.names[0])
            new.stated = None if old is None else old.stated
            others = [model for model in self.served if model is not old]
            place = len(others) if old is None else self.served.index(old)
            self.switch_all([*others[:place], new, *others[place:]])
        self._load_if_wanted(new)
        return new

    def check(self, options: messages.ModelOptions, least_agreement: float | None) -> None:
        """Raise SetupError if `put` would, before anything is loaded."""
        self._refuse_reserved(set(options.names))
        self.refuse_taken_names(options)
        old = self.named(options.names[0])
        if old is not None and least_agreement is not None and not old.probes:
            hint = 'send it a request first, or "min_cosine": "any"'
            raise SetupError(f"{old.names[0]} was never loaded, so no other can be compared with it.", hint=hint)

    async def prepare(self, new: RunningModel, old: RunningModel | None, least_agreement: float | None) -> None:
        """Load a model to which no name leads yet, and check its probe. Raises SetupError.

        A model that its first request loads is only planned, unless it replaces one that has been loaded.
        """
        if new.options.keep_seconds is not None and (old is None or not old.probes):
            if new.planned is None:
                await self.loading.plan(new)
            return
        await self.loading.load(new)
        known = old.probes.get(0) if old is not None else None
        if reason := refusal(new.probes.values(), known, least_agreement):
            hint = '"min_cosine": "any", or whimbrel load --any, for another model on purpose' if known is not None else None
            raise SetupError(f"{new.names[0]} is not {'served' if old is None else 'replaced'}: {reason}.", hint=hint)

    def delete(self, name: str) -> RunningModel | None:
        """Let no name lead to a model any more; its last requests are answered. Return it, None if there is none."""
        model = self.named(name)
        with self.reserving({name} if model is None else set(model.names)):
            if model is not None:
                self.switch_all([each for each in self.served if each is not model])
        return model

    @contextmanager
    def reserving(self, names: set[str]) -> Generator[None]:
        """Keep others from changing where these names lead. Raises Busy if somebody else does."""
        self._refuse_reserved(names)
        self._reserved |= names
        try:
            yield
        finally:
            self._reserved -= names
            self._freed.set()

    def _refuse_reserved(self, names: set[str]) -> None:
        if taken := sorted(names & self._reserved):
            raise Busy(f"{taken[0]} is being loaded.", hint="wait for it")

    async def wait_until_free(self, names: Callable[[], set[str]]) -> None:
        """Wait until no other changes where these names lead. They are asked for again after each change."""
        while names() & self._reserved:
            self._freed.clear()
            await self._freed.wait()

    def switch_all(self, models: Sequence[RunningModel]) -> None:
        """Let names lead to these models, in all workers at once, and let the others end."""
        before, self.served = self.served, list(models)
        self.tell_workers(self.names())
        for model in self.served:
            if model not in before:
                _log.info("%s is served now, revision %s", model.names[0], model.revision)
                self.failed.pop(model.names[0], None)
        for model in before:
            if model not in self.served:
                _log.info("%s ends with its last request, revision %s", model.names[0], model.revision)
                model.is_retiring = True
                self._start_task(self.retire(model))

    async def retire(self, model: RunningModel) -> None:
        """End a model to which no name leads, once its last request is answered. If one waits for its load, it is loaded."""
        model.is_retiring = True
        async with model.lock:
            await self.release(model, forget=True)
        await self.loading.end(model)
        self.by_id.pop(model.id, None)

    async def give_up(self, models: Iterable[RunningModel]) -> None:
        """End models to which no name has led. Their ends go on if this is cancelled."""
        if ends := [self._start_task(self.retire(model)) for model in models]:
            await asyncio.wait(ends)

    def stop_loading(self, reason: str) -> None:
        """End all loads of models to which no name leads yet, as the server is about to stop."""
        for model in self.by_id.values():
            if model not in self.served and not model.is_retiring:
                model.fail_load(SetupError(reason))

    # Keep

    def unload_idle(self) -> None:
        """Unload the models that were not used for as long as they are kept."""
        workers = [worker.index for worker in self.live_workers]
        for model in self.served:
            if model.has_been_idle(workers):
                self.unload(model)

    def keep(self, model: RunningModel, seconds: float, *, loads: bool) -> None:
        """Keep a model for other seconds than its options state, until it is unloaded. One that is always kept stays so."""
        is_needed = loads or (model.is_loaded and model.state != "unloading")
        if model.options.keep_seconds is not None and is_needed:
            model.kept_for = seconds
            if loads:
                self.want(model)
            self.tell_workers(model.resides)

    def unload(self, model: RunningModel) -> None:
        """Begin to unload a model that its next request loads again. Raises AlwaysKept."""
        if model.options.keep_seconds is None:
            raise AlwaysKept(f"{model.names[0]} is always kept.", hint='give it a time: keep = "10m"')
        if model.state == "ready":
            model.note_unloading()
            self._start_task(self._unload(model))

    async def _unload(self, model: RunningModel) -> None:
        """End the engines of a model once they have answered their requests. Further ones wait, and have it loaded again."""
        async with model.lock:
            if model.state not in ("ready", "unloading"):  # somebody else has unloaded it
                return
            model.note_unloading()
            await self.release(model, forget=False)
            await self.loading.end(model)
            model.state = "unloaded"
            _log.info("%s is unloaded", model.names[0])
        self._load_if_wanted(model)

    def _load_if_wanted(self, model: RunningModel) -> None:
        if model.is_wanted and model.state == "unloaded":
            model.is_wanted, model.state = False, "loading"
            self._start_task(self._load_for_requests(model))

    def want(self, model: RunningModel, worker: WorkerChild | None = None) -> None:
        """Load a model for which a request waits in a worker, or an operator asks."""
        if model.state in ("planning", "unloading", "unloaded"):
            model.is_wanted = True
            self._load_if_wanted(model)
        elif model.state == "failed" and worker is not None and perf_counter() < model.retry_at:
            self._report_failure(model, [worker])
        elif model.state == "failed":
            model.state = "loading"
            self._start_task(self._load_for_requests(model))

    async def _load_for_requests(self, model: RunningModel) -> None:
        try:
            await self.loading.load(model)
        except SetupError as error:
            _log.error("%s cannot be loaded: %s", model.names[0], error.message)
            self._note_failure(model)

    def _note_failure(self, model: RunningModel) -> None:
        """Refuse the requests of a model that could not be loaded, until one comes after a while."""
        model.retry_at = perf_counter() + max(_LEAST_RETRY_SECONDS, model.backoff.died(lived=None))
        self._report_failure(model, self.workers)

    def _report_failure(self, model: RunningModel, workers: Sequence[WorkerChild]) -> None:
        """Let requests that wait for a model, and further ones, be refused until it is tried again."""
        reason = model.failure.message.removesuffix(".") if model.failure is not None else "it ended"
        for engine in model.engines:
            retry_after = max(0.0, model.retry_at - perf_counter())
            text = f"{model.names[0]} cannot be loaded: {reason}"
            engine.last_down = messages.EngineDown(model.id, engine.replica, text, 0.0, failing=True, retry_after=retry_after)
            for worker in workers:
                worker.send(engine.last_down)

    # Messages of workers

    def handle_worker(self, worker: WorkerChild, message: messages.ReportWorker) -> None:
        if isinstance(message, messages.Alive):
            for number, use in message.models.items():
                if (model := self.by_id.get(number)) is not None:
                    model.note_use(worker.index, message.now, use)
                    worker.send(model.resides)
            return
        if not isinstance(message, messages.Prepared | messages.Connected | messages.Released | messages.Wanted):
            return
        if (model := self.by_id.get(message.model)) is None:
            return
        match message:
            case messages.Prepared(_, error):
                self._note_prepared(model, worker, error)
            case messages.Connected(_, replica):
                worker.connected.add((model.id, replica))
                self.check_there()
            case messages.Released():
                self.note_released(model, worker)
            case messages.Wanted():
                self.want(model, worker)

    def _note_prepared(self, model: RunningModel, worker: WorkerChild, error: str) -> None:
        if error:
            model.fail_load(SetupError(f"{model.names[0]} cannot be served: {error}"))
            return
        worker.prepared.add(model.id)
        self.check_there()
        self.loading.connect_all(model, worker)
        for digest in model.quarantined.refused(perf_counter()):
            worker.send(messages.Quarantine(model.id, digest))
