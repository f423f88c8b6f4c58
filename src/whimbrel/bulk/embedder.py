"""Embedders: texts to answers, by an engine in this process or by servers. The seam between a run and its model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from whimbrel.bulk.manifest import Text
from whimbrel.client import Client, client_verbs
from whimbrel.client.task import Answered
from whimbrel.engine.engine import Engine
from whimbrel.errors import InvalidRequest, Overloaded, SetupError, Unavailable, WhimbrelError
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.types.arrays import Int32Array
from whimbrel.types.options import ScoreOptions, TextOptions, text_request
from whimbrel.types.request import OutputName, TokenizeRequest
from whimbrel.types.result import Outputs, Result
from whimbrel.types.seq import Pair

A = TypeVar("A")
S = TypeVar("S")

_log = logging.getLogger("whimbrel")

_CHARACTERS_PER_TOKEN: Final = 4
_MIN_REQUEST_TOKENS: Final = 8192
_MAX_TEXTS: Final = 2048
_REQUESTS_OF_ENGINE: Final = 4
_REQUESTS_OF_SERVER: Final = 8
_SERVER_TEXTS: Final = 256
_SERVER_CHARACTERS: Final = 2**17
_FIRST_WAIT: Final = 0.5
_MAX_WAIT: Final = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Outputs of texts."""

    outputs: Outputs
    cut_N: NDArray[np.bool_]
    """True for the texts of which the model read only a part."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Sizes of the requests that an embedder takes best."""

    texts: int
    characters: int
    in_flight: int
    """Number of threads that hold a request each."""


class Embedder(Protocol):
    """A model, as a run sees it. Threads share it."""

    @property
    def model(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the model that change its numbers."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes of scores, if they are known."""
        ...

    @property
    def sizes(self) -> RequestSizes: ...
    def run(self, texts: Sequence[Text]) -> Answer:
        """Return the outputs of texts, or the scores of pairs; blocks. Raises WhimbrelError."""
        ...

    def token_offsets(self, texts: Sequence[str]) -> list[Int32Array]:
        """Return the first character of each token of each text and the one after its last: (T, 2), without special tokens."""
        ...

    def check_chunks(self, tokens: int) -> None:
        """Raise SetupError if the model has no room for chunks of this number of tokens."""
        ...

    def stop(self) -> None:
        """Drop requests that have not run yet, and end waits for servers."""
        ...


class EngineEmbedder:
    """An engine in this process."""

    labels: tuple[str, ...]

    def __init__(self, engine: Engine, outputs: tuple[OutputName, ...], options: TextOptions) -> None:
        self._engine = engine
        self._outputs = outputs
        self._options = options
        self._waiting: set[Future[Result]] = set()
        plan = engine.plan
        self.model = plan.served_name
        self.revision = plan.revision
        self.labels = engine.card.labels
        self.settings: dict[str, Any] = {
            "dtype": plan.dtype,
            "device": plan.device.partition(":")[0],
            "max_length": plan.max_length,
        }
        tokens = max(_MIN_REQUEST_TOKENS, 2 * plan.max_batch_tokens * plan.num_lanes)
        tokens = min(tokens, max(1, plan.max_request_tokens // 8))
        self.sizes = RequestSizes(_MAX_TEXTS, _CHARACTERS_PER_TOKEN * tokens, _REQUESTS_OF_ENGINE)

    def run(self, texts: Sequence[Text]) -> Answer:
        request = text_request(self._engine.card, cast(Any, texts), self._outputs, **self._options)
        tokenized = self._engine.preprocessor.preprocess(request)
        cut_N, pairs = np.array([seq.truncated for seq in tokenized.seqs], np.bool_), tokenized.finish
        if isinstance(pairs, PairScoring):
            cut_N = cut_N[pairs.queries_P] | cut_N[pairs.documents_P]
        elif cut_N.size != len(texts):  # texts that run in parts are not cut
            cut_N = np.zeros(len(texts), np.bool_)
        future = self._engine.submit_tokenized(tokenized, admitted=True)
        self._waiting.add(future)
        try:
            result = future.result()
        finally:
            self._waiting.discard(future)
        return Answer(result.outputs, cut_N, result.num_tokens)

    def token_offsets(self, texts: Sequence[str]) -> list[Int32Array]:
        return [each.chars_T2 for each in self._engine.preprocessor.tokenize(TokenizeRequest(texts, special=False))]

    def check_chunks(self, tokens: int) -> None:
        _check_chunks(tokens, self._engine.plan.max_length, self.run(["a"]).num_tokens - 1)

    def stop(self) -> None:
        for future in tuple(self._waiting):
            future.cancel()


class ServerEmbedder:
    """One or several servers of one model, by our client. A server that is away is waited for.

    All answers must be of one revision. Servers say how many texts of a request they cut, not which; where it is some, the
    texts with the most tokens are those.
    """

    labels: tuple[str, ...] = ()
    sizes = RequestSizes(_SERVER_TEXTS, _SERVER_CHARACTERS, _REQUESTS_OF_SERVER)

    def __init__(
        self,
        client: Client,
        outputs: tuple[OutputName, ...],
        options: TextOptions,
        *,
        model: str | None = None,
        pairs: bool = False,
        wait_seconds: float,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        """Ask the servers once, for their revision. `pairs`: the texts are pairs to score. Raises WhimbrelError.

        `model` is the name that the client asks for, if it asks for one.
        """
        self._client = client
        self._outputs = outputs
        self._options = options
        self._wait_seconds = wait_seconds
        self._tell = tell
        self._stopped = Event()
        self._waiting_since: float | None = None
        self.revision = ""
        about = self._patiently(client.info)
        plans = [each["plan"] for each in cast("Sequence[Mapping[str, Any]]", about.get("models", ()))]
        self.model, self.settings = _settings_of(plans, model)
        self.run([("a", "a") if pairs else "a"])

    def run(self, texts: Sequence[Text]) -> Answer:
        answered = self._patiently(lambda: self._ask(texts))
        for revision in answered.revisions:
            self.revision = self.revision or revision
            if revision != self.revision:
                message = (
                    f"the model changed: this run began with revision {self.revision}, and a server answers with {revision}."
                )
                raise SetupError(message, hint="start anew with --restart, or serve the old one")
        return Answer(answered.value, self._which_cut(texts, answered.num_truncated), answered.num_tokens)

    def _ask(self, texts: Sequence[Text]) -> Answered[Outputs]:
        if not isinstance(texts[0], tuple):
            return self._client.run(client_verbs.encode, cast("list[str]", texts), self._outputs, **self._options)
        queries, documents = zip(*cast("Sequence[Pair]", texts), strict=True)
        answered = self._client.run(client_verbs.score, list(queries), list(documents), **cast(ScoreOptions, self._options))
        scores = np.asarray(answered.value, np.float32).reshape(len(texts), -1)
        return Answered(Outputs(scores=scores), *answered[1:])

    def _which_cut(self, texts: Sequence[Text], number: int) -> NDArray[np.bool_]:
        cut_N = np.full(len(texts), number >= len(texts))
        if 0 < number < len(texts):
            parts = [part for text in texts for part in ((text,) if isinstance(text, str) else text)]
            sizes = [len(tokens) for tokens in self._patiently(lambda: self._client.tokenize(parts))]
            cut_N[np.argsort(-np.array(sizes).reshape(len(texts), -1).sum(axis=1), kind="stable")[:number]] = True
        return cut_N

    def token_offsets(self, texts: Sequence[str]) -> list[Int32Array]:
        return [tokens.chars for tokens in self._patiently(lambda: self._client.tokenize(list(texts)))]

    def check_chunks(self, tokens: int) -> None:
        _check_chunks(tokens, self.settings.get("max_length"), self.run(["a"]).num_tokens - 1)

    def stop(self) -> None:
        self._stopped.set()

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Return what servers answer, which may be away or busy for some time. Raises WhimbrelError."""
        begin, delay = monotonic(), _FIRST_WAIT
        while True:
            try:
                answer = ask()
            except (Unavailable, Overloaded) as error:
                waited, pause = monotonic() - begin, max(delay, error.retry_after)
                if waited + pause > self._wait_seconds or self._stopped.is_set():
                    message = f"gave up after {waited:,.0f} s: {error}"
                    raise SetupError(message, hint="what is finished stays; the same command goes on") from error
                if self._waiting_since is None:
                    self._waiting_since = begin
                    self._tell(f"waiting up to {self._wait_seconds:,.0f} s: {error}")
                self._stopped.wait(pause)
                delay = min(2 * delay, _MAX_WAIT)
                continue
            if self._waiting_since is not None:
                self._waiting_since = None
                self._tell("the servers answer again")
            return answer


def _check_chunks(tokens: int, limit: int | None, around: int) -> None:
    """Raise SetupError for chunks that do not fit into the limit beside the prompt and the special tokens `around` them."""
    if limit is not None and tokens + around > limit:
        reason = f"the model takes {limit:,}, of which prompt and special tokens are {around:,}"
        hint = f"--chunk takes up to {max(1, limit - around):,}"
        raise SetupError(f"chunks of {tokens:,} tokens do not fit: {reason}.", hint=hint)


def _settings_of(plans: Sequence[Mapping[str, Any]], model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name of the model of a server, and those of its settings that change numbers."""
    for plan in plans:
        if model is None or model in (plan["served_name"], *plan["aliases"]):
            return plan["served_name"], {name: plan[name] for name in ("dtype", "max_length")}
    return model or "", {}


def answer_all(run: Callable[[Sequence[S]], A], texts: Sequence[S]) -> tuple[list[tuple[list[int], A]], dict[int, str]]:
    """Return answers, each with the indices of its texts, and the reasons of texts that the model refuses alone.

    A request that fails is sent again without the text that its error names, or in halves. Raises errors that are not about
    texts, and those that any other text has too.
    """
    answers, refused = list[tuple[list[int], A]](), dict[int, str]()
    pending = [list(range(len(texts)))]
    while pending:
        part = pending.pop()
        try:
            answers.append((part, run([texts[index] for index in part])))
        except WhimbrelError as error:
            if not is_of_texts(error):
                raise
            item = None if error.location is None else error.location.item
            if (item is None or item >= len(part)) and len(part) > 1:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
                continue
            if item is None:
                run([cast(S, ("a", "a") if isinstance(texts[0], tuple) else "a")])  # raises if it is not of this text
            bad = part[item] if item is not None and len(part) > 1 else part[0]
            refused[bad] = error.message
            if rest := [index for index in part if index != bad]:
                pending.append(rest)
    return answers, refused


def is_of_texts(error: WhimbrelError) -> bool:
    """Return whether an error may be that of one text: others must stop the run."""
    from whimbrel.errors import ComputeError

    return isinstance(error, ComputeError) or (isinstance(error, InvalidRequest) and error.status in (400, 413, 422))
