"""Clusters of Ray: the connection to one, and the resources of the actors that run there."""

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from socket import create_connection
from typing import Any, Final, NamedTuple, cast

from whimbrel.errors import SetupError
from whimbrel.ray.modules import ray_module

AUTO: Final = "auto"
LOCAL: Final = "local"
_VARIABLE: Final = "RAY_ADDRESS"
_REACH_SECONDS: Final = 10.0
_PORTS: Final = 2**16
_STDERR: Final = 2


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
        named = ((self.cpus, "CPU"), (self.gpus, "GPU"))
        return " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for number, name in named if number)


@contextmanager
def connected(address: str) -> Generator[None]:
    """Connect this process to a cluster, for the block. Raises SetupError.

    `auto` is the cluster of RAY_ADDRESS or of this machine, `local` one that is started here for the block.
    """
    if address == AUTO:
        address = os.environ.get(_VARIABLE) or AUTO
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        given["include_dashboard"] = False
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # tries of 40 s to find a cluster that is gone; Ray's are 20
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its other lines on stderr would break the progress
    ray = ray_module()
    try:
        _check_reachable(address)
        with _without_stderr():
            ray.init(address, **given)
    except Exception as error:  # Ray raises Exception too
        hint = "--ray takes HOST:PORT of a cluster's head, auto on a machine of the cluster, or local to start one here"
        raise SetupError(f"cannot reach Ray at {address}: {_reason(error)}.", hint=hint) from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _without_stderr() -> Generator[None]:
    """Drop everything that native code writes to stderr in the block: Ray logs there that it logs less."""
    stderr, nothing = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, _STDERR)
    try:
        yield
    finally:
        os.dup2(stderr, _STDERR)
        os.close(stderr)
        os.close(nothing)


def _check_reachable(address: str) -> None:
    """Raise an error for an address at which nothing listens. Ray would try for a quarter of an hour."""
    if "://" in address:
        raise ValueError("runs take no URLs of Ray Client or of jobs")
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and int(port) < _PORTS:
        create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()


def _reason(error: Exception) -> str:
    """Return an error in a line: the first that Ray says, or all where versions differ."""
    text = str(getattr(error, "strerror", None) or error)
    lines = text.splitlines() if text.startswith("Version mismatch") else text.splitlines()[:1]
    return " ".join(" ".join(lines).split()).rstrip(".")


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
