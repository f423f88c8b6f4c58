"""Our kernels for CPUs against PyTorch's operators: every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_cases import SCORES, make_heads, make_layout, make_position_scores
from references import attend_reference
from texts import TEXTS
from whimbrel import Engine
from whimbrel.errors import SetupError
from whimbrel.model import runner
from whimbrel.model.activations import ACTIVATIONS
from whimbrel.model.cpu import cpu
from whimbrel.model.kernels import library as kernels
from whimbrel.model.kernels import structs
from whimbrel.model.kernels.library import Kernels
from whimbrel.model.kernels.products import PackedLinear, dtype_around_int8, product_kind
from whimbrel.model.kernels.team import Team, num_helpers
from whimbrel.model.layer import LayerCall
from whimbrel.model.native import compile as native
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, keeping, pieces
from whimbrel.model.ops.linear import Linear, Norm, gate
from whimbrel.model.ops.positions import norm_and_rotate
from whimbrel.model.ops.quantization import Int8Linear, Quantization
from whimbrel.model.ops.rowwise import apply_rotary
from whimbrel.types.hardware import Cpu

promise = "A row and a seq have the same bits in any batch, with or without our kernels; NaN is never swallowed."

_LEVELS = {
    "avx2": "avx2",
    "avx2_vnni": "avx2",
    "avx512": "avx512",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_bf16",
    "amx": "amx",
}
_NEEDS = {"avx2_vnni": "avx_vnni", "avx512_vnni": "avx512_vnni", "avx512_fp16": "avx512_fp16"}


def _runnable() -> list[str]:
    order = ("other", "avx2", "avx512", "avx512_bf16", "amx")
    has = torch.cpu.get_capabilities()
    return [
        name
        for name, level in _LEVELS.items()
        if order.index(level) <= order.index(cpu().level)
        and has.get(_NEEDS.get(name, "avx2"))
        and native.library(name).exists()
    ]


_IMITATED = "amx, imitated"
"""The kernels for AMX, with its instructions imitated in C++."""

SETS = _runnable() + ([_IMITATED] if "avx512_bf16" in _runnable() and shutil.which("c++") else [])
pytestmark = pytest.mark.skipif(
    kernels.kernels() is None, reason="there are no kernels here: another processor, or no compiler"
)


@pytest.fixture(scope="session")
def imitated_amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("kernels") / "kernels.amx.so"
    assert native.compile_library("c++", [*native.INSTRUCTION_SETS["amx"], "-DWHIMBREL_IMITATED_TILES"], to) is None
    return to


@pytest.fixture(params=SETS or ["none"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    imitated = request.param == _IMITATED
    found = Kernels(request.getfixturevalue("imitated_amx") if imitated else native.library(request.param))
    for module in (kernels, attention):
        monkeypatch.setattr(module, "kernels", lambda: found)
    return found


def _kinds(own: Kernels) -> Iterator[tuple[kernels.Kind, float]]:
    yield from (
        (kind, tolerance)
        for kind, tolerance in (("float32", 2e-6), ("bfloat16", 8e-3), ("float16", 6e-3), ("int8", 2e-2))
        if kind in own.kinds
    )


def _near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max())


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(1, 384, 384), (13, 96, 200), (300, 64, 33), (7, 7, 3), (25, 401, 31), (25, 512, 31), (0, 8, 8)],
)
def test_linear(own: Kernels, rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 2 * inner)[:, :inner], torch.randn(columns, inner) / inner**0.5, torch.randn(columns)
    for kind, tolerance in _kinds(own):
        for activation in kernels.FUSED:
            for each in (bias, None):
                expected = ACTIVATIONS[activation](F.linear(x, weight, each))
                for dtype in (torch.float32, torch.bfloat16):
                    found = PackedLinear(own, kind, weight, each, activation)(x.to(dtype), dtype)
                    assert found.dtype == dtype
                    assert found.shape == expected.shape
                    if rows:
                        assert _near(found, expected, tolerance if dtype == torch.float32 else max(tolerance, 1e-2)), (
                            kind,
                            activation,
                        )


def test_a_row_has_the_same_bits_in_any_number_of_rows(own: Kernels) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(500, 200), torch.randn(130, 200), torch.randn(130)
    for kind, _ in _kinds(own):
        linear = PackedLinear(own, kind, weight, bias, "gelu")
        whole = linear(x, torch.float32)
        for first, last in ((0, 1), (3, 16), (100, 341), (239, 242), (499, 500)):
            assert torch.equal(linear(x[first:last], torch.float32), whole[first:last])


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_float16_takes_numbers_of_any_size(own: Kernels, size: float) -> None:
    """Each row and column has a power of 2 of its own, and an input far larger than the others costs little."""
    if "float16" not in own.kinds:
        pytest.skip("this instruction set multiplies no float16")
    torch.manual_seed(2)
    x, weight = torch.randn(40, 700), torch.randn(70, 700) / 30
    x[::2] *= size
    weight[::3] /= size
    x[1, 5], x[3], weight[4], x[8, 699] = 3e3, 0.0, 0.0, 0.0
    found = PackedLinear(own, "float16", weight, None, "identity")(x, torch.float32)
    expected = (x.double() @ weight.double().T).float()
    scale = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert ((found - expected).abs() <= 1e-3 * scale).all()
    assert not found[3].any()
    assert not found[:, 4].any()


def test_the_largest_sums_of_float16_are_finite(own: Kernels) -> None:
    """Rows and columns of numbers just below a power of 2, of many equal ones; and scales whose product alone is in range."""
    if "float16" not in own.kinds:
        pytest.skip("this instruction set multiplies no float16")
    below = 2 - 2**-20  # rounded up in float16
    found = PackedLinear(own, "float16", torch.full((3, 256), below), None, "identity")(
        torch.full((2, 256), below), torch.float32
    )
    assert _near(found, torch.full((2, 3), 1024.0), 8e-3)
    v = torch.full((300, 1, 16), 4 - 2**-6).bfloat16()
    out = attend(torch.zeros_like(v), torch.zeros_like(v), v, make_layout([300]), ScoreOptions(0.2))
    assert _near(out, v.flatten(1), 8e-3)
    far = PackedLinear(own, "float16", torch.full((3, 1), 2.0**-60), None, "identity")(
        torch.full((1, 1), 1.5 * 2.0**126), torch.float32
    )
    assert torch.equal(far, torch.full((1, 3), 1.5 * 2.0**66))


def test_keys_whose_values_are_0_take_no_precision_from_others(own: Kernels) -> None:
    """A first key without a value, to which almost all attention goes, as in many trained models."""
    if "float16" not in own.kinds:
        pytest.skip("this instruction set multiplies no float16")
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 40, 1, 16).unbind()
    q[..., 0], k[..., 0], k[0, 0, 0], v[0] = 4.0, 0.0, 5.0, 0.0  # e^20
    layout, scores = make_layout([40]), ScoreOptions(1.0)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    assert _near(attend(q, k, v, layout, scores), attend_reference(q.float(), k.float(), v.float(), layout, scores), 1e-2)


@pytest.mark.parametrize(("queries", "values"), [(1.0, 1e-6), (1.0, 1e-16), (30.0, 1.0), (1e-3, 3e4), (1e9, 1e20), (0.0, 1.0)])
def test_attention_over_numbers_of_any_size(own: Kernels, queries: float, values: float) -> None:
    """Also values of which one in eight is far larger than the others, and one in eight is 0."""
    layout = make_layout([300, 7])
    torch.manual_seed(8)
    q, k, v = torch.randn(307, 6, 32).split((2, 2, 2), dim=1)
    k = k * torch.logspace(-3, 0, 307)[:, None, None]
    v = v * values
    v[::8] *= 1e3
    v[1::8] = 0.0
    q, k, v = (q * queries).bfloat16(), k.bfloat16(), v.bfloat16()
    scores = ScoreOptions(0.2, causal=True)
    out, expected = attend(q, k, v, layout, scores).float(), attend_reference(q, k, v, layout, scores).float()
    assert out.isfinite().all()
    off = (out.double() - expected).norm(dim=1) > 2e-2 * expected.double().norm(dim=1)
    assert off.double().mean() < 0.01 or queries > 100  # where weights are 0 or 1, and near ties fall either way


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_alone(own: Kernels, bad: float) -> None:
    x, weight = torch.randn(9, 40), torch.rand(20, 40) + 0.1
    x[4, 7] = bad
    for kind, _ in _kinds(own):
        for activation in ("identity", "gelu", "silu"):
            out = PackedLinear(own, kind, weight, None, activation)(x, torch.float32)
            assert not (out[4].isfinite() & (out[4] != 0)).any() or kind != "int8"
            assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
            if bad != bad or kind == "int8":
                assert out[4].isnan().all()
    relu = PackedLinear(own, "float32", weight, None, "relu")(x, torch.float32)
    assert bad != bad or torch.equal(relu.isfinite(), F.relu(F.linear(x, weight)).isfinite())
    assert bad == bad or relu[4].isnan().all()


def test_int8_has_the_bits_of_pytorchs_integers(own: Kernels) -> None:
    """The way without our kernels rounds as they do, and sums of integers are exact."""
    if "int8" not in own.kinds:
        pytest.skip("this instruction set has no fast int8")
    torch.manual_seed(2)
    for rows, inner, columns in ((1, 384, 96), (40, 50, 70), (5, 7, 3)):
        x, weight, bias = torch.randn(rows, inner) * 3, torch.randn(columns, inner), torch.randn(columns)
        smooth = torch.rand(inner) + 0.5
        found = PackedLinear(own, "int8", weight, bias, "identity", smooth_I=smooth)(x, torch.float32)
        assert torch.equal(found, Int8Linear(weight, bias, "identity", smooth)(x, torch.float32))
    zeros = PackedLinear(own, "int8", torch.zeros(3, 8), None, "identity")(torch.zeros(2, 8), torch.float32)
    assert torch.equal(zeros, torch.zeros(2, 3))


@pytest.mark.parametrize("what", ["all", "causal", "window", "causal window"])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (4, 2, 64), (3, 1, 20), (2, 2, 128), (2, 2, 136)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(own: Kernels, dtype: torch.dtype, heads: int, key_heads: int, width: int, what: str) -> None:
    lengths = [1, 5, 5, 17, 40, 33, 31, 2]
    layout = make_layout(lengths)
    torch.manual_seed(3)
    q, k, v = (
        torch.randn(layout.num_tokens + 9, heads + 2 * key_heads, width).to(dtype).split((heads, key_heads, key_heads), dim=1)
    )
    scores = ScoreOptions(width**-0.5, **SCORES[what])
    out = attend(q, k, v, layout, scores)
    assert _near(out, attend_reference(q, k, v, layout, scores), 2e-6 if dtype == torch.float32 else 1e-2)
    assert not out[layout.num_tokens :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["all", "causal", "causal window"])
def test_long_seqs_and_their_pieces(own: Kernels, what: str, dtype: torch.dtype) -> None:
    """Seqs of several blocks of keys; alone, in a batch, and in pieces after kept keys, with the same bits."""
    lengths, width = [1100, 513, 512, 257], 32
    layout = make_layout(lengths)
    torch.manual_seed(4)
    q, k, v = torch.randn(layout.num_tokens, 8, width).to(dtype).split((4, 2, 2), dim=1)
    options: dict[str, Any] = {"causal": "causal" in what, "window": 300 if "window" in what else None}
    scores = ScoreOptions(0.2, **options)
    whole = attend(q, k, v, layout, scores)
    hidden = torch.ones(1100, 1100, dtype=torch.bool)
    if scores.causal:
        hidden = hidden.tril()
    if scores.window is not None:
        hidden = hidden.triu(-300)
    expected = F.scaled_dot_product_attention(
        *(x[:1100].transpose(0, 1).double() for x in (q, k, v)), attn_mask=hidden, scale=0.2, enable_gqa=True
    )
    assert _near(whole[:1100], expected.transpose(0, 1).flatten(1), 2e-6 if dtype == torch.float32 else 1e-2)
    alone = attend(q[1100:1613], k[1100:1613], v[1100:1613], make_layout([513]), scores)
    assert torch.equal(alone, whole[1100:1613])
    if not scores.causal:
        return
    bounds = [(0, 7), (7, 519), (519, 520), (520, 1100)]
    parts = []
    for (first, last), source in zip(bounds, pieces(bounds), strict=True):
        piece = replace(make_layout([last - first]), sources={0: source})
        parts.append(attend(q[first:last], k[first:last], v[first:last], piece, scores))
    assert torch.equal(torch.cat(parts), whole[:1100])


def test_seqs_after_a_prefix(own: Kernels) -> None:
    """A prefix is computed once, and two seqs attend to it and to themselves, with the bits of whole seqs."""
    torch.manual_seed(5)
    q, k, v = torch.randn(30, 6, 16).split((2, 2, 2), dim=1)  # prefix of 10, then two seqs of 10
    scores, kept = ScoreOptions(0.3, causal=True), KeptKeys()
    layout = make_layout([10, 10, 10])
    layout = replace(
        layout,
        equal_length_groups=[(0, 1, 10, 10), (10, 2, 10, 10)],
        sources={0: keeping([kept]), 10: AfterPrefixes([kept, kept])},
    )
    out = attend(q, k, v, layout, scores)
    for start in (10, 20):
        rows = torch.cat([torch.arange(10), torch.arange(start, start + 10)])
        assert torch.equal(attend(q[rows], k[rows], v[rows], make_layout([20]), scores)[10:], out[start : start + 10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_a_window_hides_from_all_keys(own: Kernels, dtype: torch.dtype) -> None:
    """Far expansion tokens of a late-interaction query, to which nothing attends: 0, as from SDPA."""
    layout = make_layout([100, 40], num_keys=[10, 40])
    q, k, v = torch.randn(140, 6, 16).to(dtype).split((2, 2, 2), dim=1)
    for causal in (False, True):
        scores = ScoreOptions(0.3, causal=causal, window=20)
        out, expected = attend(q, k, v, layout, scores), attend_reference(q, k, v, layout, scores)
        assert expected[30:100].isnan().all()
        assert _near(out, expected.nan_to_num(), 2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan")])
def test_scores_are_scaled_by_a_positive_number(scale: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        ScoreOptions(scale)


def test_nan_in_one_seq_stays_there(own: Kernels) -> None:
    layout = make_layout([20, 20])
    q, k, v = torch.randn(40, 6, 16).split((2, 2, 2), dim=1)
    k[25, 0, 3] = torch.nan
    out = attend(q, k, v, layout, ScoreOptions(0.3))
    assert out[:20].isfinite().all()
    assert out[20:, :16].isnan().all()


@pytest.mark.parametrize("width", [1, 7, 16, 384, 385])
def test_norms_and_gates(own: Kernels, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    x, weight, bias = torch.randn(11, width) * 3 + 1, torch.randn(width), torch.randn(width)
    for added in (None, torch.randn(11, width), torch.randn(11, width).bfloat16()):
        total = x if added is None else x + added
        for each in (bias, None):
            assert torch.allclose(
                Norm(weight, each, 1e-5, centred=True)(x, added),
                F.layer_norm(total, (width,), weight, each, 1e-5),
                atol=2e-5,
                rtol=1e-5,
            )
        expected = F.rms_norm(total, (width,), weight, 1e-6)
        assert torch.allclose(Norm(weight, None, 1e-6, centred=False)(x, added), expected, atol=1e-5, rtol=1e-5)
    both = torch.randn(11, 2 * width)
    for activation in kernels.FUSED:
        expected = ACTIVATIONS[activation](both[:, :width]) * both[:, width:]
        assert torch.allclose(gate(both, activation), expected, atol=2e-6)
    wide = torch.randn(5, width + 3)
    spoiled = torch.full((1, width), torch.nan)
    for norm in (Norm(weight, bias, 1e-5, centred=True), Norm(weight, None, 1e-5, centred=False)):
        whole = norm(wide[:, :width], wide[:, 3:])  # one row of a slice is contiguous, several are not
        assert torch.equal(norm(wide[:1, :width], wide[:1, 3:]), whole[:1])
        assert norm(spoiled).isnan().all()


def test_quantization_needs_texts_and_survives_without(own: Kernels) -> None:
    """Inputs with outliers: smoothing keeps the others' precision. A layer that no text ran is rounded without it."""
    if "int8" not in own.kinds:
        pytest.skip("this instruction set has no fast int8")
    torch.manual_seed(7)
    weight, x = torch.randn(48, 64), torch.randn(200, 64)
    x[:, 5] *= 60
    weight[:, 5] /= 60
    errors: list[float] = []
    for rows in (x[:100], x[:0]):
        quantization = Quantization()
        linear = Linear(weight, None, quantization=quantization)
        exact = F.linear(x[100:], weight)
        assert _near(linear(rows), F.linear(rows, weight), 1e-6) if len(rows) else True
        quantization.finish()
        errors.append((linear(x[100:]) - exact).abs().mean().item())
    assert errors[0] < errors[1] / 3


def test_the_instruction_set_follows_from_the_processor() -> None:
    sets = {
        ("other", False): [], ("avx2", False): ["avx2"], ("avx2", True): ["avx2_vnni", "avx2"],
        ("avx512", False): ["avx512", "avx2"], ("avx512", True): ["avx512_vnni", "avx512", "avx2"],
        ("avx512_bf16", True): ["avx512_bf16", "avx512_vnni", "avx512", "avx2"],
        ("amx", False): ["amx", "avx512_bf16", "avx512", "avx2"],
    }  # fmt: skip
    for (level, vnni), names in sets.items():
        assert list(kernels.instruction_sets(Cpu("any", level, vnni=vnni))) == names  # pyright: ignore[reportArgumentType]
    assert kernels.instruction_sets(Cpu("Xeon", "avx512_bf16", "slow", float16=True))[:2] == ("avx512_fp16", "avx512_bf16")
    assert kernels.instruction_sets(Cpu("Xeon", "amx", "native", float16=True))[:2] == ("amx", "avx512_fp16")
    assert kernels.fast_bfloat16(Cpu("EPYC", "avx512_bf16", "native"))
    assert not kernels.fast_bfloat16(Cpu("Xeon", "avx512_bf16", "slow"))
    assert not kernels.fast_bfloat16(Cpu("Xeon", "amx", "native"))


def test_they_can_be_turned_off_and_are_not_used_when_stale(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WHIMBREL_KERNELS", "off")
    assert kernels.kernels.__wrapped__() is None
    for stated in ("avx2", " AVX2 "):
        monkeypatch.setenv("WHIMBREL_KERNELS", stated)
        assert kernels.kernels.__wrapped__().name == "avx2"
    monkeypatch.setenv("WHIMBREL_KERNELS", "neon")
    with pytest.raises(SetupError, match="WHIMBREL_KERNELS is 'neon', which this processor does not have") as raised:
        kernels.kernels.__wrapped__()
    assert "avx2 or off" in (raised.value.hint or "")
    monkeypatch.delenv("WHIMBREL_KERNELS")
    assert kernels.kernels.__wrapped__() is not None
    monkeypatch.setattr(kernels, "fingerprint", lambda: 1)
    assert kernels.kernels.__wrapped__() is None
    assert "compiled from other sources" in caplog.text


@pytest.mark.parametrize("fields", [("bias", "weight", "eps", "centred"), ("weight", "bias", "eps", "centred", "more")])
def test_structures_that_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fields: tuple[str, ...]
) -> None:
    """Members in another order, and a structure of another size: one line says which."""

    class Norm(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_void_p) for name in fields)

    monkeypatch.setattr(structs, "STRUCTS", tuple(Norm if each is structs.Norm else each for each in structs.STRUCTS))
    assert kernels.kernels.__wrapped__() is None
    assert caplog.messages == [
        "The kernels have other structures than Python: Norm of 32 bytes: weight, pointer at 0; "
        f"not Norm of {8 * len(fields)} bytes: {fields[0]}, pointer at 0 "
        "(build Whimbrel anew: pip install -e .), and PyTorch's are used."
    ]


def test_the_next_library_serves_where_the_build_lacks_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An assembler that knows no float16, say: bfloat16 is then multiplied in what the next library has."""
    names = kernels.instruction_sets(cpu())
    monkeypatch.setattr(kernels, "cpu", lambda: replace(cpu(), level="avx512_bf16", bfloat16="slow", float16=True))
    monkeypatch.setattr(kernels, "instruction_sets", lambda _: ("avx512_fp16", *names[-1:]))
    real = native.library
    monkeypatch.setattr(kernels, "library", lambda name: tmp_path / "none.so" if name == "avx512_fp16" else real(name))
    choose = kernels.kernels.__wrapped__
    found = choose()
    assert found is not None
    assert found.name == names[-1]
    monkeypatch.setattr(kernels, "kernels", lambda: found)
    assert product_kind(torch.bfloat16) == "float32"
    assert dtype_around_int8() == torch.float32
    monkeypatch.setattr(kernels, "library", lambda _: tmp_path / "none.so")
    assert choose() is None


def test_a_processor_without_avx2_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only where there are libraries: without, the build has said why."""
    monkeypatch.setattr(kernels, "cpu", lambda: Cpu("Atom", "other", "none"))
    assert kernels.kernels.__wrapped__() is None
    assert caplog.messages == ["The kernels need AVX2 and FMA, which this processor does not have, and PyTorch's are used."]
    monkeypatch.setattr(kernels, "library", lambda _: Path("/none.so"))
    caplog.clear()
    assert kernels.kernels.__wrapped__() is None
    assert not caplog.messages


def test_a_library_that_cannot_be_loaded_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "kernels.so").write_text("for another machine")
    monkeypatch.setattr(kernels, "library", lambda _: tmp_path / "kernels.so")
    assert kernels.kernels.__wrapped__() is None
    assert "cannot be loaded" in caplog.text


def test_a_build_without_a_compiler_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.compile_kernels() == "no C++ compiler was found"
    monkeypatch.setattr(native, "library", lambda name: tmp_path / f"kernels.{name}.so")
    monkeypatch.setattr(native, "fingerprint", lambda: 2)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "No such file" in (native.compile_kernels() or "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert native.compile_kernels() == "there are none for linux on aarch64"
    assert not any(tmp_path.iterdir())


def test_a_build_with_an_old_assembler_lacks_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others are made, and told from libraries of other sources."""
    compiler = tmp_path / "compiler"
    made = native.library("avx2")
    compiler.write_text(f"""#!/bin/sh
case "$*" in *backend_avx512_fp16*) echo "error: no such instruction" >&2; exit 1;; esac
for to; do :; done
cp {made} "$to"
""")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "library", lambda name: tmp_path / f"kernels.{name}.so")
    monkeypatch.setenv("CXX", str(compiler))
    assert "failed: error: no such instruction (for avx512_fp16)" in (native.compile_kernels() or "")
    sources = {name: native.sources_of(native.library(name)) for name in native.INSTRUCTION_SETS}
    assert sources == {name: None if name == "avx512_fp16" else native.fingerprint() for name in sources}


def test_a_build_in_a_tree_that_cannot_be_written_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler, whose command has a space, fails; what it should have replaced stays."""
    compiler = tmp_path / "a compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    for name in native.INSTRUCTION_SETS:
        (tmp_path / f"kernels.{name}.so").mkdir()  # no file that could be removed, whoever runs this
    monkeypatch.setattr(native, "library", lambda name: tmp_path / f"kernels.{name}.so")
    monkeypatch.setattr(native, "fingerprint", lambda: 2)
    monkeypatch.setenv("CXX", f"'{compiler}' -m64")
    assert "Is a directory" in (native.compile_kernels() or "")


def test_memory_that_runs_out_is_an_error(own: Kernels) -> None:
    seqs = np.array([[0, 1, 0, 2**46, 0]], np.int64)  # as many keys as no machine has room for
    x = torch.zeros(1, 1, 16)
    with pytest.raises(MemoryError):
        own.attend(x, x, x, torch.empty_like(x), seqs, scale=1.0, causal=False, window=None)


def test_a_layer_whose_memory_runs_out_is_an_error(own: Kernels) -> None:
    """Its first products, or its second ones, need more memory than any machine has."""
    linear = PackedLinear(own, "float32", torch.randn(16, 16), None, "identity")
    qkv = PackedLinear(own, "float32", torch.randn(48, 16), None, "identity")
    layer = structs.Layer(
        qkv=qkv.product, num_heads=1, num_key_heads=1, head_width=16, score_scale=0.25, window=-1,
        out=linear.product, up=linear.product, gate=-1, down=linear.product,
    )  # fmt: skip
    layout, x = make_layout([3, 2]), torch.randn(5, 16)
    call = LayerCall(own, [layer, layer], None)
    expected = call(x, layout, [None])
    for path, member in (((), "num_heads"), (("up", "weight"), "columns")):
        broken = LayerCall(own, [layer, layer], None)
        setattr(reduce(getattr, path, broken.layers[1]), member, 2**44)
        with pytest.raises(MemoryError, match="a layer needs more memory than there is"):
            broken(x, layout, [None])
        assert torch.equal(call(x, layout, [None]), expected)


def test_memory_of_former_calls_reaches_no_result(own: Kernels) -> None:
    """Products and heads whose sizes fill no vector, unit or tile, before and after larger ones of NaN in the same memory."""
    torch.manual_seed(10)
    spoiled, heads = torch.full((300, 700), torch.nan), torch.full((300, 3, 48), torch.nan)
    calls: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind, _ in _kinds(own):
            spoil = partial(PackedLinear(own, kind, torch.randn(70, 700), None, "identity"), spoiled, torch.float32)
            for inner in (1, 7, 33, 70):
                linear = PackedLinear(own, kind, torch.randn(9, inner), torch.randn(9), "identity")
                calls.append((spoil, partial(linear, torch.randn(5, inner).to(dtype), torch.float32)))
        spoil = partial(attend, *heads.to(dtype).split(1, dim=1), make_layout([300]), ScoreOptions(1.0))
        layout = make_layout([48, 19, 2, 1], num_keys=[48, 18, 1, 1])
        q_RNH, k_RKH, v_RKH = torch.randn(70, 3, 21).to(dtype).split(1, dim=1)
        options = (ScoreOptions(0.2), ScoreOptions(0.2, causal=True), ScoreOptions(0.2, window=3))
        calls += [(spoil, partial(attend, q_RNH, k_RKH, v_RKH, layout, scores)) for scores in options]
    before = [call() for _, call in calls]
    for (spoil, call), expected in zip(calls, before, strict=True):
        assert spoil().isnan().all()
        assert expected.isfinite().all()
        assert torch.equal(call(), expected)


def test_a_team_computes_the_same_bits(own: Kernels) -> None:
    """Two threads take turns in leading a helper, and dismiss it at random times: no number is lost or computed twice."""
    threading.Thread(target=own.call.help, daemon=True).start()
    torch.manual_seed(8)
    linear = PackedLinear(own, "float32", torch.randn(200, 96), torch.randn(200), "gelu")
    q_RNH, k_RKH, v_RKH = torch.randn(40, 12, 32).bfloat16().split((6, 3, 3), dim=1)
    seqs_B5 = np.array([[0, 27, 0, 27, 0], [27, 13, 27, 13, 0]])

    def heads() -> Tensor:
        out_RNH = torch.empty(40, 6, 32, dtype=torch.bfloat16)
        own.attend(q_RNH, k_RKH, v_RKH, out_RNH, seqs_B5, scale=0.2, causal=True, window=None)
        return out_RNH

    calls = [*(partial(linear, torch.randn(rows, 96), torch.float32) for rows in (1, 7, 16, 33)), heads]
    expected = [call() for call in calls]
    wrong: list[int] = []
    led: list[bool] = []

    def run(seed: int) -> None:
        turns = random.Random(seed)
        for turn in range(300):
            leads = bool(own.call.lead())
            led.append(leads)
            for call, result in zip(calls, expected, strict=True):
                if turns.random() < 0.05:
                    own.call.dismiss()
                if not torch.equal(call(), result):
                    wrong.append(turn)
            if leads:
                own.call.leave()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert any(led)


def test_the_environment_limits_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    for stated, found in (("", 3), ("many", 3), ("0", 0), ("2", 2), ("99", 3)):
        monkeypatch.setenv("WHIMBREL_HELPERS", stated)
        assert num_helpers(4) == found
    assert num_helpers(1) == 0


def test_a_batch_is_shared_while_it_is_alone() -> None:
    calls: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name) or name == "lead"

    def new() -> list[str]:
        found = calls.copy()
        calls.clear()
        return found

    team, other = (Team(Recorder(), 0, lambda: None) for _ in range(2))  # pyright: ignore[reportArgumentType]
    with team.batch() as between:
        between()
        assert new() == ["lead"]
        with other.batch() as other_between:  # of another engine, or between two layers of the first
            between()
            other_between()
            assert new() == ["dismiss"]
        assert new() == []
        between()
        assert new() == ["leave", "lead"]
    assert new() == ["leave"]
    first = team.batch()
    first.__enter__()
    with team.batch() as between:  # of another lane, which goes on when the first has ended
        assert new() == ["lead", "dismiss"]
        first.__exit__(None, None, None)
        assert new() == ["leave"]
        between()
        assert new() == ["lead"]
    assert new() == ["leave"]
    with pytest.raises(MemoryError), team.batch():
        raise MemoryError
    assert new() == ["lead", "leave"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "pairs"), [(32, 16), (64, 32), (80, 20), (33, 0), (128, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_rotated(own: Kernels, width: int, pairs: int, dtype: torch.dtype, *, normed: bool) -> None:
    torch.manual_seed(width)
    qkv_RNH = torch.randn(7, 5, width).to(dtype)
    x_RNH = qkv_RNH[:, :3]
    weight_NH = torch.rand(3, width) + 0.5 if normed else None
    radians_RF = torch.rand(7, pairs) * 9
    angles = (radians_RF.cos(), radians_RF.sin(), False) if pairs else None
    found = norm_and_rotate(x_RNH, weight_NH, 1e-6, angles)
    expected = x_RNH.float() if weight_NH is None else Norm(weight_NH, None, 1e-6, centred=False)(x_RNH.float())
    expected = expected if angles is None else apply_rotary(expected, *angles[:2], interleaved=False)
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-5)
    alone = norm_and_rotate(x_RNH[4:5], weight_NH, 1e-6, angles and (angles[0][4:5], angles[1][4:5], False))
    assert torch.equal(alone, found[4:5])
    x_RNH[2, 1, width - 1] = torch.nan
    assert norm_and_rotate(x_RNH, weight_NH, 1e-6, angles)[2, 1].isnan().sum() == (
        width if normed else 2 if 2 * pairs == width else 1
    )


@pytest.mark.parametrize("width", [1, 16, 37, 384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_embedding_tables(own: Kernels, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    words, positions, types = torch.randn(50, width).to(dtype), torch.randn(9, width), torch.randn(2, width)
    ids, at, kinds = (torch.randint(0, len(table), (6,), dtype=torch.int32) for table in (words, positions, types))
    assert torch.equal(own.embed(words, ids), words[ids].float())
    assert torch.equal(own.embed(words, ids, None, (types, kinds)), words[ids].float() + types[kinds])
    assert torch.equal(
        own.embed(words, ids, (positions, at), (types, kinds)), words[ids].float() + positions[at] + types[kinds]
    )
    assert own.embed(words, ids[:0]).shape == (0, width)
    for wrong in (-1, 50):
        ids[3] = wrong
        with pytest.raises(IndexError, match="not in its embedding table"):
            own.embed(words, ids)


@pytest.mark.parametrize("width", [1, 16, 37, 384])
def test_means_and_normed_rows(own: Kernels, width: int) -> None:
    x_TD = torch.randn(40, width)
    starts, ends = torch.tensor([0, 3, 10, 39], dtype=torch.int32), torch.tensor([3, 10, 38, 40], dtype=torch.int32)
    means_PD = own.means(x_TD, starts, ends)
    for row, first, last in zip(means_PD, starts.tolist(), ends.tolist(), strict=True):
        assert torch.allclose(row, x_TD[first:last].mean(0), atol=1e-6)
    assert own.means(x_TD, starts[:1], starts[:1]).isnan().all()
    normed_PD = own.normalize(means_PD, 1e-12)
    assert torch.allclose(normed_PD, F.normalize(means_PD), atol=1e-6)
    assert torch.equal(own.normalize(means_PD[2:3], 1e-12), normed_PD[2:3])
    odd_PD = torch.zeros(4, width)
    odd_PD[1], odd_PD[2, 0], odd_PD[3, 0] = 3e38, torch.nan, torch.inf
    found_PD = own.normalize(odd_PD, 1e-12)
    assert not found_PD[0].any()
    assert found_PD[1:].isnan().all()


def test_nan_in_a_value_spoils_its_own_column_alone(own: Kernels) -> None:
    q_RNH = torch.zeros(4, 1, 32, dtype=torch.bfloat16)
    v_RNH, out_RNH = torch.ones_like(q_RNH), torch.empty_like(q_RNH)
    v_RNH[2, 0, 5] = torch.nan
    own.attend(q_RNH, q_RNH, v_RNH, out_RNH, np.array([[0, 4, 0, 4, 0]]), scale=1.0, causal=False, window=None)
    assert out_RNH[:, 0, 5].isnan().all()
    out_RNH[:, 0, 5] = 1
    assert (out_RNH == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 64])
def test_scores_of_positions(own: Kernels, width: int, dtype: torch.dtype) -> None:
    """They are those of the formula, and have the same bits alone, whatever other seqs have left in memory."""
    lengths = [550, 513, 290, 130, 128, 97, 33, 16, 5, 1]
    layout, scores = make_layout(lengths), make_position_scores(width)
    qkv = make_heads(layout.num_tokens, width, dtype)
    out = attend(*qkv, layout, scores)
    expected = attend_reference(*(part.float() for part in qkv), layout, scores)
    assert _near(out, expected, 3e-6 if dtype == torch.float32 else 1e-2)
    bounds = list(pairwise(layout.cu_seqlens.tolist()))
    spoil = make_heads(300, width, dtype)
    spoil[1].fill_(torch.nan)
    for start, end in reversed(bounds):
        attend(*spoil, make_layout([300]), scores)
        alone = attend(*(part[start:end].clone() for part in qkv), make_layout([end - start]), scores)
        assert torch.equal(alone, out[start:end])


@pytest.mark.skipif(_IMITATED not in SETS, reason="needs a compiler, and AVX-512 with bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.extended)])
def test_models_on_imitated_tiles(dtype: str, imitated_amx: Path, engine32: Engine) -> None:
    """The whole path of a processor with AMX, except for its instructions."""
    texts = TEXTS[::50]
    kernels.kernels.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "instruction_sets", lambda _: ("amx",))
            patch.setattr(kernels, "library", lambda _: imitated_amx)
            with Engine(dtype=dtype) as engine:
                assert kernels.kernels.cache_info().currsize
                vectors = engine.embed(texts)
                assert all(np.array_equal(engine.embed(texts[i]), vectors[i]) for i in range(3))
    finally:
        kernels.kernels.cache_clear()  # no sooner: the patch would find its way into later tests
    assert (vectors * engine32.embed(texts)).sum(axis=1).min() >= (0.999 if dtype == "bfloat16" else 0.994)


def test_only_a_small_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one looks for helpers between its layers."""
    counts: list[int] = []
    call = LayerCall.__call__
    monkeypatch.setattr(LayerCall, "__call__", lambda self, *args: (counts.append(len(self.layers)), call(self, *args))[1])
    monkeypatch.setattr(runner, "num_helpers", lambda _: 1)
    with Engine(dtype="float32") as engine:
        counts.clear()
        engine.embed("A wader.")
        assert counts == [6]
        counts.clear()
        engine.embed("wader " * 200)
        assert counts == [1] * 6
