"""Trials of products while a model is loaded: in which shapes a product gives a row the same bits.

A trial runs a product with numbers of its own, which show in what order they were added: terms are large and cancel one
another, so that only rounding errors are left. Another order of adding then gives another result in nearly every column, also
where the result is rounded to bfloat16.

Trials run in threads that compute alone, as lanes do, since the number of threads changes how a product is computed. They run
beside the loading, once for each kind of product in the life of a process.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)

_SPREAD: Final = 8.0
"""Numbers are random to so many powers of 2 up and down: sums of like numbers are exact too often, bfloat16 having few bits."""
_SCALE: Final = 2.0**17
"""Over the number of terms, it makes their rounding errors about as large as 1, where activations bend."""


class Kind(Hashable, Protocol[T_co]):
    """What decides how a library computes a product, besides what is tried. As a string it names the product."""

    def find(self) -> T_co:
        """Try the product. What is found is false where no shape gives the same bits."""
        ...


def cancelling(num_rows: int, num_columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Random (num_rows, inner) and (num_columns, inner), float32, whose product is 0 but for rounding errors of about 1."""
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(inner, generator=random)
    plus, minus = order[: inner // 2], order[inner // 2 : inner // 2 * 2]

    def draw(count: int) -> Tensor:
        exponents = _SPREAD * (2 * torch.rand(count, inner, generator=random) - 1)
        return torch.randn(count, inner, generator=random) * exponents.exp2()

    rows_RI, columns_CI = draw(num_rows) * (_SCALE / inner), draw(num_columns)
    rows_RI[:, minus] = rows_RI[:, plus]
    columns_CI[:, minus] = -columns_CI[:, plus]
    return rows_RI, columns_CI


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that is being loaded."""

    threads: Executor
    found: dict[Kind[Any], Future[Any]] = field(default_factory=dict[Kind[Any], Future[Any]])
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
        finally:
            _model.reset(token)
    for kind, found in model.found.items():
        if not found.result():
            model.unstable.append(f"{kind} has other bits for other numbers of rows on this CPU")


def note_unstable(what: str) -> None:
    """Note that a part of the model that is being loaded has other bits in other batches."""
    if (model := _model.get()) is not None and what not in model.unstable:
        model.unstable.append(what)


def begin(kind: Kind[T_co]) -> Future[T_co]:
    """What is found for a kind of product. Outside of `loading` it is there at once."""
    model = _model.get()
    if model is None:
        if (known := _found.get(kind)) is not None:
            return known
        with _threads(1) as threads:
            return _submit(kind, threads)
    model.found[kind] = _submit(kind, model.threads)
    return model.found[kind]


def _submit(kind: Kind[T_co], threads: Executor) -> Future[T_co]:
    with _lock:
        known = _found.get(kind)
        if known is None or (known.done() and known.exception() is not None):
            known = _found[kind] = threads.submit(_find, kind)
        return known


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "whimbrel-trial", initializer=partial(torch.set_num_threads, 1))


@torch.inference_mode()
def _find(kind: Kind[T_co]) -> T_co:
    return kind.find()
