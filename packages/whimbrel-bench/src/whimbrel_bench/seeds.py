"""Figures that others published for the workloads of the presets. They are shown beside a run and are not from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Seed:
    """Published figures of one workload: columns of numbers by the name of the row."""

    source: str
    hardware: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]


SEEDS: Final[Mapping[str, Seed]] = {
    "gritlm": Seed(
        "vLLM, pull request on token ids for CPU-only poolers (merged in March 2026), GritLM-7B",
        "one H200",
        ("vLLM before", "vLLM after"),
        {
            "requests/s": ("193.31", "287.99"),
            "tokens/s": ("8,737", "13,016"),
            "mean ms": ("6,721", "4,132"),
            "p99 ms": ("9,988", "6,822"),
        },
    ),
    "token-vectors": Seed(
        "vLLM, pull request on one projection for the whole ragged batch (April 2026, not merged), chunked prefill",
        "one H200",
        ("vLLM before", "vLLM after"),
        {
            "requests/s": ("13.45", "13.71"),
            "tokens/s": ("54,391", "55,463"),
            "mean ms": ("267", "262"),
            "p50 ms": ("264", "261"),
            "p95 ms": ("297", "277"),
            "p99 ms": ("372", "328"),
        },
    ),
    "rerank": Seed(
        "vLLM, pull request on batched MaxSim on the GPU (merged in February 2026), jina-colbert-v2",
        "GPU not named",
        ("vLLM before", "vLLM after"),
        {
            "requests/s": ("141.38", "161.14"),
            "tokens/s": ("290,961", "331,638"),
            "mean ms": ("446", "391"),
            "p95 ms": ("517", "421"),
            "p99 ms": ("532", "432"),
        },
    ),
    "article": Seed(
        "the article Serving embeddings at blazing speed: FastAPI with 7 uvicorn workers, random vectors of 1,024 numbers; "
        "json and orjson are the writers of its server (json after tolist), and the readers of the client here",
        "one M1 laptop, client and server",
        ("article",),
        {
            "32 texts, json, s": ("3.548",),
            "32 texts, orjson, s": ("0.317",),
            "32 texts, json / orjson": ("11.2",),
            "256 texts, orjson / raw": ("2.88",),
        },
    ),
}
