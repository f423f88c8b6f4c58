"""Instruction boundaries in GritLM's texts.

Some models take an instruction as part of the text and pool only the tokens after it: GritLM's texts are "<|user|>\\n...\\n
<|embed|>\\n..." or "<|embed|>\\n...". If a caller sends ids, only these marks tell where the instruction ends. This module
searches for them in the host's ids with numpy, so only a number goes to the device.

Source: gritlm/gritlm.py (1.0.2) leaves out the tokens of the instruction that it is given; the search for marks in ids is that
of vllm/model_executor/models/gritlm.py (0.22.1). Where they differ, GritLM's own code is followed: a text without marks has no
instruction, and all of its tokens are pooled.
"""

import numpy as np
import tokenizers

from whimbrel.errors import CheckpointError
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Instruction


class InstructionFinder:
    def __init__(self, instruction: Instruction, tokenizer: tokenizers.Tokenizer, prefix: Int32Array) -> None:
        opening, closing = _ids(tokenizer, instruction.opening), _ids(tokenizer, instruction.closing)
        both = _ids(tokenizer, f"{instruction.opening}\n{instruction.closing}")
        if not opening.size or not closing.size or not np.array_equal(both[: opening.size], opening):
            message = f"does not keep {instruction.opening!r} and {instruction.closing!r} apart from the text around them."
            raise CheckpointError(message, file="tokenizer.json", key="model")
        self._prefix = prefix
        self._opening = opening
        self._first = closing
        """Tokens of the closing mark at the beginning of a text."""
        self._later = both[opening.size :]
        """Tokens of the closing mark at the beginning of a later line."""

    def count(self, ids: Int32Array) -> int:
        """Return the number of leading tokens up to the end of the instruction, or 0 without one. Includes special tokens."""
        start = self._prefix.size
        if not np.array_equal(ids[:start], self._prefix):
            return 0
        opened = np.array_equal(ids[start : start + self._opening.size], self._opening)
        mark = self._later if opened else self._first
        place = _find(ids[start:], mark)
        return 0 if place < 0 else start + place + mark.size


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> Int32Array:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _find(ids: Int32Array, mark: Int32Array) -> int:
    data, wanted = ids.tobytes(), mark.tobytes()
    place = data.find(wanted)
    while place > 0 and place % ids.itemsize:  # found across the bytes of two ids
        place = data.find(wanted, place + 1)
    return place // ids.itemsize if place >= 0 else -1
