"""Tokenization of pairs with a prompt template.

The template's own tokens are encoded once, at load time. Text of a request goes through a second backend without control
tokens, so a control token in a query, document or instruction is plain text (docs/adr/0011-rerankers.md). A pair that exceeds
the limit loses its end, but not the template's last tokens. Shares limits and errors with `tokenizer.py`.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from sys import maxsize
from typing import Final, TypeAlias

import numpy as np
import tokenizers

from whimbrel.errors import CheckpointError, Hint, InvalidRequest, TooLong
from whimbrel.tokenizer.backend import BackendTokenizer, find_surrogate
from whimbrel.tokenizer.prefixes import FILLERS, PROBES, common_end, max_prefix_tokens, probed_prefix, with_prefix
from whimbrel.tokenizer.tokenizer import SpecialTokens, Tokenizer
from whimbrel.tokenizer.validation import LengthBounds, TruncationLimit, check_pairs
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.seq import Pair, Seq, Truncate
from whimbrel.types.template import fields, fill, split

_FILE: Final = "tokenizer.json"
_EXAMPLE: Final = ("How far do birds fly?", "Some fly 10,000 km.\nThat is far", "Find facts. ")


_Pieces: TypeAlias = tuple[Int32Array | str, ...]
"""Tokens of a template, and format strings that are tokenised per pair."""


@dataclass(frozen=True, slots=True)
class _Limits:
    total: int
    query: int
    head: int
    """Leading tokens that are never cut."""
    tail: int
    """Trailing tokens that are never cut."""
    truncate: Truncate


class TemplateTokenizer:
    """The tokenizer of a checkpoint whose card has a template. Thread-safe."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        assert card.template is not None
        self._template = card.template
        self.of_ids = Tokenizer(folder, card, plan)
        """The tokenizer of token ids, which stand for whole prompts."""
        self.backend = self.of_ids.backend
        self._full = self.backend.raw
        forms = [form for form in (card.template.texts, card.template.texts_with_instruction) if form]
        controls, self._plain = plain_backend(self._full, "".join(map(fill, chain(*forms))))
        none = np.empty(0, np.int32)
        self._around = self.of_ids.special if card.template.add_special_tokens else SpecialTokens(none, none)
        if card.template.add_special_tokens and self._around.num_tokens == 0:
            raise CheckpointError("puts no special token around a text; this model needs it.", file=_FILE, key="post_processor")
        self._forms = {form: self._form(form, controls) for form in forms}
        empty = [self._rows([("", "")], form, "")[0] for form in self._forms.values()]
        least = 1 + self._around.num_tokens + max(sum(piece.size for piece in pieces) for pieces in empty)
        if plan.max_length < least:
            raise CheckpointError(f"max length {plan.max_length} leaves no room in the template.", file=_FILE)
        self.lengths = LengthBounds(least, plan.max_length, plan.max_length)
        self._max_prefix_tokens = max_prefix_tokens(card, plan)

    def encode_pairs(
        self, texts_of_pairs: Sequence[object], instruction: str | None, limit: TruncationLimit, adapter: int
    ) -> list[Seq]:
        """Tokenise pairs with an instruction, if there is one. Raises as Tokenizer.encode does."""
        pairs = check_pairs(texts_of_pairs)
        texts = self._template.texts if instruction is None else self._template.texts_with_instruction
        if texts is None:
            raise InvalidRequest("this model takes no instruction.", param="instruction")
        form, instruction = self._forms[texts], instruction or ""
        fixed = len(instruction) + sum(map(len, texts))
        self.backend.check_sizes([fixed + len(query) + len(document) for query, document in pairs])
        parts = [*zip(FILLERS, FILLERS, strict=True), *(self._template.parts(*pair) for pair in pairs)]
        try:
            rows = self._rows(parts, form, instruction)
        except InvalidRequest as error:
            indices = [(index, part) for index in range(len(pairs)) for part in range(2)]
            raise find_surrogate(list(chain(*pairs)), indices, instruction=instruction) or error from None
        limits = self._limits(rows[:2], form, limit)
        most = self._template.max_characters or (maxsize, maxsize)
        shortened = [len(query) > most[0] or len(document) > most[1] for query, document in pairs]
        seqs = [self._seq(pieces, i, form, limits, shortened=shortened[i]) for i, pieces in enumerate(rows[2:])]
        if self._max_prefix_tokens:
            seqs = self._with_prefixes(seqs, pairs, form, instruction, limits)
        return seqs if adapter < 0 else [replace(seq, adapter=adapter) for seq in seqs]

    def _with_prefixes(
        self, seqs: Sequence[Seq], pairs: Sequence[Pair], form: _Pieces, instruction: str, limits: _Limits
    ) -> list[Seq]:
        """Return the seqs with the lengths of their prefixes: the template and the query before the document."""
        queries = list(dict.fromkeys(query for query, _ in pairs))
        probes = [self._template.parts(query, probe) for query in queries for probe in PROBES]
        cut = limits if limits.truncate == "left" else replace(limits, truncate="right")
        ids = [self._seq(each, 0, form, cut, shortened=False).ids for each in self._rows(probes, form, instruction)]
        prefixes = {query: probed_prefix(ids[2 * i : 2 * i + 2]) for i, query in enumerate(queries)}
        return [with_prefix(seq, prefixes[query], self._max_prefix_tokens) for seq, (query, _) in zip(seqs, pairs, strict=True)]

    def _rows(self, parts: Sequence[Pair], form: _Pieces, instruction: str) -> list[list[Int32Array]]:
        """Return the ids of each piece of each pair."""

        def filled(query: str, document: str) -> list[Int32Array | str]:
            values = {"query": query, "document": document, "instruction": instruction}
            return [fill(piece, **values) if isinstance(piece, str) else piece for piece in form]

        return self._plain.encode_pieces([filled(*pair) for pair in parts])

    def _limits(self, different: Sequence[list[Int32Array]], form: _Pieces, limit: TruncationLimit) -> _Limits:
        lead = sum(map(len, takewhile(lambda piece: not isinstance(piece, str), form)))
        first, second = (np.concatenate(pieces) for pieces in different)
        tail = common_end(first, second) + self._around.after.size
        total = limit.max_length
        if self._template.body_length is not None:
            total = min(total, lead + self._template.body_length + tail)
        body = total - lead - tail
        if body < 1:
            raise InvalidRequest("leaves no room for query and document.", param="instruction")
        return _Limits(total, int(body * self._template.query_share), self._around.before.size + lead, tail, limit.truncate)

    def _seq(self, pieces: list[Int32Array], index: int, form: _Pieces, limits: _Limits, *, shortened: bool) -> Seq:
        size = self._around.num_tokens + sum(piece.size for piece in pieces)
        if self._template.query_share < 1:
            pieces = [
                ids[: limits.query] if isinstance(piece, str) and "document" not in fields(piece) else ids
                for piece, ids in zip(form, pieces, strict=True)
            ]
        ids = np.concatenate((self._around.before, *pieces, self._around.after))
        cut = shortened or ids.size < size or ids.size > limits.total
        if cut and limits.truncate == "never":
            limit = f"the limit is {limits.total:,}, of which the query may take {min(limits.query, limits.total):,}"
            raise TooLong(f"query and document come to {size:,} tokens; {limit}.", item=index, hint=Hint.TRUNCATE_PAIR)
        if ids.size > limits.total:
            kept = limits.total - limits.tail if limits.truncate == "right" else limits.head
            ids = np.concatenate((ids[:kept], ids[ids.size - (limits.total - kept) :]))
        return Seq(ids, index, truncated=cut)

    # Loading

    def _form(self, texts: Sequence[str], controls: Collection[str]) -> _Pieces:
        """Return the pieces of format strings. Raises CheckpointError unless they have the same tokens as the whole."""
        query, document, instruction = _EXAMPLE

        def encode(text: str) -> list[int]:
            return self._full.encode(text, add_special_tokens=False).ids

        form: _Pieces = ()
        for text in texts:
            segments = split(text, controls)
            pieces = tuple(each.text if each.fields else np.array(encode(each.fixed), np.int32) for each in segments)
            (row,) = self._rows([(query, document)], pieces, instruction)
            if np.concatenate(row).tolist() != encode(fill(text, query=query, document=document, instruction=instruction)):
                raise CheckpointError("cannot tokenise the parts of the model's template on their own.", file=_FILE)
            form += pieces
        return form


def plain_backend(tokenizer: tokenizers.Tokenizer, own: str) -> tuple[frozenset[str], BackendTokenizer]:
    """Return the control tokens of a template, and a backend that reads them as plain text. Raises CheckpointError.

    Those are the special tokens, and other added tokens in the template's `own` text except line breaks.
    """
    file = json.loads(tokenizer.to_str())
    for token in file["added_tokens"]:
        token["special"] = token["special"] or (token["content"] in own and not token["content"].isspace())
    controls = frozenset(token["content"] for token in file["added_tokens"] if token["special"])
    plain = tokenizers.Tokenizer.from_str(json.dumps(file))
    plain.encode_special_tokens = True
    ids = {tokenizer.token_to_id(control) for control in controls}
    for control in sorted(controls):
        if not ids.isdisjoint(plain.encode(control, add_special_tokens=False).ids):
            raise CheckpointError(f"cannot read the special token {control!r} as plain text.", file=_FILE)
    return controls, BackendTokenizer(plain, special=False, max_characters=maxsize)
