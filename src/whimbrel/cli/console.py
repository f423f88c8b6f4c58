"""Input and output of the command.

Texts are lines of UTF-8 on stdin. Load progress goes to stderr; vectors, cards, plans and tables go to stdout or a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Unpack

import msgspec
import typer
from rich.console import Console

from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card, PoolingOption
    from whimbrel.types.plan import Options, Plan

_CHUNK_LINES: Final = 2048


def stderr_console() -> Console:
    """Return a console that writes to stderr and ignores a reader that left."""

    class TolerantConsole(Console):
        def on_broken_pipe(self) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    return TolerantConsole(stderr=True, highlight=False, soft_wrap=True)


def load(console: Console, model: str | None, *, pooling: PoolingOption | None, **options: Unpack[Options]) -> Engine:
    with closing(LoadProgress(console, [model or ""])) as progress:
        from whimbrel.engine.engine import Engine

        engine = Engine(model, pooling=pooling, progress=lambda phase: progress.start_phase(0, phase), **options)
        progress.finish()
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
    from whimbrel.checkpoint.verified import format_difference, read_results, rows

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


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield lines of UTF-8 text without line ends and byte order mark. Raises SetupError."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SetupError(f"line {number} of stdin is not valid UTF-8 (byte {error.start}).") from None


def chunked(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of up to 2,048 texts: enough work for an engine, while results appear before the input ends."""
    iterator = iter(texts)
    while chunk := list(islice(iterator, _CHUNK_LINES)):
        yield chunk


def write_vectors(path: Path | None, pairs: Iterator[tuple[list[str], Any]], *, dimension: int) -> None:
    """Write texts with their vectors, (N, dimension), to a file, or to stdout if `path` is None.

    A path that ends in .npy gets one array, any other JSONL. Raises SetupError.
    """
    if path is not None and path.suffix.lower() == ".npy":
        _write_npy(path, (array for _, array in pairs), dimension)
    else:
        _write_jsonl(path, pairs)


def _write_npy(path: Path, arrays: Iterator[Any], dimension: int) -> None:
    import numpy as np

    chunks = [np.empty((0, dimension), np.float32), *arrays]
    with _write_errors(path):
        np.save(path, np.concatenate(chunks))


def _write_jsonl(path: Path | None, pairs: Iterator[tuple[list[str], Any]]) -> None:
    from whimbrel.wire import to_json

    with _write_errors(path), sys.stdout.buffer if path is None else path.open("wb") as stream:
        for chunk, vectors in pairs:
            rows = zip(chunk, vectors, strict=True)
            stream.write(b"".join(to_json({"text": text, "embedding": vector}) + b"\n" for text, vector in rows))
            stream.flush()


@contextmanager
def _write_errors(path: Path | None) -> Generator[None]:
    """Turn an OSError into a SetupError, except for a reader of stdout that left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"cannot write {path or 'stdout'}: {error.strerror or error}.") from None


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
