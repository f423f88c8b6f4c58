"""Result layouts: where the rows of each output of a request lie in one block of memory. numpy only.

A layout is planned once, from the seqs, when a request is tokenized. It travels with the request: the lanes scatter rows by it
and the worker reads the response by it. Weights over the whole vocabulary have no fixed size; a layout only names them.

Shapes: N texts of a request, P rows of an output, X entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.outputs.entities import count_marks, num_span_rows
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.card import Card, Output
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Sparse
from whimbrel.types.seq import Seq

_ALIGN: Final = 64
_FLOAT_BYTES: Final = 4
_RAGGED: Final = ("multi_vector", "token_scores", "hidden", "token_dense", "token_matches")
ESTIMATED_BYTES: Final = 256 * 2 * _FLOAT_BYTES
"""Estimated bytes per text of an output over the whole vocabulary, for accounts of memory: 256 entries and weights."""


@dataclass(frozen=True, slots=True, eq=False)
class ArraySlot:
    """The place of one output's rows in a request's memory."""

    spec: OutputSpec
    start: int
    """Offset of the first row, in bytes."""
    offsets_N1: Int64Array
    """Rows offsets_N1[i] to offsets_N1[i + 1] belong to text i."""
    ids_P: Int32Array | None
    """The vocabulary id of each row, of an output with a row per entry."""

    @property
    def num_rows(self) -> int:
        return int(self.offsets_N1[-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.spec.num_columns * _FLOAT_BYTES

    def rows(self, memory: NDArray[np.uint8]) -> Float32Array:
        flat = memory[self.start : self.start + self.num_bytes].view(np.float32)
        return flat.reshape(self.num_rows, self.spec.num_columns)


@dataclass(frozen=True, slots=True, eq=False)
class ResultLayout:
    """The slots of all outputs of a request, one after another."""

    by_name: Mapping[str, ArraySlot]
    """Slots by output; and that of `Outputs.token_matches`, of a response with an explanation."""
    num_bytes: int
    dynamic_output: OutputSpec | None = None
    """The output whose size is known only after it was computed (weights over the whole vocabulary), so it has no slot."""

    @property
    def specs(self) -> list[OutputSpec]:
        return [*(place.spec for place in self.by_name.values()), *([self.dynamic_output] if self.dynamic_output else [])]

    def spec(self, name: OutputName) -> OutputSpec | None:
        place = self.by_name.get(name)
        if place is not None:
            return place.spec
        return self.dynamic_output if self.dynamic_output is not None and self.dynamic_output.name == name else None

    def arrays(self, memory: NDArray[np.uint8]) -> dict[str, Float32Array]:
        return {name: slot.rows(memory) for name, slot in self.by_name.items()}


def plan_layout(card: Card, seqs: Sequence[Seq], specs: Sequence[OutputSpec]) -> ResultLayout:
    """Plan the layout of the rows that these seqs give. `card` is that of their tower."""
    slots: dict[str, ArraySlot] = {}
    dynamic: OutputSpec | None = None
    start = 0
    for spec in specs:
        output = card.all_outputs[spec.name]
        if output.rows == "vocabulary":
            dynamic = spec
            continue
        counts, ids = _count_rows(output, seqs)
        slots[spec.name] = slot = ArraySlot(spec, start, offsets_of(counts), ids)
        start += _aligned(slot.num_bytes)
    return ResultLayout(slots, start, dynamic)


def scores_layout(rows: ResultLayout, pairs: PairScoring) -> ResultLayout:
    """Return the layout of the scores of pairs, which are computed from `rows`; and of their token matches if explained."""
    scores = ArraySlot(OutputSpec("scores", 1, True), 0, np.arange(pairs.num_pairs + 1, dtype=np.int64), None)
    if not pairs.explain:
        return ResultLayout({"scores": scores}, scores.num_bytes)
    computed = np.diff(rows.by_name["multi_vector"].offsets_N1)
    lengths_N = np.concatenate([computed, *(np.diff(stored.offsets_N1) for stored in pairs.stored)])
    offsets = offsets_of(lengths_N[pairs.queries_P])
    matches = ArraySlot(OutputSpec("multi_vector", 2, True), _aligned(scores.num_bytes), offsets, None)
    return ResultLayout({"scores": scores, "token_matches": matches}, matches.start + matches.num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _count_rows(output: Output, seqs: Sequence[Seq]) -> tuple[Int64Array, Int32Array | None]:
    """Return the number of rows of each seq, and the vocabulary ids of an output with a row per entry."""
    if output.rows in ("text", "vocabulary"):
        return np.fromiter((1 if seq.spans_S2 is None else len(seq.spans_S2) for seq in seqs), np.int64, len(seqs)), None
    if output.rows == "span":
        marked = (count_marks(seq.spans_S2, seq.prompt_tokens) for seq in seqs)
        return np.fromiter((num_span_rows(output, *each) for each in marked), np.int64, len(seqs)), None
    ids_T = np.concatenate([seq.ids for seq in seqs]) if seqs else np.empty(0, np.int32)
    lengths = np.fromiter((seq.ids.size for seq in seqs), np.int64, len(seqs))
    is_query_B = np.fromiter((seq.is_query for seq in seqs), np.bool_, len(seqs))
    mask_T = token_mask(output, ids_T, offsets_of(lengths), is_query_B)
    seq_P = np.repeat(np.arange(len(seqs)), lengths)[mask_T]
    if output.rows == "token":
        return np.bincount(seq_P, minlength=len(seqs)), None
    keys = np.unique(entry_keys(seq_P, ids_T[mask_T]))
    return np.bincount(keys >> 32, minlength=len(seqs)), (keys & 0xFFFFFFFF).astype(np.int32)


def build_outputs(layout: ResultLayout, memory: NDArray[np.uint8], entries: Sparse | None) -> Outputs:
    """Return the outputs of a request as views of its memory, and `entries` for the output that has no slot."""
    arrays = layout.arrays(memory)
    outputs: dict[str, Any] = {
        name: Ragged(array, layout.by_name[name].offsets_N1) if name in _RAGGED else array for name, array in arrays.items()
    }
    if "sparse" in arrays:
        slot, weights_P = layout.by_name["sparse"], arrays["sparse"][:, 0]
        assert slot.ids_P is not None
        mask_P = weights_P != 0
        entries = Sparse(slot.ids_P[mask_P], weights_P[mask_P], offsets_of(mask_P)[slot.offsets_N1])
    if entries is not None and (spec := layout.spec("sparse")) is not None and spec.max_entries:
        entries = top_k_entries(entries, spec.max_entries)
    if "scores" in arrays and layout.by_name["scores"].spec.with_logits:
        outputs["scores"], outputs["logits"] = map(np.ascontiguousarray, np.split(arrays["scores"], 2, axis=1))
    outputs["sparse"] = entries
    return Outputs(**outputs)


def top_k_entries(sparse: Sparse, max_entries: int) -> Sparse:
    """Keep the `max_entries` entries of each text that are furthest from 0; among equals, those with lower ids."""
    counts = np.diff(sparse.offsets_N1)
    if not counts.size or counts.max() <= max_entries:
        return sparse
    text_X = np.repeat(np.arange(counts.size), counts)
    order = np.lexsort((-np.abs(sparse.weights_X), text_X))  # stable, and ids ascend
    kept = np.sort(order[np.arange(text_X.size) - sparse.offsets_N1[text_X] < max_entries])
    return Sparse(sparse.ids_X[kept], sparse.weights_X[kept], offsets_of(np.minimum(counts, max_entries)))


def concat_sparse(rows: Mapping[int, tuple[Int32Array, Float32Array]]) -> Sparse:
    ordered = [rows[index] for index in range(len(rows))]
    if not ordered:
        return Sparse(np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(1, np.int64))
    ids = np.concatenate([ids for ids, _ in ordered])
    weights = np.concatenate([weights for _, weights in ordered])
    return Sparse(ids, weights, offsets_of(np.fromiter((len(ids) for ids, _ in ordered), np.int64, len(ordered))))


def token_mask(
    output: Output, ids_T: Int32Array, cu_seqlens: NDArray[np.integer], is_query_B: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return whether each token gives a row of `output`: (T,). Queries may have skipped and kept ids of their own."""
    mask_T = _is_chosen(ids_T, output.skip_ids, output.keep_ids)
    query_skip_ids = output.skip_ids if output.query_skip_ids is None else output.query_skip_ids
    query_keep_ids = output.keep_ids if output.keep_in_queries else ()
    if (query_skip_ids, query_keep_ids) != (output.skip_ids, output.keep_ids):
        is_query_T = np.repeat(is_query_B, np.diff(cu_seqlens))
        mask_T[is_query_T] = _is_chosen(ids_T[is_query_T], query_skip_ids, query_keep_ids)
    if output.frame_ids:
        starts, lasts = cu_seqlens[:-1], cu_seqlens[1:] - 1
        ends = np.concatenate((starts, lasts))[np.tile(starts <= lasts, 2)]
        mask_T[ends[np.isin(ids_T[ends], np.array(output.frame_ids, np.int32))]] = False
    for leading in range(output.skip_first):
        first = cu_seqlens[:-1] + leading
        mask_T[first[first < cu_seqlens[1:]]] = False
    return mask_T


def _is_chosen(ids_X: Int32Array, skip_ids: tuple[int, ...], keep_ids: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return whether each token is none of `skip_ids`, and one of `keep_ids` if there are any: (X,)."""
    mask_X = np.isin(ids_X, np.array(keep_ids, np.int32)) if keep_ids else np.ones(ids_X.size, np.bool_)
    if skip_ids:
        mask_X &= ~np.isin(ids_X, np.array(skip_ids, np.int32))
    return mask_X


def entry_keys(seq_X: NDArray[np.integer], ids_X: Int32Array) -> Int64Array:
    """Return sort keys of (seq, token id): ordered by seq, then by id: (X,)."""
    return (seq_X.astype(np.int64) << 32) | ids_X
