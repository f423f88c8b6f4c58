"""Residence of a served model: whether its engines are in memory, how much they take, and until when."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Residence:
    """State of a model in memory; by default that of one which is always loaded, of unknown size."""

    state: Literal["loaded", "loading", "unloaded", "failed"] = "loaded"
    memory_bytes: int = 0
    """Bytes of its engines on their device, as measured; 0 where that is not known."""
    expires_at: float | None = None
    """Seconds since the epoch at which it is unloaded if no request comes; None: it stays."""
