"""Encoding of lists: a query and all its documents in one prompt, for listwise rerankers.

Only the template produces control tokens; those in a text are plain characters. So the number of markers is known, and no
document reaches beyond its place. A list that is too long for one prompt is split into blocks.

Source: `rerank`, `_truncate_texts` and `format_docs_prompts_func` in modeling.py of jinaai/jina-reranker-v3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Final

import numpy as np

from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.outputs.listwise import ListScoring
from whimbrel.tokenizer.backend import BackendTokenizer, find_surrogate
from whimbrel.tokenizer.template import control_tokens, escape_control_tokens, resolve_instruction
from whimbrel.tokenizer.validation import Index, check_pairs
from whimbrel.types.arrays import Int32Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.request import Pair, Request
from whimbrel.types.seq import Seq
from whimbrel.types.template import Segment, split

_FILE: Final = "tokenizer.json"
_EXAMPLE: Final = ("quick brown fox?", ["Lazy dogs.", " 2 more,\n\nand\ta line "], "find 7 of them")
_MAX_GROWTH: Final = 3
"""Bytes that Unicode normalization (NFC) may make of one."""


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """Texts of one list, cut to their limits."""

    query: str
    documents: list[str]
    first: int
    """Index of its first pair in the request."""
    sizes: list[int]
    """Tokens of each document, or a bound where all fit into one prompt in any case."""
    query_tokens: int
    num_cut: int


class ListTokenizer:
    """The tokenizer of a listwise reranker. Thread-safe."""

    def __init__(self, backend: BackendTokenizer, card: Card, plan: Plan) -> None:
        """`backend` is the checkpoint's tokenizer. Raises CheckpointError if it does not go with the template."""
        assert card.list_template is not None
        self._card = card
        self._template = template = card.list_template
        self.backend = backend
        self._max_length = plan.max_length
        text = "".join((*template.parts(instructed=True), template.document_marker, template.query_marker))
        controls = control_tokens(self.backend.raw, text)
        self._ids = {control: self._id(control) for control in controls}
        for marker in (template.document_marker, template.query_marker):
            if marker not in controls:
                raise CheckpointError(f"has no token {marker!r}, without which there is no score.", file=_FILE, key="model")
        plain = escape_control_tokens(self.backend.raw, controls)
        self._plain = BackendTokenizer(plain, special=False, max_characters=maxsize)
        self._segments = {
            instructed: [split(part, controls) for part in template.parts(instructed=instructed)]
            for instructed in (False, True)
        }
        self._check()

    def encode(self, request: Request) -> tuple[list[Seq], ListScoring, int]:
        """Return the seqs of all lists, their scoring, and the number of texts that were cut.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        pairs = check_pairs(request.texts)
        self._refuse(request)
        instruction = self._template.clean(resolve_instruction(self._card, request) or "")
        lists = [self._cut(each, first, request, instruction) for first, each in _lists(pairs, listwise=request.listwise)]
        blocks = [(each, block) for each in lists for block in self._blocks(each)]
        rows = self._rows([(each.query, each.documents[block]) for each, block in blocks], instruction)
        adapter = self._card.adapter(None, request.adapter)
        seqs = [
            self._seq(ids, index, each.first + block.start, adapter, truncated=each.num_cut > 0)
            for index, ((each, block), ids) in enumerate(zip(blocks, rows, strict=True))
        ]
        counts = np.array([block.stop - block.start for _, block in blocks], np.int64)
        owners = np.array([each.first for each, _ in blocks])
        num_blocks = np.unique(owners, return_counts=True)[1]
        scoring = ListScoring(offsets_of(counts), offsets_of(num_blocks), "multi_vector" in request.outputs)
        return seqs, scoring, sum(each.num_cut for each in lists)

    def _refuse(self, request: Request) -> None:
        """Raise InvalidRequest for fields that a list has no use for."""
        if request.max_tokens is not None:
            message = "a prompt holds many texts; limit each with max_query_tokens and max_document_tokens."
            raise InvalidRequest(message, param="max_tokens")
        if not request.add_special_tokens:
            raise InvalidRequest("this model's tokens around texts belong to its template.", param="add_special_tokens")

    def _cut(self, pairs: Sequence[Pair], first: int, request: Request, instruction: str) -> _List:
        """Return the texts of a list, cut to their limits. Raises InvalidRequest, TooLong, TooLarge."""
        query, documents, template = pairs[0][0], [document for _, document in pairs], self._template
        max_query = request.max_query_tokens or template.max_query_tokens
        max_document = request.max_document_tokens or template.max_document_tokens
        indices: list[Index] = [(first, 0), *((first + i, 1) for i in range(len(documents)))]
        query_bound, *bounds = self._bounds([query, *documents], indices, instruction)
        fixed = self._fixed_tokens(instruction)
        room = self._max_length - 2 * query_bound - fixed
        if query_bound < max_query and max(bounds) < max_document and sum(bounds) < room - template.max_document_tokens:
            return _List(query, documents, first, bounds, query_bound, 0)
        ids = self._plain.ids([query, *documents], indices=indices)
        (query, *_), query_cut = self._shorten([query], ids[:1], max_query, request, indices[:1])
        query_tokens = min(ids[0].size, max_query)
        room = self._max_length - 2 * query_tokens - fixed
        if room < 1:
            message = f"{query_tokens:,} tokens leave no room for a document within {self._max_length:,}."
            raise TooLong(message, item=first, part=0)
        limit = min(max_document, room)
        documents, documents_cut = self._shorten(documents, ids[1:], limit, request, indices[1:])
        sizes = [min(row.size, limit) for row in ids[1:]]
        return _List(query, documents, first, sizes, query_tokens, query_cut + documents_cut)

    def _bounds(self, texts: Sequence[str], indices: Sequence[Index], instruction: str) -> list[int]:
        """Return upper bounds of the tokens of texts: a token has at least one byte. Raises InvalidRequest and TooLarge."""
        self.backend.check_sizes([len(text) for text in texts], indices)
        try:
            return [_MAX_GROWTH * len(text.encode()) for text in (*texts, instruction)][:-1]
        except UnicodeEncodeError as error:
            raise find_surrogate(texts, indices, instruction=instruction) or error from None

    def _shorten(
        self, texts: list[str], ids: Sequence[Int32Array], limit: int, request: Request, indices: Sequence[Index]
    ) -> tuple[list[str], int]:
        """Return the texts cut to `limit` tokens, and the number of those that were cut."""
        long = [i for i, row in enumerate(ids) if row.size > limit]
        if long and request.truncate == "never":
            item, part = indices[long[0]]
            kind = "document" if part else "query"
            message = f"the {kind} has {ids[long[0]].size:,} tokens; the limit is {limit:,}. Pass truncate to cut it."
            raise TooLong(message, item=item, part=part)
        left = request.truncate == "left"
        shorter = self._plain.texts([ids[i][-limit:] if left else ids[i][:limit] for i in long])
        kept = dict(zip(long, shorter, strict=True))
        return [kept.get(i, text) for i, text in enumerate(texts)], len(long)

    def _blocks(self, texts: _List) -> Iterator[slice]:
        """Yield the documents of each prompt. A prompt takes documents until it is full or another might not fit."""
        template, whole = self._template, self._max_length - 2 * texts.query_tokens
        start, capacity = 0, whole
        for index, size in enumerate(texts.sizes, start=1):
            capacity -= size
            if index - start >= template.max_documents or capacity <= template.max_document_tokens:
                yield slice(start, index)
                start, capacity = index, whole
        if start < len(texts.documents):
            yield slice(start, len(texts.documents))

    def _rows(self, prompts: Sequence[tuple[str, Sequence[str]]], instruction: str) -> list[Int32Array]:
        """Return the ids of each prompt. Each distinct piece of text is tokenized once."""
        pieces = [self._pieces(query, documents, instruction) for query, documents in prompts]
        ids = self._plain.encode_unique(texts for texts, _ in pieces)
        none = np.empty(0, np.int32)
        rows: list[Int32Array] = []
        for texts, controls in pieces:
            parts = [each for text, control in zip(texts, [*controls, none], strict=True) for each in (ids[text], control)]
            rows.append(np.concatenate(parts))
        return rows

    def _pieces(self, query: str, documents: Sequence[str], instruction: str) -> tuple[list[str], list[Int32Array]]:
        """Return the texts of a prompt, and the control token after each but the last."""
        texts, controls = [""], list[Int32Array]()

        def add(segments: Sequence[Segment], **values: object) -> None:
            for segment in segments:
                if segment.is_control:
                    controls.append(self._ids[segment.text])
                    texts.append("")
                else:
                    texts[-1] += segment.text.format(query=query, instruction=instruction, **values)

        query = self._template.clean(query)
        opening, document, closing = self._segments[bool(instruction)]
        add(opening, count=len(documents))
        for index, text in enumerate(documents):
            add(document, index=index, document=self._template.clean(text))
        add(closing)
        return texts, controls

    def _seq(self, ids: Int32Array, index: int, item: int, adapter: int, *, truncated: bool) -> Seq:
        if ids.size > self._max_length:
            raise TooLong(
                f"the query and its documents come to {ids.size:,} tokens; the limit is {self._max_length:,}. Send shorter "
                "documents, or set max_document_tokens.",
                item=item,
                part=1,
            )
        return Seq(ids, index, adapter=adapter, truncated=truncated)

    def _fixed_tokens(self, instruction: str) -> int:
        """Return the tokens of a prompt around one document, without query and document."""
        return self._rows([("", [""])], instruction)[0].size

    # Loading

    def _id(self, control: str) -> Int32Array:
        number = self.backend.raw.token_to_id(control)
        assert number is not None  # it is one of the tokenizer's added tokens
        return np.array([number], np.int32)

    def _check(self) -> None:
        """Raise CheckpointError unless the pieces have the same tokens as the whole prompt, and a short one fits."""
        query, documents, instruction = _EXAMPLE
        template = self._template
        opening, document, closing = template.parts(instructed=True)
        whole = (
            opening.format(query=query, count=len(documents), instruction=instruction)
            + "".join(document.format(index=i, document=text) for i, text in enumerate(documents))
            + closing.format(query=query)
        )
        (row,) = self._rows([(query, documents)], instruction)
        if row.tolist() != self.backend.raw.encode(whole, add_special_tokens=False).ids:
            raise CheckpointError("cannot tokenise the parts of the model's template on their own.", file=_FILE)
        if self._fixed_tokens("") >= self._max_length:
            raise CheckpointError(f"max length {self._max_length} leaves no room in the template.", file=_FILE)


def _lists(pairs: Sequence[Pair], *, listwise: bool) -> list[tuple[int, Sequence[Pair]]]:
    """Return the lists of a request, each with the index of its first pair: all pairs, or each pair alone."""
    if not listwise:
        return [(index, [pair]) for index, pair in enumerate(pairs)]
    for index, (query, _) in enumerate(pairs):
        if query != pairs[0][0]:
            raise InvalidRequest("a list has one query; this is another.", item=index, part=0)
    return [(0, pairs)] if pairs else []
