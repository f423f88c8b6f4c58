"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.token_mask import entry_keys, token_mask
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array, offsets_of
from whimbrel.types.card import Card, Output
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Sparse
from whimbrel.types.seq import Seq

_ALIGN: Final = 64

_FLOAT_BYTES: Final = 4

_GUESSED_ENTRIES: Final = 256
"""Entries that a text may have of the whole vocabulary, for accounts of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class ArraySlot:
    """Where the rows of one output lie in a request's memory."""

    spec: OutputSpec
    start: int
    """In bytes."""
    offsets_N1: Int64Array
    """Rows offsets_N1[i] to offsets_N1[i + 1] are those of text i."""
    ids_P: Int32Array | None
    """Of entries: which they are."""

    @property
    def num_rows(self) -> int:
        return int(self.offsets_N1[-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.spec.width * _FLOAT_BYTES

    def rows(self, memory: NDArray[np.uint8]) -> Float32Array:
        """The rows in it."""
        flat = memory[self.start : self.start + self.num_bytes].view(np.float32)
        return flat.reshape(self.num_rows, self.spec.width)


@dataclass(frozen=True, slots=True, eq=False)
class ResultLayout:
    """Where everything lies that a request asks for; one array after another."""

    by_name: Mapping[OutputName, ArraySlot]
    num_bytes: int
    dynamic_output: OutputSpec | None = None
    """What has no place, as its size is not known: weights over the whole vocabulary."""
    token_matches: ArraySlot | None = None
    """Of an answer that explains: for each pair, Outputs.matches."""

    @property
    def specs(self) -> list[OutputSpec]:
        return [*(place.spec for place in self.by_name.values()), *([self.dynamic_output] if self.dynamic_output else [])]

    def spec(self, name: OutputName) -> OutputSpec | None:
        """What is asked of an output, if anything."""
        place = self.by_name.get(name)
        if place is not None:
            return place.spec
        return self.dynamic_output if self.dynamic_output is not None and self.dynamic_output.name == name else None

    def arrays(self, memory: NDArray[np.uint8]) -> dict[OutputName, Float32Array]:
        """The arrays in it, (rows, width) each."""
        found: dict[OutputName, Float32Array] = {}
        for name, place in self.by_name.items():
            found[name] = place.rows(memory)
        return found

    def token_matches_in(self, memory: NDArray[np.uint8]) -> Ragged | None:
        """The matches in it."""
        return None if self.token_matches is None else Ragged(self.token_matches.rows(memory), self.token_matches.offsets_N1)


def has_dynamic_size(output: Output) -> bool:
    """Whether the size of an output is not known before it runs."""
    return output.rows == "vocabulary"


def plan_layout(card: Card, seqs: Sequence[Seq], asks: Sequence[OutputSpec]) -> ResultLayout:
    """Set memory aside for what these seqs will give. `card` is that of their tower."""
    places: dict[OutputName, ArraySlot] = {}
    unplaced: OutputSpec | None = None
    start = 0
    for ask in asks:
        output = card.all_outputs[ask.name]
        if has_dynamic_size(output):
            unplaced = ask
            continue
        counts, ids = _count_rows(output, seqs)
        places[ask.name] = each = ArraySlot(ask, start, offsets_of(counts), ids)
        start += _aligned(each.num_bytes)
    return ResultLayout(places, start, unplaced)


def response_layout(places: ResultLayout, comparison: PairScoring | None) -> ResultLayout:
    """Return where the answer lies in a request's memory."""
    if comparison is None:
        return places
    scores = ArraySlot(OutputSpec("scores", 1, True), 0, np.arange(comparison.num_pairs + 1, dtype=np.int64), None)
    if not comparison.explain:
        return ResultLayout({"scores": scores}, scores.num_bytes)
    offsets = offsets_of(_query_lengths(places, comparison))
    matches = ArraySlot(OutputSpec("multi_vector", 2, True), _aligned(scores.num_bytes), offsets, None)
    return ResultLayout({"scores": scores}, matches.start + matches.num_bytes, token_matches=matches)


def _query_lengths(places: ResultLayout, comparison: PairScoring) -> Int64Array:
    """Return the number of token vectors of each pair's query: (P,)."""
    computed = np.diff(places.by_name["multi_vector"].offsets_N1)
    lengths_N = np.concatenate([computed, *(np.diff(given.offsets_N1) for given in comparison.stored)])
    return lengths_N[comparison.queries_P]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def estimated_bytes(places: ResultLayout) -> int:
    """Of what has no place, about: per text."""
    return _GUESSED_ENTRIES * 2 * _FLOAT_BYTES if places.dynamic_output else 0


def _count_rows(output: Output, seqs: Sequence[Seq]) -> tuple[Int64Array, Int32Array | None]:
    """Rows of each seq, and of entries which they are."""
    if output.rows in ("text", "vocabulary"):
        return np.fromiter((1 if seq.spans_S2 is None else len(seq.spans_S2) for seq in seqs), np.int64, len(seqs)), None
    ids_T, seq_T, kept_T = _tokens(output, seqs)
    if output.rows == "token":
        return np.bincount(seq_T[kept_T], minlength=len(seqs)), None
    keys = np.unique(entry_keys(seq_T[kept_T], ids_T[kept_T]))
    return np.bincount(keys >> 32, minlength=len(seqs)), (keys & 0xFFFFFFFF).astype(np.int32)


def _tokens(output: Output, seqs: Sequence[Seq]) -> tuple[Int32Array, Int64Array, NDArray[np.bool_]]:
    """The tokens of all seqs, the seq of each, and whether it gives a row."""
    ids_T = np.concatenate([seq.ids for seq in seqs]) if seqs else np.empty(0, np.int32)
    lengths = np.fromiter((seq.ids.size for seq in seqs), np.int64, len(seqs))
    is_query_B = np.fromiter((seq.is_query for seq in seqs), np.bool_, len(seqs))
    cu_seqlens = offsets_of(lengths)
    return ids_T, np.repeat(np.arange(len(seqs)), lengths), token_mask(output, ids_T, cu_seqlens, is_query_B)


def build_outputs(places: ResultLayout, arrays: Mapping[OutputName, Float32Array], entries: Sparse | None) -> Outputs:
    """The outputs of a request out of its arrays, and of `entries` if it asked for what has no place."""
    sparse = entries
    if "sparse" in places.by_name:
        sparse = _without_zeros(places.by_name["sparse"], arrays["sparse"])
    if sparse is not None and (ask := places.spec("sparse")) is not None and ask.max_entries:
        sparse = top_k_entries(sparse, ask.max_entries)
    multi_vector, token_scores, hidden, token_dense = (
        Ragged(arrays[name], places.by_name[name].offsets_N1) if name in arrays else None
        for name in ("multi_vector", "token_scores", "hidden", "token_dense")
    )
    return Outputs(
        arrays.get("dense"),
        sparse,
        multi_vector,
        arrays.get("scores"),
        token_scores,
        hidden=hidden,
        token_dense=token_dense,
    )


def top_k_entries(sparse: Sparse, max_entries: int) -> Sparse:
    """So many entries of each text, those furthest from 0; of equals, those of lower ids."""
    counts = np.diff(sparse.offsets_N1)
    if not counts.size or counts.max() <= max_entries:
        return sparse
    text_X = np.repeat(np.arange(counts.size), counts)
    order = np.lexsort((-np.abs(sparse.weights_X), text_X))  # stable, and ids ascend
    kept = np.sort(order[np.arange(text_X.size) - sparse.offsets_N1[text_X] < max_entries])
    return Sparse(sparse.ids_X[kept], sparse.weights_X[kept], offsets_of(np.minimum(counts, max_entries)))


def concat_sparse(pieces: Mapping[int, tuple[Int32Array, Float32Array]]) -> Sparse:
    """Pieces by text, from 0 on -> all of them."""
    ordered = [pieces[index] for index in range(len(pieces))]
    if not ordered:
        return Sparse(np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(1, np.int64))
    ids = np.concatenate([ids for ids, _ in ordered])
    weights = np.concatenate([weights for _, weights in ordered])
    return Sparse(ids, weights, offsets_of(np.fromiter((len(ids) for ids, _ in ordered), np.int64, len(ordered))))


def _without_zeros(place: ArraySlot, weights_P1: Float32Array) -> Sparse:
    assert place.ids_P is not None
    weights_P = weights_P1[:, 0]
    there_P = weights_P != 0
    before = offsets_of(there_P)
    return Sparse(place.ids_P[there_P], weights_P[there_P], before[place.offsets_N1])
