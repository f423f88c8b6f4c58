"""HTTP/1.1 connections of an ASGI app. httptools parses, and answers go to the socket without a copy.

A connection runs one request at a time. Further ones on it wait in order, and meanwhile nothing is read. The connection
enforces size and time of heads and discards unwanted bodies; exchange.py bounds the rates of bodies and answers. Malformed HTTP
gets status 400 and ends the connection. The states and their tables are in states.py.
"""

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

from whimbrel.errors import HeadersTooLarge, MalformedHTTP, Overloaded, WhimbrelError
from whimbrel.server.http.exchange import CONTINUE, Headers, RequestResponseCycle, encode_head
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.http.places import Places
from whimbrel.server.http.states import PARSED, READING, Answer, Event, Reading

RenderError: TypeAlias = Callable[[WhimbrelError], tuple[int, bytes]]
"""Function that returns the status and the JSON body of the answer to malformed HTTP."""

_MAX_OVERHEAD: Final = 2**17
"""Limit of consecutive bytes that are not a body: a head or chunk framing. The app enforces the smaller limit of a head."""
_MAX_WAITING: Final = 256
"""Requests that may wait while another of the same connection runs."""
_OVERHEAD_PER_BYTE: Final = 8
"""Overhead that each byte of a body permits: the framing of a chunk of one byte."""
_MAX_CHUNKS: Final = 2**17
"""Chunks of a body of any size."""
_BYTES_PER_CHUNK: Final = 64
"""Bytes of a body that allow it one more chunk."""
_MANY_CALLBACKS: Final = 512
"""Callbacks of the parser after which other connections have their turn."""
_STEPS: Final = (2**12, 2**16)
"""Bytes that are parsed at once: after many callbacks, and at most."""
_HALF_CLOSED_SECONDS: Final = 0.1
"""Time after which a client that has closed its side, and waits for an answer, is asked whether it still reads."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One client. The methods `on_...` are the callbacks of httptools.

    It takes one of the `places` at once, before it has a transport, and gives it back when the transport is closed.
    """

    transport: asyncio.Transport

    def __init__(
        self, app: ASGIApp, limits: HttpLimits, render_error: RenderError, places: Places, sock: socket.socket | None = None
    ) -> None:
        """Give it the `sock` where making the transport takes time, as for TLS."""
        self._app = app
        self.limits = limits
        self._render_error = render_error
        self._places = places
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.reading = Reading.IDLE
        self._parser = httptools.HttpRequestParser(self)
        self._unparsed = memoryview(b"")
        """Bytes that wait for the next turn of the loop."""
        self._step = _STEPS[1]
        self._num_callbacks = 0
        """Callbacks of the parser in this step."""
        self._num_chunks = 0
        self._overhead = 0
        self._exchanges: deque[RequestResponseCycle] = deque()
        """Unanswered requests in order. The first is running; the last may be incomplete."""
        self._error: WhimbrelError | None = None
        """The error to answer while Reading is BROKEN, unless the app answers it."""
        self._num_to_discard = limits.lingering_bytes
        self._presence: asyncio.TimerHandle | None = None
        self._paused = False
        self.room: asyncio.Future[None] | None = None
        """While the buffers of the transport are full: done when there is room or the connection is lost."""
        self.is_kept = places.take(self)
        """True if the place is one of those that are kept for probes."""

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client = _address(transport, "peername")
        self._server = _address(transport, "sockname")
        self._scheme = "http" if transport.get_extra_info("ssl_object") is None else "https"

    def connection_lost(self, exc: Exception | None) -> None:
        self._follow(Event.LOST)
        if self._exchanges:
            self._exchanges[0].abort()
        self.resume_writing()
        self._exchanges.clear()
        self._error = None
        self._unparsed = memoryview(b"")
        if self._presence is not None:
            self._presence.cancel()
        del self._parser  # it refers to the connection, and only the garbage collector would break the cycle
        self._places.release(self)

    def eof_received(self) -> bool:
        """Return whether something is still to be answered: requests before the end, and one that broke off."""
        if self.reading is Reading.DISCARDING or not self._exchanges:
            return False
        self._follow(Event.CLIENT_ENDS)
        if not self._exchanges[-1].is_complete:
            self._exchanges[-1].abort()
        self._presence = self._loop.call_later(_HALF_CLOSED_SECONDS, self._ask_presence)
        return self._scheme == "http"  # TLS has no half-closed connections

    def data_received(self, data: bytes) -> None:
        if self.reading is Reading.DISCARDING:
            self._num_to_discard -= len(data)
            if self._num_to_discard < 0:
                self.reset()
        elif self.reading in PARSED:
            self._unparsed = memoryview(data)
            self._parse()

    # Parser

    def _parse(self) -> None:
        """Parse what has come, at most so much in one turn of the loop that other connections need not wait."""
        while self._unparsed and self.reading in PARSED:
            step, self._unparsed = self._unparsed[: self._step], self._unparsed[self._step :]
            self._num_callbacks = 0
            self._overhead += len(step)
            try:
                self._feed(step)
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, WhimbrelError):
                    self.reset()
                    raise  # a bug, which the loop logs
                self._refuse(error.__context__)
            except httptools.HttpParserError:
                in_body = self.reading is Reading.BODY
                self._refuse(MalformedHTTP(f"what came is no {'chunk of a body' if in_body else 'HTTP/1.1 request'}."))
            else:
                if self._overhead > max(_MAX_OVERHEAD, 2 * self.limits.max_header_bytes):
                    self._refuse_overhead()
            if self._num_callbacks > _MANY_CALLBACKS and self._unparsed:
                self._step = _STEPS[0]
                self.pause()
                self._loop.call_soon(self._parse)
                return
            self._step = min(2 * self._step, _STEPS[1])
        self.resume()

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            self._follow(Event.UPGRADE)
            self._resume_request()

    def _resume_request(self) -> None:
        """Continue with a new parser. The old one stops at an offer of HTTP/2, which Java's client sends even with a body."""
        headers = self._exchanges[-1].scope["headers"]
        framing = b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in _FRAMING)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    def _refuse(self, error: WhimbrelError) -> None:
        """Stop reading. The app answers an incomplete request; without one, the connection answers in its turn."""
        self._follow(Event.MALFORMED)
        self._unparsed = memoryview(b"")
        self._error = error
        self.pause()
        if not self._exchanges:
            self._answer_error()
        elif not self._exchanges[-1].is_complete:
            self._exchanges[-1].abort(error)

    def _refuse_overhead(self) -> None:
        size = f"have {self._overhead:,} bytes or more."
        if self.reading is Reading.HEAD:
            self._refuse(HeadersTooLarge(f"path and headers {size}"))
        else:
            self._refuse(MalformedHTTP(f"chunk extensions or trailers {size}"))

    def _answer_error(self) -> None:
        assert self._error is not None
        status, body = self._render_error(self._error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.transport.writelines([encode_head(status, headers), body])
        self._linger()

    def on_message_begin(self) -> None:
        self._follow(Event.HEAD_BEGINS)
        self._num_headers = 0
        self._num_chunks = 0
        self._url = b""
        self._headers: Headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_callbacks += 1
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            if self.reading is Reading.BODY:
                raise MalformedHTTP(f"there are more than {self.limits.max_headers} headers and trailers.")
            raise HeadersTooLarge(f"there are more than {self.limits.max_headers} headers.")
        if self.reading is Reading.HEAD:  # trailers are dropped
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.reading is Reading.RESUMING:
            self._follow(Event.HEAD_ENDS)
            return
        if len(self._exchanges) > _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} requests of this connection wait already; send fewer at a time.", retry_after=1)
        exchange = RequestResponseCycle(self, self._scope(), keep_alive=self._keeps_alive())
        self._follow(Event.HEAD_ENDS)
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start()
        else:
            self.pause()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        size = self._exchanges[-1].num_fed
        if self._num_chunks > _MAX_CHUNKS + size // _BYTES_PER_CHUNK:
            raise MalformedHTTP(
                f"{size:,} bytes of the body came in {self._num_chunks:,} chunks; "
                f"send chunks of {_BYTES_PER_CHUNK} bytes or more, or a Content-Length."
            )

    def on_body(self, body: bytes) -> None:
        self._num_callbacks += 1
        self._overhead = max(0, self._overhead - _OVERHEAD_PER_BYTE * len(body))
        self._exchanges[-1].feed(body)

    def on_message_complete(self) -> None:
        self._num_callbacks += 1
        if not self._parser.should_upgrade():  # otherwise the new parser reads the body
            self._follow(Event.BODY_ENDS)
            self._overhead = 0
            self._exchanges[-1].end()

    def _keeps_alive(self) -> bool:
        """Return whether the client may send another request. The parser overlooks `close` beside `keep-alive` in HTTP/1.0."""
        if self._parser.get_http_version() == "1.1" or not self._parser.should_keep_alive():
            return self._parser.should_keep_alive()
        options = b",".join(value for name, value in self._headers if name == b"connection").lower().split(b",")
        return b"close" not in [option.strip(b" \t") for option in options]

    def _scope(self) -> Scope:
        version, headers = self._parser.get_http_version(), self._headers
        if len(self._url) > self.limits.max_header_bytes:
            raise HeadersTooLarge(f"the target has {len(self._url):,} bytes; the limit is {self.limits.max_header_bytes:,}.")
        try:
            url = httptools.parse_url(self._url)
            raw_path = url.path or b"/"
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, ValueError):
            raise MalformedHTTP("the target of the request is no path.") from None
        if version not in ("1.1", "1.0"):
            raise MalformedHTTP(f"this is HTTP/{version}; the server speaks HTTP/1.1.")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in headers):
            raise MalformedHTTP("HTTP/1.0 knows no Transfer-Encoding; send a Content-Length.")
        if url.host:  # it replaces the Host header (RFC 9112, 3.2.2)
            host = re.split(rb"[/?#]", self._url.partition(b"://")[2], maxsplit=1)[0]
            headers = [(name, host if name == b"host" else value) for name, value in headers]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "client": self._client,
            "server": self._server,
        }

    # Exchanges

    def _follow(self, event: Event) -> None:
        self.reading = READING[self.reading][event]

    def _start(self) -> None:
        self._places.idle.discard(self)
        exchange = self._exchanges[0]
        exchange.task = self._loop.create_task(exchange.run(self._app))

    @property
    def gives_way(self) -> bool:
        """True if the connection should end with the running answer, so that others get its place."""
        return (self.is_kept or self._places.is_full) and len(self._exchanges) == 1

    def finish(self, exchange: RequestResponseCycle) -> None:
        """Go on after an answer: to the next request, to the end, or to the discarding of the rest of a body."""
        if self.reading is Reading.CLOSED:
            return
        if not (exchange.keep_alive and exchange.is_complete):
            nothing_unread = not self._paused and not self._unparsed
            if nothing_unread and (exchange.is_complete or exchange.is_expected):
                self.transport.close()
            else:
                self._linger()
            return
        self._exchanges.popleft()
        if self._exchanges:
            self._start()
        elif self.reading is Reading.BROKEN:
            self._answer_error()
        elif self.reading is Reading.ENDED:
            self.transport.close()
        else:
            self._places.idle.add(self)
        self.resume()

    def _linger(self) -> None:
        """End the answers. Read and discard for a while, so that a client that still writes can read the last one."""
        self._follow(Event.LAST_ANSWER)
        self._exchanges.clear()
        self._num_to_discard -= len(self._unparsed)
        self._unparsed = memoryview(b"")
        if self.reading is Reading.ENDED:
            self.transport.close()
            return
        self._places.lingering.add(self)
        self.resume()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has left, which connection_lost reports next
                self.transport.write_eof()

    def shut_down(self) -> None:
        """Close the connection after the answers to the requests that have come."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        elif self.reading is not Reading.DISCARDING:  # which ends soon by itself
            self.close()

    def close(self) -> None:
        """Close the connection now, or break off its making."""
        if hasattr(self, "transport"):
            self.transport.close()
        elif self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Close the connection now and drop unsent data."""
        if self.reading is not Reading.CLOSED:
            with suppress(OSError):
                self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self.transport.abort()

    def _ask_presence(self) -> None:
        """Send something to a client that has closed its side. One that has left refuses it, which `_check_presence` sees."""
        running = self._exchanges[0] if self._exchanges else None
        if running is not None and running.answer is Answer.AWAITED and running.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self._presence = self._loop.call_later(_HALF_CLOSED_SECONDS, self._check_presence)

    def _check_presence(self) -> None:
        if self._socket().getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.reset()
        else:
            self._presence = self._loop.call_later(_HALF_CLOSED_SECONDS, self._check_presence)

    def _socket(self) -> socket.socket:
        return self.transport.get_extra_info("socket")

    # Flow control

    def pause(self) -> None:
        if not self._paused and self.reading is not Reading.CLOSED:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on, unless requests wait, a body waits for the app, or nothing can be parsed any more."""
        if not self._paused:
            return
        if self.reading in PARSED:
            wanted = not self._unparsed and len(self._exchanges) < 2 and not (self._exchanges and self._exchanges[0].is_full)
        else:
            wanted = self.reading is Reading.DISCARDING
        if wanted:
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.room is not None:
            if not self.room.done():
                self.room.set_result(None)
            self.room = None


def _address(transport: asyncio.BaseTransport, end: str) -> tuple[str, int] | None:
    """Return host and port of one end of a connection. (IPv6 has more fields, and Unix sockets have none.)"""
    try:
        name: tuple[str, int] | str | None = transport.get_extra_info(end)
    except OSError:  # the client has left already
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None
