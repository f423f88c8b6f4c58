"""Jobs: requests on their way through the lanes, and the interfaces that the lanes need. No torch, no threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.outputs.finishers import Finisher
from whimbrel.outputs.rows import OutputRows, RowSelection
from whimbrel.types.batch import Batch
from whimbrel.types.request import OutputName
from whimbrel.types.result import Result
from whimbrel.types.seq import Seq

_ID_BYTES = 4


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """A request on its way. The dispatcher owns it: whoever removes it from there sets its Future."""

    future: Future[Result]
    request: EngineRequest
    finisher: Finisher
    origin: object = None
    """The name that an observer of batches knows the job by."""
    queue: float = -1.0
    """Seconds until its first seq was taken; negative until then."""
    compute: float = 0.0
    """Seconds of the batches that its seqs took part in."""
    seqs: Sequence[Seq] = field(init=False)
    """The seqs that are computed: those of the request whose rows are not known yet."""
    num_tokens: int = field(init=False)
    """Tokens of these seqs."""
    num_pending: int = field(init=False)
    """Seqs that are not collected yet, and steps of the finisher that have not run."""

    def __post_init__(self) -> None:
        skipped = self.finisher.skipped_seqs
        self.seqs = [seq for seq in self.request.seqs if seq.index not in skipped] if skipped else self.request.seqs
        self.num_tokens = sum(seq.ids.size for seq in self.seqs)
        self.num_pending = len(self.seqs) + self.finisher.num_steps

    @property
    def num_bytes(self) -> int:
        """Memory of its token ids, its response and its finisher, in bytes."""
        return _ID_BYTES * self.num_tokens + self.request.response.num_bytes + self.finisher.num_bytes


BatchItems: TypeAlias = list[tuple[Job, Seq]]
"""The seqs of one batch, each with its job."""


class BatchObserver(Protocol):
    """Is told which batches are on the device, so that another process can tell what ran when this one died.

    Called from several threads; must be quick and must not raise.
    """

    def started(self, items: BatchItems) -> int:
        """Note that these seqs are about to be launched by this thread. Return the slot that `ended` is called with."""
        ...

    def resumed(self, slot: int) -> None:
        """Note that the batch goes on after another ran between its layers."""
        ...

    def ended(self, slot: int) -> None:
        """Note that the batch was collected, or failed."""
        ...


class RunnerProtocol(Protocol):
    """The interface that lanes need of a runner; see model/runner.py."""

    @property
    def unstable(self) -> Sequence[str]:
        """The parts of the model that may give a text other bits in other batches."""
        ...

    def init_thread(self) -> None:
        """Prepare the calling thread; called once by each thread before it launches anything."""
        ...

    def launch(
        self, batch: Batch, selections: Mapping[OutputName, RowSelection], between_layers: Callable[[], None] | None = None
    ) -> Any:
        """Run a batch, or give it to the device. Return the pending batch. Raises MemoryError if there is no room for it."""
        ...

    def collect(self, pending: Any) -> Mapping[OutputName, OutputRows]:
        """Wait for a pending batch and return the selected rows. Raises MemoryError as `launch`."""
        ...
