"""Engine: requests in, Futures out, and the verbs.

`submit` checks a request, tokenises it in the caller's thread and hands its seqs to the lanes; everything else is a view of it.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from whimbrel.checkpoint.locate import Checkpoint, resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.document_cache import DocumentCache, cache_key
from whimbrel.engine.job import BatchObserver, Job, RunnerProtocol
from whimbrel.engine.lanes import Lanes
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.engine.prepare import Preprocessor
from whimbrel.engine.prepared import EngineRequest
from whimbrel.errors import CheckpointError, NonFinite, SetupError, relocating
from whimbrel.outputs import scoring
from whimbrel.outputs.entities import Aggregation
from whimbrel.outputs.layout import plan_layout, response_layout
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.scoring import Operation, Texts
from whimbrel.telemetry.trace import count
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card, PoolingOption, RerankerName
from whimbrel.types.options import ScoreOptions, TextOptions, reject_muvera, require, require_muvera, text_request
from whimbrel.types.plan import EngineOptions, Options, Plan, make_plan, max_length_for
from whimbrel.types.request import OutputName, Pair, Request, VectorInput
from whimbrel.types.result import Classes, Entity, Explanation, Outputs, Ragged, Ranked, Result, Sparse
from whimbrel.types.seq import Seq

if TYPE_CHECKING:
    from whimbrel.model.maxsim_scorer import MaxSimScorer

T = TypeVar("T")

ProgressCallback: TypeAlias = Callable[[str], None]
"""Called with the name of each phase of loading as it begins."""


def ignore_progress(_: str) -> None:
    """Progress that nobody hears of."""


class Engine:
    """A model, loaded and running in this process. Safe to call from many threads; use it as a context manager.

    `model` is a folder or a hub id; None is the packaged all-MiniLM-L6-v2. `pooling` is needed for a checkpoint that does not
    say how its tokens are pooled, `reranker` for one that judges pairs and does not say how. The other options are those of
    `Options`. On a CPU, PyTorch's operations use one thread each in the engine's threads and in threads started later. An
    engine that is not closed keeps its threads and its weights until the process ends; it does not survive a fork. Raises
    SetupError or CheckpointError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pooling: PoolingOption | None = None,
        reranker: RerankerName | None = None,
        progress: ProgressCallback = ignore_progress,
        recorder: Callable[[Engine], BatchObserver] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """`recorder` is called once the plan is made, and what it returns is told what is on the device."""
        progress("finding the checkpoint")
        checkpoint = resolve_checkpoint(model)
        progress("reading the card")
        self.card: Card = read_card(checkpoint.folder, checkpoint.name, pooling=pooling, reranker=reranker)
        progress("importing PyTorch")  # not before: what is wrong with a model's name or its files is said in no time
        from whimbrel.model.runner import probe

        self.plan: Plan = make_plan(Options(**options), self.card, probe())
        self.folder = checkpoint.folder
        self._document_cache = DocumentCache[Any](self.plan.document_cache_bytes) if self.plan.document_cache_bytes else None
        self.preprocessor = Preprocessor(checkpoint.folder, self.card, self.plan)
        recording = None if recorder is None else recorder(self)
        progress("loading the weights")
        load = partial(load_runner, checkpoint, self.card, wrapper=os.environ.get("WHIMBREL_RUNNER"))
        exact = replace(self.plan, device="cpu", dtype="float32")
        load_second = None if exact == self.plan else partial(load, exact)
        if self.plan.device == "cpu":
            tune_glibc_malloc()
        runner = load(self.plan)
        self.plan = self.plan.with_same_bits(runner.unstable)
        self._lanes = Lanes(runner, self.card, self.plan, load_second=load_second, recorder=recording)
        atexit.register(self.close)  # its threads must not be inside torch while the interpreter goes down
        try:
            progress("warming up")
            self._warm_up()
        except BaseException:
            self.close()
            raise

    # The verbs

    def embed(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """Dense vectors of `texts`: float32, (N, D), or (D,) for a single string. The options are those of TextOptions."""
        vectors = self.run(text_request(self.card, texts, ("dense",), **options)).dense
        return vectors[0] if isinstance(texts, str) else vectors

    def sparse(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Sparse:
        """Weights of vocabulary entries, for each of `texts`. The options are those of TextOptions."""
        return require(self.encode(texts, ("sparse",), **options).sparse)

    def multi_vector(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Ragged:
        """A vector for each token that counts, for each of `texts`. The options are those of TextOptions, but for `muvera`."""
        reject_muvera(options)
        return require(self.encode(texts, ("multi_vector",), **options).multi_vector)

    def muvera(self, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Float32Array:
        """A vector in place of token vectors (see whimbrel.outputs.muvera): float32, (N, E), or (E,) for a single string.

        The options are those of TextOptions; `input_type` must be given, and `muvera` may give parameters."""
        vectors = require(self.encode(texts, ("multi_vector",), **require_muvera(options)).muvera)
        return vectors[0] if isinstance(texts, str) else vectors

    def encode(
        self, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
    ) -> Outputs:
        """Any of the outputs that the model gives, all from one pass; none named: what the model is made for.

        The options are those of TextOptions. A single string is a list of one.
        """
        return self.run(text_request(self.card, texts, outputs, **options)).outputs

    def score(self, queries: Texts, documents: Texts, **options: Unpack[ScoreOptions]) -> Float32Array:
        """How well documents answer queries: float32, (N,), or (N, C) of a model with C classes.

        One query goes with each document; else there are as many queries as documents. Of models that compare vectors, those
        may stand for any text, as the other verbs give them or in fewer bits (`given`). The options are those of ScoreOptions.
        """
        return self._answer(scoring.score(self.card, queries, documents, **options))

    def rerank(
        self, query: str | VectorInput, documents: Texts, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
    ) -> list[Ranked]:
        """The places of documents and their scores, the best first. The options are those of ScoreOptions."""
        return self._answer(scoring.rerank(self.card, query, documents, top_n=top_n, **options))

    def explain(self, query: str | VectorInput, documents: Texts, **options: Unpack[ScoreOptions]) -> list[Explanation]:
        """Of late-interaction models: what each token of the query found in each document, in their order."""
        return self._answer(scoring.explain(self.card, query, documents, **options))

    def classify(self, texts: str | Iterable[str | Pair], **options: Unpack[ScoreOptions]) -> Classes:
        """The classes of texts or of pairs; a single string is a list of one. The options are those of ScoreOptions."""
        return self._answer(scoring.classify(self.card, texts, **options))

    def token_classify(
        self, texts: str | Iterable[str], aggregation: Aggregation = "simple", **options: Unpack[ScoreOptions]
    ) -> list[list[Entity]]:
        """The entities in each of `texts`; a single string is a list of one. The options are those of ScoreOptions."""
        return self._answer(scoring.token_classify(self.card, texts, aggregation, **options))

    def _answer(self, question: Operation[T]) -> T:
        with relocating(question.locate):
            return question.postprocess(self.run(question.request))

    def run(self, request: Request) -> Result:
        """Answer one request; blocks. Interrupted, it drops what has not run yet."""
        future = self.submit(request)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, request: Request, *, received: float | None = None) -> Future[Result]:
        """Tokenise a request and queue it. Cancelling the Future drops what has not run yet.

        `received` is when the request came (perf_counter), for its timings; by default now. Raises InvalidRequest, TooLong,
        TooLarge, Overloaded, Unavailable, DeadlineExceeded.
        """
        self.check(request)
        return self.submit_prepared(self.preprocessor.preprocess(request, received=received))

    def check(self, request: Request) -> None:
        """Raise Overloaded if a request will be refused, before anything is done for it."""
        self._lanes.check(len(request.texts), priority=request.priority, tenant=request.tenant)

    def submit_prepared(
        self, prepared: EngineRequest, *, out: NDArray[np.uint8] | None = None, tag: object = None, admitted: bool = False
    ) -> Future[Result]:
        """Queue a request that is tokenised already; its outputs are written into `out` if that is given.

        `tag` is what a recorder knows it by. `admitted`: another engine had admitted it, so it is not refused for overload.
        Raises Overloaded, Unavailable, DeadlineExceeded.
        """
        memory = np.empty(response_layout(prepared.layout, prepared.pair_scoring).num_bytes, np.uint8) if out is None else out
        job = Job(Future(), prepared, memory, self._matcher(prepared), tag)
        if prepared.seqs or prepared.pair_scoring is not None:
            self._lanes.add(job, admitted=admitted)
        else:
            job.resolve()
        return job.future

    def _matcher(self, prepared: EngineRequest) -> MaxSimScorer | None:
        """Of pairs that are compared by token vectors, some of which may be known from before."""
        comparison = prepared.pair_scoring
        if comparison is None or comparison.output != "multi_vector":
            return None
        from whimbrel.model.maxsim_scorer import MaxSimScorer

        num_seqs, places = len(prepared.seqs), response_layout(prepared.layout, prepared.pair_scoring)
        matches = places.token_matches_in(np.empty(places.num_bytes, np.uint8))
        if (cache := self._document_cache) is None:
            return MaxSimScorer(comparison, num_seqs, matches=matches)
        ask = prepared.layout.by_name["multi_vector"].spec
        numbers: list[int] = np.setdiff1d(comparison.documents_P, comparison.queries_P).tolist()
        keys = {number: cache_key(prepared.seqs[number], ask, prepared.pooling) for number in numbers if number < num_seqs}
        found = zip(keys, cache.find(list(keys.values())), strict=True)
        kept = {number: rows for number, rows in found if rows is not None}
        count("document_cache_hits", len(kept), model=self.plan.served_name)
        count("document_cache_misses", len(keys) - len(kept), model=self.plan.served_name)
        return MaxSimScorer(comparison, num_seqs, kept, lambda number, rows: cache.add(keys[number], rows), matches)

    # Lifecycle

    @property
    def ready(self) -> bool:
        """Whether requests are answered: neither closed nor broken."""
        return self._lanes.ready

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a lane."""
        return self._lanes.queued_tokens

    @property
    def small_tokens(self) -> int:
        """Those of them that belong to small requests, which run first."""
        return self._lanes.small_tokens

    @property
    def rate(self) -> float:
        """Tokens per second while there is work, of late; 0 while nothing was measured."""
        return self._lanes.rate

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        self._lanes.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _warm_up(self) -> None:
        """A short and a long text on every lane, so that the first caller does not pay for first-time work."""
        for number, tower in enumerate(self.card.towers or (self.card,)):
            longest = min(max_length_for(self.plan, self.card, tower), self.plan.max_batch_tokens)
            ids = np.full(longest, tower.encoder.pad_id, np.int32)
            asks = [OutputSpec(name, output.width, True) for name, output in tower.outputs.items()]
            ways = len(tower.encoder.adapters) + 1
            for size in (1, 16, longest):
                seqs = [
                    Seq(ids[:size], index, adapter=index % ways - 1, tower=number)
                    for index in range(max(self.plan.num_lanes, ways))
                ]
                prepared = EngineRequest(seqs, plan_layout(tower, seqs, asks), size * len(seqs), 0, perf_counter(), 0.0)
                try:
                    self.submit_prepared(prepared, admitted=True).result()
                except NonFinite:
                    file = f"{tower.path}/config.json".lstrip("/")
                    raise CheckpointError("gives NaN or infinity though all its weights are finite.", file=file) from None
        self._lanes.reset_throughput()


def load_runner(checkpoint: Checkpoint, card: Card, plan: Plan, *, wrapper: str | None) -> RunnerProtocol:
    """Load the runner, in a wrapper for tests if one is named as `module:callable`.

    The callable takes the runner, the folder of the tokenizer and the plan, and returns a runner. The name comes from
    WHIMBREL_RUNNER in the environment of this process; no request and no checkpoint can set it. Raises SetupError.
    """
    from whimbrel.model.runner import Runner

    runner = Runner(checkpoint, card, plan)
    if wrapper is None:
        return runner
    logging.getLogger("whimbrel").warning("WHIMBREL_RUNNER=%s wraps the runner. It is made for tests.", wrapper)
    module, _, name = wrapper.partition(":")
    try:
        wrap = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"WHIMBREL_RUNNER={wrapper}: {error}.", hint="It takes module:callable.") from error
    return wrap(runner, checkpoint.folder / card.path, plan)
