"""Request -> Prepared: everything that is done to a request before an engine sees it. Runs where the request came in.

Knows card, plan and tokenizer; knows nothing of queues, devices or processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar, cast

import numpy as np

from whimbrel.engine.prepared import Prepared
from whimbrel.errors import InvalidRequest, Overloaded, TooLarge, Unavailable, WhimbrelError, relocating
from whimbrel.outputs.layout import Places, answer_places, place
from whimbrel.outputs.merge import Merge, Repeat, located
from whimbrel.outputs.multi_vector import Condense, condense_for, need_scipy
from whimbrel.outputs.pair_scoring import Comparison, Side, compared_by, is_comparison, sides
from whimbrel.outputs.requested import Ask, asks_of, check_uses, num_entries, width_of
from whimbrel.outputs.token_mask import kept
from whimbrel.telemetry.trace import trace
from whimbrel.tokenizer.chunking import encode_document, encode_split
from whimbrel.tokenizer.offsets import locate
from whimbrel.tokenizer.pair_truncation import cut_sides
from whimbrel.tokenizer.template import TemplateTokenizer
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import check_ids, check_texts
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan, length_for
from whimbrel.types.request import Decode, OutputName, Request, Similarity, Tokenize
from whimbrel.types.seq import PairTokens, Seq, Tokens, TokenSpans

S = TypeVar("S")
T = TypeVar("T")

_INLINE_TEXTS: Final = 32
_INLINE_CHARACTERS: Final = 2000
"""Up to so many texts of so many characters together are tokenised in the event loop; more would hold it up."""
_MAX_WAITING: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a request asks, and its texts, tokenised."""

    card: Card
    asks: list[Ask]
    seqs: list[Seq]
    merge: Merge | Repeat | None = None
    spans: list[TokenSpans] | None = None
    comparison: Comparison | None = None
    tokens: list[PairTokens] | None = None
    condense: Condense | None = None


class Frontend:
    """The part of a model that runs before the device. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._plan = plan
        for output in card.outputs.values():
            need_scipy(output.token_pooling)
        self._tokenizers = [
            self._tokenizer(folder, tower, replace(plan, max_length=length_for(plan, card, tower)), number)
            for number, tower in enumerate(card.towers or (card,))
        ]

    def prepare(self, request: Request, *, received: float | None = None) -> Prepared:
        """Check and tokenise a request. `received` is when it came (perf_counter); by default now.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        received = perf_counter() if received is None else received
        with trace("tokenize") as tokenized:
            request = self._with_sides_cut(request)
            read = self._compared(request) if is_comparison(self._card, request) else self._distinct(request)
        seqs = read.seqs
        num_tokens = sum(seq.ids.size for seq in seqs)
        if num_tokens > self._plan.max_request_tokens:
            raise TooLarge(
                f"the request has {num_tokens:,} tokens; the limit is {self._plan.max_request_tokens:,}. Send fewer texts at "
                "once, or start the server with a larger --max-request-tokens.",
                param="input",
            )
        places = place(read.card, seqs, read.asks)
        if read.condense is not None:
            self._check_condense(read, places)
        prepared = Prepared(
            seqs,
            places,
            num_tokens=num_tokens,
            num_truncated=sum(seq.truncated for seq in seqs),
            received=received,
            tokenize=tokenized.seconds,
            priority=request.priority,
            deadline=request.deadline,
            owner=request.owner,
            comparison=read.comparison,
            merge=read.merge,
            condense=read.condense,
            spans=read.spans,
            tokens=read.tokens,
        )
        if (num_bytes := answer_places(prepared.places, prepared.comparison).num_bytes) > self._plan.max_queue_bytes:
            raise TooLarge(
                f"the answer would take {num_bytes:,} bytes; the limit is {self._plan.max_queue_bytes:,}. Send fewer texts at "
                "once, or shorter ones.",
                param="input",
            )
        return prepared

    def tokenize(self, asked: Tokenize) -> list[Tokens]:
        """The tokens of each text. Raises InvalidRequest and TooLarge."""
        texts = check_texts(asked.texts)
        prompt = "" if asked.prompt_name is None else self._card.prompt_text(asked.prompt_name)
        return self._tokenizers[0].backend.tokens(texts, prompt, special=asked.special)

    def decode(self, asked: Decode) -> list[str]:
        """The text of each row of ids. Raises InvalidRequest."""
        rows = check_ids([np.asarray(row, np.int64) for row in asked.rows], self._card.encoder.vocab_size)
        return self._tokenizers[0].backend.texts(rows, special=asked.special)

    def _with_sides_cut(self, request: Request) -> Request:
        if request.max_query_tokens is None and request.max_document_tokens is None:
            return request
        compares = is_comparison(self._card, request)
        towers = [self._card.tower_for(side) if compares else 0 for side in ("query", "document")]
        return cut_sides(request, *(self._tokenizers[tower].backend for tower in towers))

    def _distinct(self, request: Request) -> _Read:
        """As `_read`; pairs that are alike run once."""
        texts = request.texts
        if request.outputs != ("scores",) or len(set(map(type, texts))) != 1 or not isinstance(texts[0], tuple):
            return self._read(request)
        try:
            place: dict[object, int] = {}
            place_N = np.fromiter((place.setdefault(pair, len(place)) for pair in texts), np.int64, len(texts))
        except TypeError:  # what is in them cannot be hashed, and is no text
            return self._read(request)
        if len(place) == len(texts):
            return self._read(request)
        first_M = np.unique(place_N, return_index=True)[1]
        repeat = Repeat(place_N, first_M)
        try:
            read = self._read(replace(request, texts=[texts[i] for i in first_M.tolist()]))
        except WhimbrelError as error:
            raise located(error, repeat) from None
        return replace(read, merge=repeat)

    def _read(self, request: Request) -> _Read:
        number = self._card.tower_for(request.input_type)
        card = self._card.tower(number)
        asks = asks_of(card, request, matryoshka=self._plan.matryoshka)
        check_uses(card, request, [ask.name for ask in asks])
        late = next((ask for ask in asks if ask.name == "multi_vector"), None)
        condense = None if late is None else condense_for(card.outputs["multi_vector"], request, late)
        return _Read(card, asks, *self._tokenized(self._tokenizers[number], card, request, asks), condense=condense)

    def _compared(self, request: Request) -> _Read:
        """Pairs of which each text is encoded once, queries first."""
        output, similarity = compared_by(self._card, request)
        if request.muvera is not None:
            raise InvalidRequest("pairs are compared by their token vectors themselves.", param="muvera")
        card = self._card.tower(self._card.tower_for("query"))
        width = num_entries(card) if output == "sparse" else width_of(card, request, output, matryoshka=self._plan.matryoshka)
        queries, documents = sides(request, output, width)
        first = self._side(queries, similarity)
        second = self._side(documents, similarity)
        seqs = [*first.seqs, *(replace(seq, index=seq.index + len(first.seqs)) for seq in second.seqs)]
        num_given = sum(map(len, queries.given))
        comparison = Comparison(
            output,
            similarity,
            queries.numbers(0, len(seqs)),
            documents.numbers(len(first.seqs), len(seqs) + num_given),
            (*queries.given, *documents.given),
            request.explain,
        )
        tokens = self._pair_tokens(output, seqs, comparison) if request.explain else None
        if request.explain and second.condense is not None and second.seqs:
            raise InvalidRequest("pooled vectors are of no one token; give token_pooling 1.", param="explain")
        return _Read(first.card, first.asks, seqs, comparison=comparison, tokens=tokens, condense=second.condense)

    def _check_condense(self, read: _Read, places: Places) -> None:
        """Over documents alone, where they are compared."""
        counts = np.diff(places.by_name["multi_vector"].offsets_N1)
        if read.comparison is not None:
            counts[read.comparison.queries_P[read.comparison.queries_P < counts.size]] = 0
        try:
            assert read.condense is not None
            read.condense.check(counts)
        except InvalidRequest as error:
            raise located(error, None, read.comparison) from None

    def _pair_tokens(self, output: OutputName, seqs: Sequence[Seq], comparison: Comparison) -> list[PairTokens]:
        """The tokens that have a vector, of both texts of each pair."""
        found: list[tuple[str, ...] | None] = []
        for seq in seqs:
            tokenizer = self._tokenizers[seq.tower]
            assert isinstance(tokenizer, Tokenizer)  # one with a template gives no token vectors
            kept_T = kept(tokenizer.card.output(output), seq.ids, np.array([0, seq.ids.size]), np.array([seq.is_query]))
            found.append(tokenizer.tokens(seq.ids[kept_T]))
        found += [None] * sum(map(len, comparison.given))
        pairs = zip(comparison.queries_P.tolist(), comparison.documents_P.tolist(), strict=True)
        return [(found[query], found[document]) for query, document in pairs]

    def _side(self, side: Side, similarity: Similarity) -> _Read:
        with relocating(side.name):
            read = self._read(side.request)
        asks = [
            replace(ask, finished=ask.finished or similarity == "cosine", compared=ask.name == "multi_vector")
            for ask in read.asks
        ]
        return replace(read, asks=asks)

    def _tokenizer(self, folder: Path, card: Card, plan: Plan, tower: int) -> Tokenizer | TemplateTokenizer:
        return TemplateTokenizer(folder, card, plan) if card.template else Tokenizer(folder, card, plan, tower=tower)

    def _tokenized(
        self, tokenizer: Tokenizer | TemplateTokenizer, card: Card, request: Request, asks: Sequence[Ask]
    ) -> tuple[list[Seq], Merge | None, list[TokenSpans] | None]:
        """The seqs; how their vectors become those of the texts; and of which characters their tokens are, if that is asked."""
        if request.late_chunking or request.split_long:
            return *self._in_parts(tokenizer, card, request, asks), None
        if request.locate:
            assert isinstance(tokenizer, Tokenizer)  # one with a template gives no scores of tokens
            seqs, spans = locate(tokenizer, request)
            return seqs, None, spans
        return tokenizer.encode(request), None, None

    def _in_parts(
        self, tokenizer: Tokenizer | TemplateTokenizer, card: Card, request: Request, asks: Sequence[Ask]
    ) -> tuple[list[Seq], Merge | None]:
        param = "late_chunking" if request.late_chunking else "split_long"
        if request.late_chunking and request.split_long:
            raise InvalidRequest("cannot go with split_long: it runs all texts in one pass.", param=param)
        if [ask.name for ask in asks] != ["dense"] or isinstance(tokenizer, TemplateTokenizer):
            raise InvalidRequest("is for dense vectors alone.", param=param)
        if not request.late_chunking:
            return encode_split(tokenizer, request, normalized=asks[0].finished)
        if set(card.dense.modes) != {"mean"}:
            raise InvalidRequest(
                f"is for models that pool by the mean; this one by {', '.join(card.dense.modes)}.", param=param
            )
        return encode_document(tokenizer, request), None


class AsyncFrontend:
    """The same for asyncio: what takes long runs in threads, since tokenising holds no lock of Python's."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-tokenizer")
        self._waiting = 0

    async def prepare(self, request: Request) -> Prepared:
        """As Frontend.prepare, of a request that comes now. Raises Overloaded and Unavailable too."""
        received = perf_counter()
        if _is_small(request):
            return self._frontend.prepare(request, received=received)
        return await self._in_thread(partial(self._frontend.prepare, received=received), request)

    async def _in_thread(self, action: Callable[[S], T], asked: S) -> T:
        if self._waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._waiting:,} requests wait to be tokenised. Try again later.", retry_after=1.0)
        try:
            running = self._threads.submit(action, asked)
        except RuntimeError:
            raise Unavailable("the engine is closed.") from None
        self._waiting += 1
        try:
            return await asyncio.wrap_future(running)
        finally:
            self._waiting -= 1

    async def tokenize(self, asked: Tokenize) -> list[Tokens]:
        """As Frontend.tokenize."""
        return await self._in_thread(self._frontend.tokenize, asked)

    async def decode(self, asked: Decode) -> list[str]:
        """As Frontend.decode."""
        return await self._in_thread(self._frontend.decode, asked)

    def close(self) -> None:
        """Finish what has begun."""
        self._threads.shutdown()


def size(text: object) -> int:
    """Characters of a text or of a pair, or ids. What is none of these, as vectors, costs no tokens."""
    if isinstance(text, str):
        return len(text)
    if isinstance(text, tuple):
        return sum(len(part) for part in cast(tuple[object, ...], text) if isinstance(part, str))
    return text.size if isinstance(text, np.ndarray) else 0


def _is_small(request: Request) -> bool:
    if len(request.texts) > _INLINE_TEXTS or sum(map(size, request.texts)) > _INLINE_CHARACTERS:
        return False
    return not any(
        isinstance(pair, tuple) and set(map(type, cast(tuple[object, ...], pair))) != {str} for pair in request.texts
    )
