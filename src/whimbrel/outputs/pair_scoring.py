"""Requests for scores of pairs, of models that give none of their own: their texts are encoded, each once, and compared.

Pure. The first of a pair is a query and the second a document, so models that treat the two differently do so, and the card's
prompts for them are put before them; a prompt that is asked for stands before queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from whimbrel.errors import InvalidRequest, Location

if TYPE_CHECKING:
    from whimbrel.types.card import Card
from dataclasses import replace
from typing import Final, cast

from whimbrel.outputs.stored_vectors import StoredVectors, StoredVectorsBuilder
from whimbrel.types.arrays import Int32Array
from whimbrel.types.card import Card
from whimbrel.types.request import InputType, OutputName, PairInput, Request, Similarity

Part: TypeAlias = "Callable[[], None]"
"""Comparing that may be done in any thread. Raises MemoryError."""


@dataclass(frozen=True, slots=True, eq=False)
class PairScoring:
    """Scores of pairs, made of what the model gives for each text: of text queries_P[i] and text documents_P[i].

    The texts are the seqs of the request, and then those whose vectors are `given`."""

    output: OutputName
    similarity: Similarity
    queries_P: Int32Array
    documents_P: Int32Array
    stored: tuple[StoredVectors, ...] = ()
    explain: bool = False
    """Of token vectors: whether the answer says what each token of a query matches."""

    @property
    def num_pairs(self) -> int:
        return self.queries_P.size


_SIMILARITIES: Final[dict[OutputName, tuple[Similarity, ...]]] = {
    "dense": ("cosine", "dot", "euclidean", "manhattan"),
    "multi_vector": ("maxsim", "meanmaxsim"),
    "sparse": ("dot",),
}
"""How each output may be compared; first the usual way."""


def scores_by_similarity(card: Card, request: Request) -> bool:
    """Whether a request asks for scores that are made of vectors."""
    if request.outputs != ("scores",) or "scores" in card.outputs or not can_score(card):
        return False
    return not request.texts or isinstance(request.texts[0], tuple)


def can_score(card: Card) -> bool:
    """Whether pairs can be scored at all."""
    return any(name in card.outputs for name in ("scores", *_SIMILARITIES))


def default_scoring_output(card: Card) -> OutputName:
    """By which output pairs are compared if the request does not say; the card `can_score` and gives no scores."""
    return next(name for name in card.outputs if name in _SIMILARITIES)


def scoring_method(card: Card, request: Request) -> tuple[OutputName, Similarity]:
    """By which output pairs are compared, and how. Raises InvalidRequest."""
    if request.activate is not None:
        raise InvalidRequest("this model's scores are similarities, which have no activation.", param="activate")
    names: list[OutputName] = [name for name in card.outputs if name in _SIMILARITIES]
    name = request.score_by or default_scoring_output(card)
    if name not in names:
        raise InvalidRequest(f"pairs are compared by {', '.join(names)}, not by {name!r}.", param="score_by")
    if request.explain and name != "multi_vector":
        raise InvalidRequest(f"is for pairs that are compared by token vectors; these are by {name}.", param="explain")
    similarities = _SIMILARITIES[name]
    stated = cast(Similarity, card.similarity)
    return name, stated if stated in similarities else card.outputs[name].similarity or similarities[0]


@dataclass(frozen=True, slots=True, eq=False)
class PairSide:
    """The queries of pairs, or their documents, without repetition: texts, and vectors in place of texts."""

    request: Request
    """For the texts."""
    stored: tuple[StoredVectors, ...]
    index_P: Int32Array
    """Which of its texts each pair has, or which of the vectors, counted on from the texts."""
    first_N: list[int]
    """In which pair each text stands first."""
    part: int

    def map_location(self, location: Location) -> Location:
        """Return the part of the pair that one of its texts is."""
        return location if location.item is None else Location("input", self.first_N[location.item], self.part)

    def text_indices(self, first_text: int, first_given: int) -> Int32Array:
        """`place_P`, where texts count from one number on and vectors from another: (P,)."""
        num_texts = len(self.first_N)
        return np.where(self.index_P < num_texts, self.index_P + first_text, self.index_P - num_texts + first_given).astype(
            np.int32
        )


def split_pairs(request: Request, output: OutputName, width: int) -> tuple[PairSide, PairSide]:
    """The requests for the vectors of both sides. `width` as of `given.Stack`. Raises InvalidRequest."""
    pairs = _checked(request.texts)
    queries, documents = _side(request, pairs, output, width, 0), _side(request, pairs, output, width, 1)
    if pairs and not queries.request.texts and (request.prompt is not None or request.prompt_name is not None):
        param = "prompt" if request.prompt is not None else "prompt_name"
        raise InvalidRequest("stands before queries, which came as vectors.", param=param)
    if pairs and not documents.request.texts and request.token_pooling is not None:
        raise InvalidRequest("is for texts; documents that come as vectors are compared as they are.", param="token_pooling")
    return queries, documents


def _side(request: Request, pairs: list[PairInput], output: OutputName, width: int, part: int) -> PairSide:
    first: dict[str, int] = {}
    stack = StoredVectorsBuilder(output, width)
    of_vectors: dict[int, int] = {}
    place_P = np.empty(len(pairs), np.int32)
    for index, pair in enumerate(pairs):
        each = pair[part]
        if isinstance(each, str):
            first.setdefault(each, index)
        elif id(each) not in of_vectors:  # the pairs keep it, so nothing else has its id
            of_vectors[id(each)] = stack.add(each, Location("input", index, part))
            if not part and output == "multi_vector" and not len(each):
                raise InvalidRequest("has no vectors.", item=index, part=part)
    given, places = stack.build()
    number = {text: i for i, text in enumerate(first)}
    place_of = {key: len(first) + int(places[i]) for key, i in of_vectors.items()}
    for index, pair in enumerate(pairs):
        each = pair[part]
        place_P[index] = number[each] if isinstance(each, str) else place_of[id(each)]
    input_type: InputType = "document" if part else "query"
    side = replace(request, texts=list(first), outputs=(output,), input_type=input_type, explain=False)
    side = replace(side, prompt=None, prompt_name=None) if part else replace(side, token_pooling=None)
    return PairSide(side, given, place_P, list(first.values()), part)


def _checked(texts: Sequence[object]) -> list[PairInput]:
    """Pairs, and nothing else. Raises InvalidRequest."""
    for index, pair in enumerate(texts):
        if not isinstance(pair, tuple):
            said = "pairs and what is no pair cannot be mixed in one list." if index else "must be a pair."
            raise InvalidRequest(said, item=index)
        if (count := len(cast(tuple[object, ...], pair))) != 2:
            raise InvalidRequest(f"must be a pair, has {count} parts.", item=index)
    return cast(list[PairInput], list(texts))
