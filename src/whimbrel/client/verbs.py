"""The verbs of a client, as tasks: what each asks, and what becomes of the answers. Client and AsyncClient run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import Parameter, signature
from typing import Any, Unpack

from whimbrel.client.dialect import encode_of, only_ours, rerank_of
from whimbrel.client.dialects import whimbrel
from whimbrel.client.request_bodies import check_count
from whimbrel.client.task import Task
from whimbrel.outputs.entities import Aggregation
from whimbrel.outputs.scoring import rank
from whimbrel.types.arrays import Float32Array
from whimbrel.types.options import ScoreOptions, TextOptions, reject_muvera, require, require_muvera
from whimbrel.types.request import OutputName
from whimbrel.types.result import Classes, Entity, Explanation, Outputs, Ragged, Ranked, Sparse


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a client asks: a server of this dialect, for this model."""

    dialect: str
    model: str | None


def copy_signature(method: Callable[..., Any], verb: Callable[..., Any]) -> None:
    """Give a client's method the name, the words and the signature of the verb that it asks, as `help` shows them."""
    update_wrapper(method, verb)
    found = signature(verb)
    _, *parameters = found.parameters.values()
    answer = str(found.return_annotation).removeprefix("Task[").removesuffix("]")
    this = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    vars(method)["__signature__"] = found.replace(parameters=[this, *parameters], return_annotation=answer)


def embed(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Float32Array]:
    """Dense vectors of `texts`: float32, (N, D), or (D,) for a single string."""
    vectors = encode(to, texts, "dense", **options).then(lambda outputs: require(outputs.dense))
    return vectors.then(_only) if isinstance(texts, str) else vectors


def sparse(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Sparse]:
    """Weights of vocabulary entries, for each of `texts`."""
    return encode(to, texts, "sparse", **options).then(lambda outputs: require(outputs.sparse))


def multi_vector(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Ragged]:
    """A vector for each token that counts, for each of `texts`."""
    reject_muvera(options)
    return encode(to, texts, "multi_vector", **options).then(lambda outputs: require(outputs.multi_vector))


def muvera(to: Target, texts: str | Iterable[str], **options: Unpack[TextOptions]) -> Task[Float32Array]:
    """A vector in place of token vectors: float32, (N, E), or (E,) for a single string. `input_type` must be given."""
    vectors = encode(to, texts, "multi_vector", **require_muvera(options)).then(lambda outputs: require(outputs.muvera))
    return vectors.then(_only) if isinstance(texts, str) else vectors


def encode(
    to: Target, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName] = (), **options: Unpack[TextOptions]
) -> Task[Outputs]:
    """Any of the outputs that the model gives, all from one pass; none named: what the model is made for."""
    return encode_of(to.dialect)(to.model, texts, outputs, options)


def score(to: Target, queries: Any, documents: Any, **options: Unpack[ScoreOptions]) -> Task[Float32Array]:
    """How well documents answer queries: (N,). One query goes with each document, else there are as many of both.

    Of models that compare vectors, arrays may stand for texts, as the other verbs give them. An array of two dimensions is
    a vector for each text, unless `score_by` says that it is the token vectors of one.
    """
    only_ours(to.dialect, "score")
    return whimbrel.score(to.model, queries, documents, options)


def rerank(
    to: Target, query: Any, documents: Any, *, top_n: int | None = None, **options: Unpack[ScoreOptions]
) -> Task[list[Ranked]]:
    """The places of documents and their scores, the best first."""
    check_count(top_n, "top_n")
    return rerank_of(to.dialect)(to.model, query, documents, options).then(partial(rank, top_n=top_n))


def explain(to: Target, query: Any, documents: Any, **options: Unpack[ScoreOptions]) -> Task[list[Explanation]]:
    """Of late-interaction models: what each token of the query found in each document, in their order."""
    only_ours(to.dialect, "explain")
    return whimbrel.explain(to.model, query, documents, options)


def classify(to: Target, texts: str | Iterable[Any], **options: Unpack[ScoreOptions]) -> Task[Classes]:
    """The classes of texts or of pairs; a single string is a list of one."""
    only_ours(to.dialect, "classify")
    return whimbrel.classify(to.model, texts, options)


def token_classify(
    to: Target, texts: str | Iterable[str], aggregation: Aggregation = "simple", **options: Unpack[ScoreOptions]
) -> Task[list[list[Entity]]]:
    """The entities in each of `texts`; a single string is a list of one."""
    only_ours(to.dialect, "token_classify")
    return whimbrel.token_classify(to.model, texts, aggregation, options)


def _only(vectors_1D: Float32Array) -> Float32Array:
    return vectors_1D[0]
