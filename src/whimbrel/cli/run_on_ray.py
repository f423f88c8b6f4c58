"""Options of `whimbrel run --ray`, and the model that they load in a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from typer.core import TyperCommand

from whimbrel.cli import console
from whimbrel.cli.flags import engine_arguments
from whimbrel.cli.shared_options import need
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.ray.probe import ClusterEmbedder

RAY_PANEL: Final = "Ray"
_CLUSTER: Final = "auto"
"""The address of --ray without one."""


class RunCommand(TyperCommand):
    """The command, whose --ray may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list[str]()
        for word, after in zip(args, [*args, "-"][1:], strict=True):
            given += [word, _CLUSTER] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, given)


class RayOptions(NamedTuple):
    """A cluster, and the actors of a run there."""

    address: str
    least: int
    most: int | None
    cpus: float | None
    gpus: float | None


def read_ray_options(address: str | None, actors: str | None, cpus: float | None, gpus: float | None) -> RayOptions | None:
    """Return the options of a run on a cluster, None for one here. Raises SetupError."""
    if address is None:
        named = {"actors": actors, "cpus": cpus, "gpus": gpus}
        if used := next((name for name, value in named.items() if value is not None), None):
            raise SetupError(f"--ray-{used} is for --ray.")
        return None
    need("ray", extra="ray")
    found = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", actors or "1")
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if most < least:
        raise SetupError(f"--ray-actors takes a number, or two as 1:8, not {actors}.")
    return RayOptions(address, least, None if actors is None else most, cpus, gpus)


@contextmanager
def on_cluster(
    given: Mapping[str, Any],
    cluster: RayOptions,
    model: str | None,
    outputs: Sequence[Any],
    options: Any,
    *,
    tell: Callable[[str], None],
    **_: Any,
) -> Generator[ClusterEmbedder]:
    """Connect to a cluster, and load a model there. Raises SetupError."""
    from whimbrel.ray.cluster import ActorPool, actor_resources, connected
    from whimbrel.ray.probe import ClusterEmbedder
    from whimbrel.ray.sources import EngineSource

    if model is not None and (folder := Path(model).expanduser()).is_dir():  # actors have other working folders
        model = str(folder.resolve())
    # Ray prints what it tries again, and has its own handler of SIGTERM
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), connected(cluster.address), console.signals_exit():
        pool = ActorPool(*cluster[1:])
        resources = actor_resources(pool, on_cpu=given.get("device") == "cpu", tell=tell)
        source = EngineSource(model, engine_arguments(given), tuple(outputs), options)
        embedder = ClusterEmbedder(source, pool, resources, tell)
        try:
            yield embedder
        finally:
            embedder.stop()
