"""The command `whimbrel bench serve`."""

from dataclasses import replace
from typing import Annotated, Final

import typer

from whimbrel.cli.shared_options import option
from whimbrel.errors import SetupError
from whimbrel_bench.cli.groups import flags_of, spread
from whimbrel_bench.options import SERVER_PANEL, DatasetOptions, Load, OutputOptions, PresetOptions, SweepOptions, TargetOptions

_URLS: Final = "Server. May be repeated. [default: --host and --port]"
_SETTLED: Final = (
    "host", "port", "backend",
    *(flag.name for options in (DatasetOptions, Load, SweepOptions) for flag in flags_of(options).values()),
)  # fmt: skip
"""Options that a preset settles itself."""
_OF_PRESETS: Final = ("scale", "random_weights", "serve_args")


@spread()
def serve(
    context: typer.Context,
    *,
    urls: Annotated[list[str] | None, option("[NAME=]URL", _URLS, "--url", "--base-url", panel=SERVER_PANEL)] = None,
    host: Annotated[str, option("HOST", "Address of the server.", panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[int, option("PORT", "Port of the server.", min=1, max=65535, panel=SERVER_PANEL)] = 8000,
    target: TargetOptions,
    dataset: DatasetOptions,
    load: Load,
    sweep: SweepOptions,
    files: OutputOptions,
    preset: PresetOptions,
) -> None:
    """Load a server and measure latency and throughput."""
    _check_options(context, preset.name)
    dataset.check()
    from whimbrel.cli import console
    from whimbrel_bench.cli.output import Output
    from whimbrel_bench.cli.runs import make_targets, read_urls, run_plan, run_preset

    output = Output(files)
    output.check()
    with console.signals_exit():
        if preset.name is not None:
            code = run_preset(preset.name, preset, read_urls(urls or ()), target, output)
        else:
            targets = make_targets(read_urls(urls or [f"http://{host}:{port}"]), target)
            code = run_plan(dataset, replace(load, seed=dataset.seed), sweep, targets, output)
    raise typer.Exit(code)


def _check_options(context: typer.Context, preset: str | None) -> None:
    """Raise SetupError for an option that was given and would have no effect."""
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    for name in (each for each in (_OF_PRESETS if preset is None else _SETTLED) if each in given):
        flag = f"--{name.replace('_', '-')}"
        if preset is None:
            raise SetupError(f"{flag} is of presets.", hint="name one with --preset")
        hint = "leave it out, or leave out --preset; --url names the server"
        raise SetupError(f"{flag} has no effect: --preset {preset} settles it.", hint=hint)
    if {"sweep", "request_rate"} <= given:
        raise SetupError("--request-rate has no effect with --sweep.", hint="put the rate into --sweep")
    if "sweep_seconds" in given and "sweep" not in given:
        raise SetupError("--sweep-seconds is of sweeps.", hint="name the rates with --sweep")
