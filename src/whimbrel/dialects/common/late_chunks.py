"""Late chunking by length: a vector for each piece of N tokens of a text, and where each begins and ends (vLLM)."""

from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from whimbrel.dialects.common.answers import answer_type, described, word
from whimbrel.types.arrays import Int32Array
from whimbrel.types.options import require
from whimbrel.types.result import Result


class LateChunkingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of late chunking by length."""

    chunk_size: Annotated[int, Meta(ge=1, le=2**63 - 1, description="The number of tokens of a chunk; the last has the rest.")]


LateChunk: Final = answer_type(
    "LateChunk", "A chunk of a text, from a first to before an end.",
    token_range=tuple[int, int], char_range=described(tuple[int, int] | None, "Null for a chunk of special tokens."),
)  # fmt: skip
LateChunks: Final = answer_type(
    "LateChunks", "The chunks of a text, one for each of its vectors.",
    chunk_size=int, input_tokens=int, chunks=list[LateChunk], strategy=word("fixed_tokens"),
)  # fmt: skip


def chunk_embeddings(result: Result, size: int) -> list[dict[str, Any]]:
    """Return Embeddings with the vectors of all chunks of each text."""
    data: list[dict[str, Any]] = []
    row = 0
    for index, offsets in enumerate(require(result.token_offsets)):
        chunks = _chunk_ranges(offsets.chars_T2, size)
        about: dict[str, Any] = {"strategy": "fixed_tokens", "chunk_size": size, "input_tokens": len(offsets.chars_T2)}
        about["chunks"] = [{"token_range": tokens, "char_range": characters} for tokens, characters in chunks]
        vectors_PD = result.dense[row : row + len(chunks)]
        data.append({"index": index, "object": "embedding", "embedding": vectors_PD, "late_chunking": about})
        row += len(chunks)
    return data


def _chunk_ranges(chars_T2: Int32Array, size: int) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Return the tokens and the characters of each chunk; tokens without characters, as special ones, do not count."""
    num_tokens = len(chars_T2)
    starts = range(0, num_tokens, min(size, num_tokens))
    first_T, end_T = chars_T2.T
    is_text_T = first_T < end_T
    first_P = np.minimum.reduceat(np.where(is_text_T, first_T, np.iinfo(np.int32).max), starts)
    end_P = np.maximum.reduceat(np.where(is_text_T, end_T, -1), starts)
    characters = ((int(a), int(b)) if a < b else None for a, b in zip(first_P, end_P, strict=True))
    return list(zip(pairwise([*starts, num_tokens]), characters, strict=True))
