"""Engine and AsyncEngine: requests in, Futures out, and the verbs.

`submit` checks a request, tokenizes it in the caller's thread and queues it for the lanes. Every verb is a view of `submit`.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeAlias, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from whimbrel.checkpoint.fingerprint import revision_of
from whimbrel.checkpoint.json_file import accepting
from whimbrel.checkpoint.load_progress import naming_phases
from whimbrel.checkpoint.locate import Checkpoint, resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine import encode_verbs
from whimbrel.engine.dispatcher import Dispatcher, LoadStats
from whimbrel.engine.document_cache import ENTRY_BYTES, cache_key
from whimbrel.engine.engine_request import BatchObserver, EngineRequest, Job
from whimbrel.engine.finish_pool import FinishPool
from whimbrel.engine.lanes import Lanes
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.engine.prepare import AsyncPreprocessor, Preprocessor
from whimbrel.errors import CheckpointError, NonFinite, OutOfMemory, SetupError, relocating
from whimbrel.model.byte_cache import ByteCache
from whimbrel.outputs import scoring
from whimbrel.outputs.finishers import Finisher, RowsFinisher, score_vectors
from whimbrel.outputs.layout import build_outputs, plan_layout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.scoring import Operation
from whimbrel.telemetry.trace import count
from whimbrel.tokenizer.prefixes import max_prefix_tokens, with_prefix
from whimbrel.types.card import Card
from whimbrel.types.choices import PoolingOption, RerankerName
from whimbrel.types.machine_limits import usable_processors
from whimbrel.types.options import copy_signature, warn_of_truncation
from whimbrel.types.plan import Options, Plan, make_plan, max_length_for
from whimbrel.types.request import DetokenizeRequest, Request, TokenizeRequest
from whimbrel.types.residence import Residence
from whimbrel.types.result import Outputs, Result, Timings
from whimbrel.types.scheduling import ORDINARY, Scheduling
from whimbrel.types.seq import Seq, TokenInfo

if TYPE_CHECKING:
    from whimbrel.model.maxsim_scorer import MaxSimScorer
    from whimbrel.model.runner import Runner

_log = logging.getLogger("whimbrel")

P = ParamSpec("P")
T = TypeVar("T")

ProgressCallback: TypeAlias = Callable[[str], None]
"""Called with the name of each phase of loading as it begins."""

_GPU_FINISH_THREADS: Final = 4
_WARM_TOKENS: Final = 64
"""Tokens of a text in the full batch of the warm-up."""
_MANY_PAIRS: Final = 256
"""Pairs above which a thread starts the comparison, as that takes milliseconds."""


def _sync_method(verb: Callable[Concatenate[Card, P], Operation[T]]) -> Callable[Concatenate[Engine, P], T]:
    def method(self: Engine, *args: P.args, **options: P.kwargs) -> T:
        operation = verb(self.card, *args, **options)
        with relocating(operation.locate):
            result = self.run(operation.request)
            warn_of_truncation(result.num_truncated, options)
            return operation.postprocess(result)

    return copy_signature(method, verb)


def _async_method(verb: Callable[Concatenate[Card, P], Operation[T]]) -> Callable[Concatenate[AsyncEngine, P], Awaitable[T]]:
    async def method(self: AsyncEngine, *args: P.args, **options: P.kwargs) -> T:
        operation = verb(self.card, *args, **options)
        with relocating(operation.locate):
            result = await self.run(operation.request)
            warn_of_truncation(result.num_truncated, options)
            return operation.postprocess(result)

    return copy_signature(method, verb)


class Engine:
    """A model, loaded and running in this process. Safe to call from many threads; use it as a context manager.

    `model` is a folder (a string or a path) or a hub id; None is the packaged all-MiniLM-L6-v2. `pooling` is needed for a
    checkpoint that does not say how its tokens are pooled, `reranker` for one that judges pairs and does not say how. The other
    options are those of `Options`. On a CPU, PyTorch's operations use one thread each in the engine's threads and in threads
    started later. An engine that is not closed keeps its threads and its weights until the process ends; it does not survive a
    fork. Raises SetupError or CheckpointError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        pooling: PoolingOption | None = None,
        reranker: RerankerName | None = None,
        progress: ProgressCallback = lambda _: None,
        observer: Callable[[Engine], BatchObserver] = lambda _: BatchObserver(),
        **options: Unpack[Options],
    ) -> None:
        """`observer` is called once the plan is made; what it returns is told which batches are on the device."""
        progress("finding the checkpoint")
        checkpoint = resolve_checkpoint(None if model is None else os.fspath(model))
        progress("reading the card")
        accepted: str | tuple[str, ...] = options.get("accept_config", ())
        if isinstance(accepted, str):  # of which Python would make letters
            accepted = options["accept_config"] = (accepted,)
        self.card: Card = read_card(
            checkpoint.folder,
            checkpoint.name,
            pooling=pooling,
            reranker=reranker,
            accept_config=accepted,
            adapters=options.get("adapters"),
            prompts=options.get("prompts"),
            tokenizer=options.get("tokenizer"),
        )
        progress("importing PyTorch")  # not before: faults of a model's name or its files are told at once
        from whimbrel.model.runner import probe

        plan = make_plan(options, self.card, probe())
        revision = revision_of(checkpoint.folder, checkpoint.commit, plan.adapters)
        self.plan: Plan = replace(plan, commit=checkpoint.commit, revision=revision)
        self.folder = checkpoint.folder
        num_bytes = self.plan.document_cache_bytes
        self._document_cache = ByteCache[bytes, Any](num_bytes, entry_bytes=ENTRY_BYTES) if num_bytes else None
        progress("loading the tokenizer")
        self.preprocessor = Preprocessor(checkpoint.folder, self.card, self.plan)
        self.plan = replace(self.plan, tokenizer_note=self.preprocessor.compare_with_files(checkpoint.folder))
        batch_observer = observer(self)
        progress("loading the weights")
        if self.plan.device == "cpu":
            tune_glibc_malloc()
        with accepting(accepted), naming_phases(progress):
            runner = load_runner(checkpoint, self.card, self.plan)
        if revision_of(checkpoint.folder, checkpoint.commit, plan.adapters) != revision:
            raise SetupError(f"the files in {checkpoint.folder} changed while they were loaded.", hint="load them again")
        self.plan = self.plan.with_same_bits(runner.unstable)
        self._dispatcher = Dispatcher(self.plan)
        self._finishing = FinishPool(self._dispatcher, _num_finish_threads(self.plan), runner.init_thread)
        self._lanes = Lanes(runner, self.card, self.plan, self._dispatcher, self._finishing, observer=batch_observer)
        atexit.register(self.close)  # its threads must not be inside torch while the interpreter goes down
        try:
            if self.plan.dtype == "int8":
                from whimbrel.engine.quantize import quantize

                progress("measuring int8")
                self.plan = quantize(runner, self._run_now, self.preprocessor, self.card, self.plan)
            progress("warming up")
            self._warm_up()
            if self.plan.device != "cpu":
                self._warm_up_full_batch()
                self._warm_up_forms()
            self._dispatcher.reset_throughput()
        except BaseException:
            self.close()
            raise

    embed = _sync_method(encode_verbs.embed)
    sparse = _sync_method(encode_verbs.sparse)
    multi_vector = _sync_method(encode_verbs.multi_vector)
    muvera = _sync_method(encode_verbs.muvera)
    encode = _sync_method(encode_verbs.encode)
    score = _sync_method(scoring.score)
    rerank = _sync_method(scoring.rerank)
    explain = _sync_method(scoring.explain)
    classify = _sync_method(scoring.classify)
    token_classify = _sync_method(scoring.token_classify)

    def run(self, request: Request, scheduling: Scheduling = ORDINARY) -> Result:
        """Answer one request; blocks. Interrupted, it drops what has not run yet."""
        future = self.submit(request, scheduling)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, request: Request, scheduling: Scheduling = ORDINARY, *, received: float | None = None) -> Future[Result]:
        """Tokenize a request and queue it. Cancelling the Future drops what has not run yet.

        `received` is when the request came (perf_counter), for its timings; by default now. Raises InvalidRequest, TooLong,
        TooLarge, Overloaded, Unavailable, DeadlineExceeded.
        """
        self.check_admission(request, scheduling)
        return self.submit_tokenized(self.preprocessor.preprocess(request, scheduling, received=received))

    def check_admission(self, request: Request, scheduling: Scheduling) -> None:
        """Raise Overloaded if a request would be refused, before anything is done for it."""
        self._dispatcher.check_admission(request.num_inputs, scheduling)

    def submit_tokenized(
        self, request: EngineRequest, *, out: NDArray[np.uint8] | None = None, origin: object = None, admitted: bool = False
    ) -> Future[Result]:
        """Queue a tokenized request; its response is written into `out` if that is given.

        An observer of batches knows it by `origin`. With `admitted` it is not refused for overload, as another engine had
        admitted it. Raises Overloaded, Unavailable, DeadlineExceeded.
        """
        memory = np.empty(request.response.num_bytes, np.uint8) if out is None else out
        job = Job(Future(), request, self._make_finisher(request, memory), origin)
        if request.is_empty:
            timings = Timings(request.tokenize, total=perf_counter() - request.received)
            job.future.set_result(request.result(job.finisher.result(), timings))
        else:
            self._finishing.submit(job, admitted=admitted)
        return job.future

    def _make_finisher(self, request: EngineRequest, memory: NDArray[np.uint8]) -> Finisher:
        """Return the finisher of a request whose response lies in `memory`."""
        layout, pairs, num_seqs = request.layout, request.finish, len(request.seqs)
        if not isinstance(pairs, PairScoring):
            return RowsFinisher(layout, memory, pairs, num_seqs=num_seqs)
        response = build_outputs(request.response, memory, None)
        if pairs.output != "multi_vector":
            return score_vectors(layout, pairs, response, num_seqs=num_seqs)
        return self._make_scorer(request, pairs, response)

    def _make_scorer(self, request: EngineRequest, pairs: PairScoring, response: Outputs) -> MaxSimScorer:
        """Return a scorer by late interaction that takes the vectors of known documents from the cache."""
        from whimbrel.model.maxsim_scorer import MaxSimScorer

        num_seqs, spec = len(request.seqs), request.layout.by_name["multi_vector"].spec
        if (cache := self._document_cache) is None:
            return MaxSimScorer(pairs, num_seqs, response, width=spec.width)
        texts: list[int] = np.setdiff1d(pairs.documents_P, pairs.queries_P).tolist()
        keys = {text: cache_key(request.seqs[text], spec, pairs.poolings) for text in texts if text < num_seqs}
        cached = zip(keys, cache.find(list(keys.values())), strict=True)
        known = {text: rows for text, rows in cached if rows is not None}
        count("document_cache_hits", len(known), model=self.plan.served_name)
        count("document_cache_misses", len(keys) - len(known), model=self.plan.served_name)
        return MaxSimScorer(pairs, num_seqs, response, known, lambda text, rows: cache.add(keys[text], rows), width=spec.width)

    # Lifecycle

    @property
    def ready(self) -> bool:
        """True if requests are answered: the engine is neither closed nor broken."""
        return self._dispatcher.is_open

    @property
    def load(self) -> LoadStats:
        return self._dispatcher.load

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        self._lanes.close()
        self._finishing.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run_now(self, request: EngineRequest) -> Result:
        return self.submit_tokenized(request, admitted=True).result()

    def _warm_up(self) -> None:
        """A short and a long text on every lane, so that the first caller does not pay for first-time work."""
        for number, tower in enumerate(self.card.towers or (self.card,)):
            longest = min(max_length_for(self.plan, self.card, tower), self.plan.max_batch_tokens)
            ids = np.full(longest, tower.encoder.pad_id, np.int32)
            num_adapters = len(tower.encoder.adapters) + 1
            for size in (1, 16, longest):
                seqs = [
                    Seq(ids[:size], index, adapter=index % num_adapters - 1, tower=number)
                    for index in range(max(self.plan.num_lanes, num_adapters))
                ]
                try:
                    self._run_outputs(tower, seqs)
                except NonFinite:
                    file = f"{tower.path}/config.json".lstrip("/")
                    raise CheckpointError("gives NaN or infinity though all its weights are finite.", file=file) from None
                except OutOfMemory:
                    hint = f"a lower --max-length than {longest:,}, --dtype bfloat16 or float16, or --device cpu, may serve it"
                    message = f"the memory of {self.plan.device} has no room for a text of {size:,} tokens beside the weights."
                    raise SetupError(message, hint=hint) from None

    def _warm_up_full_batch(self) -> None:
        """Run a full batch of many texts, so that no caller waits for its memory or kernels. Log it if it does not fit."""
        most = self.plan.max_batch_tokens
        for number, tower in enumerate(self.card.towers or (self.card,)):
            size = min(_WARM_TOKENS, max_length_for(self.plan, self.card, tower), most)
            ids = np.full(size, tower.encoder.pad_id, np.int32)
            self._run_outputs(tower, [Seq(ids, index, tower=number) for index in range(most // size)])
        if (fits := self._dispatcher.token_budget) < most:
            message = "a batch of %d tokens does not fit into the free memory of %s: --max-batch-tokens %d would."
            _log.warning(message, most, self.plan.device, 2 ** (fits.bit_length() - 1))

    def _warm_up_forms(self) -> None:
        """Run a text after a prefix, a query with an expansion and a text in pieces, for which a GPU has other kernels."""
        for number, tower in enumerate(self.card.towers or (self.card,)):
            longest, most = max_length_for(self.plan, self.card, tower), self.plan.max_batch_tokens
            ids = np.full(min(longest, most + 1), tower.encoder.pad_id, np.int32)
            short = Seq(ids[:_WARM_TOKENS], 0, tower=number)
            prefixed = with_prefix(short, short.ids, max_prefix_tokens(tower, self.plan))
            forms = [prefixed] if prefixed.prefix_tokens else []
            if any(form.expansion is not None and not form.expansion.attended for form in tower.text_formats.values()):
                forms.append(replace(short, num_attended=short.ids.size - 1))
            if self.plan.chunked_prefill and longest > most:
                forms.append(replace(short, ids=ids))
            for seq in forms:
                with suppress(OutOfMemory):  # the log has told of it
                    self._run_outputs(tower, [seq])

    def _run_outputs(self, tower: Card, seqs: list[Seq]) -> None:
        """Run seqs of one tower with every output."""
        specs = [OutputSpec(name, output.width, True) for name, output in tower.outputs.items() if output.rows != "none"]
        self._run_now(EngineRequest(seqs, plan_layout(tower, seqs, specs), received=perf_counter()))


class AsyncEngine:
    """The same engine for asyncio: the same verbs, awaited. Loading blocks, as it does for Engine."""

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine | None = None,
        *,
        pooling: PoolingOption | None = None,
        reranker: RerankerName | None = None,
        progress: ProgressCallback = lambda _: None,
        **options: Unpack[Options],
    ) -> None:
        """`model` as for Engine, or an Engine that is loaded already, which is then closed with this one."""
        loaded = isinstance(model, Engine)
        self._engine = model if loaded else Engine(model, pooling=pooling, reranker=reranker, progress=progress, **options)
        self._preprocessor = AsyncPreprocessor(self._engine.preprocessor)
        self.card: Card = self._engine.card
        self.plan: Plan = self._engine.plan

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def status(self) -> str:
        return "ready" if self.ready else "closed"

    @property
    def residence(self) -> Residence:
        return Residence()

    @property
    def queued_tokens(self) -> int:
        return self._engine.queued_tokens

    embed = _async_method(encode_verbs.embed)
    sparse = _async_method(encode_verbs.sparse)
    multi_vector = _async_method(encode_verbs.multi_vector)
    muvera = _async_method(encode_verbs.muvera)
    encode = _async_method(encode_verbs.encode)
    score = _async_method(scoring.score)
    rerank = _async_method(scoring.rerank)
    explain = _async_method(scoring.explain)
    classify = _async_method(scoring.classify)
    token_classify = _async_method(scoring.token_classify)

    async def run(
        self, request: Request, scheduling: Scheduling = ORDINARY, *, charge: Callable[[int], None] | None = None
    ) -> Result:
        """Answer one request. Cancelling it drops what has not been computed yet.

        `charge` gets the number of tokens before any is computed, and may raise.
        """
        self._engine.check_admission(request, scheduling)
        tokenized = await self._preprocessor.preprocess(request, scheduling)
        if charge is not None:
            charge(tokenized.num_tokens)
        return await asyncio.wrap_future(await self._submit(tokenized))

    async def tokenize(self, request: TokenizeRequest) -> list[TokenInfo]:
        """Return the tokens of each text. Raises InvalidRequest and TooLarge."""
        return await self._preprocessor.tokenize(request)

    async def decode(self, request: DetokenizeRequest) -> list[str]:
        """Return the text of each row of token ids. Raises InvalidRequest."""
        return await self._preprocessor.decode(request)

    async def _submit(self, request: EngineRequest) -> Future[Result]:
        if not isinstance(request.finish, PairScoring) or request.finish.num_pairs <= _MANY_PAIRS:
            return self._engine.submit_tokenized(request)
        submitting = asyncio.ensure_future(asyncio.to_thread(self._engine.submit_tokenized, request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: done.exception() or done.result().cancel())
            raise

    async def close(self) -> None:
        """Finish what was accepted, then end the threads."""
        await asyncio.to_thread(self._engine.close)
        self._preprocessor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()


def _num_finish_threads(plan: Plan) -> int:
    """Return the number of threads for slow work after the model: as many as lanes on a CPU, up to 4 beside a GPU's lane."""
    return plan.num_lanes if plan.device == "cpu" else max(1, min(_GPU_FINISH_THREADS, usable_processors() // 4))


def load_runner(checkpoint: Checkpoint, card: Card, plan: Plan) -> Runner:
    """Load the runner of a model, in a wrapper for tests if WHIMBREL_RUNNER names one as `module:callable`.

    The callable takes the runner, the folder of the tokenizer and the plan, and returns a runner. Its module is imported before
    the model is loaded. Only the environment of this process can name it, no request and no checkpoint. Raises CheckpointError
    or SetupError.
    """
    from whimbrel.model.ops.memory import describe_memory, memory_errors
    from whimbrel.model.runner import Runner

    wrap = _find_wrapper()
    try:
        with memory_errors():
            runner = Runner(checkpoint, card, plan)
    except MemoryError as error:
        if plan.device == "cpu":
            raise
        hint = "free it, or choose another --device or a smaller --dtype; --device cpu serves what the host's memory holds"
        raise SetupError(f"the model does not fit: {describe_memory(plan.device)}.", hint=hint) from error
    return runner if wrap is None else wrap(runner, checkpoint.folder / card.path, plan)


def _find_wrapper() -> Callable[..., Runner] | None:
    """Return the callable that WHIMBREL_RUNNER names. Raises SetupError."""
    if (wrapper := os.environ.get("WHIMBREL_RUNNER")) is None:
        return None
    _log.warning("WHIMBREL_RUNNER=%s wraps the runner. It is made for tests.", wrapper)
    module, _, name = wrapper.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"WHIMBREL_RUNNER={wrapper}: {error}.", hint="It takes module:callable.") from error
