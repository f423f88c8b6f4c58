"""Times of operations on the device: by CUDA events, and kernel by kernel from PyTorch's profiler. On a CPU by the clock."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

_WARM_UPS: Final = 3
_HOLD: Final = 20_000_000
"""Clock cycles, some 10 ms, for which the device is held, so that it then runs without waiting for the host."""


class Kernels(NamedTuple):
    """Kernels and copies that the device ran."""

    microseconds: float
    launches: int
    top: list[tuple[str, int, float]]
    """(name, number of launches, microseconds), the longest first."""


def microseconds(call: Callable[[], object], device: str, *, times: int = 20) -> float:
    """Return the time of one call. On a GPU it is the device's, unless the call itself waits for the device."""
    for _ in range(_WARM_UPS):
        call()
    if device == "cpu":
        begin = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - begin) * 1e6 / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HOLD)
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def kernels_of(call: Callable[[], object], device: str) -> Kernels:
    """Return the kernels that a call runs, in any thread. A CPU has none."""
    from torch.profiler import ProfilerActivity, profile

    if device == "cpu":
        call()
        return Kernels(0.0, 0, [])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events: list[Any] = [each for each in profiler.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
    top = sorted(((each.key, each.count, each.self_device_time_total) for each in events), key=lambda row: -row[2])
    return Kernels(sum(time for *_, time in top), sum(count for _, count, _ in top), top)


def bandwidth(device: str, *, small: bool) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    size = 2**22 if small else 2**30
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / microseconds(lambda: target.copy_(source), device) * 1e6
