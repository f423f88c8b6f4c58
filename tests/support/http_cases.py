"""Requests as HTTP/1.1 allows them and as it forbids them (RFC 9112), and whole connections made of them by chance.

A right request has one answer. After a wrong one comes an error, and then nothing more: what follows could be a request that
somebody smuggled. The bodies hold requests, too, which must never be answered.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

END = b"\r\n"
HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\nX-Canary: smuggled\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """A path for GET and one for POST, and a sign that their answers bear."""

    canary: bytes
    get: bytes = b"/a"
    post: bytes = b"/b"
    body: bytes = HIDDEN
    media_type: bytes = b"text/plain"


@dataclass(frozen=True)
class Right:
    """A request that is answered, and whether the connection ends then."""

    data: bytes
    method: bytes = b"GET"
    body: bytes = b""
    closes: bool = False


def lines(*parts: bytes) -> bytes:
    return END.join(parts) + END * 2


def chunked(body: bytes, *sizes: int, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """A body in chunks of these sizes, and one for the rest."""
    pieces = list[bytes]()
    for size in (*sizes, len(body)):
        piece, body = body[:size], body[size:]
        if piece:
            pieces.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
    return b"".join(pieces) + b"0\r\n" + trailers + END


def right(target: Target) -> dict[str, Right]:
    """Requests that every server has to understand, by name."""
    host, sign = b"Host: localhost", b"X-Canary: " + target.canary
    kind = b"Content-Type: " + target.media_type
    body, length = target.body, b"Content-Length: %d" % len(target.body)
    get = b"GET %b HTTP/1.1" % target.get
    post = [b"POST %b HTTP/1.1" % target.post, host, sign, kind]
    chunks = b"Transfer-Encoding: chunked"

    def of_get(*more: bytes, closes: bool = False) -> Right:
        return Right(lines(get, host, sign, *more), closes=closes)

    def of_post(framing: bytes, content: bytes, *more: bytes) -> Right:
        return Right(lines(*post, framing, *more) + content, b"POST", body)

    return {
        "get": of_get(),
        "empty lines before": Right(END * 2 + lines(get, host, sign)),
        "names in capitals": Right(lines(get, host.upper().replace(b"LOCALHOST", b"localhost"), b"X-CANARY: " + target.canary)),
        "no space after colons": Right(lines(get, b"Host:localhost", b"X-Canary:" + target.canary)),
        "space around values": Right(lines(get, b"Host: \tlocalhost \t", b"X-Canary:   " + target.canary + b"   ")),
        "an empty value": of_get(b"X-Empty:"),
        "bytes above 127 in a value": of_get(b"X-Text: \xc3\xa4\xff"),
        "odd letters in a name": of_get(b"!#$%&'*+-.^_`|~09az: x"),
        "the same header twice": of_get(b"X-A: 1", b"X-A: 2"),
        "a query": Right(lines(b"GET %b?a=b&c HTTP/1.1" % target.get, host, sign)),
        "the whole address": Right(lines(b"GET http://localhost%b HTTP/1.1" % target.get, host, sign)),
        "a connection that is kept": of_get(b"Connection: keep-alive"),
        "a connection that ends": of_get(b"Connection: close", closes=True),
        "a list that ends it": of_get(b"Connection: x-a, Close", closes=True),
        "two headers that end it": of_get(b"Connection: keep-alive", b"Connection: close", closes=True),
        "an offer of WebSocket": of_get(b"Connection: Upgrade", b"Upgrade: websocket"),
        "an offer of HTTP/2": of_get(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
        "an offer with a body": of_post(length, body, b"Connection: Upgrade", b"Upgrade: h2c"),
        "an offer with chunks": of_post(chunks, chunked(body, 5), b"Connection: Upgrade", b"Upgrade: h2c"),
        "an offer that nobody asked to read": of_get(b"Upgrade: websocket"),
        "version 1.0": Right(lines(b"GET %b HTTP/1.0" % target.get, host, sign), closes=True),
        "version 1.0 that is kept": Right(lines(b"GET %b HTTP/1.0" % target.get, host, sign, b"Connection: keep-alive")),
        "version 1.0 that is kept and ends": Right(
            lines(b"GET %b HTTP/1.0" % target.get, host, sign, b"Connection: keep-alive, close"), closes=True
        ),
        "a length": of_post(length, body),
        "a length with zeros": of_post(b"Content-Length: 000%d" % len(body), body),
        "one chunk": of_post(chunks, chunked(body)),
        "chunks": of_post(chunks, chunked(body, 1, 2, 3)),
        "chunks, in capitals": of_post(b"TRANSFER-ENCODING: Chunked", chunked(body, 7)),
        "sizes with zeros": of_post(chunks, b"%08x\r\n%b\r\n0000\r\n\r\n" % (len(body), body)),
        "sizes in capitals": of_post(chunks, b"%X\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        "extensions": of_post(chunks, chunked(body, 4, extension=b';name="a value";other')),
        "trailers": of_post(chunks, chunked(body, trailers=b"X-Trailer: x\r\nX-Other:\r\n")),
    }


def wrong(target: Target) -> dict[str, bytes]:
    """Requests that are refused, after which the connection ends, by name."""
    host, sign = b"Host: localhost", b"X-Canary: " + target.canary
    body, length = target.body, b"Content-Length: %d" % len(target.body)
    get = b"GET %b HTTP/1.1" % target.get
    post = [b"POST %b HTTP/1.1" % target.post, host, sign, b"Content-Type: " + target.media_type]
    chunks = b"Transfer-Encoding: chunked"

    def first(line: bytes) -> bytes:
        return lines(line, host, sign)

    def header(line: bytes) -> bytes:
        return lines(get, host, sign, line, b"X-After: x")

    def framed(*framing: bytes, content: bytes = body) -> bytes:
        return lines(*post, *framing) + content

    def of_chunks(content: bytes) -> bytes:
        return framed(chunks, content=content)

    size, offer = b"%x" % len(body), (b"Connection: Upgrade", b"Upgrade: h2c")
    return {
        "an unknown method": first(b"BREW %b HTTP/1.1" % target.get),
        "a method in small letters": first(b"get %b HTTP/1.1" % target.get),
        "a method with a colon": first(b"GE:T %b HTTP/1.1" % target.get),
        "no target": first(b"GET HTTP/1.1"),
        "no version": first(b"GET " + target.get),
        "an old version": first(b"GET %b HTTP/0.9" % target.get),
        "a version to come": first(b"GET %b HTTP/3.0" % target.get),
        "a version of two digits": first(b"GET %b HTTP/1.10" % target.get),
        "another protocol": first(b"GET %b HTTQ/1.1" % target.get),
        "a protocol in small letters": first(b"GET %b http/1.1" % target.get),
        "a target of two words": first(b"GET %b b HTTP/1.1" % target.get),
        "a target with a zero byte": first(b"GET %b\x00 HTTP/1.1" % target.get),
        "a target with a control character": first(b"GET %b\x01 HTTP/1.1" % target.get),
        "a target without its slash": first(b"GET a HTTP/1.1"),
        "a space before the method": first(b" " + get),
        "a space before the colon": header(b"X-A : x"),
        "a space in a name": header(b"X A: x"),
        "no name": header(b": x"),
        "no colon": header(b"nothing"),
        "a bracket in a name": header(b"X(A): x"),
        "a byte above 127 in a name": header(b"X-\xe4: x"),
        "a zero byte in a name": header(b"X\x00A: x"),
        "a zero byte in a value": header(b"X-A: \x00"),
        "a control character in a value": header(b"X-A: \x01"),
        "a bare CR in a value": header(b"X-A: a\rX-B: b"),
        "a bare LF after a value": header(b"X-A: a\nX-B: b"),
        "a line that is folded": header(b"X-A: a\r\n b"),
        "a first header that is folded": lines(get, b" X-A: x", host, sign),
        "lines that end in LF": lines(get, host, sign).replace(END, b"\n"),
        "a head that ends in LF": lines(get, host, sign)[:-2] + b"\n",
        "no Host": lines(get, sign),
        "two Hosts": lines(get, host, host, sign),
        "Hosts that differ": lines(get, host, b"Host: other", sign),
        "a Host of two words": lines(get, b"Host: a b", sign),
        "a Host with a path": lines(get, b"Host: localhost/a", sign),
        "a Host with a name before": lines(get, b"Host: a@localhost", sign),
        "a length below zero": framed(b"Content-Length: -1"),
        "a length with a plus": framed(b"Content-Length: +%d" % len(body)),
        "a length in hexadecimal": framed(b"Content-Length: 0x%x" % len(body)),
        "a length with a point": framed(length + b".0"),
        "a length that is empty": framed(b"Content-Length:"),
        "a length of two numbers": framed(length + b" 1"),
        "lengths in a list": framed(length + b", %d" % len(body)),
        "a length twice": framed(length, length),
        "lengths that differ": framed(length, b"Content-Length: 1"),
        "a length above 64 bits": framed(b"Content-Length: 18446744073709551617"),
        "a length and chunks": framed(length, chunks, content=chunked(body)),
        "chunks and a length": framed(chunks, length, content=chunked(body)),
        "another coding": framed(b"Transfer-Encoding: gzip"),
        "a coding after chunked": framed(b"Transfer-Encoding: chunked, gzip", content=chunked(body)),
        "a coding before chunked": framed(b"Transfer-Encoding: gzip, chunked", content=chunked(body)),
        "chunked twice": framed(chunks, chunks, content=chunked(body)),
        "chunked and identity": framed(chunks, b"Transfer-Encoding: identity", content=chunked(body)),
        "a word like chunked": framed(b"Transfer-Encoding: xchunked", content=chunked(body)),
        "chunked with a parameter": framed(b"Transfer-Encoding: chunked;q=1", content=chunked(body)),
        "chunked in quotes": framed(b'Transfer-Encoding: "chunked"', content=chunked(body)),
        "chunked after a vertical tab": framed(b"Transfer-Encoding: \x0bchunked", content=chunked(body)),
        "chunks in version 1.0": lines(b"POST %b HTTP/1.0" % target.post, host, sign, chunks) + chunked(body),
        "an offer with another coding": framed(b"Transfer-Encoding: gzip", *offer),
        "an offer with chunked before a coding": framed(b"Transfer-Encoding: chunked, gzip", *offer),
        "an offer with a length and chunks": framed(length, chunks, *offer, content=chunked(body)),
        "a tunnel with another coding": lines(b"CONNECT localhost:80 HTTP/1.1", host, sign, b"Transfer-Encoding: gzip") + body,
        "a size that is no number": of_chunks(b"zz\r\n" + body),
        "a size below zero": of_chunks(b"-5\r\n" + body),
        "a size with a plus": of_chunks(b"+%b\r\n%b\r\n0\r\n\r\n" % (size, body)),
        "a size with 0x": of_chunks(b"0x%b\r\n%b\r\n0\r\n\r\n" % (size, body)),
        "a size that is empty": of_chunks(b"\r\n" + body),
        "a size after a space": of_chunks(b" %b\r\n%b\r\n0\r\n\r\n" % (size, body)),
        "a size before a space": of_chunks(b"%b \r\n%b\r\n0\r\n\r\n" % (size, body)),
        "a size above 64 bits": of_chunks(b"1" + b"0" * 16 + END + body),
        "a size line that ends in LF": of_chunks(b"%b\n%b\r\n0\r\n\r\n" % (size, body)),
        "a chunk that ends in LF": of_chunks(b"%b\r\n%b\n0\r\n\r\n" % (size, body)),
        "a chunk that does not end": of_chunks(b"%b\r\n%bxx0\r\n\r\n" % (size, body)),
        "an extension with a LF": of_chunks(b"%b;a\nb\r\n%b\r\n0\r\n\r\n" % (size, body)),
        "a length among trailers": of_chunks(chunked(body, trailers=b"Content-Length: 3\r\n")),
        "a trailer without a colon": of_chunks(chunked(body, trailers=b"nothing\r\n")),
        "a trailer that is folded": of_chunks(chunked(body, trailers=b"X-A: a\r\n b\r\n")),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(128, 200)) + END * 2,
        "HTTP/2 unasked": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    }


@dataclass(frozen=True)
class Talk:
    """The bytes that a client sends in one connection, and the answers that have to come back."""

    pieces: list[bytes]
    """The bytes, as they are written one after another."""
    answered: list[tuple[bytes, Right]]
    """Sign and request of each answer."""
    refused: str | None
    """The fault of the request after these, if one is refused."""
    names: list[str] = field(default_factory=list[str])
    leaves: bool = False
    """The client goes away at once, and reads nothing."""


def talk(chance: random.Random, number: int, without: Collection[str] = ()) -> Talk:
    """A connection of one to six requests, of which some are wrong, cut into writes anywhere."""
    answered: list[tuple[bytes, Right]] = []
    names, data = list[str](), b""
    refused, over = None, False
    for place in range(chance.randint(1, 6)):
        size = chance.choice([0, 1, 10, 100, 5000])
        body = chance.choice([HIDDEN, chance.randbytes(size), b"0\r\n\r\n" + HIDDEN, chunked(HIDDEN)]) or b"x"
        target = Target(b"%d-%d" % (number, place), body=body)
        if chance.random() < 0.15:
            name, request = chance.choice(list(wrong(target).items()))
            if name in without:
                continue
            refused, over = (None if over else name) or refused, True
        else:
            name, made = chance.choice(list(right(target).items()))
            request = made.data
            if not over:
                answered.append((target.canary, made))
                over = made.closes
        names.append(name)
        data += request
    pieces = list(cuts(chance, data))
    leaves = chance.random() < 0.1
    return Talk(pieces[: chance.randrange(len(pieces) + 1)] if leaves else pieces, answered, refused, names, leaves)


def cuts(chance: random.Random, data: bytes) -> Iterator[bytes]:
    """The bytes in few pieces, or in many small ones."""
    most = chance.choice([3, 50, 2000, len(data) + 1])
    while data:
        size = chance.randint(1, most)
        yield data[:size]
        data = data[size:]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


def replies(received: bytes, methods: list[bytes]) -> list[Reply]:
    """All answers in these bytes, without 1xx. Raises ValueError if they are no HTTP/1.1 or break off."""
    found, methods = list[Reply](), list(methods)
    while received:
        head, end, received = received.partition(END * 2)
        status_line, *fields = head.decode("latin-1").split("\r\n")
        version, code, _ = status_line.split(" ", 2)
        if not end or version != "HTTP/1.1":
            raise ValueError(f"no answer: {head[:200]!r}")
        headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in fields)}
        if int(code) < 200:
            continue
        method = methods.pop(0) if methods else b"GET"
        if method == b"HEAD":
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body, received = _unchunked(received)
        else:
            size = int(headers["content-length"])
            body, received = received[:size], received[size:]
            if len(body) < size:
                raise ValueError(f"{len(body)} bytes of a body of {size}")
        found.append(Reply(int(code), headers, body))
    return found


def _unchunked(received: bytes) -> tuple[bytes, bytes]:
    """Return the body that begins here, and the bytes after it. Raises ValueError."""
    pieces = list[bytes]()
    while True:
        line, _, received = received.partition(END)
        size = int(line, 16)
        pieces.append(received[:size])
        if received[size : size + 2] != END:
            raise ValueError(f"a chunk of {size} bytes does not end")
        received = received[size + 2 :]
        if not size:
            return b"".join(pieces), received


def digest(body: bytes) -> str:
    return sha256(body).hexdigest()
