"""Running model: a model of the server from its first plan to its end, as the supervisor knows it. It starts no processes."""

import asyncio
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal, TypeAlias

from whimbrel.checkpoint import packaged
from whimbrel.errors import SetupError
from whimbrel.server.processes.children import Backoff, EngineChild
from whimbrel.server.processes.messages import ModelOptions, Planned, Resides, Usage
from whimbrel.server.processes.probe import Probe
from whimbrel.server.processes.quarantine import QuarantineList
from whimbrel.types.plan import Options
from whimbrel.types.residence import Residence

ModelState: TypeAlias = Literal["planning", "loading", "connecting", "ready", "unloading", "unloaded", "failed"]


class NoRoom(SetupError, status=507, code="out_of_memory"):
    """The memory that models may take has no room for one more."""


@dataclass(slots=True, eq=False)
class RunningModel:
    """A model with an id that no other model of the server ever has."""

    id: int
    options: ModelOptions
    engines: list[EngineChild] = field(init=False)
    slot: int = 0
    """Number in the names of its engines, under which they count: the least that no other model has."""
    state: ModelState = "loading"
    stated: ModelOptions | None = None
    """Options that file or command line state for its name; a request may have replaced them. None: a request added it."""
    is_retiring: bool = False
    """True if no name leads to it any more, and its last requests are answered."""
    planned: Planned | None = None
    """The plan of its first engine. Later ones have to load the same files."""
    probes: dict[int, Probe] = field(default_factory=dict[int, Probe])
    """The probe of each replica."""
    quarantined: QuarantineList = field(default_factory=QuarantineList)
    backoff: Backoff = field(default_factory=Backoff)
    failure: SetupError | None = None
    """The reason why it could not be loaded."""
    retry_at: float = 0.0
    ready_since: float = 0.0
    last_used: float = 0.0
    uses: dict[int, tuple[float, Usage]] = field(default_factory=dict[int, tuple[float, Usage]])
    """The last report of each worker, with its time."""
    kept_for: float | None = None
    """Seconds that an operator's client has stated in place of `keep`, until it is unloaded; infinite: it stays."""
    is_wanted: bool = False
    """True if a request came while it was being unloaded."""
    there: asyncio.Future[None] | None = None
    """Done when the model is as far as its state says, or with the reason why it will not be."""
    admission: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an engine waits for room."""
    has_room: bool = False
    """True if no other model may be given memory until this one is measured."""
    releasing: set[int] = field(default_factory=set[int])
    """The workers whose requests it still answers before it is unloaded or ends."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while workers release it."""

    def __post_init__(self) -> None:
        numbers = range(self.options.num_replicas)
        self.engines = [EngineChild(f"engine-{self.slot}-{number}", model=self.id, replica=number) for number in numbers]

    @property
    def names(self) -> tuple[str, ...]:
        """The names for clients, its own first: those that the options state, else those of the plan."""
        if self.planned is None or self.options.names[0]:
            return self.options.names
        return (self.planned.plan.served_name, *self.planned.plan.aliases)

    @property
    def revision(self) -> str:
        return self.planned.plan.revision if self.planned is not None else ""

    @property
    def is_loaded(self) -> bool:
        return self.state in ("loading", "connecting", "ready", "unloading")

    @property
    def in_flight(self) -> int:
        return sum(use.in_flight for _, use in self.uses.values())

    @property
    def keep_seconds(self) -> float | None:
        """Seconds without a request after which it is unloaded; None or infinite: never."""
        return self.options.keep_seconds if self.kept_for is None else self.kept_for

    @property
    def resides(self) -> Resides:
        return Resides(self.id, self._residence())

    def _residence(self) -> Residence:
        if self.state not in ("ready", "unloading"):
            return Residence("loading" if self.is_loaded else "failed" if self.state == "failed" else "unloaded")
        keep, now = self.keep_seconds, perf_counter()
        since = now if self.in_flight else max(self.last_used, self.ready_since)
        return Residence("loaded", self.memory, None if keep is None or keep == inf else time() + since + keep - now)

    @property
    def memory(self) -> int:
        """Bytes that its engines take, or are about to take."""
        return sum(engine.memory for engine in self.engines)

    def load_options(self, engine: EngineChild) -> ModelOptions:
        """Return what an engine is to load: the files that the first engine has planned with."""
        options, planned = self.options, self.planned
        if planned is not None and options.model not in (None, packaged.NAME):
            is_there = planned.weight_bytes and Path(planned.folder).is_dir()  # weights of a hub's model may come later, or go
            of_hub = planned.plan.commit and not is_there
            options = replace(options, model=f"{planned.card_name}@{planned.plan.commit}" if of_hub else planned.folder)
        return replace(options, options={**options.options, "replica": engine.replica, "num_replicas": options.num_replicas})

    def restate(self, stated: ModelOptions) -> None:
        """Take the further names and the time of `keep` that are stated now, if they have changed and nothing else has."""
        if stated != self.stated:
            options = self.options.options | Options(aliases=stated.names[1:])
            keep = self.options.keep_seconds
            if keep is not None and stated.keep_seconds is not None:
                keep = stated.keep_seconds
            self.options = replace(self.options, options=options, keep_seconds=keep)
            self.stated = stated

    def note_use(self, worker: int, now: float, use: Usage) -> None:
        self.uses[worker] = now, use
        self.last_used = max(self.last_used, use.last_used, now if use.in_flight else 0.0)

    def has_been_idle(self, workers: list[int]) -> bool:
        """Return whether every worker has reported that the model was not used for as long as it is kept."""
        keep = self.keep_seconds
        if keep is None or self.state != "ready" or self.is_retiring or not workers or not self.uses.keys() >= set(workers):
            return False
        since = max(self.last_used, self.ready_since)
        return not self.in_flight and min(self.uses[worker][0] for worker in workers) - since >= keep

    def note_unloading(self) -> None:
        """Note that it is about to be unloaded. What a client has stated for this load is forgotten, once."""
        if self.state == "ready":
            self.state, self.kept_for = "unloading", None

    def fail_load(self, error: SetupError) -> None:
        """End the load that is going on with an error."""
        if self.there is not None and not self.there.done():
            self.there.set_exception(error)

    def describe(self) -> dict[str, Any]:
        """Return what an operator sees of it."""
        now, plan = perf_counter(), self.planned.plan if self.planned is not None else None
        return {
            "name": self.names[0],
            "names": self.names,
            "id": self.id,
            "state": "draining" if self.is_retiring else "loading" if self.state == "connecting" else self.state,
            "source": self.options.model,
            "revision": self.revision,
            "dtype": plan.dtype if plan is not None else "",
            "device": plan.device if plan is not None else "",
            "keep_seconds": None if self.keep_seconds == inf else self.keep_seconds,
            "memory_bytes": self.memory,
            "in_flight": self.in_flight,
            "idle_seconds": round(now - self.last_used, 1) if self.last_used else None,
            "engines": [
                {"name": engine.name, "pid": engine.process.pid if engine.process else None, "ready": engine.ready}
                for engine in (self.engines if self.is_loaded else ())
            ],
            "error": None if self.failure is None else self.failure.message,
            "retry_seconds": round(max(0.0, self.retry_at - now), 1) if self.state == "failed" else None,
        }
