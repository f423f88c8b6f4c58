"""Limits of an HTTP connection.

Times are in seconds, sizes in bytes, rates in bytes per second. Only the side that holds the socket can keep these limits.
"""
# ruff: noqa: RUF009  # the calls make fields

import socket
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

PositiveInt: TypeAlias = Annotated[int, Meta(gt=0, le=2**40)]
_Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]

BACKLOG: Final = 1024
"""Connections that wait to be accepted."""


def setting(default: Any, text: str, metavar: str = "", **terms: Any) -> Any:
    """Return a field that is a setting of the server, with its sentence and the other terms of a row of its table."""
    return field(default=default, metadata={"text": text, "metavar": metavar, **terms})


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes, times and rates that clients must keep to on a connection, and the number of connections."""

    max_header_bytes: PositiveInt = setting(64 * 2**10, "Size of path, query and headers together.")
    max_headers: PositiveInt = setting(100, "Headers of one request, with those after its body.")
    header_timeout: _Seconds = setting(
        10.0,
        "Time for a whole head, from the start of the connection or the end of the last answer. Then the connection is cut.",
    )
    body_idle_timeout: _Seconds = setting(15.0, "Longest pause within a body.")
    min_body_rate: PositiveInt = setting(1000, "Lowest average rate of a body that takes longer than `body_idle_timeout`.")
    body_timeout: _Seconds = setting(600.0, "Time for a whole body.")
    write_pause: _Seconds = setting(
        60.0, "Longest time in which a client takes nothing of an answer. The kernel keeps the same limit."
    )
    min_write_rate: PositiveInt = setting(10_000, "Lowest average rate of an answer that takes longer than `write_pause`.")
    lingering_bytes: PositiveInt = setting(
        64 * 2**20,
        "Unwanted bytes that are read after the last answer, so that a client that writes first can read the answer.",
    )
    lingering_timeout: _Seconds = setting(5.0, "Time in which these bytes are read.")
    max_connections: PositiveInt = setting(1024, "Open connections of one process. Further ones wait to be accepted.")


def limit_silence(listener: socket.socket, seconds: float) -> None:
    """Let the kernel cut connections accepted from now on if the client takes nothing for this long. Only on Linux."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
