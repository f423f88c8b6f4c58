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
from torch.nn.functional import gelu

import whimbrel.model.ops.attention
from attention_cases import make_layout
from token_vectors import binary, quantised, random_vectors
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.attention_ragged import attend_ragged
from whimbrel.model.ops.linear import Norm, gate
from whimbrel.model.ops.maxsim import maxsim
from whimbrel.model.ops.nonzero import find_nonzero
from whimbrel.model.ops.peak import measure_peak
from whimbrel.model.ops.positions import alibi, norm_and_rotate, relative
from whimbrel.model.ops.row_kernels import row_kernels
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
    """Texts of one length by the ragged operator of PyTorch, by our kernel and by SDPA in groups of one length.

    Flash attention has neither biases nor caps. A variant of ours takes about a second to compile.
    """
    device, lengths = torch.device(sizes.device), (16, 64) if sizes.small else (16, 128, 512, 4096)
    ours = attend if sizes.device == "cpu" else attend_ragged  # a CPU has no Triton
    groups: Any = whimbrel.model.ops.attention._attend_runs  # pyright: ignore[reportPrivateUsage]
    for width in (32, 64, 128):
        heads = 1024 // width
        for length in lengths:
            yield _attention(sizes, "attention", heads, heads, width, length)
            if length == lengths[-2] or width == 64:
                yield _attention(sizes, "attention, ours", heads, heads, width, length, function=ours)
    length = lengths[-2]
    yield _attention(sizes, "attention, SDPA", 16, 16, 64, length, function=groups)
    yield _attention(sizes, "attention, 2 queries a key", 16, 8, 64, length)
    for name, options in {"causal": {"causal": True}, "window of 64": {"window": 64}}.items():
        yield _attention(sizes, f"attention, {name}", 16, 16, 64, length, **options)
    forms: dict[str, dict[str, Any]] = {
        "ALiBi": {"bias": alibi(16, device)},
        "relative bias": {"bias": relative(sizes.draw(32, 16, dtype=torch.float32), 128)},
        "capped": {"softcap": 50.0},
    }
    for name, options in forms.items():
        for way, function in (("ours", ours), ("SDPA", groups)):
            yield _attention(sizes, f"attention, {name}, {way}", 16, 16, 64, length, function=function, **options)


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
        call = partial(norm.in_both if norm.centred else norm.and_sum, x_RD, added_RD, sizes.dtype)
        yield Case(name, f"{rows} x {width}", call, 2 * size(x_RD, added_RD))
    x_RNH, weight_NH = sizes.draw(rows, heads, 128), sizes.draw(heads, 128, dtype=torch.float32)
    cos_RF, sin_RF = (sizes.draw(rows, 64, dtype=torch.float32) for _ in range(2))
    for name, weight in (("rotary positions", None), ("norm of heads, rotary positions", weight_NH)):
        call = partial(norm_and_rotate, x_RNH, weight, 1e-6, (cos_RF, sin_RF, False))
        yield Case(name, f"{rows} x {heads} x 128", call, 2 * size(x_RNH) + size(cos_RF, sin_RF))
    both_RO = sizes.draw(rows, 2 * 3072)
    yield Case("SwiGLU", f"{rows} x 3072", partial(gate, both_RO, "silu"), size(both_RO) * 3 // 2)
    for name, function in (("GELU", partial(row_kernels(both_RO).activate, activation="gelu")), ("GELU of PyTorch", gelu)):
        yield Case(name, f"{rows} x 6144", partial(function, both_RO), 2 * size(both_RO))


def sparse_entries(sizes: Sizes) -> Iterator[Case]:
    """Nonzero entries of rows over a vocabulary, 1 in 100, as SPLADE has."""
    rows, vocabulary = (4, 1000) if sizes.small else (128, 30_522)
    rows_PV = sizes.draw(rows, vocabulary, dtype=torch.float32)
    rows_PV *= torch.rand_like(rows_PV) < 0.01
    yield Case("sparse entries", f"{rows} x {vocabulary}", partial(find_nonzero, rows_PV), size(rows_PV))


def late_interaction(sizes: Sizes) -> Iterator[Case]:
    """MaxSim of one query with many documents, whose public call also waits for the scores. float32 has no tensor cores."""
    documents, length = (8, 32) if sizes.small else (1000, 256)
    exact, query = random_vectors([length] * documents, 128, seed=0), random_vectors([32], 128, seed=1)
    pairs, shape = (np.zeros(documents, np.int64), np.arange(documents)), f"{documents} x {length} x 32 x 128"
    on_cpu = sizes.device == "cpu"  # where vectors are float32
    halves = () if on_cpu else (torch.float16, torch.bfloat16)
    sides = {str(dtype): (_as(query, dtype), _as(exact, dtype)) for dtype in (torch.float32, *halves)}
    of_few_bits = _as(query, torch.float32 if on_cpu else torch.float16)
    sides |= {"int8": (of_few_bits, quantised(exact)), "bits": (of_few_bits, binary(exact))}
    for name, pair in sides.items():
        there = [TokenVectors(each.rows_TD.to(sizes.device), each.starts_N, each.ends_N) for each in pair]
        flops = 0.0 if name == "torch.float32" else 2.0 * documents * length * 32 * 128
        call = partial(maxsim, *there, *pairs)
        yield Case(f"MaxSim, {name.removeprefix('torch.')}", shape, call, size(there[1].rows_TD), flops)


def _as(vectors: TokenVectors, dtype: torch.dtype) -> TokenVectors:
    return TokenVectors(vectors.rows_TD.to(dtype), vectors.starts_N, vectors.ends_N)


KERNELS: Final[tuple[Callable[[Sizes], Iterator[Case]], ...]] = (elementwise, late_interaction, sparse_entries, attention)
"""In the order in which they are worth having."""


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
