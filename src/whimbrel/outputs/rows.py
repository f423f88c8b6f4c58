"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.card import Card, Output
from whimbrel.types.request import OutputName
from whimbrel.types.result import Sparse

if TYPE_CHECKING:
    from whimbrel.types.batch import Batch
from whimbrel.outputs.layout import ResultLayout, has_dynamic_size
from whimbrel.outputs.token_mask import entry_keys, token_mask
from whimbrel.types.arrays import offsets_of, ranges


@dataclass(frozen=True, slots=True, eq=False)
class RowSelection:
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
    activated_P: NDArray[np.bool_]
    groups_G: Int64Array | None = None
    """Of entries: where those begin that are tokens of one entry; offsets_B1 counts the entries."""
    tokens_X: Int32Array | None = None
    """Of rows over the vocabulary: their tokens, one row's after another."""
    keep_on_device: bool = False
    """Whether all who asked only compare them."""


def select_rows(card: Card, batch: Batch, asked: Sequence[ResultLayout]) -> dict[OutputName, RowSelection]:
    """What a batch is to give. `card` is that of its tower; `asked` is what the request of each of its seqs asks for."""
    found: dict[OutputName, RowSelection] = {}
    for name, output in card.all_outputs.items():
        asks = [places.spec(name) for places in asked]
        if any(asks):
            widths_B = np.fromiter((ask.width if ask else 0 for ask in asks), np.int32, len(asks))
            finished_B = np.fromiter((ask is not None and ask.activated for ask in asks), np.bool_, len(asks))
            compared = all(ask.keep_on_device for ask in asks if ask is not None)
            found[name] = _select_output_rows(output, batch, widths_B, finished_B, compared=compared)
    return found


def _select_output_rows(
    output: Output, batch: Batch, widths_B: Int32Array, finished_B: NDArray[np.bool_], *, compared: bool
) -> RowSelection:
    groups = None
    if output.rows in ("text", "vocabulary"):
        seq_P, starts_P, ends_P = _text_rows(output, batch, widths_B > 0)
        counted = seq_P
    else:
        seq_T = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), np.diff(batch.cu_seqlens))
        kept_T = token_mask(output, batch.ids_T, batch.cu_seqlens, batch.is_query_B) & (widths_B > 0)[seq_T]
        starts_P = np.flatnonzero(kept_T).astype(np.int32)
        counted = seq_T[starts_P]
        if output.rows == "entry":
            keys = entry_keys(counted, batch.ids_T[starts_P])
            order = np.argsort(keys, kind="stable")
            entries, groups = np.unique(keys[order], return_index=True)
            starts_P, counted = starts_P[order], entries >> 32
        seq_P, ends_P = seq_T[starts_P], starts_P + 1
    return RowSelection(
        offsets_B1=offsets_of(np.bincount(counted, minlength=batch.num_seqs)),
        origins_P=batch.cu_seqlens[seq_P],
        starts_P=starts_P,
        ends_P=ends_P,
        widths_P=None if ((widths_B == 0) | (widths_B == output.width)).all() else widths_B[seq_P],
        activated_P=finished_B[seq_P],
        groups_G=groups,
        tokens_X=None if output.vocabulary is None else ranges(starts_P, ends_P).astype(np.int32),
        keep_on_device=compared,
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


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Rows that stay on the device where they were computed."""

    rows_PD: Any
    """A tensor."""
    finite_P: NDArray[np.bool_]
    """Whether all of a row is finite."""


OutputRows: TypeAlias = Float32Array | Sparse | DeviceRows
"""The rows of an output of a batch, (P, width) in the order of Wanted.offsets_B1; over the whole vocabulary, what is not 0 in
each, one row for each seq that asked."""


def to_host(output: Output, wanted: RowSelection, rows_PD: Float32Array) -> OutputRows:
    """What came back from the device, as it is handed out."""
    if wanted.groups_G is not None:
        return np.maximum.reduceat(rows_PD, wanted.groups_G) if wanted.groups_G.size else rows_PD[:0]
    if not has_dynamic_size(output):
        return rows_PD
    there_PD = rows_PD != 0  # what is not finite is there too
    rows, ids = np.nonzero(there_PD)
    return Sparse(ids.astype(np.int32), rows_PD[rows, ids], offsets_of(there_PD.sum(axis=1)))


def finite_seqs(rows: OutputRows, offsets_B1: Int64Array) -> NDArray[np.bool_]:
    """Whether all that a seq was given is finite."""
    if isinstance(rows, DeviceRows):
        finite_P = rows.finite_P
    elif isinstance(rows, Sparse):
        finite_P = _all_in_ranges(np.isfinite(rows.weights_X), rows.offsets_N1)
    else:
        finite_P = np.asarray(np.isfinite(rows).all(axis=1))
    return _all_in_ranges(finite_P, offsets_B1)


def _all_in_ranges(finite_X: NDArray[np.bool_], offsets: Int64Array) -> NDArray[np.bool_]:
    bad = offsets_of(~finite_X)
    return bad[offsets[1:]] == bad[offsets[:-1]]
