"""MaxSim on a device: Triton's kernels interpreted, compiled without a GPU and run on one, and PyTorch's products beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiled_triton import compile_for, skip_without_interpreter
from token_vectors import all_pairs, binary, quantised, random_vectors, reference_scores
from whimbrel.model.ops import maxsim_device, maxsim_torch
from whimbrel.model.ops.maxsim import best_matches, maxsim
from whimbrel.model.ops.maxsim_device import matches, start_sums
from whimbrel.model.ops.token_vectors import EMPTY, TokenVectors

CASES = ["float32", "float16", "int8", "bits", "float16 int8", "float16 bits", "float32 float16", "float16 float32"]
"""Dtype of the queries and of the documents."""
LENGTHS = ([5, 32, 1, 70, 150], [0, 1, 2, 64, 65, 700, 33])
FEW = ([2, 65], [0, 1, 65, 520])
"""Sizes for the slow interpreter: a block, more than one; no token, one, more than a block, two stretches."""


def sides(case: str, width: int, lengths: tuple[list[int], list[int]] = FEW) -> tuple[TokenVectors, TokenVectors]:
    """Return queries and documents."""
    of_queries, *of_documents = case.split()
    queries, documents = (random_vectors(each, width, seed=i) for i, each in enumerate(lengths))
    dtype = of_documents[0] if of_documents else of_queries
    convert = {"int8": quantised, "bits": binary}.get(dtype, lambda vectors: as_float(vectors, dtype))
    return as_float(queries, of_queries), convert(documents)


def as_float(vectors: TokenVectors, dtype: str) -> TokenVectors:
    rows = vectors.rows_TD.half() if dtype == "float16" else vectors.rows_TD
    return TokenVectors(rows, vectors.starts_N, vectors.ends_N)


def interpreted() -> None:
    """Run in a separate process, because Triton selects its interpreter when it is imported."""
    from whimbrel.model.ops import maxsim_triton

    patched: Any = maxsim_device
    patched._backend = lambda _: maxsim_triton
    found = {}
    for case, width in zip(
        ("float32", "float16", "float16 int8", "bits", "float32 float16"), (48, 128, 16, 320, 16), strict=True
    ):
        queries, documents = sides(case, width)
        pairs = all_pairs(queries, documents)
        found[f"{case},{width}"] = [
            start_sums(queries, documents, *pairs)().tolist(),
            matches(queries, documents, *pairs).tolist(),
        ]
    sys.stdout.write(json.dumps(found))


@pytest.mark.extended
def test_the_kernel_by_the_interpreter() -> None:
    skip_without_interpreter()
    code = "import test_maxsim_triton; test_maxsim_triton.interpreted()"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent, capture_output=True, check=True)
    for name, found in json.loads(run.stdout).items():
        case, width = name.split(",")
        assert_right(*sides(case, int(width)), *map(np.array, found), name=name)


@pytest.mark.parametrize("step", [2**24, 3000])
@pytest.mark.parametrize("case", CASES)
def test_products_of_pytorch_in_place_of_the_kernel(case: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """These run where Triton cannot compile; here in one step and in many."""
    monkeypatch.setattr(maxsim_torch, "_STEP", step)
    queries, documents = sides(case, 48, LENGTHS)
    pairs = all_pairs(queries, documents)
    assert_right(queries, documents, start_sums(queries, documents, *pairs)(), matches(queries, documents, *pairs), name=case)


def test_a_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step gathers more than its limit, whatever the lengths."""
    seen: list[int] = []
    gather = maxsim_torch._gather

    def counted(*args: Any) -> Any:
        rows, is_own = gather(*args)
        seen.append(rows.numel())
        return rows, is_own

    monkeypatch.setattr(maxsim_torch, "_gather", counted)
    monkeypatch.setattr(maxsim_torch, "_STEP", 2**16)
    queries, documents = sides("float32", 16, ([3, 32] * 20, [1, 500, 7, 900, 30] * 4))
    pairs = all_pairs(queries, documents)
    expected = maxsim(queries, documents, *pairs)
    np.testing.assert_allclose(start_sums(queries, documents, *pairs)(), expected, rtol=1e-5, atol=1e-5)
    assert max(sum(pair) for pair in zip(seen[::2], seen[1::2], strict=True)) <= 2**16
    assert len(seen) < 2 * len(pairs[0])  # short ones share a step


def assert_right(
    queries: TokenVectors, documents: TokenVectors, scores: Any, found: Any, *, name: str, tolerance: float = 1e-5
) -> None:
    pairs = all_pairs(queries, documents)
    expected = reference_scores(queries, documents, *pairs)
    expected[expected == EMPTY] = 0
    np.testing.assert_allclose(scores, expected, rtol=tolerance, atol=tolerance, err_msg=name)
    best = best_matches(queries, documents, *pairs).rows_XD
    np.testing.assert_allclose(found[:, 0], best[:, 0], rtol=tolerance, atol=tolerance, err_msg=name)
    differ = np.flatnonzero(found[:, 1] != best[:, 1])
    assert len(differ) <= (0.03 * len(best) if "bits" in name or "float16" in name else 0), name  # near ties fall either way


KERNELS: list[tuple[str, str, dict[str, Any]]] = [
    ("fp16", "fp16", {"BLOCK_Q": 32}),
    ("bf16", "bf16", {"BLOCK_Q": 64}),
    ("fp16", "fp16", {"BLOCK_Q": 64, "WHERE": True}),
    ("fp16", "fp16", {"BLOCK_Q": 64, "ONE_SLICE": False}),
    ("fp16", "u8", {"BLOCK_Q": 32, "BITS": True}),
    ("fp16", "i8", {"BLOCK_Q": 64}),
    ("fp32", "fp32", {"BLOCK_Q": 64, "BLOCK_D": 32, "ONE_SLICE": False, "num_warps": 8}),
    ("fp32", "fp16", {"BLOCK_Q": 32, "BLOCK_D": 32, "ONE_SLICE": False}),
]


@pytest.mark.extended
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("of_queries", "of_documents", "constants"), KERNELS, ids=str)
def test_the_kernel_compiled_without_a_gpu(
    of_queries: str,
    of_documents: str,
    constants: dict[str, Any],
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half precision runs on the tensor cores (wgmma on 9.0), floats load 16 bytes at a time and ahead, no register is spilled."""
    pytest.importorskip("triton")
    from whimbrel.model.ops.maxsim_triton import _maxima_kernel

    default: dict[str, Any] = {"BLOCK_T": 64, "BLOCK_D": 128, "ONE_SLICE": True, "BITS": False, "WHERE": False}
    pointers = {"q_ptr": of_queries, "x_ptr": of_documents, "items_ptr": "i64", "where_ptr": "i32", "best_ptr": "fp32"}
    constants = default | constants
    options = {"num_warps": constants.pop("num_warps", 4), "num_stages": 3}
    compiled = compile_for(capability, _maxima_kernel, pointers, constants, tmp_path, monkeypatch, **options)
    assert compiled.spilled_bytes == 0
    on_tensor_cores = {80: "mma.sync", 90: "wgmma.mma_async"}[capability]
    assert (on_tensor_cores in compiled.ptx) == (of_queries != "fp32")
    assert "ld.global.b16" not in compiled.ptx
    if of_queries == of_documents:
        assert "cp.async.cg.shared.global" in compiled.ptx
        assert "cp.async.ca.shared.global" not in compiled.ptx


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch's products take the kernel's place after one trial, and the log says why."""
    pytest.importorskip("triton")
    from whimbrel.model.ops import maxsim_triton

    tried: list[int] = []

    def no_compiler(*_: Any, **__: Any) -> Any:
        tried.append(1)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    try_kernels, device = maxsim_device._try, torch.device("cuda:77")
    monkeypatch.setattr(maxsim_triton, "maxima", no_compiler)
    monkeypatch.setattr(maxsim_device, "_try", lambda kernels, _: try_kernels(kernels, torch.device("cpu")))
    assert {maxsim_device._backend(device) for _ in range(2)} == {maxsim_torch}
    assert tried == [1]
    (line,) = [record.message for record in caplog.records]
    assert "Failed to find C compiler" in line
    assert "such as gcc" in line


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_trial_compares(factor: float) -> None:
    class Kernels:
        maxima = staticmethod(maxsim_torch.maxima)

        @staticmethod
        def add_up(best_WQ: torch.Tensor, programs: Any, sums: torch.Tensor) -> None:
            maxsim_torch.add_up(best_WQ * factor, programs, sums)

    kernels: Any = Kernels
    problem = maxsim_device._try(kernels, torch.device("cpu"))
    assert (problem is None) == (factor == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    queries, documents = (random_vectors(lengths, 128, seed=i, dtype=dtype) for i, lengths in enumerate(LENGTHS))
    pairs = all_pairs(queries, documents)
    there = [TokenVectors(side.rows_TD.cuda(), side.starts_N, side.ends_N) for side in (queries, documents)]
    np.testing.assert_allclose(maxsim(*there, *pairs), maxsim(queries, documents, *pairs), rtol=1e-3, atol=1e-3)
    found, best = best_matches(*there, *pairs), best_matches(queries, documents, *pairs)
    np.testing.assert_allclose(found.rows_XD[:, 0], best.rows_XD[:, 0], rtol=1e-3, atol=1e-3)
    assert np.mean(found.rows_XD[:, 1] != best.rows_XD[:, 1]) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_both_ways_on_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels and PyTorch's products give the formula's scores, and a score has the same bits alone and among others."""
    queries, documents = sides(case, 128, LENGTHS)
    pairs = all_pairs(queries, documents)
    there = [TokenVectors(side.rows_TD.cuda(), side.starts_N, side.ends_N) for side in (queries, documents)]
    assert maxsim_device._backend(there[0].rows_TD.device) is not maxsim_torch
    found = start_sums(*there, *pairs)()
    tolerance = 1e-4 if case.startswith("float16") else 1e-5  # tensor cores cut sums off, and do not round them
    assert_right(queries, documents, found, matches(*there, *pairs), name=case, tolerance=tolerance)
    alone = [start_sums(*there, *(side[i : i + 1] for side in pairs))()[0] for i in range(len(pairs[0]))]
    assert found.tolist() == alone
    monkeypatch.setattr(maxsim_device, "_backend", lambda _: maxsim_torch)
    assert_right(queries, documents, start_sums(*there, *pairs)(), matches(*there, *pairs), name=case)
