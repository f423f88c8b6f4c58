"""Forward passes of batches: which rows a model computes, and the hidden states of all tokens from them.

Three ways through the model, chosen for each batch by its seqs alone:

- Most batches: a row per token.
- Seqs with a prefix (`Seq.prefix_tokens`): rows of each distinct prefix that the cache does not hold, once, then those of each
  seq's own tokens, which attend to their prefix and to themselves. The hidden states are put together afterwards, so pooling
  sees whole seqs. A prefix is computed apart even where only one seq has it, so a vector has the same bits with and without
  company, and with and without the cache.
- A text of more than `piece_tokens` own tokens, which is always alone in its batch: every layer runs it piece by piece. Only
  one layer's keys and values are kept at a time, and on a GPU another batch may run between any two pieces.

Shapes: R rows, T tokens, L tokens of a prefix, B seqs of a batch, S seqs of rows (prefixes and own tokens), D model width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from whimbrel.model.byte_cache import ByteCache
from whimbrel.model.load import Model
from whimbrel.model.ops.attention import AttentionLayout, LayerHook
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys, KeySource, keeping, pieces
from whimbrel.model.ops.linear import round_up_rows
from whimbrel.model.pooling import Put
from whimbrel.telemetry.trace import count, gauge
from whimbrel.types.arrays import Int32Array, IntArray
from whimbrel.types.batch import Batch, equal_length_groups, lengths_of, offsets_of, ranges

PutRows: TypeAlias = Callable[[Int32Array, int], Tensor]
"""Copies numbers to the device, with zeros up to a number of rows."""


class PrefixKey(NamedTuple):
    """Everything that the numbers of a prefix depend on, in an engine of one model and one dtype."""

    tower: int
    adapter: int
    type_id: int
    ids: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    kept: KeptKeys
    hidden_LD: Tensor
    """Hidden states of the last layer."""

    @property
    def nbytes(self) -> int:
        return self.hidden_LD.nbytes + sum(part.nbytes for pair in self.kept.values() for part in pair)


class PrefixCache(ByteCache[PrefixKey, CachedPrefix]):
    """Keys, values and hidden states of leading tokens that many texts share. Counts hits and misses; its size is a gauge.

    Lanes compute outside of it, and two may compute the same prefix at the same time, of which one is kept. A prefix that a
    batch uses stays alive for that batch, whether it is still here or not.
    """

    def __init__(self, max_bytes: int, *, model: str = "") -> None:
        super().__init__(max_bytes)
        self._model = model

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def get(self, key: PrefixKey) -> CachedPrefix | None:
        """Return a prefix and make it the most recent one. Counts a hit or a miss."""
        if not self.is_on:
            return None
        (found,) = self.find([key])
        count("prefix_cache_hits" if found else "prefix_cache_misses", model=self._model)
        return found

    def put(self, key: PrefixKey, prefix: CachedPrefix) -> None:
        """Keep a prefix, unless it is larger than the cache or another lane has put it."""
        self.add(key, prefix)
        gauge("prefix_cache_bytes", self.num_bytes, model=self._model)


_Tokens: TypeAlias = IntArray | slice
_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """A distinct prefix of a batch."""

    key: PrefixKey
    first_token: int
    """The first token of one of the seqs that begin with it."""
    num_tokens: int
    cached: CachedPrefix | None
    kept: KeptKeys


class Forward:
    """Forward passes of one model, or of the towers that a checkpoint has."""

    def __init__(
        self,
        models: Sequence[Model],
        put: Put,
        cache: PrefixCache,
        *,
        piece_tokens: int | None,
        any_rows: bool = False,
        put_rows: PutRows | None = None,
    ) -> None:
        """`piece_tokens`: None: no text runs in pieces. `any_rows`: the models run any number of rows, so none are added.

        `put_rows` copies numbers to the device with zeros up to a number of rows; None: as `put` copies them.
        """

        def pad_and_put(numbers_T: Int32Array, num_rows: int) -> Tensor:
            padded_R = np.zeros(num_rows, np.int32)
            padded_R[: numbers_T.size] = numbers_T
            return put(padded_R)

        self._copy_rows: PutRows = put_rows or pad_and_put
        self._models = models
        self._put = put
        self._cache = cache
        self._piece_tokens = piece_tokens
        self._round_up: Callable[[int], int] = int if any_rows else round_up_rows

    def __call__(self, batch: Batch, between: LayerHook) -> Tensor:
        """Return the hidden states of the tokens, (R, D), where R is T, rounded up unless the models run any number of rows."""
        own_tokens = batch.num_tokens - int(batch.prefix_tokens_B[0])
        if batch.num_seqs == 1 and self._piece_tokens is not None and own_tokens > self._piece_tokens:
            layout = self._layout_of_pieces(batch)
            between = _in_step(between) if between is not None and layout.cu_seqlens.is_cuda else between
            return self._run(batch, _ALL, layout, between)
        if batch.prefix_tokens_B.any():
            return self._run_with_prefixes(batch, between)
        return self._run(batch, _ALL, self._layout(batch), between)

    def _run(self, batch: Batch, tokens_R: _Tokens, layout: AttentionLayout, between: LayerHook) -> Tensor:
        ids_R, positions_R, type_ids_R = (
            self._put_rows(each[tokens_R]) for each in (batch.ids_T, batch.positions_T, batch.type_ids_T)
        )
        return self._models[batch.tower](ids_R, positions_R, type_ids_R, layout, between)

    def _adapters(self, batch: Batch, tokens_R: _Tokens) -> Tensor | None:
        if not (batch.adapters_B >= 0).any():
            return None
        return self._put_rows(np.repeat(batch.adapters_B, lengths_of(batch.cu_seqlens))[tokens_R])

    def _put_rows(self, numbers_T: Int32Array) -> Tensor:
        """Return the numbers on the device, with zeros up to the number of rows."""
        if (num_rows := self._round_up(numbers_T.size)) == numbers_T.size:
            return self._put(numbers_T)
        return self._copy_rows(numbers_T, num_rows)

    def _layout(self, batch: Batch) -> AttentionLayout:
        lengths = lengths_of(batch.cu_seqlens)
        num_keys_B = None if (batch.num_attended_B == lengths).all() else self._put(batch.num_attended_B)
        groups, adapters_R = equal_length_groups(batch.cu_seqlens, batch.num_attended_B), self._adapters(batch, _ALL)
        return AttentionLayout(
            self._put(batch.cu_seqlens), groups, batch.num_tokens, int(lengths.max()), num_keys_B, adapters_R=adapters_R
        )

    # Long texts

    def _layout_of_pieces(self, batch: Batch) -> AttentionLayout:
        """Return the layout of one long text. Its pieces end at its prefix, and at multiples of their size after it."""
        assert self._piece_tokens is not None
        prefix = int(batch.prefix_tokens_B[0])
        starts = [*([0] if prefix else []), *range(prefix, batch.num_tokens, self._piece_tokens)]
        bounds = list(pairwise([*starts, batch.num_tokens]))
        masks: dict[tuple[object, ...], Tensor] = {}
        parts = [
            (
                slice(first, last if last < batch.num_tokens else self._round_up(last)),
                self._layout_of_text(last - first, masks=masks, sources={0: source}),
            )
            for (first, last), source in zip(bounds, pieces(bounds), strict=True)
        ]
        return self._layout_of_text(batch.num_tokens, adapters_R=self._adapters(batch, _ALL), pieces=parts)

    def _layout_of_text(self, length: int, **more: Any) -> AttentionLayout:
        return AttentionLayout(self._put(np.array([0, length], np.int32)), [(0, 1, length, length)], length, length, **more)

    # Shared prefixes

    def _run_with_prefixes(self, batch: Batch, between: LayerHook) -> Tensor:
        prefixes, prefix_B = self._find_prefixes(batch)
        missing = sorted((each for each in prefixes if each.cached is None), key=lambda each: -each.num_tokens)
        starts_S = np.array([each.first_token for each in missing] + (batch.cu_seqlens[:-1] + batch.prefix_tokens_B).tolist())
        ends_S = np.array([each.first_token + each.num_tokens for each in missing] + batch.cu_seqlens[1:].tolist())
        tokens_R = ranges(starts_S, ends_S)
        layout = self._layout_with_prefixes(batch, tokens_R, ends_S - starts_S, missing, prefix_B)
        hidden_RD = self._run(batch, tokens_R, layout, between)
        starts = dict(zip(missing, offsets_of(ends_S - starts_S).tolist(), strict=False))
        if self._cache.is_on:
            for prefix, start in starts.items():
                rows_LD = hidden_RD[start : start + prefix.num_tokens].clone()
                self._cache.put(prefix.key, CachedPrefix(prefix.kept, rows_LD))
        return self._put_together(batch, hidden_RD, tokens_R, starts, prefix_B)

    def _find_prefixes(self, batch: Batch) -> tuple[list[_Prefix], list[_Prefix | None]]:
        """Return the distinct prefixes, and that of each seq."""
        found: dict[PrefixKey, _Prefix] = {}
        prefix_B: list[_Prefix | None] = []
        firsts: list[int] = batch.cu_seqlens[:-1].tolist()
        for first, size, adapter in zip(firsts, batch.prefix_tokens_B.tolist(), batch.adapters_B.tolist(), strict=True):
            if not size:
                prefix_B.append(None)
                continue
            ids = batch.ids_T[first : first + size].tobytes()
            key = PrefixKey(batch.tower, adapter, int(batch.type_ids_T[first]), ids)
            if key not in found:
                cached = self._cache.get(key)
                found[key] = _Prefix(key, first, size, cached, cached.kept if cached else KeptKeys())
            prefix_B.append(found[key])
        return list(found.values()), prefix_B

    def _layout_with_prefixes(
        self, batch: Batch, tokens_R: IntArray, lengths_S: IntArray, missing: list[_Prefix], prefix_B: list[_Prefix | None]
    ) -> AttentionLayout:
        """Return the layout of the rows: the missing prefixes, then each seq's own tokens."""
        prefix_of_S = [*missing, *prefix_B]
        num_before = [prefix.num_tokens if prefix else 0 for prefix in prefix_of_S]
        attended_S = lengths_S.astype(np.int32)
        is_whole_B = batch.prefix_tokens_B == 0
        attended_S[len(missing) :][is_whole_B] = batch.num_attended_B[is_whole_B]
        groups: list[tuple[int, int, int, int]] = []
        sources: dict[int, KeySource] = {}
        cu_seqlens = offsets_of(lengths_S).astype(np.int32)
        is_missing = [True] * len(missing) + [False] * batch.num_seqs
        kinds = list(zip(is_missing, lengths_S.tolist(), attended_S.tolist(), num_before, strict=True))
        for (is_prefix, length, keys, _), equal in groupby(range(len(kinds)), kinds.__getitem__):
            seqs = list(equal)
            start = int(cu_seqlens[seqs[0]])
            groups.append((start, len(seqs), length, keys))
            kept = [prefix.kept for seq in seqs if (prefix := prefix_of_S[seq])]
            if kept:
                sources[start] = keeping(kept) if is_prefix else AfterPrefixes(kept)
        num_keys_S = None if np.array_equal(attended_S, lengths_S) else self._put(attended_S)
        adapters_R = self._adapters(batch, tokens_R)
        offsets, longest = self._put(cu_seqlens), int(lengths_S.max())
        return AttentionLayout(offsets, groups, tokens_R.size, longest, num_keys_S, adapters_R=adapters_R, sources=sources)

    def _put_together(
        self, batch: Batch, hidden_RD: Tensor, tokens_R: IntArray, starts: dict[_Prefix, int], prefix_B: list[_Prefix | None]
    ) -> Tensor:
        """Return the hidden states of all tokens: computed rows, and those of cached prefixes."""
        cached = list({prefix: None for prefix in prefix_B if prefix is not None and prefix.cached is not None})
        begins = accumulate((each.num_tokens for each in cached), initial=hidden_RD.shape[0])
        starts = starts | dict(zip(cached, begins, strict=False))
        row_T = np.zeros(self._round_up(batch.num_tokens), np.int32)
        row_T[tokens_R] = np.arange(tokens_R.size)
        for token, prefix in zip(batch.cu_seqlens[:-1].tolist(), prefix_B, strict=True):
            if prefix is not None:
                row_T[token : token + prefix.num_tokens] = starts[prefix] + np.arange(prefix.num_tokens)
        parts = [hidden_RD, *(each.cached.hidden_LD for each in cached if each.cached)]
        return torch.cat(parts).index_select(0, self._put(row_T))


def _in_step(between: Callable[[], None]) -> Callable[[], None]:
    """Return a function that first waits until a GPU has at most one piece to do, so that others can run soon."""
    launched: deque[torch.cuda.Event] = deque()

    def wait() -> None:
        event = torch.cuda.Event()
        event.record()
        launched.append(event)
        if len(launched) > 1:
            launched.popleft().synchronize()
        between()

    return wait
