"""The lanes' promises after faults: of memory, of a row, of the collector and of the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from queue import Empty
from typing import Any

import numpy as np
import pytest
import torch

from scripted_runner import dense_wanted
from stepped_runner import Launch, Observer, Start, StepRunner, answer, bulk, error, job
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.errors import ComputeError, NonFinite, OutOfMemory, Unavailable
from whimbrel.model.runner import Runner
from whimbrel.types.batch import pack
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.seq import Seq


def test_out_of_memory_makes_batches_smaller_for_a_while(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=512)
    first = job(*range(1000, 1016), size=32)
    lanes.submit(first)
    sizes: list[int] = []
    while not first.future.done():
        try:
            launch = runner._launched.get(timeout=0.1)  # pyright: ignore[reportPrivateUsage]
        except Empty:
            continue
        sizes.append(len(launch.words))
        launch.fail(MemoryError("scripted")) if len(launch.words) > 4 else launch.finish()
    assert (sizes, answer(first)) == ([16, 8, 8, 4, 4, 4, 4], list(range(1000, 1016)))
    second = job(*range(1000, 1016), size=32)
    lanes.submit(second)
    for _ in range(4):
        launch = runner.next()
        assert len(launch.words) == 4
        launch.finish()
    assert answer(second) == answer(first)
    for _ in range(40):  # 32 good batches raise it by an eighth of the plan's
        lanes.submit(one := job(1000))
        runner.next().finish()
        answer(one)
    lanes.submit(job(*range(1000, 1016), size=32))
    launch = runner.next()
    assert len(launch.words) == 6
    launch.finish()
    for _ in range(2):
        runner.next().finish()


def test_a_text_that_is_out_of_memory_alone_is_told_so(runner: StepRunner, start: Start) -> None:
    lanes = start(max_batch_tokens=512)
    alone = job(1000, 1001, size=300)
    lanes.submit(alone)
    runner.next().finish()
    for _ in range(2):  # the second time nothing runs beside it
        launch = runner.next()
        assert launch.words == [1001]
        launch.fail(MemoryError("scripted"))
    failed = error(alone)
    assert isinstance(failed, OutOfMemory)
    assert (failed.status, failed.retry, failed.param) == (507, False, "input[1]")
    assert "300 tokens" in str(failed)
    lanes.submit(again := job(*range(1000, 1005), size=100))
    assert len(runner.next_finished().words) == 5  # batches are as large as before
    assert answer(again) == list(range(1000, 1005))


def test_a_text_that_is_out_of_memory_beside_others_runs_again_alone(runner: StepRunner, start: Start) -> None:
    lanes = start(num_lanes=2, max_batch_tokens=512)
    lanes.submit(large := job(1000, size=400))
    lanes.submit(other := job(2000, size=400))
    first, second = runner.next(), runner.next()
    first.fail(MemoryError("scripted"))
    assert runner.is_quiet()
    second.finish()
    assert runner.next_finished().words == first.words
    assert answer(large) == [1000]
    assert answer(other) == [2000]


@pytest.mark.parametrize(
    "spoil",
    [lambda v: v[:-1], lambda v: v[:, :-1], lambda v: v.astype(np.float64), lambda v: v[0], lambda v: np.vstack([v, v])],
    ids=["rows", "columns", "dtype", "dimensions", "more"],
)
def test_vectors_of_a_wrong_shape_are_nobodys(spoil: Callable[[Any], Any], runner: StepRunner, start: Start) -> None:
    lanes = start()
    bad, good = job(1000), job(2000, 2001, 2002)
    lanes.submit(first := bulk(3000, priority=-1))  # nothing overtakes it
    running = runner.next()
    lanes.submit(bad)
    lanes.submit(good)
    running.finish()
    while not (bad.future.done() and good.future.done()):
        try:
            launch = runner._launched.get(timeout=0.1)  # pyright: ignore[reportPrivateUsage]
        except Empty:
            continue
        if 1000 in launch.words:
            launch.vectors = spoil(launch.vectors)
        launch.finish()
    assert type(error(bad)) is ComputeError
    assert answer(good) == [2000, 2001, 2002]
    assert answer(first) == [3000]


def nan_in(launch: Launch, *words: int) -> None:
    for row, word in enumerate(launch.words):
        if word in words:
            launch.vectors[row, 7] = np.nan
    launch.finish()


def test_a_row_that_is_not_finite_is_an_error_for_its_request_alone(runner: StepRunner, start: Start) -> None:
    lanes = start()
    bad, good = job(1000, 1001), job(2000)
    lanes.submit(first := bulk(3000, priority=-1))  # nothing overtakes it
    running = runner.next()
    lanes.submit(bad)
    lanes.submit(good)
    running.finish()
    nan_in(runner.next(), 1001)
    failed = error(bad)
    assert isinstance(failed, NonFinite)
    assert (failed.status, failed.code, failed.retry, failed.param) == (500, "non_finite", False, "input[1]")
    assert "--dtype float32" in failed.message
    assert (answer(good), answer(first)) == ([2000], [3000])
    assert runner.is_quiet()


def test_a_bug_of_the_collector_leaves_nobody_waiting(
    runner: StepRunner, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = start()
    lanes.submit(bad := job(1000))
    launch = runner.next()
    lanes.submit(waiting := bulk(2000))
    monkeypatch.setattr(lanes.finishing, "deliver", lambda *_: 1 / 0)
    launch.finish()
    wait([bad.future], 60)
    assert isinstance(error(bad), Unavailable)
    assert isinstance(error(waiting), Unavailable)
    assert not lanes.dispatcher.is_open
    runner.next().finish()


def test_F7_a_lost_device_ends_the_engine(runner: StepRunner, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting requests are told, and for the observer the texts stay on the device, as if the process had died."""
    observer = Observer()
    lanes = start(observer=observer)
    lanes.submit(bad := bulk(1000))
    launch = runner.next()
    lanes.submit(waiting := bulk(2000))
    launch.fail(Unavailable("cuda:0 is lost."))
    assert isinstance(error(bad), Unavailable)
    assert isinstance(error(waiting), Unavailable)
    assert not lanes.dispatcher.is_open
    assert list(observer.on_device.values()) == [launch.words]
    assert "cuda:0 is lost. The engine ends." in caplog.text
    assert "bug" not in caplog.text


def says(error: Exception) -> Callable[..., Any]:
    def model(*_: Any) -> Any:
        raise error

    return model


def allocate_too_much(*_: Any) -> Any:
    return torch.empty(2**55, dtype=torch.uint8)


@pytest.mark.parametrize(
    "model",
    [
        allocate_too_much,
        says(torch.OutOfMemoryError("CUDA out of memory")),
        says(MemoryError()),
        says(RuntimeError("std::bad_alloc")),
        says(RuntimeError("CUDA error: out of memory")),
        says(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        says(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, ...`")
        ),
        says(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
        says(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
        says(RuntimeError("CUDA driver error: out of memory")),
        says(RuntimeError("Triton Error [CUDA]: out of memory")),
    ],
)
def test_whatever_a_device_says_out_of_memory_is_one_error(model: Any, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Runner(resolve_checkpoint(None), card, make_plan(Options(device="cpu"), card, Hardware(1)))
    batch = pack([Seq(np.array([101, 1000, 102], np.int32), 0)])
    arguments = batch, dense_wanted(batch)
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    monkeypatch.setattr(loaded._forward, "_models", [model])
    with pytest.raises(MemoryError):
        loaded.launch(*arguments)
    assert not emptied
    monkeypatch.setattr(loaded, "_device", torch.device("cuda:0"))
    with pytest.raises(MemoryError):
        loaded.launch(*arguments)
    assert emptied
    monkeypatch.setattr(loaded._forward, "_models", [says(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))])
    with pytest.raises(RuntimeError, match="shapes"):
        loaded.launch(*arguments)
