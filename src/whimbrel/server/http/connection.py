"""HTTP/1.1 connections of an ASGI app. httptools parses, and answers go to the socket without a copy.

A connection runs one request at a time. Further ones on it wait in order, and meanwhile nothing is read. The connection
enforces size and time of heads and discards unwanted bodies; exchange.py bounds the rates of bodies and answers. Malformed HTTP
gets status 400 and ends the connection.
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
from whimbrel.server.http.exchange import Headers, RequestResponseCycle, encode_head
from whimbrel.server.http.limits import HttpLimits

RenderError: TypeAlias = Callable[[WhimbrelError], tuple[int, bytes]]
"""Function that returns the status and the JSON body of the answer to malformed HTTP."""

_MAX_OVERHEAD: Final = 2**17
"""Limit of consecutive bytes that are not a body: a head or chunk framing. The app enforces the smaller limit of a head."""
_MAX_WAITING: Final = 256
"""Requests that may wait while another of the same connection runs."""
_OVERHEAD_PER_BYTE: Final = 8
"""Overhead that each byte of a body permits: the framing of a chunk of one byte."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One client. The methods `on_...` are the callbacks of httptools.

    While it is open, the connection is in `connections`; then it calls `on_lost`.
    """

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
        """Unanswered requests in order. The first is running; the last may be incomplete."""
        self._error: WhimbrelError | None = None
        """The error that broke HTTP; nothing more is parsed."""
        self._discard_budget: int | None = None
        """Bytes that may still be read and discarded after the last answer; None before."""
        self._at_eof = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.is_full = False
        self.room: asyncio.Future[None] | None = None
        self.lost = False

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client = _address(transport, "peername")
        self._server = _address(transport, "sockname")
        self._connections.add(self)
        self._set_timer(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._set_timer(None)
        if self._exchanges:
            self._exchanges[0].abort()
        self.resume_writing()
        self._exchanges.clear()
        self._error = None
        del self._parser  # it refers to the connection, and only the garbage collector would break the cycle
        self._connections.discard(self)
        self._on_lost()

    def eof_received(self) -> bool:
        """Return whether an incomplete request can still be answered. After a complete one, the client counts as gone."""
        if self._discard_budget is not None or not self._exchanges or self._exchanges[-1].complete:
            return False
        self._exchanges[-1].abort()
        self._at_eof = True
        return True

    def data_received(self, data: bytes) -> None:
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
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, WhimbrelError):
                raise  # a bug: the loop logs it and ends the connection
            self._refuse(error.__context__)
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("what came is no HTTP/1.1 request."))
        else:
            if self._overhead > _MAX_OVERHEAD:
                self._refuse(HeadersTooLarge(f"path and headers have {self._overhead:,} bytes or more."))

    def _parse(self, data: bytes) -> None:
        while (rest := self._feed(data)) is not None:
            self._reparse_after_upgrade()
            data = rest

    def _feed(self, data: bytes) -> bytes | None:
        """Parse `data`. Return what is left where the parser stops at an upgrade."""
        if not data:
            return None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return data[upgrade.args[0] :]
        return None

    def _reparse_after_upgrade(self) -> None:
        """Continue with a new parser. The old one stops at an offer of HTTP/2, which Java's client sends even with a body."""
        headers = self._exchanges[-1].scope["headers"]
        framing = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in _FRAMING)
        self._parser = httptools.HttpRequestParser(self)
        self._replaying = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._replaying = False

    def _refuse(self, error: WhimbrelError) -> None:
        """Stop reading. The app answers an incomplete request; without one, the connection answers in its turn."""
        self._error = error
        self.pause()
        if not self._exchanges:
            self._answer_error(error)
        elif not self._exchanges[-1].complete:
            self._exchanges[-1].abort()

    def _answer_error(self, error: WhimbrelError) -> None:
        status, body = self._render_error(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.transport.writelines([encode_head(status, headers), body])
        self._linger()

    # Parser

    def on_message_begin(self) -> None:
        self._in_head = True
        self._num_headers = 0
        self._url = b""
        self._headers: Headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1  # trailers count, and are dropped
        if self._num_headers > self.limits.max_headers:
            raise HeadersTooLarge(f"there are more than {self.limits.max_headers} headers.")
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
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
        self._overhead = max(0, self._overhead - _OVERHEAD_PER_BYTE * len(body))
        self._exchanges[-1].feed(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():  # otherwise the new parser reads the body
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
        if url.host:  # it replaces the Host header (RFC 9112, 3.2.2)
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

    # Exchanges

    def _start(self) -> None:
        self._set_timer(None)
        exchange = self._exchanges[0]
        exchange.task = self._loop.create_task(exchange.run(self._app))

    def finish(self, exchange: RequestResponseCycle) -> None:
        """Go on after an answer: to the next request, to the end, or to the discarding of the rest of a body."""
        if self.lost:
            return
        if exchange.keep_alive and exchange.complete:
            self._exchanges.popleft()
            if self._exchanges:
                self._start()
            elif self._error is not None:
                self._answer_error(self._error)
            else:
                self._set_timer(self.limits.header_timeout)
            self.resume()
        elif self._at_eof or ((exchange.expects_continue or exchange.complete) and not self._paused):
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """End the answers. Read and discard for a while, so that a client that still writes can read the last one."""
        self._discard_budget = self.limits.lingering_bytes
        self._set_timer(self.limits.drain_timeout)
        self._exchanges.clear()
        self.resume()
        with suppress(OSError):  # the client has left, which connection_lost reports next
            self.transport.write_eof()

    def shut_down(self) -> None:
        if self._exchanges:
            self._exchanges[0].keep_alive = False
        elif self._discard_budget is None:  # otherwise it ends soon by itself
            self.transport.close()

    def reset(self) -> None:
        """Close the connection now and drop unsent data."""
        if not self.lost:
            if (sock := self.transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self.transport.abort()

    def _set_timer(self, seconds: float | None) -> None:
        """Close the connection after this time, in place of any earlier timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.transport.close)

    # Flow control

    def pause(self) -> None:
        if not self._paused and not self.lost:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on, unless requests wait or nothing can be parsed any more."""
        readable = self._error is None or self._discard_budget is not None
        if self._paused and not self.lost and len(self._exchanges) < 2 and readable:
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self.room is not None and not self.room.done():
            self.room.set_result(None)


def _address(transport: asyncio.BaseTransport, end: str) -> tuple[str, int] | None:
    """Return host and port of one end of a connection. (IPv6 has more fields.)"""
    with suppress(OSError):  # the client has left already
        if (name := transport.get_extra_info(end)) is not None:
            return name[0], name[1]
    return None
