"""Messages between the processes: structs as msgpack, tagged by name. Large arrays lie in shared memory (shared_memory.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from whimbrel import errors
from whimbrel.checkpoint.fingerprint import revision_of
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import Hint, InvalidRequest, Location, Overloaded, SetupError, Unavailable, WhimbrelError
from whimbrel.server.app.admin import AdminAction
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.http.tls import TlsFiles
from whimbrel.server.processes.probe import Probe
from whimbrel.telemetry.logs import LogOptions
from whimbrel.types.card import Card
from whimbrel.types.choices import PoolingOption, RerankerName
from whimbrel.types.plan import Options, Plan
from whimbrel.types.residence import Residence


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model to serve, by its folder or its name on the hub; None for the packaged model."""

    model: str | None
    pooling: PoolingOption | None
    options: Options
    reranker: RerankerName | None = None
    num_replicas: int = 1
    keep_seconds: float | None = None
    """The model is loaded by its first request, and unloaded when it has been idle for so long. None: it is always loaded."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names for clients that the options state, its own first."""
        return (self.options.get("served_name") or "", *self.options.get("aliases", ()))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `serve`."""

    models: tuple[ModelOptions, ...]
    limits: ServerLimits
    num_workers: int = 1
    drain_seconds: float = 30.0
    step_seconds: float = 60.0
    """A batch hangs if it takes longer than this, and ten times longer than at the measured throughput."""
    logs: LogOptions = field(default_factory=LogOptions)
    otel: bool = False
    audit_log: str = ""
    """Path of the audit log, or "" for none."""
    tls: TlsFiles | None = None
    memory: int | None = None
    """Bytes that all loaded models may take on a device. None: no limit."""
    defaults: ModelOptions = ModelOptions(None, None, Options())
    """Options of models that are added later, where they do not state others."""

    @property
    def num_engines(self) -> int:
        return sum(model.num_replicas for model in self.models)


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# Between a worker and an engine.


class Submit(_Message):
    """A tokenized request. Its arrays lie in `segment`, or in `arrays` if that is 0; codec.py makes them and the header."""

    uid: int
    segment: int
    segment_bytes: int
    """Size of a new segment, whose descriptor comes with this message; 0 if the engine has it already."""
    arrays: memoryview
    response_start: int
    """Offset of the response in the segment, in bytes."""
    header: bytes
    admitted: bool
    """True if an engine had admitted it before, so that it must not be refused for overload."""
    dropped: list[int] = []
    """Numbers of segments that the worker does not use again."""


class Cancel(_Message):
    """The client disconnected; the request need not run."""

    uid: int


class EngineAnswer(_Message):
    """The response of a request, in its segment or in `memory`. Sparse rows without a slot are in `entries`."""

    uid: int
    memory: memoryview
    entries: memoryview
    """Offsets (int64), ids (int32) and weights (float32) of sparse rows, or nothing."""
    entries_bytes: int
    """Size of the memory that holds them instead, if they are many; its descriptor comes with this message."""
    queue: float
    """Seconds until the first seq ran."""
    compute: float
    """Seconds of the batches of the request."""


class Failed(_Message):
    """The error of a request. Each Submit gets one EngineAnswer or one Failed, also after a Cancel."""

    uid: int
    code: str
    message: str
    location: Location | None
    retry_after: float
    hint: str | None = None
    """The name of a Hint; the message is without its sentence."""


class Notice(_Message):
    """A message without further facts."""

    name: Literal[
        "stop",  # to an engine or a worker: finish the accepted requests, then end
        "drain",  # to a worker: refuse new requests, finish the accepted ones, then send "drained"
        "abort",  # to a worker: answer the remaining requests with an error
        "started",  # of a worker: it answers requests
        "drained",  # of a worker: it has answered every request
        "proceed",  # to an engine that has sent its plan: load the weights
    ]


# Between the supervisor and an engine.


class Load(_Message):
    """The model that an engine process runs; its first message."""

    model: ModelOptions
    name: str
    """The name of the process, such as "engine-0-0"."""
    logs: LogOptions
    weights: bool = True
    """False for a process that only makes the plan: it fetches no weights."""


class Phase(_Message):
    """The phase of loading that an engine begins."""

    text: str


class BytesRead(_Message):
    """The bytes of weights that a loading engine has read, and those of all files known so far."""

    done: int
    total: int


class Planned(_Message):
    """The plan of the model. The engine loads the weights once it is told to proceed."""

    folder: str
    card_name: str
    plan: Plan
    weight_bytes: int
    """Memory that the weights take at least in one engine."""


class Ready(_Message):
    """The engine accepts requests. The descriptor of its status board comes with this message."""

    plan: Plan
    """The plan, with the facts that loading the weights has shown."""
    probe: Probe
    device_bytes: int
    """Memory of the GPU that PyTorch has taken; 0 on a CPU."""


class CannotStart(_Message):
    """The reason why the engine could not be loaded."""

    message: str
    hint: str | None


class Attach(_Message):
    """A new channel to a worker, whose descriptor comes with this message."""

    worker: int


# Between the supervisor and the process of a download, which ends with code 0 or says CannotStart.


class Fetch(_Message):
    """The model to fetch from the hub; the only message to the process. Its command has this uid."""

    uid: int
    model: str


# Between the supervisor and a worker.


class WorkerConfig(_Message):
    """The configuration of a worker; its first message.

    Three descriptors come with it: of the listening socket, of the memory with the workers' numbers of connections, and of that
    with the budgets of keys.
    """

    options: ServeOptions
    models: list[ModelConfig]
    """The models whose plans are known already."""
    served: Served
    name: str
    index: int
    places: dict[str, int]
    """The records of the keys' budgets, by name."""


class ModelConfig(_Message):
    """A model whose plan is known, so that its tokenizer can be loaded. No name leads to it yet. `Prepared` answers it."""

    model: int
    options: ModelOptions
    planned: Planned


class Prepared(_Message):
    """The worker has a model's tokenizer, or the reason why not."""

    model: int
    error: str = ""


class Served(_Message):
    """The models to which their names lead from now on, in order."""

    models: dict[int, tuple[str, ...]]
    """Names beside the first one, by id."""
    num_expected: int
    """Number of models when all are there that the server begins with."""


class Limits(_Message):
    """The keys and limits from now on, and the files of the certificate, which are read again."""

    limits: ServerLimits
    places: dict[str, int]
    """The records of the keys' budgets, in the memory that the worker has. It may have grown."""
    tls: TlsFiles | None


class Release(_Message):
    """Send no further requests to a model's engines, and say `Released` once they have answered all.

    Requests that come wait until the engines are up again, and the worker says `Wanted`.
    """

    model: int
    forget: bool
    """True if no name leads to the model any more: it ends when its requests have ended."""


class Released(_Message):
    model: int


class Wanted(_Message):
    """A request waits for a model that is not loaded."""

    model: int


class Resides(_Message):
    """The residence of a model, as the supervisor knows it."""

    model: int
    residence: Residence


class Usage(msgspec.Struct, array_like=True):
    """Use of a model in a worker."""

    in_flight: int
    last_used: float
    """Time (perf_counter) at which its last request ended; 0: there was none."""


class Alive(_Message):
    """The worker's event loop turns. `models` is the use of each model, as of `now`."""

    now: float
    models: dict[int, Usage]


class Command(_Message):
    """A request of an operator to change or list models, as a worker has received it."""

    uid: int
    action: AdminAction
    body: bytes


class Abandoned(_Message):
    """The client of a download has left."""

    uid: int


class Fetched(_Message):
    """The bytes of a file that a download has on the disk; from its process to the supervisor, and on to the worker."""

    uid: int
    digest: str
    total: int
    completed: int


class Outcome(_Message):
    """The answer to a Command."""

    uid: int
    status: int
    body: bytes


class EngineUp(_Message):
    """An engine is ready. The channel to it and its status board come with this message, as descriptors."""

    model: int
    replica: int
    plan: Plan


class EngineDown(_Message):
    """The reason why an engine is not ready: it has not started yet, it died, or it loads again."""

    model: int
    replica: int
    reason: str
    blame: float
    """Weight of its death as evidence against the seqs that it ran: 1 for a crash or a hang, less for a kill from outside."""
    failing: bool
    """True if it keeps dying, so that no request should wait for it."""
    retry_after: float


class Quarantine(_Message):
    """The digest of a text that crashes engines. A worker sends it, and the supervisor passes it on to all others."""

    model: int
    digest: bytes


class Connected(_Message):
    """The worker sends requests to an engine: its `EngineUp` has been handled."""

    model: int
    replica: int


def read_planned_card(model: ModelOptions, planned: Planned) -> Card:
    """Return the card of a model, read as its engine has read it. Raises CheckpointError."""
    plan = planned.plan
    return read_card(
        Path(planned.folder),
        planned.card_name,
        pooling=model.pooling,
        reranker=model.reranker,
        accept_config=plan.accept_config,
        adapters=plan.adapters,
        prompts=model.options.get("prompts"),
        tokenizer=model.options.get("tokenizer"),
    )


def check_files(planned: Planned) -> None:
    """Raise SetupError if the files of a model are not those of its plan any more."""
    plan = planned.plan
    if (now := revision_of(Path(planned.folder), plan.commit, plan.adapters)) != plan.revision:
        raise SetupError(f"its files are others than when it was first loaded: {plan.revision} before, {now} now.")


ToEngine: TypeAlias = Submit | Cancel
FromEngine: TypeAlias = EngineAnswer | Failed
ControlEngine: TypeAlias = Load | Attach | Notice
ReportEngine: TypeAlias = Phase | BytesRead | Planned | Ready | CannotStart
OfModel: TypeAlias = ModelConfig | EngineDown | Quarantine | Release | Resides
ControlWorker: TypeAlias = WorkerConfig | OfModel | Served | Limits | EngineUp | Fetched | Outcome | Notice
ReportWorker: TypeAlias = Prepared | Connected | Released | Wanted | Quarantine | Alive | Command | Abandoned | Notice
ReportDownload: TypeAlias = Fetched | CannotStart


def failed(uid: int, error: WhimbrelError) -> Failed:
    retry_after = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
    if isinstance(error, InvalidRequest) and error.hint is not None:
        return Failed(uid, error.code, error.statement, error.location, retry_after, error.hint.name)
    return Failed(uid, error.code, error.message, error.location, retry_after)


def error_of(message: Failed) -> WhimbrelError:
    kind = _KINDS.get(message.code, WhimbrelError)
    if issubclass(kind, Overloaded | Unavailable):
        return kind(message.message, retry_after=message.retry_after)
    if message.hint is not None and issubclass(kind, InvalidRequest):
        return kind(message.message, location=message.location, hint=Hint[message.hint])
    return kind(message.message, location=message.location)


_KINDS: Final = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WhimbrelError)
}
