"""Nothing between the launch of a batch and its collection waits for the device, by a GPU that computes nothing.

MUVERA and the pooling of token vectors are work of the host: of the rows that a batch has copied, or of those that it copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.families import CASES, write_model
from checkpoints.late_interaction import write_stanford
from checkpoints.sparse import write_splade
from fake_gpu import GPU, fake_gpu, launch, load
from whimbrel.model.maxsim_scorer import MaxSimScorer
from whimbrel.model.ops import maxsim_device, maxsim_torch
from whimbrel.model.ops.maxsim import best_matches, start_maxsim
from whimbrel.model.ops.maxsim_device import scoring_stream
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.outputs.finishers import Addition
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.rows import BatchOutput, DeviceRows
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Outputs

KINDS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "dense, BERT": (lambda folder: write_model(folder, *CASES["bert"]), {"pooling": "mean"}),
    "dense, ModernBERT": (lambda folder: write_model(folder, *CASES["modernbert"]), {"pooling": "cls"}),
    "dense, Qwen3": (lambda folder: write_model(folder, *CASES["qwen3"]), {"pooling": "lasttoken"}),
    "sparse": (write_splade, {"pooling": "splade"}),
    "multi-vector": (write_stanford, {}),
    "classifier": (lambda folder: write_classifier(folder, "bert"), {}),
    "cross-encoder": (lambda folder: write_classifier(folder, "roberta", num_labels=1), {}),
    "dense, sparse and multi-vector": (write_m3, {}),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(18)
def test_a_launch_waits_for_nothing(
    kind: str, dtype: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several requests may want different outputs."""
    write, options = KINDS[kind]
    write(tmp_path)
    with fake_gpu(monkeypatch) as waits:
        runner, card = load(tmp_path, dtype, **options)
        waits.clear()
        launched = launch(runner, card, mixed=mixed)
    assert len(launched.rows) == (3 if kind.startswith("dense, sparse") else 1)
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


def rerank_together(*poolings: TokenPooling) -> tuple[BatchOutput, list[Addition]]:
    """Return a batch whose vectors stay on the device, and its share of three requests: a query and three documents of each."""
    offsets_B1 = np.arange(13) * 9
    selection: Any = SimpleNamespace(offsets_B1=offsets_B1)
    rows = DeviceRows(torch.empty(108, 16, dtype=torch.float16, device=GPU), np.ones(108, np.bool_))
    pairs = PairScoring("multi_vector", "maxsim", np.zeros(3, np.int32), np.arange(1, 4, dtype=np.int32), poolings=poolings)
    scorers = [MaxSimScorer(pairs, 4, Outputs(), width=16) for _ in range(3)]
    shares = [(scorer, np.arange(4) * 3 + i, np.arange(4)) for i, scorer in enumerate(scorers)]
    return BatchOutput({"multi_vector": selection}, {"multi_vector": rows}), shares


def test_requests_that_are_compared_in_one_batch_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, shares = rerank_together()
    with fake_gpu(monkeypatch) as waits:
        (add,) = {scorer.together(batch) for scorer, *_ in shares}
        assert add is not None
        assert add(batch, shares) == [[], [], []]
    assert waits == ["event"]


def test_pooled_documents_are_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token pooling waits for its own rows, outside the batch."""
    batch, ((scorer, seqs_B, seqs_S), *_) = rerank_together(TokenPooling(2))
    assert scorer.together(batch) is None
    with fake_gpu(monkeypatch), pytest.raises((RuntimeError, NotImplementedError)):
        scorer.add(batch, seqs_B, seqs_S)


def test_maxsim_is_compiled_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the dtype of the model's vectors, short and long queries, scores and explanations."""
    compiled: list[tuple[object, ...]] = []

    class Kernels:
        add_up = staticmethod(maxsim_torch.add_up)

        @staticmethod
        def maxima(queries: TokenVectors, documents: TokenVectors, programs: Any, *, where: bool) -> Any:
            compiled.append((queries.rows_TD.dtype, documents.rows_TD.dtype, documents.width, programs.block_q, where))
            return maxsim_torch.maxima(queries, documents, programs, where=where)

    write_stanford(tmp_path)
    with fake_gpu(monkeypatch), monkeypatch.context() as patched:
        patched.setattr(maxsim_device, "_backend", lambda _: Kernels)
        runner, card = load(tmp_path, "bfloat16")
        runner._prepare_scores(card.output("multi_vector"))
        warm = set(compiled)
        rows = launch(runner, card, keep_on_device=True).rows["multi_vector"]
        queries = TokenVectors(rows, np.array([0, 1]), np.array([32, 40]))
        pairs = np.array([0, 1]), np.array([0, 1])
        start_maxsim(queries, queries, *pairs)()
        best_matches(queries, queries, *pairs)
    assert set(compiled) == warm
    assert len(warm) == 4


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
