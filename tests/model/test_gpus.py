"""GPUs that PyTorch can use and reasons why it cannot use others, by stand-ins for CUDA."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whimbrel.model.runner
from checkpoints.families import CASES, write_model
from scripted_runner import ScriptedRunner, install
from whimbrel import Engine
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import SetupError, Unavailable
from whimbrel.model import gpus
from whimbrel.model.gpus import find_gpus, is_built_for
from whimbrel.outputs.finishers import RowsFinisher
from whimbrel.types.batch import Batch
from whimbrel.types.hardware import Gpu, Hardware
from whimbrel.types.result import Result

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((7, 0), CUDA_13, False),
        ((7, 5), CUDA_13, True),
        ((8, 9), CUDA_13, True),
        ((9, 0), CUDA_13, True),
        ((11, 0), CUDA_13, False),
        ((12, 1), CUDA_13, True),
        ((13, 0), CUDA_13, True),  # compiled by the driver, from compute_120
        ((9, 0), ["gfx942"], True),
        ((3, 7), [], True),
    ],
)
def test_gpus_that_pytorch_was_built_for(capability: tuple[int, int], built_for: Sequence[str], *, expected: bool) -> None:
    assert is_built_for(capability, built_for) == expected


def test_each_gpu_has_its_own_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too old is left out, and the others keep their numbers."""
    found = [
        SimpleNamespace(name="V100", major=7, minor=0, total_memory=2**34),
        SimpleNamespace(name="T4", major=7, minor=5, total_memory=2**34),
        SimpleNamespace(name="H200", major=9, minor=0, total_memory=2**37),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)
    usable, note = find_gpus()
    assert usable == (Gpu("cuda:1", 2**34), Gpu("cuda:2", 2**37, bfloat16=True))
    assert note.startswith("cuda:0, V100 of compute capability 7.0, is none of those that PyTorch was built for: sm_75")


OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."
)


@pytest.mark.parametrize(
    ("cuda", "says", "has_driver", "expected"),
    [
        (None, "", False, "was built without CUDA"),
        ("13.0", OLD_DRIVER, True, r"^the driver takes CUDA up to 12\.4, PyTorch \S+ wants 13\.0$"),
        ("13.0", "", False, "^there is no NVIDIA driver$"),
        ("13.0", "", True, "CUDA_VISIBLE_DEVICES may hide it$"),
        ("13.0", "CUDA unknown error. Do more.\nAnd more.", True, r"^CUDA finds no GPU \(CUDA unknown error\)$"),
    ],
)
def test_why_there_is_no_gpu(
    cuda: str | None, says: str, has_driver: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's warning becomes a line of ours."""

    def is_available() -> bool:
        if says:
            warnings.warn(says, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpus, "has_driver", lambda: has_driver)
    found, note = find_gpus()
    assert not found
    assert re.search(expected, note), note


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedRunner]:
    """A scripted runner, for engines that believe in a GPU."""
    runner = install(monkeypatch)
    hardware = Hardware(4, gpus=(Gpu("cuda:0", 2**36, bfloat16=True),))
    monkeypatch.setattr(whimbrel.model.runner, "probe", lambda: hardware)
    return runner


def fits(runner: type[ScriptedRunner], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches of more tokens run out of memory."""
    launch = runner.launch

    def launch_if_it_fits(self: ScriptedRunner, batch: Batch, *more: Any) -> Any:
        if batch.num_tokens > most:
            raise MemoryError("CUDA out of memory")
        return launch(self, batch, *more)

    monkeypatch.setattr(runner, "launch", launch_if_it_fits)


def test_the_warm_up_runs_a_full_batch_of_many_texts(runner: type[ScriptedRunner], caplog: pytest.LogCaptureFixture) -> None:
    with Engine() as engine:
        assert engine.plan.device == "cuda:0"
        assert runner.launched[-1] == 16_384 // 64
    assert "does not fit" not in caplog.text


def test_the_warm_up_runs_texts_behind_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first of them would wait seconds for a kernel."""
    write_model(tmp_path, *CASES["qwen3"])
    with Engine(str(tmp_path), pooling="lasttoken", dtype="float32", max_batch_tokens=256) as engine:
        sizes: list[set[int]] = []
        run_now = engine._run_now

        def record(request: EngineRequest) -> Result:
            sizes.append({seq.prefix_tokens for seq in request.seqs})
            return run_now(request)

        monkeypatch.setattr(engine, "_run_now", record)
        engine._warm_up_full_batch()
    assert sizes == [{0}, {32}]


def test_a_full_batch_that_does_not_fit(
    runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves, in smaller batches, and the log says which would fit."""
    fits(runner, 5000, monkeypatch)
    with caplog.at_level(logging.WARNING, "whimbrel"), Engine() as engine:
        assert engine.embed("a bird").shape == (384,)
    line = "a batch of 16384 tokens does not fit into the free memory of cuda:0: --max-batch-tokens 4096 would."
    assert [record.getMessage() for record in caplog.records].count(line) == 1


def test_a_text_that_does_not_fit(runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    fits(runner, 100, monkeypatch)
    with pytest.raises(SetupError, match=r"^the memory of cuda:0 has no room for a text of 256 tokens beside") as error:
        Engine()
    assert "--max-length" in str(error.value.hint)
    assert "--device cpu" in str(error.value.hint)


def test_a_model_that_does_not_fit(runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says how much is free, and that others hold the rest."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(runner, "__init__", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * 2**30)
    line = r"^the model does not fit: cuda:0 has 1\.0 of 80\.0 GiB free; other processes hold 74\.0\.$"
    with pytest.raises(SetupError, match=line) as error:
        Engine()
    assert "--device cpu" in str(error.value.hint)


def test_F7_a_device_that_is_lost_under_a_finisher_ends_the_engine(
    runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same happens as to one that is lost under a batch."""

    def lost(*_: Any) -> Any:
        raise Unavailable("cuda:0 fails every operation of this process")

    with Engine() as engine:
        monkeypatch.setattr(RowsFinisher, "adds_slowly", True)
        monkeypatch.setattr(RowsFinisher, "add", lost)
        with pytest.raises(Unavailable, match="the engine has stopped"):
            engine.embed("a bird")
        assert not engine.ready
