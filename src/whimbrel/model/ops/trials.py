"""Trials of products while a model is loaded: in which shapes a product gives a row the same bits.

A trial runs a product with numbers of its own, which show in what order they were added: terms are large and cancel one
another, so that only rounding errors are left. Another order of adding then gives another result in nearly every column, also
where the result is rounded to bfloat16.

Trials run in threads that compute alone, as lanes do, since the number of threads changes how a product is computed. They run
beside the loading, once for each kind of product in the life of a process.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_SPREAD: Final = 8.0
"""Numbers are random to so many powers of 2 up and down: sums of like numbers are exact too often, bfloat16 having few bits."""
_SCALE: Final = 2.0**17
"""Over the number of terms, it makes their rounding errors about as large as 1, where activations bend."""


FEW_TERMS: Final = 64


class Kind(Hashable, Protocol[T_co]):
    """What decides how a library computes a product, besides what is tried. As a string it names the product."""

    def find(self) -> T_co:
        """Try the product. What is found is false where no shape gives the same bits."""
        ...


def cancelling(num_rows: int, num_columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Random (num_rows, inner) and (num_columns, inner), float32, whose product is 0 but for rounding errors of about 1.

    Few terms may cancel exactly in any order: below FEW_TERMS the second half of the rows does not cancel.
    """
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(inner, generator=random)
    plus, minus, rest = order[: inner // 2], order[inner // 2 : inner // 2 * 2], order[inner // 2 * 2 :]

    def draw(count: int) -> Tensor:
        exponents = _SPREAD * (2 * torch.rand(count, inner, generator=random, dtype=torch.float32) - 1)
        return torch.randn(count, inner, generator=random, dtype=torch.float32) * exponents.exp2()

    rows_RI, columns_CI = draw(num_rows) * (_SCALE / inner), draw(num_columns)
    rows_RI[:, minus] = rows_RI[:, plus]
    rows_RI[:, rest] = 0
    columns_CI[:, minus] = -columns_CI[:, plus]
    if inner < FEW_TERMS:
        rows_RI[-(num_rows // 2) or num_rows :] = torch.randn(num_rows // 2, inner, generator=random, dtype=torch.float32)
    return rows_RI, columns_CI


@dataclass(frozen=True, slots=True)
class Finding(Generic[T]):
    """What is found for a kind of product, perhaps not yet."""

    kind: Kind[T]
    future: Future[T]

    def result(self) -> T:
        """Wait for it. Raises what the trial raised."""
        try:
            return self.future.result()
        except CancelledError:  # the loading that had begun it was given up
            with _threads(1) as threads:
                return _submit(self.kind, threads).result()


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that is being loaded."""

    threads: Executor
    findings: dict[Kind[Any], Finding[Any]] = field(default_factory=dict[Kind[Any], Finding[Any]])
    unstable: list[str] = field(default_factory=list[str])


_model: ContextVar[_Model | None] = ContextVar("whimbrel_loading", default=None)
_found: Final[dict[Kind[Any], Future[Any]]] = {}
"""What was found for each kind of product that this process has tried, or is trying."""
_lock: Final = Lock()


@contextmanager
def loading(num_threads: int = 1) -> Generator[list[str]]:
    """Load a model in this thread, while `num_threads` others try its products.

    Gives a list, which after the end says what in this model has other bits in other batches.
    """
    with _threads(num_threads) as threads:
        model = _Model(threads)
        token = _model.set(model)
        try:
            yield model.unstable
            for kind, finding in model.findings.items():
                if not finding.result():
                    model.unstable.append(f"{kind} has other bits for other numbers of rows on this CPU")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
        finally:
            _model.reset(token)


@contextmanager
def unrecorded() -> Generator[None]:
    """Load what is no part of the model in the end."""
    model = _model.get()
    token = _model.set(None if model is None else _Model(model.threads))
    try:
        yield
    finally:
        _model.reset(token)


def note_unstable(what: str) -> None:
    """Note that a part of the model that is being loaded has other bits in other batches."""
    if (model := _model.get()) is not None and what not in model.unstable:
        model.unstable.append(what)


def begin(kind: Kind[T]) -> Finding[T]:
    """What is found for a kind of product. Outside of `loading` it is there at once."""
    model = _model.get()
    if model is not None:
        return model.findings.setdefault(kind, Finding(kind, _submit(kind, model.threads)))
    known = _found.get(kind)
    if known is None or known.cancelled():
        with _threads(1) as threads:
            known = _submit(kind, threads)
    return Finding(kind, known)


def _submit(kind: Kind[T], threads: Executor) -> Future[T]:
    with _lock:
        known = _found.get(kind)
        if known is None or known.cancelled() or (known.done() and known.exception() is not None):
            known = _found[kind] = threads.submit(_find, kind)
        return known


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "whimbrel-trial", initializer=partial(torch.set_num_threads, 1))


@torch.inference_mode()
def _find(kind: Kind[T]) -> T:
    return kind.find()
