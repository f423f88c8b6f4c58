"""Requested outputs: width, activation and number of entries of each, resolved against the model. Pure.

A field that affects the result is applied or rejected, never silently ignored.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from whimbrel.errors import InvalidRequest
from whimbrel.types.card import Card, Output
from whimbrel.types.heads import SparseAutoencoder
from whimbrel.types.late_interaction import StatedPooling
from whimbrel.types.request import OutputName, Request, Similarity


@dataclass(frozen=True, slots=True, eq=False)
class OutputSpec:
    """Resolved settings of a requested output."""

    name: OutputName
    width: int
    """Number of leading columns to return."""
    activated: bool
    max_entries: int = 0
    """Number of the largest entries that a text keeps; 0: all."""
    keep_on_device: bool = False
    """Leave token vectors on the device, because they are only scored."""
    with_logits: bool = False
    """Return scores before their activation too, as further columns."""

    @property
    def num_columns(self) -> int:
        """Columns of a row: `width`, and as many logits."""
        return 2 * self.width if self.with_logits else self.width


_SCORES: Final[tuple[OutputName, ...]] = ("scores", "token_scores")
_APPLIES_TO: Final[dict[str, tuple[OutputName, ...]]] = {
    "dimensions": ("dense", "multi_vector", "token_dense"),
    "normalize": ("dense", "multi_vector", "hidden", "token_dense"),
    "activate": _SCORES,
    "max_active_dims": ("sparse",),
    "token_pooling": ("multi_vector",),
    "muvera": ("multi_vector",),
}
"""Outputs that a field applies to; one of them must be requested."""


def validate_for_outputs(card: Card, request: Request, outputs: Collection[OutputName]) -> None:
    """Raise InvalidRequest for a field that has no effect on these outputs or on this model."""
    for name, applies_to in _APPLIES_TO.items():
        if getattr(request, name) is not None and not any(output in applies_to for output in outputs):
            raise InvalidRequest(f"is for {', '.join(applies_to)}; this request asks for {', '.join(outputs)}.", param=name)
    if request.score_by is not None and "scores" in outputs:
        raise InvalidRequest("this model scores pairs itself, and compares no vectors.", param="score_by")
    if request.instruction is not None and card.template is None and card.list_template is None:
        message = "this model takes no instruction. What is to stand before a text is a prompt."
        raise InvalidRequest(message, param="instruction")
    if request.explain:
        raise InvalidRequest("is for pairs that are compared by their token vectors.", param="explain")
    if request.hypotheses and set(outputs) != {"scores"}:
        raise InvalidRequest("are for scores alone.", param="hypotheses")
    if request.labels and (card.span_prompt is None or set(outputs) != {"token_scores"}):
        raise InvalidRequest("are for entities of models that take labels.", param="labels")
    if not request.labels and card.span_prompt is not None:
        raise InvalidRequest("this model finds entities of labels that a request gives; name them.", param="labels")
    if request.return_offsets and set(outputs) != {"token_scores"}:
        raise InvalidRequest("is for token_scores alone.", param="return_offsets")


SIMILARITIES: Final[dict[OutputName, tuple[Similarity, ...]]] = {
    "dense": ("cosine", "dot", "euclidean", "manhattan"),
    "multi_vector": ("maxsim", "meanmaxsim"),
    "sparse": ("dot",),
}
"""Similarities of each output, the default first."""


def resolve_outputs(card: Card, request: Request, *, matryoshka: bool) -> list[OutputSpec]:
    """Return the settings of all requested outputs; `matryoshka` allows truncated vectors. Raises InvalidRequest."""
    names = dict.fromkeys(request.outputs or (next(iter(card.outputs)),))
    return [_resolve_output(card, request, name, matryoshka=matryoshka) for name in names]


def resolve_width(card: Card, request: Request, name: OutputName, *, matryoshka: bool) -> int:
    """Return the number of columns that the request gets. Raises InvalidRequest."""
    output = card.output(name)
    requested, full, stated = request.dimensions, output.width, card.matryoshka_dimensions
    if requested is None:
        return output.default_width or full
    if requested == full:
        return full
    if not matryoshka:
        reason = f"but this model does not say that its vectors of {full:,} may be cut"
        remedy = "Leave dimensions out, or load the model with the option matryoshka."
        raise InvalidRequest(f"{requested:,} are asked for, {reason}. {remedy}", param="dimensions")
    if stated and requested not in stated:
        sizes = ", ".join(map(str, stated))
        raise InvalidRequest(f"{requested:,} are asked for; this model's are {sizes}.", param="dimensions")
    if not 1 <= requested <= full:
        raise InvalidRequest(f"{requested:,} are asked for; this model takes 1 to {full:,}.", param="dimensions")
    return requested


def scores_by_similarity(card: Card, request: Request) -> bool:
    """Return whether a request asks for scores that are similarities of vectors."""
    if request.outputs != ("scores",) or "scores" in card.outputs or not can_score(card):
        return False
    return not request.texts or isinstance(request.texts[0], tuple)


def can_score(card: Card) -> bool:
    """Return whether a model can score pairs, by itself or by similarity."""
    return any(name in card.outputs for name in ("scores", *SIMILARITIES))


def default_scoring_output(card: Card) -> OutputName:
    """Return the output that pairs are compared by if the request does not say. The card has no scores of its own."""
    return next(name for name in card.outputs if name in SIMILARITIES)


def max_sparse_entries(card: Card) -> int:
    return max(card.encoder.vocab_size, card.output("sparse").width)


def _resolve_output(card: Card, request: Request, name: OutputName, *, matryoshka: bool) -> OutputSpec:
    output = card.output(name)
    activated = request.normalize if output.activation == "normalize" else request.activate if name in _SCORES else None
    width = resolve_width(card, request, name, matryoshka=matryoshka) if name in _APPLIES_TO["dimensions"] else output.width
    entries = _max_entries(card, request) if name == "sparse" else 0
    if name == "multi_vector" and (stated := stated_pooling(output, request)) is not None:
        if stated.normalized and request.normalize is False:
            side, more = ("queries", "") if request.input_type == "query" else ("documents", "; give token_pooling too")
            message = f"this checkpoint pools the vectors of {side}, which are normalised for that{more}."
            raise InvalidRequest(message, param="normalize")
        return OutputSpec(name, width, stated.normalized, entries)
    is_activated = output.activated if activated is None else activated
    with_logits = name == "scores" and is_activated and output.activation != "identity"
    return OutputSpec(name, width, is_activated, entries, with_logits=with_logits)


def stated_pooling(output: Output, request: Request) -> StatedPooling | None:
    """Return the checkpoint's pooling of these texts, unless the request replaces it. By default they count as documents."""
    return None if request.token_pooling is not None else output.token_pooling.get(request.input_type or "document")


def _max_entries(card: Card, request: Request) -> int:
    requested, output = request.max_active_dims, card.output("sparse")
    if requested is None:
        return output.max_entries
    for head in output.head:
        if isinstance(head, SparseAutoencoder) and requested > head.k:
            raise InvalidRequest(f"{requested:,} are asked for; this model gives {head.k:,}.", param="max_active_dims")
    return min(requested, max_sparse_entries(card))  # a larger number might not fit into a message
