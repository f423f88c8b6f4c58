"""Flash attention's call, on a CPU: a plain formula stands in for PyTorch's operator, with the operator's own conditions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import SCORES, make_layout
from checkpoints.families import CASES, write_model
from checkpoints.sentence_layout import sentence_layout
from hidden_states import hidden_states, least_cosine, loaded, random_ids, reference_states
from references import attend_reference
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.layer import Layer
from whimbrel.model.ops import attention
from whimbrel.model.ops.attention import ScoreOptions, attend
from whimbrel.model.ops.linear import round_up_rows

LENGTHS = [40, 40, 33, 17, 2, 1]
PROMPT = "Instruct: Given a question about birds, retrieve passages that answer the question.\nQuery: "
TEXTS = ["a", "The whimbrel is a wader with a long curved bill.", "far away " * 60, "The"]


class Flash:
    """Operator of PyTorch 2.11, the oldest that has its parameters: masks align the last keys with the last queries."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        self.num_calls += 1
        width = query.shape[-1]
        assert width % 8 == 0, "head_size must be a multiple of 8"
        assert width <= 256, "head dimension at most 256"
        assert query.dtype == key.dtype == value.dtype in (torch.float16, torch.bfloat16)
        assert query.shape[1] % key.shape[1] == 0, "heads of keys must divide heads of queries"
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        assert all(x.dtype == torch.int32 for x in (cum_seq_q, cum_seq_k, *([] if seqused_k is None else [seqused_k])))
        assert dropout_p == 0
        assert scale is not None
        assert not return_debug_mask
        assert alibi_slopes is None
        left = -1 if window_size_left is None else window_size_left
        right = -1 if window_size_right is None else window_size_right
        assert is_causal == ((left, right) == (-1, 0))
        (q_starts, k_starts), out = (each.tolist() for each in (cum_seq_q, cum_seq_k)), torch.zeros_like(query)
        shared = query.shape[1] // key.shape[1]
        for seq, start in enumerate(q_starts[:-1]):
            queries, begin = slice(start, q_starts[seq + 1]), k_starts[seq]
            keys = slice(begin, k_starts[seq + 1] if seqused_k is None else begin + int(seqused_k[seq]))
            assert queries.stop - queries.start <= max_q
            assert k_starts[seq + 1] - begin <= max_k
            q, k, v = query[queries].float(), key[keys].float(), value[keys].float()
            k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
            scores = torch.einsum("qnh,knh->nqk", q, k) * scale
            ahead = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None] - (len(k) - len(q))
            hidden = (ahead > (right if right >= 0 else max_k)) | (-ahead > (left if left >= 0 else max_k))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
            out[queries] = torch.einsum("nqk,knh->qnh", weights, v).to(out.dtype)
        empty = query.new_empty(0)
        return out, empty, empty, empty, empty


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    """The stand-in, registered as the operator for CPUs, and called by the dispatcher of the installed PyTorch."""
    monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    monkeypatch.setattr(Layer, "join_parts", lambda _: None)  # our own kernels have attention within them
    loaded.cache_clear()
    stand_in = Flash()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", stand_in, "CPU")
        yield stand_in
    loaded.cache_clear()


def check(scores: ScoreOptions, width: int, num_kv_heads: int, dtype: torch.dtype, num_keys: list[int] | None = None) -> None:
    layout = make_layout(LENGTHS, num_keys=num_keys)
    num_rows = round_up_rows(layout.num_tokens) + 16
    x = torch.randn(num_rows, 4 + 2 * num_kv_heads, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    qkv = x.split((4, num_kv_heads, num_kv_heads), dim=1)
    out = attend(*qkv, layout, scores)
    assert out.dtype == dtype
    assert out.shape == (num_rows, 4 * width)
    expected = attend_reference(*qkv, layout, scores)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    difference = out.float().nan_to_num() - expected.float().nan_to_num()  # NaN or 0: no key is in the window
    assert difference.abs().max() <= tolerance
    assert not out[layout.num_tokens :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [8, 12, 26, 64, 256, 260])
@pytest.mark.parametrize("what", SCORES)
@pytest.mark.sample(24)
def test_every_form_of_scores(flash: Flash, what: str, width: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """Flash attention computes those that it can, with zeros beside narrow heads."""
    check(ScoreOptions(0.1, **SCORES[what]), width, num_kv_heads, dtype)
    assert flash.num_calls == ("biased" not in what and "capped" not in what and width <= 256)


@pytest.mark.parametrize("what", SCORES)
def test_the_first_tokens_alone(flash: Flash, what: str) -> None:
    """Fewer keys than queries: the operator would shift a window and a causal mask."""
    check(ScoreOptions(0.3, **SCORES[what]), 16, 4, torch.bfloat16, [40, 7, 33, 5, 1, 1])
    assert flash.num_calls == (what == "all")


def test_more_seqs_than_a_launch_has_rows(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_FLASH_SEQS", len(LENGTHS) - 1)
    check(ScoreOptions(0.3), 16, 4, torch.bfloat16)
    assert not flash.num_calls


def test_older_gpus_have_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's is built for compute capability 8.0 and above."""
    found: dict[tuple[int, int], bool] = {}
    for number, capability in enumerate([(7, 0), (7, 5), (8, 0), (9, 0)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        found[capability] = attention._has_flash.__wrapped__(torch.device("cuda", number))
    assert found == {(7, 0): False, (7, 5): False, (8, 0): True, (9, 0): True}
    assert not attention._has_flash(torch.device("cpu"))


def _cosine(one: Any, other: Any) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(8)
def test_families_in_half_precision(case: str, tmp_path: Path, flash: Flash) -> None:
    """Every family as a GPU runs it. Biased, capped and disentangled scores have another way."""
    model = write_model(tmp_path, *CASES[case])
    for found, expected in zip(
        hidden_states(tmp_path, random_ids(), torch.bfloat16), reference_states(model, random_ids()), strict=True
    ):
        assert _cosine(found.mean(0), expected.mean(0)) > least_cosine(case)
    encoder = read_card(tmp_path, "m", pooling="mean").encoder
    other = encoder.positions in ("alibi", "relative") or encoder.softcap is not None or encoder.disentangled is not None
    assert bool(flash.num_calls) != other


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", ["qwen3", "mistral"])
def test_shared_prefixes_and_long_texts(case: str, tmp_path: Path, flash: Flash) -> None:
    """Queries after kept keys: those of texts behind a prompt, and of the pieces of a long text."""
    name, config = CASES[case]
    write_model(tmp_path, name, config | {"max_position_embeddings": 600})
    sentence_layout(tmp_path, modes=("lasttoken",), max_seq_length=600)
    with Engine(str(tmp_path), dtype="float32") as engine:
        expected = engine.embed(TEXTS, prompt=PROMPT)
    assert not flash.num_calls
    with Engine(str(tmp_path), dtype="bfloat16", max_batch_tokens=64) as engine:
        found = [engine.embed(TEXTS, prompt=PROMPT) for _ in range(2)]  # the second time the prefix is kept
    assert flash.num_calls
    assert min(_cosine(*pair) for each in found for pair in zip(each, expected, strict=True)) > 0.995
