"""Requests for scores of pairs, of models that give none of their own: their texts are encoded, each once, and compared.

Pure. The first of a pair is a query and the second a document, so models that treat the two differently do so, and the card's
prompts for them are put before them; a prompt that is asked for stands before queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from whimbrel.card import Card
from whimbrel.errors import InvalidRequest
from whimbrel.tokenizing.text_checks import check_pairs
from whimbrel.types import InputType, Int32Array, OutputName, Pair, Request, Similarity

_SIMILARITIES: Final[dict[OutputName, tuple[Similarity, ...]]] = {
    "dense": ("cosine", "dot", "euclidean", "manhattan"),
    "multi_vector": ("maxsim", "meanmaxsim"),
    "sparse": ("dot",),
}
"""How each output may be compared; first the usual way."""


def is_comparison(card: Card, request: Request) -> bool:
    """Whether a request asks for scores that are made of vectors."""
    if request.outputs != ("scores",) or "scores" in card.outputs or not can_score(card):
        return False
    return not request.texts or isinstance(request.texts[0], tuple)


def can_score(card: Card) -> bool:
    """Whether pairs can be scored at all."""
    return any(name in card.outputs for name in ("scores", *_SIMILARITIES))


def compared_by(card: Card, request: Request) -> tuple[OutputName, Similarity]:
    """By which output pairs are compared, and how. Raises InvalidRequest."""
    if request.activate is not None:
        raise InvalidRequest("this model's scores are similarities, which have no activation.", param="activate")
    names: list[OutputName] = [name for name in card.outputs if name in _SIMILARITIES]
    name = request.score_by or names[0]
    if name not in names:
        raise InvalidRequest(f"pairs are compared by {', '.join(names)}, not by {name!r}.", param="score_by")
    similarities = _SIMILARITIES[name]
    stated = cast(Similarity, card.similarity)
    return name, stated if stated in similarities else card.outputs[name].similarity or similarities[0]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The queries of pairs, or their documents, without repetition."""

    request: Request
    place_P: Int32Array
    """Which of its texts each pair has."""
    first_N: list[int]
    """In which pair each text stands first."""
    part: int

    def name(self, index: int | None = None, *_: int) -> str:
        """Of one of its texts, the part of the pair that it is."""
        return "input" if index is None else f"input[{self.first_N[index]}][{self.part}]"


def sides(request: Request, output: OutputName) -> tuple[Side, Side]:
    """The requests for the vectors of both sides."""
    pairs = check_pairs(request.texts)
    return _side(request, pairs, output, 0, "query"), _side(request, pairs, output, 1, "document")


def _side(request: Request, pairs: list[Pair], output: OutputName, part: int, input_type: InputType) -> Side:
    first: dict[str, int] = {}
    for index, pair in enumerate(pairs):
        first.setdefault(pair[part], index)
    number = {text: i for i, text in enumerate(first)}
    place_P = np.fromiter((number[pair[part]] for pair in pairs), np.int32, len(pairs))
    texts = list(first)
    side = replace(request, texts=texts, outputs=(output,), input_type=input_type)
    if part:
        side = replace(side, prompt=None, prompt_name=None)
    return Side(side, place_P, list(first.values()), part)
