"""The bar that shows how far a long list is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

Advance: TypeAlias = Callable[[int], None]
"""Told of inputs that are done, by any thread."""


@contextmanager
def progress_bar(show: bool | None, total: int, num_parts: int) -> Generator[Advance]:
    """On stderr; if nothing is said, where that is a terminal and there are several requests."""
    if sys.stderr is None or not (show or (show is None and num_parts > 1 and sys.stderr.isatty())):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(BarColumn(), MofNCompleteColumn(), "texts", TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
