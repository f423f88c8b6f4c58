"""Console output of the command: load progress on stderr; cards, plans and tables on stdout, as text or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card, PoolingOption
    from whimbrel.types.plan import Options, Plan


def stderr_console() -> Console:
    """Return a console that writes to stderr and ignores a reader that left."""

    class TolerantConsole(Console):
        def on_broken_pipe(self) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    return TolerantConsole(stderr=True, highlight=False, soft_wrap=True)


def load(console: Console, model: str | None, *, pooling: PoolingOption | None, **options: Unpack[Options]) -> Engine:
    """Load an engine, saying each phase and how long it took."""
    progress = LoadProgress(console, [model or ""])
    try:
        from whimbrel.engine.engine import Engine

        engine = Engine(model, pooling=pooling, progress=lambda phase: progress.start_phase(0, phase), **options)
        progress.finish()
    finally:
        progress.close()
    return engine


class LoadProgress:
    """Progress of loading: a line for each finished phase of each model, with its seconds."""

    def __init__(self, console: Console, models: Sequence[str]) -> None:
        self._console = console
        self._models = models
        self._running = {model: ("starting", perf_counter()) for model in range(len(models))}
        self._status = console.status("starting")
        self._status.start()

    def start_phase(self, model: int, name: str) -> None:
        """End the current phase of the model with this index, and begin phase `name`."""
        phase, since = self._running[model]
        now = perf_counter()
        prefix = f"{self._models[model]}: " if len(self._models) > 1 else ""
        self._console.print(f"  {prefix}{phase:<24}{now - since:6.2f} s", style="dim", markup=False)
        self._running[model] = name, now
        self._status.update(name)
        if name == "finding the checkpoint":
            self._status.stop()  # huggingface_hub shows progress bars of its own
        else:
            self._status.start()

    def finish(self) -> None:
        """End the last phase of each model, and close."""
        for model in self._running:
            self.start_phase(model, "")
        self.close()

    def close(self) -> None:
        self._status.stop()


def print_card(card: Card, plan: Plan | None, *, as_json: bool) -> None:
    """Print a card and its plan. `plan` is None where PyTorch is not installed."""
    sections: dict[str, dict[str, Any]] = {"card": msgspec.to_builtins(card)}
    if plan is not None:
        sections["plan"] = msgspec.to_builtins(plan)
    if as_json:
        _print_json(sections)
        return
    if plan is not None:
        sections["plan"] |= {"cpu": str(plan.cpu)}
        if plan.same_bits is None:
            sections["plan"] |= {"same_bits": "found out when the weights are loaded"}
        if not plan.same_bits_reason:
            del sections["plan"]["same_bits_reason"]
    for title, fields in sections.items():
        typer.echo(title)
        for name, value in fields.items():
            typer.echo(f"  {name:<22}{value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
    if plan is None:
        typer.echo("plan\n  (needs PyTorch: pip install 'whimbrel[serve]')")


def print_models(*, as_json: bool) -> None:
    """Print the models that have a parity test."""
    from whimbrel.checkpoint.proven import format_difference, read_results, rows

    table = rows(read_results())
    if as_json:
        _print_json(table)
        return
    lines = [("MODEL", "FAMILY", "TASKS", "DIFFERENCE", "PARITY TEST")]
    lines += [
        (row.model, row.family, ", ".join(row.tasks), format_difference(row.difference), ", ".join(row.tests)) for row in table
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
