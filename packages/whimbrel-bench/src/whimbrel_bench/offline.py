"""Benchmark of the engine alone: throughput, share of the machine's peak, time per stage, memory, and the cosines of dtypes.

Each dtype runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.checkpoint.summary import weight_shapes
from whimbrel.errors import SetupError
from whimbrel.types.arrays import Float32Array
from whimbrel_bench.datasets import make_samples
from whimbrel_bench.options import DatasetOptions
from whimbrel_bench.processes import Worker
from whimbrel_bench.words import model_words

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card
    from whimbrel.types.request import Request
    from whimbrel.types.result import Outputs, Result

STAGES: Final = ("tokenize", "queue", "pack", "compute", "collect")
_NO_LIMIT: Final = 2**31
"""Tokens in the queue: all requests are submitted at once."""
_COMPARED: Final = 64
"""Texts whose vectors are kept for the cosines."""
_NOT_PER_TOKEN: Final = ("embed", "pooler", "classifier", "score", "lm_head")
"""Parts of names of weights that are looked up, or used once per text or not at all."""


@dataclass(frozen=True)
class OfflineOptions:
    """Work of every dtype."""

    model: str | None
    dataset: DatasetOptions
    device: str = "auto"
    rounds: int = 3
    max_length: int | None = None
    max_batch_tokens: int | None = None


@dataclass(frozen=True)
class OfflineResult:
    """Numbers of one dtype, by the names of the JSON."""

    model: str
    dtype: str
    device: str
    lanes: int
    output: str
    texts: int
    tokens: int
    round_seconds: list[float]
    stage_seconds: dict[str, float]
    """Sums over all rounds and threads. `queue` is the sum of what each request waited."""
    requests: int
    peak_flops_per_second: float | None
    """None if the run was stopped before that was measured."""
    model_flops_per_token: float | None
    load_seconds: float
    peak_rss_bytes: int
    loaded_rss_bytes: int
    interrupted: bool = False
    vectors: list[Float32Array] = field(default_factory=list[Float32Array], repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / float(np.median(self.round_seconds))

    @property
    def share_of_peak(self) -> float | None:
        """Share of the measured peak that the products with weights take."""
        if self.model_flops_per_token is None or self.peak_flops_per_second is None:
            return None
        return self.tokens_per_second * self.model_flops_per_token / self.peak_flops_per_second


def run_offline(options: OfflineOptions, dtype: str, *, on_round: Callable[[int], None] | None = None) -> OfflineResult | None:
    """Run one dtype in a process of its own. Ctrl-C ends it at once.

    Return the result, after Ctrl-C that of the rounds so far, or None if there are none. Raises WhimbrelError.
    """
    last: OfflineResult | None = None
    with suppress(KeyboardInterrupt), closing(Worker(_start, options, dtype)) as worker:
        while last is None or last.interrupted:
            last = cast(OfflineResult, worker.ask())
            if on_round is not None:
                on_round(len(last.round_seconds))
    return last


def _start(options: OfflineOptions, dtype: str) -> Callable[[None], OfflineResult]:
    results = measure(options, dtype)
    return lambda _: next(results)


def measure(options: OfflineOptions, dtype: str) -> Generator[OfflineResult]:
    """Run the model in this process. Yield a result after each round, marked as interrupted, then the whole one."""
    from whimbrel.engine.engine import Engine
    from whimbrel.model.ops.peak import measure_peak
    from whimbrel.telemetry import trace

    begin = perf_counter()
    chunks = [list(each.texts) for each in make_samples(options.dataset, model_words(options.dataset, options.model))]
    with Engine(
        options.model,
        device=options.device,
        dtype=dtype,
        max_length=options.max_length,
        max_batch_tokens=options.max_batch_tokens,
        max_queue_tokens=_NO_LIMIT,
    ) as engine:
        loaded, load_seconds = _peak_rss(), perf_counter() - begin
        first = run_requests(engine, chunks)  # not counted: first-time work
        stages: dict[str, float] = dict.fromkeys(STAGES, 0.0)

        def add(event: trace.HistogramEvent) -> None:
            if event.name in stages:
                stages[event.name] += event.value

        plan, card = engine.plan, engine.card
        flops = flops_per_token(Path(engine.folder) / card.path, card)
        result = OfflineResult(
            card.name, plan.dtype, plan.device, plan.num_lanes, main_output(first[0].outputs), sum(map(len, chunks)),
            sum(result.num_tokens for result in first), [], stages, 0, None, flops, load_seconds, 0, loaded, interrupted=True,
            vectors=rows_of(first),
        )  # fmt: skip
        end = trace.subscribe(trace.HistogramEvent, add)
        for number in range(1, options.rounds + 1):
            started = perf_counter()
            run_requests(engine, chunks)
            result.round_seconds.append(perf_counter() - started)
            result = replace(result, requests=len(chunks) * number, peak_rss_bytes=_peak_rss())
            yield result
        end()
        yield replace(result, peak_flops_per_second=measure_peak(plan.dtype, plan.device, plan.num_lanes), interrupted=False)


def flops_per_token(folder: Path, card: Card) -> float | None:
    """Return the FLOP of one token's products with weights, counted from their shapes, of which a layer's time mostly consists.

    Attention's own products are not counted, so a share of the peak is a lower bound. None if not all weights are used for each
    token.
    """
    layers = card.encoder.layers
    if card.towers or not layers or any(layer.num_experts for layer in layers) or "sparse" in card.outputs:
        return None
    shapes = weight_shapes([*folder.glob("*.safetensors")])
    if shapes is None:
        return None
    tables = {card.encoder.vocab_size, card.encoder.max_positions}
    return 2.0 * sum(
        prod(shape)
        for name, shape in shapes
        if len(shape) == 2 and shape[0] not in tables and not any(part in name for part in _NOT_PER_TOKEN)
    )


def main_output(outputs: Outputs) -> str:
    """Return the name of the output that a request without a choice has."""
    return next(
        name for name in ("dense", "multi_vector", "scores", "sparse", "token_scores") if getattr(outputs, name) is not None
    )


def run_requests(engine: Engine, chunks: Sequence[list[str]]) -> list[Result]:
    """Submit all requests at once and wait."""
    futures = [engine.submit(make_request(engine.card, chunk)) for chunk in chunks]
    return [future.result() for future in futures]


def make_request(card: Card, texts: list[str]) -> Request:
    """Return a request for the main output: of documents, or of pairs for a reranker, each text with itself."""
    from whimbrel.types.request import Request

    ranks = "scores" in card.outputs and "dense" not in card.outputs and (card.template is not None or len(card.labels) <= 1)
    role = "document" if card.text_formats else None
    return Request([(text, text) for text in texts] if ranks else texts, input_type=role, truncate="right")


def rows_of(results: Sequence[Result]) -> list[Float32Array]:
    """Return the rows of the first texts. Sparse vectors are not compared."""
    rows: list[Float32Array] = []
    for result in results:
        output = main_output(result.outputs)
        found = getattr(result.outputs, output)
        rows += [np.asarray(found[i], np.float32) for i in range(len(found))] if output != "sparse" else []
        if len(rows) >= _COMPARED:
            break
    return rows[:_COMPARED]


def _peak_rss() -> int:
    """Return the peak of this process's resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cosines(ours: Sequence[Float32Array], theirs: Sequence[Float32Array]) -> NDArray[np.float64]:
    """Return a cosine for each text: of its vector, the lowest of its token vectors; one for all scores. Raises SetupError."""
    if len(ours) != len(theirs):
        raise SetupError(f"one side has {len(ours)} results, the other {len(theirs)}.")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape:
            raise SetupError(f"text {number} has shape {list(a.shape)} on one side, {list(b.shape)} on the other.")
    if ours and ours[0].size == 1:
        ours, theirs = ([np.array([row.ravel()[0] for row in rows], np.float32)] for rows in (ours, theirs))
    return np.array([_rows(a, b).min(initial=1.0) for a, b in zip(ours, theirs, strict=True)], np.float64)


def _rows(a: Float32Array, b: Float32Array) -> NDArray[np.float64]:
    a_ND, b_ND = (np.atleast_2d(each).astype(np.float64) for each in (a, b))
    norms_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    same_N = (a_ND == b_ND).all(axis=1)  # two rows of zeros
    products_N: NDArray[np.float64] = (a_ND * b_ND).sum(axis=1)
    return np.where(same_N, 1.0, products_N / np.where(norms_N > 0, norms_N, 1.0))


def compared(results: Sequence[OfflineResult]) -> list[tuple[str, str, float, float]]:
    """Return (dtype, dtype, lowest cosine, mean cosine) of each dtype with the first."""
    first, *others = results
    rows: list[tuple[str, str, float, float]] = []
    for other in others:
        found = cosines(first.vectors, other.vectors)
        if found.size:
            rows.append((first.dtype, other.dtype, float(found.min()), float(found.mean())))
    return rows


def to_json(results: Sequence[OfflineResult]) -> dict[str, Any]:
    """Return the results with names that say their units."""
    runs: list[dict[str, Any]] = []
    for each in results:
        shares = {"tokens_per_second": each.tokens_per_second, "share_of_peak": each.share_of_peak}
        runs.append(shares | {field.name: getattr(each, field.name) for field in fields(each) if field.name != "vectors"})
    pairs = [dict(zip(("dtype", "with", "min_cosine", "mean_cosine"), row, strict=True)) for row in compared(results)]
    return {"runs": runs, "cosines": pairs}
