"""Clusters of Ray: the connection to one, and the resources of the actors that run there."""

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

from whimbrel.errors import SetupError
from whimbrel.ray.modules import ray_module

AUTO: Final = "auto"
LOCAL: Final = "local"


class ActorPool(NamedTuple):
    """The actors of a run as a user asks for them. Each holds an engine."""

    least: int = 1
    most: int | None = None
    """None: as many as the cluster has room for, also when it grows."""
    cpus: float | None = None
    """None: one beside a GPU, else all of the largest node."""
    gpus: float | None = None
    """None: one if the cluster has any."""


class ActorResources(NamedTuple):
    """Share of its node that an actor takes."""

    cpus: float
    gpus: float

    @property
    def cores(self) -> float | None:
        """Cores on which its engine computes; None: a GPU does."""
        return None if self.gpus else self.cpus

    def __str__(self) -> str:
        return " and ".join(f"{number:g} {name}" for number, name in ((self.cpus, "CPUs"), (self.gpus, "GPUs")) if number)


@contextmanager
def connected(address: str) -> Generator[None]:
    """Connect this process to a cluster, for the block. Raises SetupError.

    `auto` is the cluster of RAY_ADDRESS or of this machine, `local` one that is started here for the block.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        given["include_dashboard"] = False
    try:
        ray.init(address, **given)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        hint = "--ray takes HOST:PORT of a cluster's head, auto on a machine of the cluster, or local to start one here"
        raise SetupError(f"cannot reach Ray at {address}: {reason}.", hint=hint) from None
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def actor_resources(pool: ActorPool, *, on_cpu: bool, tell: Callable[[str], None]) -> ActorResources:
    """Return the resources of each actor in this cluster. `on_cpu`: the model is not to run on a GPU.

    What no node has yet may come with a new one, so it is told and not refused.
    """
    nodes = _nodes()
    has_gpu = any(node.get("GPU", 0) for node in nodes)
    gpus = float(has_gpu and not on_cpu) if pool.gpus is None else pool.gpus
    most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
    cpus = (1.0 if gpus else max(1.0, most)) if pool.cpus is None else pool.cpus
    wanted = ActorResources(cpus, gpus)
    if not _room(nodes, wanted):
        tell(f"no node has {wanted} yet; waiting for one")
    return wanted


def room_for(wanted: ActorResources) -> int:
    """Return how many actors the nodes of the cluster hold."""
    return _room(_nodes(), wanted)


def _room(nodes: list[Mapping[str, float]], wanted: ActorResources) -> int:
    places = 0
    for node in nodes:
        by_name = [(node.get("CPU", 0.0), wanted.cpus), (node.get("GPU", 0.0), wanted.gpus)]
        places += min(int(there / number) for there, number in by_name if number)
    return places


def _nodes() -> list[Mapping[str, float]]:
    """Return the resources of each node that lives."""
    found = cast("list[Mapping[str, Any]]", ray_module().nodes())
    return [cast("Mapping[str, float]", node["Resources"]) for node in found if node["Alive"]]
