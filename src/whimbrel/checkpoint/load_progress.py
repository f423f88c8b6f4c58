"""Progress of a load: its phases, and the bytes of weights that were read.

A context carries it, as the readers of weights lie far below those who show it. Loads in other threads do not mix.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
ReadCallback: TypeAlias = Callable[[int, int], None]
"""Callback for the bytes that were read, and the bytes of all files known so far."""
_STEPS: Final = 200
"""Largest number of calls for the bytes of one total."""


class _Bytes:
    """Bytes of one load. A model of several files makes the total known in several steps."""

    def __init__(self, callback: ReadCallback) -> None:
        self.total = 0
        self._callback = callback
        self._done = self._told = 0

    def add(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self.total)
        if self._done == self.total or self._done - self._told >= self.total / _STEPS:
            self._told = self._done
            self._callback(self._done, self.total)


_bytes: ContextVar[_Bytes | None] = ContextVar("whimbrel_bytes_read", default=None)
_phase: ContextVar[Callable[[str], None] | None] = ContextVar("whimbrel_load_phase", default=None)


def counting_bytes(callback: ReadCallback) -> AbstractContextManager[None]:
    """Call `callback` while weights are read within, at most 200 times for each total."""
    return _within(_bytes, _Bytes(callback))


def naming_phases(callback: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call `callback` with the name of each phase that begins within."""
    return _within(_phase, callback)


@contextmanager
def _within(variable: ContextVar[T | None], value: T) -> Generator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def expect_bytes(num_bytes: int) -> None:
    """Add the size of files, in bytes, that are about to be read."""
    if (counted := _bytes.get()) is not None:
        counted.total += num_bytes


def count_bytes(num_bytes: int) -> None:
    if (counted := _bytes.get()) is not None:
        counted.add(num_bytes)


def begin_phase(name: str) -> None:
    if (callback := _phase.get()) is not None:
        callback(name)
