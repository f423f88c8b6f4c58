"""Output of load benchmarks: blocks on stdout, progress and notes on stderr, and files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from math import isinf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console

from whimbrel.cli.console import stderr_console
from whimbrel.errors import SetupError
from whimbrel_bench import picture, results
from whimbrel_bench.cli.files import check_writable, write_errors, write_json
from whimbrel_bench.machine import describe_machine, describe_software
from whimbrel_bench.options import OutputOptions

if TYPE_CHECKING:
    from whimbrel_bench.results import Result

INTERRUPTED: Final = 130
_SECRETS: Final = ("--api-key", "--header")


@dataclass
class Output:
    """Destinations of results. Call `check` before anything is measured."""

    files: OutputOptions
    console: Console = field(default_factory=stderr_console)
    _num_saved: int = 0

    def check(self) -> None:
        """Raise SetupError for a file that could not be written."""
        if self.files.picture is not None:
            picture.check_path(self.files.picture)
            check_writable(self.files.picture)
        if self.files.markdown is not None:
            check_writable(self.files.markdown)
        if self.files.folder is not None:
            try:
                self.files.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SetupError(f"cannot make {self.files.folder}: {error.strerror or error}.") from None
        if self.files.save:
            check_writable((self.files.folder or Path()) / (self.files.filename or "result.json"))

    def say(self, text: str) -> None:
        """Tell something on stderr."""
        self.console.print(text, markup=False)

    def show(self, result: Result, *, named: bool) -> None:
        """Print the block of a run, its notes, and write its file."""
        if named:
            typer.echo(f"\n{result.setting.server}")
        typer.echo(results.block(result))
        for line in results.remarks(result):
            self.say(f"note: {line}")
        if self.files.save:
            self._save(result)

    def _save(self, result: Result) -> None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")  # local time, as vLLM's
        path = (self.files.folder or Path()) / self._name(result, now)
        record = results.to_json(result, date=now, detailed=self.files.detailed, metadata=self.files.metadata)
        write_json(path, record)
        self.say(f"wrote {path}")

    def _name(self, result: Result, now: str) -> str:
        """Return the name of a run's file, as vLLM's benchmark forms it. Further runs of one command are numbered."""
        setting = result.setting
        self._num_saved += 1
        if self.files.filename is not None:
            path = Path(self.files.filename)
            return self.files.filename if self._num_saved == 1 else f"{path.stem}-{self._num_saved}{path.suffix}"
        rate = "inf" if isinf(setting.load.rate) else setting.load.rate
        concurrency = "" if setting.load.concurrency is None else f"-concurrency{setting.load.concurrency}"
        model = setting.model.rpartition("/")[2] or "model"
        number = "" if self._num_saved == 1 else f"-{self._num_saved}"
        label = (setting.label or setting.backend).replace("/", "-")
        return f"{label}-{rate}qps{concurrency}-{model}-{now}{number}.json"

    def finish(self, found: Sequence[Result]) -> int:
        """Write what shows all runs, and return the exit code."""
        if len(found) > 1:
            typer.echo(f"\n{results.markdown(found)}")
        if self.files.markdown is not None:
            about = "".join(f"- {name}: {value}\n" for name, value in describe_run(found).items())
            with write_errors(self.files.markdown):
                self.files.markdown.write_text(f"{results.markdown(found)}\n\n{about}", encoding="utf-8")
            self.say(f"wrote {self.files.markdown}")
        if self.files.picture is not None:
            with write_errors(self.files.picture):
                picture.draw(self.files.picture, found, describe_run(found))
            self.say(f"wrote {self.files.picture}")
        if any(result.interrupted for result in found):
            return INTERRUPTED
        return 1 if any(result.failed or not result.completed for result in found) else 0


def describe_run(found: Sequence[Result]) -> dict[str, str]:
    """Return the conditions of runs for people, by name."""
    first = found[0].setting
    about = {
        "model": first.model,
        "workload": f"{first.backend}, up to {max(each.setting.num_prompts for each in found):,} prompts per run",
        "client's machine": describe_machine(),
        "client": describe_software(),
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "command": command_line(sys.argv[1:]),
    }
    limited = sum(result.client.was_limit for result in found)
    if limited:
        about["caution"] = f"in {limited} of {len(found)} runs the client was a limit"
    return about


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as typed, without keys: the values of --api-key and --header."""
    shown: list[str] = ["whimbrel"]
    for argument in arguments:
        hidden = shown[-1] in _SECRETS
        name, sign, _ = argument.partition("=")
        shown.append("..." if hidden else f"{name}=..." if sign and name in _SECRETS else shlex.quote(argument))
    return " ".join(shown)


@contextmanager
def progress_bar(console: Console, total: int | None, words: str) -> Generator[Callable[[int, int], None]]:
    """Show a bar on stderr if that is a terminal. Yields a function of the numbers of requests that ended and that failed."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn(words, markup=False), BarColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn()]
    begin = perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, status="")

        def show(done: int, failed: int) -> None:
            rate = done / max(perf_counter() - begin, 1e-3)
            errors = f", {failed:,} failed" if failed else ""
            amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            bar.update(task, completed=done, status=f"{amount}, {rate:,.0f}/s{errors}")

        yield show
