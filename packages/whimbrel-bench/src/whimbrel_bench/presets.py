"""Presets: published workloads with their figures, each with a random model or one of the Hub, and a server that it starts."""

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from whimbrel_bench import random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.random_models import Size
from whimbrel_bench.results import Result, word
from whimbrel_bench.server import serving
from whimbrel_bench.tables import table
from whimbrel_bench.target import Load
from whimbrel_bench.words import local_words

_INSTRUCTION: Final = "<|user|>\nGiven a scientific paper title, retrieve the paper's abstract\n<|embed|>\n"
_TITLES: Final = (
    "Attention Is All You Need",
    "Bitcoin: A Peer-to-Peer Electronic Cash System",
    "Generative Representational Instruction Tuning",
    "Deep Residual Learning for Image Recognition",
    "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
    "Language Models are Few-Shot Learners",
    "Adam: A Method for Stochastic Optimization",
    "Dense Passage Retrieval for Open-Domain Question Answering",
)
SENTENCES: Final = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
SENTENCE: Final = "retrieval benchmark sentence "
_MARKERS: Final = 3
"""[CLS], [SEP] and the marker of a query."""


@dataclass(frozen=True)
class Preset:
    """One workload in one size, and its published figures: two columns of numbers by the name of the row."""

    name: str
    backend: str
    samples: Sequence[Sample]
    load: Load
    model: str
    """Hub id of the real model."""
    write: Callable[[Path], None]
    """Writes the random model."""
    extra_body: Mapping[str, Any]
    serve: tuple[str, ...]
    """Arguments of `whimbrel serve`."""
    source: str
    hardware: str
    published: Mapping[str, tuple[str, str]]


def _gritlm(*, small: bool) -> Preset:
    size = Size(256, 896, 4, 8, 2) if small else Size(4096, 14336, 32, 32, 8, vocabulary=32000)
    return Preset(
        "gritlm",
        "openai-embeddings",
        [Sample((f"{_INSTRUCTION}{_TITLES[i % len(_TITLES)]} ({i})",)) for i in range(2000)],
        Load(num_warmups=20),
        "parasail-ai/GritLM-7B-vllm",
        lambda folder: random_models.write_gritlm(folder, size),
        {},
        ("--max-length", "4000"),
        "vLLM, pull request on token ids for CPU-only poolers (merged in March 2026), GritLM-7B",
        "one H200",
        {
            "requests/s": ("193.31", "287.99"),
            "tokens/s": ("8,737", "13,016"),
            "mean ms": ("6,721", "4,132"),
            "p99 ms": ("9,988", "6,822"),
        },
    )


def _token_vectors(*, small: bool) -> Preset:
    size = Size(128, 384, 2, 4, 2, 32) if small else Size(1024, 3072, 28, 16, 8, 128, vocabulary=151669)
    percentiles, seconds = (50.0, 95.0, 99.0), 10.0 if small else 120.0
    return Preset(
        "token-vectors",
        "pooling",
        [Sample(tuple(SENTENCE * times for times in SENTENCES))],
        Load(concurrency=4, duration=seconds, num_warmups=4, new_connections=True, percentiles=percentiles, processes=1),
        "Qwen/Qwen3-Embedding-0.6B",
        lambda folder: random_models.write_qwen3(folder, size),
        {"task": "token_embed", "encoding_format": "base64"},
        (),
        "vLLM, pull request on one projection for the whole ragged batch (April 2026, not merged), chunked prefill",
        "one H200",
        {
            "requests/s": ("13.45", "13.71"),
            "tokens/s": ("54,391", "55,463"),
            "mean ms": ("267", "262"),
            "p50 ms": ("264", "261"),
            "p95 ms": ("297", "277"),
            "p99 ms": ("372", "328"),
        },
    )


def _rerank(*, small: bool) -> Preset:
    count, length = (128, 256) if small else (2000, 2048)
    dataset = DatasetOptions("random-rerank", num_prompts=count, input_len=length, range_ratio=0.5)
    samples = make_samples(dataset, local_words(None))
    size = Size(256, 1024, 4, 4) if small else Size(1024, 4096, 24, 16, vocabulary=250002)
    assert samples[0].query is not None
    query_tokens = len(samples[0].query.split()) + _MARKERS  # neither cut nor filled up
    return Preset(
        "rerank",
        "rerank",
        samples,
        Load(concurrency=64, num_warmups=8, percentiles=(95.0, 99.0)),
        "jinaai/jina-colbert-v2",
        lambda folder: random_models.write_colbert(folder, size, query_tokens=query_tokens, document_tokens=4096),
        {},
        ("--max-length", "4096") if not small else (),
        "vLLM, pull request on batched MaxSim on the GPU (merged in February 2026), jina-colbert-v2",
        "GPU not named",
        {
            "requests/s": ("141.38", "161.14"),
            "tokens/s": ("290,961", "331,638"),
            "mean ms": ("446", "391"),
            "p95 ms": ("517", "421"),
            "p99 ms": ("532", "432"),
        },
    )


PRESETS: Final[Mapping[str, Callable[..., Preset]]] = {
    "gritlm": _gritlm, "token-vectors": _token_vectors, "rerank": _rerank,
}  # fmt: skip


@contextmanager
def preset_server(
    preset: Preset, *, random_weights: bool, arguments: Sequence[str], say: Callable[[str], None]
) -> Generator[str]:
    """Write the random model, if it is one, start a server of it, and yield its URL. Raises SetupError."""
    with tempfile.TemporaryDirectory(prefix="whimbrel-bench-") as folder:
        path = Path(folder) / f"random-{preset.name}"
        if random_weights:
            path.mkdir()
            preset.write(path)
            megabytes = sum(file.stat().st_size for file in path.rglob("*")) / 1e6
            say(f"wrote a random model of the shape of {preset.model}: {megabytes:,.0f} MB")
        with serving(str(path) if random_weights else preset.model, *preset.serve, *arguments, say=say) as server:
            yield server.url


def beside_published(preset: Preset, ours: Mapping[str, str], *, hardware: str, model: str) -> str:
    """Return a table of our figures beside the published ones, and what the reader must know of these."""
    names = dict.fromkeys([*preset.published, *ours])
    rows = [[name, ours.get(name, "-"), *preset.published.get(name, ("-", "-"))] for name in names]
    rows.append(["hardware", hardware, preset.hardware, preset.hardware])
    return (
        f"{table([preset.name, 'this run', 'vLLM before (*)', 'vLLM after (*)'], rows)}\n\n"
        f"(*) Not from this run: published figures. Source: {preset.source}. "
        f"This run: {model}. Other hardware or another model makes other numbers: these columns are no comparison."
    )


def figures(result: Result) -> dict[str, str]:
    """Return our figures by the names of the published ones."""
    ms = result.milliseconds()
    found = {
        "requests/s": f"{result.request_throughput:,.2f}",
        "tokens/s": f"{result.token_throughput:,.0f}",
        "mean ms": f"{ms['mean_e2el_ms']:,.0f}",
    }
    return found | {f"p{word(p)} ms": f"{ms[f'p{word(p)}_e2el_ms']:,.0f}" for p in result.setting.load.percentiles}
