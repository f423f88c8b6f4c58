"""The form that late-interaction models give to queries and documents: a marker, and tokens that fill up a query. numpy only.

Source: lightonai/pylate, models/colbert.py, `ColBERT.tokenize`; Stanford's query_tokenization.py and doc_tokenization.py agree.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whimbrel.card import Form
from whimbrel.types import Seq


def is_fixed(form: Form) -> bool:
    """Whether all texts have the same length."""
    return form.expansion is not None and form.expansion.length == form.max_length


def give_form(seq: Seq, form: Form | None, *, is_query: bool) -> Seq:
    """Put in what the form wants, into a seq that leaves room for it; None: nothing."""
    ids, num_keys = seq.ids, 0
    if form is not None and form.marker_id is not None:
        ids = np.insert(ids, 1, form.marker_id)
    if form is not None and form.expansion is not None and ids.size < form.expansion.length:
        filled = np.full(form.expansion.length, form.expansion.token_id, np.int32)
        filled[: ids.size] = ids
        ids, num_keys = filled, 0 if form.expansion.attended else ids.size
    return replace(seq, ids=ids, num_keys=num_keys, is_query=is_query)
