"""Tests that depend on the processor, run as lesser processors would: `make test-cpus`, or python tests/support/cpus.py [LEVEL ...].

Each level below this machine's own is a child process with the switches that hold oneDNN, ATen, MKL and OpenBLAS back. The
level "invented" is this machine without Whimbrel's kernels, and with products whose bits depend on the number of rows
(invented_products.py). The level "torch", if it is named, is this machine without Whimbrel's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Final

from whimbrel.model.cpu import cpu
from whimbrel.types.hardware import CPU_LEVELS


def _switches(onednn: str, aten: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OPENBLAS_CORETYPE": openblas,
    }


LEVELS: Final = {
    "avx2": _switches("AVX2", "avx2", "AVX2", "Haswell"),
    "avx512": _switches("AVX512_CORE_VNNI", "avx512", "AVX512", "SkylakeX"),
    "avx512_bf16": _switches("AVX512_CORE_BF16", "avx512", "AVX512", "SkylakeX"),
    "amx": _switches("AVX512_CORE_AMX", "avx512", "AVX512", "SkylakeX"),
}
"""The environment that makes a greater processor one of this level."""

WITHOUT_KERNELS: Final = {"WHIMBREL_KERNELS": "off"}

WHOLE: Final = """
    test_cpu.py test_row_blocks.py test_trials.py test_maxsim.py test_disentangled.py
    test_bge_m3.py::test_all_three_from_one_pass test_bge_m3.py::test_requests_of_all_kinds_share_batches
    test_ops.py::test_linear test_ops.py::test_a_row_has_the_same_bits_in_any_number_of_rows
    test_ops.py::test_low_rank_additions_in_any_company
    test_ops.py::test_attention_of_a_seq_does_not_depend_on_its_batch
    test_minilm.py::test_few_texts_have_sentence_transformers_vectors
    test_minilm.py::test_a_text_has_the_same_bits_alone_and_in_any_batch
    test_adapters.py::test_half_precision_is_near test_adapters.py::test_hidden_states_of_every_adapter
    test_hidden.py::test_ragged_equals_alone_bit_for_bit test_sparse.py::test_half_precision_is_near
    test_pair_scoring.py::test_scores_have_the_same_bits_alone_and_in_any_mix
    test_engine.py::test_one_batch_mixes_dimensions_and_normalisation
    test_lanes.py::test_what_runs_between_layers_changes_no_bits
""".split()
"""Tests that depend on the processor."""

MODELS: Final = {
    "test_models.py": ("bert", "deberta v3", "modernbert", "nomic", "qwen3", "mistral", "gemma3"),
    "test_hub_models.py": ("jina v2",),
    "test_fallback.py": ("albert", "phi3 with a window that the check cuts"),
}
"""A choice of those that run for every model, alone and in a batch."""


def tests() -> list[str]:
    """Return the tests to run, as arguments of pytest."""
    of_models = [
        f"{file}::{test}[{case}]"
        for file, cases in MODELS.items()
        for case in cases
        for test in ("test_hidden_states", "test_half_precision_is_near")
    ]
    folder = Path(__file__).parents[1]
    files = {file.name: str(file) for file in folder.glob("*/test_*.py")}
    return [files[test.partition("::")[0]] + test[len(test.partition("::")[0]) :] for test in (*WHOLE, *of_models)]


def reachable() -> list[str]:
    """The levels that this process can imitate: this machine's own and those below."""
    top = CPU_LEVELS.index(cpu().level)
    return [level for level in LEVELS if CPU_LEVELS.index(level) <= top]


def run(level: str) -> bool:
    """Run the tests at a level. Return whether they passed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "--no-header"]
    pytest += ["-m", "not slow"]
    if level == "invented":
        pytest.append("--invented-products")
    started = perf_counter()
    code = subprocess.call([*pytest, *tests()], env=os.environ | LEVELS.get(level, WITHOUT_KERNELS))
    print(f"{level}: {'passed' if code == 0 else 'failed'} in {perf_counter() - started:.0f} s", flush=True)
    return code == 0


def main() -> None:
    """All levels below this machine's own and the invented one, or those that are named."""
    print(f"this machine: {cpu()}", flush=True)
    levels = sys.argv[1:] or [*(level for level in reachable() if level != cpu().level), "invented"]
    for level in LEVELS:
        if level not in reachable():
            print(f"{level}: skipped, this machine cannot imitate it", flush=True)
    passed = [run(level) for level in levels]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
