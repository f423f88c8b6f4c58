"""Course of an evaluation on one's own data: models one after another, each dtype loaded once, variants of a dtype together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from whimbrel.errors import SetupError
from whimbrel_bench.evaluation.collection import Collection, Ranks, read_run
from whimbrel_bench.evaluation.models import Model, is_url, short_name
from whimbrel_bench.evaluation.report import System
from whimbrel_bench.evaluation.search import Found, rerank, search
from whimbrel_bench.evaluation.variants import Variant

Open = Callable[[str | None, str | None], AbstractContextManager[Model]]
"""Opens a model by its name and dtype."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Choices of an evaluation beside its collection."""

    models: Sequence[str | None]
    variants: Sequence[Variant]
    top_k: int
    """Documents that are found for each query, or reranked."""
    output: str | None = None
    """Output to search by, or to rerank by; None: the model's main one, as always in a first stage."""
    first_stage: str | None = None
    """Model, or run of TREC, whose best documents the models rerank; None: they search themselves."""


def run(evaluation: Evaluation, collection: Collection, open_model: Open, say: Say) -> list[System]:
    """Return the systems in the order of the models and variants; a first stage comes before them. Raises WhimbrelError."""
    names = display_names(evaluation.models)
    systems = list[System]()
    first: Ranks | None = None
    if evaluation.first_stage is not None:
        if rich := next((each for each in evaluation.variants if not each.is_plain), None):
            raise SetupError(f"--compare {rich}: a reranker stores no vectors.", hint="with --first-stage compare dtypes alone")
        systems.append(_first_stage(evaluation, collection, open_model, say))
        first = systems[0].ranks
    for model_name, shown in zip(evaluation.models, names, strict=True):
        open_own = partial(open_model, model_name)
        for variant, found, about in _of_model(evaluation, open_own, collection, first, say):
            systems.append(_system(shown, variant, found, about, lone=len(names) == 1 and first is None))
    return systems


def display_names(models: Sequence[str | None]) -> list[str]:
    """Return names that tell models apart: the last part of each, or where these agree the whole."""
    short = [short_name(each) for each in models]
    if len(set(models)) < len(models):
        raise SetupError("a model is named twice.", hint="--compare makes several systems of one model")
    return [name if short.count(name) == 1 else str(model) for name, model in zip(short, models, strict=True)]


def _system(shown: str, variant: Variant, found: Found, about: str, *, lone: bool) -> System:
    name = str(variant) if lone and str(variant) else f"{shown} {variant}".strip()
    return System(name, about, found.ranks, found.num_bytes, found.notes)


def _of_model(
    evaluation: Evaluation,
    open_own: Callable[[str | None], AbstractContextManager[Model]],
    collection: Collection,
    first: Ranks | None,
    say: Say,
) -> Iterator[tuple[Variant, Found, str]]:
    """Yield what each variant of a model finds, and what the model is, in the order of the variants."""
    found: dict[Variant, tuple[Found, str]] = {}
    in_order = sorted(evaluation.variants, key=lambda each: each.dtype or "")
    for dtype, of_dtype in groupby(in_order, key=lambda each: each.dtype):
        variants = list(of_dtype)
        with open_own(dtype) as model:
            if first is None:
                results = _search(model, collection, variants, output=evaluation.output, top_k=evaluation.top_k, say=say)
            else:
                tell = _teller(f"{model.name}: reranking", "queries", say)
                options: Mapping[str, Any] = {} if evaluation.output is None else {"score_by": evaluation.output}
                ranked = rerank(model, collection.queries, collection.documents, first, tell=tell, **options)
                results = dict.fromkeys(variants, ranked)
            found |= {variant: (result, model.about) for variant, result in results.items()}
    for variant in evaluation.variants:
        yield variant, *found[variant]


def _search(
    model: Model, collection: Collection, variants: Sequence[Variant], *, output: str | None, top_k: int, say: Say
) -> dict[Variant, Found]:
    chosen = model.choose(output)
    if chosen == "scores":
        raise SetupError(
            f"{model.name} scores pairs, and cannot search {len(collection.documents):,} documents.",
            hint="name the model, or the run of TREC, whose best documents it reranks: --first-stage",
        )
    tell = _teller(f"{model.name}: searching by {chosen}", "documents", say)
    return search(model, chosen, collection.queries, collection.documents, variants, top_k=top_k, tell=tell)


def _first_stage(evaluation: Evaluation, collection: Collection, open_model: Open, say: Say) -> System:
    name = evaluation.first_stage
    assert name is not None
    if not is_url(name) and Path(name).is_file():
        ranks, notes = read_run(Path(name), collection, evaluation.top_k)
        return System(f"first stage ({Path(name).name})", f"run of TREC {name}", ranks, None, notes)
    plain = Variant()
    with open_model(name, None) as model:
        found = _search(model, collection, [plain], output=None, top_k=evaluation.top_k, say=say)[plain]
        return System(f"first stage ({model.name})", model.about, found.ranks, found.num_bytes, found.notes)


def _teller(words: str, noun: str, say: Say) -> Callable[[int, int], None]:
    return lambda done, total: say(f"{words}, {done:,} of {total:,} {noun}")
