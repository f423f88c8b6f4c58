"""What may be asked of token vectors, as people and JSON bodies say it: parameters, their defaults and their limits. No arrays.

`token_pooling` and `muvera` say what the parameters do, and where their defaults come from.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from whimbrel.errors import InvalidRequest, Location

S = TypeVar("S", bound=msgspec.Struct)

MAX_DIMS: Final = 2**17
"""An encoded text has at most so many numbers, 512 KiB. The defaults make 10,240."""
_MAX_PRODUCTS: Final = 4096
"""So many dot products are made of each token at most. The defaults make 420."""
_MAX_PROTECTED: Final = 2**31 - 1
_MUVERA_LIMITS: Final = {"k_sim": (1, 17), "dim_proj": (1, 4096), "r_reps": (1, 4096), "seed": (0, 2**64 - 1)}


class TokenPooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How documents are pooled. Raises InvalidRequest."""

    pool_factor: Annotated[
        float, Meta(ge=1, description="About 1 / pool_factor of a document's vectors are left; 1: all of them.")
    ]
    num_protected_tokens: Annotated[
        int, Meta(ge=0, le=_MAX_PROTECTED, description="So many leading vectors stay as they are.")
    ] = 1
    normalize_embeddings: Annotated[
        bool, Meta(description="Divide every vector that comes out by its norm, also where nothing was joined.")
    ] = True

    def __post_init__(self) -> None:
        factor: Any = self.pool_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= sys.float_info.max:
            raise InvalidRequest(f"must be a number of at least 1, is {factor!r:.80}.", param="pool_factor")
        msgspec.structs.force_setattr(self, "pool_factor", float(factor))
        _check_integer("num_protected_tokens", self.num_protected_tokens, 0, _MAX_PROTECTED)
        if not isinstance(self.normalize_embeddings, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(f"must be true or false, is {self.normalize_embeddings!r:.80}.", param="normalize_embeddings")


class MuveraParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How token vectors become one; fastembed's defaults. Raises InvalidRequest."""

    k_sim: Annotated[int, Meta(ge=1, le=17, description="Planes in each repetition: 2**k_sim buckets.")] = 5
    dim_proj: Annotated[
        int, Meta(ge=1, le=4096, description="Numbers of a bucket; where it is the vectors' width, buckets are not projected.")
    ] = 16
    r_reps: Annotated[int, Meta(ge=1, le=4096, description="Repetitions, with planes and signs of their own.")] = 20
    seed: Annotated[int, Meta(ge=0, description="Of the draws. Only vectors of one seed can be compared.")] = 42

    def __post_init__(self) -> None:
        for name, (least, most) in _MUVERA_LIMITS.items():
            _check_integer(name, getattr(self, name), least, most)
        if self.num_dims > MAX_DIMS:
            message = f"r_reps * 2**k_sim * dim_proj makes {self.num_dims:,} numbers; the limit is {MAX_DIMS:,}."
            raise InvalidRequest(message, param="k_sim")
        if (products := self.r_reps * (self.dim_proj + self.k_sim)) > _MAX_PRODUCTS:
            message = f"r_reps * (dim_proj + k_sim) makes {products:,} products for each token; the limit is {_MAX_PRODUCTS:,}."
            raise InvalidRequest(message, param="r_reps")

    @property
    def num_dims(self) -> int:
        """Of an encoded text."""
        return self.r_reps * self.dim_proj << self.k_sim

    def check_width(self, width: int) -> None:
        """Raise InvalidRequest if token vectors of this width cannot be projected."""
        if self.dim_proj > width:
            raise InvalidRequest(
                f"must be at most {width:,}, the width of the token vectors, is {self.dim_proj:,}.", param="dim_proj"
            )


def read_token_pooling(given: object) -> TokenPooling | None:
    """A number is the factor. Raises InvalidRequest."""
    if given is None or isinstance(given, TokenPooling):
        return given
    if isinstance(given, Mapping):
        return _from_mapping(TokenPooling, "token_pooling", cast(Mapping[object, Any], given))
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InvalidRequest(f"must be a factor or parameters, is {given!r:.80}.", param="token_pooling")
    try:
        return TokenPooling(given)
    except InvalidRequest as error:
        raise error.at(Location("token_pooling")) from None


def read_muvera(given: object) -> MuveraParameters | None:
    """True is the defaults. Raises InvalidRequest."""
    if given is None or given is False or isinstance(given, MuveraParameters):
        return given or None
    if isinstance(given, Mapping):
        return _from_mapping(MuveraParameters, "muvera", cast(Mapping[object, Any], given))
    if given is not True:
        raise InvalidRequest(f"must be true, false or parameters, is {given!r:.80}.", param="muvera")
    return MuveraParameters()


@contextmanager
def prefix_errors(field: str) -> Generator[None]:
    """Errors over parameters are named as those of this field."""
    try:
        yield
    except InvalidRequest as error:
        raise error.at(Location(field, path=f".{error.param}")) from None


def _from_mapping(kind: type[S], field: str, given: Mapping[object, Any]) -> S:
    fields = kind.__struct_fields__
    for name in given:
        if name not in fields:
            raise InvalidRequest(f"{name!r:.80} is not known; it takes {', '.join(fields)}.", param=field)
    for name in msgspec.structs.fields(kind):
        if name.required and name.name not in given:
            raise InvalidRequest("is missing.", location=Location(field, path=f".{name.name}"))
    with prefix_errors(field):
        return kind(**cast(Mapping[str, Any], given))


def _check_integer(name: str, given: object, least: int, most: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise InvalidRequest(f"must be an integer from {least:,} to {most:,}, is {given!r:.80}.", param=name)
