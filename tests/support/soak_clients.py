"""Clients of the soak test: valid, invalid, impatient, disconnecting and slow ones. Every vector is compared."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import exp, log
from time import perf_counter
from typing import Any, Final, Self, TypeAlias

import numpy as np
import orjson
import pybase64

from whimbrel.types.arrays import Float32Array

PATH: Final = "/v1/embeddings"
_JSON: Final = {"content-type": "application/json"}
REFUSALS: Final = (429, 503)
"""Statuses that may refuse a valid request, if they have a Retry-After."""
_MAX_TEXTS: Final = 300
_PATIENCE: Final = 120.0
"""Seconds after which a response counts as missing."""
_MAX_COMPLAINTS: Final = 1000


# Requests and answers


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of the server."""

    status: int
    headers: Mapping[str, str]
    """Header fields by lower-case name."""
    body: bytes


def body_of(texts: Sequence[str], **fields: Any) -> bytes:
    """Return the JSON of a request. Vectors come back as base64 unless `encoding_format` is given."""
    return orjson.dumps({"input": list(texts), "encoding_format": "base64"} | fields)


def vectors_of(body: bytes) -> Float32Array:
    """Return the vectors of a 200 response in order. Raises ValueError if rows are not numbered from 0."""
    rows = orjson.loads(body)["data"]
    if [row["index"] for row in rows] != list(range(len(rows))):
        raise ValueError("the rows are not numbered from 0")
    vectors = [row["embedding"] for row in rows]
    if rows and isinstance(vectors[0], str):
        return np.array([np.frombuffer(pybase64.b64decode(vector), "<f4") for vector in vectors], np.float32)
    return np.array(vectors, np.float32)


def request_of(body: bytes = b"", *, method: str = "POST", path: str = PATH, **headers: str) -> bytes:
    """Return a request as bytes. `_` in the names of headers stands for `-`."""
    fields = _JSON | {"host": "127.0.0.1", "content-length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


class Connection:
    """Bare HTTP/1.1 connection in an event loop. It is cheap for a load generator, and a client can misuse it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int = 0) -> Self:
        """Return a new connection. `receive_buffer` is in bytes; 0 keeps the system's default."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return cls(*await asyncio.open_connection(sock=sock))
        except BaseException:
            sock.close()
            raise

    @property
    def closed(self) -> bool:
        """Return whether either side has closed the connection. A server closes it after a long idle time."""
        return self.reader.at_eof() or self.writer.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its response. Raises OSError or EOFError if the connection breaks."""
        self.writer.write(request)
        await self.writer.drain()
        status, headers = await self.head()
        return Answer(status, headers, await self.body(headers))

    async def body(self, headers: Mapping[str, str], *, pause: float = 0.0) -> bytes:
        """Return the body of a response with these headers, whole or in chunks, with a pause after every 32 KiB."""
        if headers.get("transfer-encoding") != "chunked":
            return await self._take(int(headers.get("content-length", 0)), pause)
        chunks: list[bytes] = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            chunks.append((await self._take(size + 2, pause))[:size])
        await self.reader.readexactly(2)
        return b"".join(chunks)

    async def _take(self, size: int, pause: float) -> bytes:
        if not pause:
            return await self.reader.readexactly(size)
        taken = bytearray()
        while len(taken) < size:
            taken += await self.reader.readexactly(min(2**15, size - len(taken)))
            await asyncio.sleep(pause)
        return bytes(taken)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return the first line and the headers of a response."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def close(self, *, reset: bool = False) -> None:
        """Close the connection, or reset it so that the other side's next byte fails."""
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


# Clients


@dataclass(slots=True)
class Tally:
    """Observations of all clients."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    """Responses of POST /v1/embeddings by status."""
    unseen: int = 0
    """Requests to POST /v1/embeddings whose client left before a response."""
    texts: int = 0
    """Texts in responses with status 200."""
    unseen_texts: int = 0
    patient: int = 0
    """Valid requests without a deadline."""
    done: Counter[str] = field(default_factory=Counter[str])
    """Actions by kind."""
    kills: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def requests(self) -> int:
        return self.done.total()

    def complain(self, text: str) -> None:
        """Record a broken promise."""
        if len(self.wrong) < _MAX_COMPLAINTS:
            self.wrong.append(text[:500])


class Client:
    """One client. `run` acts until a point in time."""

    def __init__(self, port: int, texts: Sequence[str], expected: Float32Array, tally: Tally, rng: random.Random) -> None:
        self._port = port
        self._texts = texts
        self._expected = expected
        self._tally = tally
        self._rng = rng
        self._kept: Connection | None = None

    async def run(self, end: float) -> None:
        """Do random actions until `end`, and record all failures."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        while perf_counter() < end:
            (kind,) = self._rng.choices(kinds, weights)
            try:
                async with asyncio.timeout(_PATIENCE):
                    await kind(self)
            except TimeoutError:
                self._tally.complain(f"{kind.__name__}: no answer in {_PATIENCE:.0f} s")
                await self._hang_up()
            except (OSError, EOFError, ValueError) as error:
                self._tally.complain(f"{kind.__name__}: {error!r}")
                await self._hang_up()
            self._tally.done[kind.__name__] += 1
        await self._hang_up()

    async def _connection(self) -> Connection:
        if self._kept is not None and (self._kept.closed or self._rng.random() < 0.1):
            await self._hang_up()
        if self._kept is None:
            self._kept = await Connection.open(self._port)
        return self._kept

    async def _hang_up(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.close()

    def _choose(self, most: int = _MAX_TEXTS) -> list[int]:
        """Return random texts: often one, else any order of magnitude."""
        size = 1 if self._rng.random() < 0.6 else round(exp(self._rng.uniform(0, log(most))))
        return self._rng.choices(range(len(self._texts)), k=size)

    def _body(self, chosen: list[int], **fields: Any) -> bytes:
        kind = self._rng.choice(["base64", "float"])
        return body_of([self._texts[i] for i in chosen], **{"encoding_format": kind} | fields)

    def _check(self, answer: Answer, chosen: list[int], *, deadline: bool = False) -> None:
        """Check the response to a valid request: the expected vectors, or a permitted refusal."""
        tally = self._tally
        tally.statuses[answer.status] += 1
        tally.patient += not deadline
        if answer.status == 200:
            tally.texts += len(chosen)
            if not np.array_equal(vectors_of(answer.body), self._expected[chosen]):
                tally.complain(f"other vectors for texts {chosen[:20]}")
        elif answer.status in REFUSALS:
            if not answer.headers.get("retry-after", "").isdecimal():
                tally.complain(f"{answer.status} without Retry-After: {answer.body[:300]!r}")
        elif not (deadline and answer.status == 504):
            tally.complain(f"{answer.status}: {answer.body[:300]!r}")

    # Actions

    async def embed(self) -> None:
        """Send a valid request and wait for its response."""
        chosen = self._choose()
        started = perf_counter()
        answer = await (await self._connection()).ask(request_of(self._body(chosen)))
        self._tally.slowest = max(self._tally.slowest, perf_counter() - started)
        self._check(answer, chosen)

    async def hurry(self) -> None:
        """Send a valid request with a deadline. The longest deadline can be met."""
        chosen = self._choose(100)
        seconds = self._rng.choice(["0", "0.005", "0.05", "0.5", "5", "60"])
        request = request_of(self._body(chosen), x_request_timeout=seconds)
        self._check(await (await self._connection()).ask(request), chosen, deadline=seconds != "60")

    async def err(self) -> None:
        """Send an invalid request."""
        request, status = self._rng.choice(WRONG)
        answer = await (await self._connection()).ask(request)
        if request.startswith(b"POST " + PATH.encode() + b" "):
            self._tally.statuses[answer.status] += 1
        if answer.status != status or b'"error"' not in answer.body:
            self._tally.complain(f"{answer.status} instead of {status} for {_summarize(request)}: {answer.body[:300]!r}")
        if answer.headers.get("connection") == "close":
            await self._hang_up()

    async def probe(self) -> None:
        """Send the requests of a monitoring system."""
        path, statuses = self._rng.choice(PROBES)
        answer = await (await self._connection()).ask(request_of(method="GET", path=path))
        if answer.status not in statuses:
            self._tally.complain(f"{answer.status} of {path}: {answer.body[:300]!r}")

    async def leave(self) -> None:
        """Send nothing, a part or everything, and leave a little later."""
        chosen = self._choose()
        request = request_of(self._body(chosen))
        self._lose(chosen)
        connection = await Connection.open(self._port)
        connection.writer.write(request[: int(len(request) * self._rng.choice([0, 0.02, 0.5, 1, 1, 1]))])
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        await connection.close(reset=self._rng.random() < 0.5)

    async def half_read(self) -> None:
        """Read half of a large response, and reset the connection."""
        chosen = self._rng.choices(range(len(self._texts)), k=_MAX_TEXTS)
        self._lose(chosen)
        connection = await Connection.open(self._port, receive_buffer=2**15)
        try:
            connection.writer.write(request_of(self._body(chosen, encoding_format="float")))
            status, _ = await connection.head()
            if status == 200:
                await connection.reader.readexactly(2**19)
        finally:
            await connection.close(reset=True)

    async def read_slowly(self) -> None:
        """Read a large response in small pieces."""
        chosen = self._rng.choices(range(len(self._texts)), k=_MAX_TEXTS)
        connection = await Connection.open(self._port, receive_buffer=2**15)
        try:
            connection.writer.write(request_of(self._body(chosen, encoding_format="float")))
            status, headers = await connection.head()
            self._check(Answer(status, headers, await connection.body(headers, pause=0.02)), chosen)
        finally:
            await connection.close()

    def _lose(self, chosen: list[int]) -> None:
        self._tally.unseen += 1
        self._tally.unseen_texts += len(chosen)


def _summarize(request: bytes) -> str:
    """Return the first line of a request and the start of its body."""
    head, _, body = request.partition(b"\r\n\r\n")
    return f"{head.partition(b' HTTP')[0].decode()} {body[:40]!r}"


Kind: TypeAlias = Callable[[Client], Awaitable[None]]

KINDS: Final[dict[Kind, float]] = {
    Client.embed: 40,
    Client.err: 30,
    Client.probe: 12,
    Client.hurry: 8,
    Client.leave: 8,
    Client.half_read: 0.5,
    Client.read_slowly: 0.5,
}
"""Relative frequency of each kind of action."""

PROBES: Final = [
    ("/health/live", (200,)), ("/health/ready", (200, 503)), ("/metrics", (200,)), ("/v1/models", (200,)), ("/info", (200,)),
    ("/openapi.json", (200,)), ("/docs", (200,)),
]  # fmt: skip

_WRONG_BODIES: Final[list[tuple[bytes, int]]] = [
    (b"", 400), (b"{}", 400), (b'{"input": ["a"', 400), (b"[1, 2]", 400), (b'{"input": "\xff"}', 400),
    (b'{"input": "\\ud800"}', 400), (b'{"input": "a", "user": ' + b"[" * 10_000, 400),
    (b'{"input": []}', 400), (b'{"input": ["a", 1]}', 400), (b'{"input": [30522]}', 400),
    (body_of(["a"], dimensions=-1), 400), (body_of(["a"], encoding_format="int7"), 400), (body_of(["a"], model="nope"), 404),
    (body_of(["a"], prompt_name="nope"), 400), (body_of(["a"], truncate_prompt_tokens=-2), 400),
    (body_of(["word " * 400], truncate=False), 400), (body_of(["a"] * 2049), 413), (body_of(["x" * 1_100_000]), 413),
]  # fmt: skip

WRONG: Final = [
    *((request_of(body), status) for body, status in _WRONG_BODIES),
    (request_of(b'{"input": "a"}', content_type="text/plain"), 415),
    (request_of(b'{"input": "a"}', x_request_timeout="soon"), 400),
    (request_of(method="GET", path="/nope"), 404),
    (request_of(b"{}", path="/info"), 405),
]
"""Invalid requests and the status that each must get."""
