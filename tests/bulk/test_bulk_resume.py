"""Runs that end early: the same command goes on, and the folder has the bytes of a run that did not end early."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk_runs import HashEmbedder, bulk, documents, faults_of, files_of, table_of, vector_of, write_lines
from whimbrel.bulk import pipeline
from whimbrel.bulk import run as run_of
from whimbrel.bulk.chunks import Chunking
from whimbrel.bulk.embedder import Answer
from whimbrel.bulk.rows import RowReader
from whimbrel.errors import ComputeError, SetupError, WhimbrelError
from whimbrel.types.result import Outputs

ROWS = 400


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of 400 rows, of which some are refused."""
    found: list[Any] = list(documents(ROWS))
    found[33]["text"], found[77]["text"], found[200] = "@@bad", "a @@nan", {"id": "x"}
    return write_lines(tmp_path / "rows.jsonl", found)


@pytest.fixture
def whole(rows: Path, tmp_path: Path) -> dict[str, bytes]:
    """The folder of a run that nothing ended."""
    totals, _ = bulk(rows, tmp_path / "whole", id_column="id", shard_rows=30)
    assert (totals.done, totals.refused, totals.shards) == (397, 3, 14)
    return files_of(tmp_path / "whole")


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
from bulk_runs import HashEmbedder, bulk
from whimbrel.bulk.chunks import Chunking
rows, out, seed, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
job = json.loads(sys.argv[5])
chunking = Chunking(*job.pop("chunk")) if "chunk" in job else None
rng, done = random.Random(seed), 0
for attempt in range(200):
    child = os.fork()
    if child == 0:
        bulk(rows, out, HashEmbedder(seconds=0.02), id_column="id", shard_rows=30, chunking=chunking, **job)
        os._exit(0)
    if done < kills:
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    done += 1
print(done)
"""


@pytest.mark.parametrize("job", [{}, {"format": "npy", "dtype": "int8", "chunk": [20, 5]}], ids=["rows", "chunks"])
def test_a_run_that_is_killed_many_times_has_the_bytes_of_one_that_is_not(rows: Path, job: Any, tmp_path: Path) -> None:
    """A run that SIGKILL ends at random moments goes on, and its files are those of an uninterrupted run."""
    options = {name: value for name, value in job.items() if name != "chunk"}
    chunking = Chunking(*job["chunk"]) if "chunk" in job else None
    bulk(rows, tmp_path / "whole", id_column="id", shard_rows=30, chunking=chunking, **options)
    whole = files_of(tmp_path / "whole")
    support = Path(__file__).parents[1] / "support"
    kills = 0
    for seed in range(1 if job else 2):
        out = tmp_path / f"killed{seed}"
        command = [sys.executable, "-c", KILLED, str(rows), str(out), str(seed), "12", json.dumps(job)]
        env = os.environ | {"PYTHONPATH": f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        kills += int(done.stdout)
        assert files_of(out) == whole
    assert kills >= 5


class _Crash(BaseException):
    """The end of the process at a chosen moment."""


def test_a_run_that_ends_before_any_step_on_disk_goes_on(rows: Path, whole: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Wherever a run ends between two steps on disk, no row is written twice or missing."""
    out, replace, calls = tmp_path / "crashed", Path.replace, 0
    ends_at = iter([0, 1, 2, 3, 2, 4, 3, 1, 5, 2, 0])
    left = next(ends_at)

    def crash(self: Path, target: Path) -> Any:
        nonlocal left, calls
        calls += 1
        if left == 0:
            left = -1
            raise _Crash
        left -= 1
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", crash)
    for attempt in range(11):
        with pytest.raises(_Crash):
            bulk(rows, out, id_column="id", shard_rows=30)
        for path in (out / "part-00003.parquet", out / ".part-00004.parquet.tmp", out / "errors" / ".part-00009.jsonl.tmp"):
            if attempt % 3 == 0 and not path.exists() and path.parent.exists() and (out / "manifest.json").exists():
                path.write_bytes(b"half a fi")
        left = next(ends_at, -1)
    bulk(rows, out, id_column="id", shard_rows=30)
    assert files_of(out) == whole


def test_what_is_finished_is_not_computed_again(rows: Path, whole: Any, tmp_path: Path) -> None:
    """A finished run loads the model and computes nothing but the probe."""
    embedder = HashEmbedder()
    totals, _ = bulk(rows, tmp_path / "whole", embedder, id_column="id", shard_rows=30)
    assert embedder.seen == ["a"]
    assert (totals.done, totals.refused, totals.rows_before) == (397, 3, ROWS)


@pytest.mark.parametrize("verify", [False, True])
def test_a_part_that_was_damaged_runs_again(rows: Path, whole: Any, tmp_path: Path, verify: bool) -> None:
    out = tmp_path / "whole"
    part = out / "part-00002.parquet"
    data = part.read_bytes()
    part.write_bytes(data[:100] + b"x" + data[101:] if verify else data[:-1])
    _, told = bulk(rows, out, id_column="id", shard_rows=30, verify=verify)
    assert [line for line in told.lines if line.startswith("part-00002 runs again")]
    assert files_of(out) == whole


def test_other_settings_are_refused_by_name(rows: Path, whole: Any, tmp_path: Path) -> None:
    """A folder is never mixed: options, model, revision and versions must be those that it was begun with."""
    out, same = tmp_path / "whole", {"id_column": "id", "shard_rows": 30}
    for other, words in (
        ({"dtype": "int8"}, "dtype_out was 'float32', is 'int8'"),
        ({"shard_rows": 31}, "shard_rows was 30, is 31"),
        ({"text": ["text", "id"]}, r"text was \['text'\], is \['text', 'id'\]"),
        ({"id_column": None}, "id was 'id', is not set"),
        ({"embedder": HashEmbedder(revision="r2")}, "revision was 'r1', is 'r2'"),
        ({"options": {"prompt": "query"}}, "prompt was not set, is 'query'"),
    ):
        with pytest.raises(SetupError, match=words):
            bulk(rows, out, **same | other)
    assert files_of(out) == whole
    totals, _ = bulk(rows, out, id_column="id", shard_rows=30, dtype="int8", restart=True)
    assert totals.done == 397
    assert str(table_of(out).schema.field("dense").type) == "fixed_size_list<element: int8>[8]"


def test_input_that_changed_is_refused_by_name(rows: Path, whole: Any, tmp_path: Path) -> None:
    """A file that is longer, other, gone or new is named, and nothing is written."""
    out, data = tmp_path / "whole", rows.read_bytes()
    for change, words in (
        (data + b"{}\n", "rows.jsonl has changed: it had"),
        (data.replace(b"word", b"Word", 1), "as many bytes"),
    ):
        rows.write_bytes(change)
        with pytest.raises(SetupError, match=words):
            bulk(rows, out, id_column="id", shard_rows=30)
    rows.write_bytes(data)
    more = write_lines(tmp_path / "more.jsonl", [{"id": 1, "text": "b"}])
    with pytest.raises(SetupError, match=r"was begun without .*more\.jsonl"):
        bulk([rows, more], out, id_column="id", shard_rows=30)
    rows.rename(tmp_path / "other.jsonl")
    with pytest.raises(SetupError, match="was begun without"):
        bulk(tmp_path / "other.jsonl", out, id_column="id", shard_rows=30)
    assert files_of(out) == whole


def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", list(documents(200)))

    class Changing(HashEmbedder):
        def run(self, texts: Any) -> Any:
            if len(texts) > 1 and len(self.seen) < 20:
                path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')
            return super().run(texts)

    with pytest.raises(SetupError, match=r"rows\.jsonl changed while it was read"):
        bulk(path, tmp_path / "out", Changing(seconds=0.01), id_column="id", shard_rows=20)


def test_a_table_that_shrinks_after_the_survey_ends_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    path, survey = tmp_path / "rows.parquet", run_of.survey
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(3000)]}), path)

    def survey_and_shrink(*args: Any) -> Any:
        found = survey(*args)
        pq.write_table(pa.table({"text": ["text"]}), path)
        return found

    monkeypatch.setattr(run_of, "survey", survey_and_shrink)
    with pytest.raises(SetupError, match=r"rows\.parquet changed while it was read"):
        bulk(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("part-*"))


def test_two_runs_into_one_folder(rows: Path, tmp_path: Path) -> None:
    """The second run is refused at once; the first goes on."""
    begun, go, errors = threading.Event(), threading.Event(), list[BaseException]()

    class Slow(HashEmbedder):
        def run(self, texts: Any) -> Any:
            begun.set()
            assert go.wait(20)
            return super().run(texts)

    def first() -> None:
        try:
            bulk(rows, tmp_path / "out", Slow(), id_column="id")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(SetupError, match="another run writes into"):
        bulk(rows, tmp_path / "out", id_column="id")
    go.set()
    thread.join(20)
    assert not errors
    assert len(table_of(tmp_path / "out")) == 397


def test_a_full_disk_ends_the_run_and_it_goes_on(rows: Path, whole: Any, tmp_path: Path) -> None:
    """A file that cannot be written whole is no file; with room the same command goes on."""
    out = tmp_path / "full"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(map(len, whole.values()))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 200, hard))
        with pytest.raises(SetupError, match=r"cannot write .*part-\d+\.parquet: File too large"):
            bulk(rows, out, id_column="id", shard_rows=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(out.glob("*.tmp"))
    assert not list(out.glob(".*.tmp"))
    bulk(rows, out, id_column="id", shard_rows=30)
    assert files_of(out) == whole


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(rows: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(SetupError, match=r"cannot write .*Permission denied"):
        bulk(rows, closed / "out", id_column="id")


def test_folders_that_are_not_of_a_run_stay_as_they_are(rows: Path, tmp_path: Path) -> None:
    """A folder with other files is refused, also with --restart and with a manifest of somebody else."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(SetupError, match=r"is no folder of a run, but has thesis\.txt"):
            bulk(rows, out, id_column="id", restart=restart)
    (out / "thesis.txt").rename(out / "part-00000.csv")
    (out / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(SetupError, match=r"is no folder of a run, but has manifest\.json"):
        bulk(rows, out, id_column="id", restart=True)
    assert (out / "part-00000.csv").read_text() == "years of work"


def test_manifests_that_cannot_be_read(rows: Path, whole: Any, tmp_path: Path) -> None:
    """A manifest of another format, a broken one and one that was changed are refused; --restart starts anew."""
    out = tmp_path / "whole"
    changed = json.dumps(json.loads(whole["manifest.json"]) | {"schema": ""})
    for content, words in (
        ('{"format": 9}', "is of format 9; this version reads 1"),
        ("{", "is no manifest"),
        ("[]", "is no manifest"),
        (changed, "was changed after it was written"),
    ):
        (out / "manifest.json").write_text(content)
        with pytest.raises(SetupError, match=words):
            bulk(rows, out, id_column="id", shard_rows=30)
    bulk(rows, out, id_column="id", shard_rows=30, restart=True)
    assert files_of(out) == whole


@pytest.mark.parametrize("piece", [".manifest.json.tmp", "errors/.doubled-ids.jsonl.tmp", "errors/doubled-ids.jsonl"])
def test_a_run_that_was_killed_before_its_manifest_goes_on(rows: Path, whole: Any, tmp_path: Path, piece: str) -> None:
    """A folder in which the first files were begun is no folder of somebody else."""
    out = tmp_path / "begun"
    (out / "errors").mkdir(parents=True)
    (out / piece).write_bytes(b"half a l")
    bulk(rows, out, id_column="id", shard_rows=30)
    assert files_of(out) == whole


def test_restart_keeps_files_of_others(rows: Path, whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "whole"
    (out / "notes.md").write_text("mine")
    bulk(rows, out, id_column="id", shard_rows=30, restart=True)
    assert files_of(out) == whole | {"notes.md": b"mine"}


@pytest.mark.parametrize("slow", ["model", "disk"])
def test_few_shards_are_in_memory_at_once(rows: Path, tmp_path: Path, monkeypatch: Any, slow: str) -> None:
    """Reading runs ahead of the model, and the model of the disk, by a bounded number of shards."""
    lock, alive, most = threading.Lock(), 0, 0
    read, write = RowReader.read, pipeline.write_shard

    def count(change: int) -> None:
        nonlocal alive, most
        with lock:
            alive += change
            most = max(most, alive)

    def counted_read(self: RowReader, shards: Any) -> Any:
        for shard_rows in read(self, shards):
            count(1)
            yield shard_rows

    def counted_write(*args: Any, **options: Any) -> Any:
        if slow == "disk":
            time.sleep(0.02)
        record = write(*args, **options)
        count(-1)
        return record

    monkeypatch.setattr(RowReader, "read", counted_read)
    monkeypatch.setattr(pipeline, "write_shard", counted_write)
    bulk(rows, tmp_path / "out", HashEmbedder(seconds=0.005 if slow == "model" else 0), id_column="id", shard_rows=10)
    assert 3 <= most <= 5


def test_an_error_of_the_model_ends_the_run_and_leaves_what_is_finished(rows: Path, whole: Any, tmp_path: Path) -> None:
    """An error that is not of a text ends all threads, is raised, and the run goes on later."""

    class Broken(HashEmbedder):
        def run(self, texts: Any) -> Any:
            if len(self.seen) > 150:
                raise SetupError("the device is gone.")
            return super().run(texts)

    out = tmp_path / "broken"
    with pytest.raises(SetupError, match="the device is gone"):
        bulk(rows, out, Broken(), id_column="id", shard_rows=30)
    assert 0 < len(list(out.glob("part-*.parquet"))) < 14
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("whimbrel-bulk-")]
    bulk(rows, out, id_column="id", shard_rows=30)
    assert files_of(out) == whole


def test_a_model_that_fails_for_every_text_ends_the_run(rows: Path, whole: Any, tmp_path: Path) -> None:
    """Rows are refused for their own errors only: not if the device is broken, and not if outputs have another width."""

    class Broken(HashEmbedder):
        def run(self, texts: Any) -> Any:
            if len(self.seen) > 150:
                raise ComputeError("the device is lost.")
            return super().run(texts)

    class Narrow(HashEmbedder):
        def run(self, texts: Any) -> Any:
            answer = super().run(texts)
            dense = np.stack([vector_of(text) for text in texts])
            return Answer(Outputs(dense=dense[:, :4] if len(self.seen) > 150 else dense), answer.cut_N, answer.num_tokens)

    for number, (model, words) in enumerate(((Broken(), "the device is lost"), (Narrow(), "outputs of other widths"))):
        out = tmp_path / f"broken{number}"
        with pytest.raises(WhimbrelError, match=words):
            bulk(rows, out, model, id_column="id", shard_rows=30)
        bulk(rows, out, id_column="id", shard_rows=30)
        assert files_of(out) == whole


def test_nothing_is_written_before_the_model_is_there(rows: Path, tmp_path: Path) -> None:
    def load() -> Any:
        raise SetupError("no such model.")

    with pytest.raises(SetupError, match="no such model"):
        bulk(rows, tmp_path / "out", load=load)
    bulk(rows, tmp_path / "out", load=lambda: nullcontext(HashEmbedder()))
    assert faults_of(tmp_path / "out")


def test_records_say_what_is_in_the_files(rows: Path, whole: Any) -> None:
    """Records have the hash of each file, manifest and records no time, and no host."""
    import hashlib

    for name in [name for name in whole if name.startswith("shards/")]:
        record = json.loads(whole[name])
        assert record["stop"] - record["start"] == record["done"] + record["refused"]
        for file in record["files"]:
            assert hashlib.sha256(whole[file["path"]]).hexdigest() == file["sha256"]
    said = whole["manifest.json"].decode()
    assert not re.search(r"20\d\d-\d\d-\d\d", said)
    assert os.uname().nodename not in said.replace(str(rows), "")
