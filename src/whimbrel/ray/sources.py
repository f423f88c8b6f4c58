"""Sources of models: everything that another process needs to load the same model with the same settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any, NamedTuple, Protocol

from whimbrel.bulk.embedder import Embedder, EngineEmbedder
from whimbrel.bulk.manifest import VERSIONS
from whimbrel.engine.engine import Engine
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.types.machine_limits import read_limits
from whimbrel.types.options import TextOptions
from whimbrel.types.request import OutputName


class Source(Protocol):
    """A model that any process can load. It can be pickled."""

    def load(self, cores: float | None) -> Embedder:
        """Load the model, to compute on this number of cores; None: on all. Raises WhimbrelError."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine's arguments, and those of the requests to it."""

    model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: tuple[OutputName, ...] = ()
    options: TextOptions = field(default_factory=TextOptions)

    def load(self, cores: float | None) -> Embedder:
        return EngineEmbedder(Engine(self.model, **(share_of(cores) | self.arguments)), self.outputs, self.options)


def share_of(cores: float | None) -> dict[str, Any]:
    """Return the option of an engine that computes on this number of the machine's cores."""
    return {} if cores is None else {"num_replicas": max(1, int(read_limits().usable_cores / max(1.0, cores)))}


def identity(embedder: Embedder) -> dict[str, Any]:
    """Return everything of a process that the output depends on."""
    return {**VERSIONS, "model": embedder.model, "revision": embedder.revision, **embedder.settings}


def load_same(source: Source, cores: float | None, expected: Mapping[str, Any]) -> Embedder:
    """Load a model in this process, whose `identity` must have the `expected` values. Raises WhimbrelError."""
    _check_same(expected, VERSIONS)
    embedder = source.load(cores)
    _check_same(expected, identity(embedder))
    return embedder


def _check_same(expected: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for name, value in here.items():
        if (other := expected.get(name, value)) != value:
            message = f"the node {gethostname()} has another {name}: {value}, and not {other}."
            raise SetupError(message, hint="all nodes need the same packages and kind of device; --dtype fixes the dtype")


class RemoteError(NamedTuple):
    """An error of another process, as a value: so it is neither retried nor wrapped."""

    message: str
    hint: str | None

    @classmethod
    def of(cls, error: WhimbrelError) -> "RemoteError":
        return cls(str(error), error.hint if isinstance(error, SetupError) else None)

    def here(self) -> SetupError:
        """Return the error to raise in this process."""
        return SetupError(self.message, hint=self.hint)
