"""Errors of a GPU, by a stand-in for CUDA: an operation that fails, and a device that is lost."""

from __future__ import annotations

import pytest
import torch

from whimbrel.errors import Unavailable
from whimbrel.model.runner import Runner


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
