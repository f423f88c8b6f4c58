"""The admin routes, their key, and the parts of models while running, each alone."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest

from asgi import Answer, call
from checkpoints.variants import change_weights, write_variant
from fake_embedder import FakeEmbedder, FakePlan
from whimbrel.checkpoint.fingerprint import fingerprint, weight_bytes
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.errors import SetupError
from whimbrel.server.app.admin import AdminAction, Tell
from whimbrel.server.app.app import create_app
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.app.routing import AsyncEmbedder, ModelRegistry
from whimbrel.server.keys import ApiKey, digest_of
from whimbrel.server.processes.admin import run_command
from whimbrel.server.processes.messages import Command, ModelOptions, Planned, Usage
from whimbrel.server.processes.model_memory import next_to_unload
from whimbrel.server.processes.model_table import read_model
from whimbrel.server.processes.probe import TEXTS, Probe, compare, refusal
from whimbrel.server.processes.running_model import NoRoom, RunningModel
from whimbrel.server.settings import keep_seconds
from whimbrel.types.plan import Options, Plan
from whimbrel.types.residence import Residence

KEY = {"authorization": "Bearer an-operator-s-key"}
OPERATOR = ApiKey(name="operator", digest=digest_of("an-operator-s-key"), admin=True)
LIMITS = ServerLimits(api_keys=("a-client-s-key",), keys=(OPERATOR,))
JSON = {"content_type": "application/json"}


def app(limits: ServerLimits = LIMITS) -> tuple[Any, list[tuple[str, bytes]]]:
    told: list[tuple[str, bytes]] = []

    async def command(action: AdminAction, body: bytes, tell: Tell | None = None, /) -> tuple[int, bytes]:
        if body == b"slow":
            await asyncio.sleep(60)
        told.append((action, body))
        if tell is not None:
            tell("sha256:0123456789abcdef", 9, 0)
            tell("sha256:0123456789abcdef", 9, 9)
        return (422, b'{"error":{"message":"the disk is full."}}') if body == b"owner/large" else (200, b"{}")

    return create_app(ModelRegistry(cast(AsyncEmbedder, FakeEmbedder())), guards=limits, command=command), told


def send(method: str, path: str, limits: ServerLimits = LIMITS, body: bytes = b"", **headers: str) -> tuple[Answer, Any]:
    served, told = app(limits)
    return asyncio.run(call(served, method, path, body=body, headers=headers)), told


def test_H15_an_operator_s_commands_are_handed_on() -> None:
    assert send("GET", "/admin/models", **KEY)[1] == [("list", b"")]
    assert send("POST", "/admin/models", body=b'{"name":"m"}', **KEY, **JSON)[1] == [("put", b'{"name":"m"}')]
    assert send("DELETE", "/admin/models/owner/name", **KEY)[1] == [("delete", b"owner/name")]
    for action in ("load", "unload"):
        assert send("POST", f"/models/{action}", body=b'{"model":"m"}', **KEY, **JSON)[1] == [(action, b'{"model":"m"}')]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/admin/models", "//admin//models/", "/admin/models/m", "/models/load", "//models/unload/"])
def test_H15_admin_routes_have_a_key_of_their_own(method: str, path: str) -> None:
    for status, headers in ((401, {}), (403, {"authorization": "Bearer a-client-s-key"}), (401, {"api_key": "wrong"})):
        answer, told = send(method, path, **headers, **JSON)
        assert (answer.status, told) == (status, [])
    assert send("POST", "/v1/embeddings", body=b'{"input":"x"}', **KEY, **JSON)[0].status == 403
    assert send("GET", "/admin", **KEY)[0].status == 404


def test_H15_without_a_key_there_are_no_admin_routes() -> None:
    client = {"authorization": "Bearer a-client-s-key"}
    for limits in (ServerLimits(), replace(LIMITS, keys=())):
        for method in ("GET", "POST", "DELETE"):
            assert send(method, "/admin/models", limits, **client, **JSON)[0].status == 404
            assert send(method, "/models/load", limits, **client, **JSON)[0].status == 404
    without = create_app(ModelRegistry(cast(AsyncEmbedder, FakeEmbedder())), guards=LIMITS)  # as asgi.py makes it
    assert asyncio.run(call(without, "GET", "/admin/models", headers=dict(KEY))).status == 404


@pytest.mark.parametrize("origins", [(), ("https://a.example",), ("*",)])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_H15_no_page_of_another_site_changes_models(method: str, origins: tuple[str, ...]) -> None:
    limits, path = replace(LIMITS, origins=origins), "/admin/models/m" if method == "DELETE" else "/admin/models"
    answer, told = send(method, path, limits, origin="https://a.example", **KEY, **JSON)
    assert (answer.status, told) == (403, [])


OPERATES = replace(LIMITS, keys=(replace(OPERATOR, routes=("/api/embed", "/api/embeddings")),), origins=("https://a.example",))


@pytest.mark.parametrize(
    ("path", "body", "seconds", "loads"),
    [
        ("embed", {"input": "a", "keep_alive": "10m"}, 600.0, False),
        ("embed", {"input": ["a"], "keep_alive": 0}, 0.0, False),
        ("embed", {"input": [], "keep_alive": "1h30m"}, 5400.0, True),
        ("embed", {"keep_alive": "0"}, 0.0, False),
        ("embed", {"input": "", "keep_alive": -1}, None, True),
        ("embeddings", {"prompt": "a", "keep_alive": "-1s"}, None, False),
        ("embeddings", {"keep_alive": 1e300}, None, True),
        ("embeddings", {"keep_alive": "1.5h.5m500ms"}, 5430.5, True),
    ],
)
def test_H15_an_operator_says_how_long_a_model_stays(path: str, body: Any, seconds: float | None, loads: bool) -> None:
    raw, path = orjson.dumps(body | {"model": "fake:latest"}), f"/api/{path}"
    answer, told = send("POST", path, OPERATES, raw, **KEY)
    ((action, handed),) = told
    assert (answer.status, action, orjson.loads(handed)) == (200, "keep", {"model": "fake", "seconds": seconds, "loads": loads})
    for headers in ({"authorization": "Bearer a-client-s-key"}, KEY | {"origin": "https://a.example"}):
        answer, told = send("POST", path, OPERATES, raw, **headers)
        assert (answer.status, told) == (200, [])
    assert send("POST", path, OPERATES, orjson.dumps(body | {"model": "other"}), **KEY)[0].status == 404


def test_H15_an_operator_has_a_model_fetched() -> None:
    answer, told = send("POST", "/api/pull", body=b'{"model":"owner/name:latest"}', **KEY)
    assert (answer.status, told) == (200, [("pull", b"owner/name")])
    file = {"status": "pulling 0123456789ab", "digest": "sha256:0123456789abcdef", "total": 9}
    ends = ["verifying sha256 digest", "writing manifest", "success"]
    assert list(map(orjson.loads, answer.body.splitlines())) == [
        {"status": "pulling manifest"}, file, file | {"completed": 9}, *({"status": end} for end in ends),
    ]  # fmt: skip
    answer, _ = send("POST", "/api/pull", body=b'{"name":"owner/large"}', **KEY)
    assert (answer.status, orjson.loads(answer.body.splitlines()[-1])) == (200, {"error": "the disk is full."})
    for name, status, body in (("name", 200, {"status": "success"}), ("large", 422, {"error": "the disk is full."})):
        answer, _ = send("POST", "/api/pull", body=b'{"name":"owner/%b","stream":false}' % name.encode(), **KEY)
        assert (answer.status, orjson.loads(answer.body)) == (status, body)
    answer, told = send("POST", "/api/pull", body=b'{"name":"slow","stream":false}', x_request_timeout="0.05", **KEY)
    assert (answer.status, told) == (504, [])


def test_H15_other_keys_fetch_nothing() -> None:
    body = b'{"model":"owner/name"}'
    for headers in ({"authorization": "Bearer a-client-s-key"}, KEY | {"origin": "https://a.example"}):
        answer, told = send("POST", "/api/pull", OPERATES, body, **headers)
        assert (answer.status, told) == (404, [])
    assert send("POST", "/api/pull", ServerLimits(), body)[0].status == 404
    for path, status in (("/api/ps", 200), ("/models", 200), ("/api/tags", 403), ("/v1/models", 403)):
        assert send("GET", path, **KEY)[0].status == status
    without = create_app(ModelRegistry(cast(AsyncEmbedder, FakeEmbedder())), guards=LIMITS)  # as asgi.py makes it
    assert asyncio.run(call(without, "POST", "/api/pull", body=body, headers=dict(KEY))).status == 404


def test_H15_bodies_that_are_none() -> None:
    assert send("POST", "/admin/models", body=b"{}", **KEY, content_type="text/plain")[0].status == 415
    assert send("POST", "/admin/models", body=b"x" * (2**20 + 1), **KEY, **JSON)[0].status == 413
    assert send("DELETE", "/admin/models", **KEY)[0].status == 405
    assert send("POST", "/admin/models", body=b"slow", x_request_timeout="0.05", **KEY, **JSON)[0].status == 504


# The table of a model


DEFAULTS = ModelOptions(None, None, Options(dtype="auto", max_queue_tokens=7), num_replicas=2)


def test_states_of_models_as_their_lists_tell_them() -> None:
    """GET /api/ps has the loaded models, GET /models the states of llama-server's router."""
    models = [FakeEmbedder() for _ in range(4)]
    states = Residence("loaded", 2**30, 1_800_000_000.0), Residence("loading"), Residence("unloaded"), Residence("failed")
    for number, (model, residence) in enumerate(zip(models, states, strict=True)):
        model.plan, model.residence = FakePlan(f"m{number}", device="cuda:0"), residence
    app = create_app(ModelRegistry(*cast(list[AsyncEmbedder], models)))
    (running,) = orjson.loads(asyncio.run(call(app, "GET", "/api/ps")).body)["models"]
    assert (running["name"], running["expires_at"]) == ("m0:latest", "2027-01-15T08:00:00.000Z")
    assert (running["size"], running["size_vram"], running["context_length"]) == (2**30, 2**30, 256)
    told = orjson.loads(asyncio.run(call(app, "GET", "/models")).body)["data"]
    assert [(each["status"]["value"], each["status"]["failed"]) for each in told] == [
        ("loaded", False), ("loading", False), ("unloaded", False), ("unloaded", True),
    ]  # fmt: skip


def test_a_table_has_what_a_model_needs() -> None:
    table = {
        "source": "owner/name",
        "revision": "v2",
        "names": ["alias", "m"],
        "keep": "10m",
        "dtype": "int8",
        "prompts": {"q": ""},
    }
    model = read_model("m", table, defaults=DEFAULTS)
    assert (model.model, model.num_replicas, model.keep_seconds, model.names) == ("owner/name@v2", 2, 600.0, ("m", "alias"))
    assert {key: model.options.get(key) for key in ("dtype", "max_queue_tokens", "prompts")} == {
        "dtype": "int8", "max_queue_tokens": 7, "prompts": {"q": ""},
    }  # fmt: skip


def test_a_model_without_a_source_is_the_one_that_it_replaces() -> None:
    """Also with its prompts, since other prompts make other vectors."""
    first = {"source": "owner/name@v1", "names": ["alias"], "keep": "10m", "prompts": {"query": "q: "}, "pooling": "cls"}
    old = read_model("m", first, defaults=DEFAULTS)
    assert read_model("m", {}, defaults=DEFAULTS, old=old) == old
    newer = read_model("m", {"revision": "v2", "max_length": 9}, defaults=DEFAULTS, old=old)
    assert (newer.model, newer.names, newer.pooling, newer.keep_seconds) == ("owner/name@v2", ("m", "alias"), "cls", 600.0)
    assert (newer.options.get("prompts"), newer.options.get("max_length")) == ({"query": "q: "}, 9)
    other = read_model("m", {"source": "owner/other"}, defaults=DEFAULTS, old=old)
    assert other == replace(DEFAULTS, model="owner/other", options=other.options)
    assert (other.options.get("prompts"), other.names) == (None, ("m",))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"sauce": "x"}, "'sauce' is no key of a model"),
        ({"source": 3}, "source is 3; it takes text"),
        ({"replicas": 0}, "replicas is 0"),
        ({"keep": "a while"}, "keep is 'a while'; it takes text such as always"),
        ({"max_length": "7"}, "max_length is '7'"),
        ({"pooling": 3}, "pooling is 3"),
        ({"adapters": {"a": 3}}, "adapters is"),
        ({"revision": "x"}, "revision is stated without a hub id"),
        ({"names": [""]}, "names holds an empty text"),
        ({"names": [" x"]}, "' x' is no name of a model"),
        ({"names": ["a//b"]}, "'a//b' is no name of a model"),
        ({"names": ["../x"]}, "'../x' is no name of a model"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(table: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        read_model("m", table, defaults=DEFAULTS)


@pytest.mark.parametrize("name", ["", ".", "/x", "x/", "a\nb"])
def test_a_name_has_to_fit_into_a_path(name: str) -> None:
    with pytest.raises(SetupError, match="is no name of a model"):
        read_model(name, {}, defaults=DEFAULTS)


def test_a_home_that_nobody_has_is_a_folder_that_is_not_there() -> None:
    stated = {"source": "~no-such-user/x", "revision": "v", "adapters": {"a": "~no-such-user/y"}}
    model = read_model("m", stated, defaults=DEFAULTS)
    assert model.model == "~no-such-user/x@v"
    assert model.options.get("adapters", {})["a"].endswith("/~no-such-user/y")
    with pytest.raises(SetupError, match="no folder ~no-such-user/x"):
        resolve_checkpoint("~no-such-user/x")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"name":"m","min_cosine":NaN}', b'{"name":"\xff"}', b'{"a":' * 2**17])
@pytest.mark.parametrize("action", ["put", "load", "unload"])
def test_H15_a_body_that_is_no_command_is_refused(action: AdminAction, body: bytes) -> None:
    nothing: Any = None
    status, told = asyncio.run(
        run_command(nothing, nothing, Command(0, action, body), start=print, fetch=nothing, draining=False)
    )
    assert (status, orjson.loads(told)["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("text", "seconds"), [("always", None), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("2d", 172800.0)]
)
def test_times_to_keep(text: str, seconds: float | None) -> None:
    assert keep_seconds(text) == seconds


# The probe


def probe(rows: Any, output: str = "dense", promised: int = 0) -> Probe:
    rows_NC = np.asarray(rows, np.float32)
    return Probe(output, rows_NC.shape[1], rows_NC.tobytes(), promised_width=promised)


ROWS = np.random.default_rng(0).standard_normal((len(TEXTS), 8))


def test_probes_agree_by_their_cosine_and_scores_by_their_distance() -> None:
    moved = ROWS.copy()
    moved[4] = [1, 0, 0, 0, 0, 0, 0, 0]
    cosine = moved[4] @ ROWS[4] / np.linalg.norm(ROWS[4])
    found = compare(probe(3 * moved), probe(ROWS))
    assert not isinstance(found, str)
    assert found.text == 4
    assert found.value == pytest.approx(cosine, abs=1e-6)
    scores = np.full((len(TEXTS), 1), 0.5)
    other = scores.copy()
    other[2] = 0.7
    assert compare(probe(other, "scores"), probe(scores, "scores")) == (pytest.approx(0.8, abs=1e-6), 2)
    assert compare(probe(np.zeros_like(ROWS)), probe(np.zeros_like(ROWS))) == (1.0, 0)


def test_a_probe_is_refused_with_its_reason() -> None:
    old, broken = probe(ROWS), ROWS.copy()
    broken[7, 3] = np.nan
    assert refusal([probe(ROWS)], old, 1.0 - 1e-6) is None
    assert "鳥は夜に海を渡る" in (refusal([old, probe(broken)], None, None) or "")
    assert "promise 9" in (refusal([probe(ROWS, promised=9)], old, 0.9) or "")
    assert "the old one 8" in (refusal([probe(ROWS[:, :6])], old, -1.0) or "")
    assert refusal([probe(ROWS[:, :6])], old, None) is None
    assert "is -1.0000" in (refusal([probe(-ROWS)], old, 0.99) or "")
    assert "it gives scores" in (refusal([probe(ROWS, "scores")], old, 0.99) or "")
    assert refusal([Probe("", 0, b"")], Probe("", 0, b""), 0.99) is None  # it takes no plain texts
    assert refusal([Probe("", 0, b"", "it failed")], None, None) == "it failed"


# Fingerprints


def test_a_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    folder = write_variant(tmp_path / "a")
    first = fingerprint(folder)
    copied = shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    (copied / "README.md").write_text("a word")
    assert fingerprint(copied) == first
    assert fingerprint(folder, [copied]) != first
    change_weights(copied, 1, 0.001)
    second = fingerprint(copied)
    assert second != first
    (copied / "tokenizer_config.json").write_text("{}")
    assert fingerprint(copied) not in (first, second)
    (copied / "model.safetensors").write_bytes(b"\xff" * 100)  # which the loader refuses
    assert fingerprint(copied).startswith("files-")
    assert weight_bytes(folder, 2) * 2 == weight_bytes(folder, 4) > 100_000


# Idle models, and memory


PLAN = Plan("m", (), "cpu", "float32", 1, 1, 1, 1, 1.0, 1, 1, False, 0)


def model(number: int, *, memory: int = 0, keep: float | None = None, used: float = 0.0) -> RunningModel:
    made = RunningModel(number, ModelOptions(None, None, Options(), keep_seconds=keep), state="ready", last_used=used)
    made.planned = Planned("", "", replace(PLAN, served_name=str(number)), 0)
    made.engines[0].planned, made.engines[0].memory = made.planned, memory
    return made


def test_the_least_recently_used_model_makes_room() -> None:
    always, old, recent, new = (
        model(0, memory=40),
        model(1, memory=30, keep=9, used=1),
        model(2, memory=30, keep=9, used=2),
        model(3),
    )
    models = [always, recent, old, new]
    assert next_to_unload(models, 10, 110, "cpu", keep=new) is None
    assert next_to_unload(models, 11, 110, "cpu", keep=new) is old
    assert next_to_unload(models, 11, 20, "cuda:0", keep=new) is None  # another device
    recent.state = "unloading"
    assert next_to_unload(models, 11, 110, "cpu", keep=new) is recent
    with pytest.raises(NoRoom, match="3 takes 71 bytes or more; memory is 110 bytes, of which 40 are taken"):
        next_to_unload(models, 71, 110, "cpu", keep=new)
    recent.state = "loading"
    with pytest.raises(NoRoom):
        next_to_unload(models, 41, 110, "cpu", keep=new)


def test_a_model_is_idle_if_all_workers_say_so() -> None:
    kept = model(0, keep=10.0)
    assert not kept.has_been_idle([0, 1])
    kept.note_use(0, 100.0, Usage(0, 85.0))
    assert not kept.has_been_idle([0, 1])  # the other has not reported
    kept.note_use(1, 101.0, Usage(0, 0.0))
    assert kept.has_been_idle([0, 1])
    kept.note_use(1, 102.0, Usage(1, 0.0))
    assert not kept.has_been_idle([0, 1])
    kept.note_use(1, 111.0, Usage(0, 102.5))
    assert not kept.has_been_idle([0, 1])
    kept.note_use(0, 112.6, Usage(0, 85.0))
    kept.note_use(1, 112.7, Usage(0, 102.5))
    assert kept.has_been_idle([0, 1])
    kept.is_retiring = True
    assert not kept.has_been_idle([0, 1])


def test_names_lead_to_other_models_at_once() -> None:
    first, second = FakeEmbedder(), FakeEmbedder()
    served = ModelRegistry(cast(AsyncEmbedder, first))
    assert served.find("fake:latest") is first
    served.switch([cast(AsyncEmbedder, second)])
    assert served.find("fake") is served.find(None) is second
    served.switch([])
    assert orjson.loads(asyncio.run(call(create_app(served), "GET", "/v1/models")).body)["data"] == []
