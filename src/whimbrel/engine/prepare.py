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

from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import InvalidRequest, Overloaded, TooLarge, Unavailable, WhimbrelError, relocating
from whimbrel.outputs.layout import ResultLayout, plan_layout, response_layout
from whimbrel.outputs.merge import ChunkMerge, Deduplication, map_error_location
from whimbrel.outputs.multi_vector import TokenReduction, require_scipy, resolve_reduction
from whimbrel.outputs.pair_scoring import PairScoring, PairSide, scores_by_similarity, scoring_method, split_pairs
from whimbrel.outputs.requested import OutputSpec, max_sparse_entries, resolve_outputs, resolve_width, validate_for_outputs
from whimbrel.outputs.token_mask import token_mask
from whimbrel.telemetry.trace import Timer
from whimbrel.tokenizer.chunking import encode_document, encode_split
from whimbrel.tokenizer.offsets import encode_with_offsets
from whimbrel.tokenizer.pairs import truncate_sides
from whimbrel.tokenizer.template import TemplateTokenizer
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import check_ids, check_texts
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan, max_length_for
from whimbrel.types.request import DetokenizeRequest, OutputName, Request, Similarity, TokenizeRequest
from whimbrel.types.seq import PairTokens, Seq, TokenInfo, TokenOffsets

S = TypeVar("S")
T = TypeVar("T")

_INLINE_TEXTS: Final = 32
_INLINE_CHARACTERS: Final = 2000
"""Up to so many texts of so many characters together are tokenised in the event loop; more would hold it up."""
_MAX_WAITING: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """What a request asks, and its texts, tokenised."""

    card: Card
    specs: list[OutputSpec]
    seqs: list[Seq]
    merge: ChunkMerge | Deduplication | None = None
    token_offsets: list[TokenOffsets] | None = None
    pair_scoring: PairScoring | None = None
    tokens: list[PairTokens] | None = None
    reduction: TokenReduction | None = None


class Preprocessor:
    """The part of a model that runs before the device. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._plan = plan
        for output in card.outputs.values():
            require_scipy(output.token_pooling)
        self._tokenizers = [
            self._tokenizer(folder, tower, replace(plan, max_length=max_length_for(plan, card, tower)), number)
            for number, tower in enumerate(card.towers or (card,))
        ]

    def preprocess(self, request: Request, *, received: float | None = None) -> EngineRequest:
        """Check and tokenise a request. `received` is when it came (perf_counter); by default now.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        received = perf_counter() if received is None else received
        with Timer("tokenize") as tokenized:
            request = self._truncate_sides(request)
            read = self._encode_pairs(request) if scores_by_similarity(self._card, request) else self._deduplicate(request)
        seqs = read.seqs
        num_tokens = sum(seq.ids.size for seq in seqs)
        if num_tokens > self._plan.max_request_tokens:
            raise TooLarge(
                f"the request has {num_tokens:,} tokens; the limit is {self._plan.max_request_tokens:,}. Send fewer texts at "
                "once, or start the server with a larger --max-request-tokens.",
                param="input",
            )
        places = plan_layout(read.card, seqs, read.specs)
        if read.reduction is not None:
            self._check_reduction(read, places)
        prepared = EngineRequest(
            seqs,
            places,
            num_tokens=num_tokens,
            num_truncated=sum(seq.truncated for seq in seqs),
            received=received,
            tokenize=tokenized.seconds,
            priority=request.priority,
            deadline=request.deadline,
            tenant=request.tenant,
            pair_scoring=read.pair_scoring,
            merge=read.merge,
            reduction=read.reduction,
            token_offsets=read.token_offsets,
            pair_tokens=read.tokens,
        )
        if (num_bytes := response_layout(prepared.layout, prepared.pair_scoring).num_bytes) > self._plan.max_queue_bytes:
            raise TooLarge(
                f"the answer would take {num_bytes:,} bytes; the limit is {self._plan.max_queue_bytes:,}. Send fewer texts at "
                "once, or shorter ones.",
                param="input",
            )
        return prepared

    def tokenize(self, asked: TokenizeRequest) -> list[TokenInfo]:
        """The tokens of each text. Raises InvalidRequest and TooLarge."""
        texts = check_texts(asked.texts)
        prompt = "" if asked.prompt_name is None else self._card.prompt_text(asked.prompt_name)
        return self._tokenizers[0].backend.tokens(texts, prompt, special=asked.special)

    def decode(self, asked: DetokenizeRequest) -> list[str]:
        """The text of each row of ids. Raises InvalidRequest."""
        rows = check_ids([np.asarray(row, np.int64) for row in asked.ids], self._card.encoder.vocab_size)
        return self._tokenizers[0].backend.texts(rows, special=asked.special)

    def _truncate_sides(self, request: Request) -> Request:
        if request.max_query_tokens is None and request.max_document_tokens is None:
            return request
        compares = scores_by_similarity(self._card, request)
        towers = [self._card.tower_for(side) if compares else 0 for side in ("query", "document")]
        return truncate_sides(request, *(self._tokenizers[tower].backend for tower in towers))

    def _deduplicate(self, request: Request) -> _Encoded:
        """As `_read`; pairs that are alike run once."""
        texts = request.texts
        if request.outputs != ("scores",) or len(set(map(type, texts))) != 1 or not isinstance(texts[0], tuple):
            return self._encode(request)
        try:
            place: dict[object, int] = {}
            place_N = np.fromiter((place.setdefault(pair, len(place)) for pair in texts), np.int64, len(texts))
        except TypeError:  # what is in them cannot be hashed, and is no text
            return self._encode(request)
        if len(place) == len(texts):
            return self._encode(request)
        first_M = np.unique(place_N, return_index=True)[1]
        repeat = Deduplication(place_N, first_M)
        try:
            read = self._encode(replace(request, texts=[texts[i] for i in first_M.tolist()]))
        except WhimbrelError as error:
            raise map_error_location(error, repeat) from None
        return replace(read, merge=repeat)

    def _encode(self, request: Request) -> _Encoded:
        number = self._card.tower_for(request.input_type)
        card = self._card.tower(number)
        asks = resolve_outputs(card, request, matryoshka=self._plan.matryoshka)
        validate_for_outputs(card, request, [ask.name for ask in asks])
        late = next((ask for ask in asks if ask.name == "multi_vector"), None)
        condense = None if late is None else resolve_reduction(card.outputs["multi_vector"], request, late)
        return _Encoded(card, asks, *self._tokenize_texts(self._tokenizers[number], card, request, asks), reduction=condense)

    def _encode_pairs(self, request: Request) -> _Encoded:
        """Pairs of which each text is encoded once, queries first."""
        output, similarity = scoring_method(self._card, request)
        if request.muvera is not None:
            raise InvalidRequest("pairs are compared by their token vectors themselves.", param="muvera")
        card = self._card.tower(self._card.tower_for("query"))
        width = (
            max_sparse_entries(card)
            if output == "sparse"
            else resolve_width(card, request, output, matryoshka=self._plan.matryoshka)
        )
        queries, documents = split_pairs(request, output, width)
        first = self._side(queries, similarity)
        second = self._side(documents, similarity)
        seqs = [*first.seqs, *(replace(seq, index=seq.index + len(first.seqs)) for seq in second.seqs)]
        num_given = sum(map(len, queries.stored))
        comparison = PairScoring(
            output,
            similarity,
            queries.text_indices(0, len(seqs)),
            documents.text_indices(len(first.seqs), len(seqs) + num_given),
            (*queries.stored, *documents.stored),
            request.explain,
        )
        tokens = self._pair_tokens(output, seqs, comparison) if request.explain else None
        if request.explain and second.reduction is not None and second.seqs:
            raise InvalidRequest("pooled vectors are of no one token; give token_pooling 1.", param="explain")
        return _Encoded(first.card, first.specs, seqs, pair_scoring=comparison, tokens=tokens, reduction=second.reduction)

    def _check_reduction(self, read: _Encoded, places: ResultLayout) -> None:
        """Over documents alone, where they are compared."""
        counts = np.diff(places.by_name["multi_vector"].offsets_N1)
        if read.pair_scoring is not None:
            counts[read.pair_scoring.queries_P[read.pair_scoring.queries_P < counts.size]] = 0
        try:
            assert read.reduction is not None
            read.reduction.check(counts)
        except InvalidRequest as error:
            raise map_error_location(error, None, read.pair_scoring) from None

    def _pair_tokens(self, output: OutputName, seqs: Sequence[Seq], comparison: PairScoring) -> list[PairTokens]:
        """The tokens that have a vector, of both texts of each pair."""
        found: list[tuple[str, ...] | None] = []
        for seq in seqs:
            tokenizer = self._tokenizers[seq.tower]
            assert isinstance(tokenizer, Tokenizer)  # one with a template gives no token vectors
            kept_T = token_mask(tokenizer.card.output(output), seq.ids, np.array([0, seq.ids.size]), np.array([seq.is_query]))
            found.append(tokenizer.tokens(seq.ids[kept_T]))
        found += [None] * sum(map(len, comparison.stored))
        pairs = zip(comparison.queries_P.tolist(), comparison.documents_P.tolist(), strict=True)
        return [(found[query], found[document]) for query, document in pairs]

    def _side(self, side: PairSide, similarity: Similarity) -> _Encoded:
        with relocating(side.map_location):
            read = self._encode(side.request)
        asks = [
            replace(ask, activated=ask.activated or similarity == "cosine", keep_on_device=ask.name == "multi_vector")
            for ask in read.specs
        ]
        return replace(read, specs=asks)

    def _tokenizer(self, folder: Path, card: Card, plan: Plan, tower: int) -> Tokenizer | TemplateTokenizer:
        return TemplateTokenizer(folder, card, plan) if card.template else Tokenizer(folder, card, plan, tower=tower)

    def _tokenize_texts(
        self, tokenizer: Tokenizer | TemplateTokenizer, card: Card, request: Request, asks: Sequence[OutputSpec]
    ) -> tuple[list[Seq], ChunkMerge | None, list[TokenOffsets] | None]:
        """The seqs; how their vectors become those of the texts; and of which characters their tokens are, if that is asked."""
        if request.late_chunking or request.split_long:
            return *self._tokenize_chunks(tokenizer, card, request, asks), None
        if request.return_offsets:
            assert isinstance(tokenizer, Tokenizer)  # one with a template gives no scores of tokens
            seqs, spans = encode_with_offsets(tokenizer, request)
            return seqs, None, spans
        return tokenizer.encode(request), None, None

    def _tokenize_chunks(
        self, tokenizer: Tokenizer | TemplateTokenizer, card: Card, request: Request, asks: Sequence[OutputSpec]
    ) -> tuple[list[Seq], ChunkMerge | None]:
        param = "late_chunking" if request.late_chunking else "split_long"
        if request.late_chunking and request.split_long:
            raise InvalidRequest("cannot go with split_long: it runs all texts in one pass.", param=param)
        if [ask.name for ask in asks] != ["dense"] or isinstance(tokenizer, TemplateTokenizer):
            raise InvalidRequest("is for dense vectors alone.", param=param)
        if not request.late_chunking:
            return encode_split(tokenizer, request, normalized=asks[0].activated)
        if set(card.dense.modes) != {"mean"}:
            raise InvalidRequest(
                f"is for models that pool by the mean; this one by {', '.join(card.dense.modes)}.", param=param
            )
        return encode_document(tokenizer, request), None


class AsyncPreprocessor:
    """The same for asyncio: what takes long runs in threads, since tokenising holds no lock of Python's."""

    def __init__(self, frontend: Preprocessor) -> None:
        self._frontend = frontend
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-tokenizer")
        self._waiting = 0

    async def preprocess(self, request: Request) -> EngineRequest:
        """As Frontend.prepare, of a request that comes now. Raises Overloaded and Unavailable too."""
        received = perf_counter()
        if _is_small(request):
            return self._frontend.preprocess(request, received=received)
        return await self._in_thread(partial(self._frontend.preprocess, received=received), request)

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

    async def tokenize(self, asked: TokenizeRequest) -> list[TokenInfo]:
        """As Frontend.tokenize."""
        return await self._in_thread(self._frontend.tokenize, asked)

    async def decode(self, asked: DetokenizeRequest) -> list[str]:
        """As Frontend.decode."""
        return await self._in_thread(self._frontend.decode, asked)

    def close(self) -> None:
        """Finish what has begun."""
        self._threads.shutdown()


def input_size(text: object) -> int:
    """Characters of a text or of a pair, or ids. What is none of these, as vectors, costs no tokens."""
    if isinstance(text, str):
        return len(text)
    if isinstance(text, tuple):
        return sum(len(part) for part in cast(tuple[object, ...], text) if isinstance(part, str))
    return text.size if isinstance(text, np.ndarray) else 0


def _is_small(request: Request) -> bool:
    if len(request.texts) > _INLINE_TEXTS or sum(map(input_size, request.texts)) > _INLINE_CHARACTERS:
        return False
    return not any(
        isinstance(pair, tuple) and set(map(type, cast(tuple[object, ...], pair))) != {str} for pair in request.texts
    )
