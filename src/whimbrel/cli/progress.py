"""Progress on stderr: the load of models, downloads, and the texts of a command.

A terminal shows bars. Elsewhere only the finished phases of a load and files of a download are told, a line for each.
"""

import os
import stat
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import BinaryIO, Final

from rich import progress as display
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from whimbrel.cli.console import stderr_console

_BAR_COLUMNS: Final = 20
_LINE_SECONDS: Final = 10.0
"""Time between two lines of a download without a terminal."""
_LARGE_FILE: Final = 1_000_000
_READ_BYTES: Final = 2**20
_MAX_COUNTED_BYTES: Final = 2**32
"""Largest input whose lines are counted before the first runs: some seconds."""


class _IfTotal(display.ProgressColumn):
    """A column that is empty while the total is not known."""

    def __init__(self, column: display.ProgressColumn) -> None:
        super().__init__(table_column=column.get_table_column())
        self._column = column

    def render(self, task: display.Task) -> RenderableType:
        return self._column.render(task) if task.total is not None else Text()


class LoadProgress:
    """Progress of loading: a line for each finished phase of each model, with its seconds and the bytes that it read."""

    def __init__(self, console: Console, models: Sequence[str]) -> None:
        self._console = console
        self._prefixes = [f"{model}: " if len(models) > 1 else "" for model in models]
        self._running = {model: ("starting", perf_counter()) for model in range(len(models))}
        self._num_read = dict.fromkeys(self._running, 0)
        columns = (display.SpinnerColumn(), display.TextColumn("{task.description}", markup=False))
        bars = (_IfTotal(display.BarColumn(_BAR_COLUMNS)), _IfTotal(display.DownloadColumn()))
        self._bars = display.Progress(*columns, *bars, console=console, auto_refresh=False)
        self._live: Live | None = None
        """Display of the bars; a new one after each pause, as a stopped one does not know where the cursor is."""
        self._tasks = [self._bars.add_task(f"{prefix}starting", total=None) for prefix in self._prefixes]

    def start(self) -> None:
        """Show that something happens. From now on the terminal's cursor is hidden, until `close`."""
        if self._live is None and self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, get_renderable=self._bars.get_renderable)
            self._live.start()

    def start_phase(self, model: int, name: str) -> None:
        """End the current phase of the model with this index, and begin phase `name`."""
        phase, since = self._running[model]
        now = perf_counter()
        size = f", {self._num_read[model] / 1e6:,.0f} MB" if self._num_read[model] else ""
        line = f"  {self._prefixes[model]}{phase:<24}{now - since:6.2f} s{size}"
        self._console.print(line, style="dim", markup=False)
        self._running[model], self._num_read[model] = (name, now), 0
        self._bars.reset(self._tasks[model], total=None, description=f"{self._prefixes[model]}{name}")
        if name == "finding the checkpoint":
            self.close()  # huggingface_hub shows progress bars of its own
        else:
            self.start()

    def read(self, model: int, done: int, total: int) -> None:
        """Show the bytes that the current phase has read, of those that it will read."""
        self._num_read[model] = done
        self._bars.update(self._tasks[model], completed=done, total=total)

    def finish(self) -> None:
        """End the last phase of each model, and close."""
        for model in self._running:
            self.start_phase(model, "")
        self.close()

    def close(self) -> None:
        """Remove the bars, and show the cursor."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class DownloadProgress:
    """Progress of a download: a bar over all files, or without a terminal a line now and then, and one for each large file."""

    def __init__(self, console: Console, files: Mapping[str, tuple[int, int]]) -> None:
        """`files` has of each the bytes that are here, and its size."""
        self._console = console
        self._sizes = {name: size for name, (_, size) in files.items()}
        self._here = {name: here for name, (here, _) in files.items()}
        self._total = sum(self._sizes.values())
        no_wrap = Column(no_wrap=True)
        columns = (
            display.TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            display.BarColumn(_BAR_COLUMNS), display.DownloadColumn(table_column=no_wrap),
            display.TransferSpeedColumn(table_column=no_wrap), display.TimeRemainingColumn(table_column=no_wrap),
        )  # fmt: skip
        is_shown = console.is_terminal and bool(files)
        self._bars = display.Progress(*columns, console=console, transient=True, disable=not is_shown, expand=True)
        self._task = self._bars.add_task("", total=self._total, completed=sum(self._here.values()))
        self._begin = self._told = perf_counter()

    @contextmanager
    def shown(self) -> Generator[None]:
        with self._bars:
            yield
            self._console.print(f"done in {perf_counter() - self._begin:,.1f} s", style="dim", markup=False)

    def tell(self, name: str, here: int) -> None:
        """Show that so much of a file is on disk."""
        size = self._sizes.get(name)
        if size is None or here == self._here[name]:
            return
        self._here[name] = here
        done = sum(self._here.values())
        self._bars.update(self._task, completed=done, description=escape(name.rpartition("/")[2]))
        now = perf_counter()
        is_due = now - self._told >= _LINE_SECONDS or (here == size and size >= _LARGE_FILE)
        if self._bars.disable and is_due:
            self._told = now
            line = f"  {done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {name}{' is here' if here == size else ''}"
            self._console.print(line, style="dim", markup=False)

    def wait(self, name: str) -> None:
        """Tell that another process is fetching a file."""
        self._console.print(f"  another process is fetching {name}; waiting for it", style="dim", markup=False)


class TextProgress:
    """Counts of what a command has done so far. A terminal shows them."""

    def __init__(self, console: Console, unit: str, bars: display.Progress, total: int | None) -> None:
        self.done = 0
        self.truncated = 0
        self.written = 0
        """Texts whose answers were written."""
        self.total = total
        """Texts in all; None if that is not known."""
        self._console = console
        self._unit = unit
        self._bars = bars
        self._num_tokens = 0
        self._begin = perf_counter()
        self._task = bars.add_task("", total=total, status=f"0 {unit}")

    def advance(self, count: int, *, num_tokens: int, num_truncated: int) -> None:
        self.done += count
        self.truncated += num_truncated
        self._num_tokens += num_tokens
        seconds = max(perf_counter() - self._begin, 1e-3)
        amount = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        rates = f"{self.done / seconds:,.0f}/s, {self._num_tokens / seconds:,.0f} tokens/s"
        cut = f", {self.truncated:,} truncated" if self.truncated else ""
        self._bars.update(self._task, completed=self.done, status=f"{amount} {self._unit}, {rates}{cut}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def say_stopped(self, out: Path | None, *, asked: bool) -> None:
        """Tell which files a run that ends early keeps. `asked`: the user ended it, so that also nothing is told."""
        place = "stdout" if out is None else str(out)
        if self.written:
            of = "" if self.total is None else f" of {self.total:,}"
            self.say(f"stopped: {place} has the first {self.written:,}{of} {self._unit}.")
        elif asked:
            self.say(f"stopped: {place} has no {self._unit} yet.")


@contextmanager
def show_progress(out: Path | None, unit: str, texts: Sequence[str] | None, stream: BinaryIO) -> Generator[TextProgress]:
    """Show progress on a terminal, unless the answers go there. Without `texts`, the input is the lines of `stream`."""
    console = stderr_console()
    shown = console.is_terminal and not texts and not (out is None and sys.stdout.isatty())
    total = len(texts) if texts else count_lines(stream) if shown else None
    status = display.TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    remaining = _IfTotal(display.TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)))
    columns = (display.BarColumn(_BAR_COLUMNS), status, remaining)
    with display.Progress(*columns, console=console, transient=True, disable=not shown) as bars:
        yield TextProgress(console, unit, bars, total)


def count_lines(stream: BinaryIO) -> int | None:
    """Return the number of lines that a stream has yet to give; None unless it is a file of at most 4 GiB."""
    try:
        number = stream.fileno()
        about, start = os.fstat(number), stream.tell()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(about.st_mode) or about.st_size - start > _MAX_COUNTED_BYTES:
        return None
    count, last = 0, b"\n"
    for offset in range(start, about.st_size, _READ_BYTES):
        if block := os.pread(number, _READ_BYTES, offset):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")
