"""Scheduling of a request: its owner, its urgency and its deadline.

A value beside the `Request`, which knows none of these. It reaches the scheduler unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Annotated, Final

from msgspec import Meta

from whimbrel.errors import InvalidRequest
from whimbrel.types.validation import fields_struct, validate


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The time at which a request runs, and the seqs beside which it may run. Raises InvalidRequest for wrong values."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Rank in the queue: lower numbers run first, as in vLLM."""
    deadline: float = inf
    """Time (time.perf_counter) after which the request fails instead of running."""
    tenant: str = ""
    """Owner of the request. Tenants share an engine evenly, and so do the requests of a tenant."""
    waited: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """Seconds that the caller has waited in earlier tries. The request keeps the place of the first."""
    suspects: Mapping[int, int] = field(default_factory=dict[int, int])
    """Seqs that were on the device when an engine died, and the number of seqs that each may share a batch with."""

    def __post_init__(self) -> None:
        validate(self, _Scalars)
        if isnan(self.deadline):
            raise InvalidRequest("must be a number, is NaN.", param="deadline")


_Scalars: Final = fields_struct(Scheduling, without=("suspects",))

ORDINARY: Final = Scheduling()
"""The scheduling of a request that says nothing of it."""
