"""The models of a server and the workers that use them: which there are, which names lead to them, and who knows it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.children import EngineChild, WorkerChild
from whimbrel.server.processes.running_model import RunningModel


class ServedModels:
    """All models by id, and those to which names lead. Ids count up and are never used again."""

    def __init__(self, models: Sequence[messages.ModelOptions], workers: Sequence[WorkerChild]) -> None:
        self.workers = workers
        self._ids = count()
        self.by_id: dict[int, RunningModel] = {}
        self.served: list[RunningModel] = [self.add(each, stated=each) for each in models]
        """The models to which their names lead, in order."""

    @property
    def engines(self) -> list[EngineChild]:
        return [engine for model in self.by_id.values() for engine in model.engines]

    @property
    def live_workers(self) -> list[WorkerChild]:
        """The workers that have a process. The others learn what they need when they start."""
        return [worker for worker in self.workers if worker.channel is not None]

    def add(self, options: messages.ModelOptions, *, stated: messages.ModelOptions | None = None) -> RunningModel:
        """Return a new model, to which no name leads yet. `stated` is what the file or the command line states for its name."""
        taken = {model.slot for model in self.by_id.values()}
        slot = next(number for number in count() if number not in taken)
        model = RunningModel(next(self._ids), options, slot=slot, stated=stated)
        self.by_id[model.id] = model
        return model

    def named(self, name: str) -> RunningModel | None:
        """Return the model to which a name leads."""
        return next((model for model in self.served if name in model.names), None)

    def refuse_shared_names(self) -> None:
        """Raise SetupError if two models have a name in common. Their plans have the names that no option gives."""
        names = Counter(name for model in self.served if model.planned for name in set(model.names))
        if shared := [name for name, models in names.items() if models > 1]:
            raise SetupError(f"two models are named {shared[0]}.", hint="give every model a --served-name of its own")

    def refuse_taken_names(self, options: messages.ModelOptions) -> None:
        """Raise SetupError if a name of a model that is put leads to another than the one that it replaces."""
        own, old = set(options.names), self.named(options.names[0])
        for model in self.served:
            if model is not old and (shared := sorted(own.intersection(model.names))):
                raise SetupError(f"two models are named {shared[0]}.", hint="give every model names of its own")

    # What workers know

    def tell_workers(self, message: msgspec.Struct) -> None:
        for worker in self.workers:
            worker.send(message)

    def names(self) -> messages.Served:
        """Return the message that tells a worker to which models names lead."""
        return messages.Served({each.id: each.names[1:] for each in self.served if each.planned is not None}, len(self.served))

    def configs(self) -> list[messages.ModelConfig]:
        """Return what a worker that starts has to know of the models."""
        known = (model for model in self.by_id.values() if not model.is_retiring)
        return [messages.ModelConfig(each.id, each.options, each.planned) for each in known if each.planned is not None]

    def is_there(self, model: RunningModel) -> bool:
        """Return whether a model is as far as its state says: known to all workers, up, or in the use of all workers."""
        if model.state in ("planning", "unloaded"):
            return model.planned is not None and all(model.id in worker.prepared for worker in self.live_workers)
        if not all(engine.ready for engine in model.engines):
            return False
        engines = {(model.id, engine.replica) for engine in model.engines}
        return model.state == "loading" or all(worker.connected >= engines for worker in self.live_workers)

    async def wait_until_there(self, model: RunningModel) -> None:
        """Wait until a model is as far as its state says. Raises SetupError if its load fails."""
        while not self.is_there(model):
            model.there = asyncio.get_running_loop().create_future()
            await model.there

    def check_there(self) -> None:
        """Note the models that are now as far as their states say."""
        for model in self.by_id.values():
            if model.there is not None and not model.there.done() and self.is_there(model):
                model.there.set_result(None)

    async def release(self, model: RunningModel, *, forget: bool) -> None:
        """Wait until all workers have given a model's engines up, or the model itself with `forget`."""
        model.released.clear()
        model.releasing = {worker.index for worker in self.live_workers}
        self.tell_workers(messages.Release(model.id, forget))
        if model.releasing:
            await model.released.wait()

    def note_released(self, model: RunningModel, worker: WorkerChild) -> None:
        model.releasing.discard(worker.index)
        worker.connected -= {(model.id, engine.replica) for engine in model.engines}
        if not model.releasing:
            model.released.set()

    def forget_worker(self, worker: WorkerChild) -> None:
        """Forget what a worker knew that has ended, or starts anew."""
        worker.connected.clear()
        worker.prepared.clear()
        for model in self.by_id.values():
            model.uses.pop(worker.index, None)
            self.note_released(model, worker)
        self.check_there()
