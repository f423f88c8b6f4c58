"""Encoding and truncation of text pairs.

A post-processor puts the same tokens before, between and after any two texts. A few probe pairs at load time show which, and a
tokenizer that does otherwise takes no pairs. So each text is tokenised once, however many pairs it is in. A pair that exceeds
the limit is truncated here. Source: TruncationStrategy::LongestFirst in tokenizers/src/utils/truncation.rs (0.22).

The limits per side, `max_query_tokens` and `max_document_tokens`, apply before anything surrounds the texts (vLLM, Cohere).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import tokenizers

from whimbrel.errors import InvalidRequest, TooLong
from whimbrel.tokenizer.backend import BackendTokenizer
from whimbrel.tokenizer.validation import Index, TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.seq import Seq

_PROBES: Final = (("a", "b"), ("the quick brown fox", "jumps over 2 dogs"), ("b", "a a a"))


@dataclass(frozen=True, slots=True, eq=False)
class PairTemplate:
    before: Int32Array
    between: Int32Array
    after: Int32Array
    type_id: int
    shift: int | None
    """Tokens from the end of the first text to the first token of the next type, or None without one."""

    @property
    def num_special(self) -> int:
        return self.before.size + self.between.size + self.after.size

    def seq(self, texts: Sequence[Int32Array], index: int, limit: TruncationLimit, *, only_first: bool = False) -> Seq:
        """Return the seq of two texts, truncated to the limit: the longer one first, or `only_first`. Raises TooLong."""
        first, second = texts
        num_tokens = self.num_special + first.size + second.size
        if num_tokens == 0:
            raise InvalidRequest("the pair has no tokens.", item=index)
        if truncated := limit.exceeded(num_tokens, "pair", index):
            room = limit.max_length - self.num_special
            if only_first and second.size >= room:
                reason = f"which leaves none of {limit.max_length:,} for the text"
                raise TooLong(f"its hypothesis has {second.size:,} tokens, {reason}. Shorten it.", item=index, part=1)
            num_first, num_second = cut_pair(first.size, second.size, room)
            if only_first:
                num_first, num_second = room - second.size, second.size
            first, second = limit.cut(first, num_first), limit.cut(second, num_second)
        ids = np.concatenate((self.before, first, self.between, second, self.after))
        next_type = 0 if self.shift is None else self.before.size + first.size + self.shift
        return Seq(ids, index, 0, self.type_id, next_type, truncated=truncated)


def find_template(tokenizer: tokenizers.Tokenizer, num_types: int) -> PairTemplate | None:
    """Return the tokens around a pair, or None if they depend on the texts. The model has `num_types` token types."""
    templates = {_split_pair(tokenizer, *probe) for probe in _PROBES}
    template = templates.pop()
    if template is None or templates:
        return None
    special, type_id, shift = template
    if num_types <= 1:
        type_id, shift = 0, None
    elif type_id + (shift is not None) >= num_types:
        return None
    before, between, after = (np.array(ids, np.int32) for ids in special)
    return PairTemplate(before, between, after, type_id, shift)


def _split_pair(
    tokenizer: tokenizers.Tokenizer, first: str, second: str
) -> tuple[tuple[tuple[int, ...], ...], int, int | None] | None:
    """Return ((before, between, after), type of the first, shift) of one pair, or None if its texts are not kept whole."""
    bodies = [tokenizer.encode(text, add_special_tokens=False).ids for text in (first, second)]
    encoding = tokenizer.encode(first, second)
    ids, sides = encoding.ids, encoding.sequence_ids
    if 0 not in sides or 1 not in sides:
        return None
    starts = [sides.index(number) for number in (0, 1)]
    ends = [start + len(body) for start, body in zip(starts, bodies, strict=True)]
    if any(ids[start:end] != body for start, end, body in zip(starts, ends, bodies, strict=True)) or starts[1] < ends[0]:
        return None
    types = encoding.type_ids
    change = next((i for i, number in enumerate(types) if number != types[0]), None)
    if change is not None and not (ends[0] <= change <= starts[1] and types[change:] == [types[0] + 1] * (len(types) - change)):
        return None
    shift = None if change is None else change - ends[0]
    return (tuple(ids[: starts[0]]), tuple(ids[ends[0] : starts[1]]), tuple(ids[ends[1] :])), types[0], shift


def cut_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the number of tokens that each text keeps, at most `room` together. The longer text is cut first.

    Two texts that exceed half of `room` share it. An odd token goes to the longer one, or to the second of equal ones.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


@dataclass(frozen=True, slots=True, eq=False)
class SideCuts:
    """The distinct queries and documents that their own limits cut, and what was left of them."""

    num_texts: int = 0
    shortened: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def count(self, texts: Sequence[tuple[str, int]], seqs: Sequence[Seq]) -> int:
        """Return the number of texts that were cut, here or as seqs. `texts` are those of the seqs, each with its part."""
        cut_later = (text not in self.shortened[part] for (text, part), seq in zip(texts, seqs, strict=True) if seq.truncated)
        return self.num_texts + sum(cut_later)


def truncate_sides(
    pairs: Sequence[object], limits: Mapping[str, int | None], backends: Sequence[BackendTokenizer]
) -> tuple[list[tuple[Any, Any]], SideCuts]:
    """Return pairs with their queries and documents cut to the limits of these, and the cuts.

    `limits` has the name and the limit of either side, `backends` the tokenizer of either. Vectors that stand for a text are
    kept. Raises InvalidRequest and TooLarge.
    """
    params = [name for name, limit in limits.items() if limit is not None]
    if not all(isinstance(pair, tuple) and len(cast("tuple[Any, ...]", pair)) == 2 for pair in pairs):
        raise InvalidRequest("is for pairs of a query and a document.", param=params[0])
    sides: list[list[Any]] = [[cast("tuple[Any, Any]", pair)[part] for pair in pairs] for part in (0, 1)]
    shortened: list[dict[str, str]] = [{}, {}]
    for part, (limit, backend) in enumerate(zip(limits.values(), backends, strict=True)):
        if limit is not None:
            shortened[part] = _shorten(sides[part], limit, part, backend)
            sides[part] = [shortened[part].get(text, text) if isinstance(text, str) else text for text in sides[part]]
    queries, documents = (frozenset(each.values()) for each in shortened)
    cuts = SideCuts(sum(map(len, shortened)), (queries, documents))
    return list(zip(*sides, strict=True)), cuts


def _shorten(side: Sequence[object], limit: int, part: int, backend: BackendTokenizer) -> dict[str, str]:
    """Return the part of each text that stays, where it exceeds the limit."""
    indices: dict[str, Index] = {}
    for index, text in enumerate(side):
        if isinstance(text, str):
            indices.setdefault(text, (index, part))
    slices = backend.encode_batches(list(indices), indices=list(indices.values()), special=False, with_offsets=True)
    shortened: dict[str, str] = {}
    for text, encoding in zip(indices, chain.from_iterable(slices), strict=True):
        if len(encoding) > limit:
            encoding.truncate(limit)
            shortened[text] = text[: encoding.offsets[-1][1]]
    return shortened
