"""Measured peak of matrix products: what the device can do, as the yardstick of a model's speed.

The products are as favourable as a model's could be: one large weight matrix, prepacked on a CPU, and many rows, on all lanes
at once. The best round counts.

Shapes: R rows, I input and O output columns.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from whimbrel.model.ops.prepacked import packed_linear, prepacked_supported

_CPU_ROWS: Final = 512
"""Rows of a product on a CPU: those of a batch."""
_CPU_SIDE: Final = 2048
_GPU_SIDE: Final = 8192
_ROUNDS: Final = 3


def measure_peak(dtype: str, device: str, num_lanes: int, *, seconds: float = 0.5) -> float:
    """Return the multiply-adds per second, times 2 (FLOP/s), of the best of three rounds of at least `seconds` each."""
    kind = getattr(torch, dtype)
    multiply = _gpu_product(kind, device) if device.startswith("cuda") else _cpu_product(kind)
    multiply()  # first-time work
    return max(_round(multiply, num_lanes if device == "cpu" else 1, seconds) for _ in range(_ROUNDS))


def _cpu_product(dtype: torch.dtype) -> Callable[[], float]:
    weight_OI = torch.linspace(-1, 1, _CPU_SIDE * _CPU_SIDE).view(_CPU_SIDE, _CPU_SIDE).to(dtype)
    x_RI = torch.linspace(-1, 1, _CPU_ROWS * _CPU_SIDE).view(_CPU_ROWS, _CPU_SIDE).to(dtype)
    product = _linear(weight_OI)

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
