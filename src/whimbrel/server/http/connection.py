"""HTTP/1.1 for an ASGI app: httptools reads, and what the app sends goes to the socket without a copy.

A connection works at one request at a time; others that came on it wait their turn, and meanwhile no more is read. Here are
those limits of GuardOptions that only a socket can keep: the size and time of a head, the pace of bodies and answers (in
exchange.py), and what is read of a body that nobody wants any more. What breaks HTTP is answered with 400 and ends the
connection.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope

from whimbrel.errors import HeadersTooLarge, InvalidRequest, Overloaded, WhimbrelError
from whimbrel.server.http.exchange import Headers, RequestResponseCycle, head_of
from whimbrel.server.http.limits import HttpLimits

RenderError: TypeAlias = Callable[[WhimbrelError], tuple[int, bytes]]
"""Return the status and the JSON body of an answer to bytes that are not HTTP."""

_MAX_OVERHEAD: Final = 2**17
"""Bytes in a row that are no body: a head, or what frames chunks. (What a head may really have is the app's to say.)"""
_MAX_WAITING: Final = 256
"""Requests that came while another of the same connection is at work."""
_BYTES_PER_BYTE: Final = 8
"""A byte of a body may come in so many, as the only one of its chunk."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_RESET: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One client. It enters itself into `connections`, and calls `on_lost` when it has left them."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        render_error: RenderError,
        connections: set[Connection],
        on_lost: Callable[[], None],
    ) -> None:
        self._app = app
        self.limits = limits
        self._render_error = render_error
        self._connections = connections
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = False
        self._replaying = False
        self._overhead = 0
        self._exchanges: deque[RequestResponseCycle] = deque()
        """Those not answered, as they came: the first is at work, and of the last there may be more to come."""
        self._error: WhimbrelError | None = None
        """The error that broke HTTP; nothing more is parsed."""
        self._discard_budget: int | None = None
        """Once the last answer is out: so much more is read of what still comes."""
        self._ended = False
        """Nothing more will come."""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.is_full = False
        """True if the transport holds enough."""
        self.room: asyncio.Future[None] | None = None
        """Future of the exchange that waits for room."""
        self.lost = False

    # The socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a head."""
        self.transport = cast(asyncio.Transport, transport)
        self._client = _address(transport, "peername")
        self._server = _address(transport, "sockname")
        self._connections.add(self)
        self._set_timer(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who read and write."""
        self.lost = True
        self._set_timer(None)
        if self._exchanges:
            self._exchanges[0].abort()
        self.resume_writing()
        self._exchanges.clear()
        self._error = None
        del self._parser  # they refer to us, and would be garbage only the collector finds
        self._connections.discard(self)
        self._on_lost()

    def eof_received(self) -> bool:
        """A client that stops in the middle of a request is told; one that has said all counts as gone."""
        if self._discard_budget is not None or not self._exchanges or self._exchanges[-1].complete:
            return False
        self._exchanges[-1].abort()
        self._ended = True
        return True

    def data_received(self, data: bytes) -> None:
        """Bytes of any part of a request, or of several."""
        if self._discard_budget is not None:
            self._discard_budget -= len(data)
            if self._discard_budget < 0:
                self.reset()
            return
        if self._error is not None:
            return
        self._overhead += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if cause is None:
                cause = InvalidRequest("what came is no HTTP/1.1 request.")
            elif not isinstance(cause, WhimbrelError):
                raise  # a bug: the loop logs it and ends the connection
            self._refuse(cause)
        else:
            if self._overhead > _MAX_OVERHEAD:
                self._refuse(HeadersTooLarge(f"path and headers have {self._overhead:,} bytes or more."))

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._reparse_after_upgrade()

    def _reparse_after_upgrade(self) -> None:
        """Parse the body that a client sends with a request for HTTP/2, as Java's client does. There the parser stops; another
        goes on.
        """
        headers = self._exchanges[-1].scope["headers"]
        framing = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in _FRAMING)
        self._parser = httptools.HttpRequestParser(self)
        self._replaying = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._replaying = False

    def _refuse(self, error: WhimbrelError) -> None:
        """Read no further. A request that is not whole is answered by the app, what is none by us, in its turn."""
        self._error = error
        self.pause()
        if not self._exchanges:
            self._answer_error(error)
        elif not self._exchanges[-1].complete:
            self._exchanges[-1].abort()

    def _answer_error(self, error: WhimbrelError) -> None:
        status, body = self._render_error(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.transport.writelines([head_of(status, headers), body])
        self._linger()

    # What the parser finds

    def on_message_begin(self) -> None:
        """A request."""
        self._in_head = True
        self._url = b""
        self._headers: Headers = []

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Trailers are none."""
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """It can be worked at."""
        self._in_head = False
        if self._replaying:
            return
        if len(self._exchanges) > _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} requests of this connection wait already; send fewer at a time.", retry_after=1)
        self._exchanges.append(RequestResponseCycle(self, self._scope(), keep_alive=self._parser.should_keep_alive()))
        if len(self._exchanges) == 1:
            self._start()
        else:
            self.pause()

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._overhead = max(0, self._overhead - _BYTES_PER_BYTE * len(body))
        self._exchanges[-1].feed(body)

    def on_message_complete(self) -> None:
        """Nothing of it is to come."""
        if not self._parser.should_upgrade():  # then all of its body is to come
            self._overhead = 0
            self._exchanges[-1].end()

    def _scope(self) -> Scope:
        version, headers = self._parser.get_http_version(), self._headers
        if len(self._url) > self.limits.max_header_bytes:
            raise HeadersTooLarge(f"the target has {len(self._url):,} bytes; the limit is {self.limits.max_header_bytes:,}.")
        try:
            url = httptools.parse_url(self._url)
            raw_path = url.path or b"/"
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, ValueError):
            raise InvalidRequest("the target of the request is no path.") from None
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"this is HTTP/{version}; the server speaks HTTP/1.1.")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in headers):
            raise InvalidRequest("HTTP/1.0 knows no Transfer-Encoding; send a Content-Length.")
        if url.host:  # then it is the host, whatever the header says (RFC 9112, 3.2.2)
            host = re.split(rb"[/?#]", self._url.partition(b"://")[2], maxsplit=1)[0]
            headers = [(name, host if name == b"host" else value) for name, value in headers]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "client": self._client,
            "server": self._server,
        }

    # One request after another

    def _start(self) -> None:
        self._set_timer(None)
        exchange = self._exchanges[0]
        exchange.task = self._loop.create_task(exchange.run(self._app))

    def answered(self, exchange: RequestResponseCycle) -> None:
        """All of an answer is with the transport."""
        if self.lost:
            return
        if exchange.keep_alive and exchange.complete:
            self._exchanges.popleft()
            self._next()
        elif self._ended or ((exchange.expects_continue or exchange.complete) and not self._paused):
            self.transport.close()
        else:
            self._linger()

    def _next(self) -> None:
        if self._exchanges:
            self._start()
        elif self._error is not None:
            self._answer_error(self._error)
        else:
            self._set_timer(self.limits.header_timeout)
        self.resume()

    def _linger(self) -> None:
        """Nothing more is said here. What the client still sends is read for a while, so that it gets to read the answer."""
        self._discard_budget = self.limits.lingering_bytes
        self._set_timer(self.limits.drain_timeout)
        self._exchanges.clear()
        self.resume()
        with suppress(OSError):  # the client has left, and we hear of it next
            self.transport.write_eof()

    def shut_down(self) -> None:
        """Close, once what is at work is answered."""
        if self._exchanges:
            self._exchanges[0].keep_alive = False
        elif self._discard_budget is None:  # otherwise it ends soon by itself
            self.transport.close()

    def reset(self) -> None:
        """End it now; nothing that waits to be sent is kept."""
        if not self.lost:
            if (sock := self.transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    def _set_timer(self, seconds: float | None) -> None:
        """After so long, the connection is closed whatever it does."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.transport.close)

    # Flow

    def pause(self) -> None:
        """Take nothing from the socket for now."""
        if not self._paused and not self.lost:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Take more, unless other requests wait or nothing can be read any more."""
        if (
            self._paused
            and not self.lost
            and len(self._exchanges) < 2
            and (self._error is None or self._discard_budget is not None)
        ):
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """The transport holds enough."""
        self.is_full = True

    def resume_writing(self) -> None:
        """There is room."""
        self.is_full = False
        if self.room is not None and not self.room.done():
            self.room.set_result(None)


def _address(transport: asyncio.BaseTransport, end: str) -> tuple[str, int] | None:
    """Return the host and port of one end of a connection. (IPv6 has more fields.)"""
    try:
        name = transport.get_extra_info(end)
    except OSError:  # the client has left already
        return None
    return None if name is None else (name[0], name[1])
