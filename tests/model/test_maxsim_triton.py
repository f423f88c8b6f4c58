"""MaxSim on a device: Triton's kernels interpreted, compiled without a GPU and run on one, and PyTorch's products beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compiled_kernels import MAX_SHARED, note_launches
from interpreted_kernels import interpreted
from token_vectors import all_pairs, binary, quantised, random_vectors, reference_scores
from whimbrel.model.ops import maxsim_device, maxsim_torch
from whimbrel.model.ops.maxsim import best_matches, maxsim
from whimbrel.model.ops.maxsim_device import matches, start_sums
from whimbrel.model.ops.maxsim_programs import plan_programs
from whimbrel.model.ops.token_vectors import EMPTY, TokenVectors

CASES = ["float32", "float16", "int8", "bits", "float16 int8", "float16 bits", "float32 float16", "float16 float32"]
"""Dtype of the queries and of the documents."""
LENGTHS = ([5, 32, 1, 70, 150], [0, 1, 2, 64, 65, 700, 33])
FEW = ([2, 65], [0, 1, 65, 640])
"""Sizes for the slow interpreter: a block, more than one; no token, one, more than a block, two stretches."""


def sides(case: str, width: int, lengths: tuple[list[int], list[int]] = FEW) -> tuple[TokenVectors, TokenVectors]:
    """Return queries and documents."""
    of_queries, *of_documents = case.split()
    queries, documents = (random_vectors(each, width, seed=i) for i, each in enumerate(lengths))
    dtype = of_documents[0] if of_documents else of_queries
    convert = {"int8": quantised, "bits": binary}.get(dtype, lambda vectors: as_float(vectors, dtype))
    return as_float(queries, of_queries), convert(documents)


def as_float(vectors: TokenVectors, dtype: str) -> TokenVectors:
    rows_TD = vectors.rows_TD.to(getattr(torch, {"int8": "float32", "bits": "float32"}.get(dtype, dtype)))
    return TokenVectors(rows_TD, vectors.starts_N, vectors.ends_N)


WIDTHS = {"float16": 128, "float32": 48, "float16 int8": 16, "bits": 320, "float32 float16": 16}
"""Cases for the interpreter, which does not multiply bfloat16, with their widths."""
FEWEST = ([33], [0, 70])


def findings(lengths: dict[str, tuple[list[int], list[int]]]) -> Any:
    """Return sums and matches of all cases, bits of four pairs and of the second alone, matches in a document with a copy."""
    from whimbrel.model.ops import maxsim_triton

    patched: Any = maxsim_device
    patched._backend = lambda _: maxsim_triton
    found = {}
    for case, width in WIDTHS.items():
        queries, documents = sides(case, width, lengths[case])
        pairs = all_pairs(queries, documents)
        found[case] = [start_sums(queries, documents, *pairs)().tolist(), matches(queries, documents, *pairs).tolist()]
    queries, documents = sides("float16", 32, ([3, 40], [5, 70, 2]))
    documents.rows_TD[:5] = torch.nan  # the first document
    among = start_sums(queries, documents, np.array([0, 0, 1, 0]), np.array([0, 1, 2, 2]))()
    alone = start_sums(queries, documents, np.array([0]), np.array([1]))()
    queries, documents = sides("float16", 32, ([3], [128]))
    documents.rows_TD[64:] = documents.rows_TD[:64]  # the next block of a program
    twice = matches(queries, documents, np.array([0]), np.array([0]))[:, 1]
    return found, [*map(float.hex, (*among.tolist(), *alone.tolist()))], twice.tolist()


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_kernel_by_the_interpreter(many: bool) -> None:
    """A pair's bits do not depend on the pairs beside it, of which one is NaN."""
    lengths = {case: FEW if many or case == "float16" else FEWEST for case in WIDTHS}
    by_case, (of_nan, among, *_, alone), twice = interpreted("test_maxsim_triton", f"findings({lengths})")
    assert by_case.keys() == WIDTHS.keys()
    for case, found in by_case.items():
        assert_right(*sides(case, WIDTHS[case], lengths[case]), *map(np.array, found), name=case)
    assert of_nan == "nan"
    assert among == alone
    assert max(twice) < 64  # the first of equals


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


KERNELS = [
    *[("float16", 32, 128, False), ("float16 bits", 32, 128, False), ("bfloat16", 64, 128, False), ("float16", 64, 128, True)],
    *[("float32", 64, 128, False), ("float16 int8", 64, 128, False), ("float16", 64, 256, False), ("float32 float16", 32, 128, False)],
]  # fmt: skip
"""Dtypes, query tokens, width, and whether the places of the maxima are kept."""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("case", "num_queries", "width", "where"), KERNELS)
@pytest.mark.sample(5)
def test_the_kernel_compiled_without_a_gpu(
    case: str, num_queries: int, width: int, where: bool, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision runs on the tensor cores (wgmma on 9.0), floats load 16 bytes at a time and ahead, no register is spilled."""
    pytest.importorskip("triton")
    from whimbrel.model.ops import maxsim_triton

    of_maxima, of_sums = (note_launches(monkeypatch, maxsim_triton, name) for name in ("_maxima_kernel", "_sum_kernel"))
    queries, documents = sides(case, width, ([num_queries], [700]))
    for programs in plan_programs(queries, documents, np.array([0]), np.array([0])):
        best_WQ, _ = maxsim_triton.maxima(queries, documents, programs, where=where)
        maxsim_triton.add_up(best_WQ, programs, torch.zeros(1))
    code = of_maxima.noted[0].compile(capability)
    assert code.spills == of_sums.noted[0].compile(capability).spills == 0
    assert code.shared <= MAX_SHARED[capability]
    on_tensor_cores = {80: "mma.sync", 90: "wgmma.mma_async"}[capability]
    assert bool(code.count(on_tensor_cores)) == (not case.startswith("float32"))
    assert "ld 2" not in code.accesses
    if " " not in case:
        assert code.copies == {16}


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
