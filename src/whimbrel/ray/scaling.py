"""Number of replicas by the tokens that wait. Pure, and all that the controller of Ray Serve needs to know."""

from typing import Any

WAITING = "waiting_tokens"
"""The statistic that replicas report."""


class WaitingTokens:
    """A policy of Ray Serve: as many replicas as have `per_replica` tokens waiting each, and one fewer at a time.

    An engine that is busy may have an empty queue. So one replica fewer is tried, and not all of them at once. Serve's delay
    for smaller numbers lies between two tries.
    """

    def __init__(self, per_replica: float) -> None:
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        metrics: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING, {}).values())
        return max(waiting / self._per_replica, context.current_num_replicas - 1), {}
