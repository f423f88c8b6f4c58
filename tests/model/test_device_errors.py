"""Errors of a GPU: an operation that fails, a device that is lost, and no memory. By a stand-in for CUDA, and on a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.families import CASES, write_model
from whimbrel import Engine
from whimbrel.errors import Unavailable
from whimbrel.model.runner import Runner
from whimbrel.telemetry.trace import CounterEvent, subscribe


@pytest.fixture
def runner() -> Runner:
    """A runner that believes that its device is a GPU, without a model."""
    runner = object.__new__(Runner)
    runner._device = torch.device("cuda:1")
    runner._team = None
    return runner


@pytest.mark.parametrize("lost", [False, True])
def test_F7_an_error_after_which_nothing_works(*, lost: bool, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is lost if waiting for it fails too."""
    waited: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def launch(*_: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(runner, "_launch", launch)
    expected = (Unavailable, "^cuda:1 fails every operation of this process: CUBLAS") if lost else (RuntimeError, "^CUBLAS")
    with pytest.raises(expected[0], match=expected[1]):
        runner.launch(None, {})  # pyright: ignore[reportArgumentType]
    assert waited == [torch.device("cuda:1")]


@pytest.mark.gpu
def test_F7_a_gpu_is_lost(tmp_path: Path) -> None:
    """In a process of its own, since no operation works in it any more."""
    write_model(tmp_path, *CASES["bert"])
    program = f"""
import torch
from whimbrel import Engine
from whimbrel.errors import Unavailable
engine = Engine({str(tmp_path)!r}, pooling="mean", device="cuda")
engine.embed("a bird")
table = torch.zeros(4, device="cuda")
model, = engine._lanes._runner._models
engine._lanes._runner._models[0] = lambda *args: model(*args) + table[torch.full((1,), 9, device="cuda")]
for _ in range(2):
    try:
        engine.embed("a bird")
    except Unavailable as error:
        print(error, engine.ready)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout == "the engine has stopped. False\nthe engine is closed. False\n", run.stderr
    assert "fails every operation of this process: CUDA error" in run.stderr
    assert "This is a bug" not in run.stderr


@pytest.mark.gpu
def test_F6_a_gpu_s_memory_runs_out(tmp_path: Path) -> None:
    """The batch is halved until it fits, and the vectors are those of small batches."""
    write_model(tmp_path, *CASES["bert"])
    texts = [f"bird {i} " + "far away " * 45 for i in range(6000)]
    with Engine(str(tmp_path), pooling="mean", device="cuda", dtype="bfloat16") as engine:
        expected = engine.embed(texts)
    counted: list[str] = []
    end = subscribe(CounterEvent, lambda event: counted.append(event.name))
    _, total = torch.cuda.mem_get_info()
    with Engine(str(tmp_path), pooling="mean", device="cuda", dtype="bfloat16", max_batch_tokens=2**20) as engine:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(2**28 / total)
        try:
            found = engine.embed(texts)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    end()
    assert counted.count("out_of_memory") >= 1
    assert counted.count("halvings") >= 1
    assert np.abs(found - expected).max() < 0.02
