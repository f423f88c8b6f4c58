"""Ragged attention kernel for GPUs against the plain formula, in Triton's interpreter or on a GPU, and its machine code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import SCORES, make_layout, on_device
from compiled_kernels import MAX_SHARED, note_launches
from interpreted_kernels import interpreted
from references import attend_reference
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, attend, ragged_problem
from whimbrel.model.ops.attention_ragged import Variant, attend_ragged, variant_of
from whimbrel.model.ops.attention_tiles import LARGE_TILE, make_tiles
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, keeping, pieces
from whimbrel.types.batch import equal_length_groups, offsets_of

LENGTHS = [70, 17, 16, 1]
"""More than one large tile, a large one that is not full, a small tile, and one that is not full."""
TOLERANCES = {"float32": 3e-6, "float16": 3e-3}
"""In the interpreter, whose products of bfloat16 are none."""
FORMS = {
    "all": ("float16", 8, 4), "causal": ("float32", 12, 1), "window": ("float16", 40, 2), "no window": ("float32", 16, 2),
    "causal window": ("float32", 24, 4), "biased": ("float16", 64, 4), "biased by slopes": ("float32", 16, 2),
    "biased causal": ("float32", 256, 1), "capped": ("float32", 16, 4), "capped causal window": ("float16", 136, 2),
}  # fmt: skip
"""Dtype, width and key heads for each form of scores."""
EVERYTHING = Variant(torch.float16, 24, causal=True, window=True, capped=True, biased=True, sloped=False, after_prefixes=True)


def draw(rows: int, width: int = 16, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    x = torch.randn(rows, 4 + 2 * num_kv_heads, width, generator=torch.Generator().manual_seed(1))
    return x.to(device, dtype).split((4, num_kv_heads, num_kv_heads), dim=1)


def worst(found: Tensor, expected: Tensor) -> float:
    """Return the greatest difference. A query without keys has NaN by the formula."""
    return float((found.float().nan_to_num() - expected.float().nan_to_num()).abs().max())


def layout_with_prefixes(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 16) -> AttentionLayout:
    """Return seqs of which the first is a prefix of this batch, and others follow it, a kept one of 20 tokens, or none."""
    lengths = [33, 40, 18, 18, 18, 5]
    starts = offsets_of(np.array(lengths)).tolist()
    _, k_LKH, v_LKH = draw(20, width, device=device, dtype=dtype)
    fresh, kept = KeptKeys(), KeptKeys({0: (k_LKH, v_LKH)})
    groups = [(0, 1, 33, 33), (33, 1, 40, 40), (73, 2, 18, 18), (109, 1, 18, 18), (127, 1, 5, 5)]
    sources = {0: keeping([fresh]), 73: AfterPrefixes([fresh, fresh]), 109: AfterPrefixes([kept]), 127: AfterPrefixes([fresh])}
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return AttentionLayout(cu_seqlens, groups, starts[-1], max(lengths), sources=sources)


# What a process in the interpreter finds


def differences_by_form() -> Iterator[tuple[str, float]]:
    for what, (dtype, width, num_kv_heads) in FORMS.items():
        layout, scores = make_layout(LENGTHS), ScoreOptions(width**-0.5, **SCORES[what])
        qkv = draw(layout.num_tokens + 5, width, num_kv_heads, getattr(torch, dtype))
        found = attend_ragged(*qkv, layout, scores)
        assert not found[layout.num_tokens :].any()
        yield what, worst(found, attend_reference(*qkv, layout, scores)) / TOLERANCES[dtype]


def differences_over_other_keys() -> Iterator[tuple[str, float]]:
    qkv = draw(132)
    for what in ("all", "window"):  # an expansion token attends, and is not attended to
        layout, scores = make_layout(LENGTHS, num_keys=[70, 5, 3, 1]), ScoreOptions(0.3, **SCORES[what])
        yield f"first tokens {what}", worst(attend_ragged(*qkv, layout, scores), attend_reference(*qkv, layout, scores))
    for what in ("all", "window", "biased"):
        scores = ScoreOptions(0.3, **{"causal": True} | SCORES[what])
        found, expected = (each(*qkv, layout_with_prefixes(), scores) for each in (attend_ragged, attend_reference))
        yield f"after prefixes {what}", worst(found, expected)
        bounds = [(0, 20), (20, 90), (90, 104)]
        whole = attend_reference(*qkv, make_layout([104]), scores)
        for (first, last), source in zip(bounds, pieces(bounds), strict=True):
            offsets, size = torch.tensor([0, last - first], dtype=torch.int32), last - first
            layout = AttentionLayout(offsets, [(0, 1, size, size)], size, size, sources={0: source})
            found = attend_ragged(*(x[first:last] for x in qkv), layout, scores)
            yield f"piece from {first} {what}", worst(found, whole[first:last])


def differences_by_width() -> Iterator[tuple[str, float]]:
    """Every width that the kernel takes, two queries a key head, and one that has to be filled up."""
    layout = make_layout([19, 3])
    for width in (*range(16, 257, 8), 12):
        qkv, scores = draw(22, width, 2, torch.float16), ScoreOptions(width**-0.5, causal=True)
        found = attend_ragged(*qkv, layout, scores)
        yield f"width {width}", worst(found, attend_reference(*qkv, layout, scores)) / TOLERANCES["float16"]


def faults() -> Iterator[str]:
    """Yield the seqs whose bits are others than alone: as the first, the last, or between others, which are all NaN."""
    for what, size in (("all", 70), ("causal window", 17), ("biased causal", 1), ("capped", 33)):
        lengths = [size, 66, size, 16, size]
        starts, scores = offsets_of(np.array(lengths)).astype(np.int32), ScoreOptions(0.3, **SCORES[what])
        layout = AttentionLayout(torch.from_numpy(starts), equal_length_groups(starts), int(starts[-1]), max(lengths))
        qkv = draw(layout.num_tokens)
        for x in qkv:
            x[starts[1] : starts[2]] = x[starts[3] : starts[4]] = torch.nan
            x[starts[2] : starts[3]] = x[starts[4] :] = x[:size]
        found = attend_ragged(*qkv, layout, scores)
        alone = attend_ragged(*(x[:size].clone() for x in qkv), make_layout([size]), scores)
        for place in (0, 2, 4):
            if alone.isnan().any() or not torch.equal(alone, found[starts[place] : starts[place + 1]]):
                yield f"{what}: the seq of {size} tokens from {starts[place]} has other bits than alone"
        if not found[starts[1] : starts[2]].isnan().any(dim=1).all():
            yield f"{what}: NaN in a seq is hidden"
    none, nothing, (q, k, v) = AttentionLayout(torch.zeros(1, dtype=torch.int32), [], 0, 0), ScoreOptions(1), draw(3)
    if attend_ragged(*(x[:0] for x in (q, k, v)), none, nothing).shape != (0, 64):
        yield "no seqs, but rows"
    if attend_ragged(*(q, k, v), none, nothing).any():
        yield "rows after the tokens are not 0"


def failed_self_tests() -> Iterator[str]:
    for variant in (EVERYTHING, replace(EVERYTHING, sloped=True, capped=False)):
        if problem := ragged_problem(torch.device("cpu"), variant):
            yield problem


def findings() -> tuple[dict[str, float], dict[str, float], dict[str, float], list[str]]:
    differences = (differences_by_form(), differences_by_width(), differences_over_other_keys())
    return *map(dict, differences), [*faults(), *failed_self_tests()]


def test_the_kernel_by_the_interpreter() -> None:
    """All forms of scores, widths and kinds of keys. A seq's bits do not depend on its neighbours."""
    by_form, by_width, others, faults = interpreted("test_attention_ragged", "findings()")
    assert by_form.keys() == SCORES.keys()
    assert len(by_width) == 32
    assert {name: error for name, error in (by_form | by_width).items() if not error <= 1} == {}
    assert {name: error for name, error in others.items() if not error <= 3e-6} == {}
    assert faults == []


# On the host


def test_tiles_depend_on_their_seq_alone() -> None:
    """Each query has one tile; long seqs come first among the large tiles, and small ones before all."""
    lengths, kept = np.array([200, 130, 64, 17, 16, 3]), np.array([0, 40, 0, 0, 40, 0])
    starts = offsets_of(lengths)[:-1]
    seqs_S7 = np.stack((starts, lengths, kept, starts, lengths, kept * 0, kept), axis=1)
    tiles = make_tiles(seqs_S7)
    rows = np.concatenate([np.arange(first, first + count) for first, count, *_ in tiles.table_W8])
    assert np.array_equal(np.sort(rows), np.arange(lengths.sum()))
    assert tiles.num_small == 2
    assert (tiles.table_W8[:2, 1] <= 16).all()
    sizes = (tiles.table_W8[2:, 4] + tiles.table_W8[2:, 6]).tolist()
    assert sizes == sorted(sizes, reverse=True)
    for seq in range(len(lengths)):
        ((alone,), (among,)) = (
            [each.table_W8[np.isin(each.table_W8[:, 3], start)] for start in [starts[seq]]]
            for each in (make_tiles(seqs_S7[seq : seq + 1]), tiles)
        )
        assert np.array_equal(alone, among)
    assert make_tiles(seqs_S7[:0]).table_W8.shape == (0, 8)


@pytest.mark.parametrize("works", [True, False])
def test_the_choice_between_kernels(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes what flash attention lacks, unless it fails its self-test."""
    called = list[str]()
    monkeypatch.setattr(attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    monkeypatch.setattr(attention, "kernels", lambda: None)
    monkeypatch.setattr(attention, "_has_ragged", lambda *_: works)
    for name, function in (("ragged", "attend_ragged"), ("flash", "_attend_varlen"), ("groups", "_attend_runs")):
        monkeypatch.setattr(attention, function, lambda *_, it=name: called.append(it))

    def chosen(scores: ScoreOptions, width: int = 16, layout: AttentionLayout | None = None, dtype: Any = torch.float16) -> str:
        called.clear()
        attend(*draw(132, width, dtype=dtype), layout or make_layout(LENGTHS), scores)
        return called[0]

    own, plain = "ragged" if works else "groups", ScoreOptions(0.3)
    for what in SCORES:
        other = "biased" in what or "capped" in what
        assert chosen(ScoreOptions(0.3, **SCORES[what])) == (own if other else "flash")
    assert chosen(plain, width=264) == "groups"
    assert chosen(plain, dtype=torch.float32) == "groups"
    assert chosen(ScoreOptions(0.3, window=4), layout=make_layout(LENGTHS, num_keys=[70, 5, 3, 1])) == own
    assert chosen(ScoreOptions(0.3, causal=True), layout=layout_with_prefixes()) == ("ragged" if works else "flash")
    monkeypatch.setattr(attention, "_has_flash", lambda _: False)  # a card before Ampere
    assert chosen(ScoreOptions(0.3, **SCORES["biased"])) == "groups"
    assert chosen(ScoreOptions(0.3, causal=True), layout=layout_with_prefixes()) == "groups"


def test_a_kernel_that_cannot_run_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, or with other values, groups of equal length are computed; without memory a smaller batch may do."""
    attention._has_ragged.cache_clear()
    device, problems = torch.device("cpu"), iter([RuntimeError("Failed to find C compiler\n..."), "its values differ by 3"])

    def problem(*_: Any) -> str:
        if isinstance(found := next(problems), Exception):
            raise found
        return found

    monkeypatch.setattr(attention, "ragged_problem", problem)
    with caplog.at_level(logging.INFO, "whimbrel"):
        assert not any(attention._has_ragged(device, EVERYTHING) for _ in range(3))
        assert not attention._has_ragged(device, Variant(torch.bfloat16, *[64] * 7))
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2
    assert "Failed to find C compiler" in caplog.messages[0]
    assert "differ by 3" in caplog.messages[1]
    monkeypatch.setattr(attention, "ragged_problem", lambda *_: None)
    attention._has_ragged.cache_clear()
    assert attention._has_ragged(device, EVERYTHING)
    attention._has_ragged.cache_clear()
    problems = iter([torch.OutOfMemoryError("no memory")])
    monkeypatch.setattr(attention, "ragged_problem", problem)
    with pytest.raises(torch.OutOfMemoryError):
        attention._has_ragged(device, EVERYTHING)
    attention._has_ragged.cache_clear()


CODE: dict[str, dict[str, Any]] = {
    "plain": {}, "slopes": SCORES["biased by slopes"], "causal": {"causal": True},
    "everything after prefixes": SCORES["capped causal window"] | SCORES["biased"],
}  # fmt: skip
QUICK = [("plain", 64, 80), ("everything after prefixes", 128, 90), ("slopes", 256, 80), ("causal", 24, 90)]
"""Each form, and each kind of width: one that fills its block, also of the greatest size, and one that does not."""
THOROUGH = product(CODE, (16, 24, 64, 96, 128, 136, 256), (80, 90))


@pytest.mark.parametrize(
    ("form", "width", "capability"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.extended) for each in THOROUGH if each not in QUICK)],
)
def test_the_code_for_a_gpu(form: str, width: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 16 bytes, asynchronous copies, products on tensor cores, registers and shared memory that suffice.

    The code depends on the width by the size of its block, and by whether it fills it.
    """
    pytest.importorskip("triton")
    from whimbrel.model.ops import attention_triton

    launches = note_launches(monkeypatch, attention_triton, "attend_kernel")
    layout = layout_with_prefixes(dtype=torch.bfloat16, width=width) if "prefixes" in form else make_layout([70, 16])
    attend_ragged(*draw(132, width, dtype=torch.bfloat16), layout, ScoreOptions(0.3, **CODE[form]))
    for launch in launches.noted:
        code, is_large = launch.compile(capability), launch.arguments["BLOCK_M"] == LARGE_TILE
        assert code.copies == ({4, 16} if launch.arguments["BIASED"] else {16})  # a bias is read number by number
        assert "ld 2" not in code.accesses
        assert {each for each in code.accesses if "st" in each} == {"st 16"}
        assert code.spills <= 4  # of some hundred registers
        assert code.shared <= MAX_SHARED[capability]
        assert bool(code.count("wgmma.mma_async")) == (capability == 90 and is_large)
        assert bool(code.count("mma.sync")) == (capability == 80 or not is_large)
    assert len(launches.noted) == 2


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("what", "dtype", "width", "num_kv_heads"),
    [
        *((what, torch.bfloat16, 64, 4) for what in SCORES),
        *(("biased causal", torch.bfloat16, width, 2) for width in (8, 12, 24, 32, 96, 128, 136, 256)),
        *((what, torch.float16, 64, 1) for what in ("all", "causal window", "biased", "capped")),
    ],
)  # few, because each is compiled
def test_the_kernel_on_a_gpu(what: str, dtype: torch.dtype, width: int, num_kv_heads: int) -> None:
    scores = on_device(ScoreOptions(width**-0.5, **SCORES[what]), "cuda")
    layout = make_layout([300, 129, *LENGTHS], "cuda")
    qkv = draw(layout.num_tokens + 3, width, num_kv_heads, dtype, "cuda")
    variant = variant_of(qkv[2], layout, scores)
    assert variant is not None
    assert ragged_problem(torch.device("cuda"), variant) is None
    found = attend_ragged(*qkv, layout, scores).cpu()
    host = make_layout([300, 129, *LENGTHS])
    expected = attend_reference(*(x.cpu() for x in qkv), host, ScoreOptions(width**-0.5, **SCORES[what]))
    assert worst(found, expected) <= (2e-2 if dtype == torch.bfloat16 else 3e-3)
    assert not found[layout.num_tokens :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["all", "causal window", "biased causal", "capped"])
def test_bits_on_a_gpu(what: str) -> None:
    """A seq has the same bits alone, in a batch, and beside a seq of NaN."""
    scores = on_device(ScoreOptions(0.2, **SCORES[what]), "cuda")
    layout = make_layout([900, 300, *LENGTHS], "cuda")
    qkv = draw(layout.num_tokens, 64, 4, torch.bfloat16, "cuda")
    found = attend_ragged(*qkv, layout, scores)
    for start, end in pairwise(cast("list[int]", layout.cu_seqlens.tolist())):
        alone = attend_ragged(*(x[start:end].clone() for x in qkv), make_layout([end - start], "cuda"), scores)
        assert torch.equal(alone, found[start:end])
    for x in qkv:
        x[:900] = torch.nan
    assert torch.equal(attend_ragged(*qkv, layout, scores)[900:], found[900:])


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["all", "window", "biased", "capped"])
def test_kept_keys_on_a_gpu(what: str) -> None:
    """Keys of prefixes are read in place."""
    options: dict[str, Any] = {"causal": True} | SCORES[what]
    qkv = draw(132, dtype=torch.bfloat16, device="cuda")
    found = attend_ragged(
        *qkv, layout_with_prefixes("cuda", torch.bfloat16), on_device(ScoreOptions(0.3, **options), "cuda")
    ).cpu()
    expected = attend_reference(
        *(x.cpu() for x in qkv), _on_host(layout_with_prefixes("cuda", torch.bfloat16)), ScoreOptions(0.3, **options)
    )
    assert worst(found, expected) <= 2e-2


def _on_host(layout: AttentionLayout) -> AttentionLayout:
    """Return the layout with its kept keys on the host. The prefix of this batch is kept anew."""
    sources = dict(layout.sources)
    for source in sources.values():
        if isinstance(source, AfterPrefixes):
            for prefix in source.prefixes:
                prefix.update({layer: (k.cpu(), v.cpu()) for layer, (k, v) in prefix.items()})
    return AttentionLayout(layout.cu_seqlens.cpu(), layout.equal_length_groups, layout.num_tokens, 40, sources=sources)
