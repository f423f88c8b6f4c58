"""A task of mteb with two queries and two documents, each the answer to one. It needs no network."""

from __future__ import annotations

from typing import Any


def birds_task(*, reranking: bool = False) -> Any:
    """Return the task; as a reranking task it names both documents as candidates of each query."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Birds(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Birds", description="Two birds.", reference=None, dataset={"path": "none", "revision": "1"}, modalities=["text"],
            type="Reranking" if reranking else "Retrieval", category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="ndcg_at_1", date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
            dialect=None, sample_creation=None, bibtex_citation=None,
        )  # fmt: skip

        def load_data(self, *_: Any, **__: Any) -> None:
            corpus = [
                {"id": "a", "title": "Food", "text": "A sandwich with cheese."},
                {"id": "b", "title": "", "text": "A wader with a bill."},
            ]
            queries = [{"id": "qa", "text": "What can I eat?"}, {"id": "qb", "text": "Which bird wades?"}]
            self.dataset = {"default": {"test": {
                "corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries),
                "relevant_docs": {"qa": {"a": 1}, "qb": {"b": 1}},
                "top_ranked": {query: ["a", "b"] for query in ("qa", "qb")} if reranking else None,
            }}}  # fmt: skip
            self.data_loaded = True

    return Birds()
