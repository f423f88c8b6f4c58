"""Request -> Prepared: everything that is done to a request before an engine sees it. Runs where the request came in.

Knows card, plan and tokenizer; knows nothing of queues, devices or processes.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from whimbrel.card import Card
from whimbrel.errors import InvalidRequest, TooLarge
from whimbrel.plan import Plan
from whimbrel.tokenizer import Tokenizer
from whimbrel.trace import trace
from whimbrel.types import Prepared, Request


class Frontend:
    """The part of a model that runs before the device. Safe to use from many threads."""

    def __init__(self, folder: Path, card: Card, plan: Plan) -> None:
        self._card = card
        self._plan = plan
        self._tokenizer = Tokenizer(folder, card, plan)

    def prepare(self, request: Request, *, received: float | None = None) -> Prepared:
        """Check and tokenise a request. `received` is when it came (perf_counter); by default now.

        Raises InvalidRequest, TooLong, TooLarge.
        """
        received = perf_counter() if received is None else received
        dimensions = self._dimensions(request)
        with trace("tokenize") as tokenized:
            seqs = self._tokenizer.encode(request)
        num_tokens = sum(seq.ids.size for seq in seqs)
        if num_tokens > self._plan.max_request_tokens:
            raise TooLarge(
                f"the request has {num_tokens:,} tokens; the limit is {self._plan.max_request_tokens:,}. Send fewer texts at "
                "once, or start the server with a larger --max-request-tokens.",
                param="input",
            )
        return Prepared(
            seqs,
            dimensions=dimensions,
            normalize=self._card.normalize if request.normalize is None else request.normalize,
            num_tokens=num_tokens,
            num_truncated=sum(seq.truncated for seq in seqs),
            received=received,
            tokenize=tokenized.seconds,
            priority=request.priority,
            deadline=request.deadline,
            owner=request.owner,
        )

    def _dimensions(self, request: Request) -> int:
        """The width of the vectors asked for."""
        wanted, full, stated = request.dimensions, self._card.dimension, self._card.matryoshka_dimensions
        if wanted is None:
            return full
        if type(wanted) is not int:
            raise InvalidRequest(f"must be an integer, is {wanted!r}.", param="dimensions")
        if wanted == full:
            return full
        if not self._plan.matryoshka:
            raise InvalidRequest(
                f"{wanted:,} are asked for, but this model does not say that its vectors of {full:,} may be cut. "
                "Leave dimensions out, or load the model with --matryoshka.",
                param="dimensions",
            )
        if stated and wanted not in stated:
            raise InvalidRequest(
                f"{wanted:,} are asked for; this model's are {', '.join(map(str, stated))}.", param="dimensions"
            )
        if not 1 <= wanted <= full:
            raise InvalidRequest(f"{wanted:,} are asked for; this model takes 1 to {full:,}.", param="dimensions")
        return wanted
