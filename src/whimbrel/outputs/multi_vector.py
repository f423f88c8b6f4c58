"""What becomes of token vectors after the model: fewer for a document, or one for a text. numpy, and scipy where it is used.

It takes a millisecond or two for a document, and runs where nobody else waits: a thread of the engine's own, or of a worker's.
Of answers it runs where the request came in, of comparisons where the vectors are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

import numpy as np

from whimbrel.errors import ComputeError, InvalidRequest, NonFinite, OutOfMemory, SetupError, TooLarge
from whimbrel.outputs.muvera import make_muvera
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.token_pooling import MAX_TOKENS, pool_tokens
from whimbrel.types.arrays import Int64Array
from whimbrel.types.card import Output
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling, prefix_errors
from whimbrel.types.request import InputType, Request
from whimbrel.types.result import Outputs, Ragged

_MAX_REQUEST_NUMBERS: Final = 2**25
"""Of all encoded texts of a request: 128 MiB."""


@dataclass(frozen=True, slots=True)
class TokenReduction:
    """What is to become of a request's token vectors: first they are pooled, then encoded."""

    pooling: TokenPooling | None
    muvera: MuveraParameters | None = None
    input_type: InputType = "document"

    def check(self, counts_N: Int64Array) -> None:
        """Refuse what would take too much memory, before it is computed. The texts have so many token vectors."""
        if self.pooling is not None and self.pooling.pool_factor > 1:
            most = MAX_TOKENS + self.pooling.num_protected_tokens
            if (too_long := np.flatnonzero(counts_N > most)).size:
                index = int(too_long[0])
                raise InvalidRequest(
                    f"has {counts_N[index]:,} token vectors; at most {most:,} are pooled. Give max_tokens, or token_pooling 1.",
                    item=index,
                )
        if self.muvera is not None and counts_N.size * self.muvera.num_dims > _MAX_REQUEST_NUMBERS:
            raise TooLarge(
                f"{counts_N.size:,} texts of {self.muvera.num_dims:,} numbers each; the limit of a request is "
                f"{_MAX_REQUEST_NUMBERS:,} numbers. Send fewer texts at once.",
                param="input",
            )


def resolve_reduction(output: Output, request: Request, ask: OutputSpec) -> TokenReduction | None:
    """What a request that asks for token vectors wants done to them. Raises InvalidRequest and SetupError."""
    pooling, muvera = _pooling(output, request, finished=ask.activated), request.muvera
    if pooling is None and muvera is None:
        return None
    if muvera is not None:
        if request.input_type is None:
            raise InvalidRequest("queries and documents are encoded differently; say which these are.", param="input_type")
        with prefix_errors("muvera"):
            muvera.check_width(ask.width)
    return TokenReduction(pooling, muvera, request.input_type or "document")


def _pooling(output: Output, request: Request, *, finished: bool) -> TokenPooling | None:
    """As the request says, or else the checkpoint; queries never. Texts of which nothing is said count as documents, as in
    Sentence Transformers."""
    wanted, stated = request.token_pooling, output.token_pooling
    if request.input_type == "query":
        if wanted is not None:
            raise InvalidRequest("is for documents; these texts are queries.", param="token_pooling")
        return None
    if wanted is not None:
        if wanted.pool_factor == 1:
            return None
        if not finished:
            raise InvalidRequest("joins vectors of norm 1, which these are not; give normalize: true.", param="token_pooling")
        require_scipy(wanted)
        return wanted
    if stated is None:
        return None
    if finished != output.activated:
        are = "" if output.activated else " not"
        raise InvalidRequest(
            f"this checkpoint pools the vectors of documents, which are{are} normalised for that; give token_pooling too.",
            param="normalize",
        )
    after = stated.normalize_embeddings if request.normalize is None else request.normalize
    return TokenPooling(stated.pool_factor, stated.num_protected_tokens, after)


def require_scipy(pooling: TokenPooling | None) -> None:
    """Raise SetupError if vectors are to be joined and scipy is not installed."""
    if pooling is not None and pooling.pool_factor > 1 and find_spec("scipy") is None:
        raise SetupError(
            "token pooling needs scipy, which is not installed: pip install 'whimbrel[serve]'.",
            hint="pip install 'whimbrel[serve]'",
        )


def reduce_tokens(outputs: Outputs, condense: TokenReduction | None) -> Outputs:
    """Outputs with the token vectors condensed. Raises InvalidRequest, ComputeError, OutOfMemory."""
    if condense is None or outputs.multi_vector is None:
        return outputs
    try:
        vectors = outputs.multi_vector if condense.pooling is None else pool_documents(outputs.multi_vector, condense.pooling)
        if condense.muvera is None:
            return replace(outputs, multi_vector=vectors)
        encoded_NE = make_muvera(vectors.rows_XD.shape[1], condense.muvera).encode(vectors, condense.input_type)
    except MemoryError:
        raise OutOfMemory("there is no memory to condense the token vectors of this request.") from None
    if not (finite_N := np.isfinite(encoded_NE).all(axis=1)).all():
        raise NonFinite("the encoding has NaN or infinity.", item=int(finite_N.argmin()))
    return replace(outputs, multi_vector=None, muvera=encoded_NE)


def pool_documents(documents: Ragged, pooling: TokenPooling) -> Ragged:
    """As pool_tokens, of vectors of any size. Raises ComputeError and MemoryError."""
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            found = pool_tokens(documents, pooling)
        except MemoryError:
            raise
        except Exception as error:  # whatever scipy has against them, it is this request that fails
            raise ComputeError(f"the token vectors could not be pooled: {error}") from error
    if not np.isfinite(found.rows_XD).all():
        raise NonFinite("token vectors are too large for their means.")
    return found
