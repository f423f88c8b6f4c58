"""Bulk runs by servers: the same files as by an engine, also while a server is away, and never of two models."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from bulk_runs import bulk, dense_of, documents, table_of, write_lines
from serving import Server
from whimbrel import Client, Engine
from whimbrel.bulk.chunks import Chunking
from whimbrel.bulk.embedder import EngineEmbedder, ServerEmbedder
from whimbrel.errors import Overloaded, SetupError, Unavailable


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def embedder_of(client: Client, **options: Any) -> ServerEmbedder:
    return ServerEmbedder(client, (), options, wait_seconds=options.pop("wait_seconds", 30), tell=lambda _: None)


def test_a_server_gives_the_rows_of_an_engine(client: Client, engine: Engine, tmp_path: Path) -> None:
    """Vectors and marks of cut texts are those of an engine; revision and settings of the server are in the manifest."""
    rows = list(documents(600))
    rows[50]["text"], rows[60]["text"] = "far " * 400, "off " * 300
    path = write_lines(tmp_path / "rows.jsonl", rows)
    bulk(path, tmp_path / "engine", EngineEmbedder(engine, (), {}), id_column="id", shard_rows=200)
    embedder = embedder_of(client)
    totals, _ = bulk(path, tmp_path / "server", embedder, id_column="id", shard_rows=200)
    assert embedder.revision == engine.plan.revision
    assert embedder.settings == {"dtype": engine.plan.dtype, "max_length": 256}
    assert (totals.done, totals.cut) == (600, 2)
    one, other = table_of(tmp_path / "engine"), table_of(tmp_path / "server")
    assert one.drop_columns(["dense"]).equals(other.drop_columns(["dense"]))
    if engine.plan.same_bits:
        assert np.array_equal(dense_of(tmp_path / "engine"), dense_of(tmp_path / "server"))
    assert np.abs(dense_of(tmp_path / "engine") - dense_of(tmp_path / "server")).max() < 1e-2


def test_scores_of_pairs_by_a_server(client: Client, engine: Engine, tmp_path: Path) -> None:
    rows = [{"q": f"river {number % 3}", "text": "far " * (300 if number == 2 else 3)} for number in range(8)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    embedder = ServerEmbedder(client, ("scores",), {}, pairs=True, wait_seconds=5)
    totals, _ = bulk(path, tmp_path / "out", embedder, query="q")
    expected = engine.score([row["q"] for row in rows], [row["text"] for row in rows], truncate=True)
    assert np.abs(dense_of(tmp_path / "out", "scores")[:, 0] - expected).max() < 1e-2
    assert totals.cut == 1
    assert table_of(tmp_path / "out").column("cut").to_pylist()[2]


def test_a_text_that_the_server_refuses(client: Client, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "far " * 400}, {"text": "b"}])
    totals, _ = bulk(path, tmp_path / "out", embedder_of(client, truncate="never"))
    assert (totals.done, totals.refused) == (2, 1)


def test_an_option_that_the_model_does_not_take_ends_before_anything_is_read(client: Client) -> None:
    from whimbrel.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match="dimensions"):
        embedder_of(client, dimensions=7)


class Flaky:
    """A client whose server is away for some answers, or has another model from some answer on."""

    def __init__(self, client: Client, away: int = 0, other_after: int = 10**9) -> None:
        self._client, self._away, self._other_after = client, away, other_after
        self._lock = threading.Lock()
        self.count = 0

    def info(self) -> Any:
        return self._client.info()

    def tokenize(self, texts: Any) -> Any:
        return self._client.tokenize(texts)

    def run(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            self.count += 1
            number = self.count
        if 3 < number <= 3 + self._away:
            raise (Unavailable if number % 2 else lambda text: Overloaded(text, retry_after=0.01))("no answer.")
        answered = self._client.run(*args, **options)
        return answered._replace(revisions=frozenset({"other"})) if number > self._other_after else answered


def test_the_name_chooses_among_the_models_of_a_server(client: Client, engine: Engine) -> None:
    """Settings in the manifest are those of the model that is asked, not of another of the same server."""

    class Several(Flaky):
        def info(self) -> Any:
            other = {"plan": {"served_name": "other", "aliases": ["b"], "dtype": "int8", "max_length": 5}}
            return {"models": [other, *super().info()["models"]]}

    several: Any = Several(client)
    name = engine.plan.served_name
    for model, expected in ((name, (name, 256)), ("b", ("other", 5)), ("unknown", ("unknown", None))):
        embedder = ServerEmbedder(several, (), {}, model=model, wait_seconds=5)
        assert (embedder.model, embedder.settings.get("max_length")) == expected


def test_a_server_that_is_away_is_waited_for(client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    """Requests wait and are sent again; rows keep their order."""
    monkeypatch.setattr("whimbrel.bulk.embedder._FIRST_WAIT", 0.01)
    path = write_lines(tmp_path / "rows.jsonl", list(documents(1000)))
    bulk(path, tmp_path / "steady", embedder_of(client), id_column="id", shard_rows=250)
    told = list[str]()
    flaky: Any = Flaky(client, away=9)
    embedder = ServerEmbedder(flaky, (), {}, wait_seconds=60, tell=told.append)
    bulk(path, tmp_path / "flaky", embedder, id_column="id", shard_rows=250)
    assert table_of(tmp_path / "flaky").equals(table_of(tmp_path / "steady"))
    assert told[0] == "waiting up to 60 s: no answer."
    assert told[-1] == "the servers answer again"


def test_the_wait_is_bounded(client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("whimbrel.bulk.embedder._FIRST_WAIT", 0.01)
    path = write_lines(tmp_path / "rows.jsonl", list(documents(1000)))
    gone: Any = Flaky(client, away=10**9)
    begin = time.monotonic()
    with pytest.raises(SetupError, match=r"gave up after .*no answer"):
        bulk(path, tmp_path / "out", ServerEmbedder(gone, (), {}, wait_seconds=0.5, tell=lambda _: None), shard_rows=200)
    assert time.monotonic() - begin < 60


def test_a_wait_that_a_server_asks_for(client: Client) -> None:
    """A server that says when to come again is asked then; the run ends at once if that is too late."""

    class Busy(Flaky):
        def run(self, *args: Any, **options: Any) -> Any:
            raise Overloaded("the key has no tokens left.", retry_after=3600)

    busy: Any = Busy(client)
    begin = time.monotonic()
    with pytest.raises(SetupError, match=r"gave up after 0 s: the key has no tokens left\."):
        ServerEmbedder(busy, (), {}, wait_seconds=600)
    assert time.monotonic() - begin < 60


def test_another_model_ends_the_run(client: Client, tmp_path: Path) -> None:
    """No folder has vectors of two revisions: the run stops with both names, and finished parts stay."""
    path = write_lines(tmp_path / "rows.jsonl", list(documents(1000)))
    changed: Any = Flaky(client, other_after=5)
    with pytest.raises(SetupError, match=r"the model changed: this run began with revision files-.* answers with other"):
        bulk(path, tmp_path / "out", ServerEmbedder(changed, (), {}, wait_seconds=5), id_column="id", shard_rows=100)
    finished = len(list((tmp_path / "out").glob("part-*.parquet")))
    assert finished < 10
    bulk(path, tmp_path / "out", embedder_of(client), id_column="id", shard_rows=100)
    assert len(table_of(tmp_path / "out")) == 1000


def test_chunks_by_a_server_are_those_of_an_engine(client: Client, engine: Engine, tmp_path: Path) -> None:
    texts = ["short", "🙂 äöü " + "word and other " * 30, "long" * 100]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    for name, embedder in (("server", embedder_of(client)), ("engine", EngineEmbedder(engine, (), {}))):
        bulk(path, tmp_path / name, embedder, chunking=Chunking(10, 2))
    one, other = table_of(tmp_path / "server"), table_of(tmp_path / "engine")
    assert len(one) > 10
    assert one.drop_columns(["dense"]).equals(other.drop_columns(["dense"]))
    with pytest.raises(SetupError, match="chunks of 255 tokens do not fit: the model takes 256"):
        bulk(path, tmp_path / "large", embedder_of(client), chunking=Chunking(255, 0))


def test_headers_reach_the_caller_of_run(client: Client, server: Server) -> None:
    """`Client.run` gives the result of a verb with what the server says beside it."""
    from whimbrel.client import client_verbs

    answered = client.run(client_verbs.embed, ["one", "far " * 400])
    header = httpx2.post(f"{server.url}/v1/embed", json={"input": ["one"]}).headers["x-whimbrel-revision"]
    assert answered.revisions == {header}
    assert answered.num_truncated == 1
    assert answered.num_tokens == 3 + 256
