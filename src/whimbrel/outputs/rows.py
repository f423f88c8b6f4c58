"""Row selection: the token ranges of a batch that are pooled to rows, and the rows that come back. numpy only.

Shapes: B seqs and T tokens of a batch, P rows of an output, G entries, X tokens of rows over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from whimbrel.outputs.entities import count_marks, num_span_rows
from whimbrel.outputs.layout import ResultLayout, entry_keys, token_mask
from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.arrays import Float32Array, Int32Array, Int64Array
from whimbrel.types.batch import Batch, lengths_of, offsets_of, ranges
from whimbrel.types.card import Card, Output
from whimbrel.types.request import OutputName
from whimbrel.types.result import Sparse


@dataclass(frozen=True, slots=True, eq=False)
class RowSelection:
    """The rows of one output that a batch gives, as ranges of its tokens."""

    offsets_B1: Int64Array
    """Rows offsets_B1[i] to offsets_B1[i + 1] belong to seq i; none if its request does not ask for the output."""
    origins_P: Int32Array
    """The first token of each row's seq."""
    starts_P: Int32Array
    ends_P: Int32Array
    """One after the last token that is pooled to each row."""
    widths_P: Int32Array | None
    """The leading columns of each row that are kept; None if every row keeps all."""
    activated_P: NDArray[np.bool_]
    groups_G: Int64Array | None = None
    """The first row of each vocabulary entry, of an output with a row per entry; offsets_B1 then counts entries."""
    tokens_X: Int32Array | None = None
    """The tokens of rows over the vocabulary, one row after another."""
    keep_on_device: bool = False
    """True if all requests only score these rows, so that they need not be copied to the host."""
    marks_B2: list[tuple[int, int]] | None = None
    """Labels and words of each seq, of an output over spans: origins_P to ends_P are then of their tokens, and not of rows."""
    with_logits: bool = False
    """True if a request asks for the logits of its scores."""

    def num_columns(self, output: Output) -> int:
        """Return the number of columns of each row."""
        return 2 * output.width if self.with_logits else output.width


def select_rows(card: Card, batch: Batch, layouts: Sequence[ResultLayout]) -> dict[OutputName, RowSelection]:
    """Return the rows that a batch gives. `card` is that of its tower; layouts[i] is that of the request of seq i."""
    selections: dict[OutputName, RowSelection] = {}
    for name, output in card.all_outputs.items():
        specs = [layout.spec(name) for layout in layouts]
        if any(specs):
            selections[name] = _select_output_rows(output, batch, specs)
    return selections


def _select_output_rows(output: Output, batch: Batch, specs_B: Sequence[OutputSpec | None]) -> RowSelection:
    """Return the rows of one output. A spec is None for a seq whose request does not ask for it."""
    specs = [spec for spec in specs_B if spec is not None]
    widths_B = np.fromiter((spec.width if spec else 0 for spec in specs_B), np.int32, len(specs_B))
    activated_B = np.fromiter((spec is not None and spec.activated for spec in specs_B), np.bool_, len(specs_B))
    groups = None
    if output.rows == "span":
        return _span_rows(output, batch, widths_B > 0, activated_B)
    if output.rows in ("text", "vocabulary"):
        seq_P, starts_P, ends_P = _text_rows(output, batch, widths_B > 0)
        counted = seq_P
    else:
        seq_T = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), lengths_of(batch.cu_seqlens))
        mask_T = token_mask(output, batch.ids_T, batch.cu_seqlens, batch.is_query_B) & (widths_B > 0)[seq_T]
        starts_P = np.flatnonzero(mask_T).astype(np.int32)
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
        widths_P=None if all(spec.width == output.width for spec in specs) else widths_B[seq_P],
        activated_P=activated_B[seq_P],
        groups_G=groups,
        tokens_X=None if output.vocabulary is None else ranges(starts_P, ends_P).astype(np.int32),
        keep_on_device=all(spec.keep_on_device for spec in specs),
        with_logits=any(spec.with_logits for spec in specs),
    )


def _span_rows(output: Output, batch: Batch, requested_B: NDArray[np.bool_], activated_B: NDArray[np.bool_]) -> RowSelection:
    """Return the rows of spans, and the tokens of the labels and words from which they are computed."""
    none, seqs = np.empty((0, 2), np.int32), zip(batch.spans_B or [None] * batch.num_seqs, requested_B, strict=True)
    spans_B = [none if spans is None or not requested else spans for spans, requested in seqs]
    marks = [count_marks(spans, prompt) for spans, prompt in zip(spans_B, batch.prompt_tokens_B.tolist(), strict=True)]
    seq_P = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), [len(spans) for spans in spans_B])
    origins_P = batch.cu_seqlens[seq_P]
    spans_P2 = np.concatenate([none, *spans_B]) + origins_P[:, None]
    return RowSelection(
        offsets_B1=offsets_of(np.fromiter((num_span_rows(output, *each) for each in marks), np.int64, len(marks))),
        origins_P=origins_P,
        starts_P=np.ascontiguousarray(spans_P2[:, 0]),
        ends_P=np.ascontiguousarray(spans_P2[:, 1]),
        widths_P=None,
        activated_P=activated_B[seq_P],
        marks_B2=marks,
    )


def _text_rows(output: Output, batch: Batch, requested_B: NDArray[np.bool_]) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return (seq, first token, one after the last token) of each row."""
    starts_B, ends_B = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    if not output.include_prompt:
        starts_B = starts_B + batch.prompt_tokens_B
    if output.padding_id is not None:
        index_T = np.where(batch.ids_T == output.padding_id, 0, np.arange(batch.num_tokens, dtype=np.int32))
        ends_B = np.maximum(np.maximum.reduceat(index_T, batch.cu_seqlens[:-1]), batch.cu_seqlens[:-1]) + 1
    if batch.spans_B is None:
        rows = requested_B.nonzero()[0].astype(np.int32)
        return rows, starts_B[rows], ends_B[rows]
    spans_P2 = [
        np.array([[start, end]], np.int32) if spans is None else spans + origin
        for start, end, origin, spans in zip(starts_B, ends_B, batch.cu_seqlens[:-1], batch.spans_B, strict=True)
    ]
    counts = np.fromiter((len(spans) for spans in spans_P2), np.int32, len(spans_P2))
    rows = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), counts)
    flat_P2 = np.concatenate(spans_P2)[requested_B[rows]]
    return rows[requested_B[rows]], flat_P2[:, 0], flat_P2[:, 1]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    rows_PD: Any
    finite_P: NDArray[np.bool_]
    """True if all numbers of each row are finite."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """Rows on the host that were checked on the device, where it costs a fraction of the time."""

    rows_PD: Float32Array
    finite_P: NDArray[np.bool_]
    """True if all numbers of each row are finite."""


OutputRows: TypeAlias = Float32Array | Sparse | DeviceRows | CheckedRows
"""The rows of one output of a batch: (P, width), in the order of `RowSelection.offsets_B1`; of the whole vocabulary its nonzero
entries, a row for each seq whose request asks for it."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutput:
    """The rows that one batch gave, by output."""

    selections: Mapping[OutputName, RowSelection]
    rows: Mapping[OutputName, OutputRows]

    def unchecked(self) -> BatchOutput:
        """Return the output with plain arrays in place of checked rows."""
        rows: dict[OutputName, OutputRows] = {
            name: each.rows_PD if isinstance(each, CheckedRows) else each for name, each in self.rows.items()
        }
        return BatchOutput(self.selections, rows)


def to_host(output: Output, selection: RowSelection, rows_PD: Float32Array) -> OutputRows:
    """Return rows that were copied from the device in the form that is handed out."""
    if selection.groups_G is not None:
        return np.maximum.reduceat(rows_PD, selection.groups_G) if selection.groups_G.size else rows_PD[:0]
    if output.rows != "vocabulary":
        return rows_PD
    mask_PD = rows_PD != 0  # NaN and infinity are kept too
    rows, ids = np.nonzero(mask_PD)
    return Sparse(ids.astype(np.int32), rows_PD[rows, ids], offsets_of(mask_PD.sum(axis=1)))


def finite_seqs(rows: OutputRows, offsets_B1: Int64Array) -> NDArray[np.bool_]:
    """Return whether all rows of each seq are finite: (B,)."""
    if isinstance(rows, DeviceRows | CheckedRows):
        finite_P = rows.finite_P
    elif isinstance(rows, Sparse):
        finite_P = _all_in_ranges(np.isfinite(rows.weights_X), rows.offsets_N1)
    elif (finite_PD := np.isfinite(rows)).all():
        finite_P = finite_PD[:, 0]
    else:
        finite_P = np.asarray(finite_PD.all(axis=1))
    return _all_in_ranges(finite_P, offsets_B1)


def _all_in_ranges(finite_X: NDArray[np.bool_], offsets: Int64Array) -> NDArray[np.bool_]:
    if finite_X.all():
        return np.ones(offsets.size - 1, np.bool_)
    bad = offsets_of(~finite_X)
    return bad[offsets[1:]] == bad[offsets[:-1]]
