"""Shareable prefixes: the leading tokens of a text that belong to its prompt, or of a pair to its template and query.

The boundary is found by tokenizing what stands before a text with two fixed texts in its place. The tokens that these begin
with in common are the prefix of every text that begins with them as well. So the boundary depends on the text alone, never on
the texts beside it: its vector has the same bits in any company.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.seq import Seq

PROBES: Final = ("a", "The")
"""Texts that begin with different tokens, also after a space."""
FILLERS: Final = ("0", "1 2 3 4")
"""Texts whose last tokens differ, so a common end belongs to the template (as in sentence_transformers' transformer.py)."""
_MIN_TOKENS: Final = 16
"""Shorter prefixes are not worth the work of keeping them apart."""


def max_prefix_tokens(card: Card, plan: Plan) -> int:
    """Return the limit in tokens of a prefix of this card; 0 if its texts have none that can be computed apart."""
    return plan.max_batch_tokens if card.encoder.keeps_keys and plan.max_batch_tokens >= _MIN_TOKENS else 0


def common_start(first: Int32Array, second: Int32Array) -> int:
    """Return the number of leading tokens that two texts have in common."""
    size = min(first.size, second.size)
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size


def common_end(first: Int32Array, second: Int32Array) -> int:
    return common_start(first[::-1], second[::-1])


def probed_prefix(probes: Sequence[Int32Array]) -> Int32Array:
    """Return the tokens that the tokenized probes begin with in common."""
    first, second = probes
    return first[: common_start(first, second)]


def with_prefix(seq: Seq, prefix: Int32Array, max_tokens: int) -> Seq:
    """Return the seq with the length of its prefix: that of `prefix` as far as it begins with it. A token is left over."""
    size = min(common_start(seq.ids, prefix), seq.ids.size - 1, max_tokens)
    return replace(seq, prefix_tokens=size) if size >= _MIN_TOKENS else seq
