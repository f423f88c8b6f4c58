"""Options that the commands of `whimbrel bench` share, and how their values are read."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from whimbrel.cli.shared_options import option
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from whimbrel_bench.target import Target, TargetOptions

SERVER_PANEL: Final = "Server"
DATASET_PANEL: Final = "Dataset"
LOAD_PANEL: Final = "Load"
RESULTS_PANEL: Final = "Results"
PRESET_PANEL: Final = "Preset"

_PRESET_OPTIONS: Final = ("scale", "random_weights", "serve_args")
_SETTLED: Final = (
    "host", "port", "backend", "dataset_name", "dataset_path", "num_prompts", "random_input_len", "random_range_ratio",
    "random_batch_size", "tokenizer", "seed", "request_rate", "burstiness", "max_concurrency", "num_warmups",
    "client_processes", "sweep", "sweep_seconds", "metric_percentiles",
)  # fmt: skip
"""Options of `whimbrel bench serve` that a preset settles itself."""


def finite(seconds: float) -> float:
    """Return a number of seconds. Raises BadParameter for infinity."""
    if not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds.")
    return seconds


Backend = Annotated[
    str,
    option("NAME", "openai-embeddings, rerank, pooling (vLLM), tei, ollama or native (Whimbrel's own).", panel=SERVER_PANEL),
]
ModelName = Annotated[
    str | None, option("NAME", "Model in the requests. [default: the first of /v1/models]", "--model", panel=SERVER_PANEL)
]
Endpoint = Annotated[str | None, option("PATH", "Path in place of the backend's.", panel=SERVER_PANEL)]
ApiKey = Annotated[
    str | None,
    option("KEY", "API key. [env var: WHIMBREL_API_KEY or OPENAI_API_KEY]", panel=SERVER_PANEL),
]
Headers = Annotated[
    list[str] | None, option("NAME=VALUE", "Header of every request. May be repeated.", "--header", panel=SERVER_PANEL)
]
ExtraBody = Annotated[
    str | None,
    option("JSON", "Object whose fields go into every body. null removes a field of the backend.", panel=SERVER_PANEL),
]
Ready = Annotated[
    float,
    option(
        "SECONDS",
        "Time to wait for a server that cannot be reached yet.",
        "--ready-check-timeout-sec",
        min=0,
        callback=finite,
        panel=SERVER_PANEL,
    ),
]
DatasetName = Annotated[
    Literal["random", "random-rerank", "custom", "texts"],
    option(
        "NAME",
        "random; random-rerank: a query with documents; custom: JSONL with prompt; texts: a text in each line.",
        panel=DATASET_PANEL,
    ),
]
DatasetPath = Annotated[Path | None, option("PATH", "File of custom or texts.", panel=DATASET_PANEL)]
NumPrompts = Annotated[int, option("N", "Number of prompts. A file with fewer is repeated.", min=1, panel=DATASET_PANEL)]
InputLen = Annotated[
    int, option("N", "Tokens of a random prompt, special tokens included.", "--random-input-len", min=1, panel=DATASET_PANEL)
]
RangeRatio = Annotated[
    float,
    option(
        "R",
        "Lengths lie between (1 - R) and (1 + R) times that.",
        "--random-range-ratio",
        min=0.0,
        max=0.999,
        panel=DATASET_PANEL,
    ),
]
BatchSize = Annotated[
    int, option("N", "Prompts, or documents, in one request.", "--random-batch-size", min=1, panel=DATASET_PANEL)
]
Seed = Annotated[int, option("N", "Seed of lengths, words and arrivals.", min=0, panel=DATASET_PANEL)]
TokenizerName = Annotated[
    str | None,
    option(
        "MODEL",
        "Folder or Hub id whose tokenizer counts random prompts; packaged for the packaged one. [default: the server's own]",
        "--tokenizer",
        panel=DATASET_PANEL,
    ),
]
Json = Annotated[Path | None, option("PATH", "Write the result as JSON.", "--json", panel=RESULTS_PANEL)]


def read_pairs(values: Sequence[str] | None, name: str) -> dict[str, str]:
    """Return NAME=VALUE options as a dict. Raises SetupError."""
    found: dict[str, str] = {}
    for value in values or ():
        key, sign, rest = value.partition("=")
        if not sign or not key:
            raise SetupError(f"--{name} {value} has no name and value.", hint=f"for example --{name} name=value")
        found[key] = rest
    return found


def check_options(context: typer.Context, preset: str | None) -> None:
    """Raise SetupError for options that were given and would have no effect."""
    given = given_options(context)
    if preset is None:
        _refuse(given, _PRESET_OPTIONS, "is of presets.", "name one with --preset")
        if "sweep" in given:
            _refuse(given, ("request_rate",), "has no effect with --sweep.", "put the rate into --sweep")
        else:
            _refuse(given, ("sweep_seconds",), "is of sweeps.", "name the rates with --sweep")
    else:
        hint = "leave it out, or leave out --preset; --url names the server"
        _refuse(given, _SETTLED, f"has no effect: --preset {preset} settles it.", hint)


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the options that the user gave."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def _refuse(given: Collection[str], names: Sequence[str], why: str, hint: str) -> None:
    for name in names:
        if name in given:
            raise SetupError(f"--{name.replace('_', '-')} {why}", hint=hint)


def check_dataset(name: str, path: Path | None) -> None:
    """Raise SetupError for a file that a random dataset would not read."""
    if path is not None and name.startswith("random"):
        raise SetupError(
            f"--dataset-path {path} is not read by --dataset-name {name}.",
            hint="add --dataset-name custom (JSONL) or --dataset-name texts (a text in each line)",
        )


def read_extra_body(text: str | None) -> dict[str, Any]:
    """Return the object of `--extra-body`. Raises SetupError."""
    import msgspec

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


def check_metrics(text: str) -> None:
    """Raise SetupError for metrics that these models do not have."""
    others = [name for name in (part.strip() for part in text.split(",")) if name and name != "e2el"]
    if others:
        raise SetupError(
            f"--percentile-metrics {text}: {', '.join(others)} is of models that generate tokens.",
            hint="pooling models have e2el, the latency of whole requests",
        )


def read_urls(urls: Sequence[str] | None, host: str, port: int) -> list[tuple[str, str]]:
    """Return names and URLs of the servers. A URL without a name is its own. Raises SetupError."""
    found: list[tuple[str, str]] = []
    for value in urls or (f"http://{host}:{port}",):
        name, sign, url = value.partition("=")
        named = bool(sign) and "/" not in name and ":" not in name
        found.append((name, url) if named else ("", value))
    names = [name or url for name, url in found]
    if len(set(names)) < len(names):
        raise SetupError("a server is named twice.", hint="give each a name: --url NAME=URL")
    return found


def make_targets(urls: Sequence[tuple[str, str]], options: TargetOptions) -> list[Target]:
    """Return the servers, each reachable. Raises SetupError."""
    from whimbrel_bench.target import Target

    targets = [Target(url, options, name=name) for name, url in urls]
    for target in targets:
        target.connect()
    return targets
