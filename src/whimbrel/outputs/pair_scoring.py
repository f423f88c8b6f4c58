"""Pair scoring by similarity: scores of pairs from a model that has none of its own. numpy only.

Each distinct text is encoded once and its vectors are compared. The first text of a pair is a query and the second a document.
The card's prompts for queries and documents apply, and a requested prompt stands before queries. Either part may be vectors
that the caller stored.

Dense and sparse vectors are compared here, token vectors by `model/maxsim_scorer.py`. A score has the same bits alone and among
any others: products are summed row by row, in an order that depends only on the width. Distances are negative, so that similar
texts score high. Source: sentence_transformers/util/similarity.py (6.2).

Shapes: P pairs, N texts, D columns, V vocabulary entries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from whimbrel.errors import InvalidRequest, Location
from whimbrel.outputs.requested import SIMILARITIES, default_scoring_output
from whimbrel.outputs.stored_vectors import StoredVectors, store_vectors, to_float32
from whimbrel.types.arrays import Float32Array, Int32Array
from whimbrel.types.batch import offsets_of, ranges
from whimbrel.types.card import Card
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import InputType, OutputName, PairInput, Request, Similarity
from whimbrel.types.result import Outputs, Sparse
from whimbrel.types.seq import PairTokens


@dataclass(frozen=True, slots=True, eq=False)
class PairScoring:
    """Scoring of pairs by similarity: text queries_P[i] against documents_P[i]. The seqs are numbered first, then `stored`."""

    output: OutputName
    similarity: Similarity
    queries_P: Int32Array
    documents_P: Int32Array
    stored: tuple[StoredVectors, ...] = ()
    explain: bool = False
    """True if the response says which document token each query token matches best."""
    poolings: tuple[TokenPooling, ...] = ()
    """Poolings of the documents' token vectors."""
    query_poolings: tuple[TokenPooling, ...] = ()
    pair_tokens: Sequence[PairTokens] | None = None
    """The tokens of each pair, of an explanation. They stay in the process that tokenized the request."""

    @property
    def num_pairs(self) -> int:
        return self.queries_P.size

    def locate(self, seq: int, location: Location) -> Location:
        """Return the location of a seq as a part (0: query, 1: document) of the first pair that it is in."""
        if location.part is not None:  # it was located where it was found
            return location
        part = int(seq not in self.queries_P)
        return Location("input", int(np.flatnonzero((self.queries_P, self.documents_P)[part] == seq)[0]), part)


def scoring_method(card: Card, request: Request) -> tuple[OutputName, Similarity]:
    """Return the output that pairs are compared by, and the similarity. Raises InvalidRequest."""
    if request.activate is not None:
        raise InvalidRequest("this model's scores are similarities, which have no activation.", param="activate")
    names: list[OutputName] = [name for name in card.outputs if name in SIMILARITIES]
    name = request.score_by or default_scoring_output(card)
    if name not in names:
        raise InvalidRequest(f"pairs are compared by {', '.join(names)}, not by {name!r}.", param="score_by")
    if request.explain and name != "multi_vector":
        raise InvalidRequest(f"is for pairs that are compared by token vectors; these are by {name}.", param="explain")
    similarities = SIMILARITIES[name]
    stated = cast(Similarity, card.similarity)
    return name, stated if stated in similarities else card.outputs[name].similarity or similarities[0]


@dataclass(frozen=True, slots=True, eq=False)
class PairSide:
    """The distinct queries of pairs, or the distinct documents: texts, and stored vectors."""

    input_type: InputType
    texts: list[str]
    stored: tuple[StoredVectors, ...]
    index_P: Int32Array
    """The text of each pair; numbers from `len(texts)` on are stored vectors."""
    first_N: list[int]
    """The first pair of each text."""

    def locate(self, location: Location) -> Location:
        """Return the location of a text as a part of its first pair."""
        return (
            location if location.item is None else Location("input", self.first_N[location.item], _PARTS.index(self.input_type))
        )

    def text_indices(self, first_text: int, first_stored: int) -> Int32Array:
        """Return `index_P` with texts numbered from `first_text` on and stored vectors from `first_stored` on: (P,)."""
        num_texts = len(self.texts)
        numbers_P = np.where(self.index_P < num_texts, self.index_P + first_text, self.index_P - num_texts + first_stored)
        return numbers_P.astype(np.int32)


_PARTS: Final[tuple[InputType, InputType]] = ("query", "document")


def split_pairs(request: Request, texts: Sequence[object], output: OutputName, width: int) -> tuple[PairSide, PairSide]:
    """Return the queries and the documents of a request's pairs. `width`: columns of stored vectors. Raises InvalidRequest."""
    pairs = _check_pairs(texts)
    queries, documents = (_side(pairs, output, width, part) for part in range(2))
    if pairs and not queries.texts and (request.prompt is not None or request.prompt_name is not None):
        param = "prompt" if request.prompt is not None else "prompt_name"
        raise InvalidRequest("stands before queries, which came as vectors.", param=param)
    if pairs and not documents.texts and request.token_pooling is not None:
        raise InvalidRequest("is for texts; documents that come as vectors are compared as they are.", param="token_pooling")
    return queries, documents


def _side(pairs: list[PairInput], output: OutputName, width: int, part: int) -> PairSide:
    items = [pair[part] for pair in pairs]
    keys = [each if isinstance(each, str) else id(each) for each in items]  # the pairs keep them, so ids are unique
    first: dict[str | int, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    texts = [key for key in first if isinstance(key, str)]
    places = [index for key, index in first.items() if not isinstance(key, str)]
    locations = [Location("input", index, part) for index in places]
    stored, positions = store_vectors([items[index] for index in places], locations, output, width)
    for index, location in zip(places, locations, strict=True):
        if not part and output == "multi_vector" and not len(items[index]):
            raise InvalidRequest("has no vectors.", location=location)
    numbers: dict[str | int, int] = {text: number for number, text in enumerate(texts)}
    numbers |= {keys[index]: len(texts) + int(position) for index, position in zip(places, positions, strict=True)}
    index_P = np.array([numbers[key] for key in keys], np.int32)
    return PairSide(_PARTS[part], texts, stored, index_P, [first[text] for text in texts])


def _check_pairs(texts: Sequence[object]) -> list[PairInput]:
    for index, pair in enumerate(texts):
        if not isinstance(pair, tuple):
            message = "pairs and what is no pair cannot be mixed in one list." if index else "must be a pair."
            raise InvalidRequest(message, item=index)
        if (count := len(cast(tuple[object, ...], pair))) != 2:
            raise InvalidRequest(f"must be a pair, has {count} parts.", item=index)
    return cast(list[PairInput], list(texts))


_PAIRS_AT_A_TIME: Final = 4096

_DENSE: Final[Mapping[Similarity, Callable[[Float32Array, Float32Array], Float32Array]]] = {
    "cosine": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),  # the vectors have norm 1
    "dot": lambda a_PD, b_PD: (a_PD * b_PD).sum(axis=1),
    "euclidean": lambda a_PD, b_PD: -np.sqrt(np.square(a_PD - b_PD).sum(axis=1)),
    "manhattan": lambda a_PD, b_PD: -np.abs(a_PD - b_PD).sum(axis=1),
}


def score_pairs(outputs: Outputs, comparison: PairScoring) -> Float32Array:
    """Return the score of each pair, (P,). It is not finite if the vectors are too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if comparison.output == "dense":
            return _score_dense(outputs, comparison)
        return _score_sparse(_sparse_vectors(outputs, comparison), comparison)


def _normalize(rows_ND: Float32Array) -> Float32Array:
    """Divide rows by their norm, except zeros. In float64, whose squares neither overflow nor underflow."""
    wide_ND = rows_ND.astype(np.float64)
    norms_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return (wide_ND / np.where(norms_N1 > 0, norms_N1, 1)).astype(np.float32)


def _score_dense(outputs: Outputs, comparison: PairScoring) -> Float32Array:
    computed = [] if outputs.dense is None else [outputs.dense]
    stored = [to_float32(each) for each in comparison.stored]
    if comparison.similarity == "cosine":
        stored = [_normalize(rows_ND) for rows_ND in stored]
    dense_ND = computed[0] if computed and not stored else np.concatenate([*computed, *stored])
    scores_P = np.empty(comparison.num_pairs, np.float32)
    for start in range(0, comparison.num_pairs, _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        a_PD, b_PD = dense_ND[comparison.queries_P[some]], dense_ND[comparison.documents_P[some]]
        scores_P[some] = _DENSE[comparison.similarity](a_PD, b_PD)
    return scores_P


def _sparse_vectors(outputs: Outputs, comparison: PairScoring) -> Sparse:
    if outputs.sparse is not None and not comparison.stored:
        return outputs.sparse
    stored = [Sparse(each.ids_X, each.rows_XD[:, 0], each.offsets_N1) for each in comparison.stored if each.ids_X is not None]
    texts = stored if outputs.sparse is None else [outputs.sparse, *stored]
    ids, weights = np.concatenate([each.ids_X for each in texts]), np.concatenate([each.weights_X for each in texts])
    return Sparse(ids, weights, offsets_of(np.concatenate([np.diff(each.offsets_N1) for each in texts])))


def _score_sparse(sparse: Sparse, comparison: PairScoring) -> Float32Array:
    """Return dot products. The weights of a query are looked up by the entries of all its documents at once."""
    scores_P = np.zeros(comparison.num_pairs, np.float32)
    weights_V = np.zeros(int(sparse.ids_X.max(initial=-1)) + 1, np.float32)
    starts_N, ends_N = sparse.offsets_N1[:-1], sparse.offsets_N1[1:]
    order = np.argsort(comparison.queries_P, kind="stable")
    order = order[(ends_N > starts_N)[comparison.documents_P[order]]]  # the others score 0
    for pairs in np.split(order, np.flatnonzero(np.diff(comparison.queries_P[order])) + 1) if order.size else []:
        ids, weights = sparse[int(comparison.queries_P[pairs[0]])]
        documents = comparison.documents_P[pairs]
        entries = ranges(starts_N[documents], ends_N[documents])
        weights_V[ids] = weights
        begins = np.cumsum(ends_N[documents] - starts_N[documents]) - (ends_N - starts_N)[documents]
        scores_P[pairs] = np.add.reduceat(weights_V[sparse.ids_X[entries]] * sparse.weights_X[entries], begins)
        weights_V[ids] = 0.0
    return scores_P
