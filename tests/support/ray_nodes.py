"""A Ray cluster of several nodes on this machine, and models that make vectors of hashes in its actors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulk_runs import HashEmbedder
from whimbrel.bulk.embedder import Answer, Embedder
from whimbrel.errors import SetupError

MEMORY = 80 * 1024 * 1024
"""Bytes of each node's store of objects; Ray takes no less than 75 MiB."""


@contextmanager
def nodes(count: int) -> Iterator[Any]:
    """Start a head without processors and some nodes of one processor each, and connect this process.

    The head's node is that of the driver, so any other may be killed. All are gone at the end, whatever happens.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # for the actors
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass(frozen=True)
class HashSource:
    """A model of hashes. `folder` keeps what happened once."""

    folder: str
    seconds: float = 0.0
    """Time of a request of up to seven texts."""
    deadly: str = ""
    """A text that kills the process, the first time that a process gets it."""
    always: bool = False
    """The text kills every time."""
    other: bool = False
    """The second process that loads the model has another revision."""
    broken: bool = False
    """The second process cannot load it."""

    def load(self, cores: float | None) -> Embedder:
        loads = len(list(Path(self.folder).glob("loaded-*")))
        (Path(self.folder) / f"loaded-{os.getpid()}-{time.time_ns()}").touch()
        if self.broken and loads:
            raise SetupError("the weights are gone.", hint="copy them")
        return _Deadly(self, revision="r2" if self.other and loads else "r1")


class _Deadly(HashEmbedder):
    def __init__(self, source: HashSource, revision: str) -> None:
        super().__init__(revision=revision, seconds=source.seconds)
        self._source = source

    def run(self, texts: Sequence[Any]) -> Answer:
        source = self._source
        if source.deadly and source.deadly in texts:
            killed = Path(source.folder) / "killed"
            if source.always or not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().run(texts)
