"""Channels between processes: messages over a Unix stream socket, with file descriptors.

A message is four bytes of length, then msgpack. `Channel` is for threads that block, `AsyncChannel` for an event loop. After a
ProtocolError a channel is of no use, and one of the two processes has to end.
"""

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

_log = logging.getLogger("whimbrel")

MAX_MESSAGE: Final = 2**28
_CHUNK: Final = 2**18
_MAX_FDS: Final = 16
_BUFFER: Final = 2**20

_encoder: Final = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other end sent bytes that are not a message."""


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


def _pack(message: msgspec.Struct) -> bytearray:
    packed = bytearray(4)
    _encoder.encode_into(message, packed, 4)
    packed[:4] = (len(packed) - 4).to_bytes(4, "little")
    return packed


class _Reader(Generic[T]):
    """Decoder of a stream of bytes and descriptors."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()
        self.fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> bool:
        """Read the bytes that have arrived. Return False at the end. Raises OSError and ProtocolError."""
        data, fds, flags, _ = socket.recv_fds(sock, _CHUNK, _MAX_FDS)
        self.fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were lost: too many files are open")
        self._bytes += data
        return bool(data)

    def messages(self) -> Iterator[T]:
        """Yield the messages that are complete. Raises ProtocolError."""
        if len(self._bytes) < 4 or len(self._bytes) - 4 < int.from_bytes(self._bytes[:4], "little") <= MAX_MESSAGE:
            return
        view = memoryview(bytes(self._bytes))
        start = 0
        while len(view) - start >= 4:
            size = int.from_bytes(view[start : start + 4], "little")
            if size > MAX_MESSAGE:
                raise ProtocolError(f"a message of {size:,} bytes")
            if len(view) - start - 4 < size:
                break
            try:
                message: T = self._decoder.decode(view[start + 4 : start + 4 + size])
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise ProtocolError(f"not a message: {error}") from None
            start += 4 + size
            yield message
        if start:
            del self._bytes[:start]

    def take_fd(self) -> int:
        """Return the descriptor that came with the last message. Raises ProtocolError."""
        if not self.fds:
            raise ProtocolError("a descriptor is missing")
        return self.fds.popleft()

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.popleft())


class Channel(Generic[T]):
    """A channel's end for threads. `kind` is the union of the messages that it receives."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(True)
        self.failure: OSError | None = None
        """The error of a message that was lost although the other end was there."""
        self._sock = sock
        self._reader = _Reader[T](kind)
        self.take_fd = self._reader.take_fd
        self._out: SimpleQueue[tuple[bytearray, Sequence[int]] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="whimbrel-channel", daemon=True)
        self._writer.start()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message without blocking. Descriptors are closed after they are sent."""
        self._out.put((_pack(message), fds))

    def __iter__(self) -> Iterator[T]:
        """Yield the messages until the other end is closed. Raises ProtocolError."""
        try:
            while self._reader.receive(self._sock):
                yield from self._reader.messages()
        except OSError:
            return

    def close(self) -> None:
        """Send the queued messages, then close."""
        self._out.put(None)
        self._writer.join(5)
        self._sock.close()
        self._reader.close()

    def _write(self) -> None:
        while (item := self._out.get()) is not None:
            packed, fds = item
            try:
                if fds:
                    try:
                        sent = socket.send_fds(self._sock, [packed[:1]], list(fds))
                    finally:
                        close_fds(fds)
                    packed = packed[sent:]
                self._sock.sendall(packed)
            except (BrokenPipeError, ConnectionResetError):  # the other end is closed, as the reading thread sees too
                continue
            except OSError as error:  # out of memory: a message is lost, and the reading thread must end
                self.failure = error
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)


class AsyncChannel(Generic[T]):
    """A channel's end for an event loop. It calls `on_message` with each message, and `on_end` once with an error or None."""

    def __init__(
        self, sock: socket.socket, kind: Any, *, on_message: Callable[[T], None], on_end: Callable[[ProtocolError | None], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = _Reader[T](kind)
        self.take_fd = self._reader.take_fd
        self._on_message = on_message
        self._on_end = on_end
        self._backlog: deque[tuple[bytearray, Sequence[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message now or as soon as there is room. Descriptors are closed after they are sent."""
        if self._closed:
            close_fds(fds)
            return
        self._backlog.append((_pack(message), fds))
        if len(self._backlog) == 1:
            self._flush()

    def close(self) -> None:
        """Close without sending the queued messages and without calling `on_end`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._reader.close()
        for _, fds in self._backlog:
            close_fds(fds)
        self._backlog.clear()

    def _readable(self) -> None:
        try:
            more = self._reader.receive(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as error:
            self._end(error if isinstance(error, ProtocolError) else None)
            return
        try:
            for message in self._reader.messages():
                self._on_message(message)
                if self._closed:
                    return
        except ProtocolError as error:
            self._end(error)
        except Exception as error:  # a bug of this process: the message is half handled
            _log.critical("a message could not be handled. This is a bug.", exc_info=True)
            self._end(ProtocolError(f"{type(error).__name__} while it was handled"))
        else:
            if not more:
                self._end(None)

    def _flush(self) -> None:
        while self._backlog:
            packed, fds = self._backlog[0]
            try:
                if fds:
                    sent = socket.send_fds(self._sock, [packed], list(fds))
                    close_fds(fds)
                else:
                    sent = self._sock.send(packed)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._end(None)
                return
            if sent == len(packed):
                self._backlog.popleft()
            else:
                self._backlog[0] = (packed[sent:], ())
        if self._backlog:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _end(self, error: ProtocolError | None) -> None:
        if not self._closed:
            self.close()
            self._on_end(error)


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
