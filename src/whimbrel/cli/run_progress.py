"""Progress of a bulk run on stderr: a bar on a terminal, and elsewhere a line now and then. Any thread may report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich import progress as display
from rich.console import Console
from rich.table import Column

from whimbrel.cli.console import count

if TYPE_CHECKING:
    from whimbrel.bulk.job import Totals

_BAR_COLUMNS: Final = 20
_LINE_SECONDS: Final = 10.0


class RunProgress:
    """Shows rows and tokens a second, and the time left by the rows so far."""

    def __init__(self, console: Console, totals: Totals) -> None:
        self._console = console
        self._totals = totals
        self._lock = Lock()
        self._rows = 0.0
        self._tokens = 0
        self._begin = self._started = self._told = perf_counter()
        status = display.TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (display.BarColumn(_BAR_COLUMNS), status)
        self._bars = display.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: display.TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def tell(self, text: str) -> None:
        self._say(f"  {text}", style="dim")

    def _say(self, text: str, style: str | None = None) -> None:
        with suppress(OSError):  # a log that cannot be written, such as on a full disk, ends no run
            self._console.print(text, style=style, markup=False)

    def start(self, totals: Totals) -> None:
        """Show the input, and from now on the progress."""
        before = f", of which {totals.shards_done:,} finished before" if totals.shards_done else ""
        self.tell(f"{count(totals.rows, 'row')} in {count(totals.shards, 'part')}{before}")
        self._started = self._told = perf_counter()
        self._task = self._bars.add_task("", total=totals.rows, completed=totals.rows_before, status="")
        self._bars.start()

    def advance(self, rows: float, tokens: int) -> None:
        """Count rows and tokens that were computed."""
        with self._lock:
            self._rows += rows
            self._tokens += tokens
            now = perf_counter()
            is_due = now - self._told >= _LINE_SECONDS
            if self._bars.disable and not is_due:
                return
            self._told = now if is_due else self._told
            status = self._status(now - self._started)
        if not self._bars.disable and self._task is not None:
            self._bars.update(self._task, completed=self._totals.rows_before + self._rows, status=status)
        else:
            self.tell(status)

    def _status(self, seconds: float) -> str:
        done, total, seconds = round(self._totals.rows_before + self._rows), self._totals.rows, max(seconds, 1e-3)
        rate = self._rows / seconds
        tokens = f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
        left = f", {_duration((total - done) / rate)} left" if rate and total > done else ""
        return f"{done:,} of {total:,} rows, {rate:,.0f} rows/s{tokens}{left}"

    def parts(self) -> str:
        """Return how many parts are finished, and their rows."""
        totals = self._totals
        if not totals.shards:
            return "no parts yet"
        return f"{totals.shards_done:,} of {totals.shards:,} parts, {totals.done:,} rows"

    def stop(self, text: str) -> None:
        """End the display with a line."""
        self._bars.stop()
        self._say(text)

    def finish(self, out: Path) -> None:
        """End the display with the counts of the folder, and the seconds of this run."""
        totals = self._totals
        where = f" ({out / 'errors'})" if totals.refused else ""
        self.finish_with(f"{totals.done:,} rows done, {totals.cut:,} cut, {totals.refused:,} refused{where}", out)

    def finish_with(self, counts: str, place: object) -> None:
        """End the display with counts, the seconds of this run, and the place of the result."""
        self.stop(f"{counts}, in {perf_counter() - self._begin:,.1f} s: {place}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
