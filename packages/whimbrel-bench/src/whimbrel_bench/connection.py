"""HTTP/1.1 connection of a load generator.

It carries one request at a time. Requests are bytes that were made before. Of a body it keeps the two ends, which hold the
usage and the message of an error, unless all is asked for.
"""

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, cast

import httptools

_STALE: Final = 0.5
"""Seconds after which an idle connection may be closed by the server at any moment."""
CLOSED: Final = "the server closed the connection before an answer"
CLOSED_MIDWAY: Final = "the server closed the connection in the middle of the answer"
END_BYTES: Final = 1024
"""Bytes of a body that are kept at its start, and as many at its end."""


class NoAnswer(Exception):
    """A request has no answer, for the reason in words."""


@dataclass(slots=True)
class Answer:
    """Response to one request."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    head: bytes = b""
    """The first bytes of the body."""
    tail: bytes = b""
    """The last bytes of the body."""
    size: int = 0
    num_rows: int = 0
    """Number of row marks in the body, if they are counted."""
    body: list[bytes] = field(default_factory=list[bytes])
    """All of the body, if it is kept."""


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, *, keep_bodies: bool = False, row_mark: bytes = b"") -> None:
        self.sent = 0.0
        """Time at which the present request was sent."""
        self.ended = 0.0
        """Time at which the latest answer ended."""
        self.keep_alive = True
        self._idle_seconds = 0.0
        self._keep_bodies = keep_bodies
        self._row_mark = row_mark
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._waiter: asyncio.Future[Answer] | None = None
        self._received = False
        self._complete = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def was_stale(self) -> bool:
        """True if the connection had been idle for a while and nothing came since: the server may have closed it already."""
        return self._idle_seconds >= _STALE and not self._received

    def send(self, payload: bytes) -> asyncio.Future[Answer]:
        """Send a request. Its answer raises NoAnswer if the connection breaks."""
        assert self._transport is not None
        self.sent = monotonic()
        self._idle_seconds = self.sent - self.ended if self.ended else 0.0
        self._answer, self._received = Answer(), False
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self.is_open:
            self._transport.write(payload)
        else:
            self._end(None, CLOSED)
        return waiter

    def close(self, reason: str = "") -> None:
        """Close at once. A request on its way ends with `reason`."""
        if self._transport is not None:
            self._transport.abort()
        self._end(None, reason)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()  # bytes that belong to no request
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self.close(f"the answer is not HTTP/1.1: {error}")
            return
        if self._complete:  # not within the parser's call, since the next request has a parser of its own
            self._complete = False
            self._end(self._answer, "")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and self._received and self._ends_with_connection():
            self._answer.status = self._parser.get_status_code()
            self._end(self._answer, "")
            return
        self._end(None, CLOSED_MIDWAY if self._received else CLOSED)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        answer.size += len(body)
        if mark := self._row_mark:  # also one that two pieces of the body share
            side = len(mark) - 1
            answer.num_rows += body.count(mark) + (answer.tail[-side:] + body[:side]).count(mark)
        if len(answer.head) < END_BYTES:
            answer.head += body[: END_BYTES - len(answer.head)]
        answer.tail = body[-END_BYTES:] if len(body) >= END_BYTES else (answer.tail + body)[-END_BYTES:]
        if self._keep_bodies:
            answer.body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue
            self._answer = Answer()
            return
        self.keep_alive = self._parser.should_keep_alive()
        self._answer.status = self._parser.get_status_code()
        self._complete = True

    def _ends_with_connection(self) -> bool:
        """Return whether the end of the connection is the end of the body: it has no length of its own."""
        headers = self._answer.headers
        return bool(headers) and b"content-length" not in headers and b"transfer-encoding" not in headers

    def _end(self, answer: Answer | None, reason: str) -> None:
        waiter, self._waiter = self._waiter, None
        self.ended = monotonic()
        if waiter is None or waiter.done():
            return
        if answer is None:
            waiter.set_exception(NoAnswer(reason))
        else:
            waiter.set_result(answer)
