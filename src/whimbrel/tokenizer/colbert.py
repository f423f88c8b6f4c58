"""Query and document markers and query expansion of late-interaction models.

Uses numpy only.

Source: lightonai/pylate, models/colbert.py, `ColBERT.tokenize`; Stanford's query_tokenization.py and doc_tokenization.py agree.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whimbrel.tokenizer.truncation import LengthBounds, TruncationLimit
from whimbrel.types.card import TextFormat
from whimbrel.types.seq import Seq


def length_bounds(form: TextFormat | None, least: int, most: int) -> LengthBounds:
    """Return the length bounds of texts in a format. Texts without a format have `least` to `most` tokens."""
    if form is None:
        return LengthBounds(least, most, most)
    expansion = form.expansion
    least = max(least + _marker(form), 0 if expansion is None else expansion.length)
    is_fixed = expansion is not None and expansion.length == form.max_length
    return LengthBounds(least, min(form.max_length, most), form.max_length if is_fixed else most)


def remaining_limit(form: TextFormat | None, limit: TruncationLimit) -> TruncationLimit:
    """Return the limit less the marker of the format."""
    return limit if form is None else replace(limit, max_length=limit.max_length - _marker(form))


def add_markers_and_expansion(seq: Seq, form: TextFormat | None, *, is_query: bool) -> Seq:
    """Insert the format's marker and expansion tokens into a seq that leaves room for them. None inserts nothing."""
    ids, num_keys = seq.ids, 0
    if form is not None and form.marker_id is not None:
        ids = np.insert(ids, 1, form.marker_id)
    if form is not None and form.expansion is not None and form.expansion.stands_for is not None:
        ids = np.where(ids == form.expansion.stands_for, np.int32(form.expansion.token_id), ids)
    if form is not None and form.expansion is not None and ids.size < form.expansion.length:
        filled = np.full(form.expansion.length, form.expansion.token_id, np.int32)
        filled[: ids.size] = ids
        ids, num_keys = filled, 0 if form.expansion.attended else ids.size
    return replace(seq, ids=ids, num_attended=num_keys, is_query=is_query)


def _marker(form: TextFormat) -> int:
    return 0 if form.marker_id is None else 1
