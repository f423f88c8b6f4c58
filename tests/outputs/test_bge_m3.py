"""BGE-M3: three outputs from one pass, against FlagEmbedding's formula and against each asked alone."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from checkpoints.bge_m3 import M3_OUTPUTS, m3_reference, write_m3
from checkpoints.sparse import as_matrix, splade_layout, write_splade
from comparisons import assert_same_outputs
from parity import Parity
from process_boundary import run_over_a_channel
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest, NonFinite
from whimbrel.server.processes import channel, replica
from whimbrel.types.request import OutputName, Request

TEXTS = [
    "",
    "a",
    "The whimbrel flies.",
    "Vogel " * 7,
    "far far away in a year " * 20,
    "query: birds",
    "1, 2 雪; 3!",
    "</s> a <s>",
]


@pytest.mark.parametrize("width", [48, 20])
def test_as_flag_embedding_has_it(width: int, parity: Parity, tmp_path: Path) -> None:
    heads = write_m3(tmp_path, width=width)
    with Engine(str(tmp_path), dtype="float32") as engine:
        got = engine.encode(TEXTS, M3_OUTPUTS)
    assert got.dense is not None
    assert got.sparse is not None
    assert got.multi_vector is not None
    dense, lexical, vectors = zip(*m3_reference(tmp_path, heads, TEXTS), strict=True)
    models = ("BAAI/bge-m3",) if width == 48 else ()
    parity(got.dense, np.stack(dense), *models, family="roberta", tasks=["dense"])
    assert [ids.tolist() for ids, _ in got.sparse] == [sorted(weights) for weights in lexical]
    expected = [[weights[token] for token in sorted(weights)] for weights in lexical]
    parity([weights for _, weights in got.sparse], expected, *models, family="roberta", tasks=["sparse"])
    parity(list(got.multi_vector), vectors, *models, family="roberta", tasks=["multi_vector"])


def test_the_weight_of_each_token(parity: Parity, tmp_path: Path) -> None:
    """Weights are those of vLLM: of all tokens except the first and the last, which surround the text."""
    heads = write_m3(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    raw: list[np.ndarray] = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, truncation=True, max_length=40, return_tensors="pt")).last_hidden_state[0]
        raw.append((hidden @ heads["sparse.weight"].T).numpy()[1:-1])
    bias = torch.tensor([-np.median(np.concatenate(raw))]).half()  # so that some weights are below zero
    torch.save({"weight": heads["sparse.weight"].half(), "bias": bias}, tmp_path / "sparse_linear.pt")
    raw = [each + bias.float().numpy() for each in raw]
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert list(engine.card.outputs) == list(M3_OUTPUTS)
        found = engine.run(Request(TEXTS, ("token_scores",))).outputs.token_scores
        plain = engine.run(Request(TEXTS, ("token_scores", "sparse"), activate=False)).outputs
        assert found is not None
        assert plain.token_scores is not None
        parity(list(found), [np.maximum(each, 0) for each in raw])
        parity(list(plain.token_scores), raw)
        assert (np.concatenate(raw) < 0).any()
        assert_same_outputs(plain, engine.encode(TEXTS, ("sparse",)), ("sparse",))
        with pytest.raises(InvalidRequest, match="gives no 'token_scores'; it gives: dense, sparse, multi_vector"):
            engine.token_classify("a")
        bare = engine.run(Request([np.array([5, 7])], ("token_scores",))).outputs.token_scores
        assert bare is not None
        assert len(bare[0]) == 2, "ids as they are"


def test_all_three_from_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_m3(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        runner: Any = engine._lanes._runner
        passes: list[int] = []
        forward = runner._models[0].__call__

        def counted(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            passes.append(ids.shape[0])
            return forward(ids, *rest)

        monkeypatch.setattr(runner._forward, "_models", [counted])
        text = "The whimbrel flies."
        together = engine.encode([text], M3_OUTPUTS)
        assert len(passes) == 1
        for name in M3_OUTPUTS:
            assert_same_outputs(engine.encode([text], (name,)), together, (name,))
        assert len(passes) == 4
        one = engine.encode(TEXTS, M3_OUTPUTS)
        assert_same_outputs(one, engine.encode(TEXTS, ("multi_vector", "dense", "sparse")), M3_OUTPUTS)
        for index, each in enumerate(TEXTS):
            alone = engine.encode([each], M3_OUTPUTS)
            assert alone.dense is not None
            assert one.dense is not None
            assert np.array_equal(alone.dense[0], one.dense[index])
            assert alone.sparse is not None
            assert one.sparse is not None
            assert all(np.array_equal(a, b) for a, b in zip(alone.sparse[0], one.sparse[index], strict=True))
            assert alone.multi_vector is not None
            assert one.multi_vector is not None
            assert np.array_equal(alone.multi_vector[0], one.multi_vector[index])


def mixed_requests() -> list[Request]:
    """Return requests of all outputs and widths, normalised or not."""
    subsets = [names for size in (1, 2, 3) for names in itertools.combinations(M3_OUTPUTS, size)]
    kinds = itertools.product(subsets, (None, 48, 32, 7), (None, False))
    return [
        Request([TEXTS[(i + j) % len(TEXTS)] for j in range(1 + i % 3)], names, dimensions=width, normalize=normalize)
        for i, (names, width, normalize) in enumerate(kinds)
        if names != ("sparse",) or (width, normalize) == (None, None)
    ]


def test_requests_of_all_kinds_share_batches(tmp_path: Path) -> None:
    """Alone and in a crowd, the same bits."""
    write_m3(tmp_path)
    requests = mixed_requests()
    with Engine(str(tmp_path), dtype="float32", matryoshka=True) as engine:
        futures = [engine.submit(request) for request in requests]
        crowd = [future.result().outputs for future in futures]
        for request, outputs in zip(requests, crowd, strict=True):
            assert_same_outputs(engine.run(request).outputs, outputs, request.outputs)
            assert [name for name in M3_OUTPUTS if getattr(outputs, name) is not None] == [
                n for n in M3_OUTPUTS if n in request.outputs
            ]


@pytest.mark.parametrize("name", M3_OUTPUTS)
def test_one_output_that_is_not_finite_fails_its_texts(
    name: OutputName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text fails if any of its outputs is not finite."""
    write_m3(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        runner: Any = engine._lanes._runner
        collect = runner.collect

        def spoilt(pending: Any) -> dict[OutputName, Any]:
            given = dict(collect(pending))
            return given | {name: np.full_like(given[name], np.nan)}

        monkeypatch.setattr(runner, "collect", spoilt)
        with pytest.raises(NonFinite, match="--dtype float32"):
            engine.encode(TEXTS[1:4], M3_OUTPUTS)


def test_requests_of_all_kinds_through_the_process_boundary(tmp_path: Path) -> None:
    write_m3(tmp_path)
    requests = mixed_requests()
    with Engine(str(tmp_path), dtype="float32", matryoshka=True) as engine:
        for request, outputs in zip(requests, asyncio.run(run_over_a_channel(engine, requests)), strict=True):
            assert_same_outputs(engine.run(request).outputs, outputs, request.outputs)


def test_any_number_of_entries_passes_the_process_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not fit into a message."""
    monkeypatch.setattr(channel, "MAX_MESSAGE", 200_000)
    write_splade(tmp_path)
    splade_layout(tmp_path)
    texts = [TEXTS[i % len(TEXTS)] for i in range(600)]
    with Engine(str(tmp_path), dtype="float32") as engine:
        requests = [Request(texts), Request(texts[:3]), Request(texts, max_active_dims=2), Request([])]
        got = [outputs.sparse for outputs in asyncio.run(run_over_a_channel(engine, requests))]
        expected = engine.sparse(texts)
        assert expected.weights_X.nbytes > 200_000 > replica.SHARED_BYTES
        for request, sparse in zip(requests, got, strict=True):
            assert sparse is not None
            alone = engine.run(request).outputs.sparse
            assert alone is not None
            assert np.array_equal(as_matrix(sparse, 400), as_matrix(alone, 400))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_gives_the_same(dtype: str, tmp_path: Path) -> None:
    write_m3(tmp_path)
    with (
        Engine(str(tmp_path), device="cpu", dtype="float32") as exact,
        Engine(str(tmp_path), device="cuda", dtype=dtype) as engine,
    ):
        one, other = exact.encode(TEXTS, M3_OUTPUTS), engine.encode(TEXTS, M3_OUTPUTS)
    assert one.dense is not None
    assert one.multi_vector is not None
    assert one.sparse is not None
    assert other.dense is not None
    assert other.multi_vector is not None
    assert other.sparse is not None
    least = 0.9999 if dtype == "float32" else 0.99
    assert (one.dense * other.dense).sum(1).min() > least
    assert (one.multi_vector.rows_XD * other.multi_vector.rows_XD).sum(1).mean() > least
    scale = float(as_matrix(one.sparse, 400).max())
    assert (
        np.abs(as_matrix(one.sparse, 400) - as_matrix(other.sparse, 400)).max() < (1e-4 if dtype == "float32" else 0.1) * scale
    )


def test_each_file_gives_its_output(tmp_path: Path) -> None:
    write_m3(tmp_path)
    card = read_card(tmp_path, "m")
    assert list(card.outputs) == ["dense", "sparse", "multi_vector"]
    assert card.outputs["sparse"].skip_ids == (0, 2, 1, 3)
    (tmp_path / "sparse_linear.pt").unlink()
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert list(engine.card.outputs) == ["dense", "multi_vector"]
        with pytest.raises(InvalidRequest, match="multi_vector"):
            engine.sparse("a")


class Harmless:
    """A class that no pickle of tensors holds."""


@pytest.mark.parametrize(
    ("value", "key"),
    [({"weight": torch.zeros(2, 48), "bias": torch.zeros(2)}, "weight"), ({"bias": torch.zeros(1)}, "weight"), ([1], None),
     ({"weight": torch.zeros(48)}, "weight"), ({"weight": Harmless()}, None)],
)  # fmt: skip
def test_other_files_are_refused(value: Any, key: str | None, tmp_path: Path) -> None:
    write_m3(tmp_path)
    torch.save(value, tmp_path / "sparse_linear.pt")
    with pytest.raises(CheckpointError) as raised:
        read_card(tmp_path, "m")
    assert (raised.value.file, raised.value.key) == ("sparse_linear.pt", key)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02c"])
def test_no_zip_is_refused(content: bytes, tmp_path: Path) -> None:
    write_m3(tmp_path)
    (tmp_path / "colbert_linear.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"colbert_linear\.pt"):
        read_card(tmp_path, "m")


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    write_m3(tmp_path)
    torch.save({"weight": torch.zeros(9, 47), "bias": torch.zeros(9)}, tmp_path / "colbert_linear.pt")
    with pytest.raises(CheckpointError, match=r"colbert_linear\.pt"):
        Engine(str(tmp_path), dtype="float32")
