"""Measured peak of matrix products: what the device can do, as the yardstick of a model's speed.

The products are as favourable as a model's could be: one large weight matrix, prepacked on a CPU, and many rows, on all lanes
at once. The best round counts.

Shapes: R rows, I input and O output columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Barrier, Thread
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.fallback.prepacked import packed_linear, prepacked_supported
from whimbrel.model.kernels.library import kernels
from whimbrel.model.kernels.products import PackedLinear, product_kind
from whimbrel.model.ops.quantization import Int8Linear

_CPU_ROWS: Final = 512
"""Rows of a product on a CPU: those of a batch."""
_CPU_SIDE: Final = 2048
_GPU_SIDE: Final = 8192
_ROUNDS: Final = 3


def measure_peak(dtype: str, device: str, num_lanes: int, *, seconds: float = 0.5) -> float:
    """Return the multiply-adds per second, times 2 (FLOP/s), of the best of three rounds of at least `seconds` each."""
    products = [_gpu_product(getattr(torch, dtype), device)] if device.startswith("cuda") else _cpu_products(dtype)
    for multiply in products:
        multiply()  # first-time work
    lanes = num_lanes if device == "cpu" else 1
    return max(_round(multiply, lanes, seconds) for _ in range(_ROUNDS) for multiply in products)


def _cpu_products(dtype: str) -> list[Callable[[], float]]:
    """Return the ways to multiply in a dtype, of which the fastest counts."""
    in_torch = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    weight_OI = torch.linspace(-1, 1, _CPU_SIDE * _CPU_SIDE).view(_CPU_SIDE, _CPU_SIDE).to(in_torch)
    x_RI = torch.linspace(-1, 1, _CPU_ROWS * _CPU_SIDE).view(_CPU_ROWS, _CPU_SIDE).to(in_torch)
    ways: list[Callable[[Tensor], Tensor]] = [] if dtype == "int8" else [_linear(weight_OI)]
    own, kind = kernels(), "int8" if dtype == "int8" else product_kind(in_torch)
    if own is not None and kind in own.kinds:
        ways.append(partial(PackedLinear(own, kind, weight_OI, None, "identity"), dtype=in_torch))
    elif dtype == "int8":
        ways.append(partial(Int8Linear(weight_OI, None, "identity", torch.ones(_CPU_SIDE)), dtype=in_torch))
    return [_timed(way, x_RI) for way in ways]


def _timed(product: Callable[[Tensor], Tensor], x_RI: Tensor) -> Callable[[], float]:
    def multiply() -> float:
        with torch.inference_mode():
            product(x_RI)
        return 2.0 * _CPU_ROWS * _CPU_SIDE * _CPU_SIDE

    return multiply


def _linear(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    if prepacked_supported(weight_OI.device):
        return packed_linear(weight_OI, num_rows=_CPU_ROWS)
    return lambda x_RI: x_RI @ weight_OI.T


def _gpu_product(dtype: torch.dtype, device: str) -> Callable[[], float]:
    weight_OI = torch.randn(_GPU_SIDE, _GPU_SIDE, device=device, dtype=dtype)
    x_RI = torch.randn(_GPU_SIDE, _GPU_SIDE, device=device, dtype=dtype)

    def multiply() -> float:
        for _ in range(8):
            torch.mm(x_RI, weight_OI.T)
        torch.cuda.synchronize(device)
        return 8 * 2.0 * _GPU_SIDE**3

    return multiply


def _round(multiply: Callable[[], float], num_threads: int, seconds: float) -> float:
    """Multiply in `num_threads` threads at once and return the sum of their FLOP/s."""
    barrier = Barrier(num_threads)
    rates: list[float] = []

    def work() -> None:
        torch.set_num_threads(1)
        barrier.wait()
        begin, done = perf_counter(), 0.0
        while (elapsed := perf_counter() - begin) < seconds or not done:
            done += multiply()
        rates.append(done / max(perf_counter() - begin, elapsed))

    threads = [Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)
