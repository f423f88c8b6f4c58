"""Kernels of row operations against their formulas, in Triton's interpreter or on a GPU, and layers that use such operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints.families import CASES, write_model
from checkpoints.sentence_layout import sentence_layout
from compiled_kernels import note_launches
from hidden_states import hidden_states, least_cosine, loaded, random_ids
from interpreted_kernels import interpreted
from whimbrel import Engine
from whimbrel.model.kernels import library
from whimbrel.model.layer import Layer
from whimbrel.model.ops import attention, linear, maxsim_device, maxsim_torch, row_kernels
from whimbrel.model.ops.attention_ragged import Variant
from whimbrel.model.ops.row_kernels import find_problem
from whimbrel.model.ops.rowwise import FORMULAS, RowKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HUGE = {torch.float32: 1e17, torch.bfloat16: 1e17, torch.float16: 6e4}
"""Numbers whose squares can still be added."""


def numbers(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spoil(x: Tensor) -> Tensor:
    """Put zeros, huge numbers, infinity and NaN into the first rows."""
    x[0], x[1], x[2, ..., -1], x[3, ..., 0], x[4, ..., -1] = 0, HUGE[x.dtype], torch.inf, torch.nan, -HUGE[x.dtype]
    x[1, ..., ::2] *= -1
    return x


def apart(x: Tensor, device: str) -> Tensor:
    """Return x as columns of a wider matrix, which begins at an odd place in memory."""
    wide = torch.full((x.shape[0] * (x[0].numel() + 3) + 1,), torch.nan, dtype=x.dtype, device=device)
    rows = wide[1:].view(x.shape[0], -1)[:, : x[0].numel()]
    return rows.copy_(x.flatten(1)).view(x.shape[0], *x.shape[1:]) if x.ndim == 2 else _heads(wide, rows, x)


def _heads(wide: Tensor, rows: Tensor, x_RNH: Tensor) -> Tensor:
    rows.copy_(x_RNH.flatten(1))
    return wide[1:].as_strided(x_RNH.shape, (rows.stride(0), x_RNH.shape[2], 1), 1)


def differ(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCES[found.dtype]
    found, expected = found.cpu(), expected.to(found.dtype).cpu()
    return not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def norm_problems(kernels: RowKernels, device: str, step: int) -> Iterator[str]:
    """Yield the cases of norms in which kernels differ from the formula, or a row from itself alone."""
    cases = enumerate(product(DTYPES, (None, *DTYPES), DTYPES))
    for number, (dtype, added_dtype, out_dtype) in islice(cases, 0, None, step):
        width, (centred, keep_sum, has_bias) = (
            (1, 7, 48, 100, 312, 520)[number % 6],
            (bool(number & 2**bit) for bit in range(3)),
        )
        name = f"norm {width} {dtype} + {added_dtype} -> {out_dtype} centred={centred} sum={keep_sum} bias={has_bias}"
        x = spoil(numbers(7, width, dtype)).to(device)
        added = None if added_dtype is None else numbers(7, width, added_dtype, 1).to(device)
        weight, bias = numbers(2, width, torch.float32, 2).to(device)
        options: Any = {"eps": 1e-5, "centred": centred, "keep_sum": keep_sum, "dtype": out_dtype}
        rest: Any = weight, bias if centred and has_bias else None
        expected = FORMULAS.norm(x.float(), None if added is None else added.float(), *rest, **options)
        found = kernels.norm(x, added, *rest, **options)
        if found[0].dtype != torch.float32 or found[1].dtype != out_dtype:
            yield f"{name}: {found[0].dtype}, {found[1].dtype}"
        if any(differ(*pair) for pair in zip(found, expected, strict=True)):
            yield name
        elsewhere = kernels.norm(apart(x, device), None if added is None else apart(added, device), *rest, **options)
        alone = [
            kernels.norm(x[row : row + 1], None if added is None else added[row : row + 1], *rest, **options) for row in (5, 6)
        ]
        for which in (0, 1):
            if not torch.equal(found[which][5:], elsewhere[which][5:]):
                yield f"{name}: elsewhere in memory"
            if not torch.equal(found[which][5:], torch.cat([each[which] for each in alone])):
                yield f"{name}: alone"
        none = kernels.norm(x[:0], None if added is None else added[:0], *rest, **options)
        if none[0].shape != (0, width) or none[1].shape != (0, width):
            yield f"{name}: no rows"


HEADS = ((5, 8, 4), (3, 26, 13), (4, 64, 16), (2, 20, 0), (9, 128, 64), (1, 256, 96))
"""Heads, their width, and frequencies: of all columns, of an odd number, of some, none, of several programs, of a wide head."""


def overflow_problems(kernels: RowKernels, device: str, _: int) -> Iterator[str]:
    """Yield the norms of squares that exceed float32 unless they are NaN, or of an RMS norm 0, as by the formula."""
    x, weight = torch.full((2, 96), 1e30, device=device), torch.ones(96, device=device)
    x[:, ::2] *= -1
    for centred in (True, False):
        options: Any = {"eps": 1e-5, "centred": centred, "keep_sum": False, "dtype": torch.float32}
        found = kernels.norm(x, None, weight, None, **options)[1]
        if not (found.isnan() if centred else found == 0).all():
            yield f"overflow, centred={centred}"


def head_problems(kernels: RowKernels, device: str, step: int) -> Iterator[str]:
    """Yield the cases of norms and rotations of heads in which kernels differ, or a row differs from itself alone."""
    cases = enumerate(product(HEADS, (True, False)))
    for number, ((num_heads, width, pairs), has_norm) in islice(cases, 0, None, step):
        dtype, interleaved = DTYPES[number % 3], bool(number & 2) != bool(number & 4)
        name = f"heads {num_heads} x {width} of {pairs}, {dtype}, norm={has_norm}, interleaved={interleaved}"
        qkv = spoil(numbers(7, (num_heads + 2) * width, dtype).view(7, -1, width)).to(device)
        weight = numbers(num_heads, width, torch.float32, 1).to(device) if has_norm else None
        radians = numbers(7, max(pairs, 1), torch.float32, 2).to(device)
        angles = (radians.cos(), radians.sin(), interleaved) if pairs else None
        x = qkv[:, :num_heads]
        found = kernels.norm_and_rotate(x, weight, 1e-6, angles)
        if found.dtype != dtype or differ(found, FORMULAS.norm_and_rotate(x.float(), weight, 1e-6, angles)):
            yield name
        if not torch.equal(found[5:], kernels.norm_and_rotate(apart(x, device), weight, 1e-6, angles)[5:]):
            yield f"{name}: elsewhere in memory"
        part = slice(6, 7)
        of_row = None if angles is None else (angles[0][part], angles[1][part], interleaved)
        if not torch.equal(found[part], kernels.norm_and_rotate(x[part], weight, 1e-6, of_row)):
            yield f"{name}: alone"
        of_none = None if angles is None else (angles[0][:0], angles[1][:0], interleaved)
        if kernels.norm_and_rotate(x[:0], weight, 1e-6, of_none).shape != (0, num_heads, width):
            yield f"{name}: no rows"


def activation_problems(kernels: RowKernels, device: str, step: int) -> Iterator[str]:
    """Yield the cases of gates and activations in which kernels differ from the formulas in float32."""
    cases = product(("silu", "gelu", "gelu_tanh", "relu"), DTYPES, (1, 24, 1030))
    for activation, dtype, width in islice(cases, 0, None, step):
        name = f"{activation} {dtype} {width}"
        x = spoil(numbers(7, 2 * width, dtype) * 4).to(device)
        x[2, -1], x[4, -1] = 9, -9  # of infinity, PyTorch's differ among themselves; tanh is less exact than the kernel
        for found, expected in (
            (kernels.gate(x, activation), FORMULAS.gate(x.float(), activation)),
            (kernels.gate(apart(x, device), activation), FORMULAS.gate(x.float(), activation)),
            (kernels.activate(x.clone(), activation), FORMULAS.activate(x.float(), activation)),
            (kernels.gate(x[:0], activation), x[:0, :width]),
            (kernels.activate(x[:0], activation), x[:0]),
        ):
            if found.dtype != dtype or differ(found, expected):
                yield name


FEW = 5
"""Step through the cases that meets every dtype, form, activation and kind of width."""


def problems(device: str, step: int = 1) -> list[str]:
    from whimbrel.model.ops.rowwise_triton import KERNELS

    found = find_problem(KERNELS, torch.device(device))
    every = (norm_problems, overflow_problems, head_problems, activation_problems)
    return [*([] if found is None else [found]), *(name for each in every for name in each(KERNELS, device, step))]


@pytest.mark.parametrize("step", [FEW, pytest.param(1, marks=pytest.mark.extended)])
def test_the_kernels_by_the_interpreter(step: int) -> None:
    assert interpreted("test_rowwise", f"problems('cpu', {step})") == []


def test_no_memory_for_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails and is run again, and with it the self-test. The formulas are not chosen for ever."""
    pytest.importorskip("triton")

    def full(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(row_kernels, "find_problem", full)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            row_kernels._kernels_of(torch.device("cuda:7"))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert row_kernels.row_kernels(torch.empty(0, device="cuda")) is not FORMULAS
    assert problems("cuda") == []


def empty(width: int, size: int = 4) -> Tensor:
    return torch.empty(2, width, dtype=torch.float32 if size == 4 else torch.bfloat16)


WIDE: dict[str, Any] = {"eps": 1e-6, "dtype": torch.bfloat16}
LAUNCHES: dict[str, Any] = {
    "bge-base": ("_norm_kernel", lambda rt, x: rt.norm(x(768), x(768, 2), x(768)[0], x(768)[0], centred=True, keep_sum=False, **WIDE)),
    "MiniLM": ("_norm_kernel", lambda rt, x: rt.norm(x(384), x(384, 2), x(384)[0], x(384)[0], centred=True, keep_sum=False, **WIDE)),
    "Qwen3": ("_norm_kernel", lambda rt, x: rt.norm(x(1024), x(1024, 2), x(1024)[0], None, centred=False, keep_sum=True, **WIDE)),
    "Mistral": ("_norm_kernel", lambda rt, x: rt.norm(x(4096), x(4096, 2), x(4096)[0], None, centred=False, keep_sum=True, **WIDE)),
    "widest": ("_norm_kernel", lambda rt, x: rt.norm(x(8192), x(8192, 2), x(8192)[0], x(8192)[0], centred=True, keep_sum=True, **WIDE)),
    "heads of Qwen3": ("_heads_kernel", lambda rt, x: rt.norm_and_rotate(x(4096, 2).view(2, 32, 128)[:, :24], x(3072)[0].view(24, 128), 1e-6, (x(64), x(64), False))),
    "heads of Mistral": ("_heads_kernel", lambda rt, x: rt.norm_and_rotate(x(6144, 2).view(2, 48, 128)[:, :40], None, 1e-6, (x(64), x(64), False))),
    "interleaved": ("_heads_kernel", lambda rt, x: rt.norm_and_rotate(x(3072, 2).view(2, 48, 64)[:, :32], x(2048)[0].view(32, 64), 1e-6, (x(32), x(32), True))),
    "SwiGLU": ("_activation_kernel", lambda rt, x: rt.gate(x(6144, 2), "silu")),
    "GeGLU": ("_activation_kernel", lambda rt, x: rt.gate(x(6144, 2), "gelu_tanh")),
    "GELU": ("_activation_kernel", lambda rt, x: rt.activate(x(3072, 2), "gelu")),
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.sample(6)
def test_rows_are_read_and_written_16_bytes_at_a_time(case: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for a GPU, without one, what models launch. A thread keeps its part of a row in registers."""
    pytest.importorskip("triton")
    from whimbrel.model.ops import rowwise_triton

    name, call = LAUNCHES[case]
    launches = note_launches(monkeypatch, rowwise_triton, name)
    call(rowwise_triton, empty)
    (launch,) = launches.noted
    code = launch.compile(capability)
    assert code.accesses == {"ld 16", "st 16"}
    assert code.spills == 0
    assert code.registers <= 64


class Driver:
    """A driver of a GPU that is not there, which notes what it is told to launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 99  # Triton keeps what it has compiled for a device

    def get_current_stream(self, _: int) -> int:
        return 7

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[str, str, int, int, int]:
        return "module", "function", 32, 0, 1024

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *arguments: self.launches.append(arguments)


def test_the_second_launch_is_that_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the driver is given is the same, whether Triton looks at the arguments or not."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    from whimbrel.model.ops import rowwise_triton

    monkeypatch.setattr(rowwise_triton, "_compiled", compiled := dict[Any, Any]())
    active = Driver()
    monkeypatch.setattr(driver, "_active", active)
    for number, (_, call) in enumerate(LAUNCHES.values()):
        tensors: dict[Any, Tensor] = {}
        for _ in range(2):
            call(rowwise_triton, lambda width, size=4, of=tensors: of.setdefault((width, size), empty(width, size)))
        one, other = active.launches[-2:]
        first, second = (
            [str(x.dtype) if isinstance(x, Tensor) else type(x) if "LazyDict" in str(x) else x for x in each]
            for each in (one, other)
        )
        assert first == second
        inputs = [next(x.data_ptr() for x in each if isinstance(x, Tensor)) for each in (one, other)]
        assert inputs[0] == inputs[1]
        assert len(compiled) == number + 1
    x = torch.empty(2 * 1025)[1:].view(-1)[:2048].view(2, 1024)
    rowwise_triton.norm(x, None, x[0], None, eps=1e-5, centred=False, keep_sum=False, dtype=torch.float32)
    assert len(compiled) == len(LAUNCHES)  # this weight is not aligned
    assert len(active.launches) == 2 * len(LAUNCHES) + 1


def test_what_kernels_leave_to_the_formulas() -> None:
    """Rows that are too wide, other dtypes and activations, on any device."""
    pytest.importorskip("triton")
    from whimbrel.model.ops.rowwise_triton import KERNELS

    x, doubles = torch.randn(3, 8200), torch.randn(3, 8).double()
    options: Any = {"eps": 1e-5, "centred": True, "keep_sum": False, "dtype": torch.float16}
    for found, expected in (
        (KERNELS.norm(x, x, x[0], x[1], **options)[1], FORMULAS.norm(x, x, x[0], x[1], **options)[1]),
        (KERNELS.gate(x, "relu"), FORMULAS.gate(x, "relu")),
        (KERNELS.activate(x, "tanh"), torch.tanh(x)),
        (KERNELS.gate(doubles, "gelu"), FORMULAS.gate(doubles, "gelu")),
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_the_formulas_run_where_kernels_fail(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU machine without a C compiler, for one."""
    pytest.importorskip("triton")
    from whimbrel.model.ops import rowwise_triton

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    broken = replace(stand_in([], narrow=True), gate=fail if fault == "raises" else lambda x, _: x[:, ::2])
    monkeypatch.setattr(rowwise_triton, "KERNELS", broken)
    find = row_kernels.find_problem
    monkeypatch.setattr(row_kernels, "find_problem", lambda kernels, _: find(kernels, torch.device("cpu")))
    with caplog.at_level(logging.WARNING, "whimbrel"):
        assert row_kernels._kernels_of.__wrapped__(torch.device("cuda", 0)) is FORMULAS
    assert ("Failed to find C compiler" if fault == "raises" else "other gates of silu") in caplog.text
    assert row_kernels.row_kernels(torch.empty(0)) is FORMULAS


@pytest.mark.parametrize("shape", [(48,), (4, 12)])
def test_on_a_gpu_the_formula_is_the_fused_rms_norm(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of PyTorch in place of its five; heads with a weight each are scaled after it."""
    x, weight, fused = torch.randn(7, *shape), torch.randn(shape), list[Any]()
    options: Any = {"eps": 1e-5, "centred": False, "keep_sum": False, "dtype": torch.float16}
    expected = FORMULAS.norm(x, None, weight, None, **options)
    rms_norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *args: fused.append(args[1:]) or rms_norm(*args))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    found = FORMULAS.norm(x, None, weight, None, **options)
    assert [each[0] for each in fused] == [shape[-1:]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_kernels_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernels, "find_problem", lambda *_: pytest.fail("they were tried"))
    monkeypatch.setattr(attention, "ragged_problem", lambda *_: pytest.fail("they were tried"))
    monkeypatch.setattr(maxsim_device, "_try", lambda *_: pytest.fail("they were tried"))
    monkeypatch.setenv("WHIMBREL_KERNELS", "off")
    device, variant = torch.device("cuda", 0), Variant(torch.bfloat16, 64, *[False] * 6)
    assert row_kernels._kernels_of.__wrapped__(device) is FORMULAS
    assert not attention._has_ragged.__wrapped__(device, variant)
    assert maxsim_device._backend.__wrapped__(device) is maxsim_torch


def stand_in(calls: list[str], *, narrow: bool) -> RowKernels:
    """Return formulas as if they were kernels. `narrow`: heads have the dtype of x, as those of kernels."""

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*arguments, **options)

        return call

    def heads(x_RNH: Tensor, *rest: Any) -> Tensor:
        found = FORMULAS.norm_and_rotate(x_RNH.float() if narrow else x_RNH, *rest)
        return found.to(x_RNH.dtype) if narrow else found

    return RowKernels(*(counted(name, heads if name == "norm_and_rotate" else getattr(FORMULAS, name)) for name in OPERATIONS))


OPERATIONS = ("norm", "norm_and_rotate", "gate", "activate")


@pytest.fixture
def without_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that runs PyTorch's operators, as a GPU does."""
    monkeypatch.setattr(library, "kernels", lambda: None)
    monkeypatch.setattr(Layer, "join_parts", lambda _: None)
    monkeypatch.setattr(linear, "prepacked_supported", lambda _: False)
    loaded.cache_clear()
    yield
    loaded.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.bfloat16)], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(8)
def test_layers_with_kernels_give_the_numbers_of_layers_without(
    case: str, dtype: torch.dtype, tmp_path: Path, without_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formulas in place of the kernels, so sums, norms and roundings are the same, in another order of calls."""
    write_model(tmp_path, *CASES[case])
    expected = hidden_states(tmp_path, random_ids(), dtype)
    calls: list[str] = []
    monkeypatch.setattr(row_kernels, "_kernels_of", lambda _: stand_in(calls, narrow=False))
    for found, each in zip(hidden_states(tmp_path, random_ids(), dtype), expected, strict=True):
        np.testing.assert_array_equal(found, each)
    assert "norm" in calls


@pytest.mark.parametrize(
    ("case", "counts"),
    [("bert", (7, 0, 0, 3)), ("qwen3", (7, 3, 3, 0)), ("modernbert", (7, 3, 3, 0)), ("gemma3", (29, 7, 7, 0))],
)
def test_a_norm_and_its_sum_are_one_call(
    case: str, counts: tuple[int, ...], tmp_path: Path, without_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two norms in each layer, which add and round, and one before or after all; Gemma has two more in each."""
    write_model(tmp_path, *CASES[case])
    expected, calls = hidden_states(tmp_path, random_ids()), list[str]()
    monkeypatch.setattr(row_kernels, "_kernels_of", lambda _: stand_in(calls, narrow=True))
    for found, each in zip(hidden_states(tmp_path, random_ids()), expected, strict=True):
        np.testing.assert_allclose(found, each, atol=1e-5)
    assert tuple(map(calls.count, OPERATIONS)) == counts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["bert", "nomic", "modernbert", "qwen3", "gemma3", "mistral", "lfm2", "deepseek"])
def test_layers_on_a_gpu(case: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with kernels beside layers without."""
    write_model(tmp_path, *CASES[case])
    found = hidden_states(tmp_path, random_ids(), dtype, "cuda")
    monkeypatch.setattr(row_kernels, "_kernels_of", lambda _: FORMULAS)
    least = 0.999 if dtype == torch.float32 else least_cosine(case)
    expected = hidden_states(tmp_path, random_ids(), dtype, "cuda")
    for one, other in zip((each.mean(0) for each in found), (each.mean(0) for each in expected), strict=True):
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > least


def test_prefixes_and_pieces_of_a_long_text(tmp_path: Path, without_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name, config = CASES["qwen3"]
    write_model(tmp_path, name, config | {"max_position_embeddings": 600})
    sentence_layout(tmp_path, modes=("lasttoken",), max_seq_length=600)

    def vectors() -> Any:
        with Engine(str(tmp_path), dtype="float32", max_batch_tokens=64) as engine:
            return engine.embed(["The whimbrel is a wader.", "far away " * 60, "The"], prompt="Which birds wade?")

    expected, calls = vectors(), list[str]()
    monkeypatch.setattr(row_kernels, "_kernels_of", lambda _: stand_in(calls, narrow=False))
    np.testing.assert_array_equal(vectors(), expected)
    assert calls
