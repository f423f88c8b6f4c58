"""HTTP limits: the sizes, times and rates that a socket keeps. Times are in seconds, rates in bytes per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of connections, heads, bodies and answers."""

    max_header_bytes: int = 64 * 2**10
    """Limit of path, query and headers together."""
    header_timeout: float = 10.0
    """Time for a whole head; then the connection is closed, also one that is kept alive."""

    body_idle_timeout: float = 15.0
    """Time that a body may stand still."""
    min_body_rate: int = 1000
    """Least average rate of a body, once it takes longer than `body_idle_timeout`."""
    body_timeout: float = 600.0
    """Time for a whole body."""

    write_pause: float = 60.0
    """Time that an answer may stand still; also for bytes that the kernel has not sent."""
    min_write_rate: int = 10_000
    """Least average rate at which an answer is read, once that takes longer than `write_pause`."""

    lingering_bytes: int = 64 * 2**20
    """Bytes of an unwanted body that are read after the answer, so that a client that writes first gets to read it."""
    drain_timeout: float = 5.0
    """Time for reading such a body."""
    max_connections: int = 1024
    """Connections of this process; further ones wait to be accepted."""
