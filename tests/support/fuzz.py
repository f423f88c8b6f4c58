"""Requests by a grammar, some right and most wrong in some way: method, target, version, headers, framing and body."""

from __future__ import annotations

import random
from typing import Any

import orjson

ROUTES = [
    "/v1/embeddings", "/v1/models", "/v1/models/x", "/health", "/health/live", "/health/ready", "/info", "/metrics", "/openapi.json", "/docs",
]  # fmt: skip
FIELDS = [
    "input", "model", "encoding_format", "dimensions", "user", "prompt", "prompt_name", "normalize", "truncate", "truncate_prompt_tokens",
    "priority", "x", "",
]  # fmt: skip
ODD_TEXTS = [
    "",
    "a",
    "\x00",
    "🙂",
    "a b c",
    "../../etc/passwd",
    "%00",
    "base64",
    "float",
    "left",
    "never",
    "\u2028",
    "x" * 300,
    "1e400",
    "NaN",
]
ODD_NUMBERS = [0, 1, -1, 2, 7, 384, 385, 101, 2**31, -(2**63), 2**64, 2**200, 0.5, 1e308, -0.0]


class Grammar:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> bytes:
        """One request, sometimes cut short or with some bytes changed."""
        body = self._body()
        lines = [self._first_line(), *self._headers()]
        framing, content = self._framed(body)
        data = b"\r\n".join([*lines, *framing]) + b"\r\n\r\n" + content
        if self._chance(0.05):
            data = data[: self._random.randrange(len(data))]
        if self._chance(0.05):
            data = self._mutated(data)
        return data

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _one(self, options: list[Any]) -> Any:
        return self._random.choice(options)

    def _first_line(self) -> bytes:
        route = "/v1/embeddings" if self._chance(0.5) else self._one(ROUTES)
        method = "POST" if route == "/v1/embeddings" else "GET"
        if self._chance(0.15):
            method = self._one(
                ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "post", "", "F\x00", "G ET", "A" * 500]
            )
        if self._chance(0.15):
            route = self._one([
                route + "/", route + "?a=b&c", "/" + route, route.upper(), "*", "", "//", "http://localhost" + route, "/%2e%2e" + route,
                route + "%00", route + "#x", "/\xff", route[:-1], "?", "/a" * 2000, "/%", "/%zz",
            ])  # fmt: skip
        version = (
            "HTTP/1.1"
            if self._chance(0.95)
            else self._one(["HTTP/1.0", "HTTP/2.0", "HTTP/1.9", "", "HTTP/", "http/1.1", "HTTP/1.1 x"])
        )
        return f"{method} {route} {version}".encode("latin-1")

    def _headers(self) -> list[bytes]:
        hosts = (
            ["localhost"]
            if self._chance(0.93)
            else self._one([[], ["evil.com"], ["a/?x="], ["[::1]:80"], ["localhost", "x"], [""], ["127.1"]])
        )
        lines = [f"Host: {host}".encode() for host in hosts]
        if self._chance(0.9):
            lines.append(b"Content-Type: application/json")
        elif self._chance(0.5):
            lines.append(
                b"Content-Type: "
                + self._one([b"text/plain", b"", b"application/json;charset=utf-16", b"\xff", b"multipart/form-data"])
            )
        lines += [self._header() for _ in range(self._one([0, 0, 0, 0, 1, 2, 3]))]
        if self._chance(0.03):
            lines += [b"X-%d: x" % i for i in range(self._one([50, 120]))]
        self._random.shuffle(lines)
        return lines

    def _header(self) -> bytes:
        names = [
            b"X-A",
            b"X-Request-Id",
            b"Authorization",
            b"Origin",
            b"Cookie",
            b"Accept",
            b"Content-Encoding",
            b"Range",
            b"Expect",
        ]
        values = [b"x", b"", b"null", b"gzip", b"Bearer x", b"http://localhost", b"\xff\xfe", b"100-continue", b"y" * 5000]
        if self._chance(0.1):
            return self._one([b"", b"\x00", b"a b", b": x", b"a: b\r\n c", b"a: b\rc", b"a: \x00", b"a", b"\xff: x"])
        return self._one(names) + b": " + self._one(values)

    def _framed(self, body: bytes) -> tuple[list[bytes], bytes]:
        length = b"Content-Length: %d"
        if self._chance(0.7):
            return [length % len(body)], body
        if self._chance(0.5):
            size = self._random.randint(1, 50)
            chunks = [body[start : start + size] for start in range(0, len(body), size)]
            return [b"Transfer-Encoding: chunked"], b"".join(
                b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks
            ) + b"0\r\n\r\n"
        return self._one([
            ([], body), ([length % (len(body) + 5)], body), ([length % max(0, len(body) - 5)], body), ([b"Content-Length: x"], body),
            ([length % len(body), length % len(body)], body), ([length % len(body), b"Content-Length: 1"], body),
            ([b"Transfer-Encoding: chunked", length % len(body)], b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
            ([b"Transfer-Encoding: chunked"], b"zz\r\n" + body), ([b"Transfer-Encoding: gzip"], body), ([length % 10**9], body),
        ])  # fmt: skip

    def _body(self) -> bytes:
        if self._chance(0.05):
            return self._one(
                [
                    b"",
                    b"[]",
                    b"null",
                    b"{",
                    b'"',
                    b"[" * 2000,
                    b"\xef\xbb\xbf{}",
                    b"\xff\xfe{\x00}\x00",
                    b"{}{}",
                    b"NaN",
                    b" " * 3000,
                ]
            )
        fields: dict[str, Any] = {}
        if self._chance(0.95):
            fields["input"] = self._input()
        while self._chance(0.3):
            fields[self._one(FIELDS)] = self._value(2)
        body = orjson.dumps(fields)
        return self._mutated(body) if self._chance(0.1) else body

    def _input(self) -> Any:
        if self._chance(0.7):
            return self._one(["a", ["a", "b c"], ["x"] * 20, [101, 102], [[101, 102], [101]], "one two three"])
        return self._value(3)

    def _value(self, depth: int) -> Any:
        kind = self._random.randrange(8 if depth else 5)
        if kind == 0:
            return self._one([None, True, False])
        if kind == 1:
            number = self._one(ODD_NUMBERS)
            return number if -(2**63) <= number < 2**64 else orjson.Fragment(str(number))
        if kind < 5:
            return self._one(ODD_TEXTS)
        if kind < 7:
            return [self._value(depth - 1) for _ in range(self._random.randrange(4))]
        return {self._one(FIELDS): self._value(depth - 1) for _ in range(self._random.randrange(3))}

    def _mutated(self, data: bytes) -> bytes:
        """Some bytes changed, taken out or doubled."""
        changed = bytearray(data)
        for _ in range(self._random.randint(1, 4)):
            if changed:
                place = self._random.randrange(len(changed))
                changed[place : place + self._random.randrange(3)] = self._random.randbytes(self._random.randrange(3))
        return bytes(changed)
