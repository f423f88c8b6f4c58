"""What the processes say to one another: msgpack, one struct per message, tagged by its name.

Arrays travel beside the messages, in shared memory (`shared`), unless they are small.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from whimbrel.errors import Hint, InvalidRequest, Location, Overloaded, Unavailable, WhimbrelError
from whimbrel.server.app.limits import ServerLimits
from whimbrel.telemetry.logs import LogOptions
from whimbrel.types.card import PoolingOption, RerankerName
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.plan import Options, Plan
from whimbrel.types.request import OutputName, Similarity

StoredKind: TypeAlias = tuple[str, int, int, int, bool]
"""Of vectors that came with a request: their type, how many texts, rows and columns, and whether they are sparse."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# Between a worker and an engine.


class Submit(_Message):
    """A tokenised request. Its arrays (`seqs.pack`) lie in `segment`, or in `arrays` if that is 0."""

    uid: int
    segment: int
    segment_bytes: int
    """Size of a segment that is new, whose descriptor comes with this message; 0 if the engine has it already."""
    arrays: memoryview
    num_seqs: int
    num_spans: int
    specs: list[tuple[OutputName, int, bool, int, bool]]
    """The fields of outputs.Ask."""
    num_tokens: int
    num_truncated: int
    received: float
    tokenize: float
    priority: int
    deadline: float
    tenant: str
    suspects: dict[int, int]
    admitted: bool
    """Whether another life of an engine had admitted it, so that it must not be refused for overload."""
    compare: tuple[OutputName, Similarity, int, bool] | None = None
    """Of a comparison its output, its similarity, how many pairs it has, which come after the seqs, and whether it explains."""
    stored: list[StoredKind] = []
    """These vectors come last."""
    pooling: TokenPooling | None = None
    """Of documents that are compared by their token vectors."""


class Cancel(_Message):
    """The caller left."""

    uid: int


class Drop(_Message):
    """A segment will not be used again."""

    segment: int


class EngineAnswer(_Message):
    """The outputs, in the request's segment or in `memory`; what has no place there in `entries`; and the timings."""

    uid: int
    memory: memoryview
    entries: memoryview
    """int64 of the offsets, int32 of the ids, float32 of the weights; or nothing."""
    entries_bytes: int
    """Size of the memory in which those lie instead, if they are many; its descriptor comes with this message."""
    queue: float
    compute: float


class Failed(_Message):
    """The request got an error. Each Submit gets one Answer or one Failed, also after a Cancel."""

    uid: int
    code: str
    message: str
    location: Location | None
    retry_after: float
    hint: str | None = None
    """The name of a Hint; the message is without its sentence."""


# Between the supervisor and an engine.


class Load(_Message):
    """What an engine process is to run; its first message."""

    model: str | None
    pooling: PoolingOption | None
    options: Options
    name: str
    """Of the process, e.g. "engine-0-0"."""
    logs: LogOptions
    reranker: RerankerName | None = None


class Phase(_Message):
    """What an engine is about to do while it loads."""

    text: str


class Planned(_Message):
    """How the engine will run the model; sent before the weights are loaded."""

    folder: str
    card_name: str
    plan: Plan


class Ready(_Message):
    """The engine takes work. The descriptor of its board comes with this message."""

    board_bytes: int
    plan: Plan
    """With what was found out while the weights were loaded."""


class CannotStart(_Message):
    """The engine could not be loaded, and why."""

    message: str
    hint: str | None


class Attach(_Message):
    """A worker's end of the line comes with this message, as a descriptor."""

    worker: int


class Stop(_Message):
    """Finish what was accepted and end."""


# Between the supervisor and a worker.


class WorkerConfig(_Message):
    """What a worker is to do; its first message. The listening socket comes with it."""

    guards: ServerLimits
    num_models: int
    num_known: int
    """Models that are known already: as many Model messages follow at once."""
    num_replicas: int
    num_workers: int
    name: str
    """Of the process, e.g. "worker-0"."""
    index: int
    logs: LogOptions
    otel: bool


class ModelConfig(_Message):
    """A model is known: its tokenizer can be loaded."""

    model: int
    pooling: PoolingOption | None
    folder: str
    card_name: str
    plan: Plan
    reranker: RerankerName | None = None


class EngineUp(_Message):
    """An engine is ready. The line to it and its board come with this message, as descriptors."""

    model: int
    replica: int
    board_bytes: int
    plan: Plan


class EngineDown(_Message):
    """An engine is not ready, and why: before its first life, after a death, or while it loads again."""

    model: int
    replica: int
    reason: str
    blame: float
    """How far its death speaks against what it ran: 1 for a crash of its own or a hang, less for a kill from outside."""
    failing: bool
    """Whether it keeps dying, so that nobody should wait for it."""
    retry_after: float


class Quarantine(_Message):
    """Engines die of a text: of this digest of its ids. From a worker, and from the supervisor to all others."""

    model: int
    digest: bytes


class Drain(_Message):
    """Refuse what comes, finish what was accepted, say so with Drained."""


class AbortRequests(_Message):
    """Answer what is left with an error."""


class Started(_Message):
    """The worker answers."""


class Drained(_Message):
    """The worker has nothing left to answer."""


class Heartbeat(_Message):
    """The worker's event loop turns."""


ToEngine: TypeAlias = Submit | Cancel | Drop
FromEngine: TypeAlias = EngineAnswer | Failed
ControlEngine: TypeAlias = Load | Attach | Stop
ReportEngine: TypeAlias = Phase | Planned | Ready | CannotStart
ControlWorker: TypeAlias = WorkerConfig | ModelConfig | EngineUp | EngineDown | Quarantine | Drain | AbortRequests | Stop
ReportWorker: TypeAlias = Started | Drained | Heartbeat | Quarantine


def failed(uid: int, error: WhimbrelError) -> Failed:
    """The message that stands for an error."""
    retry_after = error.retry_after if isinstance(error, Overloaded | Unavailable) else 0.0
    if isinstance(error, InvalidRequest) and error.hint is not None:
        return Failed(uid, error.code, error.statement, error.location, retry_after, error.hint.name)
    return Failed(uid, error.code, error.message, error.location, retry_after)


def error_of(message: Failed) -> WhimbrelError:
    """The error that a message stands for."""
    kind = _KINDS.get(message.code, WhimbrelError)
    if kind is Overloaded or kind is Unavailable:
        return kind(message.message, retry_after=message.retry_after)
    if message.hint is not None and issubclass(kind, InvalidRequest):
        return kind(message.message, location=message.location, hint=Hint[message.hint])
    return kind(message.message, location=message.location)


def _kinds(kind: type[WhimbrelError]) -> dict[str, type[WhimbrelError]]:
    found = {kind.code: kind}
    for inner in kind.__subclasses__():
        found |= _kinds(inner)
    return found


_KINDS: Final = _kinds(WhimbrelError)
