"""Encoding of lists: a query and all its documents in one prompt, for listwise rerankers.

Only the template produces control tokens; those in a text are plain characters. So the number of markers is known, and no
document reaches beyond its place. A list that is too long for one prompt is split into blocks.

Source: `rerank`, `_truncate_texts` and `format_docs_prompts_func` in modeling.py of jinaai/jina-reranker-v3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Final

import numpy as np

from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.outputs.list_scoring import ListScoring
from whimbrel.tokenizer.backend import BackendTokenizer, find_surrogate
from whimbrel.tokenizer.template import plain_backend
from whimbrel.tokenizer.validation import Index, check_pairs
from whimbrel.types.arrays import Int32Array
from whimbrel.types.batch import offsets_of
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan
from whimbrel.types.seq import Pair, Seq, Truncate
from whimbrel.types.template import Segment, split

_FILE: Final = "tokenizer.json"
_EXAMPLE: Final = ("quick brown fox?", ["Lazy dogs.", " 2 more,\n\nand\ta line "], "find 7 of them")
_MAX_GROWTH: Final = 3
"""Bytes that Unicode normalization (NFC) may make of one."""


@dataclass(frozen=True, slots=True)
class ListParams:
    """Parameters of the encoding of lists: everything that their tokenizer needs besides the pairs."""

    instruction: str | None
    max_query_tokens: int
    max_document_tokens: int
    truncate: Truncate
    adapter: int


@dataclass(frozen=True, slots=True, eq=False)
class _CutList:
    """Texts of one list, cut to their limits."""

    query: str
    query_tokens: int
    fixed: int
    """Tokens of a prompt around one empty document and an empty query."""
    documents: list[str]
    sizes: list[int]
    """Tokens of each document; where all fit into one prompt in any case, upper bounds."""
    first: int
    """Index of its first pair in the request."""
    num_cut: int


class ListTokenizer:
    """The tokenizer of a listwise reranker. Thread-safe."""

    def __init__(self, backend: BackendTokenizer, card: Card, plan: Plan) -> None:
        """`backend` is the checkpoint's tokenizer. Raises CheckpointError if it does not go with the template."""
        assert card.list_template is not None
        self.template = card.list_template
        self._backend = backend
        self._max_length, self._max_request_tokens = plan.max_length, plan.max_request_tokens
        controls, self._plain = plain_backend(backend.raw, "".join(self.template.parts(instructed=True)))
        self._ids = {control: np.array([backend.raw.token_to_id(control)], np.int32) for control in controls}
        parts = self.template.parts
        self._segments = {each: [split(part, controls) for part in parts(instructed=each)] for each in (False, True)}
        self._check()
        last = self.template.max_documents - 1
        marker = self._ids[self.template.document_marker].size
        self._passage_tokens = self._plain.ids([self.template.document.format(index=last, document="")])[0].size + marker
        """Upper bound of a document's tokens besides its text: its marker's name counts as text here."""

    def encode(self, pairs: Sequence[object], params: ListParams, *, as_list: bool) -> tuple[list[Seq], ListScoring, int]:
        """Return the seqs of lists, their scoring, and the number of cut texts. Raises InvalidRequest, TooLong, TooLarge."""
        lists = _split_lists(check_pairs(pairs), as_list=as_list)
        instruction = self.template.clean(params.instruction or "")
        if (error := find_surrogate((), instruction=instruction)) is not None:
            raise error
        fixed = self._fixed_tokens(instruction, num_lists=len(lists))
        cut = [self._cut(first, each, params, fixed) for first, each in lists]
        blocks = [list(self._blocks(each, params.max_document_tokens)) for each in cut]
        flat = [(each, block) for each, own in zip(cut, blocks, strict=True) for block in own]
        rows = self._rows([(each.query, each.documents[block]) for each, block in flat], instruction)
        numbered = enumerate(zip(flat, rows, strict=True))
        seqs = [self._seq(ids, index, each, block.start, params.adapter) for index, ((each, block), ids) in numbered]
        sizes = np.array([block.stop - block.start for _, block in flat], np.int64)
        scoring = ListScoring(offsets_of(sizes), offsets_of(np.array([len(own) for own in blocks], np.int64)))
        return seqs, scoring, sum(each.num_cut for each in cut)

    def _fixed_tokens(self, instruction: str, *, num_lists: int) -> int:
        """Return the tokens of a prompt around empty texts. Raises TooLong if nothing fits beside them."""
        fixed = self._rows([("", [""])], instruction)[0].size
        if fixed >= self._max_length or fixed * num_lists > self._max_request_tokens:
            prompts = f"{num_lists:,} prompts have" if num_lists > 1 else "the prompt has"
            limits = f"the limits are {self._max_length:,} for each and {self._max_request_tokens:,} for all"
            remedy = "Shorten the instruction, or send fewer texts at once."
            raise TooLong(f"{prompts} {fixed:,} tokens around the texts; {limits}. {remedy}", param="instruction")
        return fixed

    def _cut(self, first: int, pairs: Sequence[Pair], params: ListParams, fixed: int) -> _CutList:
        """Return the texts of a list, cut to their limits. Raises TooLong, InvalidRequest, TooLarge."""
        query, documents = pairs[0][0], [document for _, document in pairs]
        indices: list[Index] = [(first + i, 1) for i in range(len(documents))]
        side, bound = params.truncate, [maxsize]  # the query's tokens are counted in any case
        (query,), (query_tokens,), query_cut = self._shorten([query], bound, params.max_query_tokens, side, [(first, 0)])
        limit = min(params.max_document_tokens, self._max_length - fixed - 2 * query_tokens)
        if limit < 1:
            message = f"{query_tokens:,} tokens leave no room for a document within {self._max_length:,}."
            raise TooLong(message, item=first, part=0)
        sizes = self._bounds(documents, indices)
        documents, sizes, num_cut = self._shorten(documents, sizes, limit, side, indices)
        texts = _CutList(query, query_tokens, fixed, documents, sizes, first, query_cut + num_cut)
        if len(list(self._blocks(texts, params.max_document_tokens))) <= -(-len(documents) // self.template.max_documents):
            return texts
        _, sizes, _ = self._shorten(documents, [maxsize] * len(documents), maxsize, side, indices)
        return replace(texts, sizes=sizes)

    def _bounds(self, texts: Sequence[str], indices: Sequence[Index]) -> list[int]:
        """Return upper bounds of the tokens of texts: a token has at least one byte. Raises InvalidRequest and TooLarge."""
        self._backend.check_sizes([len(text) for text in texts], indices)
        try:
            return [len(text) if text.isascii() else _MAX_GROWTH * len(text.encode()) for text in texts]
        except UnicodeEncodeError as error:
            raise find_surrogate(texts, indices) or error from None

    def _shorten(
        self, texts: list[str], sizes: list[int], limit: int, truncate: Truncate, indices: Sequence[Index]
    ) -> tuple[list[str], list[int], int]:
        """Return texts cut to `limit` tokens, their sizes, exact where the bound exceeds the limit, and the number of cuts."""
        unknown = [i for i, size in enumerate(sizes) if size > limit or size == maxsize]
        ids = self._backend.ids([texts[i] for i in unknown], indices=[indices[i] for i in unknown], special=False)
        texts, sizes, num_cut = [*texts], [*sizes], 0
        for i, row in zip(unknown, ids, strict=True):
            sizes[i] = min(row.size, limit)
            if row.size <= limit:
                continue
            if truncate == "never":
                item, part = indices[i]
                kind = "document" if part else "query"
                message = f"the {kind} has {row.size:,} tokens; the limit is {limit:,}. Pass truncate to cut it."
                raise TooLong(message, item=item, part=part)
            (texts[i],) = self._backend.texts([row[-limit:] if truncate == "left" else row[:limit]])
            num_cut += 1
        return texts, sizes, num_cut

    def _blocks(self, texts: _CutList, max_document_tokens: int) -> Iterator[slice]:
        """Yield the documents of each prompt.

        A prompt takes documents until it has as many as it may, or until another of the largest size might not fit. It also
        ends before a document with which it would exceed the model's length; the model's own code would run such a prompt.
        """
        whole = self._max_length - 2 * texts.query_tokens
        start, capacity, room = 0, whole, whole - texts.fixed
        for index, size in enumerate(texts.sizes):
            if index > start and size + self._passage_tokens > room:
                yield slice(start, index)
                start, capacity, room = index, whole, whole - texts.fixed
            capacity -= size
            room -= size + self._passage_tokens
            if index + 1 - start >= self.template.max_documents or capacity <= max_document_tokens:
                yield slice(start, index + 1)
                start, capacity, room = index + 1, whole, whole - texts.fixed
        if start < len(texts.documents):
            yield slice(start, len(texts.documents))

    def _rows(self, prompts: Sequence[tuple[str, Sequence[str]]], instruction: str) -> list[Int32Array]:
        """Return the ids of each prompt. Each distinct piece of text is tokenized once."""
        pieces = [self._pieces(query, documents, instruction) for query, documents in prompts]
        return [np.concatenate(row) for row in self._plain.encode_pieces(pieces)]

    def _pieces(self, query: str, documents: Sequence[str], instruction: str) -> list[Int32Array | str]:
        """Return the texts of a prompt, with a control token between each two."""
        pieces, before = list[Int32Array | str](), ""

        def add(segments: Sequence[Segment], **values: object) -> None:
            nonlocal before
            for segment in segments:
                if segment.is_control:
                    pieces.extend((before, self._ids[segment.text]))
                    before = ""
                else:
                    before += segment.text.format(query=query, instruction=instruction, **values)

        query = self.template.clean(query)
        opening, document, closing = self._segments[bool(instruction)]
        add(opening, count=len(documents))
        for index, text in enumerate(documents):
            add(document, index=index, document=self.template.clean(text))
        add(closing)
        return [*pieces, before]

    def _seq(self, ids: Int32Array, index: int, texts: _CutList, document: int, adapter: int) -> Seq:
        if ids.size > self._max_length:  # a text has other tokens within the prompt than alone
            message = f"the prompt with this document has {ids.size:,} tokens; the limit is {self._max_length:,}."
            raise TooLong(message, item=texts.first + document, part=1)
        return Seq(ids, index, adapter=adapter, truncated=texts.num_cut > 0)

    def _check(self) -> None:
        """Raise CheckpointError unless the pieces have the same tokens as the whole prompt, and a short one fits."""
        query, documents, instruction = _EXAMPLE
        (row,) = self._rows([(query, documents)], instruction)
        opening, document, closing = self.template.parts(instructed=True)
        passages = "".join(document.format(index=index, document=text) for index, text in enumerate(documents))
        opening = opening.format(query=query, count=len(documents), instruction=instruction)
        whole = opening + passages + closing.format(query=query)
        if row.tolist() != self._backend.raw.encode(whole, add_special_tokens=False).ids:
            raise CheckpointError("cannot tokenise the parts of the model's template on their own.", file=_FILE)
        if self._rows([("", [""])], "")[0].size >= self._max_length:
            raise CheckpointError(f"max length {self._max_length} leaves no room in the template.", file=_FILE)


def _split_lists(pairs: Sequence[Pair], *, as_list: bool) -> list[tuple[int, Sequence[Pair]]]:
    """Return the lists of a request, each with the index of its first pair: all pairs, or each pair alone."""
    if not as_list:
        return [(index, [pair]) for index, pair in enumerate(pairs)]
    for index, (query, _) in enumerate(pairs):
        if query != pairs[0][0]:
            raise InvalidRequest("a list has one query; this is another.", item=index, part=0)
    return [(0, pairs)] if pairs else []
