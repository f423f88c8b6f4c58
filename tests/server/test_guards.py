"""The guards' own parts: options, access, memory, and what an app sends. (What they are for is tested in tests/faults.)"""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi import call
from fake_embedder import FakeEmbedder
from whimbrel.errors import SetupError
from whimbrel.server.app.app import create_app
from whimbrel.server.app.guards import GuardMiddleware
from whimbrel.server.app.limits import ServerLimits, host_name, read_server_limits
from whimbrel.server.app.request_context import RequestMiddleware, sanitize
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.http.limits import limit_silence
from whimbrel.server.settings_table import read_settings

JSON = {"content_type": "application/json"}
PATH = "/v1/embeddings"
MIB = 2**20
HOSTS = [
    "a.example",
    "A.example:1",
    "a.example.",
    "b.example",
    "10.0.0.7",
    "10.0.0.8:80",
    "localhost",
    "[::1]",
    "[::2]",
    "",
    "a/b",
]


def read(**given: Any) -> ServerLimits:
    """Read limits as `serve` does: `environ` has the variables, all others but `address` and `warn` are flags."""
    address, warn = given.pop("address", "127.0.0.1"), given.pop("warn", lambda text: None)
    settings = read_settings(given, (), given.pop("environ", {}))
    return read_server_limits(settings, address=address, max_inflight_bytes=ServerLimits().max_inflight_bytes, warn=warn)


# Options


def test_the_defaults_ask_for_nothing_and_answer_on_loopback() -> None:
    assert read() == ServerLimits()
    assert (ServerLimits().api_keys, ServerLimits().hosts, ServerLimits().origins) == ((), (), ())


def test_options_travel_as_json() -> None:
    options = read(api_key=["k"], allowed_host=["a.example"], cors_origin=["https://b.example"], public_metrics=True)
    assert msgspec.json.decode(msgspec.json.encode(options), type=ServerLimits) == options
    anywhere = read(address="0.0.0.0")
    assert msgspec.json.decode(msgspec.json.encode(anywhere), type=ServerLimits) == anywhere


def test_keys_do_not_show_in_a_repr() -> None:
    assert "s3cret" not in repr(read(api_key=["s3cret"]))


def test_keys_come_from_options_and_file_or_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n# old\n  one  \ntwo\n#three\none\n")
    file.chmod(0o600)
    environ = {"WHIMBREL_API_KEY": " from env, with commas "}
    assert read(environ=environ).api_keys == ("from env, with commas",)
    assert read(environ=environ, api_key=["a", "b", "a"]).api_keys == ("a", "b")
    assert read(environ=environ, api_key_file=file).api_keys == ("one", "two")
    assert read(environ=environ, api_key_file=file, api_key=["two", "three"]).api_keys == ("two", "three", "one")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
def test_a_file_of_keys_that_everybody_can_read_is_warned_of(mode: int, warned: bool, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret")
    file.chmod(mode)
    said: list[str] = []
    read(api_key_file=file, warn=said.append)
    assert bool(said) == warned
    assert "s3cret" not in "".join(said)


@pytest.mark.parametrize("keys", [[" "], [""], ["a", ""], ["nö"], ["a\nb"], ["a\x7f"]])
def test_keys_that_cannot_be_used(keys: list[str], tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        read(api_key=keys)
    if len(keys) == 1:
        with pytest.raises(SetupError):
            read(environ={"WHIMBREL_API_KEY": keys[0]})


def test_files_of_keys_that_cannot_be_used(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("comments", b"# only\n"), ("binary", b"\xff\xfe"), ("accents", "nö".encode())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SetupError):
            read(api_key_file=tmp_path / name)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SetupError, match="cannot read the API keys"):
            read(api_key_file=path)


@pytest.mark.parametrize(
    ("address", "given", "hosts"),
    [
        ("127.0.0.1", [], ()), ("::1", [], ()), ("127.0.0.9", ["A.example:80", "b"], ("a.example", "b")), ("127.0.0.1", ["*"], None),
        ("0.0.0.0", [], None), ("10.0.0.1", [], None), ("0.0.0.0", ["a.example"], ("a.example",)), ("::", ["[FE80:0::1]"], ("fe80::1",)),
    ],
)  # fmt: skip
def test_hosts_depend_on_the_address(address: str, given: list[str], hosts: tuple[str, ...] | None) -> None:
    assert read(address=address, allowed_host=given).hosts == hosts


def test_origins_are_as_browsers_write_them() -> None:
    given = ["https://App.example.com/", "http://a.example:80", "https://b.example:443", "http://c.example:8080", "*"]
    expected = ("https://app.example.com", "http://a.example", "https://b.example", "http://c.example:8080", "*")
    assert read(cors_origin=given).origins == expected


@pytest.mark.parametrize("host", ["a/b", "http://a", "a b", "", "user@a", "*.example.com"])
def test_wrong_hosts(host: str) -> None:
    with pytest.raises(SetupError, match="allowed_host takes"):
        read(allowed_host=[host])


@pytest.mark.parametrize(
    "origin", ["app.example.com", "null", "https://a/b", "ftp://a", "https://", "https://u@a", "https://a b"]
)
def test_wrong_origins(origin: str) -> None:
    with pytest.raises(SetupError, match="cors_origin takes"):
        read(cors_origin=[origin])


def test_limits_come_from_the_environment() -> None:
    options = read(environ={"WHIMBREL_GUARDS": '{"max_body_bytes": 1000, "body_idle_timeout": 2}'}, api_key=["k"])
    assert (options.max_body_bytes, options.body_idle_timeout, options.api_keys) == (1000, 2, ("k",))


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"nope": 1}', '{"api_keys": ["x"]}', '{"hosts": null}', '{"max_body_bytes": "1"}', '{"max_body_bytes": 0}', '{"body_idle_timeout": -1}',
     '{"max_body_bytes": 1.5}', '{"max_inflight_bytes": 1000}',
     '{"write_pause": 1e9}', '{"header_timeout": 1e300}', '{"max_connections": 100000000000000000000}', '{"max_headers": 2e12}'],
)  # fmt: skip
def test_wrong_limits(text: str) -> None:
    with pytest.raises(SetupError, match=r"WHIMBREL_GUARDS|max_inflight_bytes is"):
        read(environ={"WHIMBREL_GUARDS": text})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_keys_are_taken_out_of_the_command_line() -> None:
    code = (
        "import sys; from whimbrel.server.app.limits import read_server_limits as read;"
        "from whimbrel.server.settings import Settings;"
        "keys = (sys.argv[2], sys.argv[3].partition('=')[2], 'k-3');"
        "assert read(Settings(api_key=keys), address='127.0.0.1', max_inflight_bytes=1).api_keys == keys;"
        "print(open('/proc/self/cmdline').read().replace(chr(0), ' '))"
    )
    command = [sys.executable, "-c", code, "--api-key", "key-1", "--api-key=k2", "--model", "k2s", "--set", "api_key=k-3"]
    title = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert title.strip().endswith("--api-key xxxxx --api-key=xx --model k2s --set api_key=xxx")


# Access


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Example.COM", "example.com"), ("a:8000", "a"), ("a.:1", "a"), ("127.0.0.1", "127.0.0.1"), ("[::1]:80", "::1"), ("[0::0:1]", "::1"),
        ("my_service", "my_service"), ("", None), (":80", None), ("a:", None), ("a:b", None), ("a/", None), ("a?", None), ("a b", None),
        ("u@a", None), ("[::1", None), ("[::g]", None), ("::1", None), ("a\n", None), ("a,b", None), ("ü", None), ("a" * 300, None), ("-a", None),
    ],
)  # fmt: skip
def test_host_names(header: str, name: str | None) -> None:
    assert host_name(header) == name


def test_the_address_that_was_called_is_an_allowed_host() -> None:
    """So probes that know only the address get through where names are given."""
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(hosts=("a.example",)))

    async def status(host: str, server: str) -> int:
        async def at(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"server": (server, "8000")}, receive, send)

        return (await call(at, path="/health", headers={"host": host})).status

    assert asyncio.run(status("a.example:1", "10.0.0.7")) == 200
    assert asyncio.run(status("10.0.0.7:8000", "10.0.0.7")) == 200
    assert asyncio.run(status("localhost", "10.0.0.7")) == 200
    assert asyncio.run(status("10.0.0.8", "10.0.0.7")) == 403
    assert asyncio.run(status("b.example", "10.0.0.7")) == 403


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from(["10.0.0.7", "10.0.0.8", None])), max_size=8))
def test_a_host_that_was_right_lets_no_other_in(asked: list[tuple[str, str | None]]) -> None:
    """It is remembered together with the address, which may be its only right."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    options = ServerLimits(hosts=("a.example",))
    shared = GuardMiddleware(app, options)

    async def status(edge: GuardMiddleware, host: str, server: str | None) -> int:
        async def at(scope: Any, receive: Any, send: Any) -> None:
            await edge(scope | {"server": server and (server, 8000)}, receive, send)

        return (await call(RequestMiddleware(at, str), headers={"host": host})).status

    for each in asked:
        assert asyncio.run(status(shared, *each)) == asyncio.run(status(GuardMiddleware(app, options), *each))


def test_any_host_where_none_is_given() -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(hosts=None))
    assert asyncio.run(call(app, path="/health", headers={"host": "any.example"})).status == 200
    assert asyncio.run(call(app, path="/health", headers={"host": "a/?x="})).status == 400


def test_the_engine_learns_whose_request_it_is_and_not_the_key() -> None:
    async def main(options: ServerLimits, sent: list[dict[str, str]]) -> list[str]:
        embedder = FakeEmbedder()
        app = create_app(ModelRegistry(embedder), guards=options)
        for headers in sent:
            assert (await call(app, "POST", PATH, body=b'{"input":"a"}', headers=JSON | headers)).status == 200
        return [scheduling.tenant for scheduling in embedder.schedulings]

    keys = ServerLimits(api_keys=("s3cret-1", "s3cret-2"))
    sent = [
        {"authorization": "Bearer s3cret-2"},
        {"api_key": "s3cret-2"},
        {"x_api_key": "s3cret-1"},
        {"api_key": "wrong", "x_api_key": "s3cret-1"},
    ]
    assert asyncio.run(main(keys, sent)) == ["key2", "key2", "key1", "key1"]
    assert asyncio.run(main(ServerLimits(), [{}, {"authorization": "Bearer any"}])) == ["", ""]


# Every answer


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {}, 200), ("GET", "/nope", {}, 404), ("GET", PATH, {}, 405), ("POST", PATH, {}, 200), ("POST", PATH, {"host": "evil.com"}, 403),
        ("POST", PATH, {"host": ""}, 400), ("POST", PATH, {"origin": "null"}, 403), ("POST", PATH, JSON | {"content_length": str(2**40)}, 413),
        ("GET", "/health", {"x_a": "a" * 2**17}, 431), ("POST", PATH, JSON, 200), ("POST", PATH, {"sec_fetch_mode": "no-cors"}, 415), ("GET", "/info", {"api_key": "wrong"}, 401),
        ("OPTIONS", PATH, {"origin": "https://a.example", "access_control_request_method": "POST"}, 200),
    ],
    ids=str,
)  # fmt: skip
def test_every_answer_has_an_id_and_is_what_it_says_it_is(method: str, path: str, headers: dict[str, str], status: int) -> None:
    guards = ServerLimits(api_keys=("k",), origins=("https://a.example",))
    headers = {"api_key": "k", "x_request_id": "id-1"} | headers
    told = asyncio.run(
        call(create_app(ModelRegistry(FakeEmbedder()), guards=guards), method, path, body=b'{"input":"a"}', headers=headers)
    )
    assert told.status == status
    assert told.headers["x-request-id"] == "id-1"
    assert told.headers["x-content-type-options"] == "nosniff"
    headers["x_request_id"] = "not one\x1b"
    told = asyncio.run(
        call(create_app(ModelRegistry(FakeEmbedder()), guards=guards), method, path, body=b'{"input":"a"}', headers=headers)
    )
    assert len(told.headers["x-request-id"]) == 32


def test_what_is_shown_of_what_a_client_sent() -> None:
    assert sanitize("/v1/ü") == "/v1/ü"
    assert sanitize("a\r\nb\x1b[31m") == r"'a\r\nb\x1b[31m'"
    assert sanitize("\u2028\u202e") == r"'\u2028\u202e'"
    assert len(sanitize("x" * 10**6)) < 110
    assert all(sanitize(chr(code) * 3).isprintable() for code in range(0x3000))


# Bodies and answers


def test_a_body_in_any_pieces_is_the_same() -> None:
    body = b'{"input": ["a", "b"], "dimensions": 3}'

    async def main() -> list[bytes]:
        app = create_app(ModelRegistry(FakeEmbedder()))
        splits = [[body], [body[:1], body[1:]], [bytes([byte]) for byte in body], [b"", body, b""]]
        return [(await call(app, "POST", "/v1/embed", body=split, headers=JSON)).body for split in splits]

    answers = asyncio.run(main())
    assert b'"dense":[[' in answers[0]
    assert len(set(answers)) == 1


@pytest.mark.parametrize("kind", ["announced", "in chunks", "gzip"])
def test_bodies_in_memory_are_limited(kind: str) -> None:
    """Over the limit a body is not read before an answer frees what it held. Nothing is refused, and queries pass."""
    size = 100_000
    options = ServerLimits(max_body_bytes=size, max_inflight_bytes=5 * size // 2)
    text = b'{"input": "a", "user": "%b"}' % os.urandom(size // 2 - 50).hex().encode()
    body = gzip.compress(text) if kind == "gzip" else text
    pieces = [body[:10], body[10:]]
    headers = JSON | {"content_length": str(len(body))}
    if kind == "in chunks":
        headers |= {"content_length": "0", "transfer_encoding": "chunked"}
    elif kind == "gzip":
        headers |= {"content_encoding": "gzip"}

    async def main() -> None:
        embedder = FakeEmbedder()
        app = create_app(ModelRegistry(embedder), guards=options)
        embedder.go.clear()
        waiting = [asyncio.create_task(call(app, "POST", PATH, body=pieces, headers=headers)) for _ in range(12)]
        while len(embedder.requests) < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        num_read = len(embedder.requests)
        assert 1 <= num_read <= 2
        late = await call(app, "POST", PATH, body=pieces, headers=headers | {"x_request_timeout": "0.01"})
        assert (late.status, msgspec.json.decode(late.body)["error"]["code"]) == (504, "deadline_exceeded")
        query = asyncio.create_task(call(app, "POST", PATH, body=b'{"input": "a"}', headers=JSON))
        while len(embedder.requests) == num_read:
            await asyncio.sleep(0.01)
        waiting.pop().cancel()  # the last one waits for memory
        assert app._app.memory.used <= options.max_inflight_bytes  # type: ignore[attr-defined]
        embedder.go.set()
        assert [(await task).status for task in (*waiting, query)] == [200] * 12
        assert app._app.memory.used == 0  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0), ({"x_stainless_retry_count": "0", "x_stainless_read_timeout": "30"}, 0),
        ({"x_stainless_retry_count": "2", "x_stainless_read_timeout": "30.0"}, 60), ({"x_stainless_retry_count": "1"}, 60),
        ({"x_stainless_retry_count": "999", "x_stainless_read_timeout": "600"}, 3600),
        ({"x_stainless_retry_count": "9" * 999, "x_stainless_read_timeout": "1e308"}, 3600),
        *(({"x_stainless_retry_count": "1", "x_stainless_read_timeout": wrong}, 0) for wrong in ("", "soon", "nan", "-5", "None")),
        *(({"x_stainless_retry_count": wrong, "x_stainless_read_timeout": "30"}, 0) for wrong in ("", "-1", "1.5", "many")),
    ],
)  # fmt: skip
def test_a_client_that_comes_back_says_how_long_it_has_waited(headers: dict[str, str], seconds: float) -> None:
    """OpenAI's clients send the header. A header with another value counts as none."""
    embedder = FakeEmbedder()
    app = create_app(ModelRegistry(embedder))
    assert asyncio.run(call(app, "POST", PATH, body=b'{"input": "a"}', headers=JSON | headers)).status == 200
    assert embedder.schedulings[0].waited == seconds


@pytest.mark.parametrize(
    ("path", "body", "priority"),
    [
        (PATH, b'{"input": "a", "priority": -3}', -3), (PATH, b'{"input": "a"}', 0),
        ("/v2/embed", b'{"texts": ["a"], "priority": 4}', 4), ("/invocations", b'{"input": "a", "priority": 5}', 5),
        ("/embed", b'{"inputs": "a", "priority": 6}', 0),
    ],
)  # fmt: skip
def test_the_engine_learns_the_priority_of_a_body(path: str, body: bytes, priority: int) -> None:
    """TEI's API has no priority."""
    embedder = FakeEmbedder()
    app = create_app(ModelRegistry(embedder))
    assert asyncio.run(call(app, "POST", path, body=body, headers=JSON)).status == 200
    assert embedder.schedulings[0].priority == priority


@pytest.mark.parametrize("body", [b"{", b'{"input": 3}', b'{"input": "a"}' + b" " * 2000])
def test_a_body_that_was_refused_holds_nothing(body: bytes) -> None:
    async def main() -> None:
        app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(max_body_bytes=1000, max_inflight_bytes=1000))
        for _ in range(200):
            assert (await call(app, "POST", PATH, body=[body], headers=JSON)).status in (400, 413)
        assert (await call(app, "POST", PATH, body=b'{"input": "a"}', headers=JSON)).status == 200

    asyncio.run(main())


@pytest.mark.parametrize(("rows", "whole"), [(10, True), (400, False)])
def test_a_large_answer_goes_out_in_pieces(rows: int, whole: bool) -> None:
    body = b'{"input": ["a"%b], "dimensions": 1024}' % (b', "a"' * (rows - 1))
    told = asyncio.run(call(create_app(ModelRegistry(FakeEmbedder())), "POST", PATH, body=body, headers=JSON))
    assert told.status == 200
    assert (len(told.pieces) == 1) == whole
    assert told.headers.get("content-length") == (str(len(told.body)) if whole else None)  # it is printed while it is sent
    assert whole or max(map(len, told.pieces)) <= MIB // 4
    rows_sent = msgspec.json.decode(told.body)["data"]
    assert np.array(rows_sent[-1]["embedding"]).shape == (1024,)


def test_what_other_servers_ask_beside_requests_is_answered() -> None:
    """The lifespan messages of uvicorn are answered at once, since an app is ready when it is made."""
    told: list[str] = []

    async def receive() -> Any:
        return {"type": "lifespan.shutdown" if told else "lifespan.startup"}

    async def send(message: Any) -> None:
        told.append(message["type"])

    asyncio.run(create_app(ModelRegistry(FakeEmbedder()))({"type": "lifespan"}, receive, send))
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# Connections


def test_a_process_holds_fewer_connections_than_it_may_open_files() -> None:
    code = (
        "import os, resource; from whimbrel.server.http.listener import connection_limit as limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); few = limit(1024);"
        "assert 1 <= few <= 64 - len(os.listdir('/proc/self/fd')), few; assert limit(5) == 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_opens_as_many_files_as_the_system_lets_it() -> None:
    code = (
        "import resource; from whimbrel.server.processes.child_process import raise_file_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)); raise_file_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "4096"


def test_only_the_listener_at_the_port_gets_a_limit_of_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        limit_silence(listener, 1.5)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


# Whose error it is


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/embeddings", {"input": "a"}, {"error", "detail"}),
        ("/v1/embeddings", {"input": "a", "input_type": None, "output_dtype": "int8"}, {"detail"}),
        ("/v1/embeddings", {"input": "a", "task": "text-matching"}, {"detail"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_k": 1}, {"detail"}),
        ("/rerank", {"query": "a", "texts": ["b"]}, {"error", "error_type"}),
    ],
)
def test_what_is_refused_unread_is_refused_in_the_words_of_its_dialect(path: str, body: Any, fields: set[str]) -> None:
    sent, served = orjson.dumps(body), ModelRegistry(FakeEmbedder())
    headers = JSON | {"content_length": str(len(sent))}
    draining = ModelRegistry(FakeEmbedder())
    draining.draining = True
    refusals = [
        (create_app(served, guards=ServerLimits(api_keys=("k",))), headers, 401),
        (create_app(served), headers | {"origin": "https://evil.com"}, 403),
        (create_app(draining), headers, 503),
        (create_app(served), headers | {"x_request_timeout": "soon"}, 422 if "error_type" in fields else 400),
    ]
    for app, sent_headers, status in refusals:
        told = asyncio.run(call(app, "POST", path, body=sent, headers=sent_headers))
        assert told.status == status
        assert not told.body or set(orjson.loads(told.body)) == fields
    large = sent + b" " * 2**16
    told = asyncio.run(call(refusals[0][0], "POST", path, body=large, headers=JSON | {"content_length": str(len(large))}))
    assert told.status == 401  # in whichever words: so much is not read for one that may not ask
