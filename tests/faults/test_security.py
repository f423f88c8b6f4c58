"""Security: access, information in answers, and text of clients in logs."""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from asgi import call
from fake_embedder import FakeEmbedder
from raw_http import ask, head, post
from serving import Server
from texts import TEXTS
from whimbrel import Client, Engine, errors
from whimbrel.server.app.app import create_app
from whimbrel.server.app.guards import OPEN_PAGES, OPEN_PATHS, Keys
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.keys import plain_keys
from whimbrel.server.pages.files import POLICY
from whimbrel_bench.processes import family

GOLDEN = "A whimbrel is a wader."
FIRST, SECOND, THIRD = "first-s3cret-key", "second-s3cret-key", "third-s3cret-key"
KEYS = ServerLimits(api_keys=(FIRST, SECOND))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three keys, two from the command line and one from a file, and a page that may call."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# of the team\n\n{THIRD}\n")
    file.chmod(0o600)
    options = (
        "--api-key",
        FIRST,
        f"--api-key={SECOND}",
        "--api-key-file",
        str(file),
        "--cors-origin",
        "https://app.example.com",
    )
    with Server(*options) as server:
        yield server


@pytest.fixture(autouse=True)
def still_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did: the server is ready, says nothing of a bug, and a text has the same bits as in-process."""
    if "server" not in request.fixturenames:
        yield
        return
    server, engine = request.getfixturevalue("server"), request.getfixturevalue("engine")
    yield
    assert_well(server, engine)


def assert_well(server: Server, engine: Engine) -> None:
    assert ask(server.port, head("GET", "/health/ready")).status == 200
    with Client(server.url, api_key=FIRST) as client:
        assert np.array_equal(client.embed(GOLDEN), engine.embed(GOLDEN))
    assert "Traceback" not in server.log


# Keys


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route of the app, as it stands."""
    app = create_app(ModelRegistry(FakeEmbedder()))
    return [(method, path.replace("{model}", "fake")) for path, methods in app.methods.items() for method in methods]


@pytest.mark.parametrize(("method", "path"), [*routes(), ("GET", "/nope"), ("DELETE", "/info"), ("OPTIONS", "/v1/embeddings")])
def test_H1_every_route_but_the_health_checks_asks_for_a_key(method: str, path: str) -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=KEYS)
    told = asyncio.run(call(app, method, path, body=b'{"input":"a"}', headers={"content_type": "application/json"}))
    is_page = path in OPEN_PAGES or path.startswith("/assets/")
    assert told.status == (200 if path in OPEN_PATHS or (method != "POST" and is_page) else 401)
    assert ("www-authenticate" in told.headers) == (told.status == 401)
    if method != "HEAD" and told.status == 401:
        assert not told.body or b"API key" in told.body  # in the shape of the route's dialect; TEI's is empty


@pytest.mark.parametrize(("method", "path"), routes())
def test_H1_with_a_key_every_route_answers(method: str, path: str) -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=KEYS)
    headers = {"content_type": "application/json", "authorization": f"Bearer {FIRST}"}
    answer = asyncio.run(call(app, method, path, body=b"{}", headers=headers))
    # A body without its fields is none of any route, but of Ollama's, where it asks for nothing.
    assert answer.status in ((200,) if method != "POST" or path.startswith("/api/") else (400, 422))


def test_H1_the_open_routes_are_these() -> None:
    assert sorted(OPEN_PATHS) == ["/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"]
    assert sorted(OPEN_PAGES) == ["/", "/docs", "/openapi.json"]


@pytest.mark.parametrize("public", [False, True])
def test_H1_metrics_are_open_where_asked_for(public: bool) -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(api_keys=(FIRST,), public_metrics=public))
    assert asyncio.run(call(app, path="/metrics")).status == (200 if public else 401)
    assert asyncio.run(call(app, path="/info")).status == 401


@pytest.mark.parametrize(
    "path",
    [
        "//info",
        "/health/../info",
        "/info/",
        "/INFO",
        "/health%2f..%2finfo",
        "/info?x=/health",
        "/health#/../info",
        "/health/ready/../../info",
    ],
)
def test_H1_no_spelling_of_a_path_goes_around(path: str, server: Server) -> None:
    assert ask(server.port, head("GET", path)).status in ((200,) if path.startswith("/health#") else (401,))


WRONG_KEYS: list[dict[str, str]] = [
    {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"},
    {"authorization": FIRST}, {"authorization": f"Basic {FIRST}"}, {"authorization": f"Bearer {FIRST[:-1]}"}, {"authorization": f"Bearer {FIRST}x"},
    {"authorization": f"Bearer {FIRST} {SECOND}"}, {"authorization": f"Bearer {FIRST},{SECOND}"}, {"authorization": "Bearer \xff\xfe"},
    {"authorization": f"Bearer {FIRST.upper()}"}, {"authorization": "Bearer " + "x" * 30_000}, {"api_key": "wrong"}, {"api_key": ""},
    {"x_api_key": f"Bearer {FIRST}"}, {"cookie": f"api-key={FIRST}"}, {"proxy_authorization": f"Bearer {FIRST}"},
]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG_KEYS, ids=lambda value: str(value)[:40])
def test_H2_wrong_keys(headers: dict[str, str], server: Server) -> None:
    for request in (head("GET", "/info", **headers), post({"input": "a"}, **headers)):
        answer = ask(server.port, request)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("key", [FIRST, SECOND, THIRD])
@pytest.mark.parametrize(
    "header", [("authorization", "Bearer {}"), ("authorization", "bearer   {} "), ("api_key", "{}"), ("x_api_key", "{}")]
)
def test_H2_any_of_the_keys_in_any_of_the_usual_headers(key: str, header: tuple[str, str], server: Server) -> None:
    assert ask(server.port, head("GET", "/info", **{header[0]: header[1].format(key)})).status == 200


def test_H2_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys(plain_keys(["a", "b" * 100, "c"]))
    for given, name in ((b"a", "key1"), (b"c", "key3"), (b"b", None), (b"", None)):
        compared.clear()
        found = keys.find([(b"x-api-key", given)])
        assert (found and found.name) == name
        assert compared == ([] if name is None else [(32, 32)])  # digests: lengths do not depend on what was given


def test_H2_the_clients_say_unauthorized(server: Server) -> None:
    with Client(server.url, api_key="no") as client, pytest.raises(errors.Unauthorized):
        client.embed("a")


def test_H3_a_key_is_seen_nowhere(server: Server) -> None:
    said = [
        ask(server.port, head("GET", path, authorization=f"Bearer {FIRST}")).body
        for path in ("/info", "/metrics", "/docs", "/openapi.json", "/v1/models")
    ]
    said += [ask(server.port, head("GET", "/info", **headers)).body for headers in WRONG_KEYS]
    said.append(ask(server.port, post({"input": "a", "model": "x"}, authorization=f"Bearer {FIRST}")).body)
    said.append(ask(server.port, head("GET", "/nope", api_key=FIRST)).body)
    for process in family(server.process.pid):
        said.append(Path(f"/proc/{process}/cmdline").read_bytes())
        said.append(Path(f"/proc/{process}/comm").read_bytes())
    said += [server.log.encode(), repr(KEYS).encode()]
    assert not [text for text in said if b"s3cret" in text.lower()]
    assert "required" in server.log


def test_H3_a_key_of_the_environment_is_in_no_child_s_title_either() -> None:
    with Server(WHIMBREL_API_KEY=FIRST) as server:
        assert ask(server.port, head("GET", "/info")).status == 401
        titles = [Path(f"/proc/{process}/cmdline").read_bytes() for process in family(server.process.pid)]
        assert not [title for title in titles if b"s3cret" in title]
        assert server.stop() == 0
        assert "s3cret" not in server.log


@pytest.mark.parametrize("option", [(), ("--api-key", FIRST)], ids=["variable", "option"])
def test_H3_a_key_is_in_no_child_s_environment(option: tuple[str, ...]) -> None:
    """Nor a token of the Hub in a worker's; engines download."""
    variable = "SOME_KEY" if option else "WHIMBREL_API_KEY"
    others = {"WHIMBREL_API_KEY": "0ther-s3cret"} if option else {}
    with Server(*option, "--workers", "2", **{variable: FIRST, "HF_TOKEN": "hf_t0ken", **others}) as server:
        assert ask(server.port, head("GET", "/info")).status == 401
        assert ask(server.port, head("GET", "/info", authorization=f"Bearer {FIRST}")).status == 200
        workers, engines = (
            [Path(f"/proc/{process}/environ").read_bytes() for process in server.children(kind)]
            for kind in ("worker", "engine")
        )
        assert (len(workers), len(engines)) == (2, 1)
        assert not [each for each in (*workers, *engines) if b"s3cret" in each.lower() or b"WHIMBREL_API_KEY" in each]
        assert not [each for each in workers if b"hf_t0ken" in each]
        assert all(b"HF_TOKEN=hf_t0ken" in each for each in engines)


# Traces in files


@pytest.mark.parametrize(
    "evil",
    ["\x1b[31mred", "a\rb", "%0d%0aerror: forged", "%1b[2J", "%00", "\u2028".encode().decode("latin-1"), "{0.__class__}%s%n"],
)
def test_H4_what_a_client_sends_cannot_forge_the_log(evil: str, server: Server) -> None:
    before = server.log
    key = {"authorization": f"Bearer {FIRST}"}
    for request in (
        head("GET", f"/v1/models/{evil}", **key), head("GET", f"/{evil}", **key), head("GET", "/info", x_request_id=evil, **key),
        post({"input": "a", "model": evil}, **key), post({"input": "a", "model": "x\r\nerror: forged\x1b[31m"}, **key),
        head("GET", "/info", authorization=f"Bearer {evil}"), head("GET", "/info", host=evil), head(f"GET{evil}", "/info"),
    ):  # fmt: skip
        answer = ask(server.port, request)
        assert answer.status < 500
        assert not [byte for byte in answer.body if byte < 32], answer.body
        assert "forged" not in str(answer.headers)
    assert server.log == before


def test_H4_a_bug_s_line_in_the_log_shows_the_path_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        embedder = FakeEmbedder()
        embedder.plan = Broken()
        told = await call(create_app(ModelRegistry(embedder)), "GET", f"/v1/models/{EVIL}")
        assert told.status == 500

    asyncio.run(main())
    message = next(record.getMessage() for record in caplog.records if record.name == "whimbrel")
    assert message.isprintable()
    assert "evil" in message


EVIL = "evil\rERROR forged \x1b[31m\u2028"


class Broken:
    """A plan that fails with words that no client should read."""

    served_name = EVIL
    aliases = adapters = ()

    @property
    def max_length(self) -> int:
        raise RuntimeError(f"secret of {sys.prefix}")


def test_H5_an_error_tells_nothing_of_the_inside() -> None:
    class Failing(FakeEmbedder):
        async def run(self, request: Any, scheduling: Any) -> Any:
            raise RuntimeError(f"secret of {sys.prefix}")

    app = create_app(ModelRegistry(Failing()))
    told = asyncio.run(call(app, "POST", "/v1/embeddings", body=b'{"input":"a"}', headers={"content_type": "application/json"}))
    assert told.status == 500
    assert told.headers["x-request-id"]
    for word in (b"secret", sys.prefix.encode(), b"Traceback", b"line ", b".py"):
        assert word not in told.body


def test_H5_no_answer_names_a_file(server: Server) -> None:
    key = {"api_key": FIRST}
    requests = [
        post(b"{", **key), post({"input": 3}, **key), post({"input": "a", "model": "../x"}, **key), head("GET", "/nope", **key), head("POST", "/info", **key),
        post({"input": [10**9]}, **key), post({"input": "a", "prompt_name": "x"}, **key), head("GET", "/info"), head("GET", "/info", host="evil.com"),
    ]  # fmt: skip
    for request in requests:
        body = ask(server.port, request).body.decode()
        assert not [
            word for word in ("Traceback", ".py", "site-packages", sys.prefix, str(Path.home()), "whimbrel/") if word in body
        ], body


# Hosts, origins, CORS


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "0.0.0.0", "10.0.0.1", "[::2]", "127.1"]
)
def test_H6_other_hosts_are_refused(host: str, server: Server) -> None:
    """A page whose name was made to point to this machine (DNS rebinding) still sends that name."""
    answer = ask(server.port, head("GET", "/info", host=host, api_key=FIRST))
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert "allowed_host" in answer.error["message"]
    assert ask(server.port, post({"input": "a"}, host=host, api_key=FIRST)).status == 403
    assert ask(server.port, head("GET", "/health", host=host)).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.8.9.1:80", "[::1]", "[0:0:0:0:0:0:0:1]:8000"]
)
def test_H6_this_machine_s_own_names_are_fine(host: str, server: Server) -> None:
    assert ask(server.port, head("GET", "/info", host=host, api_key=FIRST)).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.com",
        "null",
        "http://app.example.com",
        "https://app.example.com.evil.com",
        "https://app.example.com:444",
        "x",
    ],
)
def test_H6_other_pages_may_not_post(origin: str, server: Server) -> None:
    answer = ask(server.port, post({"input": "a"}, origin=origin, api_key=FIRST))
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in answer.headers
    preflight = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    answer = ask(server.port, head("OPTIONS", "/v1/embeddings", origin=origin, **preflight))
    assert answer.status == 400
    assert "access-control-allow-origin" not in answer.headers


def test_H6_a_page_that_may_call_can(server: Server) -> None:
    """A browser asks first, without a key."""
    origin = {"origin": "https://app.example.com"}
    wanted = "authorization,content-type,traceparent,x-request-id,x-request-timeout,x-stainless-os,x-stainless-retry-count"
    answer = ask(
        server.port,
        head(
            "OPTIONS", "/v1/embeddings", access_control_request_method="POST", access_control_request_headers=wanted, **origin
        ),
    )
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == origin["origin"]
    allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(wanted.split(",")) <= set(allowed)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "Origin" in answer.headers["vary"]
    for key, status in ((FIRST, 200), ("wrong", 401)):
        answer = ask(server.port, post({"input": "a"}, authorization=f"Bearer {key}", **origin))
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == origin["origin"]
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "server-timing", "retry-after", "x-whimbrel-tokens", "x-whimbrel-truncated"} <= set(exposed)


def test_H6_a_page_of_this_server_may_post(server: Server) -> None:
    host = f"localhost:{server.port}"
    assert ask(server.port, post({"input": "a"}, host=host, origin=f"http://{host}", api_key=FIRST)).status == 200


def test_H6_cors_is_off_by_default() -> None:
    app = create_app(ModelRegistry(FakeEmbedder()))
    headers = {"origin": "https://app.example.com", "access_control_request_method": "POST"}
    told = asyncio.run(call(app, "OPTIONS", "/v1/embeddings", headers=headers))
    assert told.status == 405
    assert not [name for name in told.headers if name.startswith("access-control")]
    told = asyncio.run(call(app, "GET", "/info", headers=headers))
    assert told.status == 200
    assert not [name for name in told.headers if name.startswith("access-control")]


def test_H6_any_page_never_means_with_credentials() -> None:
    app = create_app(ModelRegistry(FakeEmbedder()), guards=ServerLimits(origins=("*",)))
    headers = {"origin": "https://any.example.com", "content_type": "application/json", "cookie": "a=b"}
    told = asyncio.run(call(app, "POST", "/v1/embeddings", body=b'{"input":"a"}', headers=headers))
    assert told.status == 200
    assert told.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in told.headers


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None],
)
def test_H7_what_a_page_can_post_without_asking_first_is_refused(kind: str | None, server: Server) -> None:
    """These content types need no preflight, so they must not be read as JSON."""
    of_browsers = {"sec_fetch_mode": "no-cors"} if kind is None else {}
    answer = ask(server.port, post({"input": "a"}, content_type=kind, api_key=FIRST, **of_browsers))
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    assert ask(server.port, post({"input": "a"}, content_type=kind, api_key=FIRST, origin="https://evil.com")).status == 403


# Templates: there are none

SSTI = [
    "{{7*7}}", "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "${7*7}", "#{7*7}", "%(x)s",
    "{0.__class__}", "{input}", "{{ 'x' * 10**9 }}", "<%= 7*7 %>",
]  # fmt: skip


def vectors(answer: Any) -> Any:
    assert answer.status == 200, answer
    return np.array([row["embedding"] for row in answer.json()["data"]], np.float32)


@pytest.mark.parametrize("prompt", SSTI)
def test_H14_a_prompt_is_text_and_no_template(prompt: str, server: Server, engine: Engine) -> None:
    began = time.monotonic()
    told = ask(server.port, post({"input": f"a {prompt}", "prompt": prompt}, api_key=FIRST))
    assert np.array_equal(vectors(told)[0], engine.embed(f"{prompt}a {prompt}"))
    named = ask(server.port, post({"input": "a", "prompt_name": prompt}, api_key=FIRST))
    assert (named.status, named.error["param"]) == (400, "prompt_name")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs", "template", "messages", "mm_processor_kwargs"])
def test_H14_requests_bring_no_templates(field: str, server: Server, engine: Engine) -> None:
    told = ask(server.port, post({"input": "a", field: SSTI[1]}, api_key=FIRST))
    assert np.array_equal(vectors(told)[0], engine.embed("a"))


def test_H14_a_checkpoint_s_template_is_not_rendered(tmp_path: Path) -> None:
    from checkpoints.encoders import write_bert
    from checkpoints.files import edit_json
    from checkpoints.sentence_layout import sentence_layout

    write_bert(tmp_path)
    sentence_layout(tmp_path, prompts={"query": SSTI[2], "document": SSTI[6]})
    with Engine(str(tmp_path), dtype="float32") as engine:
        expected = engine.embed(f"{SSTI[2]}bird")
    edit_json(tmp_path / "tokenizer_config.json", chat_template=SSTI[1])
    (tmp_path / "chat_template.jinja").write_text(SSTI[1])
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.array_equal(engine.embed("bird", prompt="query"), expected)


@pytest.mark.extended
def test_H16_the_checks_of_a_server_do_not_vanish_under_python_O(engine: Engine) -> None:
    """CVE-2026-41523: a check that was an `assert`. Its processes are optimised too, and every guard stands."""
    with Server("--api-key", FIRST, "--max-request-tokens", "1000", PYTHONOPTIMIZE="1") as server:
        commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in server.children()]
        assert len(commands) == 2
        assert all("-O" in command for command in commands)
        assert_well(server, engine)
        port = server.port
        assert ask(port, post({"input": "a"})).status == 401
        assert ask(port, post({"input": "a"}, api_key="wrong")).status == 401
        assert ask(port, post({"input": "a"}, host="evil.com", api_key=FIRST)).status == 403
        assert ask(port, post({"input": "a"}, origin="https://evil.com", api_key=FIRST)).status == 403
        assert ask(port, post({"input": "a"}, content_type="text/plain", api_key=FIRST)).status == 415
        assert ask(port, post(b"{", api_key=FIRST)).status == 400
        assert ask(port, head(content_length=10**12, api_key=FIRST)).status == 413
        for texts in ([], ["a", 1], [[30522]], [[-1]], [[]]):
            assert ask(port, post({"input": texts}, api_key=FIRST)).status == 400
        assert ask(port, post({"input": ["a b c"] * 300}, api_key=FIRST)).status == 413
        told = ask(port, post({"input": TEXTS[20:30]}, api_key=FIRST))
        assert np.array_equal(vectors(told), engine.embed(TEXTS[20:30]))
        assert_well(server, engine)
        assert server.stop() == 0


# Pages


TRAVERSALS = [
    "/docs/..%2f..%2fetc%2fpasswd", "/docs/../../etc/passwd", "/docs/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cwindows", "/ui/..%2f..", "/docs/..",
    "/docs/x", "//etc/passwd", "/docs%00.html", "/static/../pyproject.toml", "/v1/models/..%2f..%2fetc%2fpasswd", "/.git/config",
]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
def test_H17_no_path_leads_to_a_file(path: str, server: Server) -> None:
    told = ask(server.port, head("GET", path, api_key=FIRST))
    assert told.status == 404
    assert told.headers["content-type"] == "application/json"
    assert told.error["type"] == "invalid_request_error"
    assert b"root:" not in told.body


PAGES = {"/": {"playground.css", "views.css", "playground.js"}, "/docs": {"docs.css", "docs.js"}}
"""The files that each page loads besides those of both."""


@pytest.mark.parametrize("path", PAGES)
def test_H17_a_page_runs_and_loads_only_files_of_this_server(path: str, server: Server) -> None:
    """Without a key too: the page is the same for all. Its policy allows no script and no style in the page itself."""
    told = ask(server.port, head("GET", path, accept="text/html"))
    assert told.headers["content-security-policy"] == POLICY
    assert told.headers["x-content-type-options"] == "nosniff"
    page = told.body.decode()
    loaded = re.findall(r'<(?:script|img|link)\b[^>]* (?:src|href)="([^"]*)"', page)
    assert set(loaded) == {f"assets/{name}" for name in {"whimbrel.svg", "common.css"} | PAGES[path]}
    assert len(re.findall(r"<(?:script|img|link)\b", page)) == len(loaded)
    evil = r"<(iframe|object|base|style)\b|\s(on\w+|action|style)=|javascript:|https?://(?!127\.0\.0\.1|localhost)"
    assert not re.search(evil, page)


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "localhost<b>", "localhost'\""]
)
def test_H17_what_a_client_sends_is_in_no_page(evil: str, server: Server) -> None:
    """Neither by the Host header, from which the page takes its address, nor by path and query."""
    told = ask(server.port, head("GET", "/docs", host=evil, api_key=FIRST))
    assert told.status == 400
    assert told.headers["content-type"] == "application/json"
    for target in (quote(evil), f"docs?{quote(evil)}", f"v1/models/{quote(evil)}"):
        told = ask(server.port, head("GET", f"/{target}", api_key=FIRST))
        assert told.headers["x-content-type-options"] == "nosniff"
        assert told.headers["content-type"] == "application/json" or evil not in told.body.decode()
