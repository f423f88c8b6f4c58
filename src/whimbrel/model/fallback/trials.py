"""Trials of products during loading: shapes in which a product gives a row the same bits.

A trial runs a product whose terms are large and cancel each other, so only rounding errors remain. Another order of summation
then gives another result in nearly every column, even in bfloat16. Trials run beside the loading, once per process for each
kind of product. Their threads have one intra-op thread, as lanes do: the number changes how a product is computed.

Shapes: R rows, C columns, I terms.
"""

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

from whimbrel.checkpoint.load_progress import begin_phase

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_SPREAD: Final = 8.0
"""Range of the random exponents of 2, up and down: sums of equal magnitudes are too often exact in bfloat16."""
_SCALE: Final = 2.0**17
"""Scale, divided by the number of terms. It makes rounding errors about as large as 1, where activations are not linear."""

FEW_TERMS: Final = 64
"""Number of terms below which a sum may cancel exactly in any order."""


class Kind(Hashable, Protocol[T_co]):
    """Properties of a product, besides the tried shape, that decide how a library computes it. str() names the product."""

    def find(self) -> T_co: ...  # false if no shapes give the same bits


def cancelling(num_rows: int, num_columns: int, inner: int) -> tuple[Tensor, Tensor]:
    """Return random (num_rows, inner) and (num_columns, inner), float32, whose product is only rounding errors of about 1."""
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
    if inner < FEW_TERMS:  # half of the rows do not cancel
        rows_RI[-(num_rows // 2) or num_rows :] = torch.randn(num_rows // 2, inner, generator=random, dtype=torch.float32)
    return rows_RI, columns_CI


@dataclass(frozen=True, slots=True)
class Finding(Generic[T]):
    """Result of the trials of a kind of product."""

    kind: Kind[T]
    future: Future[T]

    def result(self) -> T:
        try:
            return self.future.result()
        except CancelledError:  # the loading that began it has failed
            with _threads(1) as threads:
                return _submit(self.kind, threads).result()


@dataclass(frozen=True, slots=True)
class _Model:
    threads: Executor
    findings: dict[Kind[Any], Finding[Any]] = field(default_factory=dict[Kind[Any], Finding[Any]])
    unstable: list[str] = field(default_factory=list[str])


_model: ContextVar[_Model | None] = ContextVar("whimbrel_loading", default=None)
_found: Final[dict[Kind[Any], Future[Any]]] = {}
"""Results of this process by kind of product, finished or pending."""
_lock: Final = Lock()


@contextmanager
def loading(num_threads: int = 1) -> Generator[list[str]]:
    """Load a model in this thread, while `num_threads` others try its products. Yields the list that `note_unstable` fills."""
    with _threads(num_threads) as threads:
        model = _Model(threads)
        token = _model.set(model)
        try:
            yield model.unstable
            if model.findings:
                begin_phase("trying products")
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
    """Leave what the block loads out of the model's findings."""
    model = _model.get()
    token = _model.set(None if model is None else _Model(model.threads))
    try:
        yield
    finally:
        _model.reset(token)


def note_unstable(reason: str) -> None:
    """Record a reason why the bits of the model that is being loaded depend on the batch."""
    if (model := _model.get()) is not None and reason not in model.unstable:
        model.unstable.append(reason)


def begin(kind: Kind[T]) -> Finding[T]:
    """Begin the trials of a kind of product. Outside of `loading`, wait for them."""
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
            known = _found[kind] = threads.submit(torch.inference_mode()(kind.find))
        return known


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "whimbrel-trial", initializer=partial(torch.set_num_threads, 1))
