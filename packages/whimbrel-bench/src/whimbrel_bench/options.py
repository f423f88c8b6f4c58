"""Options of benchmarks, and the flags that their fields have on the command line. A field without `option` has no flag."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import typer

from whimbrel.cli.shared_options import flag, option
from whimbrel.errors import SetupError

SERVER_PANEL: Final = "Server"
DATASET_PANEL: Final = "Dataset"
LOAD_PANEL: Final = "Load"
RESULTS_PANEL: Final = "Results"


class Read(NamedTuple):
    """Reading of a flag whose value has another type than the field: that type, its default, and the function."""

    kind: Any
    default: Any
    read: Callable[[Any], Any]


def finite(seconds: float) -> float:
    """Return a number of seconds. Raises BadParameter for infinity."""
    if not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds.")
    return seconds


def read_rate(text: str) -> float:
    """Return the requests per second that a text names; `inf` sends all at once. Raises SetupError."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise SetupError(f"a request rate of {text} sends nothing.", hint="it is a number above 0, or inf for all at once")
    return rate


def read_rates(text: str | None) -> list[float] | None:
    """Return the rates of `--sweep`, in rising order. Raises SetupError."""
    if text is None:
        return None
    rates = sorted({read_rate(part.strip()) for part in text.split(",") if part.strip()})
    if not rates:
        raise SetupError("--sweep has no rates.", hint="for example --sweep 5,10,20,40,inf")
    return rates


def read_pairs(name: str, values: Sequence[str] | None) -> dict[str, str]:
    """Return NAME=VALUE options as a dict. Raises SetupError."""
    found: dict[str, str] = {}
    for value in values or ():
        key, sign, rest = value.partition("=")
        if not sign or not key:
            raise SetupError(f"--{name} {value} has no name and value.", hint=f"for example --{name} name=value")
        found[key] = rest
    return found


def read_extra_body(text: str | None) -> dict[str, Any]:
    """Return the object of `--extra-body`. Raises SetupError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.DecodeError as error:
        raise SetupError(
            f"--extra-body is no JSON object: {error}.", hint="""for example '{"encoding_format": "base64"}'"""
        ) from None


def read_percentiles(text: str) -> tuple[float, ...]:
    """Return the percentiles of `--metric-percentiles`. Raises SetupError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or not all(0 <= each <= 100 for each in found):
        raise SetupError(f"--metric-percentiles {text} is no list of percentiles.", hint="for example 50,95,99")
    return found


def read_metrics(text: str) -> str:
    """Return the metrics of `--percentile-metrics`. Raises SetupError for those that these models do not have."""
    others = [name for name in (part.strip() for part in text.split(",")) if name and name != "e2el"]
    if others:
        raise SetupError(
            f"--percentile-metrics {text}: {', '.join(others)} is of models that generate tokens.",
            hint="pooling models have e2el, the latency of whole requests",
        )
    return text


_server = partial(option, panel=SERVER_PANEL)
_dataset = partial(option, panel=DATASET_PANEL)
_load = partial(option, panel=LOAD_PANEL)
_results = partial(option, panel=RESULTS_PANEL)
_preset = partial(option, panel="Preset")
_BACKENDS: Final = "openai-embeddings, rerank, pooling (vLLM), tei, ollama or native (Whimbrel's own)."
_READY: Final = "Time to wait for a server that cannot be reached yet."
_DATASETS: Final = "random; random-rerank: a query with documents; custom: JSONL with prompt; texts: a text in each line."
_TOKENIZER: Final = (
    "Folder or Hub id whose tokenizer counts random prompts; packaged for the packaged one. [default: the server's own]"
)
_SWEEP_SECONDS: Final = "Time of each rate of a sweep, as far as --num-prompts suffices."
_PICTURE: Final = "Draw throughput against latency: .html, .svg or .png (needs whimbrel[bench])."
_PRESETS: Final = "Published workload: gritlm, token-vectors or rerank. Starts a server, unless --url names one."
_SCALE: Final = "full: for a GPU; small: a small random model, for a CPU."
_RANDOM: Final = "Random weights in the real model's size, made here, in place of the Hub's."


@dataclass(frozen=True)
class TargetOptions:
    """Choice of the server's kind, and what goes with every request."""

    backend: Annotated[str, _server("NAME", _BACKENDS)] = "openai-embeddings"
    endpoint: Annotated[str | None, _server("PATH", "Path in place of the backend's.")] = None
    model: Annotated[str | None, _server("NAME", "Model in the requests. [default: the first of /v1/models]")] = None
    api_key: Annotated[str | None, _server("KEY", "API key. [env var: WHIMBREL_API_KEY or OPENAI_API_KEY]")] = None
    headers: Annotated[
        Mapping[str, str],
        _server("NAME=VALUE", "Header of every request. May be repeated.", "--header"),
        Read(list[str] | None, None, partial(read_pairs, "header")),
    ] = field(default_factory=dict[str, str])
    extra_body: Annotated[
        Mapping[str, Any],
        _server("JSON", "Object whose fields go into every body. null removes a field of the backend."),
        Read(str | None, None, read_extra_body),
    ] = field(default_factory=dict[str, Any])
    verify_tls: Annotated[
        bool, flag("--insecure", "Accept any TLS certificate.", panel=SERVER_PANEL), Read(bool, False, not_)
    ] = True
    ready_seconds: Annotated[float, _server("SECONDS", _READY, "--ready-check-timeout-sec", min=0, callback=finite)] = 0.0
    timeout: Annotated[float, _load("SECONDS", "Time after which a request has failed.", min=0.1, callback=finite)] = 600.0


@dataclass(frozen=True)
class DatasetOptions:
    """Choice of a dataset and its sizes."""

    name: Annotated[Literal["random", "random-rerank", "custom", "texts"], _dataset("NAME", _DATASETS, "--dataset-name")] = (
        "random"
    )
    path: Annotated[Path | None, _dataset("PATH", "File of custom or texts.", "--dataset-path")] = None
    num_prompts: Annotated[int, _dataset("N", "Number of prompts. A file with fewer is repeated.", min=1)] = 1000
    seed: Annotated[int, _dataset("N", "Seed of lengths, words and arrivals.", min=0)] = 0
    input_len: Annotated[
        int, _dataset("N", "Tokens of a random prompt, special tokens included.", "--random-input-len", min=1)
    ] = 128
    range_ratio: Annotated[
        float, _dataset("R", "Lengths lie between (1 - R) and (1 + R) times that.", "--random-range-ratio", min=0.0, max=0.999)
    ] = 0.0
    batch_size: Annotated[int, _dataset("N", "Prompts, or documents, in one request.", "--random-batch-size", min=1)] = 1
    tokenizer: Annotated[str | None, _dataset("MODEL", _TOKENIZER)] = None

    @property
    def is_random(self) -> bool:
        return self.name.startswith("random")

    def check(self) -> None:
        """Raise SetupError for a file that a random dataset would not read."""
        if self.path is not None and self.is_random:
            raise SetupError(
                f"--dataset-path {self.path} is not read by --dataset-name {self.name}.",
                hint="add --dataset-name custom (JSONL) or --dataset-name texts (a text in each line)",
            )


@dataclass(frozen=True)
class Load:
    """Course of a run, without its texts."""

    rate: Annotated[
        float,
        _load("RATE", "Requests per second, as a Poisson process. inf sends all at once.", "--request-rate"),
        Read(str, "inf", read_rate),
    ] = inf
    burstiness: Annotated[
        float, _load("B", "Evenness of a rate: 1 is Poisson, less comes in bursts, more is even.", min=0.01)
    ] = 1.0
    concurrency: Annotated[
        int | None, _load("N", "Maximum requests on their way. [default: no limit]", "--max-concurrency", min=1)
    ] = None
    num_warmups: Annotated[int, _load("N", "Requests before the clock starts.", min=0)] = 0
    seed: int = 0
    processes: Annotated[
        int | None, _load("N", "Client processes. [default: by the load]", "--client-processes", min=1, max=256)
    ] = None
    percentiles: Annotated[
        tuple[float, ...],
        _results("LIST", "Percentiles, e.g. 50,95,99.", "--metric-percentiles"),
        Read(str, "99", read_percentiles),
    ] = (99.0,)
    new_connections: bool = False
    """Every request has a connection of its own."""
    duration: float | None = None
    """Seconds for which the samples are repeated."""
    keep_bodies: bool = False
    """The result has the first answer to each sample."""


@dataclass(frozen=True)
class SweepOptions:
    """Rates of a sweep."""

    rates: Annotated[
        list[float] | None,
        _load("RATES", "Run at each of these rates, e.g. 5,10,20,inf.", "--sweep"),
        Read(str | None, None, read_rates),
    ] = None
    seconds: Annotated[float, _load("SECONDS", _SWEEP_SECONDS, "--sweep-seconds", min=0.1, callback=finite)] = 30.0


@dataclass(frozen=True)
class OutputOptions:
    """Files of results."""

    metrics: Annotated[
        str, _results("NAMES", "Metrics with percentiles: e2el.", "--percentile-metrics"), Read(str, "e2el", read_metrics)
    ] = "e2el"
    save: Annotated[bool, flag("--save-result", "Write a JSON file per run, with vLLM's keys.", panel=RESULTS_PANEL)] = False
    detailed: Annotated[
        bool, flag("--save-detailed", "Write the latency and the error of each request too.", panel=RESULTS_PANEL)
    ] = False
    folder: Annotated[Path | None, _results("DIR", "Folder of the JSON files.", "--result-dir")] = None
    filename: Annotated[str | None, _results("NAME", "Name of the JSON file.", "--result-filename")] = None
    label: Annotated[str | None, _results("TEXT", "Label in the results. [default: the backend]")] = None
    metadata: Annotated[
        Mapping[str, str],
        _results("NAME=VALUE", "Field of the JSON files. May be repeated."),
        Read(list[str] | None, None, partial(read_pairs, "metadata")),
    ] = field(default_factory=dict[str, str])
    markdown: Annotated[Path | None, _results("PATH", "Write a Markdown table of all runs.")] = None
    picture: Annotated[Path | None, _results("PATH", _PICTURE)] = None


@dataclass(frozen=True)
class PresetOptions:
    """Choice of a published workload, and of the server that it starts."""

    name: Annotated[Literal["gritlm", "token-vectors", "rerank"] | None, _preset("NAME", _PRESETS, "--preset")] = None
    scale: Annotated[Literal["full", "small"], _preset("SCALE", _SCALE)] = "full"
    random_weights: Annotated[bool, flag("--random-weights", _RANDOM, panel="Preset")] = False
    serve_args: Annotated[str, _preset("ARGS", "Further arguments of the preset's `whimbrel serve`.")] = ""
