"""Shared prefixes and pieces of long texts: hidden states against transformers', with the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoints.families import CASES, DECODER, VOCABULARY, write_model
from comparisons import assert_close
from hidden_states import reference_states
from references import attend_reference
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.forward import CachedPrefix, Forward, PrefixCache, PrefixKey
from whimbrel.model.load import load_model
from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions, attend
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, keeping, pieces
from whimbrel.model.ops.positions import Bias
from whimbrel.telemetry.trace import CounterEvent, subscribe
from whimbrel.types.batch import pack
from whimbrel.types.seq import Seq

CAUSAL = ("qwen2", "qwen2 with windows", "qwen3", "mistral", "llama", "llama of one key", "deepseek", "gemma2", "gemma3")
"""Cases with windows, capped scores, grouped queries and latent attention."""
Hidden = list[NDArray[np.float32]]


class Model:
    """A loaded model, whose texts run with prefixes and in pieces."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        card = read_card(folder, "m", pooling="mean")
        assert card.encoder.keeps_keys
        self._model, _ = load_model(folder, card, device=torch.device("cpu"), dtype=dtype)

    def forward(self, *, cache: PrefixCache | None = None, piece_tokens: int | None = None) -> Forward:
        return Forward([self._model], torch.from_numpy, cache or PrefixCache(0), piece_tokens=piece_tokens)


def run(forward: Forward, seqs: Sequence[Seq], between: Callable[[], None] | None = None) -> Hidden:
    """Return the hidden states of each seq, from one batch."""
    batch = pack(seqs)
    with torch.inference_mode():
        out = forward(batch, between)
    parts = np.split(out[: batch.num_tokens].numpy(), batch.cu_seqlens[1:-1])
    return [parts[i] for i in np.argsort(batch.order_B)]


def texts(seed: int = 0) -> list[Seq]:
    """Return seqs with two prefixes, of 33 and of 16 tokens, and seqs without one; some end a token after their prefix."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> NDArray[np.int32]:
        return rng.integers(5, VOCABULARY, count).astype(np.int32)

    def after(prefix: NDArray[np.int32], own: int) -> tuple[NDArray[np.int32], int]:
        return np.concatenate((prefix, tokens(own))), prefix.size

    first, second = tokens(33), tokens(16)
    rows = [*(after(first, own) for own in (1, 7, 7, 50)), *(after(second, own) for own in (24, 24, 60)), (tokens(40), 0)]
    return [Seq(ids, i, prefix_tokens=prefix) for i, (ids, prefix) in enumerate(rows)]


def same_bits(one: Hidden, other: Hidden) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CAUSAL)
@pytest.mark.sample(4)
def test_shared_prefixes_give_what_transformers_gives(case: str, tmp_path: Path) -> None:
    """Hidden states are those of whole texts, with the same bits together, alone, and from the cache."""
    expected = reference_states(write_model(tmp_path, *CASES[case]), [seq.ids for seq in texts()])
    model = Model(tmp_path)
    together = run(model.forward(), texts())
    assert_close(together, expected)
    for seq, found in zip(texts(), together, strict=True):
        assert np.array_equal(run(model.forward(), [seq])[0], found)
    cache = PrefixCache(2**24)
    for _ in range(2):  # put into the cache, and read from it
        assert same_bits(run(model.forward(cache=cache), texts()), together)
    assert same_bits([run(model.forward(cache=cache), [seq])[0] for seq in texts()], together)


@pytest.mark.bfloat16
def test_shared_prefixes_have_the_same_bits_in_half_precision(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["qwen3"])
    model, cache = Model(tmp_path, torch.bfloat16), PrefixCache(2**24)
    together = run(model.forward(cache=cache), texts())
    assert same_bits([run(model.forward(), [seq])[0] for seq in texts()], together)
    assert same_bits(run(model.forward(cache=cache), texts()), together)


@pytest.mark.parametrize("piece_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("prefix_tokens", [0, 20])
@pytest.mark.parametrize("case", CAUSAL)
@pytest.mark.sample(10)
def test_a_text_in_pieces_gives_what_transformers_gives(
    case: str, prefix_tokens: int, piece_tokens: int, tmp_path: Path
) -> None:
    ids = np.random.default_rng(1).integers(5, VOCABULARY, 100).astype(np.int32)
    expected = reference_states(write_model(tmp_path, *CASES[case]), [ids])
    forward = Model(tmp_path).forward(piece_tokens=piece_tokens)
    assert_close(run(forward, [Seq(ids, 0, prefix_tokens=prefix_tokens)]), expected)


@pytest.mark.parametrize("piece_tokens", [1, 7, 64, 1000])
def test_pieces_are_as_near_to_float64_as_one_pass(piece_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens' states together are float64's to 1e-6, those of any token to 4e-6, in pieces, whole, and joined."""
    model = write_model(tmp_path, "Qwen3", DECODER | {"head_dim": 16, "max_position_embeddings": 900}).double()
    ids = np.random.default_rng(1).integers(5, VOCABULARY, 900).astype(np.int32)
    (expected,) = reference_states(model, [ids])
    for max_masked_keys in (1024, 64, 0):
        monkeypatch.setattr("whimbrel.model.ops.attention.MAX_MASKED_KEYS", max_masked_keys)
        (found,) = run(Model(tmp_path).forward(piece_tokens=piece_tokens), [Seq(ids, 0)])
        assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)
        assert (np.linalg.norm(found - expected, axis=1) <= 4e-6 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("case", CAUSAL)
@pytest.mark.sample(3)
def test_prefixes_and_pieces_without_masks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is joined from two parts, in every family: transformers' numbers, and the same bits in any company."""
    monkeypatch.setattr("whimbrel.model.ops.attention.MAX_MASKED_KEYS", 8)
    seqs = texts()
    expected = reference_states(write_model(tmp_path, *CASES[case]), [seq.ids for seq in seqs])
    model = Model(tmp_path)
    together = run(model.forward(), seqs)
    assert_close(together, expected)
    assert same_bits([run(model.forward(), [seq])[0] for seq in seqs], together)
    for seq, whole in zip(seqs, expected, strict=True):
        assert_close(run(model.forward(piece_tokens=7), [seq]), [whole])


def test_a_prefix_has_the_same_bits_in_a_long_text(tmp_path: Path) -> None:
    """A text runs in pieces after its prefix as it does after a cached one."""
    write_model(tmp_path, *CASES["qwen3"])
    (seq,) = [each for each in texts() if each.ids.size == 83]
    model = Model(tmp_path)
    in_pieces = run(model.forward(piece_tokens=30), [seq])[0]
    shorter = replace(seq, ids=seq.ids[:63])
    assert np.array_equal(run(model.forward(piece_tokens=30), [shorter])[0], in_pieces[:63])


def test_other_batches_run_between_any_two_pieces(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["qwen3"])
    model, calls = Model(tmp_path), list[None]()
    ids = np.arange(5, 105, dtype=np.int32)
    forward, small = model.forward(piece_tokens=30), model.forward(cache=PrefixCache(2**24))
    expected, alone = run(forward, [Seq(ids, 0)]), run(small, texts())

    def between() -> None:
        calls.append(None)
        assert same_bits(run(small, texts()), alone)

    assert same_bits(run(forward, [Seq(ids, 0)], between), expected)
    assert len(calls) == 3 * 4 - 1  # layers and pieces


_Model = list[Any]
_loaded: _Model = []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "Qwen3", DECODER | {"head_dim": 16})
    return Model(folder)


@settings(max_examples=25)
@given(data=st.data())
def test_any_order_of_arrival_gives_the_same_bits(small: Model, data: st.DataObject) -> None:
    """Random batches, through a cache that holds two prefixes, one, or none, give each text the bits that it has alone."""
    seqs = texts()
    expected = [run(small.forward(), [seq])[0] for seq in seqs]
    one_prefix = 33 * (3 * 2 * 2 * 16 + 48) * 4
    cache = PrefixCache(data.draw(st.sampled_from([0, one_prefix // 2, one_prefix, 2**24])))
    forward = small.forward(cache=cache)
    for chosen in data.draw(st.lists(st.lists(st.sampled_from(range(len(seqs))), min_size=1, max_size=6), max_size=5)):
        found = run(forward, [seqs[i] for i in chosen])
        assert same_bits(found, [expected[i] for i in chosen])
        assert cache.num_bytes <= 2**24


SCORES: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 9},
    "capped": {"softcap": 2.0},
    "capped window": {"softcap": 2.0, "window": 6},
    "biased": {"bias": Bias(lambda distances: distances.expand(4, *distances.shape) / 50.0)},
}


@pytest.mark.parametrize("max_masked_keys", [0, 1024])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("what", SCORES)
def test_attention_AfterPrefixes(what: str, num_kv_heads: int, max_masked_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own tokens attend to their prefix and to themselves as the plain formula does over the whole seq."""
    monkeypatch.setattr("whimbrel.model.ops.attention.MAX_MASKED_KEYS", max_masked_keys)
    scores = ScoreOptions(0.3, causal=True, **SCORES[what])
    lengths, before = [21, 13, 13, 5, 5, 1], [0, 0, 21, 21, 13, 21]
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    qkv = torch.randn(starts[-1] + 6, 4 + 2 * num_kv_heads, 16).split((4, num_kv_heads, num_kv_heads), dim=1)
    first, second = KeptKeys(), KeptKeys()
    groups = [(int(start), 1, size, size) for start, size in zip(starts[:-1], lengths, strict=True)]
    sources = {0: keeping([first]), 21: keeping([second]), 34: AfterPrefixes([first]), 47: AfterPrefixes([first]),
               52: AfterPrefixes([second]), 57: AfterPrefixes([first])}  # fmt: skip
    layout = AttentionLayout(torch.from_numpy(starts), groups, int(starts[-1]), 21, sources=sources)
    out = attend(*qkv, layout, scores)
    assert (out - attend_reference(*qkv, layout, scores)).abs().max() <= 3e-6
    for start, size, prefix in zip(starts.tolist(), lengths, before, strict=False):
        at = {0: 0, 21: 0, 13: 21}[prefix]
        whole = [torch.cat((part[at : at + prefix], part[start : start + size])) for part in qkv]
        length = prefix + size
        alone = AttentionLayout(torch.tensor([0, length], dtype=torch.int32), [(0, 1, length, length)], length, length)
        expected = attend_reference(*whole, alone, scores)[prefix:]
        assert (out[start : start + size] - expected).abs().max() <= 3e-6


@pytest.mark.parametrize("max_masked_keys", [0, 1024])
@pytest.mark.parametrize("what", SCORES)
def test_attention_of_pieces(what: str, max_masked_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.model.ops.attention.MAX_MASKED_KEYS", max_masked_keys)
    scores, bounds = ScoreOptions(0.3, causal=True, **SCORES[what]), [(0, 20), (20, 50), (50, 57)]
    qkv = torch.randn(57, 8, 16).split((4, 2, 2), dim=1)
    whole = AttentionLayout(torch.tensor([0, 57], dtype=torch.int32), [(0, 1, 57, 57)], 57, 57)
    expected = attend_reference(*qkv, whole, scores)
    for (first, last), source in zip(bounds, pieces(bounds), strict=True):
        size = last - first
        cu_seqlens = torch.tensor([0, size], dtype=torch.int32)
        layout = AttentionLayout(cu_seqlens, [(0, 1, size, size)], size, size, sources={0: source})
        own = [part[first:last] for part in qkv]
        assert (attend(*own, layout, scores) - expected[first:last]).abs().max() <= 3e-6
        assert (attend_reference(*own, layout, scores) - expected[first:last]).abs().max() <= 3e-6


def prefix_of(num_bytes: int) -> CachedPrefix:
    return CachedPrefix(KeptKeys(), torch.zeros(num_bytes, dtype=torch.uint8))


def test_the_least_recently_used_prefixes_go_first() -> None:
    a, b, c, large = (PrefixKey(0, -1, 0, name) for name in (b"a", b"b", b"c", b"large"))
    cache, events = PrefixCache(100), list[str]()
    end = subscribe(CounterEvent, lambda event: events.append(event.name))
    first = prefix_of(40)
    cache.put(a, first)
    cache.put(b, prefix_of(40))
    assert cache.get(a) is first
    cache.put(c, prefix_of(40))
    assert cache.get(b) is None
    assert cache.get(a) is first
    cache.put(a, prefix_of(10))  # another lane has put it
    assert cache.get(a) is first
    cache.put(large, prefix_of(101))
    assert cache.get(large) is None
    assert cache.num_bytes == 80
    end()
    assert events.count("prefix_cache_hits") == 3
    assert events.count("prefix_cache_misses") == 2


@pytest.mark.parametrize("changed", [{"tower": 1}, {"adapter": 0}, {"type_id": 1}, {"ids": b"b"}])
def test_a_prefix_is_found_by_everything_that_matters(changed: dict[str, Any]) -> None:
    cache, key = PrefixCache(100), PrefixKey(0, -1, 0, b"a")
    cache.put(key, prefix_of(10))
    assert cache.get(key._replace(**changed)) is None
    assert cache.get(key) is not None
