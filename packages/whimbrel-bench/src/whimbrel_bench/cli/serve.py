"""The command `whimbrel bench serve`."""

from dataclasses import replace
from typing import Annotated, Final, Literal

import typer

from whimbrel.cli.shared_options import flag, need, option
from whimbrel_bench.cli.bench_options import check_metrics, check_options, make_targets, read_urls
from whimbrel_bench.cli.groups import spread
from whimbrel_bench.options import RESULTS_PANEL, SERVER_PANEL, DatasetOptions, Load, OutputOptions, SweepOptions, TargetOptions

_PRESET_PANEL: Final = "Preset"
_PRESETS: Final = "Published workload: gritlm, token-vectors or rerank. Starts a server, unless --url names one."
_SCALE: Final = "full: for a GPU; small: a small random model, for a CPU."
_RANDOM: Final = "Random weights in the real model's size, made here, in place of the Hub's."
_ARGUMENTS: Final = "Further arguments of the preset's `whimbrel serve`."


@spread()
def serve(
    context: typer.Context,
    *,
    urls: Annotated[
        list[str] | None,
        option(
            "[NAME=]URL", "Server. May be repeated. [default: --host and --port]", "--url", "--base-url", panel=SERVER_PANEL
        ),
    ] = None,
    host: Annotated[str, option("HOST", "Address of the server.", panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[int, option("PORT", "Port of the server.", min=1, max=65535, panel=SERVER_PANEL)] = 8000,
    target: TargetOptions,
    dataset: DatasetOptions,
    load: Load,
    sweep: SweepOptions,
    percentile_metrics: Annotated[str, option("NAMES", "Metrics with percentiles: e2el.", panel=RESULTS_PANEL)] = "e2el",
    files: OutputOptions,
    preset: Annotated[
        Literal["gritlm", "token-vectors", "rerank"] | None, option("NAME", _PRESETS, panel=_PRESET_PANEL)
    ] = None,
    scale: Annotated[Literal["full", "small"], option("SCALE", _SCALE, panel=_PRESET_PANEL)] = "full",
    random_weights: Annotated[bool, flag("--random-weights", _RANDOM, panel=_PRESET_PANEL)] = False,
    serve_args: Annotated[str, option("ARGS", _ARGUMENTS, panel=_PRESET_PANEL)] = "",
) -> None:
    """Load a server and measure latency and throughput."""
    need("httptools")
    check_options(context, preset)
    check_metrics(percentile_metrics)
    dataset.check()
    from whimbrel.cli import console
    from whimbrel_bench.cli.output import Output
    from whimbrel_bench.cli.runs import run_plan, run_preset

    output = Output(files)
    output.check()
    with console.signals_exit():
        if preset is not None:
            servers = read_urls(urls or ())
            code = run_preset(preset, scale, servers, target, output, random_weights=random_weights, arguments=serve_args)
        else:
            targets = make_targets(read_urls(urls or [f"http://{host}:{port}"]), target)
            code = run_plan(dataset, replace(load, seed=dataset.seed), sweep, targets, output)
    raise typer.Exit(code)
