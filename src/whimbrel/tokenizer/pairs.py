"""Two texts -> one seq, as the checkpoint's post-processor puts them together.

A post-processor puts the same tokens before, between and after any two texts; what they are is found at load from a few pairs,
and a tokenizer that does otherwise takes no pairs. So each text is tokenised once, however many pairs it is in, and a pair that
is too long is cut here. Source of the cut: TruncationStrategy::LongestFirst in tokenizers/src/utils/truncation.rs (0.22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import tokenizers

from whimbrel.errors import InvalidRequest
from whimbrel.tokenizer.truncation import TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.seq import Seq

_PROBES: Final = (("a", "b"), ("the quick brown fox", "jumps over 2 dogs"), ("b", "a a a"))


@dataclass(frozen=True, slots=True, eq=False)
class PairTemplate:
    """What stands around two texts."""

    before: Int32Array
    between: Int32Array
    after: Int32Array
    type_id: int
    shift: int | None
    """Where tokens get the next type: so many tokens after the end of the first text; None: nowhere."""

    @property
    def num_special(self) -> int:
        return self.before.size + self.between.size + self.after.size

    def seq(self, first: Int32Array, second: Int32Array, index: int, limit: TruncationLimit) -> Seq:
        """The seq of two texts, cut to the limit. Raises TooLong, and InvalidRequest if it would be empty."""
        num_tokens = self.num_special + first.size + second.size
        if num_tokens == 0:
            raise InvalidRequest("the pair has no tokens.", item=index)
        if truncated := limit.exceeded(num_tokens, "pair", index):
            num_first, num_second = cut_pair(first.size, second.size, limit.max_length - self.num_special)
            first, second = limit.cut(first, num_first), limit.cut(second, num_second)
        ids = np.concatenate((self.before, first, self.between, second, self.after))
        next_type = 0 if self.shift is None else self.before.size + first.size + self.shift
        return Seq(ids, index, 0, self.type_id, next_type, truncated=truncated)


def find_template(tokenizer: tokenizers.Tokenizer, num_types: int) -> PairTemplate | None:
    """How the tokenizer puts pairs together; None if not the same way for all. `num_types`: of tokens that the model knows."""
    found = [_around(tokenizer, *probe) for probe in _PROBES]
    if found[0] is None or any(each != found[0] for each in found):
        return None
    before, between, after, type_id, shift = found[0]
    if num_types <= 1:
        type_id, shift = 0, None
    elif type_id + (shift is not None) >= num_types:
        return None
    return PairTemplate(_array(before), _array(between), _array(after), type_id, shift)


def _array(ids: Sequence[int]) -> Int32Array:
    return np.array(ids, np.int32)


_Ids: TypeAlias = tuple[int, ...]


def _around(tokenizer: tokenizers.Tokenizer, first: str, second: str) -> tuple[_Ids, _Ids, _Ids, int, int | None] | None:
    """(before, between, after, type of the first, shift) of one pair."""
    bodies = [tokenizer.encode(text, add_special_tokens=False).ids for text in (first, second)]
    encoding = tokenizer.encode(first, second)
    ids, whose = encoding.ids, encoding.sequence_ids
    if 0 not in whose or 1 not in whose:
        return None
    starts = [whose.index(number) for number in (0, 1)]
    ends = [start + len(body) for start, body in zip(starts, bodies, strict=True)]
    if any(ids[start:end] != body for start, end, body in zip(starts, ends, bodies, strict=True)) or starts[1] < ends[0]:
        return None
    types = encoding.type_ids
    change = next((i for i, number in enumerate(types) if number != types[0]), None)
    if change is not None and not (ends[0] <= change <= starts[1] and types[change:] == [types[0] + 1] * (len(types) - change)):
        return None
    shift = None if change is None else change - ends[0]
    return tuple(ids[: starts[0]]), tuple(ids[ends[0] : starts[1]]), tuple(ids[ends[1] :]), types[0], shift


def cut_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two texts keep, so that together they have at most `room`: the longer one gives way first.

    Texts that are both longer than half of it share it; an odd token goes to the longer one, of equal ones to the second.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)
