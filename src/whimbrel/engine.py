"""Engine and AsyncEngine: requests in, Futures out.

Theory of operation. `submit` tokenises in the caller's thread and hands the seqs to the scheduler. Each lane is a thread:
it takes a batch, launches it and at once takes the next; the collector, one more thread, waits for launched batches in
order, checks their rows and resolves the Futures. At most two batches per lane are on their way. One lock guards the
scheduler and the table of jobs. A batch that fails is halved and run again until only the requests fail that fail alone.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Final, Self, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from whimbrel.batch import Batch, pack
from whimbrel.card import Card, PoolingMode, read_card
from whimbrel.checkpoint import find_checkpoint
from whimbrel.errors import ComputeError, InvalidRequest, NonFinite, Overloaded, TooLarge, Unavailable, WhimbrelError
from whimbrel.plan import Options, Plan, make_plan
from whimbrel.runner import Pending, Runner, probe
from whimbrel.scheduler import Scheduler
from whimbrel.tokenizer import Tokenizer
from whimbrel.trace import observe, trace
from whimbrel.types import Float32Array, Int32Array, Request, Result, Seq, Timings, Truncate

_BATCHES_PER_LANE: Final = 2

Work: TypeAlias = list[tuple[int, Seq]]
Progress: TypeAlias = Callable[[str], None]


def _say_nothing(_: str) -> None: ...


class EngineOptions(TypedDict, total=False):
    """Engine's keyword arguments."""

    device: str
    dtype: str
    max_length: int | None
    max_batch_tokens: int | None
    max_queue_tokens: int | None
    max_request_tokens: int | None
    matryoshka: bool
    pooling: PoolingMode | None
    served_name: str | None
    progress: Progress | None


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way. Only the collector writes to it after it was added."""

    future: Future[Result]
    vectors_ND: Float32Array
    dimensions: int
    normalize: bool
    num_tokens: int
    num_truncated: int
    submitted: float
    tokenize: float
    waiting: int
    """Texts not collected yet."""
    first_launch: float = 0.0
    compute: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    work: Work
    batch: Batch
    pending: Pending
    started: float
    slots: threading.Semaphore


class Engine:
    """A model, loaded and running in this process. Safe to call from many threads; use it as a context manager.

    `model` is a folder or a hub id; None is the packaged all-MiniLM-L6-v2. On a CPU, PyTorch's number of intra-op threads
    is set to one for the process: lanes are the parallelism. Raises SetupError or CheckpointError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        max_queue_tokens: int | None = None,
        matryoshka: bool = False,
        pooling: PoolingMode | None = None,
        max_request_tokens: int | None = None,
        served_name: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        say = progress or _say_nothing
        say("finding the checkpoint")
        checkpoint = find_checkpoint(model)
        say("reading the card")
        self.card: Card = read_card(checkpoint.folder, checkpoint.name, pooling=pooling)
        options = Options(
            device=device,
            dtype=dtype,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            max_queue_tokens=max_queue_tokens,
            max_request_tokens=max_request_tokens,
            matryoshka=matryoshka,
            served_name=served_name,
        )
        self.plan: Plan = make_plan(options, self.card, probe())
        self._tokenizer = Tokenizer(checkpoint.folder, self.card, self.plan.max_length)
        say("loading the weights")
        self._runner = Runner(checkpoint, self.card, self.plan)
        self._scheduler = Scheduler(self.plan.max_batch_tokens)
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)
        self._jobs: dict[int, _Job] = {}
        self._ids = count()
        self._idle_lanes = 0
        self._closed = False
        self._tokens_done = 0
        self._busy_seconds = 0.0
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._lanes = [
            threading.Thread(target=self._lane, name=f"whimbrel-lane-{i}", daemon=True) for i in range(self.plan.num_lanes)
        ]
        self._collector = threading.Thread(target=self._collect_all, name="whimbrel-collector", daemon=True)
        for thread in (*self._lanes, self._collector):
            thread.start()
        atexit.register(self.close)  # daemon threads must not be inside torch while the interpreter goes down
        try:
            say("warming up")
            self._warm_up()
        except BaseException:
            self.close()
            raise

    # The verbs

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
    ) -> Float32Array:
        """Vectors of `texts`: float32, (N, D), or (D,) for a single string.

        prompt: the name of one of the card's prompts, or a text to put before each input. A single word that is no
            prompt's name is refused, as it is more likely a misspelt name. None: the card's default prompt, if it has one.
        dimensions: keep the first so many columns (Matryoshka models).
        normalize: divide by the Euclidean norm; None: as the checkpoint does.
        truncate: the end to cut from a text that is too long, "right" or "left", or "never" (also False) to raise TooLong;
            None (also True): as the checkpoint's tokenizer does.
        """
        request = embed_request(self.card, texts, prompt=prompt, dimensions=dimensions, normalize=normalize, truncate=truncate)
        vectors = self.run(request).vectors_ND
        return vectors[0] if isinstance(texts, str) else vectors

    def run(self, request: Request) -> Result:
        """Answer one request; blocks."""
        return self.submit(request).result()

    def submit(self, request: Request) -> Future[Result]:
        """Tokenise a request and queue it. Cancelling the Future drops what has not run yet.

        Raises InvalidRequest, TooLong, TooLarge, Overloaded, Unavailable.
        """
        started = perf_counter()
        dimensions = self._check(request)
        with trace("tokenize") as tokenized:
            seqs = self._tokenizer.encode(request)
        num_tokens = sum(seq.ids.size for seq in seqs)
        if num_tokens > self.plan.max_request_tokens:
            raise TooLarge(
                f"the request has {num_tokens:,} tokens; the limit is {self.plan.max_request_tokens:,}. Send fewer texts at "
                "once, or start the server with a larger --max-request-tokens.",
                param="input",
            )
        normalize = self.card.normalize if request.normalize is None else request.normalize
        job = _Job(
            future=Future(),
            vectors_ND=np.empty((len(seqs), dimensions), np.float32),
            dimensions=dimensions,
            normalize=normalize,
            num_tokens=num_tokens,
            num_truncated=sum(seq.truncated for seq in seqs),
            submitted=started,
            tokenize=tokenized.seconds,
            waiting=len(seqs),
        )
        if seqs:
            self._enqueue(job, seqs, self.plan.max_queue_tokens)
        else:
            self._resolve(job)
        return job.future

    # Lifecycle

    @property
    def ready(self) -> bool:
        """Whether requests are answered: not closed, and every thread alive."""
        return not self._closed and all(thread.is_alive() for thread in (*self._lanes, self._collector))

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a lane."""
        return self._scheduler.queued_tokens

    def close(self) -> None:
        """Finish what was accepted, refuse what comes, and end the threads. May be called again."""
        with self._work_waits:
            self._closed = True
            self._work_waits.notify_all()
        for lane in self._lanes:
            lane.join()
        self._launched.put(None)
        self._collector.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Inside

    def _check(self, request: Request) -> int:
        """The width of the vectors asked for."""
        wanted, full, stated = request.dimensions, self.card.dimension, self.card.matryoshka_dimensions
        if wanted is None or wanted == full:
            return full
        if not self.plan.matryoshka:
            raise InvalidRequest(
                f"{wanted:,} are asked for, but this model does not say that its vectors of {full:,} may be cut. "
                "Leave dimensions out, or load the model with --matryoshka.",
                param="dimensions",
            )
        if stated and wanted not in stated:
            raise InvalidRequest(
                f"{wanted:,} are asked for; this model's are {', '.join(map(str, stated))}.", param="dimensions"
            )
        if not 1 <= wanted <= full:
            raise InvalidRequest(f"{wanted:,} are asked for; this model takes 1 to {full:,}.", param="dimensions")
        return wanted

    def _enqueue(self, job: _Job, seqs: list[Seq], max_queue_tokens: int) -> None:
        request_id = next(self._ids)
        with self._work_waits:
            if self._closed:
                raise Unavailable("the engine is closed.")
            queued = self._scheduler.queued_tokens
            if queued and queued + job.num_tokens > max_queue_tokens:
                raise Overloaded(
                    f"{queued:,} tokens wait already; the queue takes {max_queue_tokens:,}. Try again later.",
                    retry_after=self._seconds_of_work(queued),
                )
            self._jobs[request_id] = job
            self._scheduler.add(request_id, seqs)
            self._work_waits.notify(min(len(seqs), len(self._lanes)))
        job.future.add_done_callback(lambda future: self._forget(request_id) if future.cancelled() else None)

    def _seconds_of_work(self, tokens: int) -> float:
        rate = self._tokens_done / self._busy_seconds * len(self._lanes) if self._busy_seconds else 1e4
        return max(1.0, tokens / rate)

    def _forget(self, request_id: int) -> None:
        with self._lock:
            self._scheduler.cancel(request_id)
            self._jobs.pop(request_id, None)

    def _lane(self) -> None:
        self._runner.enter_lane()
        slots = threading.Semaphore(_BATCHES_PER_LANE)
        while work := self._take():
            slots.acquire()
            self._launch(work, slots)

    def _take(self) -> Work:
        """Wait for work; empty when the engine is closed and nothing is left."""
        with self._work_waits:
            self._idle_lanes += 1
            while not (work := self._scheduler.take(self._idle_lanes)) and not self._closed:
                self._work_waits.wait()
            self._idle_lanes -= 1
            now = perf_counter()
            for request_id, _ in work:
                job = self._jobs[request_id]
                if not job.first_launch:
                    job.first_launch = now
                    observe("queue", now - job.submitted - job.tokenize)
            return work

    def _launch(self, work: Work, slots: threading.Semaphore) -> None:
        started = perf_counter()
        try:
            with trace("pack"):
                encoder = self.card.encoder
                batch = pack([seq for _, seq in work], position_offset=encoder.position_offset, pad_id=encoder.pad_id)
                dimensions_B, normalize_B = self._per_seq(work, batch.order_B)
            with trace("compute"):
                pending = self._runner.launch(batch, dimensions_B, normalize_B)
            self._launched.put(_Launched(work, batch, pending, started, slots))
        except BaseException as error:  # whatever it is, the requests get an answer and the lane lives
            slots.release()
            self._launch_failed(work, error)

    def _launch_failed(self, work: Work, error: BaseException) -> None:
        """Run the halves again, so that only what fails alone fails."""
        if len(work) == 1:
            self._fail(work[0][0], ComputeError(f"the batch failed: {type(error).__name__}: {error}"))
            return
        middle = len(work) // 2
        for half in (work[:middle], work[middle:]):
            slots = threading.Semaphore(1)
            self._launch(half, slots)

    def _per_seq(self, work: Work, order_B: Int32Array) -> tuple[Int32Array, NDArray[np.bool_]]:
        with self._lock:
            jobs = [self._jobs.get(request_id) for request_id, _ in work]
        full, as_card = self.card.dimension, self.card.normalize
        dimensions = [job.dimensions if job else full for job in jobs]
        flags = [job.normalize if job else as_card for job in jobs]
        return np.array(dimensions, np.int32)[order_B], np.array(flags, np.bool_)[order_B]

    def _collect_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            try:
                with trace("collect"):
                    vectors_BD = self._runner.collect(launched.pending)
                    self._deliver(launched, vectors_BD)
            except BaseException as error:
                for request_id in {request_id for request_id, _ in launched.work}:
                    self._fail(request_id, ComputeError(f"the batch failed: {type(error).__name__}: {error}"))
            finally:
                launched.slots.release()

    def _deliver(self, launched: _Launched, vectors_BD: Float32Array) -> None:
        bad: set[int] = set(np.flatnonzero(~np.isfinite(vectors_BD).all(axis=1)).tolist())
        places: list[int] = launched.batch.order_B.tolist()
        seconds = perf_counter() - launched.started
        with self._lock:
            self._tokens_done += launched.batch.num_tokens
            self._busy_seconds += seconds
            jobs = {request_id: self._jobs.get(request_id) for request_id, _ in launched.work}
        for job in jobs.values():
            if job is not None:
                job.compute += seconds
        for row, place in enumerate(places):
            request_id, seq = launched.work[place]
            job = jobs[request_id]
            if job is None:  # cancelled, or failed already
                continue
            if row in bad:
                jobs[request_id] = None
                self._fail(request_id, NonFinite("the model gave NaN or infinity for this text.", param=f"input[{seq.index}]"))
                continue
            job.vectors_ND[seq.index] = vectors_BD[row, : job.dimensions]
            job.waiting -= 1
            if job.waiting == 0:
                self._forget(request_id)
                self._resolve(job)

    def _resolve(self, job: _Job) -> None:
        now = perf_counter()
        queue = max(0.0, (job.first_launch or now) - job.submitted - job.tokenize)
        timings = Timings(tokenize=job.tokenize, queue=queue, compute=job.compute, total=now - job.submitted)
        result = Result(job.vectors_ND, job.num_tokens, job.num_truncated, timings)
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(result)

    def _fail(self, request_id: int, error: WhimbrelError) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
        self._forget(request_id)
        if job is not None and job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _warm_up(self) -> None:
        """A short and a long text per lane, so that the first caller does not pay for first-time work."""
        longest = min(self.plan.max_length, self.plan.max_batch_tokens)
        ids = np.full(longest, self.card.encoder.pad_id, np.int32)
        for size in (1, 16, longest):
            seqs = [Seq(ids[:size], index) for index in range(len(self._lanes))]
            vectors = np.empty((len(seqs), self.card.dimension), np.float32)
            job = _Job(Future(), vectors, self.card.dimension, False, size * len(seqs), 0, perf_counter(), 0.0, len(seqs))
            self._enqueue(job, seqs, max_queue_tokens=sys.maxsize)
            job.future.result()


class AsyncEngine:
    """The same engine for asyncio: the same verbs, awaited. Loading blocks, as it does for Engine."""

    def __init__(self, model: str | Engine | None = None, **options: Unpack[EngineOptions]) -> None:
        """`model` as for Engine, or an Engine that is loaded already, which is then closed with this one."""
        self._engine = model if isinstance(model, Engine) else Engine(model, **options)
        # Tokenising holds no lock of Python's, and must not hold up the event loop.
        self._tokenizers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="whimbrel-tokenizer")

    @property
    def card(self) -> Card:
        return self._engine.card

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def queued_tokens(self) -> int:
        return self._engine.queued_tokens

    async def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: Truncate | bool | None = None,
    ) -> Float32Array:
        """As Engine.embed."""
        request = embed_request(self.card, texts, prompt=prompt, dimensions=dimensions, normalize=normalize, truncate=truncate)
        vectors = (await self.run(request)).vectors_ND
        return vectors[0] if isinstance(texts, str) else vectors

    async def run(self, request: Request) -> Result:
        """Answer one request. Cancelling it drops what has not been computed yet."""
        try:
            submitted = self._tokenizers.submit(self._engine.submit, request)
        except RuntimeError:
            raise Unavailable("the engine is closed.") from None
        try:
            future = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(_cancel_inner)
            raise
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Finish what was accepted, then end the threads."""
        await asyncio.to_thread(self._engine.close)
        self._tokenizers.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()


def _cancel_inner(submitted: Future[Future[Result]]) -> None:
    """The caller left while its texts were being tokenised: drop the request that this made."""
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()


def embed_request(
    card: Card,
    texts: str | Iterable[str],
    *,
    prompt: str | None,
    dimensions: int | None,
    normalize: bool | None,
    truncate: Truncate | bool | None,
) -> Request:
    """The Request that the arguments of `embed` stand for. Raises InvalidRequest."""
    is_name = prompt is not None and (prompt in card.prompts or (prompt != "" and prompt.replace("-", "_").isidentifier()))
    if is_name:
        card.prompt_text(prompt or "")
    cuts: Mapping[object, Truncate | None] = {
        None: None, True: None, False: "never", "right": "right", "left": "left", "never": "never"
    }  # fmt: skip
    if truncate not in cuts:
        raise InvalidRequest(f"truncate is {truncate!r}; it takes right, left, never, True or False.", param="truncate")
    return Request(
        [texts] if isinstance(texts, str) else list(texts),
        prompt=None if is_name else prompt,
        prompt_name=prompt if is_name else None,
        dimensions=dimensions,
        normalize=normalize,
        truncate=cuts[truncate],
    )
