"""Exact search of a collection: every document is scored for every query, and the best are kept.

Documents are embedded in blocks, and each block is scored for all variants before the next one is embedded. So a model reads
each text once for all variants of its vectors (once more for each other pooling of tokens), and a block is in memory at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np

from whimbrel.errors import SetupError, TruncationWarning, WhimbrelError
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.request import InputType
from whimbrel_bench.evaluation import forms
from whimbrel_bench.evaluation.collection import Ranks, Texts
from whimbrel_bench.evaluation.forms import Form
from whimbrel_bench.evaluation.models import Model
from whimbrel_bench.evaluation.ranking import Best
from whimbrel_bench.evaluation.variants import Variant

Tell = Callable[[int, int], None]
"""Called with the number of documents that are done, and of all."""

_BLOCK: Final[Mapping[str, int]] = {"dense": 2048, "sparse": 512, "multi_vector": 256}
"""Documents of a block, by output."""


def _silent(_done: int, _total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """The best documents of each query."""

    ranks: Ranks
    scores: Mapping[str, list[float]]
    num_bytes: float | None
    """Mean bytes of a document's vectors; None where none are stored."""
    notes: tuple[str, ...] = ()


def search(
    model: Model,
    output: str,
    queries: Texts,
    documents: Texts,
    variants: Sequence[Variant],
    *,
    top_k: int,
    tell: Tell = _silent,
) -> dict[Variant, Found]:
    """Return what each variant finds. `documents` are in trec_eval's order. Raises WhimbrelError."""
    for variant in variants:
        _check(model, output, variant)
    found: dict[Variant, Found] = {}
    for factor, of_pass in groupby(sorted(variants, key=lambda each: each.pool_factor or 0), key=lambda each: each.pool_factor):
        found |= _Pass(model, output, factor).run(queries, documents, list(of_pass), top_k=top_k, tell=tell)
    return {variant: found[variant] for variant in variants}


def _check(model: Model, output: str, variant: Variant) -> None:
    needed = {
        "multi_vector": "pooled" if variant.pool_factor else "muvera" if variant.muvera else "",
        "dense": "dim" if variant.dimensions else "",
    }
    for kind, word in needed.items():
        if word and output != kind:
            names = {"multi_vector": "token vectors", "dense": "dense vectors"}
            hint = f"choose them by --output {kind}" if kind in model.similarities else None
            raise SetupError(f"{word} is for {names[kind]}, and {model.name} is searched by {output}.", hint=hint)
    if variant.precision != "float32" and output == "sparse":
        raise SetupError("int8-vectors and binary are for dense vectors and token vectors, not for sparse ones.")


@dataclass(frozen=True, slots=True)
class _Pass:
    """One reading of all texts by a model."""

    model: Model
    output: str
    pool_factor: float | None

    def run(
        self, queries: Texts, documents: Texts, variants: Sequence[Variant], *, top_k: int, tell: Tell
    ) -> dict[Variant, Found]:
        with _noting_cuts("texts") as notes:
            asked = self._encode(queries, "query")
            systems = {variant: self._forms(variant, asked, queries) for variant in variants}
            best = {each: Best(len(queries), each.rescored or top_k) for each in variants}
            num_bytes = dict.fromkeys(variants, 0)
            step = _BLOCK[self.output]
            for first in range(0, len(documents), step):
                tell(first, len(documents))
                block = self._encode(documents[first : first + step], "document")
                for variant, (form, full) in systems.items():
                    kept = form.store(block)
                    num_bytes[variant] += kept.nbytes
                    best[variant].add(
                        _finite(form.score(kept)), first, _finite(full.score(full.store(block))) if full else None
                    )
            tell(len(documents), len(documents))
        return {
            variant: _found(queries, documents, best[variant].ranked(top_k), num_bytes[variant] / len(documents), notes)
            for variant in variants
        }

    def _encode(self, texts: Texts, role: InputType, **options: Any) -> Any:
        if self.pool_factor is not None and role == "document":
            options["token_pooling"] = self.pool_factor
        verb: Any = getattr(self.model.source, {"dense": "embed"}.get(self.output, self.output))
        if self.model.has_roles:
            options["input_type"] = role
        try:
            return verb(list(texts.texts), **options)
        except WhimbrelError as error:
            item = None if error.location is None else error.location.item
            if item is None or item >= len(texts):
                raise
            raise SetupError(f"{role} {texts.ids[item]!r}: {str(error).removeprefix(f'{error.location}: ')}") from error

    def _forms(self, variant: Variant, queries: Any, texts: Texts) -> tuple[Form, Form | None]:
        """Return the form of a variant, and the one that ranks its best again."""
        similarity = self.model.similarities[self.output]
        if self.output == "sparse":
            return forms.sparse_form(queries), None
        if self.output == "multi_vector":
            form = forms.muvera_form(queries) if variant.muvera else forms.late_form(queries, similarity, variant.precision)
            return form, forms.late_form(queries, similarity) if variant.rescored else None
        full = forms.dense_form(queries, similarity) if variant.rescored else None
        if variant.dimensions is None:
            return forms.dense_form(queries, similarity, variant.precision), full
        given: Float32Array = self._encode(texts, "query", dimensions=variant.dimensions)
        cut = _cut_as(queries, given)
        form = forms.dense_form(given, similarity, variant.precision)

        def store(block_BD: Float32Array) -> Any:
            return form.store(cut(block_BD))

        return replace(form, store=store), full


def _cut_as(whole_QD: Float32Array, cut_QE: Float32Array) -> Callable[[Float32Array], Float32Array]:
    """Return the function that cuts vectors as the model has cut those of the queries, so that documents need no other pass."""
    width = cut_QE.shape[1]
    ways: tuple[Callable[[Float32Array], Float32Array], ...] = (
        lambda rows_ND: np.ascontiguousarray(rows_ND[:, :width]),
        lambda rows_ND: forms.normalized(rows_ND[:, :width]),
    )
    for cut in ways:
        if np.allclose(cut(whole_QD), cut_QE, rtol=1e-4, atol=1e-4):
            return cut
    raise SetupError(f"this model's vectors of {width:,} columns are not the first columns of its longer ones.")


def _finite(scores_QB: Float32Array) -> Float32Array:
    if not np.isfinite(scores_QB).all():
        raise SetupError("a score is not finite: the vectors are too large to be compared.")
    return scores_QB


def _found(
    queries: Texts, documents: Texts, ranked: tuple[Int64Array, Float32Array], num_bytes: float, notes: Sequence[str]
) -> Found:
    numbers_QK, scores_QK = ranked
    rows: list[list[int]] = numbers_QK.tolist()
    ranks = {query: [documents.ids[number] for number in row] for query, row in zip(queries.ids, rows, strict=True)}
    return Found(ranks, dict(zip(queries.ids, scores_QK.tolist(), strict=True)), num_bytes, tuple(notes))


def rerank(model: Model, queries: Texts, documents: Texts, first: Ranks, *, tell: Tell = _silent, **options: Any) -> Found:
    """Return the documents of a first stage in the model's order. Documents of equal score are in trec_eval's order.

    `options` are those of the verb `rerank`.
    """
    texts = dict(zip(documents.ids, documents.texts, strict=True))
    ranks: dict[str, list[str]] = {}
    scores: dict[str, list[float]] = {}
    with _noting_cuts("pairs") as notes:
        for number, (query, text) in enumerate(zip(queries.ids, queries.texts, strict=True)):
            tell(number, len(queries))
            candidates = sorted(first.get(query, []), reverse=True)
            ranked = model.source.rerank(text, [texts[each] for each in candidates], **options) if candidates else []
            ranks[query] = [candidates[each.index] for each in ranked]
            scores[query] = [each.score for each in ranked]
    return Found(ranks, scores, None, tuple(notes))


@contextmanager
def _noting_cuts(inputs: str) -> Generator[list[str]]:
    """Yield a list that has a note after the block if verbs cut any texts. Other warnings are shown then."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TruncationWarning)
        yield notes
    cut = [each for each in caught if each.category is TruncationWarning]
    notes += [f"some {inputs} were cut to the model's limit"] if cut else []
    for each in caught:
        if each not in cut:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
