"""Operations: effects on the server itself that a request asks for beside or in place of its answer.

They are carried out for operators only, by a server that can change its models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Keep:
    """The time for which the model that answers stays loaded."""

    seconds: float
    """Time after its last request. 0: it is unloaded; infinite: it stays, unless its memory is needed."""
    loads: bool
    """True if the request has no texts, so that it only loads the model."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A model to fetch from the hub and to serve, and the pieces of the answer."""

    model: str
    media_type: str
    opening: bytes
    """The first piece, sent at once. Empty: there is one piece, with the status of the outcome."""
    progress: Callable[[str, int, int], bytes]
    """Return the piece over a file, by its digest, its size and the bytes that are on the disk."""
    closing: bytes
    """The last piece of a success."""
    failure: Callable[[str], bytes]
    """Return the last piece of a failure, by its reason."""


Operation: TypeAlias = Keep | Pull
