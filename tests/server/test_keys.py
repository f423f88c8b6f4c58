"""API keys: their tables, what each opens, how refusals look in every API, and the audit log."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson
import pytest

from asgi import Answer, call
from fake_embedder import FakeEmbedder, FakePlan
from whimbrel.dialects import ROUTES, Route
from whimbrel.errors import PermissionDenied, SetupError, Unavailable
from whimbrel.server.app.app import create_app
from whimbrel.server.app.guards import OPEN_ROUTES, Keys
from whimbrel.server.app.limits import ServerLimits, read_server_limits
from whimbrel.server.app.openapi import key_routes
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.budgets import Budgets
from whimbrel.server.keys import ApiKey, check_keys, digest_of, hash_of, make_key, read_keys
from whimbrel.server.settings_table import read_settings
from whimbrel.telemetry import audit, logs
from whimbrel.telemetry.trace import RequestFinished, subscribe

PATH = "/v1/embeddings"
JSON = {"content_type": "application/json"}
BODY = b'{"input": "a"}'
HASH = hash_of("s3cret")


def key_of(text: str, **fields: Any) -> ApiKey:
    """Return the key with this text, which is its name too."""
    return ApiKey(name=text, digest=digest_of(text), **fields)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def post(app: Any, key: str, *, path: str = PATH, body: bytes = BODY, **headers: str) -> Answer:
    return asyncio.run(call(app, "POST", path, body=body, headers=JSON | bearer(key) | headers))


def get(app: Any, key: str, path: str) -> Answer:
    return asyncio.run(call(app, "GET", path, headers=bearer(key)))


def app_of(*keys: ApiKey, embedders: tuple[Any, ...] = (), **limits: Any) -> Any:
    embedders = embedders or (FakeEmbedder(),)
    return create_app(ModelRegistry(*embedders), guards=ServerLimits(keys=keys, **limits))


def named(*names: str) -> Any:
    embedder = FakeEmbedder()
    embedder.plan = FakePlan(served_name=names[0], aliases=names[1:])
    return embedder


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, orjson.loads(answer.body)["error"]["code"]


# The table


def test_a_table_of_keys() -> None:
    table = {
        "search": {"hash": HASH, "models": ["e5"], "routes": ["/v1/embeddings"], "requests_per_minute": 2**63 - 1, "admin": False},
        "ops": {"hash": hash_of("other"), "admin": True, "tokens_per_day": 1},
    }  # fmt: skip
    search, ops = read_keys(table, lambda *_: "whimbrel.toml")
    assert search == ApiKey(
        name="search", digest=digest_of("s3cret"), models=("e5",), routes=("/v1/embeddings",), requests_per_minute=2**63 - 1
    )
    assert (ops.admin, ops.tokens_per_day, ops.has_budget) == (True, 1, True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(search), type=ApiKey) == search
    assert read_keys({}, lambda *_: "whimbrel.toml") == ()


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ({"a": {"hash": HASH, "tokens_per_minit": 1}}, "keys.a.tokens_per_minit is not known", "did you mean tokens_per_minute?"),
        ({"a": {"hash": HASH, "xyz": 1}}, "keys.a.xyz is not known", "one of: hash, models"),
        ({"a": {}}, "keys.a has no hash", "whimbrel key NAME"),
        ({"a": HASH}, "keys.a is no table", "whimbrel key --hash"),
        ({"": {"hash": HASH}}, "cannot be the name of a key", "[keys.search]"),
        ({"a b": {"hash": HASH}}, "cannot be the name", ""), ({"a\nb": {"hash": HASH}}, "cannot be the name", ""), ({"x" * 65: {"hash": HASH}}, "cannot be", ""),
        ({"none": {"hash": HASH}}, "none is the metrics' own", ""), ({"other": {"hash": HASH}}, "other is the metrics' own", ""),
        ({"a": {"hash": HASH}, "b": {"hash": HASH}}, "keys.b and keys.a have the same hash", "make a key for each"),
        ({"a": {"hash": HASH, "requests_per_minute": 0}}, "keys.a.requests_per_minute is 0; it takes a whole number from 1", "no limit"),
        ({"a": {"hash": HASH, "tokens_per_minute": -1}}, "tokens_per_minute is -1", ""), ({"a": {"hash": HASH, "tokens_per_day": 2**63}}, "below 2**63", ""),
        ({"a": {"hash": HASH, "requests_in_flight": 1.5}}, "requests_in_flight is 1.5", ""), ({"a": {"hash": HASH, "tokens_per_day": True}}, "is True", ""),
        ({"a": {"hash": HASH, "tokens_per_day": "9"}}, "of another type", ""), ({"a": {"hash": HASH, "models": []}}, "a list of at least one text", ""),
        ({"a": {"hash": HASH, "models": "e5"}}, "a list of at least one text", ""), ({"a": {"hash": HASH, "routes": ["embed"]}}, "takes paths, not embed", ""),
        ({"a": {"hash": HASH, "admin": "yes"}}, "it takes true or false", ""), ({"a": {"hash": HASH, "models": None}}, "keys.a.models is", ""),
    ],
)  # fmt: skip
def test_H19_a_wrong_table_is_refused_with_the_place_and_the_fix(table: Any, message: str, hint: str) -> None:
    with pytest.raises(SetupError) as told:
        read_keys(table, lambda *_: "whimbrel.toml")
    assert message in told.value.message
    assert told.value.message.startswith("whimbrel.toml: keys.")
    assert hint in (told.value.hint or "")


@pytest.mark.parametrize(
    "entry",
    [
        {"hash": "s3cret-in-plain"}, {"hash": "sha256:s3cret"}, {"hash": HASH + "0"}, {"hash": HASH.upper()}, {"hash": "md5:" + "0" * 32}, {"hash": 5},
        {"hash": ["s3cret"]}, {"key": "s3cret"}, {"api_key": "s3cret"}, {"secret": "s3cret"}, "s3cret",
    ],
)  # fmt: skip
def test_H19_a_key_in_the_place_of_its_hash_is_refused_and_not_shown(entry: Any) -> None:
    with pytest.raises(SetupError) as told:
        read_keys({"a": entry}, lambda *_: "whimbrel.toml")
    assert "`whimbrel key --hash`" in (told.value.hint or "")
    assert "s3cret" not in f"{told.value.message}{told.value.hint}"


def test_H19_a_key_as_a_name_is_refused_and_not_shown() -> None:
    made = make_key()
    for table in (
        {made: {"hash": HASH}},
        {"a": {"hash": made}},
        {"a": {"hash": HASH, made: 1}},
        {"a": {"hash": HASH, "routes": [made]}},
    ):
        with pytest.raises(SetupError) as told:
            read_keys(table, lambda *_: "whimbrel.toml")
        assert made[12:] not in f"{told.value.message}{told.value.hint}"


def test_names_of_models_and_routes_that_are_not_served_are_refused_with_the_nearest() -> None:
    key = key_of("a", models=("e6",), routes=("/v1/embedding", "/admin/models"))
    with pytest.raises(SetupError, match="the key a names the model e6, which is not served") as told:
        check_keys([key], models=["e5", "reranker"], routes=key_routes())
    assert told.value.hint == "did you mean e5?"
    with pytest.raises(SetupError, match="the route /v1/embedding,") as told:
        check_keys([replace(key, models=("e5",))], models=["e5"], routes=key_routes())
    assert told.value.hint == "did you mean /v1/embeddings?"
    check_keys(
        [replace(key, models=("e5",), routes=("/v1/embeddings", "/", "/admin/models"))], models=["e5"], routes=key_routes()
    )


def test_plain_keys_and_those_of_a_file_are_told_apart() -> None:
    def read(*keys: ApiKey) -> ServerLimits:
        settings = read_settings({"api_key": ["one", "two"]}, (), {})
        return read_server_limits(settings, address=None, max_inflight_bytes=2**28, keys=keys)

    limits = read(key_of("search"))
    assert [key.name for key in limits.all_keys] == ["key1", "key2", "search"]
    assert limits.needs_key
    assert msgspec.json.decode(msgspec.json.encode(limits), type=ServerLimits) == limits
    with pytest.raises(SetupError, match="key1 and a are the same"):
        read(ApiKey(name="a", digest=digest_of("one")))
    with pytest.raises(SetupError, match="two API keys are named key2"):
        read(ApiKey(name="key2", digest=digest_of("x")))


def test_made_keys_are_random_and_known_by_their_beginning() -> None:
    made = {make_key() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch("whimbrel_[0-9a-f]{48}", each) for each in made)


# What a key opens


def test_ten_thousand_keys_are_found() -> None:
    keys = Keys([key_of(f"k{number}") for number in range(10_000)])
    for name in ("k0", "k5000", "k9999"):
        found = keys.find([(b"authorization", f"Bearer {name}".encode())])
        assert found is not None
        assert found.name == name
    assert keys.find([(b"authorization", b"Bearer k10000")]) is None


def test_a_key_opens_its_routes_only() -> None:
    app = app_of(key_of("a", routes=(PATH,)), key_of("b"))
    assert post(app, "a").status == 200
    told = post(app, "a", path="/v2/embed", body=b'{"texts": ["a"]}')
    assert told.status == 403
    assert orjson.loads(told.body)["message"] == "the API key a may not use /v2/embed; it may use /v1/embeddings."
    assert code_of(get(app, "a", "/v1/models")) == (403, "permission_denied")
    assert code_of(get(app, "a", "/v1/models/x")) == (403, "permission_denied")
    assert get(app, "a", "/health").status == get(app, "a", "/docs").status == 200
    assert get(app, "a", "/nope").status == 404
    assert post(app, "a", path="/openai//v1/embeddings/").status == 200
    assert get(app, "b", "/v1/models").status == 200
    assert code_of(post(app, "wrong")) == (401, "invalid_api_key")


def test_a_key_sees_its_models_only() -> None:
    app = app_of(key_of("a", models=("small",)), key_of("b"), embedders=(named("e5", "small"), named("big")))

    def model(key: str, name: str | None) -> Answer:
        return post(app, key, body=orjson.dumps({"input": "a"} | ({"model": name} if name else {})))

    assert [model("a", name).status for name in ("e5", "small", "small:latest", None)] == [200] * 4
    assert orjson.loads(model("a", None).body)["model"] == "e5"
    assert code_of(model("a", "big")) == (403, "permission_denied")
    unknown = orjson.loads(model("a", "nope").body)["error"]
    assert unknown["code"] == "model_not_found"
    assert "big" not in unknown["message"]
    assert [model("b", name).status for name in ("e5", "big", None)] == [200, 200, 400]
    for path in ("/v1/models", "/info", "/models"):
        assert b"big" not in get(app, "a", path).body
        assert b"big" in get(app, "b", path).body
    assert get(app, "a", "/v1/models/e5").status == 200
    assert code_of(get(app, "a", "/v1/models/big")) == (403, "permission_denied")


def test_a_key_whose_model_is_not_there_is_told() -> None:
    registry = ModelRegistry(named("big"), num_models=2)
    with pytest.raises(Unavailable):
        registry.find("big", key=key_of("a", models=("e5",)))
    with pytest.raises(PermissionDenied, match="may use e5 and no other model"):
        ModelRegistry(named("big")).find(None, key=key_of("a", models=("e5",)))


def test_admin_routes_exist_with_an_admin_key_only() -> None:
    plain, admin, both = key_of("plain"), key_of("admin", admin=True), key_of("both", admin=True, routes=(PATH,))
    closed = app_of(plain)
    assert get(closed, "plain", "/admin/models").status == 404
    assert get(closed, "wrong", "/admin/models").status == 401
    assert asyncio.run(call(create_app(ModelRegistry(cast(Any, FakeEmbedder()))), path="/admin/models")).status == 404
    opened = app_of(plain, admin, both)
    assert code_of(get(opened, "plain", "/admin/models")) == (403, "permission_denied")
    assert get(opened, "wrong", "/admin/models").status == 401
    assert get(opened, "admin", "/admin/models").status == 404  # no such route yet, but it may ask
    assert code_of(post(opened, "admin")) == (403, "permission_denied")
    assert post(opened, "both").status == 200
    opened.methods["/admin/models"] = closed.methods["/admin/models"] = ("GET",)
    assert code_of(get(closed, "plain", "/admin/models")) == (404, "not_found")  # also where the route exists


# Budgets


def test_an_answer_says_what_is_left() -> None:
    app = app_of(key_of("a", requests_per_minute=60, tokens_per_minute=600))
    told = post(app, "a").headers
    assert told["x-ratelimit-limit-requests"] == "60"
    assert told["x-ratelimit-remaining-requests"] == "59"
    assert re.fullmatch(r"\d+ms|1s", told["x-ratelimit-reset-requests"])
    assert (told["x-ratelimit-limit-tokens"], told["x-ratelimit-remaining-tokens"]) == ("600", "597")
    assert re.fullmatch(r"\d+ms", told["x-ratelimit-reset-tokens"])
    free = post(app_of(key_of("a", models=("fake",))), "a").headers
    assert not [name for name in free if name.startswith("x-ratelimit")]


def test_the_head_is_refused_before_the_body_is_read() -> None:
    embedder = FakeEmbedder()
    app = app_of(key_of("a", requests_per_minute=1), embedders=(embedder,))
    assert post(app, "a").status == 200
    told = post(app, "a", content_length=str(20 * 2**20))  # which never comes
    assert code_of(told) == (429, "rate_limit_exceeded")
    assert 55 <= int(told.headers["retry-after"]) <= 60
    assert told.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in told.headers
    assert get(app, "a", "/health").status == 200
    assert get(app, "a", "/v1/models").status == 429
    assert len(embedder.requests) == 1


def test_tokens_are_charged_before_anything_is_computed() -> None:
    embedder = FakeEmbedder()
    app = app_of(key_of("a", tokens_per_day=10), embedders=(embedder,))
    five = orjson.dumps({"input": ["a"] * 5})
    told = post(app, "a", body=five)
    assert code_of(told) == (413, "request_too_large")
    assert "15 tokens; the API key a may use 10 tokens a day" in orjson.loads(told.body)["error"]["message"]
    assert post(app, "a", body=orjson.dumps({"input": ["a"] * 3})).headers["x-ratelimit-remaining-tokens"] == "1"
    told = post(app, "a")
    assert code_of(told) == (429, "rate_limit_exceeded")
    assert told.headers["x-should-retry"] == "false"  # 4.8 hours
    assert told.headers["x-ratelimit-remaining-tokens"] == "1"
    assert len(embedder.requests) == 1


def test_requests_in_flight_end_with_the_answer_the_error_and_the_client() -> None:
    embedder = FakeEmbedder()
    app = app_of(key_of("a", requests_in_flight=2), embedders=(embedder,))

    def ask(**more: Any) -> Any:
        return asyncio.ensure_future(call(app, "POST", PATH, body=BODY, headers=JSON | bearer("a"), **more))

    async def main() -> None:
        embedder.go.clear()
        leaves = asyncio.Event()
        first, second = ask(), ask(leaves=leaves)
        await asyncio.sleep(0.01)
        assert (await ask()).status == 429
        leaves.set()
        await second
        third = ask()
        await asyncio.sleep(0.01)
        told = await ask()
        assert "may have 2 requests in flight" in orjson.loads(told.body)["error"]["message"]
        assert told.headers["retry-after"] == "1"
        embedder.go.set()
        assert [(await each).status for each in (first, third)] == [200, 200]
        wrong = await call(app, "POST", PATH, body=b"{", headers=JSON | bearer("a"))
        assert wrong.status == 400
        assert [(await each).status for each in (ask(), ask())] == [200, 200]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "left"), [(None, "7"), (Unavailable("x"), "10"), (KeyError("x"), "10"), (OSError("x"), "10")]
)
def test_tokens_of_a_request_that_the_server_failed_come_back(error: Exception | None, left: str) -> None:
    class Failing(FakeEmbedder):
        async def run(self, request: Any, scheduling: Any, *, charge: Callable[[int], None] | None = None) -> Any:
            result = await super().run(request, scheduling, charge=charge)
            if error is not None:
                raise error
            return result

    key = key_of("a", tokens_per_day=10)
    budgets = Budgets.of_one_process([key])
    assert budgets is not None
    app = create_app(ModelRegistry(cast(Any, Failing())), guards=ServerLimits(keys=(key,)), budgets=budgets)
    post(app, "a")
    usage = budgets.usage(key)
    assert usage is not None
    usage.begin()
    assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"].decode() == left


def test_a_refusal_by_a_budget_is_no_overload_in_the_metrics() -> None:
    ended: list[RequestFinished] = []
    end = subscribe(RequestFinished, ended.append)
    app = app_of(key_of("a", requests_per_minute=1, routes=(PATH,)))
    for path in (PATH, PATH, "/v1/rerank"):
        post(app, "a", path=path)
    post(app, "b")
    end()
    found = [(each.outcome, each.tenant, each.status, each.error) for each in ended]
    assert found == [
        ("ok", "a", 200, ""), ("rate_limited", "a", 429, "rate_limit_exceeded"), ("forbidden", "a", 403, "permission_denied"),
        ("unauthorized", "", 401, "invalid_api_key"),
    ]  # fmt: skip
    assert not any(each.is_server_error for each in ended)


# Every API


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path} {route.summary[:20]}")
def test_a_refusal_has_the_shape_of_the_api(route: Route) -> None:
    """Each route refuses a key that may not use it with 403, and a used-up budget with 429, in its own words."""
    elsewhere = "/v1/detokenize" if route.path != "/v1/detokenize" else PATH
    app = app_of(key_of("a", routes=(elsewhere,)), key_of("b", requests_per_minute=1))
    get(app, "b", "/v1/models")
    for key, status, words in (("a", 403, f"may not use {route.path}"), ("b", 429, "1 requests a minute, which are used up")):
        kind = {"content_type": (route.media_types or ("application/json",))[0]}
        told = post(app, key, path=route.path, body=route.example.encode(), **kind)
        assert told.status == status
        body = msgspec.json.decode(told.body, type=route.error_type)
        assert words in str(msgspec.to_builtins(body))
        assert ("retry-after" in told.headers) == (status == 429)


# The audit log


def test_an_audit_line_tells_who_asked_what_and_no_text(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    app = app_of(key_of("a", requests_per_minute=2), key_of("b"))
    end = audit.start(file, unlogged=OPEN_ROUTES)
    post(app, "a", body=b'{"input": ["s3cret text", "b"]}', x_request_id="r-1")
    post(app, "a", body=b"{")
    post(app, "a")
    post(app, "wrong")
    get(app, "b", "/v1/models")
    for path in ("/health", "/", "/docs", "/health/live"):
        get(app, "b", path)
    end()
    end_again = audit.start(file, unlogged=OPEN_ROUTES)
    post(app, "b", path="/nope/s3cret")
    end_again()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert "s3cret" not in text
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert [(line["key"], line["route"], line["status"]) for line in lines] == [
        ("a", PATH, 200), ("a", PATH, 400), ("a", PATH, 429), ("", PATH, 401), ("b", "/v1/models", 200), ("b", "other", 404),
    ]  # fmt: skip
    first = lines[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert 0 < first.pop("seconds") < 5
    del first["time"]
    expected = {"key": "a", "route": PATH, "model": "fake", "status": 200, "texts": 2, "tokens": 6, "request_id": "r-1"}
    assert first == expected


def test_an_audit_log_that_is_moved_away_begins_anew(tmp_path: Path) -> None:
    file, app = tmp_path / "audit.jsonl", app_of(key_of("a"))
    end = audit.start(file)
    post(app, "a")
    while not file.read_bytes():
        pass
    file.rename(tmp_path / "old")
    post(app, "a")
    end()
    assert [len((tmp_path / name).read_bytes().splitlines()) for name in ("old", "audit.jsonl")] == [1, 1]


def test_an_audit_log_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SetupError, match="audit_log cannot be written"):
        audit.start(tmp_path / "none" / "audit.jsonl")
    with pytest.raises(SetupError, match="audit_log cannot be written"):
        audit.start(tmp_path)
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "audit.jsonl"
    end = audit.start(file)
    file.unlink()
    (tmp_path / "folder").rmdir()
    with caplog.at_level(logging.ERROR):
        assert post(app_of(key_of("a")), "a").status == 200
        end()
    assert "the audit log lost 1 lines" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_F11_a_full_disk_costs_lines_of_the_audit_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    end = audit.start(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        assert post(app_of(key_of("a")), "a").status == 200
        end()
    assert "the audit log lost 1 lines: /dev/full: No space left on device" in caplog.text


def test_H3_keys_that_whimbrel_made_are_never_in_a_log() -> None:
    made = make_key()
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        end = logs.configure(logs.LogOptions(access=True), stream=stream)
        get(app_of(key_of("a")), "a", f"/v1/models/{made}")
        get(app_of(key_of("a")), "a", f"/{'x' * 230}{made}")
        end()
    with os.fdopen(read) as lines:
        text = lines.read()
    assert text.count("***") == 2
    assert made[:20] not in text
