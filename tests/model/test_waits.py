"""Nothing between the launch of a batch and its collection waits for the device, by a GPU that computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.classifiers import write_classifier
from checkpoints.families import CASES, write_model
from checkpoints.late_interaction import write_stanford
from checkpoints.sparse import write_splade
from fake_gpu import GPU, fake_gpu, launch, load
from whimbrel.model.ops.maxsim import start_maxsim
from whimbrel.model.ops.maxsim_device import scoring_stream
from whimbrel.model.ops.token_vectors import TokenVectors

KINDS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "dense, BERT": (lambda folder: write_model(folder, *CASES["bert"]), {"pooling": "mean"}),
    "dense, ModernBERT": (lambda folder: write_model(folder, *CASES["modernbert"]), {"pooling": "cls"}),
    "dense, Qwen3": (lambda folder: write_model(folder, *CASES["qwen3"]), {"pooling": "lasttoken"}),
    "sparse": (write_splade, {"pooling": "splade"}),
    "multi-vector": (write_stanford, {}),
    "classifier": (lambda folder: write_classifier(folder, "bert"), {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_waits_for_nothing(kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, options = KINDS[kind]
    write(tmp_path)
    with fake_gpu(monkeypatch) as waits:
        runner, card = load(tmp_path, dtype, **options)
        waits.clear()
        launched = launch(runner, card)
    assert all(rows.device.type == "cpu" for rows in launched.rows.values())
    assert not waits


def test_vectors_to_score_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, if the model computes in half precision; the mask of the finite ones leaves it."""
    write_stanford(tmp_path)
    with fake_gpu(monkeypatch) as waits:
        runner, card = load(tmp_path, "bfloat16")
        waits.clear()
        launched = launch(runner, card, keep_on_device=True)
    rows = launched.rows["multi_vector"]
    assert (rows.device, rows.dtype) == (GPU, torch.float16)
    assert launched.finite["multi_vector"].device.type == "cpu"
    assert not waits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scores_wait_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end, whatever the number of requests and lengths."""
    with fake_gpu(monkeypatch) as waits:
        rows = torch.empty(400, 16, dtype=dtype, device=GPU)
        queries = TokenVectors(rows, np.array([0, 32, 100]), np.array([32, 100, 100]))
        documents = TokenVectors(rows, np.array([0, 100, 110]), np.array([1, 110, 400]))
        with scoring_stream(rows):
            wait = start_maxsim(queries, documents, np.array([0, 0, 1, 2]), np.array([0, 2, 1, 2]))
        assert not waits
        wait()
    assert waits == ["event"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: torch.repeat_interleave(x.int()),
    ],
)
def test_the_fake_gpu_notices_waits(wait: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        x = torch.empty(4, device=GPU)
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait(x)


def test_experts_still_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens of each expert is read in every layer. A mixture of experts has no batches that overlap yet."""
    write_model(tmp_path, *CASES["lfm2 with experts"])
    with fake_gpu(monkeypatch):
        runner, card = load(tmp_path, "bfloat16", pooling="mean")
        with pytest.raises((RuntimeError, NotImplementedError)):
            launch(runner, card)
