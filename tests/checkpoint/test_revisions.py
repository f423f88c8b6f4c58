"""Models of the hub at a revision: a branch, a tag or a commit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from serving import Server
from whimbrel import Client, Engine
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.cli.main import app
from whimbrel.cli.serve_options import name_models
from whimbrel.errors import SetupError

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one model at two revisions."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate(COMMITS.items()):
        snapshot = folder / "snapshots" / commit
        write_bert(snapshot)
        sentence_layout(snapshot)
        tensors = load_file(snapshot / "model.safetensors")
        save_file(
            {key: tensor * (1 + seed) for key, tensor in tensors.items()}, snapshot / "model.safetensors", {"format": "pt"}
        )
        (folder / "refs" / name).write_text(commit)
    return root


@pytest.fixture(autouse=True)
def _offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("model", "commit"),
    [("org/name", "main"), ("org/name@main", "main"), ("org/name@v1", "v1"), (f"org/name@{COMMITS['v1']}", "v1")],
)
def test_a_revision_is_its_commit(model: str, commit: str, cache: Path) -> None:
    """A branch, a tag or a commit names the files of its commit; the model's name has no revision."""
    found = resolve_checkpoint(model)
    assert (found.name, found.commit, found.folder.name) == ("org/name", COMMITS[commit], COMMITS[commit])


def test_vectors_of_two_revisions_differ(cache: Path) -> None:
    """Each revision has its own weights, and the plan has its commit."""
    vectors = []
    for name, commit in COMMITS.items():
        with (
            Engine(f"org/name@{name}", dtype="float32") as engine,
            Engine(str(cache / "models--org--name" / "snapshots" / commit), dtype="float32") as local,
        ):
            assert (engine.plan.commit, engine.plan.served_name) == (commit, "org/name")
            assert (local.plan.commit, local.plan.served_name) == (commit, "org/name")
            vectors.append(engine.embed("a"))
            np.testing.assert_array_equal(vectors[-1], local.embed("a"))
    assert not np.array_equal(*vectors)


@pytest.mark.parametrize("model", ["org/name@", "org/name@no-such", f"org/name@{'c' * 40}"])
def test_revisions_that_are_not_there(model: str) -> None:
    """A revision that is empty, or in no cache, is one line with the id and the revision."""
    with pytest.raises(SetupError) as caught:
        resolve_checkpoint(model)
    assert model in str(caught.value)
    with pytest.raises(SetupError, match="no hub id"):
        resolve_checkpoint("@main")


def test_a_revision_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's answer that there is no such revision is told with the id and the revision."""

    refs = SimpleNamespace(branches=[SimpleNamespace(name="main")], tags=[SimpleNamespace(name="v1")])
    monkeypatch.setattr(huggingface_hub, "list_repo_refs", lambda _: refs)

    def refuse(*_: object, **__: object) -> None:
        raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub.example")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(SetupError, match=r"org/name has no revision 'v9'") as caught:
        resolve_checkpoint("org/name@v9")
    assert "a branch, a tag or a whole commit" in str(caught.value.hint)
    assert str(caught.value.hint).endswith("; the hub has main, v1")
    monkeypatch.setattr(huggingface_hub, "list_repo_refs", refuse)
    with pytest.raises(SetupError) as caught:
        resolve_checkpoint("org/name@v9")
    assert str(caught.value.hint).endswith("of its repository")


def test_a_revision_that_is_not_in_the_cache() -> None:
    """Without a hub, the error lists the revisions that are in the cache."""
    with pytest.raises(SetupError) as caught:
        resolve_checkpoint("org/name@no-such")
    assert str(caught.value.hint).endswith("; the cache has main, v1")


def test_a_folder_may_have_the_sign(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder whose name has an @ is that folder."""
    shutil.copytree(cache / "models--org--name" / "snapshots" / COMMITS["v1"], tmp_path / "org" / "name@v1")
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name@v1").commit == ""


def test_a_server_answers_to_the_id_with_its_revision(cache: Path) -> None:
    """The model has the name that was typed besides its id, in the banner and for clients."""
    with Server("org/name@v1", "--dtype", "float32") as server, Client(server.url) as client:
        assert "org/name, org/name@v1" in server.log
        expected = client.embed("a")
        for name in ("org/name", "org/name@v1"):
            with Client(server.url, model=name) as named:
                np.testing.assert_array_equal(named.embed("a"), expected)


def test_two_revisions_of_one_model_need_names() -> None:
    """They are refused before anything is loaded, with the option that tells them apart."""
    for models, options in (
        (["org/name@v1", "org/name"], []),
        (["org/name@v1", "org/name@main"], ["--served-name", "a,org/name"]),
    ):
        with pytest.raises(SetupError, match="two models are named org/name") as refused:
            CliRunner().invoke(app, ["serve", *models, *options, "--port", "0"], catch_exceptions=False)
        assert "--served-name A --served-name B" in str(refused.value.hint)
    assert name_models(["org/name@v1", "org/name"], ["a", "b"]) == [("a",), ("b",)]
    assert name_models(["org/name@v1", None], []) == [("org/name", "org/name@v1"), ("sentence-transformers/all-MiniLM-L6-v2",)]


def test_show_has_the_revision() -> None:
    """The commit is shown with the branch or tag that was named, and is in the JSON."""
    shown = CliRunner().invoke(app, ["show", "org/name@v1"])
    assert f"{COMMITS['v1']} (v1)" in " ".join(shown.output.split())
    told = json.loads(CliRunner().invoke(app, ["show", "org/name@v1", "--json"]).output)
    assert told["checkpoint"] == {"name": "org/name", "revision": "v1", "commit": COMMITS["v1"]}
    assert told["plan"]["commit"] == COMMITS["v1"]


def test_a_server_shows_the_commit_and_keeps_it(cache: Path) -> None:
    """Banner and /info show the commit, and an engine that is started again takes the same one."""
    moved = cache / "models--org--name" / "refs" / "main"
    with Server("org/name", "--dtype", "float32") as server, Client(server.url) as client:
        assert COMMITS["main"] in server.log
        expected = client.embed("a")
        info = httpx.get(f"{server.url}/info").json()
        assert (info["models"][0]["plan"]["commit"], info["model_sha"]) == (COMMITS["main"],) * 2
        try:
            moved.write_text(COMMITS["v1"])
            (engine,) = server.children("engine")
            os.kill(engine, signal.SIGKILL)
            np.testing.assert_array_equal(client.embed("a"), expected)
        finally:
            moved.write_text(COMMITS["main"])
