"""What a request asks of each of a model's outputs: how wide, finished or not, how many entries. Pure.

What the model cannot give is refused here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from whimbrel.errors import InvalidRequest
from whimbrel.types.card import Card
from whimbrel.types.heads import SparseAutoencoder
from whimbrel.types.request import OutputName, Request


@dataclass(frozen=True, slots=True, eq=False)
class OutputSpec:
    """What a request asks of an output."""

    name: OutputName
    width: int
    """Columns, the first of what the output has."""
    activated: bool
    max_entries: int = 0
    """So many entries a text keeps, the largest; 0: all."""
    keep_on_device: bool = False
    """Of token vectors: whether they are only compared, and may stay on the device."""


_APPLIES_TO: Final[dict[str, tuple[OutputName, ...]]] = {
    "dimensions": ("dense", "multi_vector", "token_dense"),
    "normalize": ("dense", "multi_vector", "hidden", "token_dense"),
    "activate": ("scores", "token_scores"),
    "max_active_dims": ("sparse",),
    "token_pooling": ("multi_vector",),
    "muvera": ("multi_vector",),
}
"""Of which outputs at least one must be asked for."""


def validate_for_outputs(card: Card, request: Request, outputs: Collection[OutputName]) -> None:
    """Refuse what would do nothing for these outputs, or with this model. Raises InvalidRequest."""
    for name, counts_for in _APPLIES_TO.items():
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
    if request.return_offsets and set(outputs) != {"token_scores"}:
        raise InvalidRequest("is for token_scores alone.", param="return_offsets")


_VECTORS: Final = ("dense", "multi_vector", "token_dense")
"""Outputs whose rows may be cut."""


def resolve_outputs(card: Card, request: Request, *, matryoshka: bool) -> list[OutputSpec]:
    """Of each output that the request names, or of what the model is made for. Raises InvalidRequest.

    `matryoshka`: whether vectors may be cut."""
    names = dict.fromkeys(request.outputs or (next(iter(card.outputs)),))
    return [_resolve_output(card, request, name, matryoshka=matryoshka) for name in names]


def resolve_width(card: Card, request: Request, name: OutputName, *, matryoshka: bool) -> int:
    """Columns of the vectors that are asked for. Raises InvalidRequest."""
    output = card.output(name)
    wanted, full, stated = request.dimensions, output.width, card.matryoshka_dimensions
    if wanted is None:
        return output.default_width or full
    if wanted == full:
        return full
    if not matryoshka:
        raise InvalidRequest(
            f"{wanted:,} are asked for, but this model does not say that its vectors of {full:,} may be cut. "
            "Leave dimensions out, or load the model with --matryoshka.",
            param="dimensions",
        )
    if stated and wanted not in stated:
        raise InvalidRequest(f"{wanted:,} are asked for; this model's are {', '.join(map(str, stated))}.", param="dimensions")
    if not 1 <= wanted <= full:
        raise InvalidRequest(f"{wanted:,} are asked for; this model takes 1 to {full:,}.", param="dimensions")
    return wanted


def max_sparse_entries(card: Card) -> int:
    """Of a sparse vector, at most."""
    return max(card.encoder.vocab_size, card.output("sparse").width)


def _resolve_output(card: Card, request: Request, name: OutputName, *, matryoshka: bool) -> OutputSpec:
    output = card.output(name)
    wanted = request.normalize if output.activation == "normalize" else request.activate
    width = resolve_width(card, request, name, matryoshka=matryoshka) if name in _VECTORS else output.width
    entries = _max_entries(card, request) if name == "sparse" else 0
    return OutputSpec(name, width, output.activated if wanted is None else wanted, entries)


def _max_entries(card: Card, request: Request) -> int:
    """So many entries of a sparse vector are kept; 0: all."""
    wanted, output = request.max_active_dims, card.output("sparse")
    if wanted is None:
        return output.max_entries
    for head in output.head:
        if isinstance(head, SparseAutoencoder) and wanted > head.k:
            raise InvalidRequest(f"{wanted:,} are asked for; this model gives {head.k:,}.", param="max_active_dims")
    return min(wanted, max_sparse_entries(card))  # a larger number might not fit into a message
