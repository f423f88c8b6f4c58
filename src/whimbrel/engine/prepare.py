"""Preprocessing: Request -> EngineRequest, in the process that received the request.

Knows the card, the plan and the tokenizers; knows nothing of queues, devices or other processes.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar, cast

import numpy as np

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare_pairs import encode_pairs
from whimbrel.engine.prepare_texts import Encoded, TextEncoder, Texts, resolve_instruction
from whimbrel.errors import InvalidRequest, Location, TooLarge, Unavailable, WhimbrelError, relocating
from whimbrel.outputs.finishers import locate_error
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.merge import Deduplication
from whimbrel.outputs.multi_vector import TokenReduction, require_scipy
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec, resolve_width, scores_by_similarity, validate_for_outputs
from whimbrel.telemetry.trace import Timer
from whimbrel.tokenizer.list_tokenizer import ListParams, ListTokenizer
from whimbrel.tokenizer.pairs import SideCuts, truncate_sides
from whimbrel.tokenizer.probes import compare_with_files
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import check_ids, check_texts
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.plan import Plan, max_length_for
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import TokenInfo

T = TypeVar("T")

_INLINE_TEXTS: Final = 32
_INLINE_CHARACTERS: Final = 2000
"""Limits of a request that is tokenized in the event loop; a larger one would hold the loop up."""


class Preprocessor:
    """Checks and tokenizes the requests of one model. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._plan = plan
        for output in card.outputs.values():
            for pooling in (step for stated in output.token_pooling.values() for step in stated.steps):
                require_scipy(pooling)
        self._encoder = TextEncoder(folder, card, plan)
        self._list_tokenizer = card.list_template and ListTokenizer(self._encoder.tokenizers[0].backend, card, plan)

    def compare_with_files(self, folder: Path) -> str:
        """Return how tokenizer.json, run as it is, differs from the tokenizer over some texts. Empty: not at all."""
        return compare_with_files(folder, self._card, [each.backend.raw for each in self._encoder.tokenizers])

    def preprocess(
        self, request: Request, scheduling: Scheduling = ORDINARY, *, received: float | None = None
    ) -> EngineRequest:
        """Check and tokenize a request. `received` is when it came (perf_counter); by default now.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        received = perf_counter() if received is None else received
        with Timer("tokenize", model=self._plan.served_name) as tokenized:
            by_similarity = scores_by_similarity(self._card, request)
            texts, cuts = self._truncate_sides(request, by_similarity=by_similarity)
            encoded = encode_pairs(self._encoder, request, texts) if by_similarity else self._encode_distinct(request, texts)
            if cuts is not None:
                encoded = replace(encoded, num_cut=cuts.count(_texts_of_seqs(texts, by_similarity=by_similarity), encoded.seqs))
        layout = plan_layout(encoded.card, encoded.seqs, encoded.specs)
        num_truncated = sum(seq.truncated for seq in encoded.seqs) if encoded.num_cut is None else encoded.num_cut
        engine_request = EngineRequest(
            encoded.seqs, layout, received, tokenized.seconds, encoded.finish, scheduling, num_truncated
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
        tokenizer = self._encoder.tokenizers[0]
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.token_infos(texts, prompt, special=request.special)
        return tokenizer.backend.tokens(texts, prompt, special=request.special)

    def sample(self, texts: Sequence[str], tower: int) -> list[Int32Array]:
        """Return the token ids of texts for a tower, with special tokens, cut to its limit."""
        tokenizer = self._encoder.tokenizers[tower]
        limit = max_length_for(self._plan, self._card, (self._card.towers or (self._card,))[tower])
        return [info.ids_T[:limit] for info in tokenizer.backend.tokens(list(texts), "", special=True)]

    def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        rows = check_ids([np.asarray(row, np.int64) for row in request.ids], self._card.encoder.vocab_size)
        return self._encoder.tokenizers[0].backend.texts(rows, special=request.special)

    def _truncate_sides(self, request: Request, *, by_similarity: bool) -> tuple[Texts, SideCuts | None]:
        """Cut queries and documents to limits of their own. A listwise reranker does so itself."""
        limits = {"max_query_tokens": request.max_query_tokens, "max_document_tokens": request.max_document_tokens}
        if self._list_tokenizer is not None or not any(limits.values()):
            return request.texts, None
        towers = [self._card.tower_for(side) if by_similarity else 0 for side in ("query", "document")]
        return truncate_sides(request.texts, limits, [self._encoder.tokenizers[tower].backend for tower in towers])

    def _encode_distinct(self, request: Request, texts: Texts) -> Encoded:
        """Encode the texts of a request; equal pairs once."""
        if request.hypotheses:
            return self._encode_with_hypotheses(request, texts)
        if self._list_tokenizer is not None:
            return self._encode_lists(request, self._list_tokenizer)
        encoder = self._encoder
        if request.outputs != ("scores",) or len(set(map(type, texts))) != 1 or not isinstance(texts[0], tuple):
            return encoder.encode(request, texts, splits=encoder.may_split(request, texts))
        try:
            numbers: dict[object, int] = {}
            index_N = np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in texts), np.int64, len(texts))
        except TypeError:  # a part that cannot be hashed is not a text: the tokenizer refuses it
            return encoder.encode(request, texts)
        if len(numbers) == len(texts):
            return encoder.encode(request, texts)
        finish = Deduplication(index_N, np.unique(index_N, return_index=True)[1])
        try:
            encoded = encoder.encode(request, list(numbers))
        except WhimbrelError as error:
            raise locate_error(error, finish) from None
        return replace(encoded, finish=finish)

    def _encode_with_hypotheses(self, request: Request, texts: Texts) -> Encoded:
        """Encode each distinct text with each hypothesis."""
        if self._card.template is not None or self._card.list_template is not None:
            raise InvalidRequest("are not for a model that puts pairs into a template of its own.", param="hypotheses")
        number = len(request.hypotheses)
        numbers: dict[str, int] = {}
        text_N = np.array([numbers.setdefault(text, len(numbers)) for text in check_texts(texts)], np.int64)
        first_M = np.unique(text_N, return_index=True)[1]
        pairs = [(text, hypothesis) for text in numbers for hypothesis in request.hypotheses]

        def locate(location: Location) -> Location:
            if location.item is None:
                return location
            text, hypothesis = divmod(location.item, number)
            return Location("labels", hypothesis) if location.part == 1 else Location("input", int(first_M[text]))

        with relocating(locate):
            encoded = self._encoder.encode(request, pairs)
        pair_NH = text_N[:, None] * number + np.arange(number)
        num_cut = len({seq.index // number for seq in encoded.seqs if seq.truncated})
        return replace(encoded, finish=Deduplication(pair_NH.ravel(), np.repeat(first_M, number)), num_cut=num_cut)

    def _encode_lists(self, request: Request, tokenizer: ListTokenizer) -> Encoded:
        """Encode a query with its documents, for a listwise reranker: their scores, or their vectors."""
        card, outputs = self._card, request.outputs or ("scores",)
        for name in outputs:
            card.output(name)
        if outputs not in (("scores",), ("multi_vector",)) or any(not isinstance(text, tuple) for text in request.texts):
            raise InvalidRequest("this model judges documents together with their query; ask for score or rerank.", item=0)
        validate_for_outputs(card, request, outputs)
        unused = ("late_chunking", "split_long", "chunk_tokens", "token_pooling", "muvera", "input_type")
        for param in unused:
            if getattr(request, param):
                raise InvalidRequest("is not for a model that judges lists of documents.", param=param)
        if request.max_tokens is not None:
            message = "a prompt holds many texts; limit each with max_query_tokens and max_document_tokens."
            raise InvalidRequest(message, param="max_tokens")
        if not request.add_special_tokens:
            raise InvalidRequest("this model's tokens around texts belong to its template.", param="add_special_tokens")
        params = ListParams(
            resolve_instruction(card, request),
            request.max_query_tokens or tokenizer.template.max_query_tokens,
            request.max_document_tokens or tokenizer.template.max_document_tokens,
            request.truncate or "right",
            card.adapter(None, request.adapter),
        )
        seqs, scoring, num_cut = tokenizer.encode(request.texts, params, as_list=request.listwise)
        scoring = replace(scoring, returns_vectors="multi_vector" in outputs, normalized=bool(request.normalize))
        width = resolve_width(card, request, "multi_vector", matryoshka=self._plan.matryoshka)
        specs = [OutputSpec("multi_vector", width, card.output("multi_vector").activated)]
        return Encoded(card, specs, seqs, scoring, num_cut)


def _texts_of_seqs(texts: Texts, *, by_similarity: bool) -> list[tuple[str, int]]:
    """Return the text of each seq of pairs, and its part: 0 for a query. A seq of a pair stands for its document."""
    pairs = cast("Sequence[tuple[object, object]]", texts)
    if not by_similarity:
        return [(str(document), 1) for _, document in dict.fromkeys(pairs)]
    sides = (dict.fromkeys(pair[part] for pair in pairs if isinstance(pair[part], str)) for part in (0, 1))
    return [(str(text), part) for part, side in enumerate(sides) for text in side]


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
        preprocess = partial(self._preprocessor.preprocess, request, scheduling, received=perf_counter())
        return preprocess() if _is_small(request) else await self._in_thread(preprocess)

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


def _is_small(request: Request) -> bool:
    """Return whether a request has few characters or token ids, and no stored vectors."""
    if request.num_inputs > _INLINE_TEXTS:
        return False
    size = sum(map(len, (*request.hypotheses, *request.labels)))
    for text in request.texts:
        for part in cast("tuple[object, ...]", text) if isinstance(text, tuple) else (text,):
            if isinstance(text, tuple) and not isinstance(part, str):
                return False
            size += len(part) if isinstance(part, str) else part.size if isinstance(part, np.ndarray) else 0
    return size <= _INLINE_CHARACTERS
