"""What a request may say: of what type each field is, and what goes with what it asks for. Pure.

A field that would change numbers is honoured or refused: nobody is to believe that vectors were cut that were not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from whimbrel.card import Card
from whimbrel.errors import InvalidRequest
from whimbrel.types import OutputName, Request

_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "prompt": ((str, type(None)), "a string"),
    "prompt_name": ((str, type(None)), "a string"),
    "instruction": ((str, type(None)), "a string"),
    "normalize": ((bool, type(None)), "true or false"),
    "activate": ((bool, type(None)), "true or false"),
    "max_tokens": ((int, type(None)), "an integer"),
    "late_chunking": ((bool,), "true or false"),
    "locate": ((bool,), "true or false"),
    "split_long": ((bool,), "true or false"),
    "priority": ((int,), "an integer"),
    "deadline": ((float, int), "a number"),
}
_WORDS: Final[dict[str, tuple[str, ...]]] = {"input_type": ("query", "document"), "truncate": ("right", "left", "never")}
_COUNTS_FOR: Final[dict[str, tuple[OutputName, ...]]] = {
    "dimensions": ("dense", "multi_vector"),
    "normalize": ("dense", "multi_vector"),
    "activate": ("scores", "token_scores"),
    "max_active_dims": ("sparse",),
}
"""Of which outputs at least one must be asked for."""


def check_fields(request: Request) -> None:
    """Refuse what no model takes. Raises InvalidRequest."""
    for name, (types, what) in _TYPES.items():
        given: Any = getattr(request, name)
        if type(given) not in types:
            raise InvalidRequest(f"must be {what}, is {given!r}.", param=name)
    for name, words in _WORDS.items():
        given = getattr(request, name)
        if given is not None and (type(given) is not str or given not in words):
            raise InvalidRequest(f"{given!r} is not known; it takes {', '.join(words)}.", param=name)
    for output in request.outputs:
        if type(output) is not str:
            raise InvalidRequest(f"must be the names of outputs; one is {output!r}.", param="outputs")
    if request.prompt is not None and request.prompt_name is not None:
        raise InvalidRequest("give prompt or prompt_name, not both.", param="prompt")
    if request.split_long and request.truncate in ("right", "left"):
        raise InvalidRequest("a text that split_long runs in parts is not cut.", param="truncate")


def check_uses(card: Card, request: Request, outputs: Collection[OutputName]) -> None:
    """Refuse what would do nothing for these outputs, or with this model. Raises InvalidRequest."""
    for name, counts_for in _COUNTS_FOR.items():
        if getattr(request, name) is not None and not any(output in counts_for for output in outputs):
            raise InvalidRequest(
                f"is for {' and '.join(counts_for)}; this request asks for {', '.join(outputs)}.",
                param=name,
            )
    if request.instruction is not None and card.template is None:
        raise InvalidRequest(
            "this model takes no instruction. What is to stand before a text is a prompt.", param="instruction"
        )
    if request.locate and set(outputs) != {"token_scores"}:
        raise InvalidRequest("is for token_scores alone.", param="locate")
