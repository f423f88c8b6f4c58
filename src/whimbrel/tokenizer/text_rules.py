"""Rules of models that read texts in ways of their own. numpy only.

Static embeddings are tables of vectors. Their tokenizers add no special tokens, and may drop unknown ones. Source:
model2vec/model.py, `StaticModel.tokenize` and `encode` (0.10).

GritLM takes an instruction as part of the text and pools only the tokens after it: texts are "<|user|>\\n...\\n<|embed|>\\n..."
or "<|embed|>\\n...". If a caller sends ids, only these marks tell where the instruction ends. They are searched for in the
host's ids, so only a number goes to the device. Source: gritlm/gritlm.py (1.0.2) leaves out the tokens of the instruction that
it is given; the search for marks in ids is that of vllm/model_executor/models/gritlm.py (0.22.1). Where they differ, GritLM's
own code is followed: a text without marks has no instruction, and all of its tokens are pooled.

Late-interaction models mark queries and documents, and expand queries. Source: lightonai/pylate, models/colbert.py,
`ColBERT.tokenize`; Stanford's query_tokenization.py and doc_tokenization.py agree.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import tokenizers

from whimbrel.errors import CheckpointError
from whimbrel.tokenizer.validation import TruncationLimit
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Instruction, StaticTokenizer, TextFormat
from whimbrel.types.seq import Seq


@dataclass(frozen=True, slots=True)
class StaticRules:
    """The card's `StaticTokenizer` resolved for one vocabulary."""

    empty_id: int
    unknown_id: int | None
    """Id of the token that is dropped, or None."""
    token_size: int
    """Characters per token of the limit, or 0 without a limit in characters."""

    def shortens(self, limit: TruncationLimit) -> bool:
        """Return whether texts are truncated before they are tokenised."""
        return self.token_size > 0 and limit.truncate != "never"

    def shorten(self, text: str, limit: TruncationLimit) -> str:
        most = self.token_size * limit.max_length
        return text[-most:] if limit.truncate == "left" else text[:most]


def find_static_rules(tokenizer: tokenizers.Tokenizer, card: StaticTokenizer) -> StaticRules:
    model: dict[str, object] = json.loads(tokenizer.to_str())["model"] if card.drop_unknown else {}
    name, number = model.get("unk_token"), model.get("unk_id")
    unknown_id = tokenizer.token_to_id(name) if isinstance(name, str) else number if isinstance(number, int) else None
    token_size = int(np.median([len(token) for token in tokenizer.get_vocab()])) if card.cut_characters else 0
    return StaticRules(card.empty_id, unknown_id, token_size)


class InstructionFinder:
    """The tokens of a model's marks around an instruction."""

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
