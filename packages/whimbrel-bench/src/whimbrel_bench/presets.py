"""Presets: published workloads, each with a model that it makes itself or takes from the Hub, and a server that it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from whimbrel_bench import random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.own_server import own_server
from whimbrel_bench.random_models import Size
from whimbrel_bench.results import Result, word
from whimbrel_bench.seeds import SEEDS
from whimbrel_bench.tables import table
from whimbrel_bench.target import Load
from whimbrel_bench.words import CANDIDATES, Words

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
_REPEATS: Final = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
_SENTENCE: Final = "retrieval benchmark sentence "
_WORDS: Final = Words(CANDIDATES, 0, "one token per word of the random model")
_MARKER: Final = 1


@dataclass(frozen=True)
class Preset:
    """One workload in one size."""

    name: str
    backend: str
    samples: Sequence[Sample]
    load: Load
    model: str | None
    """Hub id of the real model, or None if there is none."""
    write: Callable[[Path], None]
    """Writes the random model."""
    extra_body: Mapping[str, Any]
    serve: tuple[str, ...] = ()
    """Arguments of `whimbrel serve`."""


def _gritlm(*, small: bool) -> Preset:
    samples = [Sample((f"{_INSTRUCTION}{_TITLES[i % len(_TITLES)]} ({i})",)) for i in range(2000)]
    size = Size(256, 896, 4, 8, 2) if small else Size(4096, 14336, 32, 32, 8, vocabulary=32000)
    words = [*CANDIDATES, *" ".join((_INSTRUCTION, *_TITLES)).split()]
    return Preset(
        "gritlm",
        "openai-embeddings",
        samples,
        Load(num_warmups=20),
        "parasail-ai/GritLM-7B-vllm",
        lambda folder: random_models.write_gritlm(folder, size, words),
        {},
        ("--max-length", "4000"),
    )


def _token_vectors(*, small: bool) -> Preset:
    sample = Sample(tuple(_SENTENCE * times for times in _REPEATS))
    size = Size(128, 384, 2, 4, 2, 32) if small else Size(1024, 3072, 28, 16, 8, 128, vocabulary=151669)
    words = [*CANDIDATES, *_SENTENCE.split()]
    return Preset(
        "token-vectors",
        "pooling",
        [sample],
        Load(
            concurrency=4,
            duration=10.0 if small else 120.0,
            num_warmups=4,
            new_connections=True,
            decode="json",
            percentiles=(50.0, 95.0, 99.0),
            processes=1,
        ),
        "Qwen/Qwen3-Embedding-0.6B",
        lambda folder: random_models.write_qwen3(folder, size, words),
        {"task": "token_embed", "encoding_format": "base64"},
    )


def _rerank(*, small: bool) -> Preset:
    count, length = (128, 256) if small else (2000, 2048)
    samples = make_samples(DatasetOptions("random-rerank", num_prompts=count, input_len=length, range_ratio=0.5), _WORDS)
    size = Size(256, 1024, 4, 4) if small else Size(1024, 4096, 24, 16, vocabulary=250002)
    query = samples[0].query
    assert query is not None
    query_tokens = len(query.split()) + 2 + _MARKER  # <s>, </s>: neither cut nor filled up
    return Preset(
        "rerank",
        "rerank",
        samples,
        Load(concurrency=64, num_warmups=8, percentiles=(95.0, 99.0)),
        "jinaai/jina-colbert-v2",
        lambda folder: random_models.write_jina_colbert(
            folder, size, CANDIDATES, query_tokens=query_tokens, document_tokens=4096
        ),
        {},
        ("--max-length", "4096") if not small else (),
    )


def _article(*, small: bool) -> Preset:
    """Return the first of the runs of the article; `article_runs` has all."""
    return Preset(
        "article",
        "openai-embeddings",
        [Sample(CANDIDATES[:32])] * 100,
        Load(concurrency=100, num_warmups=8, processes=1),
        None,
        lambda folder: random_models.write_table(folder, 1024, CANDIDATES),
        {"encoding_format": "float", "truncate_prompt_tokens": None},
    )


PRESETS: Final[Mapping[str, Callable[..., Preset]]] = {
    "gritlm": _gritlm,
    "token-vectors": _token_vectors,
    "rerank": _rerank,
    "article": _article,
}


_ARTICLE_MODES: Final = (("json", "float"), ("orjson", "float"), ("raw", "bytes"))
"""Readers of the client, and the format of the vectors."""


def article_runs(preset: Preset) -> list[tuple[str, Preset]]:
    """Return the runs of the article: 32 and 256 texts, with vectors as JSON read in two ways, and as raw bytes."""
    runs: list[tuple[str, Preset]] = []
    for count in (32, 256):
        samples = [Sample((CANDIDATES * 2)[:count])] * 100
        for decode, encoding in _ARTICLE_MODES:
            extra = {**preset.extra_body, "encoding_format": encoding}
            load = replace(preset.load, decode=decode)
            runs.append((f"{count} texts, {decode}", replace(preset, samples=samples, load=load, extra_body=extra)))
    return runs


@contextmanager
def preset_server(
    preset: Preset, *, random_weights: bool, arguments: Sequence[str], say: Callable[[str], None]
) -> Generator[str]:
    """Write the random model, if it is one, start a server of it, and yield its URL. Raises SetupError."""
    if not random_weights and preset.model is not None:
        with own_server(preset.model, [*preset.serve, *arguments], say=say) as url:
            yield url
        return
    with tempfile.TemporaryDirectory(prefix="whimbrel-bench-") as folder:
        path = Path(folder) / f"random-{preset.name}"
        path.mkdir()
        preset.write(path)
        megabytes = sum(file.stat().st_size for file in path.rglob("*")) / 1e6
        say(f"wrote a random model with the layout of {preset.model or 'a table of vectors'}: {megabytes:,.0f} MB")
        with own_server(str(path), [*preset.serve, *arguments], say=say) as url:
            yield url


def beside_seed(name: str, ours: Mapping[str, str], *, hardware: str, model: str) -> str:
    """Return a table of our figures beside the published ones, and what the reader must know of these."""
    seed = SEEDS[name]
    rows = [[row, ours.get(row, "-"), *figures] for row, figures in seed.rows.items()]
    rows += [[row, value, *("-" for _ in seed.columns)] for row, value in ours.items() if row not in seed.rows]
    rows.append(["hardware", hardware, *(seed.hardware for _ in seed.columns)])
    head = [name, "this run", *(f"{column} (*)" for column in seed.columns)]
    return (
        f"{table(head, rows)}\n\n(*) Not from this run: published figures. Source: {seed.source}. "
        f"This run: {model}. Other hardware or another model makes other numbers: these columns are no comparison."
    )


def figures(result: Result) -> dict[str, str]:
    """Return our figures by the names of the seeds."""
    ms = result.milliseconds()
    found = {
        "requests/s": f"{result.request_throughput:,.2f}",
        "tokens/s": f"{result.token_throughput:,.0f}",
        "mean ms": f"{ms['mean_e2el_ms']:,.0f}",
    }
    return found | {f"p{word(p)} ms": f"{ms[f'p{word(p)}_e2el_ms']:,.0f}" for p in result.setting.percentiles}


def article_figures(results: Mapping[str, Result]) -> dict[str, str]:
    """Return the seconds of each run of the article, and the ratios that it names."""
    seconds = {name: result.duration for name, result in results.items() if not (result.interrupted or result.failed)}
    found = {f"{name}, s": f"{value:.3f}" for name, value in seconds.items()}
    if {"32 texts, json", "32 texts, orjson"} <= set(seconds):
        found["32 texts, json / orjson"] = f"{seconds['32 texts, json'] / seconds['32 texts, orjson']:.2f}"
    if {"256 texts, orjson", "256 texts, raw"} <= set(seconds):
        found["256 texts, orjson / raw"] = f"{seconds['256 texts, orjson'] / seconds['256 texts, raw']:.2f}"
    return found
