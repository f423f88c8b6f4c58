"""Token reduction: token pooling (fewer vectors per document) and MUVERA (one vector per text). numpy, and scipy for pooling.

A document takes a millisecond or two, so a reduction runs in a thread that nothing else waits for. The worker reduces vectors
of a response, and the engine reduces documents that it scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

import msgspec
import numpy as np

from whimbrel.errors import ComputeError, InvalidRequest, Location, NonFinite, OutOfMemory, SetupError, TooLarge
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.muvera import encode_muvera
from whimbrel.outputs.requested import OutputSpec, stated_pooling
from whimbrel.outputs.token_pooling import MAX_TOKENS, pool_tokens
from whimbrel.types.arrays import Int64Array
from whimbrel.types.card import Output
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling
from whimbrel.types.request import InputType, Request
from whimbrel.types.result import Outputs, Ragged

_MAX_REQUEST_NUMBERS: Final = 2**25
"""Limit of the dimensions of all encoded texts of a request: 128 MiB."""


@dataclass(frozen=True, slots=True)
class TokenReduction(ReturnRows):
    """Reduction of a request's token vectors: pooled first, then encoded."""

    poolings: tuple[TokenPooling, ...]
    """Poolings, each of the vectors that the last one gives."""
    muvera: MuveraParameters | None = None
    input_type: InputType = "document"

    def check(self, counts_N: Int64Array) -> None:
        """Reject a request whose reduction would take too much memory. counts_N are the token vectors of each text."""
        if clustered := [pooling for pooling in self.poolings if pooling.pool_factor > 1]:
            most = MAX_TOKENS + min(pooling.num_protected_tokens for pooling in clustered)
            if (too_long := np.flatnonzero(counts_N > most)).size:
                index = int(too_long[0])
                message = f"has {counts_N[index]:,} token vectors; at most {most:,} are pooled."
                raise InvalidRequest(f"{message} Give max_tokens, or token_pooling 1.", item=index)
        if self.muvera is not None and counts_N.size * self.muvera.num_dims > _MAX_REQUEST_NUMBERS:
            size = f"{counts_N.size:,} texts of {self.muvera.num_dims:,} numbers each"
            limit = f"the limit of a request is {_MAX_REQUEST_NUMBERS:,} numbers"
            raise TooLarge(f"{size}; {limit}. Send fewer texts at once.", param="input")

    def apply(self, outputs: Outputs) -> Outputs:
        """Return the outputs with reduced token vectors. Raises ComputeError, OutOfMemory."""
        assert outputs.multi_vector is not None
        try:
            vectors = pool_all(outputs.multi_vector, self.poolings)
            if self.muvera is None:
                return replace(outputs, multi_vector=vectors)
            encoded_NE = encode_muvera(vectors, self.muvera, self.input_type)
        except MemoryError:
            raise OutOfMemory("there is no memory to reduce the token vectors of this request.") from None
        if not (finite_N := np.isfinite(encoded_NE).all(axis=1)).all():
            raise NonFinite("the encoding has NaN or infinity.", item=int(finite_N.argmin()))
        return replace(outputs, multi_vector=None, muvera=encoded_NE)


def resolve_reduction(output: Output, request: Request, ask: OutputSpec) -> TokenReduction | None:
    """Return the reduction that a request and the checkpoint ask for, or None. Raises InvalidRequest and SetupError."""
    poolings, muvera = _poolings(output, request, finished=ask.activated), request.muvera
    if not poolings and muvera is None:
        return None
    if muvera is not None:
        if request.input_type is None:
            raise InvalidRequest("queries and documents are encoded differently; say which these are.", param="input_type")
        if muvera.dim_proj > ask.width:
            message = f"must be at most {ask.width:,}, the width of the token vectors, is {muvera.dim_proj:,}."
            raise InvalidRequest(message, location=Location("muvera", path=".dim_proj"))
    return TokenReduction(poolings, muvera, request.input_type or "document")


def _poolings(output: Output, request: Request, *, finished: bool) -> tuple[TokenPooling, ...]:
    """Return the poolings of these texts: that of the request, which is for documents, else those of the checkpoint."""
    wanted = request.token_pooling
    if wanted is not None:
        if request.input_type == "query":
            raise InvalidRequest("is for documents; these texts are queries.", param="token_pooling")
        if wanted.pool_factor == 1:
            return ()
        if not finished:
            raise InvalidRequest("joins vectors of norm 1, which these are not; give normalize: true.", param="token_pooling")
        require_scipy(wanted)
        return (wanted,)
    stated = stated_pooling(output, request)
    if stated is None:
        return ()
    last = stated.steps[-1]
    after = last.normalize_embeddings if request.normalize is None else request.normalize
    return (*stated.steps[:-1], msgspec.structs.replace(last, normalize_embeddings=after))


def require_scipy(pooling: TokenPooling) -> None:
    """Raise SetupError if vectors are to be pooled and scipy is not installed."""
    if pooling.pool_factor > 1 and find_spec("scipy") is None:
        raise SetupError("token pooling needs scipy, which is not installed.", hint="pip install scipy")


def pool_all(texts: Ragged, poolings: Sequence[TokenPooling]) -> Ragged:
    """Pool the vectors of each text, of any magnitude, one pooling after another. Raises ComputeError and MemoryError."""
    for pooling in poolings:
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                texts = pool_tokens(texts, pooling)
            except MemoryError:
                raise
            except Exception as error:  # whatever scipy has against them, it is this request that fails
                raise ComputeError(f"the token vectors could not be pooled: {error}") from error
        if not np.isfinite(texts.rows_XD).all():
            raise NonFinite("token vectors are too large for their means.")
    return texts
