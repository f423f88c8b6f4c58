"""Loading of models: their engines' processes from the first message to the last, and the memory that they may take.

An engine makes its plan, and waits. Once there is room for its weights it may proceed. A model is loaded when all its engines
are up and every worker sends them requests.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from time import perf_counter
from typing import Any, Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import pair
from whimbrel.server.processes.children import EngineChild, WorkerChild
from whimbrel.server.processes.model_memory import measure, next_to_unload, used_bytes
from whimbrel.server.processes.running_model import RunningModel
from whimbrel.server.processes.served_models import ServedModels
from whimbrel.server.processes.shared_memory import StatusBoard, map_memory
from whimbrel.telemetry.trace import gauge

_log = logging.getLogger("whimbrel")

_STOP_SECONDS: Final = 10.0
"""Seconds that an engine without requests may take to end."""


class Loading:
    """The engines of all models. `live` runs an engine's process, again and again, until it ends for good."""

    def __init__(
        self,
        models: ServedModels,
        *,
        memory: int | None,
        live: Callable[[EngineChild], Coroutine[Any, Any, None]],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        unload: Callable[[RunningModel], Awaitable[None]],
        on_load: Callable[[int, messages.Phase | messages.BytesRead], None],
    ) -> None:
        """`unload` makes room in `memory`; `on_load` gets the steps of each model's first engine."""
        self._models = models
        self.memory = memory
        self._live = live
        self._start_task = start_task
        self._unload = unload
        self._on_load = on_load
        self._room = asyncio.Lock()
        """Held from the moment in which a model is given memory until it is measured, if there is a limit."""

    async def load(self, model: RunningModel) -> None:
        """Start the engines, measure them, and wait until all workers use them. Raises SetupError; then no engine is left."""
        model.state, model.failure, model.is_wanted = "loading", None, False
        for engine in model.engines:
            self._start(engine)
        try:
            await self._models.wait_until_there(model)
            await self._measure(model)
            model.state = "connecting"
            for worker in self._models.workers:
                self.connect_all(model, worker)
            await self._models.wait_until_there(model)
        except BaseException as error:
            model.failure = error if isinstance(error, SetupError) else None
            await asyncio.shield(self.end(model, at_once=True))
            model.state = "failed"
            raise
        finally:
            if model.has_room:
                model.has_room = False
                self._room.release()
        model.state, model.ready_since = "ready", perf_counter()
        model.backoff.ready()
        self._models.tell_workers(model.resides)

    async def plan(self, model: RunningModel) -> None:
        """Have the first engine make the plan, without the weights. Raises SetupError."""
        model.state = "planning"
        self._start(model.engines[0])
        try:
            await self._models.wait_until_there(model)
        finally:
            await asyncio.shield(self.end(model))
        model.state = "unloaded"

    def _start(self, engine: EngineChild) -> None:
        engine.last_down, engine.planned, engine.ready = None, None, False
        engine.ending.clear()
        for worker in self._models.workers:
            worker.connected.discard((engine.model, engine.replica))
        engine.life = self._start_task(self._live(engine))

    async def end(self, model: RunningModel, *, at_once: bool = False) -> None:
        """End all engines of a model, which have no requests any more."""
        model.fail_load(SetupError(f"{model.names[0]} was unloaded while it was loaded."))
        for engine in model.engines:
            engine.ending.set()
            if at_once or not engine.ready:
                engine.kill()
            else:
                engine.send(messages.Notice("stop"))
        if lives := [engine.life for engine in model.engines if engine.life is not None]:
            await asyncio.wait(lives, timeout=_STOP_SECONDS)
            for engine in model.engines:
                engine.kill()
            await asyncio.wait(lives)
        for engine in model.engines:
            engine.memory, engine.life, engine.ready = 0, None, False
            if engine.board_fd >= 0:
                os.close(engine.board_fd)
                engine.board_fd = -1
        self._gauge_engines(model)

    # Memory

    def used(self) -> dict[str, int]:
        """Return the bytes that models take, by device."""
        engines = self._models.engines
        devices = {engine.planned.plan.device for engine in engines if engine.planned is not None and engine.memory}
        return {device: used_bytes(self._models.by_id.values(), device) for device in sorted(devices)}

    async def _measure(self, model: RunningModel) -> None:
        """Note the memory that a loaded model takes, and unload others if it is more than was known. Raises NoRoom."""
        for engine in model.engines:
            await _measure(engine)
        for device in {engine.planned.plan.device for engine in model.engines if engine.planned is not None}:
            await self._make_room(model, 0, device)

    async def _make_room(self, model: RunningModel, needed: int, device: str) -> None:
        for engine in self._models.engines if self.memory is not None else ():
            if engine.ready and engine.memory:  # it may have grown
                await _measure(engine)
        while self.memory is not None:
            victim = next_to_unload(self._models.by_id.values(), needed, self.memory, device, keep=model)
            if victim is None:
                return
            _log.info("%s is unloaded: memory is needed for %s", victim.names[0], model.names[0])
            await self._unload(victim)

    async def _admit(self, model: RunningModel, engine: EngineChild) -> None:
        """Let an engine load its weights once there is room for them."""
        assert engine.planned is not None
        needed = engine.measured or engine.planned.weight_bytes
        try:
            async with model.admission:
                if self.memory is not None and model.state == "loading" and not model.has_room:
                    await self._room.acquire()
                    if model.state != "loading":  # its load has failed meanwhile
                        self._room.release()
                        return
                    model.has_room = True
                if not engine.memory:
                    await self._make_room(model, needed, engine.planned.plan.device)
                    engine.memory = needed
        except SetupError as error:
            model.fail_load(error)
        else:
            engine.send(messages.Notice("proceed"))

    # Messages

    def handle(self, engine: EngineChild, message: messages.ReportEngine) -> None:
        if (model := self._models.by_id.get(engine.model)) is None:
            return
        match message:
            case messages.Planned():
                self._note_plan(model, engine, message)
            case messages.Ready():
                self._note_ready(model, engine, message)
            case messages.CannotStart():
                engine.error = SetupError(message.message, hint=message.hint)
            case _:
                if not engine.replica:
                    self._on_load(model.id, message)

    def _note_plan(self, model: RunningModel, engine: EngineChild, message: messages.Planned) -> None:
        first = model.planned
        if first is not None and first.plan.revision != message.plan.revision:
            change = f"{first.plan.revision} before, {message.plan.revision} now"
            engine.error = SetupError(
                f"the files of {model.names[0]} are others than when it was first loaded: {change}.",
                hint="POST /admin/models replaces the model by the new files",
            )
            engine.kill()
            return
        # The name is that of a link, not of its target.
        engine.planned = message if first is None else msgspec.structs.replace(message, card_name=first.card_name)
        if first is None or not first.weight_bytes:
            model.planned = engine.planned
        if first is None:
            try:
                self._models.refuse_shared_names()
            except SetupError as error:
                model.fail_load(error)
                return
            self._models.tell_workers(messages.ModelConfig(model.id, model.options, engine.planned))
            if model in self._models.served:
                self._models.tell_workers(self._models.names())
        if model.state != "planning":
            self._start_task(self._admit(model, engine))

    def _note_ready(self, model: RunningModel, engine: EngineChild, message: messages.Ready) -> None:
        assert engine.channel is not None
        assert engine.planned is not None
        engine.planned = msgspec.structs.replace(engine.planned, plan=message.plan)
        if not engine.replica:
            model.planned = engine.planned
        engine.device_bytes = message.device_bytes
        model.probes[engine.replica] = message.probe
        engine.ready, engine.ready_since = True, perf_counter()
        engine.load_seconds = engine.ready_since - engine.started_at
        engine.backoff.ready()
        if engine.board_fd >= 0:
            os.close(engine.board_fd)
        engine.board_fd = engine.channel.take_fd()
        engine.board = StatusBoard(map_memory(os.dup(engine.board_fd)))
        engine.last_down = None
        self._gauge_engines(model)
        gauge("max_batch_tokens", message.plan.max_batch_tokens, model=message.plan.served_name)
        for worker in self._models.workers:
            self._connect(model, engine, worker)
        self._models.check_there()

    def connect_all(self, model: RunningModel, worker: WorkerChild) -> None:
        """Connect a worker with the engines of a model that are up. Of the others it learns why they are not."""
        for engine in model.engines:
            if engine.ready:
                self._connect(model, engine, worker)
            elif engine.last_down is not None:
                worker.send(engine.last_down)

    def _connect(self, model: RunningModel, engine: EngineChild, worker: WorkerChild) -> None:
        """Give a worker and an engine a channel to each other, if both can use it."""
        knows = engine.model in worker.prepared and model.state in ("connecting", "ready")
        if not (engine.ready and knows) or worker.channel is None or engine.channel is None or engine.planned is None:
            return
        ours, theirs = pair()
        engine.send(messages.Attach(worker.index), ours.detach())
        up = messages.EngineUp(engine.model, engine.replica, engine.planned.plan)
        worker.send(up, theirs.detach(), os.dup(engine.board_fd))

    # Ends

    def engine_ended(self, engine: EngineChild, error: SetupError, *, was_ready: bool, blame: float) -> bool:
        """Handle the end of an engine's process. Return whether it is to be started again."""
        model = self._models.by_id.get(engine.model)
        if engine.ending.is_set() or model is None:
            return False
        if model.state in ("loading", "planning") and not was_ready:
            model.fail_load(error)
            return False
        if model.state == "unloading":  # its requests wait, and have it loaded again
            engine.ending.set()
            self._models.tell_workers(messages.EngineDown(model.id, engine.replica, error.message, blame, False, 1.0))
            return False
        return True

    def report_down(self, engine: EngineChild, reason: str, blame: float, delay: float) -> None:
        """Tell the workers that an engine has died, and is started again after a delay."""
        self._gauge_engines(self._models.by_id[engine.model])
        failing = engine.backoff.failing
        reason = f"{engine.name} {'keeps failing' if failing else 'is restarting'}: {reason}"
        retry_after = delay + engine.load_seconds
        engine.last_down = messages.EngineDown(engine.model, engine.replica, reason, blame, failing, retry_after)
        self._models.tell_workers(engine.last_down)

    def _gauge_engines(self, model: RunningModel) -> None:
        name = model.names[0]  # which another model may have too, that is replaced by this one
        engines = (engine for each in self._models.by_id.values() if each.names[0] == name for engine in each.engines)
        gauge("engines_up", sum(engine.ready for engine in engines), model=name)


async def _measure(engine: EngineChild) -> None:
    num_bytes = await asyncio.to_thread(measure, engine)
    if engine.ready:  # it has not ended meanwhile
        engine.memory = engine.measured = num_bytes
