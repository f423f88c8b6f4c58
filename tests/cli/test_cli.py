"""The `whimbrel` command and its verbs: data on stdout, everything else on stderr, an error is one line and a hint.

Each kind of case runs once as a process. Cases that differ only in input or message run in this process (`here`).
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer import rich_utils

from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_roberta
from checkpoints.late_interaction import write_stanford
from checkpoints.sentence_layout import sentence_layout
from command import Here, jsonl, run
from whimbrel import Engine, __version__
from whimbrel.cli import console
from whimbrel.cli import progress as progress_of
from whimbrel.cli.progress import show_progress

COMMANDS = (
    "serve", "embed", "score", "rerank", "classify", "run-batch", "run", "store", "show", "convert", "models", "pull", "list",
    "rm", "load", "unload", "ps", "verify", "doctor", "top", "bench serve", "bench offline", "bench compare", "eval",
)  # fmt: skip


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
        "--set",
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
    assert panels == ["Arguments", "Options", "Server", "Model", "Security"]
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
    assert "option matryoshka" in here.error("embed", "a", "--dimensions", "3")
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
