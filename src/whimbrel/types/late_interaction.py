"""Parameters of token pooling and MUVERA: types, defaults and limits, as callers and JSON bodies write them.

`outputs/token_pooling.py` and `outputs/muvera.py` explain the parameters and name the sources of the defaults. No arrays here.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from whimbrel.errors import InvalidRequest, Location
from whimbrel.types.validation import fields_struct, validate

S = TypeVar("S", bound=msgspec.Struct)

MAX_DIMS: Final = 2**17
"""Largest dimension of an encoded text, 512 KiB in float32. The defaults make 10,240."""
_MAX_PRODUCTS: Final = 4096
"""Most dot products for each token. The defaults make 420."""
_MAX_SEED: Final = 2**64 - 1
"""Largest seed of MUVERA; msgspec has no bounds above 2**63."""


class TokenPooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the pooling of a document's token vectors. Raises InvalidRequest."""

    pool_factor: Annotated[
        float, Meta(ge=1, le=sys.float_info.max, description="Keep about 1 / pool_factor of a document's vectors; 1 keeps all.")
    ]
    num_protected_tokens: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="Number of leading vectors that are never pooled.")
    ] = 1
    normalize_embeddings: Annotated[
        bool, Meta(description="Divide every vector of the result by its norm, also where none were pooled.")
    ] = True

    def __post_init__(self) -> None:
        validate(self, _TokenPoolingFields)
        msgspec.structs.force_setattr(self, "pool_factor", float(self.pool_factor))


@dataclass(frozen=True, slots=True)
class StatedPooling:
    """Pooling of the token vectors of one input type, as a checkpoint states it."""

    steps: tuple[TokenPooling, ...]
    """Poolings, each of the vectors that the last one gives."""
    normalized: bool
    """Vectors are normalised before the first step."""


class MuveraParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of MUVERA, which makes one vector of token vectors; fastembed's defaults. Raises InvalidRequest."""

    k_sim: Annotated[int, Meta(ge=1, le=17, description="Planes in each repetition: 2**k_sim buckets.")] = 5
    dim_proj: Annotated[
        int, Meta(ge=1, le=4096, description="Columns of a bucket; buckets of the token vectors' width are not projected.")
    ] = 16
    r_reps: Annotated[int, Meta(ge=1, le=4096, description="Repetitions, each with its own planes and signs.")] = 20
    seed: Annotated[int, Meta(ge=0, description="Seed of the draws. Only vectors of one seed can be compared.")] = 42

    def __post_init__(self) -> None:
        validate(self, _MuveraFields)
        if self.seed > _MAX_SEED:
            raise InvalidRequest(f"must be an integer from 0 to {_MAX_SEED:,}, is {self.seed!r:.80}.", param="seed")
        if self.num_dims > MAX_DIMS:
            message = f"r_reps * 2**k_sim * dim_proj makes {self.num_dims:,} numbers; the limit is {MAX_DIMS:,}."
            raise InvalidRequest(message, param="k_sim")
        if (products := self.r_reps * (self.dim_proj + self.k_sim)) > _MAX_PRODUCTS:
            message = f"r_reps * (dim_proj + k_sim) makes {products:,} products for each token; the limit is {_MAX_PRODUCTS:,}."
            raise InvalidRequest(message, param="r_reps")

    @property
    def num_dims(self) -> int:
        return self.r_reps * self.dim_proj << self.k_sim


_TokenPoolingFields: Final = fields_struct(TokenPooling)
_MuveraFields: Final = fields_struct(MuveraParameters)


def read_token_pooling(value: object) -> TokenPooling | None:
    """Return the parameters that a caller gave: a TokenPooling, a mapping, or the factor alone. Raises InvalidRequest."""
    if value is None or isinstance(value, TokenPooling):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(TokenPooling, "token_pooling", cast(Mapping[object, Any], value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"must be a factor or parameters, is {value!r:.80}.", param="token_pooling")
    try:
        return TokenPooling(value)
    except InvalidRequest as error:
        raise error.at(Location("token_pooling")) from None


def read_muvera(value: object) -> MuveraParameters | None:
    """Return the parameters that a caller gave: an object, a mapping, or True for the defaults. Raises InvalidRequest."""
    if value is None or value is False or isinstance(value, MuveraParameters):
        return value or None
    if isinstance(value, Mapping):
        return _from_mapping(MuveraParameters, "muvera", cast(Mapping[object, Any], value))
    if value is not True:
        raise InvalidRequest(f"must be true, false or parameters, is {value!r:.80}.", param="muvera")
    return MuveraParameters()


def _from_mapping(kind: type[S], field: str, values: Mapping[object, Any]) -> S:
    names = kind.__struct_fields__
    for name in values:
        if name not in names:
            raise InvalidRequest(f"{name!r:.80} is not known; it takes {', '.join(names)}.", param=field)
    for each in msgspec.structs.fields(kind):
        if each.required and each.name not in values:
            raise InvalidRequest("is missing.", location=Location(field, path=f".{each.name}"))
    try:
        return kind(**cast(Mapping[str, Any], values))
    except InvalidRequest as error:
        raise error.at(Location(field, path=f".{error.param}")) from None
