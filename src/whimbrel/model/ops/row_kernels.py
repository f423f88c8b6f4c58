"""Choice of the operations on rows: kernels on a GPU where Triton runs, formulas elsewhere.

A self-test compares the kernels with the formulas once per process and device. Triton needs a C compiler on the machine, which
images of PyTorch may lack; then one line says so, and the formulas run, which are slower and right. So they do with
WHIMBREL_KERNELS=off.
"""

import logging
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from whimbrel.model.kernels.library import turned_off
from whimbrel.model.ops.memory import is_out_of_memory
from whimbrel.model.ops.rowwise import FORMULAS, RowKernels, activate_rows, gate_rows


def row_kernels(x: Tensor) -> RowKernels:
    """Return the operations for the device of x: kernels that have passed the self-test, or the formulas."""
    return _kernels_of(x.device)


@cache
def _kernels_of(device: torch.device) -> RowKernels:
    if device.type != "cuda" or turned_off():
        return FORMULAS
    try:
        from whimbrel.model.ops.rowwise_triton import KERNELS

        problem = find_problem(KERNELS, device)
    except Exception as error:  # Triton, its compiler, the C compiler that it calls and the driver raise many kinds
        if is_out_of_memory(error):  # of which the next batch may find more
            raise
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    else:
        if problem is None:
            return KERNELS
    logging.getLogger("whimbrel").warning(
        "The kernels of norms and gates are not used on %s (%s), but slower ones.", device, problem
    )
    return FORMULAS


def find_problem(kernels: RowKernels, device: torch.device) -> str | None:
    """Return the operation in which kernels differ from the formulas, or None. Raises the errors of Triton and CUDA."""
    half = torch.bfloat16 if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    numbers = torch.linspace(-9, 9, 3 * 160, device=device).sin().view(3, 160)
    weight, bias = numbers[0, :80] + 2, numbers[1, :80]
    for centred, keep_sum in product((True, False), (True, False)):
        options: Any = {"eps": 1e-5, "centred": centred, "keep_sum": keep_sum, "dtype": half}
        arguments = numbers[:, :80].contiguous(), numbers[:, 80:].to(half), weight, bias if centred else None
        found, expected = (each.norm(*arguments, **options) for each in (kernels, FORMULAS))
        if not all(_agree(*pair) for pair in zip(found, expected, strict=True)):
            return "other norms"
    heads = numbers.view(3, 5, 32)[:, :4]
    angles = numbers[:, :12].contiguous(), numbers[:, 12:24].contiguous()
    for interleaved in (True, False):
        arguments = heads.to(half), numbers[0, :128].view(4, 32), 1e-5, (*angles, interleaved)
        found, expected = (each.norm_and_rotate(*arguments) for each in (kernels, FORMULAS))
        if not _agree(found, expected.to(half)):
            return "other rotations"
    for activation in ("silu", "gelu", "gelu_tanh"):
        if not _agree(kernels.gate(numbers * 4, activation), gate_rows(numbers * 4, activation)):
            return f"other gates of {activation}"
        if not _agree(kernels.activate(numbers * 4, activation), activate_rows(numbers * 4, activation)):
            return f"another {activation}"
    return None


def _agree(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 2e-2
    return found.dtype == expected.dtype and torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
