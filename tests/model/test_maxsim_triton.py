"""Triton kernel of MaxSim against the CPU implementation, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from token_vectors import all_pairs, binary, quantised, random_vectors, reference_scores
from whimbrel.model.ops.maxsim import best_matches, maxsim
from whimbrel.model.ops.token_vectors import EMPTY, TokenVectors

CASES = ["float32", "float16", "int8", "bits"]
LENGTHS = ([5, 32, 1, 70, 150], [0, 1, 2, 64, 65, 700, 33])
FEW = ([1, 128, 150], [0, 1, 64, 65, 550])
"""Sizes for the slow interpreter: a row, a block, more than one; no token, one, a block, more than one, two stretches."""


def sides(case: str, width: int) -> tuple[TokenVectors, TokenVectors]:
    """Return queries and documents for the interpreter."""
    dtype = torch.float16 if case == "float16" else torch.float32
    queries, documents = (random_vectors(lengths, width, seed=i, dtype=dtype) for i, lengths in enumerate(FEW))
    if case in ("int8", "bits"):
        documents = quantised(documents) if case == "int8" else binary(documents)
    return queries, documents


def interpreted() -> None:
    """Run in a separate process, because Triton selects its interpreter when it is imported."""
    from whimbrel.model.ops.maxsim_triton import matches_triton, maxsim_triton

    found = {}
    for case in CASES:
        for width in (16, 48, 128, 320):
            queries, documents = sides(case, width)
            pairs = all_pairs(queries, documents)
            found[f"{case} {width}"] = [each(queries, documents, *pairs).tolist() for each in (maxsim_triton, matches_triton)]
    sys.stdout.write(json.dumps(found))


@pytest.mark.extended
def test_the_kernel_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = "import test_maxsim_triton; test_maxsim_triton.interpreted()"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent, capture_output=True, check=True)
    for name, (scores, matches) in json.loads(run.stdout).items():
        case, width = name.split()
        queries, documents = sides(case, int(width))
        pairs = all_pairs(queries, documents)
        expected = reference_scores(queries, documents, *pairs)
        expected[expected == EMPTY] = 0
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        best = best_matches(queries, documents, *pairs).rows_XD
        np.testing.assert_allclose(np.array(matches)[:, 0], best[:, 0], rtol=1e-5, atol=1e-5, err_msg=name)
        differ = np.flatnonzero(np.array(matches)[:, 1] != best[:, 1])
        assert len(differ) <= (0.03 * len(best) if case in ("bits", "float16") else 0), name  # near ties fall either way


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_aligned_vectors_are_loaded_16_bytes_at_a_time(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for a GPU, without one, what Triton compiles for a width and strides that 16 divides."""
    pytest.importorskip("triton")
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from whimbrel.model.ops.maxsim_triton import _maxima_kernel

    constants = {"BLOCK_Q": 32, "BLOCK_T": 64, "BLOCK_D": 128, "ONE_SLICE": True, "BITS": False, "WHERE": False}
    pointers = {"q_ptr": dtype, "x_ptr": dtype, "items_ptr": "i64", "where_ptr": "i32", "best_ptr": "fp32"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(constants, "constexpr")
    names = [each.name for each in _maxima_kernel.params]
    aligned = [i for i, each in enumerate(_maxima_kernel.params) if each.name not in constants and not each.do_not_specialize]
    source = compiler.ASTSource(
        _maxima_kernel,
        {name: signature.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; a later Triton asks for the choice
    ptx = compiler.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "num_stages": 3}).asm["ptx"]
    assert ptx.count("cp.async.cg.shared.global")
    assert not ptx.count("ld.global.b16")
    assert not ptx.count("cp.async.ca.shared.global")


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
