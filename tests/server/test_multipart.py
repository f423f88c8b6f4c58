"""The parser of multipart/form-data: the same parts however the bytes come, and wrong bodies refused."""

from __future__ import annotations

import random

import httpx2
import pytest

from whimbrel.dialects.common.bodies import MalformedBody
from whimbrel.server.batches.multipart import MultipartParser, Part, boundary_of

BODY = (
    b"a preamble\r\n--xyz\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\n'
    b'content-type: application/jsonl\r\nContent-Disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n\r\n'
    b"one\r\n--xy\r\n\r\n--xy--\r\r\n-two\r\n--xyz\r\n"
    b"Content-Disposition: form-data; name=empty\r\n\r\n\r\n--xyz--\r\nan epilogue\r\n--xyz\r\n"
)
PARTS = [
    (Part("purpose", None), b"batch"),
    (Part("file", 'a "b".jsonl'), b"one\r\n--xy\r\n\r\n--xy--\r\r\n-two"),
    (Part("empty", None), b""),
]  # fmt: skip


def parse(pieces: list[bytes], boundary: bytes = b"xyz") -> list[tuple[Part, bytes]]:
    parser, parts = MultipartParser(boundary), list[tuple[Part, bytes]]()
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, Part):
                parts.append((event, b""))
            else:
                parts[-1] = parts[-1][0], parts[-1][1] + event
    parser.close()
    return parts


def test_parts_are_the_same_however_the_bytes_come() -> None:
    assert parse([BODY]) == PARTS
    assert parse([BODY[i : i + 1] for i in range(len(BODY))]) == PARTS
    for place in range(len(BODY)):
        assert parse([BODY[:place], BODY[place:]]) == PARTS
    chance = random.Random(1)
    for _ in range(100):
        cuts = sorted(chance.sample(range(len(BODY)), 9))
        assert parse([BODY[a:b] for a, b in zip([0, *cuts], [*cuts, len(BODY)], strict=True)]) == PARTS


def test_what_httpx_writes_is_read() -> None:
    data = random.Random(2).randbytes(100_000) + b"\r\n--"
    request = httpx2.Request("POST", "http://x/", data={"purpose": "batch"}, files={"file": ('ü".jsonl', data)})
    boundary = boundary_of(request.headers["content-type"])
    assert boundary is not None
    (_, purpose), (file, content) = parse([request.read()], boundary)
    assert (purpose, file.name, content) == (b"batch", "file", data)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--xyz", b"--xyz\r\n", BODY[:-40], b"--other--", b"--xyz\r\n\r\ndata\r\n--xyz--", b"--xyzz\r\n",
        b'--xyz\r\nContent-Disposition: form-data; filename="a"\r\n\r\n\r\n--xyz--',
        b"--xyz\r\nx: " + b"y" * 10_000, b"--xyz\r\nx: " + b"y" * 10_000 + b"\r\n\r\n",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 40 + b"--xyz--",
    ],
)  # fmt: skip
def test_a_body_that_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        parse([body])


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("multipart/form-data; boundary=xyz", b"xyz"),
        ('Multipart/Form-Data; charset=utf-8; boundary="x y"', b"x y"),
        ("multipart/form-data", None),
        ("application/json; boundary=xyz", None),
        ("multipart/form-data; boundary=" + "x" * 71, None),
    ],
)
def test_the_boundary_of_a_content_type(text: str, boundary: bytes | None) -> None:
    assert boundary_of(text) == boundary
