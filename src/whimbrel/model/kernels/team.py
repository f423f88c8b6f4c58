"""Helpers of a lone batch.

Lanes are the parallelism of a busy engine. A batch that is alone, such as a single text or the last of a request, would leave
all cores but one idle. So its products and heads are shared in C++ (`native/team.h`) with helper threads, which spin while it
runs. Each number is computed by one thread, so the bits do not depend on the helpers.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar, Final

_MOST_HELPERS: Final = 7

_started: Final[set[int]] = set()
"""Numbers of the helpers, which serve all engines of this process."""
_lock: Final = threading.Lock()
"""Lock of what belongs to this process: helpers and the number of running batches."""


def num_helpers(num_lanes: int) -> int:
    """Return the number of helpers beside a lane: at most WHIMBREL_HELPERS, if the environment says a number."""
    stated = os.environ.get("WHIMBREL_HELPERS", "")
    return max(0, min(num_lanes - 1, int(stated) if stated.isdecimal() else _MOST_HELPERS))


class Team:
    """The helpers, and the number of batches that run in this process."""

    _num_running: ClassVar = 0
    _is_open: ClassVar = False
    """True while helpers are awake."""

    def __init__(self, kernels: SimpleNamespace, num_helpers: int, init_thread: Callable[[], None]) -> None:
        """`init_thread` is called by each helper. It is kept until the process ends, as are the helpers."""
        self._kernels = kernels  # `Kernels.call`

        def help_leaders() -> None:
            init_thread()
            kernels.help()

        with _lock:
            for number in set(range(num_helpers)) - _started:
                _started.add(number)
                threading.Thread(target=help_leaders, name=f"whimbrel-helper-{number}", daemon=True).start()

    @contextmanager
    def batch(self) -> Generator[Callable[[], None]]:
        """Run a batch in this thread, with the helpers while it is alone.

        Yields a function to call between two layers: the batch may be alone by then.
        """
        leads = False

        def look_again() -> None:
            nonlocal leads
            with _lock:
                if Team._num_running == 1 and not Team._is_open:
                    if leads:
                        self._kernels.leave()  # it was dismissed
                    leads = Team._is_open = bool(self._kernels.lead())

        with _lock:
            Team._num_running += 1
            if Team._is_open:
                self._kernels.dismiss()
                Team._is_open = False
        try:
            look_again()
            yield look_again
        finally:
            with _lock:
                Team._num_running -= 1
                if leads:
                    self._kernels.leave()
                    Team._is_open = False
