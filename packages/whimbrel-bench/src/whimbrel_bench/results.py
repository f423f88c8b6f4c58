"""Results of a load: statistics, the block of lines and the JSON that vLLM's benchmark has, and Markdown.

Pure: reports of client processes in, numbers and text out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isinf
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import WhimbrelError
from whimbrel_bench.backends import Sample
from whimbrel_bench.load import Outcome, Report
from whimbrel_bench.options import Load
from whimbrel_bench.tables import table

_WIDTH: Final = 50
_BUSY: Final = 0.9
"""Share of a core from which on a client process counts as busy."""
_LATE: Final = 0.01
"""Lateness of the client's event loop in seconds that is never held against it."""

_MAX_REASONS: Final = 10
_STATUS_AND_CODE: Final = re.compile(r"""(HTTP \d+): .*?"(?:code|error_type|type)"\s*:\s*"([^"]+)\"""")
_NUMBER: Final = re.compile(r"\d[\d,.]*")
_CONNECT: Final = "see whether the server still runs and how many connections it takes; --max-concurrency limits them."
_REMEDIES: Final = (
    ("HTTP 5", "see the server's log."),
    ("HTTP 429", "the server refuses work above its limits: offer less, or raise its limits."),
    ("HTTP 404", "check --backend, --endpoint and --model."),
    ("HTTP 200", "see the server's log, or choose the --backend that suits it."),
    ("no answer within", "offer less with --max-concurrency or --request-rate, or wait longer with --timeout."),
    ("closed the connection", "see the server's log: it ended, restarted or limits its connections."),
    ("cannot connect", _CONNECT),
    ("no connection within", _CONNECT),
)
"""Words of a reason, and what to do then."""


@dataclass(frozen=True)
class Setting:
    """Options of a run, as its results state them."""

    server: str
    backend: str
    model: str
    tokenizer: str
    num_prompts: int
    load: Load
    label: str | None = None


@dataclass(frozen=True)
class Client:
    """State of the client processes during the run."""

    processes: int
    busiest: float
    """Share of a core that the busiest process took."""
    late: float
    """Seconds by which the event loop of the latest process turned late, 99th percentile."""
    was_limit: bool


@dataclass(frozen=True)
class Result:
    """Numbers of one run. Throughputs are per second of `duration`; latencies are of successful requests, in seconds."""

    setting: Setting
    outcomes: Sequence[Outcome]
    input_lens: Sequence[int]
    """Tokens of each request; 0 if it failed."""
    total_input_sequences: int
    client: Client
    counted_by: str
    """The side that counted the tokens: server, client, or both."""
    reports: Sequence[Report]
    """Reports of the client processes, whose indices are those of the samples."""
    notes: tuple[str, ...] = ()

    @cached_property
    def latencies(self) -> NDArray[np.float64]:
        return np.array([each.done - each.scheduled for each in self.outcomes if not each.reason])

    @property
    def queue_times(self) -> list[float]:
        return [each.sent - each.scheduled for each in self.outcomes]

    @property
    def errors(self) -> list[str]:
        return [each.reason for each in self.outcomes]

    @property
    def completed(self) -> int:
        return len(self.latencies)

    @property
    def failed(self) -> int:
        return len(self.outcomes) - self.completed

    @property
    def duration(self) -> float:
        return max((each.done for each in self.outcomes), default=1e-9)

    @property
    def total_input(self) -> int:
        return sum(self.input_lens)

    @property
    def interrupted(self) -> bool:
        return any(report.interrupted for report in self.reports)

    @property
    def unfinished(self) -> int:
        return sum(report.unfinished for report in self.reports)

    @property
    def num_resent(self) -> int:
        return sum(report.num_resent for report in self.reports)

    @property
    def name(self) -> str:
        return self.setting.server or self.setting.model

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def token_throughput(self) -> float:
        return self.total_input / self.duration

    @property
    def sequence_throughput(self) -> float:
        return self.total_input_sequences / self.duration

    def all_answered(self) -> Result:
        """Return the result. Raises WhimbrelError with the first reason if a request failed."""
        if self.failed:
            reason = next(filter(None, self.errors)).rstrip(".")
            number = f"{self.failed:,} of {self.failed + self.completed:,}"
            raise WhimbrelError(f"{self.setting.server}: {number} requests failed: {reason}.")
        return self

    def milliseconds(self) -> dict[str, float]:
        """Return mean, median, standard deviation and percentiles of the latency by vLLM's names. Without successes, 0."""
        values = self.latencies if self.latencies.size else np.zeros(1)
        found = {"mean_e2el_ms": values.mean(), "median_e2el_ms": np.median(values), "std_e2el_ms": values.std()}
        found |= {f"p{word(p)}_e2el_ms": np.percentile(values, p) for p in self.setting.load.percentiles}
        return {name: float(value) * 1000 for name, value in found.items()}


def word(percentile: float) -> str:
    """Return a percentile as it is written in names: 99, 99.9."""
    return str(int(percentile)) if int(percentile) == percentile else str(percentile)


def make_result(
    setting: Setting, samples: Sequence[Sample], reports: Sequence[Report], *, notes: tuple[str, ...] = ()
) -> Result:
    """Return the result of the reports of all client processes."""
    outcomes = [each for report in reports for each in report.outcomes]
    good = [each for each in outcomes if not each.reason]
    tokens = [
        0 if each.reason else each.tokens if each.tokens >= 0 else samples[each.payload].num_tokens or 0 for each in outcomes
    ]
    by_client = sum(each.tokens < 0 for each in good)
    counted_by = "server" if not by_client else "client" if by_client == len(good) else "server and client"
    client = judge_client(reports, median(each.done - each.scheduled for each in good) if good else 0.0)
    sequences = sum(len(samples[each.payload].texts) for each in good)
    return Result(setting, outcomes, tokens, sequences, client, counted_by, reports, notes)


def judge_client(reports: Sequence[Report], latency: float) -> Client:
    """Return whether the client was the limit: a busy process, or a loop that is late by a tenth of the median latency."""
    busiest = max((report.cpu_share for report in reports), default=0.0)
    late = max((float(np.percentile(report.lag, 99)) for report in reports if report.lag), default=0.0)
    return Client(len(reports), busiest, late, busiest > _BUSY or late > max(_LATE, 0.1 * latency))


# Text


def _line(name: str, value: float, *, digits: int | None = 2) -> str:
    return f"{name:<40} {value:<10.{digits}f}" if digits is not None else f"{name:<40} {value:<10}"


def block(result: Result) -> str:
    """Return the result as vLLM's benchmark prints it, line by line."""
    setting, ms = result.setting, result.milliseconds()
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _line("Successful requests:", result.completed, digits=None),
        _line("Failed requests:", result.failed, digits=None),
    ]
    if setting.load.concurrency is not None:
        lines.append(_line("Maximum request concurrency:", setting.load.concurrency, digits=None))
    if not isinf(setting.load.rate):
        lines.append(_line("Request rate configured (RPS):", setting.load.rate))
    lines += [
        _line("Benchmark duration (s):", result.duration),
        _line("Total input tokens:", result.total_input, digits=None),
        _line("Request throughput (req/s):", result.request_throughput),
        _line("Input throughput (inputs/s):", result.sequence_throughput),
        _line("Total token throughput (tok/s):", result.token_throughput),
        f"{'End-to-end Latency':-^{_WIDTH}}",
        _line("Mean E2EL (ms):", ms["mean_e2el_ms"]),
        _line("Median E2EL (ms):", ms["median_e2el_ms"]),
        *(_line(f"P{word(p)} E2EL (ms):", ms[f"p{word(p)}_e2el_ms"]) for p in setting.load.percentiles),
        "=" * _WIDTH,
    ]
    return "\n".join(lines)


def remarks(result: Result) -> list[str]:
    """Return what a reader of the block must know besides."""
    client = result.client
    lines = list(result.notes)
    if result.counted_by != "server" and result.completed:
        lines.append(f"Tokens are by the count of the {result.counted_by}: the server did not state them in every answer.")
    if client.was_limit:
        lines.append(_advice(client))
    if result.num_resent:
        lines.append(f"{result.num_resent:,} requests were sent again: the server had closed their idle connections.")
    if result.interrupted:
        lines.append(f"Stopped early: {result.unfinished:,} requests on their way or due are not counted.")
    reasons, examples = Counter[str](), dict[str, str]()
    for reason in filter(None, result.errors):
        reasons[_group(reason)] += 1
        examples.setdefault(_group(reason), reason)
    for group, count in reasons.most_common(_MAX_REASONS):
        lines.append(f"Failed, {count:,} of {result.failed:,}: {examples[group]}")
    if rest := reasons.total() - sum(count for _, count in reasons.most_common(_MAX_REASONS)):
        lines.append(
            f"Failed, {rest:,} of {result.failed:,}: {len(reasons) - _MAX_REASONS:,} other reasons; --save-detailed has all."
        )
    return lines + [f"To do: {advice}" for words, advice in _REMEDIES if any(words in reason for reason in examples.values())]


def _group(reason: str) -> str:
    """Return what reasons of one kind share: the status and the error's code, else all but the numbers."""
    found = _STATUS_AND_CODE.match(reason)
    return " ".join(found.groups()) if found else _NUMBER.sub("N", reason)


def _advice(client: Client) -> str:
    """Return what the client was short of. A loop that is late while it has little to do waits for a processor."""
    state = f"its busiest process took {client.busiest:.0%} of a core, and its event loop was {client.late * 1000:.0f} ms late"
    advice = f"Use --client-processes {2 * client.processes}."
    if client.busiest <= _BUSY:
        advice = "Other work, perhaps the server, takes the processor: run the client on other cores or on another machine."
    return f"The client was a limit: {state} (99th percentile). {advice}"


def to_json(result: Result, *, date: str, detailed: bool = False, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the result by the keys of vLLM's benchmark, and under `whimbrel` what it does not have."""
    setting = result.setting
    record: dict[str, Any] = {
        "date": date,
        "endpoint_type": setting.backend,
        "backend": setting.backend,
        "label": setting.label,
        "model_id": setting.model,
        "tokenizer_id": setting.tokenizer,
        "num_prompts": setting.num_prompts,
        **(metadata or {}),
        "request_rate": "inf" if isinf(setting.load.rate) else setting.load.rate,
        "burstiness": setting.load.burstiness,
        "max_concurrency": setting.load.concurrency,
        "duration": result.duration,
        "completed": result.completed,
        "total_input_tokens": result.total_input,
        "total_input_sequences": result.total_input_sequences,
        "request_throughput": result.request_throughput,
        "input_sequence_throughput": result.sequence_throughput,
        "total_token_throughput": result.token_throughput,
    }
    if detailed:
        record |= {
            "input_lens": result.input_lens,
            "latencies": [each.done - each.scheduled for each in result.outcomes],
            "queue_times": result.queue_times,
            "errors": result.errors,
        }
    client = result.client
    return (
        record
        | result.milliseconds()
        | {
            "whimbrel": {
                "server": setting.server,
                "failed": result.failed,
                "unfinished": result.unfinished,
                "resent": result.num_resent,
                "interrupted": result.interrupted,
                "bytes_received": sum(each.size for each in result.outcomes),
                "tokens_counted_by": result.counted_by,
                "client_processes": client.processes,
                "client_core_share": client.busiest,
                "client_loop_late_p99_ms": client.late * 1000,
                "client_was_limit": client.was_limit,
                "notes": list(result.notes),
            }
        }
    )


def cells(results: Sequence[Result]) -> list[list[str]]:
    """Return the cells of a table with a row per run, the head first."""
    percentile = word(max(results[0].setting.load.percentiles)) if results else "99"
    head = ["server", "rate", "concurrency", "requests/s", "tokens/s", "median ms", f"p{percentile} ms", "failed", "client"]
    rows = [head]
    for result in results:
        setting, ms = result.setting, result.milliseconds()
        rows.append(
            [
                result.name,
                "inf" if isinf(setting.load.rate) else f"{setting.load.rate:g}",
                str(setting.load.concurrency or "none"),
                f"{result.request_throughput:,.1f}",
                f"{result.token_throughput:,.0f}",
                f"{ms['median_e2el_ms']:,.1f}",
                f"{ms[f'p{percentile}_e2el_ms']:,.1f}",
                str(result.failed),
                "limit" if result.client.was_limit else "ok",
            ]
        )
    return rows


def markdown(results: Sequence[Result]) -> str:
    """Return a table with a row per run."""
    head, *rows = cells(results)
    return table(head, rows)
