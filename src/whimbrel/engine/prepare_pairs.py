"""Pairs that are scored by the vectors of their texts: their two sides, stored vectors, and the tokens of an explanation.

Each side is a request of its own: the distinct texts of the queries, or of the documents, for the output that is compared.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whimbrel.engine.prepare_texts import Encoded, TextEncoder, Texts
from whimbrel.errors import InvalidRequest, relocating
from whimbrel.outputs.layout import token_mask
from whimbrel.outputs.multi_vector import TokenReduction
from whimbrel.outputs.pair_scoring import PairScoring, PairSide, scoring_method, split_pairs
from whimbrel.outputs.requested import OutputSpec, max_sparse_entries, resolve_width
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import OutputName, Request, Similarity
from whimbrel.types.seq import PairTokens, Seq


def encode_pairs(encoder: TextEncoder, request: Request, pairs: Texts) -> Encoded:
    """Encode the distinct texts of pairs that are scored by similarity, queries first. Raises as TextEncoder.encode."""
    card = encoder.card
    output, similarity = scoring_method(card, request)
    if request.muvera is not None:
        raise InvalidRequest("pairs are compared by their token vectors themselves.", param="muvera")
    of_queries = card.tower(card.tower_for("query"))
    if output == "sparse":
        width = max_sparse_entries(of_queries)
    else:
        width = resolve_width(of_queries, request, output, matryoshka=encoder.plan.matryoshka)
    queries, documents = split_pairs(request, pairs, output, width)
    first, second = (_encode_side(encoder, request, side, output, similarity) for side in (queries, documents))
    seqs = [*first.seqs, *(replace(seq, index=seq.index + len(first.seqs)) for seq in second.seqs)]
    num_stored = sum(map(len, queries.stored))
    specs, poolings, query_poolings = _join_sides(first, second)
    queries_P = queries.text_indices(0, len(seqs))
    documents_P = documents.text_indices(len(first.seqs), len(seqs) + num_stored)
    stored = (*queries.stored, *documents.stored)
    finish = PairScoring(output, similarity, queries_P, documents_P, stored, request.explain, poolings, query_poolings)
    if request.explain:
        if first.seqs and any(pooling.pool_factor > 1 for pooling in finish.query_poolings):
            raise InvalidRequest("this checkpoint pools queries, so their vectors are of no one token.", param="explain")
        if second.seqs and any(pooling.pool_factor > 1 for pooling in finish.poolings):
            raise InvalidRequest("pooled vectors are of no one token; give token_pooling 1.", param="explain")
        finish = replace(finish, pair_tokens=_pair_tokens(encoder, output, seqs, finish))
    return Encoded(first.card, specs, seqs, finish)


def _encode_side(encoder: TextEncoder, request: Request, side: PairSide, output: OutputName, similarity: Similarity) -> Encoded:
    """Encode one side. A prompt is for queries and a pooling for documents; sides of a fixed length are not limited."""
    card = encoder.card
    form = card.tower(card.tower_for(side.input_type)).text_formats.get(side.input_type)
    is_query = side.input_type == "query"
    of_side = replace(
        request,
        texts=side.texts,
        outputs=(output,),
        input_type=side.input_type,
        explain=False,
        prompt=request.prompt if is_query else None,
        prompt_name=request.prompt_name if is_query else None,
        token_pooling=None if is_query else request.token_pooling,
        max_tokens=None if form is not None and form.has_fixed_length else request.max_tokens,
    )
    with relocating(side.locate):
        encoded = encoder.encode(of_side, side.texts)
    specs = [
        replace(spec, activated=spec.activated or similarity == "cosine", keep_on_device=spec.name == "multi_vector")
        for spec in encoded.specs
    ]
    return replace(encoded, specs=specs)


def _pair_tokens(encoder: TextEncoder, output: OutputName, seqs: Sequence[Seq], pairs: PairScoring) -> list[PairTokens]:
    """Return the tokens that have a vector, of both texts of each pair; None for stored vectors."""
    tokens: list[tuple[str, ...] | None] = []
    for seq in seqs:
        tokenizer = encoder.tokenizers[seq.tower]
        assert isinstance(tokenizer, Tokenizer)  # a model with a template gives no token vectors
        mask_T = token_mask(tokenizer.card.output(output), seq.ids, np.array([0, seq.ids.size]), np.array([seq.is_query]))
        tokens.append(tokenizer.tokens(seq.ids[mask_T]))
    tokens += [None] * sum(map(len, pairs.stored))
    texts = zip(pairs.queries_P.tolist(), pairs.documents_P.tolist(), strict=True)
    return [(tokens[query], tokens[document]) for query, document in texts]


def _join_sides(
    queries: Encoded, documents: Encoded
) -> tuple[list[OutputSpec], tuple[TokenPooling, ...], tuple[TokenPooling, ...]]:
    """Return the specs of both sides of pairs, and the poolings of documents and of queries.

    If only one side is normalised before it is pooled, the specs say neither, and that side's first pooling normalises.
    """
    sides = (documents, queries)
    steps = [side.finish.poolings if isinstance(side.finish, TokenReduction) else () for side in sides]
    activated = [any(spec.activated for spec in side.specs) for side in sides]
    if activated[0] == activated[1] or not any(steps):
        return queries.specs, steps[0], steps[1]
    normalizing = (TokenPooling(1.0, normalize_embeddings=True),)
    of_documents, of_queries = ((*normalizing, *own) if is_on else own for own, is_on in zip(steps, activated, strict=True))
    return [replace(spec, activated=False) for spec in queries.specs], of_documents, of_queries
