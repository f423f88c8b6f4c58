"""Kernels against their floors: the time of the bytes that must move at a copy's speed, or of the products at their peak.

A kernel is a `Case` that a function of KERNELS yields, in the call by which the model runs it.

Shapes: R rows, D columns, N heads, H head width, F frequencies, L tokens of a text, T document tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from setting import Row, Setting
from timing import bandwidth, kernels_of, microseconds
from torch import Tensor

from attention_cases import make_layout
from token_vectors import binary, quantised, random_vectors
from whimbrel.model.activations import ACTIVATIONS
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.linear import Norm, gate
from whimbrel.model.ops.maxsim import maxsim
from whimbrel.model.ops.peak import measure_peak
from whimbrel.model.ops.positions import alibi, norm_and_rotate
from whimbrel.model.ops.token_vectors import TokenVectors


class Case(NamedTuple):
    """A call, the bytes that it must read and write, and the FLOP of its products."""

    kernel: str
    shape: str
    call: Callable[[], object]
    num_bytes: int
    flops: float = 0.0


class Sizes(NamedTuple):
    device: str
    dtype: torch.dtype
    rows: int
    small: bool

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)


def attention(sizes: Sizes) -> Iterator[Case]:
    """Texts of one length: head widths, lengths, then masks, shared keys, biases and caps at one width."""
    forms: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window of 64": {"window": 64},
        "ALiBi": {"bias": alibi(16, torch.device(sizes.device))},
        "capped": {"softcap": 50.0},
    }
    lengths = (16, 64) if sizes.small else (16, 64, 128, 512, 4096)
    for width in (32, 64, 128):
        for length in lengths:
            yield _attention(sizes, "attention", 1024 // width, 1024 // width, width, length)
    for length in lengths[1:4:2]:
        yield _attention(sizes, "attention, 2 queries a key", 16, 8, 64, length)
        for name, options in forms.items():
            yield _attention(sizes, f"attention, {name}", 16, 16, 64, length, **options)


def _attention(
    sizes: Sizes, name: str, heads: int, keys: int, width: int, length: int, *, function: Any = attend, **options: Any
) -> Case:
    layout = make_layout([length] * (sizes.rows // length), sizes.device)
    q_RNH, k_RKH, v_RKH = (sizes.draw(sizes.rows, each, width) for each in (heads, keys, keys))
    scores = ScoreOptions(width**-0.5, **options)
    pairs = min(length, 2 * options["window"] + 1) if "window" in options else length / (1 + options.get("causal", False))
    moved = 2 * size(q_RNH) + size(k_RKH, v_RKH)
    call = partial(function, q_RNH, k_RKH, v_RKH, layout, scores)
    return Case(
        name, f"{sizes.rows // length} x {length}, {heads} x {width}", call, moved, 4.0 * sizes.rows * pairs * heads * width
    )


def elementwise(sizes: Sizes) -> Iterator[Case]:
    """Norms with a residual sum; norms of heads with rotary positions; activations."""
    rows, width, heads = sizes.rows, 1024, 24
    x_RD, added_RD, weight_D = sizes.draw(rows, width, dtype=torch.float32), sizes.draw(rows, width), sizes.draw(width)
    for name, bias_D in (("layer norm of a sum", weight_D.float()), ("RMS norm of a sum", None)):
        norm = Norm(weight_D.float(), bias_D, 1e-6, centred=bias_D is not None)
        yield Case(name, f"{rows} x {width}", partial(norm, x_RD, added_RD), 2 * size(x_RD) + size(added_RD))
    x_RNH, weight_NH = sizes.draw(rows, heads, 128), sizes.draw(heads, 128, dtype=torch.float32)
    cos_RF, sin_RF = (sizes.draw(rows, 64, dtype=torch.float32) for _ in range(2))
    for name, weight in (("rotary positions", None), ("norm of heads, rotary positions", weight_NH)):
        call = partial(norm_and_rotate, x_RNH, weight, 1e-6, (cos_RF, sin_RF, False))
        yield Case(name, f"{rows} x {heads} x 128", call, 2 * size(x_RNH) + size(cos_RF, sin_RF))
    both_RO = sizes.draw(rows, 2 * 3072)
    yield Case("SwiGLU", f"{rows} x 3072", partial(gate, both_RO, "silu"), size(both_RO) * 3 // 2)
    yield Case("GELU", f"{rows} x 6144", partial(ACTIVATIONS["gelu"], both_RO), 2 * size(both_RO))


def late_interaction(sizes: Sizes) -> Iterator[Case]:
    """MaxSim of one query with many documents, whose public call also waits for the scores."""
    documents, length = (8, 32) if sizes.small else (1000, 256)
    exact, query = random_vectors([length] * documents, 128, seed=0), random_vectors([32], 128, seed=1)
    half = TokenVectors(exact.rows_TD.bfloat16(), exact.starts_N, exact.ends_N)
    pairs = np.zeros(documents, np.int64), np.arange(documents)
    for name, side in (("float32", exact), ("bfloat16", half), ("int8", quantised(exact)), ("bits", binary(exact))):
        if name == "bfloat16" and sizes.device == "cpu":
            continue  # there vectors are float32
        there = [TokenVectors(each.rows_TD.to(sizes.device), each.starts_N, each.ends_N) for each in (query, side)]
        flops = 2.0 * documents * length * 32 * 128 if name == "bfloat16" else 0.0
        yield Case(
            f"MaxSim, {name}", f"{documents} x {length} x 32 x 128", partial(maxsim, *there, *pairs), size(side.rows_TD), flops
        )


KERNELS: Final[tuple[Callable[[Sizes], Iterator[Case]], ...]] = (attention, elementwise, late_interaction)


@torch.inference_mode()
def run(_: str, setting: Setting) -> Iterator[Row]:
    device, small = setting.device, setting.small
    speed = bandwidth(device, small=small)
    peak = measure_peak(setting.dtype, device, 1, seconds=0.02 if small else 0.2)
    sizes = Sizes(device, getattr(torch, setting.dtype), 128 if small else 16_384, small)
    for case in (case for kernel in KERNELS for case in kernel(sizes)):
        row: Row = {"kernel": case.kernel, "shape": case.shape}
        try:
            took = microseconds(case.call, device, times=2 if small else 20)
            inner = kernels_of(case.call, device)
        except Exception as error:  # the next may run
            yield row | {"wrong": f"{type(error).__name__}: {error}"}
            continue
        floor = max(case.num_bytes / speed, case.flops / peak) * 1e6
        row |= {"us": took, "kernels us": inner.microseconds, "launches": inner.launches, "floor us": floor}
        yield row | {"share": floor / (inner.microseconds or took)}


def size(*tensors: Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)
