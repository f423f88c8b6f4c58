"""Engines with ready-made token ids: throughput, launches, stages and latency, for models of random weights in real sizes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
from engine import SIZES
from runners import MeasuringRunner
from setting import Row, Setting
from timing import kernels_of

from whimbrel import Engine
from whimbrel.model.ops.peak import measure_peak
from whimbrel.telemetry import trace
from whimbrel.types.request import Request
from whimbrel_bench.offline import flops_per_token
from whimbrel_bench.random_models import Size, write_bert, write_qwen3

_TINY: Final = Size(64, 128, 2, 4, 2, 16)
_ROUNDS: Final = 3
_TOP: Final = 20


class Amounts(NamedTuple):
    lengths: tuple[int, ...]
    batch_tokens: tuple[int, ...]
    tokens: int
    """Tokens of a round for the small models; Qwen3 has half of them."""
    alone: int
    """Texts that are sent one at a time."""


_FULL: Final = Amounts((32, 128, 512), (4096, 8192, 16_384), 2**18, 50)
_SMALL: Final = Amounts((32,), (128, 256), 2**10, 3)


def run(_: str, setting: Setting) -> Iterator[Row]:
    os.environ["WHIMBREL_RUNNER"] = "runners:MeasuringRunner"
    amounts = _SMALL if setting.small else _FULL
    peak = measure_peak(setting.dtype, setting.device, 1, seconds=0.02 if setting.small else 0.3)
    for name in ("bge-base", "minilm", "qwen3"):
        with tempfile.TemporaryDirectory() as temporary:
            folder, decoder = Path(temporary), name == "qwen3"
            (write_qwen3 if decoder else write_bert)(folder, _TINY if setting.small else SIZES[name])
            for batch_tokens in amounts.batch_tokens:
                begin = perf_counter()
                options: Any = {"max_batch_tokens": batch_tokens, "max_queue_tokens": 2**31}
                with Engine(folder, device=setting.device, dtype=setting.dtype, **options) as engine:
                    loaded = perf_counter() - begin
                    for length in amounts.lengths:
                        yield {"model": name, "tokens": length} | throughput(engine, length, amounts.tokens >> decoder, peak)
                    if batch_tokens == amounts.batch_tokens[-1]:
                        last = [latency(engine, length, amounts.alone) for length in amounts.lengths]
                        write_profile(engine, name, setting)
            yield from (
                {"model": name, "one text of": n, "load s": loaded} | row for n, row in zip(amounts.lengths, last, strict=True)
            )


def throughput(engine: Engine, length: int, amount: int, peak: float) -> Row:
    """Return a row about rounds of `amount` tokens that are there at once."""
    batch_tokens = engine.plan.max_batch_tokens
    requests, stages = [texts(length, batch_tokens)] * (amount // batch_tokens), dict.fromkeys(("pack", "collect"), 0.0)

    def add(event: trace.HistogramEvent) -> None:
        if event.name in stages:
            stages[event.name] += event.value

    run_all(engine, requests)  # first-time work
    MeasuringRunner.launches.clear()
    end, seconds = trace.subscribe(trace.HistogramEvent, add), list[float]()
    for _ in range(_ROUNDS):
        begin = perf_counter()
        run_all(engine, requests)
        seconds.append(perf_counter() - begin)
    end()
    host, device, number = milliseconds()
    before = len(MeasuringRunner.launches)
    kernels = kernels_of(lambda: run_all(engine, requests[:2]), engine.plan.device)
    profiled = len(MeasuringRunner.launches) - before
    speed, flops = amount / median(seconds), flops_per_token(Path(engine.folder), engine.card)
    return {
        "batch": batch_tokens, "tokens/s": speed, "of peak": "" if flops is None else speed * flops / peak,
        "device ms": device, "launch ms": host, "pack ms": stages["pack"] * 1e3 / number,
        "collect ms": stages["collect"] * 1e3 / number, "kernels ms": kernels.microseconds / 1e3 / profiled,
        "launches": kernels.launches / profiled,
    }  # fmt: skip


def latency(engine: Engine, length: int, times: int) -> Row:
    """Return a row about one text at a time."""
    request, seconds = texts(length, length), list[float]()
    for _ in range(times):
        begin = perf_counter()
        engine.run(request)
        seconds.append(perf_counter() - begin)
    MeasuringRunner.launches[:] = MeasuringRunner.launches[-times:]
    host, device, _ = milliseconds()
    return {
        "ms": median(seconds) * 1e3,
        "p99 ms": float(np.percentile(seconds, 99)) * 1e3,
        "device ms": device,
        "launch ms": host,
    }


def milliseconds() -> tuple[float, float | str, int]:
    """Return medians of the host's milliseconds and the device's of a launch, and the number of launches."""
    launches = list(MeasuringRunner.launches)
    device = [events[0].elapsed_time(events[1]) for *_, events in launches if events]
    return median(host for _, host, _ in launches) * 1e3, median(device) if device else "", len(launches)


def write_profile(engine: Engine, name: str, setting: Setting) -> None:
    """Append the kernels that take most of a batch of texts of 128 tokens to profiles.txt."""
    num_tokens = engine.plan.max_batch_tokens
    found = kernels_of(lambda: engine.run(texts(128, num_tokens)), engine.plan.device)
    lines = [f"{time:10,.0f} us {count:6} x  {kernel[:150]}" for kernel, count, time in found.top[:_TOP]]
    head = f"{name}, {num_tokens} tokens: {found.microseconds:,.0f} us in {found.launches} launches"
    with (setting.out / "profiles.txt").open("a") as file:
        file.write("\n".join([head, *lines, "", ""]))


def texts(length: int, num_tokens: int) -> Request:
    """Return a request of ids of texts of one length."""
    return Request([*np.random.default_rng(0).integers(5, 20_000, (max(1, num_tokens // length), length))])


def run_all(engine: Engine, requests: list[Request]) -> None:
    for future in [engine.submit(request) for request in requests]:
        future.result()
