"""Limits of an HTTP connection.

Times are in seconds, sizes in bytes, rates in bytes per second. Only the side that holds the socket can keep these limits.
"""

import socket
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec

PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=2**40)]

BACKLOG: Final = 1024
"""Connections that wait to be accepted."""


def _seconds(text: str) -> msgspec.Meta:
    return msgspec.Meta(gt=0, le=86_400, description=text)


def _number(text: str) -> msgspec.Meta:
    return msgspec.Meta(gt=0, le=2**40, description=text)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes, times and rates that clients must keep to on a connection, and the number of connections."""

    max_header_bytes: Annotated[int, _number("Size of path, query and headers together.")] = 64 * 2**10
    max_headers: Annotated[int, _number("Headers of one request, with those after its body.")] = 100
    header_timeout: Annotated[
        float,
        _seconds(
            "Time for a whole head, from the start of the connection or the end of the last answer. Then the connection is cut."
        ),
    ] = 10.0
    body_idle_timeout: Annotated[float, _seconds("Longest pause within a body.")] = 15.0
    min_body_rate: Annotated[int, _number("Lowest average rate of a body that takes longer than `body_idle_timeout`.")] = 1000
    body_timeout: Annotated[float, _seconds("Time for a whole body.")] = 600.0
    write_pause: Annotated[
        float, _seconds("Longest time in which a client takes nothing of an answer. The kernel keeps the same limit.")
    ] = 60.0
    min_write_rate: Annotated[int, _number("Lowest average rate of an answer that takes longer than `write_pause`.")] = 10_000
    lingering_bytes: Annotated[
        int,
        _number("Unwanted bytes that are read after the last answer, so that a client that writes first can read the answer."),
    ] = 64 * 2**20
    lingering_timeout: Annotated[float, _seconds("Time in which these bytes are read.")] = 5.0
    max_connections: Annotated[int, _number("Open connections of one process. Further ones wait to be accepted.")] = 1024


def limit_silence(listener: socket.socket, seconds: float) -> None:
    """Let the kernel cut connections accepted from now on if the client takes nothing for this long. Only on Linux."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
