"""Which rows a request gets, of which tokens they are made, and where they lie in its memory. numpy only.

How many rows a text gives is known from its ids before it runs, so that memory can be set aside: one for each text, or span of
a text; one for each token that is not skipped; one for each entry of the vocabulary that the text has. Only weights over the
whole vocabulary (SPLADE) are not known beforehand: they are handed over as they come.

Shapes: N texts of a request, B seqs and T tokens of a batch, P rows of an output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.card import Card, Output
from whimbrel.types import Float32Array, Int32Array, Int64Array, OutputName, Outputs, Prepared, Ragged, Seq, Sparse

if TYPE_CHECKING:
    from whimbrel.batch import Batch

_ALIGN: Final = 64
_FLOAT_BYTES: Final = 4
_GUESSED_ENTRIES: Final = 256
"""Entries that a text may have of the whole vocabulary, for accounts of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What a request asks of an output."""

    name: OutputName
    width: int
    """Columns, the first of what the output has."""
    finished: bool
    max_entries: int = 0
    """So many entries a text keeps, the largest; 0: all."""
    compared: bool = False
    """Of token vectors: whether they are only compared, and may stay on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the rows of one output lie in a request's memory."""

    ask: Ask
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
        return self.num_rows * self.ask.width * _FLOAT_BYTES

    def rows(self, memory: NDArray[np.uint8]) -> Float32Array:
        """The rows in it."""
        flat = memory[self.start : self.start + self.num_bytes].view(np.float32)
        return flat.reshape(self.num_rows, self.ask.width)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where everything lies that a request asks for; one array after another."""

    by_name: Mapping[OutputName, Place]
    num_bytes: int
    unplaced: Ask | None = None
    """What has no place, as its size is not known: weights over the whole vocabulary."""
    matches: Place | None = None
    """Of an answer that explains: for each pair, Outputs.matches."""

    @property
    def asks(self) -> list[Ask]:
        return [*(place.ask for place in self.by_name.values()), *([self.unplaced] if self.unplaced else [])]

    def ask(self, name: OutputName) -> Ask | None:
        """What is asked of an output, if anything."""
        place = self.by_name.get(name)
        if place is not None:
            return place.ask
        return self.unplaced if self.unplaced is not None and self.unplaced.name == name else None

    def arrays(self, memory: NDArray[np.uint8]) -> dict[OutputName, Float32Array]:
        """The arrays in it, (rows, width) each."""
        found: dict[OutputName, Float32Array] = {}
        for name, place in self.by_name.items():
            found[name] = place.rows(memory)
        return found

    def explained(self, memory: NDArray[np.uint8]) -> Ragged | None:
        """The matches in it."""
        return None if self.matches is None else Ragged(self.matches.rows(memory), self.matches.offsets_N1)


def is_unplaced(output: Output) -> bool:
    """Whether the size of an output is not known before it runs."""
    return output.rows == "vocabulary"


def place(card: Card, seqs: Sequence[Seq], asks: Sequence[Ask]) -> Places:
    """Set memory aside for what these seqs will give. `card` is that of their tower."""
    places: dict[OutputName, Place] = {}
    unplaced: Ask | None = None
    start = 0
    for ask in asks:
        output = card.all_outputs[ask.name]
        if is_unplaced(output):
            unplaced = ask
            continue
        counts, ids = _count_rows(output, seqs)
        places[ask.name] = each = Place(ask, start, _offsets(counts), ids)
        start += _aligned(each.num_bytes)
    return Places(places, start, unplaced)


def answer_places(prepared: Prepared) -> Places:
    """Where the answer lies in a request's memory."""
    if prepared.comparison is None:
        return prepared.places
    scores = Place(Ask("scores", 1, True), 0, np.arange(prepared.comparison.num_pairs + 1, dtype=np.int64), None)
    if not prepared.comparison.explain:
        return Places({"scores": scores}, scores.num_bytes)
    matches = Place(Ask("multi_vector", 2, True), _aligned(scores.num_bytes), _offsets(_query_lengths(prepared)), None)
    return Places({"scores": scores}, matches.start + matches.num_bytes, matches=matches)


def _query_lengths(prepared: Prepared) -> Int64Array:
    """How many token vectors the query of each pair has: (P,)."""
    assert prepared.comparison is not None
    computed = np.diff(prepared.places.by_name["multi_vector"].offsets_N1)
    lengths_N = np.concatenate([computed, *(np.diff(given.offsets_N1) for given in prepared.comparison.given)])
    return lengths_N[prepared.comparison.queries_P]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def guessed_bytes(places: Places) -> int:
    """Of what has no place, about: per text."""
    return _GUESSED_ENTRIES * 2 * _FLOAT_BYTES if places.unplaced else 0


def _count_rows(output: Output, seqs: Sequence[Seq]) -> tuple[Int64Array, Int32Array | None]:
    """Rows of each seq, and of entries which they are."""
    if output.rows in ("text", "vocabulary"):
        return np.fromiter((1 if seq.spans_S2 is None else len(seq.spans_S2) for seq in seqs), np.int64, len(seqs)), None
    ids_T, seq_T, kept_T = _tokens(output, seqs)
    if output.rows == "token":
        return np.bincount(seq_T[kept_T], minlength=len(seqs)), None
    keys = np.unique(_entry_keys(seq_T[kept_T], ids_T[kept_T]))
    return np.bincount(keys >> 32, minlength=len(seqs)), (keys & 0xFFFFFFFF).astype(np.int32)


def _tokens(output: Output, seqs: Sequence[Seq]) -> tuple[Int32Array, Int64Array, NDArray[np.bool_]]:
    """The tokens of all seqs, the seq of each, and whether it gives a row."""
    ids_T = np.concatenate([seq.ids for seq in seqs]) if seqs else np.empty(0, np.int32)
    lengths = np.fromiter((seq.ids.size for seq in seqs), np.int64, len(seqs))
    is_query_B = np.fromiter((seq.is_query for seq in seqs), np.bool_, len(seqs))
    cu_seqlens = _offsets(lengths)
    return ids_T, np.repeat(np.arange(len(seqs)), lengths), kept(output, ids_T, cu_seqlens, is_query_B)


def kept(
    output: Output, ids_T: Int32Array, cu_seqlens: NDArray[np.integer], is_query_B: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which tokens give a row."""
    kept_T = np.isin(ids_T, np.array(output.keep_ids, np.int32)) if output.keep_ids else np.ones(ids_T.size, np.bool_)
    if output.skip_ids:
        kept_T &= ~np.isin(ids_T, np.array(output.skip_ids, np.int32))
        if not output.skip_in_queries:
            kept_T |= np.repeat(is_query_B, np.diff(cu_seqlens))
    for leading in range(output.skip_first):
        first = cu_seqlens[:-1] + leading
        kept_T[first[first < cu_seqlens[1:]]] = False
    return kept_T


def _entry_keys(seq_X: NDArray[np.integer], ids_X: Int32Array) -> Int64Array:
    """Numbers in the order of seqs, and within one of ids."""
    return (seq_X.astype(np.int64) << 32) | ids_X


def _offsets(counts: NDArray[np.integer | np.bool_]) -> Int64Array:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The rows of one output that a batch is to give, and of which tokens."""

    offsets_B1: Int64Array
    """Rows offsets_B1[i] to offsets_B1[i + 1] are those of seq i; none if it did not ask."""
    origins_P: Int32Array
    """The first token of the row's seq,"""
    starts_P: Int32Array
    """the first that the row is made of, a prompt left out,"""
    ends_P: Int32Array
    """and the one after the last."""
    widths_P: Int32Array | None
    """Columns that are kept; None: all of them, everywhere."""
    finished_P: NDArray[np.bool_]
    groups_G: Int64Array | None = None
    """Of entries: where those begin that are tokens of one entry; offsets_B1 counts the entries."""
    tokens_X: Int32Array | None = None
    """Of rows over the vocabulary: their tokens, one row's after another."""
    compared: bool = False
    """Whether all who asked only compare them."""


def wanted(card: Card, batch: Batch, asked: Sequence[Places]) -> dict[OutputName, Wanted]:
    """What a batch is to give. `card` is that of its tower; `asked` is what the request of each of its seqs asks for."""
    found: dict[OutputName, Wanted] = {}
    for name, output in card.all_outputs.items():
        asks = [places.ask(name) for places in asked]
        if any(asks):
            widths_B = np.fromiter((ask.width if ask else 0 for ask in asks), np.int32, len(asks))
            finished_B = np.fromiter((ask is not None and ask.finished for ask in asks), np.bool_, len(asks))
            compared = all(ask.compared for ask in asks if ask is not None)
            found[name] = _wanted(output, batch, widths_B, finished_B, compared=compared)
    return found


def _wanted(output: Output, batch: Batch, widths_B: Int32Array, finished_B: NDArray[np.bool_], *, compared: bool) -> Wanted:
    groups = None
    if output.rows in ("text", "vocabulary"):
        seq_P, starts_P, ends_P = _text_rows(output, batch, widths_B > 0)
        counted = seq_P
    else:
        seq_T = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), np.diff(batch.cu_seqlens))
        kept_T = kept(output, batch.ids_T, batch.cu_seqlens, batch.is_query_B) & (widths_B > 0)[seq_T]
        starts_P = np.flatnonzero(kept_T).astype(np.int32)
        counted = seq_T[starts_P]
        if output.rows == "entry":
            keys = _entry_keys(counted, batch.ids_T[starts_P])
            order = np.argsort(keys, kind="stable")
            entries, groups = np.unique(keys[order], return_index=True)
            starts_P, counted = starts_P[order], entries >> 32
        seq_P, ends_P = seq_T[starts_P], starts_P + 1
    return Wanted(
        offsets_B1=_offsets(np.bincount(counted, minlength=batch.num_seqs)),
        origins_P=batch.cu_seqlens[seq_P],
        starts_P=starts_P,
        ends_P=ends_P,
        widths_P=None if ((widths_B == 0) | (widths_B == output.width)).all() else widths_B[seq_P],
        finished_P=finished_B[seq_P],
        groups_G=groups,
        tokens_X=None if output.vocabulary is None else ranges(starts_P, ends_P).astype(np.int32),
        compared=compared,
    )


def _text_rows(output: Output, batch: Batch, asked_B: NDArray[np.bool_]) -> tuple[Int32Array, Int32Array, Int32Array]:
    """(seq, first token, token after the last) of each row."""
    starts_B, ends_B = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    if not output.include_prompt:
        starts_B = starts_B + batch.prompt_tokens_B
    if output.padding_id is not None:
        ends_B = _ends_before_padding(batch, output.padding_id)
    if batch.spans_B is None:
        rows = np.flatnonzero(asked_B).astype(np.int32)
        return rows, starts_B[rows], ends_B[rows]
    spans_P2 = [
        np.array([[start, end]], np.int32) if spans is None else spans + origin
        for start, end, origin, spans in zip(starts_B, ends_B, batch.cu_seqlens[:-1], batch.spans_B, strict=True)
    ]
    counts = np.fromiter((len(spans) for spans in spans_P2), np.int32, len(spans_P2))
    rows = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), counts)
    flat_P2 = np.concatenate(spans_P2)[asked_B[rows]]
    return rows[asked_B[rows]], flat_P2[:, 0], flat_P2[:, 1]


def _ends_before_padding(batch: Batch, padding_id: int) -> Int32Array:
    """One after the last token of each seq that is no padding; after the first token, if all are."""
    places_T = np.where(batch.ids_T == padding_id, 0, np.arange(batch.num_tokens, dtype=np.int32))
    starts_B = batch.cu_seqlens[:-1]
    return np.maximum(np.maximum.reduceat(places_T, starts_B), starts_B) + 1


def ranges(starts: NDArray[np.integer], ends: NDArray[np.integer]) -> Int64Array:
    """The numbers of several ranges, one after another."""
    counts = ends - starts
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - before, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """Rows that stay on the device where they were computed."""

    rows_PD: Any
    """A tensor."""
    finite_P: NDArray[np.bool_]
    """Whether all of a row is finite."""


Collected: TypeAlias = Float32Array | Sparse | Resident
"""The rows of an output of a batch, (P, width) in the order of Wanted.offsets_B1; over the whole vocabulary, what is not 0 in
each, one row for each seq that asked."""


def collected(output: Output, wanted: Wanted, rows_PD: Float32Array) -> Collected:
    """What came back from the device, as it is handed out."""
    if wanted.groups_G is not None:
        return np.maximum.reduceat(rows_PD, wanted.groups_G) if wanted.groups_G.size else rows_PD[:0]
    if not is_unplaced(output):
        return rows_PD
    there_PD = rows_PD != 0  # what is not finite is there too
    rows, ids = np.nonzero(there_PD)
    return Sparse(ids.astype(np.int32), rows_PD[rows, ids], _offsets(there_PD.sum(axis=1)))


def finite_seqs(rows: Collected, offsets_B1: Int64Array) -> NDArray[np.bool_]:
    """Whether all that a seq was given is finite."""
    if isinstance(rows, Resident):
        finite_P = rows.finite_P
    elif isinstance(rows, Sparse):
        finite_P = _all_in_ranges(np.isfinite(rows.weights_X), rows.offsets_N1)
    else:
        finite_P = np.asarray(np.isfinite(rows).all(axis=1))
    return _all_in_ranges(finite_P, offsets_B1)


def _all_in_ranges(finite_X: NDArray[np.bool_], offsets: Int64Array) -> NDArray[np.bool_]:
    bad = _offsets(~finite_X)
    return bad[offsets[1:]] == bad[offsets[:-1]]


def assemble(places: Places, arrays: Mapping[OutputName, Float32Array], entries: Sparse | None) -> Outputs:
    """The outputs of a request out of its arrays, and of `entries` if it asked for what has no place."""
    sparse = entries
    if "sparse" in places.by_name:
        sparse = _without_zeros(places.by_name["sparse"], arrays["sparse"])
    if sparse is not None and (ask := places.ask("sparse")) is not None and ask.max_entries:
        sparse = largest(sparse, ask.max_entries)
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


def largest(sparse: Sparse, max_entries: int) -> Sparse:
    """So many entries of each text, those furthest from 0; of equals, those of lower ids."""
    counts = np.diff(sparse.offsets_N1)
    if not counts.size or counts.max() <= max_entries:
        return sparse
    text_X = np.repeat(np.arange(counts.size), counts)
    order = np.lexsort((-np.abs(sparse.weights_X), text_X))  # stable, and ids ascend
    kept = np.sort(order[np.arange(text_X.size) - sparse.offsets_N1[text_X] < max_entries])
    return Sparse(sparse.ids_X[kept], sparse.weights_X[kept], _offsets(np.minimum(counts, max_entries)))


def joined(pieces: Mapping[int, tuple[Int32Array, Float32Array]]) -> Sparse:
    """Pieces by text, from 0 on -> all of them."""
    ordered = [pieces[index] for index in range(len(pieces))]
    if not ordered:
        return Sparse(np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(1, np.int64))
    ids = np.concatenate([ids for ids, _ in ordered])
    weights = np.concatenate([weights for _, weights in ordered])
    return Sparse(ids, weights, _offsets(np.fromiter((len(ids) for ids, _ in ordered), np.int64, len(ordered))))


def _without_zeros(place: Place, weights_P1: Float32Array) -> Sparse:
    assert place.ids_P is not None
    weights_P = weights_P1[:, 0]
    there_P = weights_P != 0
    before = _offsets(there_P)
    return Sparse(place.ids_P[there_P], weights_P[there_P], before[place.offsets_N1])
