"""Row blocks found by trials, with the machine's products and with artificial ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import invented_products
from token_vectors import maxsim_reference, vectors_of
from whimbrel import Engine
from whimbrel.model.fallback import trials
from whimbrel.model.fallback.row_blocks import COARSE_SIZES, FINE_SIZES, RowBlocks
from whimbrel.model.fallback.trials import begin, cancelling, loading, note_unstable, unrecorded
from whimbrel.model.kernels import library as kernels
from whimbrel.model.ops import linear, tile_products
from whimbrel.model.ops.linear import Linear
from whimbrel.model.ops.maxsim import maxsim
from whimbrel.model.ops.tile_products import find_tile_products
from whimbrel.model.ops.token_vectors import TokenVectors
from whimbrel.types.arrays import Float32Array
from whimbrel.types.heads import Activation

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.bfloat16)]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_found", {})
    monkeypatch.setattr(kernels, "kernels", lambda: None)  # whose products need no trials


def make_linear(inner: int, width: int, dtype: torch.dtype, activation: Activation = "identity") -> Linear:
    torch.manual_seed(1)
    return Linear((torch.randn(width, inner) / inner**0.5).to(dtype), torch.randn(width).to(dtype), activation)


@pytest.mark.parametrize("activation", ["identity", "gelu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "width"), [(384, 1536), (1536, 384), (385, 1), (101, 3), (48, 1), (5, 1), (1, 5)])
@pytest.mark.sample(10)
def test_a_row_has_the_same_bits_in_blocks_of_products_whose_bits_differ(
    inner: int, width: int, dtype: torch.dtype, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    invented_products.install(monkeypatch)
    layer = make_linear(inner, width, dtype, activation)
    assert layer._finding is not None
    blocks = layer._finding.result()
    x = torch.randn(1100, inner).to(dtype)
    whole = layer(x)
    for num_rows in (1, 16, 32, 48, 100, 384, 496, 512, 544, 1024):
        for start in (0, 7):
            assert torch.equal(layer(x[start : start + num_rows]), whole[start : start + num_rows])
    if inner * width > 10_000:
        assert {invented_products.order(size) for size in blocks.sizes} == {0}
        assert not torch.equal(layer._product(x[:480]), layer._product(x[:512])[:480])  # without blocks they would differ


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_found_holds_for_the_products_of_this_machine(dtype: torch.dtype) -> None:
    """The bits agree also for rows unrelated to those of the trial."""
    layer = make_linear(768, 384, dtype, "gelu")
    x = torch.randn(1536, 768).to(dtype)
    assert layer._finding is not None
    found = layer._finding.result()
    assert found
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outputs = [torch.cat([layer._product(x[i : i + size]) for i in range(0, 1536 - size + 1, size)]) for size in found.sizes]
    torch.set_num_threads(threads)
    for out in outputs:
        assert torch.equal(out, outputs[0][: len(out)]) or torch.equal(out[: len(outputs[0])], outputs[0])


def test_large_products_are_tried_with_few_sizes() -> None:
    kind = linear._Kind(4096, 1025, torch.float32, False, "identity", linear.prepacked_supported(torch.device("cpu")))
    assert set(kind.find().sizes) <= set(COARSE_SIZES)


@pytest.mark.parametrize("inner", [24, 100, 384, 4096])
def test_the_order_of_a_sum_shows(inner: int) -> None:
    """Summing in halves, thirds and backwards changes most columns, even in bfloat16."""
    rows_RI, columns_CI = cancelling(1, 64, inner)
    row, columns = (x.bfloat16().float() for x in (rows_RI[0], columns_CI))
    terms = (row * columns).numpy()

    def added(terms: Float32Array) -> Float32Array:
        return np.cumsum(terms, axis=1, dtype=np.float32)[:, -1]

    orders = [added(terms), added(terms[:, ::-1])]
    orders += [np.add.reduce([added(part) for part in np.array_split(terms, count, axis=1)]) for count in (2, 3)]
    rounded = [torch.from_numpy(order).bfloat16() for order in orders]
    for i, one in enumerate(rounded):
        for other in rounded[:i]:
            assert (one != other).float().mean() > 0.25
    assert all(0.001 < order.abs().median() < 50 for order in rounded)


def unstable(x: Tensor) -> Tensor:
    """Return a product whose bits depend on the position of a row in a block."""
    return x + torch.arange(len(x))[:, None]


@pytest.fixture
def no_block_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    product = linear._Kind.product

    def spoilt(kind: linear._Kind, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        real = product(kind, weight, bias)
        return (lambda x: unstable(real(x)).to(x.dtype)) if kind.inner == 1536 else real

    monkeypatch.setattr(linear._Kind, "product", spoilt)


@pytest.mark.usefixtures("no_block_agrees")
def test_a_plan_says_where_no_size_agrees() -> None:
    with Engine(dtype="float32") as engine:
        assert engine.plan.same_bits is False
        assert engine.plan.same_bits_reason.startswith("the product of 1,536 to 384 columns in float32 has other bits")
        assert np.isfinite(engine.embed(["a", "b"])).all()


def test_a_plan_promises_the_same_bits_where_sizes_agree(engine: Engine) -> None:
    assert engine.plan.same_bits is True
    assert engine.plan.same_bits_reason == ""


@dataclass(frozen=True)
class Counted:
    """Kind of product that counts its trials."""

    name: str
    ran: list[int]

    def __hash__(self) -> int:
        return hash(self.name)

    def find(self) -> RowBlocks:
        self.ran.append(threading.get_ident())
        if self.name == "no memory" and len(self.ran) == 1:
            raise MemoryError
        return RowBlocks(() if self.name == "none" else FINE_SIZES)

    def __str__(self) -> str:
        return f"the product {self.name}"


def test_a_kind_is_tried_once_beside_the_loading() -> None:
    kind = Counted("good", [])

    def load() -> list[str]:
        with loading() as noted:
            for _ in range(3):
                begin(kind)
            note_unstable("experts")
            note_unstable("experts")
        return noted

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: load(), range(8))) == [["experts"]] * 8
    assert len(kind.ran) == 1
    assert begin(kind).result() == RowBlocks(FINE_SIZES)


def test_what_is_noted_is_of_the_model_that_is_loaded() -> None:
    with loading() as noted:
        begin(Counted("none", []))
    with loading() as other:
        begin(Counted("good", []))
    note_unstable("nobody loads")
    assert (noted, other) == (["the product none has other bits for other numbers of rows on this CPU"], [])


def test_a_trial_that_fails_is_tried_again() -> None:
    kind = Counted("no memory", [])
    with pytest.raises(MemoryError), loading():
        begin(kind)
    with loading() as noted:
        begin(kind)
    assert noted == []
    assert len(kind.ran) == 2


def test_another_default_dtype_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sets a default dtype while it loads a model."""
    found = [linear._Kind(40, 24, torch.float32, True, "gelu", False).find(), find_tile_products(32).result()]
    monkeypatch.setattr(trials, "_found", {})
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = [linear._Kind(40, 24, torch.float32, True, "gelu", False).find(), find_tile_products(32).result()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert again == found


def test_what_is_no_part_of_the_model_is_not_noted() -> None:
    with loading() as noted:
        with unrecorded():
            begin(Counted("none", []))
            note_unstable("a model that is thrown away")
        begin(Counted("good", []))
    assert noted == []
    with unrecorded():
        note_unstable("nobody loads")


def test_a_loading_that_is_given_up_waits_for_no_trial_that_has_not_begun() -> None:
    """Another loading that waits for the same trial runs it itself."""
    begun, gate = threading.Event(), threading.Event()
    slow, kind = Slow(begun, gate), Counted("good", [])
    findings: list[Any] = []
    with suppress(KeyboardInterrupt), loading():
        begin(slow)
        findings.append(begin(kind))
        assert begun.wait(30)
        threading.Timer(0.2, gate.set).start()
        raise KeyboardInterrupt
    assert kind.ran == []
    assert findings[0].result() == RowBlocks(FINE_SIZES)
    assert begin(kind).result() == RowBlocks(FINE_SIZES)
    assert len(kind.ran) == 1


@dataclass(frozen=True)
class Slow:
    """Kind of product whose trial takes until a gate opens."""

    begun: threading.Event
    gate: threading.Event

    def find(self) -> RowBlocks:
        self.begun.set()
        assert self.gate.wait(30)
        return RowBlocks(FINE_SIZES)


def test_a_loading_that_fails_leaves_no_threads() -> None:
    with suppress(KeyError), loading(2):
        begin(Counted("good", []))
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("whimbrel-trial")]
    assert trials._model.get() is None


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("width", [16, 128, 320])
def test_maxsim_has_the_same_bits_with_products_whose_bits_differ(
    width: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in any mix equal those alone, with numpy's products and with PyTorch's."""
    invented_products.install(monkeypatch)
    monkeypatch.setattr(tile_products, "has_small_kernels", lambda: small)
    monkeypatch.setattr("whimbrel.model.ops.maxsim._TILE", 600 * width)
    random = np.random.default_rng(width)

    def vectors(lengths: list[int]) -> TokenVectors:
        rows = torch.from_numpy(random.standard_normal((sum(lengths), width)).astype(np.float32))
        return vectors_of(torch.nn.functional.normalize(rows, dim=1), np.cumsum([0, *lengths]))

    queries, documents = vectors([1, 5, 16, 33, 70]), vectors([1, 15, 16, 300, 48, 900, 0, 31])
    query_P, document_P = (x.ravel() for x in np.meshgrid(np.arange(5), np.arange(8)))
    alone = np.concatenate([maxsim(queries, documents, query_P[i : i + 1], document_P[i : i + 1]) for i in range(40)])
    assert np.array_equal(maxsim(queries, documents, query_P, document_P), alone)
    found = find_tile_products(width).result()
    assert found
    assert 16 not in found.rows
    assert small or found.library != "numpy"


@pytest.mark.parametrize("agrees", [*tile_products.MULTIPLY, None])
def test_maxsim_takes_the_library_whose_products_agree(
    agrees: tile_products.Library | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no library has shapes that agree, the model is reported as unstable."""
    for library, multiply in tile_products.MULTIPLY.items():
        if library != agrees:
            monkeypatch.setitem(tile_products.MULTIPLY, library, spoil(multiply))
    monkeypatch.setattr(tile_products, "has_small_kernels", lambda: True)
    with loading() as noted:
        finding = find_tile_products(64)
    found = finding.result()
    documents = vectors_of(torch.randn(5, 64), np.array([0, 5]))
    scores = maxsim(documents, documents, np.array([0]), np.array([0]))
    if agrees is None:
        assert not found
        assert noted == ["MaxSim's product of vectors of 64 columns has other bits for other numbers of rows on this CPU"]
        assert np.isfinite(scores).all()
        return
    if agrees != "onednn" and not found:
        pytest.skip(f"the products of {agrees} agree in no shape on this machine")
    assert (found.library, noted) == (agrees, [])
    assert scores[0] == pytest.approx(maxsim_reference(documents.rows_TD, documents.rows_TD), rel=1e-5)


def spoil(multiply: Callable[..., None]) -> Callable[..., None]:
    """Return a product whose bits depend on the position of the document token."""

    def spoilt(x_TD: Tensor, query_DQ: Tensor, out_TQ: Tensor, size: int) -> None:
        multiply(x_TD, query_DQ, out_TQ, size)
        out_TQ += torch.arange(len(out_TQ))[:, None]

    return spoilt
