"""Chunking of long texts and late chunking.

Late chunking: the texts of a request are chunks of one document, which runs in one pass. Each chunk's vector is the mean of its
own tokens, so it depends on the text around it. A token belongs to the chunk in which it ends, because the space that leads a
token may be the last character of the chunk before. Special tokens and the prompt belong to no chunk.

Late chunking by length: a text runs in one pass, and every N of its tokens give a vector, with special tokens and the prompt.

Long texts: a text that exceeds the model's limit runs as several chunks, each with the special tokens and the prompt.
`ChunkMerge` combines their vectors. Builds on the steps of `Tokenizer.encode`.

Sources: jina-ai/late-chunking, chunked_pooling/__init__.py (the mean over a span of token vectors); vLLM's chunked processing
of long embeddings, entrypoints/pooling/embed (0.33), and its chunks of a fixed length, entrypoints/pooling/token_embed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whimbrel.errors import InvalidRequest, TooLarge, TooLong
from whimbrel.outputs.merge import ChunkMerge
from whimbrel.tokenizer.backend import find_surrogate
from whimbrel.tokenizer.offsets import encode_with_offsets
from whimbrel.tokenizer.prefixes import common_start
from whimbrel.tokenizer.tokenizer import EncodeParams, Tokenizer
from whimbrel.tokenizer.validation import check_texts, has_ids
from whimbrel.types.arrays import Int32Array
from whimbrel.types.seq import Seq, TokenOffsets

_MAX_CHUNKS: Final = 2**14
"""Chunks of all texts of a request together."""


def encode_split(
    tokenizer: Tokenizer, texts: Sequence[object], params: EncodeParams, *, normalized: bool
) -> tuple[list[Seq], ChunkMerge]:
    """Return the seqs of texts that may exceed the limit, and how to merge their vectors, which are `normalized` or not.

    The parameters cut nothing. Raises as Tokenizer.encode does.
    """
    rows, _ = tokenizer.rows(texts, params)
    prompt = tokenizer.backend.ids([""], params.prompt, special=False)[0]
    parts: list[tuple[Int32Array, int]] = []
    counts: list[int] = []
    for ids in rows:
        pieces = _pieces(tokenizer, ids[tokenizer.known(ids)], prompt, params.limit.max_length)
        counts.append(len(pieces))
        parts += pieces
    if len(parts) > _MAX_CHUNKS:
        raise TooLarge(f"the texts have {len(parts):,} parts; the limit is {_MAX_CHUNKS:,}. Send fewer.", param="input")
    seqs = [tokenizer.seq(ids, index, params) for index, (ids, _) in enumerate(parts)]
    weights_S = np.array([max(1, size) for _, size in parts], np.float32)
    return seqs, ChunkMerge(np.cumsum([0, *counts], dtype=np.int64), weights_S, normalized)


def encode_document(tokenizer: Tokenizer, texts: Sequence[object], params: EncodeParams) -> list[Seq]:
    """Return texts as one seq with a span for each of them. Raises as Tokenizer.encode does."""
    chunks, limit = check_texts(texts), params.limit.max_length
    try:
        ((encoding,),) = tokenizer.backend.encode_batches([params.prompt + "".join(chunks)], with_offsets=True)
    except InvalidRequest as error:
        raise find_surrogate(chunks, prompt=params.prompt) or error from None
    ids, offsets_T2 = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)
    if ids.size > limit:
        reason = f"the limit is {limit:,}, and late chunking runs them in one pass"
        raise TooLong(f"the texts have {ids.size:,} tokens together; {reason}. Send fewer of them.", param="input")
    known = tokenizer.known(ids)
    ids, offsets_T2 = ids[known], offsets_T2[known]
    first, end = tokenizer.special.before.size, ids.size - tokenizer.special.after.size
    ends_N1 = np.cumsum([len(params.prompt), *map(len, chunks)])
    spans_S2 = spans(ends_N1, offsets_T2[first:end]) + np.int32(first)
    spans_S2 = np.maximum(spans_S2, np.int32(tokenizer.count_instruction(ids)))
    without = np.flatnonzero(spans_S2[:, 0] == spans_S2[:, 1])
    if without.size:
        raise InvalidRequest("this part of the document has no tokens of its own.", item=int(without[0]))
    return [replace(tokenizer.seq(ids, 0, params), prompt_tokens=0, spans_S2=spans_S2)]  # spans leave the prompt out themselves


def encode_fixed_chunks(
    tokenizer: Tokenizer, texts: Sequence[object], params: EncodeParams, size: int
) -> tuple[list[Seq], list[TokenOffsets]]:
    """Return texts with a span for every `size` of their tokens, and the offsets of all tokens. The parameters cut nothing."""
    if has_ids(texts):
        raise InvalidRequest("chunks of tokens are of texts; token ids have no characters.", param="input")
    if tokenizer.static is not None:
        raise InvalidRequest("is not for static embeddings, whose tokens see nothing of each other.", param="chunk_tokens")
    seqs, offsets = encode_with_offsets(tokenizer, texts, params)
    return [replace(seq, prompt_tokens=0, spans_S2=_fixed_spans(seq.ids.size, size)) for seq in seqs], offsets


def _fixed_spans(num_tokens: int, size: int) -> Int32Array:
    size = min(size, num_tokens)
    starts = np.arange(0, num_tokens, size, dtype=np.int32)
    return np.stack((starts, np.minimum(starts + np.int32(size), np.int32(num_tokens))), axis=1)


def _pieces(tokenizer: Tokenizer, ids: Int32Array, prompt: Int32Array, max_length: int) -> list[tuple[Int32Array, int]]:
    """Split a text as `split` does. Each chunk has the special tokens and the prompt or instruction of its text."""
    special, before, after = tokenizer.special, 0, 0
    if special.surround(ids):
        before = special.before.size + common_start(ids[special.before.size :], prompt)
        before, after = max(before, tokenizer.count_instruction(ids)), special.after.size
    if ids.size > max_length <= before + after:
        raise InvalidRequest(f"of {before:,} tokens leaves no room for the text.", param="prompt")
    return split(ids, before, after, max_length)


def spans(ends_N1: NDArray[np.integer], offsets_T2: NDArray[np.integer]) -> Int32Array:
    """Return the token range of each chunk, (N, 2), which is empty for a chunk without tokens.

    `ends_N1` holds the character offsets at which the prompt ends and each chunk ends. `offsets_T2` holds those of each token.
    """
    last_T = np.maximum(offsets_T2[:, 1] - 1, 0)  # a space whose offsets were trimmed has none left
    part_T = np.maximum.accumulate(np.searchsorted(ends_N1, last_T, side="right"))
    parts_N = np.arange(1, ends_N1.size)
    bounds = [np.searchsorted(part_T, parts_N, side=side) for side in ("left", "right")]
    return np.stack(bounds, axis=1).astype(np.int32)


def split(ids: Int32Array, before: int, after: int, max_length: int) -> list[tuple[Int32Array, int]]:
    """Return chunks with the first `before` and the last `after` tokens of a text, and the number of other tokens of each."""
    own = ids[before : ids.size - after]
    if ids.size <= max_length:
        return [(ids, own.size)]
    room = max_length - before - after
    pieces = [own[start : start + room] for start in range(0, own.size, room)]
    return [(np.concatenate((ids[:before], piece, ids[ids.size - after :])), piece.size) for piece in pieces]
