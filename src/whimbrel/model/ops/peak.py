"""Measured peak of matrix products: what the device can do, as the yardstick of a model's speed.

The products are as favourable as a model's could be: one large weight matrix, prepacked on a CPU, and many rows, on all lanes
at once. The best round counts.

Shapes: R rows, I input and O output columns.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.fallback.prepacked import packed_linear, prepacked_supported
from whimbrel.model.kernels.library import kernels_for
from whimbrel.model.kernels.products import PackedLinear, product_kind
from whimbrel.model.ops.quantization import Int8Linear

_CPU_ROWS: Final = 512
"""Rows of a product on a CPU: those of a batch."""
_CPU_SIDE: Final = 2048
_GPU_SIDE: Final = 8192
_GPU_TIMES: Final = 8
_ROUNDS: Final = 3


def measure_peak(dtype: str, device: str, num_lanes: int, *, seconds: float = 0.5) -> float:
    """Return the multiply-adds per second, times 2 (FLOP/s), of the best of three rounds of at least `seconds` each."""
    on_gpu = device.startswith("cuda")
    num_rows, side, times = (_GPU_SIDE, _GPU_SIDE, _GPU_TIMES) if on_gpu else (_CPU_ROWS, _CPU_SIDE, 1)
    x_RI, weight_OI = (
        torch.randn(rows, side, device=device).to(torch.float32 if dtype == "int8" else getattr(torch, dtype))
        for rows in (num_rows, side)
    )

    def multiply(product: Callable[[Tensor], Tensor]) -> float:
        with torch.inference_mode():
            for _ in range(times):
                product(x_RI)
        if on_gpu:
            torch.cuda.synchronize(device)
        return times * 2.0 * num_rows * side * side

    products = [partial(multiply, product) for product in _products(weight_OI, in_int8=dtype == "int8")]
    for each in products:
        each()  # first-time work
    return max(_round(each, 1 if on_gpu else num_lanes, seconds) for _ in range(_ROUNDS) for each in products)


def _products(weight_OI: Tensor, *, in_int8: bool) -> list[Callable[[Tensor], Tensor]]:
    """Return the ways to multiply by a weight, of which the fastest counts."""
    ways: list[Callable[[Tensor], Tensor]] = []
    if prepacked_supported(weight_OI.device) and not in_int8:
        ways.append(packed_linear(weight_OI, num_rows=_CPU_ROWS))
    elif not in_int8:
        ways.append(partial(torch.mm, mat2=weight_OI.T))
    own, kind = kernels_for(weight_OI), "int8" if in_int8 else product_kind(weight_OI.dtype)
    if own is not None and kind in own.kinds:
        ways.append(partial(PackedLinear(own, kind, weight_OI, None, "identity"), dtype=weight_OI.dtype))
    elif in_int8:
        ways.append(partial(Int8Linear(weight_OI, None, "identity", torch.ones(len(weight_OI))), dtype=weight_OI.dtype))
    return ways


def _round(multiply: Callable[[], float], num_threads: int, seconds: float) -> float:
    """Multiply in `num_threads` threads at once and return the sum of their FLOP/s."""
    barrier = Barrier(num_threads)

    def work(_: int) -> float:
        torch.set_num_threads(1)
        barrier.wait()
        begin, done = perf_counter(), 0.0
        while not done or perf_counter() - begin < seconds:
            done += multiply()
        return done / (perf_counter() - begin)

    with ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(work, range(num_threads)))
