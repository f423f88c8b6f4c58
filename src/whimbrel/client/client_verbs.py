"""Verbs of the clients, as functions that return tasks.

Client and AsyncClient run the tasks. The docstrings here are those of their methods. Verbs without a table of dialects are
Whimbrel's own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar, Unpack

from whimbrel.client.dialects import cohere, openai, tei, whimbrel
from whimbrel.client.request_bodies import OutputNames, check_count
from whimbrel.client.responses import Ranking
from whimbrel.client.task import Task, get_task
from whimbrel.errors import InvalidRequest
from whimbrel.outputs.entities import Aggregation, read_entity_labels
from whimbrel.outputs.zero_shot import read_zero_shot
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, check_options, reject_muvera, require, require_muvera
from whimbrel.types.request import OutputName
from whimbrel.types.result import Classes, Entity, Explanation, ListedModel, Outputs, Ragged, Ranked, Sparse, Tokens
from whimbrel.wire.whole_numbers import decode_json

DialectName: TypeAlias = Literal["whimbrel", "openai", "tei", "cohere"]
Encode: TypeAlias = Callable[[str | None, str | Iterable[Any], OutputNames, TextOptions], Task[Outputs]]
Rerank: TypeAlias = Callable[[str | None, Any, Any, ScoreOptions], Task[Ranking]]

_ENCODE: Final[dict[str, Encode]] = {
    "whimbrel": whimbrel.encode, "openai": openai.encode, "tei": tei.encode, "cohere": cohere.encode
}  # fmt: skip
_RERANK: Final[dict[str, Rerank]] = {"whimbrel": whimbrel.rerank, "tei": tei.rerank, "cohere": cohere.rerank}


def _require(dialect: str, known: Iterable[str], verb: str) -> None:
    if dialect not in known:
        raise InvalidRequest(f"the dialect {dialect} has no {verb!r}; those that have it: {', '.join(known)}.", param="dialect")


@dataclass(frozen=True, slots=True)
class Target:
    """Dialect of the servers, and the name of the model there. Raises InvalidRequest."""

    dialect: str
    model: str | None

    def __post_init__(self) -> None:
        if self.dialect not in _ENCODE:
            raise InvalidRequest(f"{self.dialect!r} is not known; it takes {', '.join(_ENCODE)}.", param="dialect")


P = ParamSpec("P")
R = TypeVar("R")
Verb: TypeAlias = Callable[Concatenate[Target, P], Task[R]]


def embed(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Float32Array]:
    """Return dense vectors of `texts`: float32, (N, D), or (D,) for a single string.

    The options are those of `whimbrel.types.options.TextOptions`. Raises InvalidRequest if the model has no dense vectors, and
    TooLong if a text exceeds the limit and `truncate` is "never".
    """
    vectors = encode(to, texts, "dense", **options).then(lambda outputs: require(outputs.dense))
    return vectors.then(lambda vectors_1D: vectors_1D[0]) if isinstance(texts, str) else vectors


def sparse(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Sparse]:
    """Return the sparse vector of each of `texts`: weights of vocabulary entries.

    A single string is a list of one. The options are those of `whimbrel.types.options.TextOptions`.
    """
    return encode(to, texts, "sparse", **options).then(lambda outputs: require(outputs.sparse))


def multi_vector(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Ragged]:
    """Return the token vectors of each of `texts`, for late interaction: float32, (tokens, D) per text.

    A single string is a list of one. The options are those of `whimbrel.types.options.TextOptions` except `muvera`.
    """
    reject_muvera(options)
    return encode(to, texts, "multi_vector", **options).then(lambda outputs: require(outputs.multi_vector))


def muvera(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Float32Array]:
    """Return one MUVERA encoding per text in place of its token vectors: float32, (N, E), or (E,) for a single string.

    `input_type` is required. The other options are those of `whimbrel.types.options.TextOptions`; `muvera` takes parameters.
    """
    vectors = encode(to, texts, "multi_vector", **require_muvera(options)).then(lambda outputs: require(outputs.muvera))
    return vectors.then(lambda vectors_1E: vectors_1E[0]) if isinstance(texts, str) else vectors


def encode(
    to: Target, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
) -> Task[Outputs]:
    """Return several outputs of `texts` from one pass of the model, as attributes of the result.

    `outputs` names them, e.g. ["dense", "sparse"]. Default: the outputs that the model is made for. The options are those of
    `whimbrel.types.options.TextOptions`.
    """
    check_options(options, TextOptions)
    return _ENCODE[to.dialect](to.model, texts, outputs, options)


def score(to: Target, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> Task[Float32Array]:
    """Return the relevance of documents to queries: float32, (N,).

    A single query is scored with each document. Otherwise there must be as many queries as documents. Models that compare
    vectors also take arrays in place of texts, as the other verbs return them. An array of two dimensions holds a vector per
    text, or the token vectors of one text if `score_by` is "multi_vector". The options are those of
    `whimbrel.types.options.ScoreOptions`. Raises InvalidRequest.
    """
    _require(to.dialect, ["whimbrel"], "score")
    return whimbrel.score(to.model, queries, documents, options)


def rerank(
    to: Target, query: Any, documents: Any, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
) -> Task[list[Ranked]]:
    """Return the index and the score of each document, in descending order of score.

    `top_n` limits the result to the best N documents. Default: all. Scores that only the activation has made equal are
    ordered by their logits, other equal ones by the order of the documents. The options are those of
    `whimbrel.types.options.ScoreOptions`. Raises InvalidRequest.
    """
    check_count(top_n, "top_n")
    _require(to.dialect, _RERANK, "rerank")
    return _RERANK[to.dialect](to.model, query, documents, options).then(lambda ranking: ranking.ranked(top_n))


def explain(to: Target, query: Any, documents: Any, **options: Unpack[ScoreOptions]) -> Task[list[Explanation]]:
    """Return the best match of each query token in each document, in the order of the documents.

    Late-interaction models only. The options are those of `whimbrel.types.options.ScoreOptions`. Raises InvalidRequest.
    """
    _require(to.dialect, ["whimbrel"], "explain")
    return whimbrel.explain(to.model, query, documents, options)


def classify(
    to: Target,
    texts: str | Iterable[Any],
    labels: Iterable[str] | None = None,
    *,
    hypothesis_template: str | None = None,
    multi_label: bool = False,
    **options: Unpack[ScoreOptions],
) -> Task[Classes]:
    """Return the class scores of texts or of pairs of texts. A single string is a list of one.

    With `labels`, up to 1,000, a model for natural language inference judges how far each text entails each label (zero-shot
    classification, as in transformers). `hypothesis_template` makes a statement of a label; default: "This example is {}.". The
    scores of a text's labels sum to 1; with `multi_label` each label is judged alone. The options are `prompt`, `activate` and
    `truncate` of `whimbrel.types.options.ScoreOptions`. Raises InvalidRequest.
    """
    _require(to.dialect, ["whimbrel"], "classify")
    zero_shot = read_zero_shot(labels, hypothesis_template, multi_label=multi_label)
    return whimbrel.classify(to.model, texts, zero_shot, options)


def token_classify(
    to: Target,
    texts: str | Iterable[str],
    aggregation: Aggregation = "simple",
    *,
    labels: Iterable[str] | None = None,
    threshold: float | None = None,
    **options: Unpack[ScoreOptions],
) -> Task[list[list[Entity]]]:
    """Return the named entities in each of `texts`. A single string is a list of one.

    `aggregation` combines tokens into entities, as in transformers: "none", "simple" (default), "first", "average" or "max".
    With `labels`, up to 1,000, a GLiNER model finds entities of these: spans with a score above `threshold`, 0.5 by default, of
    which the best are taken and those that overlap them are not.
    The options are `prompt`, `activate` and `truncate` of `whimbrel.types.options.ScoreOptions`. Raises InvalidRequest.
    """
    _require(to.dialect, ["whimbrel"], "token_classify")
    has_labels = labels is not None or threshold is not None
    wanted = read_entity_labels(labels, threshold, aggregation) if has_labels else None
    return whimbrel.token_classify(to.model, texts, aggregation, wanted, options)


def tokenize(to: Target, texts: str | Iterable[str]) -> Task[list[Tokens]]:
    """Return the tokens of each of `texts`, special tokens included and nothing cut. A single string is a list of one."""
    _require(to.dialect, ["whimbrel", "tei"], "tokenize")
    return tei.tokenize(to.model, texts)


def models(to: Target) -> Task[list[ListedModel]]:
    """Return the models that the server serves, by all their names."""
    _require(to.dialect, ["whimbrel", "openai"], "models")
    return get_task("/v1/models", openai.read_models)


def info(to: Target) -> Task[dict[str, Any]]:
    """Return what the server says of its models: of Whimbrel the card and the plan of each, under `models`."""
    _require(to.dialect, ["whimbrel", "tei"], "info")
    return get_task("/info", lambda content: decode_json(dict[str, Any], content))
