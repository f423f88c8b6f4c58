"""Whimbrel's models for mteb, by its own protocols: encoder, cross-encoder, and search for sparse and late-interaction models.

A model is told which texts are queries and which are documents, and takes its own prompts. Instructions of mteb's tasks are
not used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, cast

import msgspec

from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel_bench.evaluation.collection import Texts
from whimbrel_bench.evaluation.models import Model, open_model
from whimbrel_bench.evaluation.ranking import trec_order
from whimbrel_bench.evaluation.search import rerank, search
from whimbrel_bench.evaluation.variants import Variant

_PLAIN: Final = Variant()


def _texts_of(inputs: Iterable[Mapping[str, Sequence[str]]]) -> list[str]:
    return [text for batch in inputs for text in batch["text"]]


class _Base:
    """A model with the metadata that all of mteb's protocols ask for."""

    def __init__(self, model: Model, output: str) -> None:
        mteb: Any = import_module("mteb.models.model_meta")
        known: dict[str, Any] = {"cosine": mteb.ScoringFunction.COSINE, "dot": mteb.ScoringFunction.DOT_PRODUCT}
        if output == "dense" and model.similarities[output] not in known:
            similarity = model.similarities[output]
            raise SetupError(f"{model.name} compares by {similarity} distance; mteb's encoders by cosine or dot product.")
        about = {"name": f"whimbrel/{model.name.replace('/', '_')}", "revision": "local"}
        chosen = {"similarity_fn_name": known[model.similarities[output]]} if output == "dense" else {}
        self.mteb_model_meta: Any = mteb.ModelMeta.create_empty(about | chosen)
        self._model, self._output = model, output


class Encoder(_Base):
    """Dense vectors, by EncoderProtocol."""

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Float32Array:
        role = {} if prompt_type is None or not self._model.has_roles else {"input_type": prompt_type.value}
        return self._model.source.embed(_texts_of(inputs), **role)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return self._function("similarity")(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return self._function("similarity_pairwise")(embeddings1, embeddings2)

    def _function(self, name: str) -> Callable[[Any, Any], Any]:
        mteb: Any = import_module("mteb.models.abs_encoder")
        return getattr(mteb.AbsEncoder, name).__get__(self)  # which reads the similarity from `mteb_model_meta`


class CrossEncoder(_Base):
    """Scores of pairs, by CrossEncoderProtocol."""

    def predict(self, inputs1: Any, inputs2: Any, **_: Any) -> Float32Array:
        return self._model.source.score(_texts_of(inputs1), _texts_of(inputs2))


class Search(_Base):
    """Exact search by any vectors, by SearchProtocol: late interaction and sparse vectors, which have no similarity in mteb."""

    def index(self, corpus: Any, **_: Any) -> None:
        """Keep the texts of the corpus, in trec_eval's order of equal scores."""
        texts = {str(row["id"]): f"{row.get('title') or ''} {row['text']}".strip() for row in corpus}
        ids = trec_order(texts)
        self._documents = Texts(tuple(ids), tuple(texts[each] for each in ids))

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Mapping[str, list[str]] | None = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Return the best documents of each query, or the scores of those that `top_ranked` names."""
        asked = Texts(tuple(str(each) for each in queries["id"]), tuple(queries["text"]))
        if top_ranked is None:
            found = search(self._model, self._output, asked, self._documents, [_PLAIN], top_k=top_k)[_PLAIN]
        else:
            by: Any = self._output
            found = rerank(self._model, asked, self._documents, top_ranked, score_by=by)
        return {query: dict(zip(found.ranks[query], found.scores[query], strict=True)) for query in asked.ids}


_CLASSES: Final[Mapping[str, type[_Base]]] = {
    "dense": Encoder,
    "scores": CrossEncoder,
    "sparse": Search,
    "multi_vector": Search,
}


def mteb_model(model: Model, output: str | None = None) -> _Base:
    """Return a model as mteb takes it. Raises SetupError if mteb is missing or the model has nothing for it."""
    try:
        import_module("mteb")
    except ImportError as error:
        raise SetupError(f"mteb is not installed ({error}).", hint="pip install 'whimbrel[mteb]'") from None
    chosen = model.choose(output)
    return _CLASSES[chosen](model, chosen)


@contextmanager
def open_mteb_model(name: str | None = None, output: str | None = None, **options: Any) -> Generator[Any]:
    """Open a model by its folder, hub id or URL, for `mteb.evaluate`.

    `output` is "dense", "sparse", "multi_vector" or "scores"; None: the model's main one. `options` are those of Engine.
    """
    with open_model(name, options.pop("dtype", None), options) as model:
        yield mteb_model(model, output)


def _evaluate(wrapped: Any, task: Any) -> Any:
    mteb: Any = import_module("mteb")
    try:
        return mteb.evaluate(wrapped, task, cache=None, show_progress_bar=False).task_results[0]
    except WhimbrelError:
        raise
    except Exception as error:  # any, of code that is not ours: a download that fails, a task that does not suit
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise SetupError(f"mteb cannot run {task.metadata.name}: {lines[0]}") from error


def evaluate_tasks(model: Model, output: str | None, tasks: str) -> list[dict[str, Any]]:
    """Run tasks of mteb by their names, between commas, and return the results. Raises SetupError."""
    wrapped = mteb_model(model, output)
    mteb: Any = import_module("mteb")
    names = [name for name in (each.strip() for each in tasks.split(",")) if name]
    if not names:
        raise SetupError("--mteb names no task.", hint="for example --mteb NFCorpus,SciFact")
    try:
        found = list(cast("Iterable[Any]", mteb.get_tasks(tasks=names)))
    except KeyError as error:
        said = str(error.args[0]).strip().removeprefix("KeyError: ")
        raise SetupError(f"mteb: {said}", hint="mteb.get_tasks() lists the names") from None
    results: list[dict[str, Any]] = []
    for task in found:
        done = _evaluate(wrapped, task)
        results.append(
            {
                "task": task.metadata.name,
                "type": task.metadata.type,
                "measure": task.metadata.main_score,
                "score": float(done.get_score()),
                "scores": msgspec.to_builtins(done.scores, enc_hook=float),  # of numpy's numbers
            }
        )
    return results
