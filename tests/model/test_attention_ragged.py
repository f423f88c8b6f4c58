"""Ragged attention kernel for GPUs against the plain formula, in Triton's interpreter or on a GPU, and its machine code."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import SCORES, make_layout, on_device
from compiled_triton import skip_without_interpreter
from references import attend_reference
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, attend, ragged_problem
from whimbrel.model.ops.attention_ragged import Variant, attend_ragged, variant_of
from whimbrel.model.ops.attention_tiles import make_tiles
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, keeping, pieces
from whimbrel.types.batch import offsets_of

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


def layout_with_prefixes(device: str = "cpu") -> AttentionLayout:
    """Return seqs of which the first is a prefix of this batch, and others follow it, a kept one of 20 tokens, or none."""
    lengths = [33, 40, 18, 18, 18, 5]
    starts = offsets_of(np.array(lengths)).tolist()
    _, k_LKH, v_LKH = draw(20, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    fresh, kept = KeptKeys(), KeptKeys({0: (k_LKH, v_LKH)})
    groups = [(0, 1, 33, 33), (33, 1, 40, 40), (73, 2, 18, 18), (109, 1, 18, 18), (127, 1, 5, 5)]
    sources = {0: keeping([fresh]), 73: AfterPrefixes([fresh, fresh]), 109: AfterPrefixes([kept]), 127: AfterPrefixes([fresh])}
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return AttentionLayout(cu_seqlens, groups, starts[-1], max(lengths), sources=sources)


# What a process in the interpreter finds


def differences() -> Iterator[tuple[str, float]]:
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


def faults() -> Iterator[str]:
    layout, (q, k, v) = make_layout(LENGTHS), draw(104)
    for what in ("all", "causal window", "biased causal"):
        scores = ScoreOptions(0.3, **SCORES[what])
        found = attend_ragged(q, k, v, layout, scores)
        for start, end in pairwise(cast("list[int]", layout.cu_seqlens.tolist())):
            alone = attend_ragged(*(x[start:end].clone() for x in (q, k, v)), make_layout([end - start]), scores)
            if not torch.equal(alone, found[start:end]):
                yield f"{what}: the seq from {start} has other bits alone"
    none, nothing = AttentionLayout(torch.zeros(1, dtype=torch.int32), [], 0, 0), ScoreOptions(1)
    if attend_ragged(*(x[:0] for x in (q, k, v)), none, nothing).shape != (0, 64):
        yield "no seqs, but rows"
    if attend_ragged(*(x[:3] for x in (q, k, v)), none, nothing).any():
        yield "rows after the tokens are not 0"


def faults_beside_nan() -> Iterator[str]:
    layout, (q, k, v), scores = make_layout(LENGTHS), draw(104), ScoreOptions(0.3, causal=True)
    expected = attend_ragged(q, k, v, layout, scores)
    for x in (q, k, v):
        x[70:87] = torch.nan
    found = attend_ragged(q, k, v, layout, scores)
    if not found[70:87].isnan().any(dim=1).all():
        yield "NaN in a seq is hidden"
    if not torch.equal(found[:70], expected[:70]) or not torch.equal(found[87:], expected[87:]):
        yield "NaN in a seq reaches others"


def failed_self_tests() -> Iterator[str]:
    for variant in (EVERYTHING, replace(EVERYTHING, sloped=True, capped=False)):
        if problem := ragged_problem(torch.device("cpu"), variant):
            yield problem


def interpreted() -> None:
    """Run in a separate process, because Triton selects its interpreter when it is imported."""
    found = dict(differences()), dict(differences_over_other_keys())
    found = *found, [*faults(), *faults_beside_nan(), *failed_self_tests()]
    sys.stdout.write(json.dumps(found))


@pytest.mark.extended
def test_the_kernel_by_the_interpreter() -> None:
    """All forms of scores, widths and kinds of keys. A seq's bits do not depend on its batch."""
    skip_without_interpreter()
    code = "import test_attention_ragged; test_attention_ragged.interpreted()"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent, capture_output=True, check=False)
    assert not run.returncode, run.stderr.decode()
    by_tolerance, others, faults = json.loads(run.stdout)
    assert by_tolerance.keys() == SCORES.keys()
    assert {name: error for name, error in by_tolerance.items() if error > 1} == {}
    assert {name: error for name, error in others.items() if error > 3e-6} == {}
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


@pytest.mark.extended
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("options", [[], ["SLOPED"], ["CAUSAL", "WINDOW", "CAPPED", "BIASED", "KEPT"]], ids=" ".join)
@pytest.mark.sample(8)
def test_the_code_for_a_gpu(options: list[str], capability: int, width: int, block_m: int) -> None:
    """Loads of 16 bytes, asynchronous copies, products on tensor cores, registers and shared memory that suffice."""
    pytest.importorskip("triton")
    from compiled_kernels import compiled
    from whimbrel.model.ops.attention_triton import attend_kernel, shape_of

    block_h = 1 << (width - 1).bit_length()
    shape = shape_of(block_m, block_h)
    flags = {name: name in options for name in ("CAUSAL", "WINDOW", "CAPPED", "BIASED", "SLOPED", "KEPT")}
    blocks = {"WIDTH": width, "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "BLOCK_H": block_h}
    halves = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "kept_k_ptr", "kept_v_ptr", "out_ptr"), "*bf16")
    types = {"band_ptr": "*fp32", "tiles_ptr": "*i32", "scale": "fp32", "cap": "fp32"} | halves
    sizes = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    code = compiled(attend_kernel, types, blocks | flags, capability, **sizes)
    assert code.count("cp.async.cg.shared.global")
    assert not code.count("ld.global*b16")
    assert code.count("st.global*v4")
    assert code.spills <= 16  # of some hundred registers
    assert code.shared <= (99 if capability == 80 else 227) * 1024
    assert bool(code.count("wgmma.mma_async")) == (capability == 90 and block_m == 64)
    assert bool(code.count("mma.sync")) == (capability == 80 or block_m == 16)


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
    found = attend_ragged(*qkv, layout_with_prefixes("cuda"), on_device(ScoreOptions(0.3, **options), "cuda")).cpu()
    expected = attend_reference(*(x.cpu() for x in qkv), _on_host(layout_with_prefixes("cuda")), ScoreOptions(0.3, **options))
    assert worst(found, expected) <= 2e-2


def _on_host(layout: AttentionLayout) -> AttentionLayout:
    """Return the layout with its kept keys on the host. The prefix of this batch is kept anew."""
    sources = dict(layout.sources)
    for source in sources.values():
        if isinstance(source, AfterPrefixes):
            for prefix in source.prefixes:
                prefix.update({layer: (k.cpu(), v.cpu()) for layer, (k, v) in prefix.items()})
    return AttentionLayout(layout.cu_seqlens.cpu(), layout.equal_length_groups, layout.num_tokens, 40, sources=sources)
