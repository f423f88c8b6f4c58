"""Checks of options of `whimbrel bench` that do not go together, and the servers that they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from whimbrel.errors import SetupError
from whimbrel_bench.options import TargetOptions

if TYPE_CHECKING:
    from whimbrel_bench.target import Target


def check_options(context: typer.Context) -> None:
    """Raise SetupError for an option that was given and would have no effect."""
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if {"sweep", "request_rate"} <= given:
        raise SetupError("--request-rate has no effect with --sweep.", hint="put the rate into --sweep")
    if "sweep_seconds" in given and "sweep" not in given:
        raise SetupError("--sweep-seconds is of sweeps.", hint="name the rates with --sweep")


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
