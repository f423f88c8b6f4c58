"""Computation of a shard: its rows become a table, the same for the same rows, model and options.

Equal texts run once. Texts run by length, the longest first, in requests that several threads send.
"""

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np

from whimbrel.bulk.arrow import Array, Schema, Table, pa
from whimbrel.bulk.chunks import Chunking, chunk_spans
from whimbrel.bulk.columns import NumberType, gather, output_fields, too_large, widths_of
from whimbrel.bulk.embedder import Answer, Embedder, RequestSizes, answer_all
from whimbrel.bulk.manifest import Manifest, Text
from whimbrel.bulk.rows import Fault, ShardRows
from whimbrel.errors import SetupError
from whimbrel.types.arrays import Int64Array

CHUNK_FIELDS = (pa.field("chunk", pa.int32()), pa.field("start", pa.int32()), pa.field("end", pa.int32()))
CUT_FIELD = pa.field("cut", pa.bool_())
ROW_FIELDS = (pa.field("file", pa.string()), pa.field("row", pa.int64()))
"""Columns that name a row if it has no id."""

Advance = Callable[[float, int], None]
"""Called with rows and tokens as they are computed."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """Columns of the output."""

    copied: Schema
    has_id: bool
    widths: dict[str, int]
    dtype: NumberType
    chunking: Chunking | None

    @property
    def schema(self) -> Schema:
        own = [] if self.has_id else list(ROW_FIELDS)
        chunks = [] if self.chunking is None else list(CHUNK_FIELDS)
        return pa.schema([*own, *self.copied, *chunks, CUT_FIELD, *output_fields(self.widths, self.dtype)])

    @property
    def vectors(self) -> tuple[str, ...]:
        return tuple(self.widths)


def form_of(manifest: Manifest) -> TableForm:
    """Return the columns of the output of a run."""
    copied = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(manifest.schema)))
    widths = {name: width for name, width in manifest.outputs.items() if name != "labels"}
    options, chunk = manifest.options, manifest.options["chunk"]
    chunking = None if chunk is None else Chunking(*chunk)
    return TableForm(copied, options["id"] is not None, widths, options["dtype_out"], chunking)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """The result of a shard."""

    table: Table
    faults: list[Fault]
    """Refused rows, in their order."""
    num_done: int
    num_cut: int


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Texts to run: those of rows, or of their chunks."""

    row_P: Int64Array
    """Index of the row of each."""
    texts: list[Text]
    spans_P3: Int64Array | None = None
    """Number of each chunk in its text, its first character and the one after its last."""
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Reasons of rows whose text cannot be split."""


Answers = tuple[list[tuple[list[int], Answer]], dict[int, str]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingShard:
    """A shard whose requests run."""

    rows: ShardRows
    form: TableForm
    parts: _Parts
    text_P: Int64Array
    """Index of the distinct text of each part."""
    futures: list[tuple[list[int], Future[Answers]]]
    """Requests, with the indices of their distinct texts."""

    def result(self) -> ShardTable:
        """Wait for the answers and return the table. Raises WhimbrelError."""
        answers, refused = list[tuple[list[int], Answer]](), dict[int, str]()
        for indices, future in self.futures:
            found, bad = future.result()
            answers += [([indices[item] for item in items], answer) for items, answer in found]
            refused |= {indices[item]: reason for item, reason in bad.items()}
        for items, answer in answers:
            if (widths := widths_of(answer.outputs)) != self.form.widths:
                raise SetupError(f"the model gave outputs of other widths than at the start: {widths}, not {self.form.widths}.")
            over_N = too_large(answer.outputs, self.form.dtype)
            if over_N is not None:
                refused |= {items[item]: f"{self.form.dtype} does not hold its numbers" for item in np.flatnonzero(over_N)}
        return self._table(answers, refused)

    def _table(self, answers: list[tuple[list[int], Answer]], refused: dict[int, str]) -> ShardTable:
        rows, parts = self.rows, self.parts
        bad = dict(parts.refused)
        for part in np.flatnonzero(np.isin(self.text_P, np.fromiter(refused, np.int64, len(refused)))).tolist():
            bad.setdefault(int(parts.row_P[part]), refused[int(self.text_P[part])])
        good_P = ~np.isin(parts.row_P, np.fromiter(bad, np.int64, len(bad)))
        row_P, text_P = parts.row_P[good_P], self.text_P[good_P]
        cut_texts = [items[item] for items, answer in answers for item in np.flatnonzero(answer.cut_N)]
        cut_P = np.isin(text_P, np.array(cut_texts, np.int64))
        columns: list[Array] = []
        if not self.form.has_id:
            columns += [pa.array([rows.path] * row_P.size, pa.string()), pa.array(rows.row_N[row_P])]
        columns += rows.copied.take(pa.array(row_P)).columns
        if parts.spans_P3 is not None:
            columns += [pa.array(column, pa.int32()) for column in parts.spans_P3[good_P].T]
        columns.append(pa.array(cut_P))
        given = [(items, answer.outputs) for items, answer in answers]
        columns += gather(given, text_P, output_fields(self.form.widths, self.form.dtype))
        faults = sorted([*rows.faults, *(Fault(int(rows.row_N[row]), reason) for row, reason in bad.items())])
        table = pa.Table.from_arrays(columns, schema=self.form.schema)
        return ShardTable(table, faults, np.unique(row_P).size, np.unique(row_P[cut_P]).size)


def begin(rows: ShardRows, form: TableForm, embedder: Embedder, threads: Executor, advance: Advance) -> PendingShard:
    """Send the requests of a shard, as threads become free."""
    parts = _split(rows, embedder, form.chunking)
    numbers: dict[Text, int] = {}
    text_P = np.fromiter((numbers.setdefault(text, len(numbers)) for text in parts.texts), np.int64, len(parts.texts))
    texts, times_U = list(numbers), np.bincount(text_P, minlength=len(numbers))
    num_chunks_R = np.bincount(parts.row_P, minlength=len(rows.texts))
    share_U = np.bincount(text_P, 1 / num_chunks_R[parts.row_P], len(numbers)) if numbers else times_U
    futures: list[tuple[list[int], Future[Answers]]] = []
    for indices in _requests(texts, embedder.sizes):
        share = float(share_U[indices].sum())
        futures.append((indices, threads.submit(_answer, embedder, [texts[index] for index in indices], share, advance)))
    advance(rows.shard.stop - rows.shard.start - len(rows.texts) + len(parts.refused), 0)
    return PendingShard(rows, form, parts, text_P, futures)


def _answer(embedder: Embedder, texts: Sequence[Text], share: float, advance: Advance) -> Answers:
    answers, refused = answer_all(embedder.run, texts)
    advance(share, sum(answer.num_tokens for _, answer in answers))
    return answers, refused


def _split(rows: ShardRows, embedder: Embedder, chunking: Chunking | None) -> _Parts:
    if chunking is None:
        return _Parts(np.arange(len(rows.texts)), rows.texts)
    whole = [text for text in rows.texts if isinstance(text, str)]  # all: a pair is never split
    distinct = list(dict.fromkeys(whole))
    spans_of, reasons = dict[str, list[tuple[int, int]]](), dict[str, str]()
    for indices in _requests(distinct, embedder.sizes):
        texts = [distinct[index] for index in indices]
        found, bad = answer_all(embedder.token_offsets, texts)
        reasons |= {texts[item]: reason for item, reason in bad.items()}
        for items, chars in found:
            for item, chars_T2 in zip(items, chars, strict=True):
                spans_of[texts[item]] = chunk_spans(texts[item], chars_T2, chunking)
    refused = {row: reasons[text] for row, text in enumerate(whole) if text in reasons}
    chunks = [
        (row, text[start:end], number, start, end)
        for row, text in enumerate(whole)
        for number, (start, end) in enumerate(spans_of.get(text, ()))
    ]
    spans_P3 = np.array([chunk[2:] for chunk in chunks], np.int64).reshape(-1, 3)
    return _Parts(
        np.array([chunk[0] for chunk in chunks], np.int64), list[Text](chunk[1] for chunk in chunks), spans_P3, refused
    )


def _requests(texts: Sequence[Text], sizes: RequestSizes) -> list[list[int]]:
    """Return the texts of each request, the longest first."""
    found, characters = list[list[int]](), 0
    lengths = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts]
    for index in sorted(range(len(texts)), key=lambda index: -lengths[index]):
        size = lengths[index]
        if not found or len(found[-1]) >= sizes.texts or characters + size > sizes.characters:
            found.append([])
            characters = 0
        found[-1].append(index)
        characters += size
    return found
