"""What a request may say: of what type each field is, and what goes with what it asks for. Pure.

A field that would change numbers is honoured or refused: nobody is to believe that vectors were cut that were not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from whimbrel.errors import InvalidRequest
from whimbrel.late_options import MuveraParameters, TokenPooling

if TYPE_CHECKING:
    from whimbrel.card import Card
    from whimbrel.types import OutputName, Request

_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "prompt": ((str, type(None)), "a string"),
    "prompt_name": ((str, type(None)), "a string"),
    "instruction": ((str, type(None)), "a string"),
    "normalize": ((bool, type(None)), "true or false"),
    "activate": ((bool, type(None)), "true or false"),
    "token_pooling": ((TokenPooling, type(None)), "a TokenPooling"),
    "muvera": ((MuveraParameters, type(None)), "MuveraParameters"),
    "max_tokens": ((int, type(None)), "an integer"),
    "max_query_tokens": ((int, type(None)), "an integer"),
    "max_document_tokens": ((int, type(None)), "an integer"),
    "late_chunking": ((bool,), "true or false"),
    "locate": ((bool,), "true or false"),
    "explain": ((bool,), "true or false"),
    "split_long": ((bool,), "true or false"),
    "priority": ((int,), "an integer"),
    "deadline": ((float, int), "a number"),
    "owner": ((str,), "a string"),
}
_PRIORITIES: Final = range(-(2**31), 2**31)
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "input_type": ("query", "document"),
    "truncate": ("right", "left", "never"),
    "score_by": ("dense", "sparse", "multi_vector"),
}
_typed: Final = attrgetter(*_TYPES)
_worded: Final = attrgetter(*_WORDS)
_COUNTS_FOR: Final[dict[str, tuple[OutputName, ...]]] = {
    "dimensions": ("dense", "multi_vector", "token_dense"),
    "normalize": ("dense", "multi_vector", "hidden", "token_dense"),
    "activate": ("scores", "token_scores"),
    "max_active_dims": ("sparse",),
    "token_pooling": ("multi_vector",),
    "muvera": ("multi_vector",),
}
"""Of which outputs at least one must be asked for."""


def check_fields(request: Request) -> None:
    """Refuse what no model takes; single texts are the tokenizer's to check. Raises InvalidRequest."""
    _check_lists(request)
    typed = _typed(request)
    if not _fit(tuple(map(type, typed))):
        _check_types(typed)
    for (name, words), given in zip(_WORDS.items(), _worded(request), strict=True):
        if given is not None and (not isinstance(given, str) or given not in words):
            raise InvalidRequest(f"{given!r} is not known; it takes {', '.join(words)}.", param=name)
    for name, given in (("max_query_tokens", request.max_query_tokens), ("max_document_tokens", request.max_document_tokens)):
        if given is not None and given < 1:
            raise InvalidRequest(f"must be at least 1, is {given:,}.", param=name)
    if request.priority not in _PRIORITIES:
        raise InvalidRequest(f"must fit into 32 bits, is {request.priority:,}.", param="priority")
    if request.deadline != request.deadline:
        raise InvalidRequest("must be a number, is NaN.", param="deadline")
    if request.prompt is not None and request.prompt_name is not None:
        raise InvalidRequest("give prompt or prompt_name, not both.", param="prompt")
    if request.split_long and request.truncate in ("right", "left"):
        raise InvalidRequest("a text that split_long runs in parts is not cut.", param="truncate")


def _check_types(typed: tuple[object, ...]) -> None:
    for (name, (types, what)), given in zip(_TYPES.items(), typed, strict=True):
        if not isinstance(given, types) or (isinstance(given, bool) and bool not in types):
            raise InvalidRequest(f"must be {what}, is {given!r}.", param=name)


@lru_cache(maxsize=1024)
def _fit(kinds: tuple[type, ...]) -> bool:
    """Whether these are just the types of _TYPES: then it need not be looked which of them are not."""
    return all(kind in types for kind, (types, _) in zip(kinds, _TYPES.values(), strict=True))


def _check_lists(request: Request) -> None:
    if not _is_list(request.texts):
        raise InvalidRequest(f"must be a list of texts, is {type(request.texts).__name__}.", param="input")
    if not _is_list(request.outputs):
        raise InvalidRequest(f"must be a tuple of the names of outputs, is {request.outputs!r}.", param="outputs")
    for output in request.outputs:
        if not isinstance(cast(object, output), str):
            raise InvalidRequest(f"must be the names of outputs; one is {output!r}.", param="outputs")


def _is_list(given: object) -> bool:
    """A string is a sequence too, of strings even; it is never meant as one."""
    if type(given) in (list, tuple):
        return True
    if isinstance(given, np.ndarray):
        return given.ndim > 0
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def check_uses(card: Card, request: Request, outputs: Collection[OutputName]) -> None:
    """Refuse what would do nothing for these outputs, or with this model. Raises InvalidRequest."""
    for name, counts_for in _COUNTS_FOR.items():
        if getattr(request, name) is not None and not any(output in counts_for for output in outputs):
            raise InvalidRequest(
                f"is for {', '.join(counts_for)}; this request asks for {', '.join(outputs)}.",
                param=name,
            )
    if request.score_by is not None and "scores" in outputs:
        raise InvalidRequest("this model scores pairs itself, and compares no vectors.", param="score_by")
    if request.instruction is not None and card.template is None:
        raise InvalidRequest(
            "this model takes no instruction. What is to stand before a text is a prompt.", param="instruction"
        )
    if request.explain:
        raise InvalidRequest("is for pairs that are compared by their token vectors.", param="explain")
    if request.locate and set(outputs) != {"token_scores"}:
        raise InvalidRequest("is for token_scores alone.", param="locate")
