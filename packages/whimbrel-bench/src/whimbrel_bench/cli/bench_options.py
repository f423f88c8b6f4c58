"""Checks of options of `whimbrel bench` that do not go together, and the servers that they name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import typer

from whimbrel.errors import SetupError
from whimbrel_bench.cli.groups import flags_of
from whimbrel_bench.options import DatasetOptions, Load, SweepOptions, TargetOptions

if TYPE_CHECKING:
    from whimbrel_bench.target import Target

_PRESET_OPTIONS: Final = ("scale", "random_weights", "serve_args")
_SETTLED: Final = (
    "host", "port", "backend",
    *(flag.name for options in (DatasetOptions, Load, SweepOptions) for flag in flags_of(options).values()),
)  # fmt: skip
"""Options of `whimbrel bench serve` that a preset settles itself."""


def check_options(context: typer.Context, preset: str | None) -> None:
    """Raise SetupError for options that were given and would have no effect."""
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if preset is None:
        _refuse(given, _PRESET_OPTIONS, "is of presets.", "name one with --preset")
        if "sweep" in given:
            _refuse(given, ("request_rate",), "has no effect with --sweep.", "put the rate into --sweep")
        else:
            _refuse(given, ("sweep_seconds",), "is of sweeps.", "name the rates with --sweep")
    else:
        hint = "leave it out, or leave out --preset; --url names the server"
        _refuse(given, _SETTLED, f"has no effect: --preset {preset} settles it.", hint)


def _refuse(given: Collection[str], names: Iterable[str], why: str, hint: str) -> None:
    for name in names:
        if name in given:
            raise SetupError(f"--{name.replace('_', '-')} {why}", hint=hint)


def check_metrics(text: str) -> None:
    """Raise SetupError for metrics that these models do not have."""
    others = [name for name in (part.strip() for part in text.split(",")) if name and name != "e2el"]
    if others:
        raise SetupError(
            f"--percentile-metrics {text}: {', '.join(others)} is of models that generate tokens.",
            hint="pooling models have e2el, the latency of whole requests",
        )


def read_urls(urls: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and URLs of the servers. A URL without a name is its own. Raises SetupError."""
    found: list[tuple[str, str]] = []
    for value in urls:
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
