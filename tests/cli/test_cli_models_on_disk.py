"""Commands on the models in the hub's cache: pull, list and rm, with a hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import file_download

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from command import Here
from fake_hub import FakeHub, Repository
from whimbrel.checkpoint import hub_download
from whimbrel.checkpoint.cached_models import judge_by_config
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import SetupError

ID = "org/curlew-small"
WEIGHTS = "model.safetensors"
SMALL = {
    "config.json": json.dumps({"model_type": "bert", "architectures": ["BertModel"]}).encode(),
    "README.md": b"---\nlicense: mit\n---\n# Curlew\n",
}
OLD, NEW = (SMALL | {WEIGHTS: Random(seed).randbytes(1_500_000), "tokenizer.json": b"t" * 9000} for seed in (1, 2))
PICKLED = SMALL | {"pytorch_model.bin": b"p" * 9000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with models, and an empty cache."""
    repositories = {
        ID: Repository({"main": NEW | {"onnx/model.onnx": b"o" * 9000, "pytorch_model.bin": b"p" * 9000}, "v1": OLD}),
        "org/pickled": Repository({"main": PICKLED}),
        "org/gated": Repository({"main": NEW}, gated=True, licence="other"),
        "org/adapter": Repository({"main": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a" * 9000}}),
        "org/gguf": Repository({"main": SMALL | {"q4.gguf": b"g" * 9000}}),
    }
    with FakeHub(repositories) as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        constants = {
            "ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "AGENT_HARNESSES_PATH": str(tmp_path / "agents.json"),
        }  # fmt: skip
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value, raising=False)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        yield hub


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    """The folder of contents of the model ID."""
    return tmp_path / "hub" / "models--org--curlew-small" / "blobs"


def partial(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.incomplete"))


def start_pull(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "whimbrel", "pull", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def wait_for_part(folder: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while not any(each.stat().st_size >= size for each in partial(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_was_pulled_is_served_without_a_network(
    hub: FakeHub, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that Whimbrel reads are in the cache, and no others; size, licence and free disk are told before."""
    write_bert(tmp_path / "bert")
    sentence_layout(tmp_path / "bert")
    files = {
        each.relative_to(tmp_path / "bert").as_posix(): each.read_bytes()
        for each in (tmp_path / "bert").rglob("*")
        if each.is_file()
    }
    others = {"pytorch_model.bin": b"p" * 9000, "onnx/model.onnx": b"o" * 9000, "picture.png": b"i"}
    hub.repositories["org/bert"] = Repository({"main": files | others}, licence="apache-2.0")
    out, err = here.run("pull", "org/bert")
    assert re.search(r"org/bert \([0-9a-f]{7}\): .* in \d+ files, licence apache-2.0; .* free on the disk\n", err.decode())
    assert err.decode().endswith("serve it: whimbrel serve org/bert\n")
    folder = Path(out.decode().strip())
    assert {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()} == files.keys()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = resolve_checkpoint("org/bert")
    assert (found.folder, found.commit) == (folder, folder.name)
    assert read_card(found.folder, found.name).outputs


def test_a_pull_tells_programs_what_it_did(hub: FakeHub, here: Here) -> None:
    first, second = (json.loads(here.run("pull", f"{ID}@v1", "--json")[0]) for _ in range(2))
    size = sum(map(len, OLD.values()))
    assert (first["model"], first["revision"], first["licence"], first["bytes"]) == (ID, "v1", "mit", size)
    assert first["files"] == {name: len(data) for name, data in OLD.items()}
    assert (first["fetched_bytes"], second["fetched_bytes"]) == (size, 0)
    assert first["commit"] == Path(first["folder"]).name == hub.repositories[ID].commit("v1")
    assert b"all of it here" in here.run("pull", f"{ID}@{first['commit']}")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.sample(1)
def test_an_interrupted_pull_goes_on(number: int, hub: FakeHub, here: Here, blobs: Path) -> None:
    """The part that was fetched stays and is told; the next pull asks for the rest alone."""
    hub.faults.pause, hub.faults.piece = 0.2, 100_000
    with start_pull(ID) as process:
        wait_for_part(blobs, 2**18)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    if number != signal.SIGKILL:
        assert re.search(
            r"^stopped: \d+ kB of 1\.5 MB are on the disk; the same command goes on from there\.$", said, re.MULTILINE
        )
    (part,) = partial(blobs)
    size = part.stat().st_size
    assert "incomplete: the download is unfinished" in here.run("list")[0].decode()
    hub.faults.pause = 0.0
    folder = Path(here.run("pull", ID)[0].decode().strip())
    assert hub.ranges(WEIGHTS) == ["", f"bytes={size}-"]
    assert (folder / WEIGHTS).read_bytes() == NEW[WEIGHTS]
    assert not partial(blobs)


def test_two_pulls_at_once_are_one_download(hub: FakeHub, here: Here, blobs: Path) -> None:
    """Meanwhile the model is not removed."""
    hub.faults.pause, hub.faults.piece = 120.0, 300_000
    with start_pull(ID) as first:
        wait_for_part(blobs, 2**18)
        with start_pull(ID) as second:
            assert second.stderr is not None
            waits = b"another process is fetching model.safetensors; waiting for it"
            assert any(waits in line for line in second.stderr)
            assert f"{ID} is being fetched" in here.run("rm", ID, "--yes", code=1)[1].decode()
            hub.faults.pause = 0.0
            outs = first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]
            assert (first.returncode, second.returncode) == (0, 0)
    assert outs[0] == outs[1]
    assert hub.bytes_sent[WEIGHTS] == len(NEW[WEIGHTS])


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_broken_connection_goes_on_where_it_broke(
    no_ranges: bool, hub: FakeHub, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a proxy that knows no ranges, from the first byte."""
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    hub.faults.break_after, hub.faults.num_breaks, hub.faults.no_ranges = {WEIGHTS: 700_000}, 1, no_ranges
    folder = Path(here.run("pull", ID)[0].decode().strip())
    assert (folder / WEIGHTS).read_bytes() == NEW[WEIGHTS]
    assert hub.ranges(WEIGHTS) == ["", f"bytes={2 * 2**18}-"]


def test_a_connection_that_always_breaks_is_one_error(
    hub: FakeHub, here: Here, blobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    hub.faults.break_after = {WEIGHTS: 10}
    said = here.run("pull", ID, code=1)[1].decode()
    assert f"error: {hub.url} cannot be reached for {ID} (RemoteProtocolError)" in said
    assert "fetched files stay" in said
    assert partial(blobs)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\0" * len(NEW[WEIGHTS]), "SHA-256 is "),
        (NEW[WEIGHTS] + b"more", "sends more than the 1,500,000 bytes that it states"),
        (NEW[WEIGHTS][:-10], "sends 1,499,990 of the 1,500,000 bytes that it states"),
    ],
)
def test_other_bytes_than_the_hub_promises_are_not_kept(
    content: bytes, says: str, hub: FakeHub, here: Here, blobs: Path
) -> None:
    """A size or a SHA-256 that differs is an error with the file, and the next pull begins anew."""
    hub.faults.content = {WEIGHTS: content}
    said = here.run("pull", ID, code=1)[1].decode()
    assert says in said
    assert WEIGHTS in said
    assert not [each for each in blobs.iterdir() if each.stat().st_size > 10_000]
    hub.faults.content = {}
    folder = Path(here.run("pull", ID)[0].decode().strip())
    assert (folder / WEIGHTS).read_bytes() == NEW[WEIGHTS]


@pytest.mark.parametrize("damage", ["part", "long part", "cut", "link", "left"])
def test_a_pull_repairs_what_is_in_the_cache(damage: str, hub: FakeHub, here: Here, blobs: Path) -> None:
    """A part of other bytes, weights that were cut short or are gone, and parts that a killed process left."""
    folder = Path(here.run("pull", ID)[0].decode().strip())
    blob = (folder / WEIGHTS).resolve()
    if damage in ("part", "long part"):
        blob.rename(f"{blob}.incomplete").write_bytes(b"\0" * (500_000 if damage == "part" else 2_000_000))
    elif damage == "cut":
        blob.write_bytes(NEW[WEIGHTS][:1000])
    elif damage == "link":
        blob.unlink()
        assert "incomplete: a file is missing; whimbrel pull" in " ".join(here.run("list")[0].decode().split())
    else:
        blob.with_name(f"{blob.name}.0123abcd.incomplete").write_bytes(b"\0" * 500_000)
    here.run("pull", ID)
    assert (folder / WEIGHTS).read_bytes() == NEW[WEIGHTS]
    assert not partial(blobs)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/curlew-smal", "did you mean org/curlew-small?"),
        (f"{ID}@v9", "has no revision 'v9'.\nhint: a revision is a branch, a tag or a whole commit of its repository; the hub has main, v1"),
        (f"{ID}@{'0' * 40}", "has no revision"),
        ("org/pickled", "only as pickles, which can run code and are not served.\nhint: whimbrel pull org/pickled --pickles"),
        ("org/adapter", "org/adapter is an adapter, not a model"),
        ("org/gguf", "has no weights as safetensors; it has .gguf"),
        ("org/a b", "is no valid hub id"), ("org/ü", "is no valid hub id"), ("org/..", "is no valid hub id"), ("a/b/c", "no hub id"),
        ("../up", "no folder ../up"), (f"{ID}@", "is no hub id with a revision"), ("", "no hub id"), ("curlew-small", "did you mean"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_pulled(model: str, says: str, hub: FakeHub, here: Here, tmp_path: Path) -> None:
    (tmp_path / "hub/models--org--curlew-small").mkdir(parents=True)
    assert says in here.error("pull", model)


def test_a_folder_and_the_packaged_model_need_no_download(
    hub: FakeHub, here: Here, tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ID).mkdir(parents=True)
    assert f"{ID} is a folder here" in here.error("pull", ID)
    out, err = here.run("pull", "sentence-transformers/all-MiniLM-L6-v2")
    assert (out.decode().strip(), "is packaged with this installation" in err.decode()) == (str(minilm), True)
    assert not hub.requests


def test_answers_of_a_hub_that_gives_nothing(hub: FakeHub, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consent, a wrong token, too many requests, a hub in trouble, another server: one line with what to do, and no token."""
    said = here.run("pull", "org/gated", code=1)[1].decode()
    assert f"hint: ask on {hub.url}/org/gated, then set HF_TOKEN" in said
    hub.faults.token = "right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "it refuses the token: check HF_TOKEN" in here.error("pull", "org/gated")
    for token in ("hf_sécret", "hf_se\x01cret"):
        monkeypatch.setenv("HF_TOKEN", token)
        error = here.error("pull", "org/gated")
        assert "cret" not in error
    monkeypatch.setenv("HF_TOKEN", "right")
    assert b"licence other" in here.run("pull", "org/gated")[1]
    assert not hub.has_leaked
    for status, headers, says in (
        (
            429,
            {"Retry-After": "7"},
            "answers 429 for org/curlew-small.\nhint: it has too many requests from here: try again in 7 s",
        ),
        (429, {}, "try again in some minutes"),
        (500, {}, "answers 500 for org/curlew-small.\nhint: the hub is in trouble"),
        (503, {}, "answers 503"),
    ):
        hub.faults.status, hub.faults.headers = status, headers
        assert says in here.error("pull", ID)
    for page in (b"<html>", b'{"id": "a/b"}', b'{"id": "a/b", "sha": "../../x", "siblings": []}'):
        hub.faults.page = page
        assert "HF_ENDPOINT" in here.error("pull", ID)


def test_a_pull_without_a_network(hub: FakeHub, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert f"HF_HUB_OFFLINE is set, so {ID} is not asked for" in here.error("pull", ID)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for url in ("http://127.0.0.1:9", "ftp://127.0.0.1"):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert f"{url} cannot be reached for {ID}" in here.error("pull", ID)


def test_a_full_disk(hub: FakeHub, here: Here, blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit is refused with both numbers; a disk that fills meanwhile is one line, and the part stays."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
        error = here.error("pull", ID)
        assert f"{ID} needs 1.5 MB more, and the disk of {blobs.parents[1]} has 1.0 MB free." in error
        assert not blobs.exists()
    with monkeypatch.context() as patch:
        write = hub_download._Part.write

        def fill(self: Any, data: Any) -> int:
            if self.tell() > 500_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, data)

        patch.setattr(hub_download._Part, "write", fill)
        said = here.run("pull", ID, code=1)[1].decode()
        assert f"error: the disk of {blobs.parents[1]} is full; what was fetched of {ID} stays." in said
        assert "hint: make room (whimbrel rm MODEL)" in said
    (part,) = partial(blobs)
    here.run("pull", ID)
    assert hub.ranges(WEIGHTS) == ["", f"bytes={2 * 2**18}-"]
    assert not part.exists()


def test_a_disk_that_is_really_full(hub: FakeHub, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of one megabyte takes a megabyte, and the rest after it has grown."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        monkeypatch.setenv("HF_HUB_CACHE", str(small / "hub"))
        assert "has 1.0 MB free" in here.error("pull", ID)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        assert "is full; what was fetched of" in here.run("pull", ID, code=1)[1].decode()
        (part,) = small.glob("hub/*/blobs/*.incomplete")
        size = part.stat().st_size
        assert size > 900_000
        subprocess.run(["mount", "-o", "remount,size=9m", str(small)], check=True)
        folder = Path(here.run("pull", ID)[0].decode().strip())
        assert hub.ranges(WEIGHTS)[-1] == f"bytes={size}-"
        assert (folder / WEIGHTS).read_bytes() == NEW[WEIGHTS]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_cache_that_cannot_be_written_or_read(
    hub: FakeHub, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    said = here.run("pull", ID, code=1)[1].decode()
    assert f"error: cannot write to the hub's cache {tmp_path / 'file' / 'hub'}: Not a directory." in said
    assert "hint: set HF_HOME to a folder that can be written" in said
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    assert "cannot be read" in here.error("list")


@pytest.mark.parametrize("columns", [100, 40])
def test_a_terminal_shows_a_bar(columns: int, hub: FakeHub, blobs: Path) -> None:
    """It fits the width, and is gone at the end; the cursor is shown again."""
    hub.faults.pause, hub.faults.piece = 0.1, 100_000
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "whimbrel", "pull", ID], stderr=follower, stdout=subprocess.PIPE, env=environment
    ) as process:
        os.close(follower)
        said = b""
        try:
            while piece := os.read(leader, 65_536):
                said += piece
        except OSError:  # the end of a terminal
            pass
        assert process.wait(30) == 0
    os.close(leader)
    text = said.decode()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", text)]
    bars = [line for line in lines if "/1.5 MB" in line]
    assert bars
    assert max(map(len, bars)) <= columns
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert [line for line in lines if line][-1].endswith(f"serve it: whimbrel serve {ID}")


def test_list(hub: FakeHub, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a revision, with size, last use, licence, and a verdict with what to do."""
    assert here.run("list")[0].decode().startswith(f"0 models, 0 B, in {tmp_path / 'hub'}.\n")
    for model in (ID, f"{ID}@v1"):
        here.run("pull", model)
    here.run("pull", "org/pickled", "--pickles")
    (tmp_path / "hub/datasets--org--data/snapshots").mkdir(parents=True)
    text = here.run("list")[0].decode()
    commits = {name: hub.repositories[ID].commit(name) for name in ("main", "v1")}
    for name, commit in commits.items():
        assert re.search(rf" {name} {str(commit)[:7]} +1.5 MB +just now +mit +yes\n", text)
    assert "convert\n      its weights are pickles: whimbrel convert org/pickled --out DIR\n" in text
    assert "2 models, 3.0 MB, in " in text
    assert "org/data" not in text
    for columns in (100, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, here.run("list")[0].decode().splitlines())) <= columns
    rows = json.loads(here.run("list", "--json")[0])
    assert [(row["model"], len(row["revisions"])) for row in rows] == [(ID, 2), ("org/pickled", 1)]
    first = next(each for each in rows[0]["revisions"] if each["refs"] == ["v1"])
    assert (first["commit"], first["licence"], first["verdict"]) == (commits["v1"], "mit", "yes")
    weights = (Path(first["folder"]) / WEIGHTS).resolve()
    os.utime(weights, (time.time() - 200_000, time.time()))
    assert "2 days ago" in here.run("list")[0].decode()


@pytest.mark.parametrize(
    ("files", "verdict", "says"),
    [
        ({"config.json": {"model_type": "bert"}}, "no", "its weights are not here"),
        ({"config.json": {"model_type": "bert"}, WEIGHTS: {}}, "yes", ""),
        ({"config.json": {"model_type": "umt5"}, WEIGHTS: {}}, "no", "umt5: its bias of relative positions"),
        ({"config.json": {"model_type": "whisper", "architectures": ["W"]}, WEIGHTS: {}}, "transformers", "whisper is none of"),
        ({"config.json": {"model_type": "model2vec"}, WEIGHTS: {}}, "yes", ""),
        ({"gliner_config.json": {}, WEIGHTS: {}}, "yes", ""),
        ({"0_Transformer/config.json": {"model_type": "bert"}, f"0_Transformer/{WEIGHTS}": {}}, "yes", ""),
        ({"config.json": [], WEIGHTS: {}}, "no", "config.json"),
        ({WEIGHTS: {}}, "no", "config.json: not found"),
        ({"config.json": {"architectures": 3, "model_type": None}, WEIGHTS: {}}, "transformers", "no type"),
    ],
)
def test_a_configuration_is_judged(files: dict[str, Any], verdict: str, says: str, tmp_path: Path) -> None:
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    found, reason = judge_by_config(tmp_path)
    assert (found, says in reason, bool(reason)) == (verdict, True, bool(says))


def test_a_revision_is_removed_and_what_others_need_stays(hub: FakeHub, here: Here, blobs: Path) -> None:
    folders = {name: Path(here.run("pull", f"{ID}@{name}")[0].decode().strip()) for name in ("main", "v1")}
    short = folders["v1"].name[:7]
    assert "nothing was removed: there is no terminal to ask on" in here.run("rm", f"{ID}@v1", code=1)[1].decode()
    assert folders["v1"].exists()
    said = here.run("rm", f"{ID}@{short}", "--yes")[1].decode()
    assert f"{ID} (v1 {short}): frees 1.5 MB. What main {folders['main'].name[:7]} needs stays." in said
    assert "removed; 1.5 MB freed." in said
    assert not folders["v1"].exists()
    for name, data in (SMALL | {WEIGHTS: NEW[WEIGHTS]}).items():
        assert (folders["main"] / name).read_bytes() == data
    assert f"{ID} has no revision 'v1' in the cache.\nhint: it has main" in here.error("rm", f"{ID}@v1", "--yes")
    here.run("rm", f"{ID}@main", "--yes")
    assert not blobs.parent.exists()


def test_names_that_are_not_removed(hub: FakeHub, here: Here, tmp_path: Path) -> None:
    here.run("pull", ID)
    (tmp_path / "hub/datasets--org--data/snapshots").mkdir(parents=True)
    for model, says in (
        ("org/curlew-smal", "did you mean org/curlew-small?"), ("curlew-small", "did you mean org/curlew-small?"),
        ("org/data", "org/data is a dataset, and no model.\nhint: the hub's own command removes it: hf cache rm dataset/org/data"),
        ("zzz/zzz", "`whimbrel list` lists"), (f"{ID}@", "no hub id with a revision"), ("../hub", "is not in the hub's cache"),
        ("", "is not in the hub's cache"), ("*", "is not in the hub's cache"),
    ):  # fmt: skip
        assert says in here.error("rm", model, "--yes")
    assert (tmp_path / "hub/models--org--curlew-small").exists()


@pytest.mark.parametrize("state", ["link", "part", "ref", "file", "empty"])
def test_an_entry_that_is_broken_is_listed_and_removed(
    state: str, hub: FakeHub, here: Here, tmp_path: Path, blobs: Path
) -> None:
    """A link to nothing, an unfinished download, a reference to nothing, a file among the snapshots, an empty folder."""
    here.run("pull", f"{ID}@v1")
    here.run("pull", "org/pickled", "--pickles")
    folder = blobs.parent
    if state == "link":
        next(each for each in blobs.iterdir() if each.stat().st_size > 10_000).unlink()
    elif state == "part":
        shutil.rmtree(folder / "snapshots")
        (blobs / f"{'0' * 64}.incomplete").write_bytes(b"x" * 5000)
    elif state == "ref":
        (folder / "refs" / "main").write_text("0" * 40)
    elif state == "file":
        (folder / "snapshots" / "file").touch()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    text = " ".join(here.run("list")[0].decode().split())
    assert f"incomplete: {'a file is missing' if state == 'link' else ''}" in text
    assert f"whimbrel rm {ID} removes it" in text
    assert "convert" in text, "the other model is listed as before"
    assert json.loads(here.run("list", "--json")[0])[0]["incomplete"]
    assert "remove it wholly" in here.error("rm", f"{ID}@v1", "--yes")
    here.run("rm", ID, "--yes")
    assert not folder.exists()
    assert (tmp_path / "hub/models--org--pickled").exists()


def test_a_copy_of_a_model_stays_when_the_other_is_removed(hub: FakeHub, here: Here, tmp_path: Path) -> None:
    """Copies on the hub have the commits of the original."""
    hub.repositories["org/copy"] = hub.repositories[ID]
    for model in ("org/copy", ID):
        for revision in ("main", "v1"):
            here.run("pull", f"{model}@{revision}")
    here.run("rm", f"{ID}@v1", "--yes")
    rows = {row["model"]: [each["refs"] for each in row["revisions"]] for row in json.loads(here.run("list", "--json")[0])}
    assert rows == {"org/copy": [["main"], ["v1"]], ID: [["main"]]} or rows == {"org/copy": [["v1"], ["main"]], ID: [["main"]]}


def test_the_hub_s_errors_are_those_of_serve_too(hub: FakeHub) -> None:
    with pytest.raises(SetupError, match="org/gated is gated"):
        resolve_checkpoint("org/gated")


@pytest.mark.parametrize("command", [["pull", ID], ["list"], ["rm", ID, "--yes"]])
@pytest.mark.parametrize("address", ["http://[hub", "http://hub:99999"])
def test_an_endpoint_that_is_no_address_is_one_line(address: str, command: list[str]) -> None:
    """In a process of its own, since the client library reads it while it is imported."""
    full = [sys.executable, "-m", "whimbrel", *command]
    done = subprocess.run(
        full, env=os.environ | {"HF_ENDPOINT": address}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: HF_ENDPOINT is no address of a hub: ")
    assert len(done.stderr.splitlines()) == 2
