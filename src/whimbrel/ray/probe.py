"""A model on a cluster as the start of a run sees it: an actor loads it and answers the probe text.

The machine that starts a run needs neither a GPU nor PyTorch. The actor ends before those of the run begin, as there may be
room for one only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from whimbrel.bulk.embedder import Answer, RequestSizes
from whimbrel.bulk.manifest import VERSIONS, Text
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.ray.cluster import ActorPool, ActorResources
from whimbrel.ray.modules import ray_module
from whimbrel.ray.sources import RemoteError, Source, load_same
from whimbrel.types.arrays import Int32Array

_TRACEBACK: Final = "Traceback (most recent call last):"
_OTHER_CODE: Final = ("ModuleNotFoundError", "ImportError", "AttributeError")
"""Errors of a node that lacks a package, or has another version of it."""


class ClusterEmbedder:
    """An embedder that runs in an actor. It answers the questions of a run's start."""

    model: str
    revision: str
    settings: dict[str, Any]
    labels: tuple[str, ...]
    sizes: RequestSizes

    def __init__(self, source: Source, pool: ActorPool, resources: ActorResources, tell: Callable[[str], None]) -> None:
        """Load the model. Raises SetupError."""
        self.source = source
        self.pool = pool
        self.resources = resources
        self._ray = ray_module()
        tell(f"loading the model in an actor, when a node has {resources} free")
        remote = self._ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus)(_Model)
        self._actor: Any = remote.remote(source, resources.cores, VERSIONS)
        about = self._ask("about")
        self.model, self.revision, self.settings, self.labels, self.sizes = about

    def run(self, texts: Sequence[Text]) -> Answer:
        return self._ask("run", texts)

    def token_offsets(self, texts: Sequence[str]) -> list[Int32Array]:
        return self._ask("token_offsets", texts)

    def check_chunks(self, tokens: int) -> None:
        self._ask("check_chunks", tokens)

    def stop(self) -> None:
        """End the actor, so that others have its place."""
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            answer = self._ray.get(self._actor.ask.remote(name, *arguments))
        except self._ray.exceptions.RayError as error:
            raise lost(error) from error
        if isinstance(answer, RemoteError):
            raise answer.here()
        return answer


def lost(error: BaseException) -> SetupError:
    """Return the error of a run that Ray has given up."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[-1] if any(line.endswith(_TRACEBACK) for line in lines) else lines[0]
    hint = "what is finished stays; the same command goes on"
    if line.startswith(_OTHER_CODE):
        hint = "all nodes need the packages of this machine: pip install 'whimbrel[serve,ray]'"
    return SetupError(f"Ray gave up: {line.rstrip('.')}.", hint=hint)


class _Model:
    """The actor."""

    def __init__(self, source: Source, cores: float | None, expected: Mapping[str, Any]) -> None:
        try:
            self._embedder = load_same(source, cores, expected)
            self._error = None
        except WhimbrelError as error:
            self._error = RemoteError.of(error)

    def ask(self, name: str, *arguments: Any) -> Any:
        if self._error is not None:
            return self._error
        embedder = self._embedder
        if name == "about":
            return embedder.model, embedder.revision, embedder.settings, embedder.labels, embedder.sizes
        try:
            return getattr(embedder, name)(*arguments)
        except WhimbrelError as error:
            return RemoteError.of(error)
