"""The nouns of the lanes: a job, the work of a batch, what they need of a runner and of a recorder. No torch, no threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.batch import Batch
from whimbrel.errors import WhimbrelError
from whimbrel.types import Float32Array, Int32Array, Prepared, Result, Seq, Timings


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """A request on its way: where its vectors go, and what is left to do."""

    future: Future[Result]
    prepared: Prepared
    vectors_ND: Float32Array
    """Nothing is written here any more once the Future is done."""
    tag: object = None
    """Whatever the owner of a recorder wants to know a job by."""
    queue: float = -1.0
    """Seconds until its first seq was taken; negative until then."""
    compute: float = 0.0
    waiting: int = field(init=False)
    """Texts not collected yet."""

    def __post_init__(self) -> None:
        self.waiting = len(self.prepared.seqs)

    @property
    def num_bytes(self) -> int:
        """Of its ids and its vectors, about."""
        return self.prepared.num_tokens * np.dtype(np.int32).itemsize + self.vectors_ND.nbytes

    def resolve(self) -> None:
        """Answer; the job is nobody else's any more."""
        prepared = self.prepared
        total = perf_counter() - prepared.received
        timings = Timings(prepared.tokenize, max(0.0, self.queue), self.compute, total)
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(Result(self.vectors_ND, prepared.num_tokens, prepared.num_truncated, timings))

    def fail(self, error: WhimbrelError) -> None:
        """Answer with an error; the job is nobody else's any more."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


Work: TypeAlias = list[tuple[Job, Seq]]
"""The seqs of one batch, each with its job."""


class Recorder(Protocol):
    """Is told what is on the device, so that another process can tell what was there when this one died.

    Called from several threads; must be quick and must not raise.
    """

    def started(self, work: Work) -> int:
        """These seqs are about to be launched, in this thread. Returns what `ended` is called with."""
        ...

    def resumed(self, slot: int) -> None:
        """The batch goes on, after another ran between its layers."""
        ...

    def ended(self, slot: int) -> None:
        """The batch was collected, or it failed."""
        ...


class AnyRunner(Protocol):
    """What lanes need of a runner; see `runner.Runner`."""

    def enter_lane(self) -> None:
        """Called once by each thread before it launches anything."""
        ...

    def launch(
        self,
        batch: Batch,
        dimensions_B: Int32Array,
        normalize_B: NDArray[np.bool_],
        between_layers: Callable[[], None] | None = None,
    ) -> Any:
        """Run a batch, or give it to the device. Raises MemoryError if there is no room for it."""
        ...

    def collect(self, pending: Any) -> Float32Array:
        """Wait for what `launch` returned: vectors in the order of the batch's seqs. Raises MemoryError as `launch`."""
        ...
