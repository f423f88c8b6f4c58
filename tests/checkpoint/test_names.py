"""Names of folders: a snapshot of the hub, a symbolic link, and paths to the same folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from serving import Server
from whimbrel import Client, Engine
from whimbrel.checkpoint.locate import default_names, resolve_checkpoint
from whimbrel.cli.main import app
from whimbrel.cli.serve_options import name_models
from whimbrel.errors import SetupError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def named(model: str | Path) -> str:
    """The model's name, which is the same for `serve` as for an engine."""
    checkpoint = resolve_checkpoint(str(model))
    assert default_names(str(model)) == (checkpoint.name,)
    return checkpoint.name


def make_snapshot(home: Path, repository: str = "models--org--name") -> Path:
    snapshot = home / "hub" / repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.parametrize("end", ["", "/", "//", "/.", "/./", "/sub/..", "/sub/../"])
def test_a_path_may_end_in_any_way(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slashes, `.` and `..` change neither the name of a folder, nor of a link, nor of a snapshot."""
    folder, snapshot = tmp_path / "bird", make_snapshot(tmp_path)
    (folder / "sub").mkdir(parents=True)
    (snapshot / "sub").mkdir()
    (tmp_path / "current").symlink_to("bird")
    monkeypatch.chdir(tmp_path)
    for start in ("bird", "./bird", "bird/../bird", str(folder), "current/../bird"):
        assert named(start + end) == "bird"
    for start in ("current", "./current", str(tmp_path / "current"), "bird/../current"):
        assert named(start + end) == "current"
    assert named(f"{snapshot}{end}") == "org/name"
    assert resolve_checkpoint(f"{snapshot}{end}").commit == COMMIT


def test_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve .` gives the folder's name, or that of the link through which the shell came; `..` that of the parent."""
    folder = tmp_path / "nest" / "bird"
    folder.mkdir(parents=True)
    (tmp_path / "current").symlink_to(folder)
    monkeypatch.chdir(folder)
    for stated in (str(folder), str(tmp_path), "", "bird", str(tmp_path / "gone")):  # PWD may be of another process
        monkeypatch.setenv("PWD", stated)
        assert [named(each) for each in (".", "./", "..", "../", "../bird")] == ["bird", "bird", "nest", "nest", "bird"]
    monkeypatch.setenv("PWD", str(tmp_path / "current"))
    assert [named(each) for each in (".", "./", "../bird")] == ["current", "current", "bird"]
    assert named("..") == "nest", "the system goes to the parent of the link's target"


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("models--org--name", "org/name"),
        ("models--sentence-transformers--all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("models--gpt2", "gpt2"),
        ("datasets--org--name", COMMIT),
        ("other", COMMIT),
    ],
)
def test_a_snapshot_has_its_hub_id(repository: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot's path gives the hub id and the commit wherever the cache lies, also by links to the cache or a part of it."""
    snapshot = make_snapshot(tmp_path / "home", repository)
    links = {
        tmp_path / "linked": tmp_path / "home",
        tmp_path / "repository": snapshot.parent.parent,
        tmp_path / "all": snapshot.parent,
    }
    for link, target in links.items():
        link.symlink_to(target)
    paths = [snapshot, tmp_path / f"linked/hub/{repository}/snapshots/{COMMIT}"]
    for path in (*paths, tmp_path / "repository" / "snapshots" / COMMIT, tmp_path / "all" / COMMIT):
        assert named(path) == name
        assert resolve_checkpoint(str(path)).commit == (COMMIT if name != COMMIT else "")
    monkeypatch.chdir(snapshot)
    assert named(".") == name


def test_a_link_to_a_snapshot_has_its_own_name(tmp_path: Path) -> None:
    """A link is called by its own name, whatever it leads to; the commit is that of the snapshot."""
    snapshot = make_snapshot(tmp_path)
    (tmp_path / "current").symlink_to(snapshot)
    (tmp_path / "latest").symlink_to("current")
    assert [named(tmp_path / each) for each in ("current", "latest")] == ["current", "latest"]
    assert resolve_checkpoint(str(tmp_path / "current")).commit == COMMIT
    branch = snapshot.parent / "main"
    branch.symlink_to(COMMIT)
    assert (named(branch), resolve_checkpoint(str(branch)).commit) == ("org/name", COMMIT)


def test_two_paths_to_one_folder_are_one_name(tmp_path: Path) -> None:
    """A model that is named twice by different paths is refused before it is loaded; its link is another name."""
    (tmp_path / "bird").mkdir()
    (tmp_path / "current").symlink_to("bird")
    folder = str(tmp_path / "bird")
    with pytest.raises(SetupError, match="two models are named bird"):
        name_models([folder, f"{folder}/."], [])
    assert name_models([folder, str(tmp_path / "current")], []) == [("bird",), ("current",)]


def release(folder: Path, scale: float) -> Path:
    write_bert(folder)
    sentence_layout(folder, heads=())
    tensors = {key: tensor * scale for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_release_does_not_rename_the_model(tmp_path: Path) -> None:
    """Two releases behind one link have one name and their own vectors, and the card, the plan and `show` say that name."""
    (link := tmp_path / "current").symlink_to("release-7")
    vectors = []
    for number in (7, 8):
        release(tmp_path / f"release-{number}", scale=number - 6)
        link.unlink()
        link.symlink_to(f"release-{number}")
        with Engine(link, dtype="float32") as engine:
            assert (engine.card.name, engine.plan.served_name) == ("current", "current")
            vectors.append(engine.embed("a"))
    assert not np.array_equal(*vectors)
    shown = CliRunner().invoke(app, ["show", f"{link}/"])
    assert "model           current\n" in shown.output


def test_a_server_keeps_its_release(tmp_path: Path) -> None:
    """An engine that starts again after the link was moved takes the files of the first, under the same name."""
    old, new = (release(tmp_path / f"release-{number}", scale=number - 6) for number in (7, 8))
    (link := tmp_path / "current").symlink_to(old)
    with Engine(new, dtype="float32") as engine:
        other = engine.embed("a")
    with Server(str(link), "--dtype", "float32") as server, Client(server.url, model="current") as client:
        expected = client.embed("a")
        link.unlink()
        link.symlink_to(new)
        (engine_process,) = server.children("engine")
        os.kill(engine_process, signal.SIGKILL)
        np.testing.assert_array_equal(client.embed("a"), expected)
        assert not np.array_equal(expected, other)
        about = httpx.get(f"{server.url}/info").json()
        assert about["models"][0]["plan"]["served_name"] == "current"
        assert [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["current"]


def test_an_adapter_s_model_may_be_named_by_its_path(tmp_path: Path) -> None:
    """`--adapter MODEL:NAME=FOLDER` knows a model by what was typed and by its default name, besides its --served-name."""
    write_bert(tmp_path / "bird")
    sentence_layout(tmp_path / "bird")
    for model in ("other:law", "bird/:law"):
        with pytest.raises(SetupError, match="is for no model"):
            CliRunner().invoke(
                app, ["serve", str(tmp_path / "bird"), "--adapter", f"{model}=x", "--port", "0"], catch_exceptions=False
            )
    for model in ("bird", str(tmp_path / "bird"), "served"):
        options = [f"--adapter={model}:law=x", f"--adapter={model}:law=y", "--served-name", "served", "--port", "0"]
        with pytest.raises(SetupError, match="two adapters have the name 'law'"):
            CliRunner().invoke(app, ["serve", str(tmp_path / "bird"), *options], catch_exceptions=False)
