"""Preprocessing: Request -> EngineRequest. It runs in the process that received the request.

`Engine.submit_tokenized` makes a job of the result. Knows the card, the plan and the tokenizers; knows nothing of queues,
devices or other processes.
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

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.errors import InvalidRequest, Location, TooLarge, Unavailable, WhimbrelError, relocating
from whimbrel.outputs.finishers import Finish, ReturnRows, ReturnRowsWithOffsets, locate_error
from whimbrel.outputs.layout import plan_layout, token_mask
from whimbrel.outputs.merge import Deduplication
from whimbrel.outputs.multi_vector import TokenReduction, require_scipy, resolve_reduction
from whimbrel.outputs.pair_scoring import PairScoring, PairSide, scoring_method, split_pairs
from whimbrel.outputs.requested import (
    OutputSpec,
    max_sparse_entries,
    resolve_outputs,
    resolve_width,
    scores_by_similarity,
    validate_for_outputs,
)
from whimbrel.telemetry.trace import Timer
from whimbrel.tokenizer.chunking import encode_document, encode_fixed_chunks, encode_split
from whimbrel.tokenizer.listwise import ListTokenizer
from whimbrel.tokenizer.offsets import encode_with_offsets
from whimbrel.tokenizer.pairs import SideCuts, truncate_sides
from whimbrel.tokenizer.probes import compare_with_files
from whimbrel.tokenizer.spans import encode_spans
from whimbrel.tokenizer.template import TemplateTokenizer
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import check_ids, check_texts, has_ids
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.plan import Plan, max_length_for
from whimbrel.types.request import DetokenizeRequest, OutputName, Request, Similarity, TokenizeRequest
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import PairTokens, Seq, TokenInfo

T = TypeVar("T")

_INLINE_TEXTS: Final = 32
_INLINE_CHARACTERS: Final = 2000
"""Limits of a request that is tokenized in the event loop; a larger one would hold the loop up."""


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """The tokenized texts of a request, the outputs that it asks for, and what becomes of their rows."""

    card: Card
    specs: list[OutputSpec]
    seqs: list[Seq]
    finish: Finish
    num_cut: int | None = None
    """Number of texts that were cut; None: that of the seqs."""


class Preprocessor:
    """Checks and tokenizes the requests of one model. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._plan = plan
        for output in card.outputs.values():
            for pooling in (step for stated in output.token_pooling.values() for step in stated.steps):
                require_scipy(pooling)
        self._tokenizers: list[Tokenizer | TemplateTokenizer] = [
            _make_tokenizer(folder, tower, replace(plan, max_length=max_length_for(plan, card, tower)), number)
            for number, tower in enumerate(card.towers or (card,))
        ]
        self._list_tokenizer = card.list_template and ListTokenizer(self._tokenizers[0].backend, card, plan)

    def compare_with_files(self, folder: Path) -> str:
        """Return how tokenizer.json, run as it is, differs from the tokenizer over some texts. Empty: not at all."""
        return compare_with_files(folder, self._card, [each.backend.raw for each in self._tokenizers])

    def preprocess(
        self, request: Request, scheduling: Scheduling = ORDINARY, *, received: float | None = None
    ) -> EngineRequest:
        """Check and tokenize a request. `received` is when it came (perf_counter); by default now.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        received = perf_counter() if received is None else received
        with Timer("tokenize", model=self._plan.served_name) as tokenized:
            by_similarity = scores_by_similarity(self._card, request)
            request, cuts = self._truncate_sides(request, by_similarity=by_similarity)
            encoded = self._encode_pairs(request) if by_similarity else self._encode_distinct(request)
            if cuts is not None:
                texts = _texts_of_seqs(request, by_similarity=by_similarity)
                encoded = replace(encoded, num_cut=cuts.count(texts, encoded.seqs))
        layout = plan_layout(encoded.card, encoded.seqs, encoded.specs)
        engine_request = EngineRequest(
            encoded.seqs,
            layout,
            received,
            tokenized.seconds,
            encoded.finish,
            scheduling,
            num_truncated=sum(seq.truncated for seq in encoded.seqs) if encoded.num_cut is None else encoded.num_cut,
        )
        self._check_sizes(engine_request)
        return engine_request

    def _check_sizes(self, request: EngineRequest) -> None:
        plan = self._plan
        if request.num_tokens > plan.max_request_tokens:
            raise TooLarge(
                f"the request has {request.num_tokens:,} tokens; the limit is {plan.max_request_tokens:,}. Send fewer texts at "
                "once, or start the server with a larger max_request_tokens.",
                param="input",
            )
        _check_reduction(request)
        if request.response.num_bytes > plan.max_queue_bytes:
            raise TooLarge(
                f"the answer would take {request.response.num_bytes:,} bytes; the limit is {plan.max_queue_bytes:,}. "
                "Send fewer texts at once, or shorter ones.",
                param="input",
            )

    def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        """Return the tokens of each text. Raises InvalidRequest and TooLarge."""
        texts = check_texts(request.texts)
        prompt = "" if request.prompt_name is None else self._card.prompt_text(request.prompt_name)
        tokenizer = self._tokenizers[0]
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.token_infos(texts, prompt, special=request.special)
        return tokenizer.backend.tokens(texts, prompt, special=request.special)

    def sample(self, texts: Sequence[str], tower: int) -> list[Int32Array]:
        """Return the token ids of texts for a tower, with special tokens, cut to its limit."""
        tokenizer = self._tokenizers[tower]
        limit = max_length_for(self._plan, self._card, (self._card.towers or (self._card,))[tower])
        return [info.ids_T[:limit] for info in tokenizer.backend.tokens(list(texts), "", special=True)]

    def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        rows = check_ids([np.asarray(row, np.int64) for row in request.ids], self._card.encoder.vocab_size)
        return self._tokenizers[0].backend.texts(rows, special=request.special)

    def _truncate_sides(self, request: Request, *, by_similarity: bool) -> tuple[Request, SideCuts | None]:
        """Cut queries and documents to limits of their own. A listwise reranker does so itself."""
        unlimited = request.max_query_tokens is None and request.max_document_tokens is None
        if unlimited or self._list_tokenizer is not None:
            return request, None
        towers = [self._card.tower_for(side) if by_similarity else 0 for side in ("query", "document")]
        return truncate_sides(request, *(self._tokenizers[tower].backend for tower in towers))

    def _encode_distinct(self, request: Request) -> _Encoded:
        """Encode the texts of a request; equal pairs once."""
        texts = request.texts
        if request.hypotheses:
            return self._encode_with_hypotheses(request)
        if self._list_tokenizer is not None:
            return self._encode_lists(request, self._list_tokenizer)
        if self._plan.split_long and self._may_split(request):
            request = replace(request, split_long=True)
        if request.outputs != ("scores",) or len(set(map(type, texts))) != 1 or not isinstance(texts[0], tuple):
            return self._encode(request)
        try:
            numbers: dict[object, int] = {}
            index_N = np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in texts), np.int64, len(texts))
        except TypeError:  # a part that cannot be hashed is not a text: the tokenizer refuses it
            return self._encode(request)
        if len(numbers) == len(texts):
            return self._encode(request)
        first_M = np.unique(index_N, return_index=True)[1]
        finish = Deduplication(index_N, first_M)
        try:
            encoded = self._encode(replace(request, texts=[texts[i] for i in first_M.tolist()]))
        except WhimbrelError as error:
            raise locate_error(error, finish) from None
        return replace(encoded, finish=finish)

    def _encode_with_hypotheses(self, request: Request) -> _Encoded:
        """Encode each distinct text with each hypothesis."""
        if self._card.template is not None or self._card.list_template is not None:
            raise InvalidRequest("are not for a model that puts pairs into a template of its own.", param="hypotheses")
        number = len(request.hypotheses)
        numbers: dict[str, int] = {}
        text_N = np.array([numbers.setdefault(text, len(numbers)) for text in check_texts(request.texts)], np.int64)
        first_M = np.unique(text_N, return_index=True)[1]
        pairs = [(text, hypothesis) for text in numbers for hypothesis in request.hypotheses]

        def locate(location: Location) -> Location:
            if location.item is None:
                return location
            text, hypothesis = divmod(location.item, number)
            return Location("labels", hypothesis) if location.part == 1 else Location("input", int(first_M[text]))

        with relocating(locate):
            encoded = self._encode(replace(request, texts=pairs))
        pair_NH = text_N[:, None] * number + np.arange(number)
        num_cut = len({seq.index // number for seq in encoded.seqs if seq.truncated})
        return replace(encoded, finish=Deduplication(pair_NH.ravel(), np.repeat(first_M, number)), num_cut=num_cut)

    def _encode_lists(self, request: Request, tokenizer: ListTokenizer) -> _Encoded:
        """Encode a query with its documents, for a listwise reranker: their scores, or their vectors."""
        outputs: tuple[OutputName, ...] = request.outputs or ("scores",)
        for name in outputs:
            self._card.output(name)
        if outputs not in (("scores",), ("multi_vector",)) or any(not isinstance(text, tuple) for text in request.texts):
            raise InvalidRequest("this model judges documents together with their query; ask for score or rerank.", item=0)
        validate_for_outputs(self._card, request, outputs)
        unused = ("late_chunking", "split_long", "chunk_tokens", "token_pooling", "muvera", "input_type")
        for param in unused:
            if getattr(request, param):
                raise InvalidRequest("is not for a model that judges lists of documents.", param=param)
        rows = replace(request, outputs=("multi_vector",), normalize=None)
        specs = resolve_outputs(self._card, rows, matryoshka=self._plan.matryoshka)
        return _Encoded(self._card, specs, *tokenizer.encode(request))

    def _may_split(self, request: Request) -> bool:
        """Return whether long texts may run in parts: none is to be cut, and each gets one dense vector."""
        if request.split_long is not None or request.truncate in ("left", "right") or request.max_tokens is not None:
            return False
        if request.late_chunking or request.chunk_tokens or not (request.add_special_tokens or has_ids(request)):
            return False
        tower = self._card.tower_for(request.input_type)
        card = self._card.tower(tower)
        if isinstance(self._tokenizers[tower], TemplateTokenizer) or card.text_template is not None:
            return False
        return (request.outputs or (next(iter(card.outputs)),)) == ("dense",)

    def _encode(self, request: Request) -> _Encoded:
        tower = self._card.tower_for(request.input_type)
        card, tokenizer = self._card.tower(tower), self._tokenizers[tower]
        specs = resolve_outputs(card, request, matryoshka=self._plan.matryoshka)
        validate_for_outputs(card, request, [spec.name for spec in specs])
        if not request.add_special_tokens and not has_ids(request):
            _check_bare(request, tokenizer)
        if request.late_chunking or request.split_long or request.chunk_tokens:
            return _Encoded(card, specs, *_encode_chunks(tokenizer, card, request, specs))
        if card.span_prompt is not None:
            assert isinstance(tokenizer, Tokenizer)  # a model with a template gives no scores of spans
            seqs, offsets = encode_spans(tokenizer, request)
            return _Encoded(card, specs, seqs, ReturnRowsWithOffsets(offsets))
        if request.return_offsets:
            assert isinstance(tokenizer, Tokenizer)  # a model with a template gives no scores of tokens
            seqs, offsets = encode_with_offsets(tokenizer, request)
            return _Encoded(card, specs, seqs, ReturnRowsWithOffsets(offsets))
        multi_vector = next((spec for spec in specs if spec.name == "multi_vector"), None)
        reduction = None if multi_vector is None else resolve_reduction(card.outputs["multi_vector"], request, multi_vector)
        return _Encoded(card, specs, tokenizer.encode(request), reduction or ReturnRows())

    def _encode_pairs(self, request: Request) -> _Encoded:
        """Encode the distinct texts of pairs that are scored by similarity, queries first."""
        output, similarity = scoring_method(self._card, request)
        if request.muvera is not None:
            raise InvalidRequest("pairs are compared by their token vectors themselves.", param="muvera")
        card = self._card.tower(self._card.tower_for("query"))
        if output == "sparse":
            width = max_sparse_entries(card)
        else:
            width = resolve_width(card, request, output, matryoshka=self._plan.matryoshka)
        queries, documents = split_pairs(request, output, width)
        first = self._encode_side(queries, similarity)
        second = self._encode_side(documents, similarity)
        seqs = [*first.seqs, *(replace(seq, index=seq.index + len(first.seqs)) for seq in second.seqs)]
        num_stored = sum(map(len, queries.stored))
        specs, poolings, query_poolings = _join_sides(first, second)
        finish = PairScoring(
            output,
            similarity,
            queries.text_indices(0, len(seqs)),
            documents.text_indices(len(first.seqs), len(seqs) + num_stored),
            (*queries.stored, *documents.stored),
            request.explain,
            poolings,
            query_poolings,
        )
        if request.explain:
            if first.seqs and any(pooling.pool_factor > 1 for pooling in finish.query_poolings):
                raise InvalidRequest("this checkpoint pools queries, so their vectors are of no one token.", param="explain")
            if second.seqs and any(pooling.pool_factor > 1 for pooling in finish.poolings):
                raise InvalidRequest("pooled vectors are of no one token; give token_pooling 1.", param="explain")
            finish = replace(finish, pair_tokens=self._pair_tokens(output, seqs, finish))
        return _Encoded(first.card, specs, seqs, finish)

    def _pair_tokens(self, output: OutputName, seqs: Sequence[Seq], pairs: PairScoring) -> list[PairTokens]:
        """Return the tokens that have a vector, of both texts of each pair; None for stored vectors."""
        tokens: list[tuple[str, ...] | None] = []
        for seq in seqs:
            tokenizer = self._tokenizers[seq.tower]
            assert isinstance(tokenizer, Tokenizer)  # a model with a template gives no token vectors
            mask_T = token_mask(tokenizer.card.output(output), seq.ids, np.array([0, seq.ids.size]), np.array([seq.is_query]))
            tokens.append(tokenizer.tokens(seq.ids[mask_T]))
        tokens += [None] * sum(map(len, pairs.stored))
        texts = zip(pairs.queries_P.tolist(), pairs.documents_P.tolist(), strict=True)
        return [(tokens[query], tokens[document]) for query, document in texts]

    def _encode_side(self, side: PairSide, similarity: Similarity) -> _Encoded:
        request = side.request
        form = self._card.tower(self._card.tower_for(request.input_type)).text_formats.get(request.input_type or "document")
        if form is not None and form.has_fixed_length:
            request = replace(request, max_tokens=None)  # the limit is for the documents then
        with relocating(side.locate):
            encoded = self._encode(request)
        specs = [
            replace(spec, activated=spec.activated or similarity == "cosine", keep_on_device=spec.name == "multi_vector")
            for spec in encoded.specs
        ]
        return replace(encoded, specs=specs)


def _join_sides(
    queries: _Encoded, documents: _Encoded
) -> tuple[list[OutputSpec], tuple[TokenPooling, ...], tuple[TokenPooling, ...]]:
    """Return the specs of both sides of pairs, and the poolings of documents and of queries.

    If only one side is normalised before it is pooled, the specs say neither, and that side's first pooling normalises.
    """
    sides = (documents, queries)
    steps = [side.finish.poolings if isinstance(side.finish, TokenReduction) else () for side in sides]
    activated = [any(spec.activated for spec in side.specs) for side in sides]
    if activated[0] == activated[1] or not any(steps):
        return queries.specs, steps[0], steps[1]
    normalizing = (TokenPooling(1.0, normalize_embeddings=True),)
    of_documents, of_queries = ((*normalizing, *own) if is_on else own for own, is_on in zip(steps, activated, strict=True))
    return [replace(spec, activated=False) for spec in queries.specs], of_documents, of_queries


def _make_tokenizer(folder: Path, card: Card, plan: Plan, tower: int) -> Tokenizer | TemplateTokenizer:
    return TemplateTokenizer(folder, card, plan) if card.template else Tokenizer(folder, card, plan, tower=tower)


def _texts_of_seqs(request: Request, *, by_similarity: bool) -> list[tuple[str, int]]:
    """Return the text of each seq of pairs, and its part: 0 for a query. A seq of a pair stands for its document."""
    pairs = cast("Sequence[tuple[object, object]]", request.texts)
    if not by_similarity:
        return [(str(document), 1) for _, document in dict.fromkeys(pairs)]
    sides = (dict.fromkeys(pair[part] for pair in pairs if isinstance(pair[part], str)) for part in (0, 1))
    return [(str(text), part) for part, side in enumerate(sides) for text in side]


def _check_bare(request: Request, tokenizer: Tokenizer | TemplateTokenizer) -> None:
    """Raise InvalidRequest if texts cannot go without their special tokens."""
    if isinstance(tokenizer, TemplateTokenizer):
        raise InvalidRequest("this model's tokens around texts belong to its template.", param="add_special_tokens")
    if request.late_chunking or request.chunk_tokens or request.split_long or request.return_offsets:
        raise InvalidRequest("cannot go with late chunking, split_long or offsets.", param="add_special_tokens")


def _encode_chunks(
    tokenizer: Tokenizer | TemplateTokenizer, card: Card, request: Request, specs: Sequence[OutputSpec]
) -> tuple[list[Seq], Finish]:
    """Encode texts in chunks: those of one document for late chunking, or those of each long text."""
    chosen = [name for name in ("late_chunking", "chunk_tokens", "split_long") if getattr(request, name)]
    param = chosen[0]
    if len(chosen) > 1:
        raise InvalidRequest(f"cannot go with {chosen[1]}.", param=param)
    if [spec.name for spec in specs] != ["dense"] or isinstance(tokenizer, TemplateTokenizer):
        raise InvalidRequest("is for dense vectors alone.", param=param)
    if card.text_template is not None:
        raise InvalidRequest("is not for a model that puts every text into a chat template.", param=param)
    if request.split_long:
        seqs, merge = encode_split(tokenizer, request, normalized=specs[0].activated)
        return seqs, merge or ReturnRows()
    if set(card.dense.modes) != {"mean"}:
        raise InvalidRequest(f"is for models that pool by the mean; this one by {', '.join(card.dense.modes)}.", param=param)
    if request.chunk_tokens is not None:
        seqs, offsets = encode_fixed_chunks(tokenizer, request, request.chunk_tokens)
        return seqs, ReturnRowsWithOffsets(offsets)
    return encode_document(tokenizer, request), ReturnRows()


def _check_reduction(request: EngineRequest) -> None:
    """Reject a reduction that would take too much memory."""
    finish = request.finish
    if not isinstance(finish, TokenReduction | PairScoring) or "multi_vector" not in request.layout.by_name:
        return
    counts = np.diff(request.layout.by_name["multi_vector"].offsets_N1)
    try:
        if isinstance(finish, TokenReduction):
            finish.check(counts)
        else:
            is_query = np.isin(np.arange(counts.size), finish.queries_P)
            TokenReduction(finish.poolings).check(np.where(is_query, 0, counts))
            TokenReduction(finish.query_poolings).check(np.where(is_query, counts, 0))
    except InvalidRequest as error:
        raise locate_error(error, finish) from None


class AsyncPreprocessor:
    """A `Preprocessor` for asyncio. Threads tokenize large requests, as the tokenizer releases the interpreter's lock."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-tokenizer")

    async def preprocess(self, request: Request, scheduling: Scheduling) -> EngineRequest:
        """Async form of `Preprocessor.preprocess`, for a request that comes now. Raises Unavailable too."""
        received = perf_counter()
        if _is_small(request):
            return self._preprocessor.preprocess(request, scheduling, received=received)
        return await self._in_thread(partial(self._preprocessor.preprocess, request, scheduling, received=received))

    async def _in_thread(self, action: Callable[[], T]) -> T:
        try:
            running = self._threads.submit(action)
        except RuntimeError:
            raise Unavailable("the engine is closed.") from None
        return await asyncio.wrap_future(running)

    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        return await self._in_thread(partial(self._preprocessor.tokenize, request))

    async def decode(self, request: DetokenizeRequest) -> list[str]:
        return await self._in_thread(partial(self._preprocessor.decode, request))

    def close(self) -> None:
        """Finish the requests that were accepted, then end the threads."""
        self._threads.shutdown()


def input_size(text: object) -> int:
    """Return the characters of a text or of a pair, or the number of token ids. Stored vectors count nothing."""
    if isinstance(text, str):
        return len(text)
    if isinstance(text, tuple):
        return sum(len(part) for part in cast(tuple[object, ...], text) if isinstance(part, str))
    return text.size if isinstance(text, np.ndarray) else 0


def _is_small(request: Request) -> bool:
    characters = sum(map(input_size, request.texts)) + sum(map(len, (*request.hypotheses, *request.labels)))
    if request.num_inputs > _INLINE_TEXTS or characters > _INLINE_CHARACTERS:
        return False
    return not any(
        isinstance(pair, tuple) and set(map(type, cast(tuple[object, ...], pair))) != {str} for pair in request.texts
    )
