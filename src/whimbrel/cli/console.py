"""What the command shows: progress on stderr; cards, plans and tables on stdout, for people or as JSON."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card, PoolingOption
    from whimbrel.types.plan import Options, Plan


def console() -> Console:
    """Of stderr."""

    class Lasting(Console):
        """What it tells is not worth ending for, if nobody reads it any more."""

        def on_broken_pipe(self) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    return Lasting(stderr=True, highlight=False, soft_wrap=True)


def load(console: Console, model: str | None, *, pooling: PoolingOption | None, **options: Unpack[Options]) -> Engine:
    """Load an engine, saying each phase and how long it took."""
    from time import perf_counter

    started = perf_counter()
    with console.status("starting") as status:
        phase, since = "starting", started

        def say(what: str) -> None:
            nonlocal phase, since
            now = perf_counter()
            console.print(f"  {phase:<24}{now - since:6.2f} s", style="dim")
            phase, since = what, now
            status.update(what)
            if what == "finding the checkpoint":
                status.stop()  # the hub shows bars of its own
            else:
                status.start()

        from whimbrel.engine.engine import Engine

        engine = Engine(model, pooling=pooling, progress=say, **options)
        say("")
    return engine


def print_card(card: Card, plan: Plan | None, *, as_json: bool) -> None:
    """`plan` is None where PyTorch is missing, without which there is none."""
    parts: dict[str, dict[str, Any]] = {"card": msgspec.to_builtins(card)}
    if plan is not None:
        parts["plan"] = msgspec.to_builtins(plan)
    if as_json:
        _print_json(parts)
        return
    if plan is not None:  # for people
        parts["plan"] |= {"cpu": str(plan.cpu)}
        if plan.same_bits is None:
            parts["plan"] |= {"same_bits": "found out when the weights are loaded"}
        if not plan.same_bits_reason:
            del parts["plan"]["same_bits_reason"]
    for title, fields in parts.items():
        typer.echo(title)
        for name, value in fields.items():
            typer.echo(f"  {name:<22}{value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
    if plan is None:
        typer.echo("plan\n  (needs PyTorch: pip install 'whimbrel[serve]')")


def print_models(*, as_json: bool) -> None:
    """The models that are proven."""
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
