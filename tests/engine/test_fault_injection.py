"""The scripted faults do what they say, only where they are switched on; and what of them an engine survives in its process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from checkpoints.encoders import bert_tokenizer, roberta_tokenizer, xlmr_tokenizer
from fault_injection import ENVIRONMENT, find_words
from needs import skip_without_bfloat16
from texts import TEXTS
from whimbrel import Engine
from whimbrel.errors import ComputeError, NonFinite, OutOfMemory, SetupError
from whimbrel.types.request import Request

HOOK = "WHIMBREL_RUNNER"
WORDS = "abort segv exit lost hang hang-gil sleep:2 sleep:0.5 raise oom oom>8 rows width nan nan-low".split()


@pytest.mark.parametrize("family", ["minilm", "bert", "roberta", "xlmr"])
def test_words_are_found_in_what_a_tokenizer_leaves_of_them(family: str, minilm: Path) -> None:
    tokenizers: dict[str, Any] = {"bert": bert_tokenizer, "roberta": roberta_tokenizer, "xlmr": xlmr_tokenizer}
    tokenizer = tokenizers[family]() if family in tokenizers else AutoTokenizer.from_pretrained(minilm)
    for word in set(WORDS) - ({"exit"} if family in ("bert", "xlmr") else set()):  # these two know no x
        for text in (f"@@{word}", f"The bird. @@{word} ", f"It says @@{word} (again)"):
            ids = tokenizer(text).input_ids
            assert find_words(tokenizer.backend_tokenizer.decode(ids)) == [word], text
    assert find_words("@@nan and @@sleep:1.5. @@nothing a@abort @ @ exit") == ["nan", "sleep:1.5", "exit"]


@pytest.mark.parametrize(
    ("word", "code"), [("abort", -signal.SIGABRT), ("segv", -signal.SIGSEGV), ("exit", 3), ("hang", None), ("hang-gil", None)]
)
@pytest.mark.sample(2)
def test_the_process_ends_or_hangs(word: str, code: int | None, minilm: Path) -> None:
    """In a process of its own, whose main thread counts while another launches the batch."""
    program = f"""
import threading, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from tokenizers import Tokenizer
from whimbrel.types.batch import pack
from fault_injection import FaultyRunner
from whimbrel.types.seq import Seq

class Runner:
    unstable = ()
    def launch(self, *_): print("launched", flush=True)

file = Path({str(minilm / "tokenizer.json")!r})
ids = np.array(Tokenizer.from_file(str(file)).encode("well @@{word}").ids, np.int32)
runner = FaultyRunner(Runner(), file.parent, SimpleNamespace(dtype="float32"))
batch = pack([Seq(ids, 0)])
print("ready", flush=True)
threading.Thread(target=runner.launch, args=(batch, None), daemon=True).start()
cpu = time.process_time()
time.sleep(0.5)
print("alive", time.process_time() - cpu < 0.4, flush=True)
"""
    command, environment = [sys.executable, "-c", program], os.environ | ENVIRONMENT
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        if code is not None:
            assert (child.wait(60), child.stdout.read()) == (code, "")
        elif word == "hang":
            assert (child.wait(60), child.stdout.read()) == (0, "alive True\n")  # the lane hangs, others do not
        else:
            time.sleep(2)
            assert child.poll() is None
            child.kill()
            assert child.stdout.read() == ""


@pytest.fixture(scope="module")
def faulty() -> Iterator[Engine]:
    """MiniLM in bfloat16, obeying."""
    skip_without_bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOOK, ENVIRONMENT[HOOK])
        engine = Engine(dtype="bfloat16")
    with engine:
        yield engine


GOOD = TEXTS[20:60]


def among_others(engine: Engine, text: str) -> Any:
    """Run a text amid 40 good ones, whose vectors must be right. Returns its Future."""
    futures = [engine.submit(Request([good])) for good in GOOD]
    futures.insert(20, engine.submit(Request([GOOD[0], text])))
    answers = futures.pop(20)
    vectors = np.concatenate([future.result(120).dense for future in futures])
    assert np.array_equal(vectors, engine.embed(GOOD))
    return answers


@pytest.mark.parametrize(
    ("word", "kind"),
    [("raise", ComputeError), ("rows", ComputeError), ("width", ComputeError), ("nan", NonFinite), ("oom", OutOfMemory)],
)
@pytest.mark.sample(2)
def test_a_text_that_fails_alone_fails_alone(word: str, kind: type[ComputeError], faulty: Engine) -> None:
    error = among_others(faulty, f"this is @@{word}").exception(120)
    assert type(error) is kind
    assert error.retry is False
    if word in ("raise", "nan", "oom"):
        assert error.param == "input[1]"


def test_out_of_memory_in_large_batches_only_costs_nobody_anything(faulty: Engine) -> None:
    text = "this is @@oom>2"
    assert np.array_equal(among_others(faulty, text).result(120).dense[1], faulty.embed(text))


def test_a_row_that_is_not_finite_in_low_precision_alone(faulty: Engine) -> None:
    error = among_others(faulty, "this is @@nan-low").exception(120)
    assert isinstance(error, NonFinite)
    assert "--dtype float32" in error.message


def test_a_lane_may_be_slow(faulty: Engine) -> None:
    started = time.perf_counter()
    faulty.embed("@@sleep:0.5")
    assert time.perf_counter() - started >= 0.5


def test_float32_obeys_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(HOOK, ENVIRONMENT[HOOK])
    with caplog.at_level(logging.WARNING), Engine(dtype="float32") as engine:
        assert "WHIMBREL_RUNNER=fault_injection:FaultyRunner" in caplog.text
        assert np.isfinite(engine.embed("@@nan-low")).all()
        with pytest.raises(NonFinite, match="NaN or infinity"):
            engine.embed("@@nan")


def test_without_the_switch_they_are_plain_texts(engine32: Engine, minilm: Path) -> None:
    texts = [f"this is @@{word}" for word in WORDS]
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    for text, vector in zip(texts, engine32.embed(texts), strict=True):
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        assert np.allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("wrapper", "says"), [("nowhere:it", "nowhere"), ("fault_injection:it", "'it'"), ("fault_injection", "''"), ("", "Empty")]
)
def test_a_wrapper_that_is_not_there_is_said(wrapper: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOOK, wrapper)
    with pytest.raises(SetupError, match=says):
        Engine()
