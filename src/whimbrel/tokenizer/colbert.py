"""Query and document markers and query expansion of late-interaction models.

Uses numpy only.

Source: lightonai/pylate, models/colbert.py, `ColBERT.tokenize`; Stanford's query_tokenization.py and doc_tokenization.py agree.
"""

from dataclasses import replace

import numpy as np

from whimbrel.tokenizer.validation import LengthBounds, TruncationLimit
from whimbrel.types.card import TextFormat
from whimbrel.types.seq import Seq


def length_bounds(form: TextFormat, least: int, most: int) -> LengthBounds:
    """Return the length bounds of texts in a format. Without it they would have `least` to `most` tokens."""
    expansion = form.expansion
    least = max(least + _marker(form), 0 if expansion is None else expansion.length)
    return LengthBounds(least, min(form.max_length, most), form.max_length if form.has_fixed_length else most)


def remaining_limit(form: TextFormat, limit: TruncationLimit) -> TruncationLimit:
    return replace(limit, max_length=limit.max_length - _marker(form), num_inserted=_marker(form))


def add_markers_and_expansion(seq: Seq, form: TextFormat, *, is_query: bool) -> Seq:
    """Insert the format's marker and expansion tokens into a seq that leaves room for them."""
    ids, expansion, num_keys = seq.ids, form.expansion, 0
    if form.marker_id is not None:
        ids = np.insert(ids, 1, form.marker_id)
    if expansion is not None and expansion.stands_for is not None:
        ids = np.where(ids == expansion.stands_for, np.int32(expansion.token_id), ids)
    if expansion is not None and ids.size < expansion.length:
        filled = np.full(expansion.length, expansion.token_id, np.int32)
        filled[: ids.size] = ids
        ids, num_keys = filled, 0 if expansion.attended else ids.size
    return replace(seq, ids=ids, num_attended=num_keys, is_query=is_query)


def _marker(form: TextFormat) -> int:
    return 0 if form.marker_id is None else 1
