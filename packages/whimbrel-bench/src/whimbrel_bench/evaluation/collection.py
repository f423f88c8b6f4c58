"""Collections: queries, documents, and judgements of which documents answer which queries.

Files have the columns of BEIR ("_id", "title" and "text"; "query-id", "corpus-id" and "score") or others of the same meaning.
Judgements may have TREC's four columns. A judgement of an unknown document is refused, as it would lower every system's recall
without a word. Queries without a relevant document are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, Final

import numpy as np

from whimbrel.errors import SetupError
from whimbrel_bench.evaluation.ranking import trec_order
from whimbrel_bench.evaluation.rows import JSON, Names, failed, kind_of, read_lines, read_rows

Judgements = Mapping[str, Mapping[str, int]]
Ranks = Mapping[str, list[str]]
"""Ids of documents of each query, best first."""

_TEXTS: Final[Names] = {
    "id": ("_id", "id", "qid", "docid", "doc_id", "docno", "query-id", "query_id", "corpus-id", "corpus_id", "pid"),
    "text": ("text", "query", "question", "contents", "body", "passage", "document"),
    "title": ("title",),
}
_JUDGEMENTS: Final[Names] = {
    "query": ("query-id", "query_id", "qid", "topic", "query"),
    "document": ("corpus-id", "corpus_id", "docid", "doc_id", "docno", "pid", "document", "doc"),
    "grade": ("score", "relevance", "rel", "label", "grade"),
}
_QUERIES: Final = ("queries.jsonl", "queries.jsonl.gz", "queries.tsv", "queries.csv")
_DOCUMENTS: Final = tuple(
    f"{name}{end}" for name in ("corpus", "docs", "documents") for end in (".jsonl", ".jsonl.gz", ".tsv", ".csv")
)
_GRADE: Final = re.compile(r"[+-]?[0-9]{1,9}(\.0*)?")
"""A whole number, which programs of data frames write as 1.0."""
_EXAMPLE: Final = 'a line is for example {"_id": "7", "text": "..."}, or an id, a tab and a text'


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts by their ids."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Texts:
        return Texts(self.ids[rows], self.texts[rows])


@dataclass(frozen=True, slots=True)
class Collection:
    """Judged queries in the order of their file, and documents in trec_eval's order of equal scores."""

    queries: Texts
    documents: Texts
    judgements: Judgements
    """Grades of documents for each of `queries`, which all have a relevant one."""
    notes: tuple[str, ...] = ()
    """Facts that the reader of a result should know."""


def find_files(folder: Path, split: str) -> tuple[Path, Path, Path]:
    """Return the files of queries, documents and judgements in a folder. Raises SetupError."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is no folder.", hint="name the files: --queries, --docs and --qrels")
    judgements = [
        f"{place}{name}{end}"
        for place, name in (("qrels/", split), ("", "qrels"), ("", split))
        for end in (".tsv", ".txt", ".qrels", ".jsonl", ".csv")
    ]
    return _find(folder, _QUERIES, "--queries"), _find(folder, _DOCUMENTS, "--docs"), _find(folder, judgements, "--qrels")


def _find(folder: Path, names: tuple[str, ...] | list[str], flag: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise SetupError(f"{folder} has no {names[0]}.", hint=f"other names that are known: {', '.join(names[1:])}; or use {flag}")


def read_collection(queries: Path, documents: Path, judgements: Path, *, incomplete: bool = False) -> Collection:
    """Read the three files. With `incomplete`, relevant documents that are missing count as never found. Raises SetupError."""
    asked, kept = _read_texts(queries, with_title=False), _read_texts(documents, with_title=True)
    return make_collection(asked, kept, _read_judgements(judgements), incomplete=incomplete, source=str(judgements))


def make_collection(
    queries: Mapping[str, str], documents: Mapping[str, str], judgements: Judgements, *, incomplete: bool = False, source: str
) -> Collection:
    """Return the collection of these texts and judgements. `source` is the name of the judgements for errors."""
    notes: list[str] = []
    missing = [
        (query, document)
        for query, grades in judgements.items()
        if query in queries
        for document, grade in grades.items()
        if grade > 0 and document not in documents
    ]
    if missing:
        (query, document), more = missing[0], f" ({len(missing):,} such judgements)" if len(missing) > 1 else ""
        if not incomplete:
            raise SetupError(
                f"{source} calls document {document!r} relevant for query {query!r}, but there is no such document{more}.",
                hint="add the documents, or count them as never found: --incomplete",
            )
        notes.append(f"judgements of documents that are missing, which count as never found: {len(missing):,}")
    unknown = [query for query in judgements if query not in queries]
    if unknown:
        notes.append(f"judged queries that are not among the queries: {len(unknown):,}, for example {unknown[0]!r}")
    judged = {query: judgements[query] for query in queries if any(grade > 0 for grade in judgements.get(query, {}).values())}
    if not judged:
        hint = "do the ids agree?" if len(unknown) == len(judgements) else "a document is relevant from grade 1 on"
        raise SetupError(f"{source} has a relevant document for none of the {len(queries):,} queries.", hint=hint)
    if (left := len(queries) - len(judged)) > 0:
        notes.append(f"queries without a relevant document, which are left out: {left:,} of {len(queries):,}")
    empty = sum(not text.strip() for text in documents.values())
    if empty:
        notes.append(f"documents without text: {empty:,}")
    ordered = trec_order(documents)
    return Collection(
        Texts(tuple(judged), tuple(queries[query] for query in judged)),
        Texts(tuple(ordered), tuple(documents[each] for each in ordered)),
        judged,
        tuple(notes),
    )


def _read_texts(path: Path, *, with_title: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, row in read_rows(path, ("id", "text"), _TEXTS):
        name, text, title = _id(row.get("id")), row.get("text"), row.get("title") if with_title else None
        if not name:
            raise failed(path, number, "no id.", hint=_EXAMPLE)
        if not isinstance(text, str):
            raise failed(path, number, f"{name!r} has no text.", hint=_EXAMPLE)
        if title is not None and not isinstance(title, str):
            raise failed(path, number, f"the title of {name!r} is no text.", hint=_EXAMPLE)
        if name in lines:
            raise failed(path, number, f"the id {name!r} is that of line {lines[name]} too.", hint="each id may be there once")
        lines[name] = number
        found[name] = f"{title or ''} {text}".strip() if with_title else text
    if not found:
        raise SetupError(f"{path} has no texts.", hint=_EXAMPLE)
    return found


def _read_judgements(path: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for number, query, document, grade in _judgement_rows(path):
        if not _GRADE.fullmatch(str(grade)):
            hint = "a grade is 0 for irrelevant, 1 for relevant, or a higher whole number"
            raise failed(path, number, f"the grade {grade!r} is no whole number.", hint=hint)
        value = int(float(grade))
        before = found.setdefault(query, {}).setdefault(document, value)
        if before != value:
            raise failed(
                path, number, f"query {query!r} and document {document!r} have the grade {before} above, here {value}."
            )
    if not found:
        raise SetupError(f"{path} has no judgements.", hint="a line is: query id, document id, grade")
    return found


def _judgement_rows(path: Path) -> Iterator[tuple[int, str, str, Any]]:
    """Yield the number, the query, the document and the grade of each line."""
    if kind_of(path) not in (*JSON, ".csv") and _has_trec_columns(next((line for _, line in read_lines(path)), "")):
        yield from _trec_judgements(path)
        return
    for number, row in read_rows(path, tuple(_JUDGEMENTS), _JUDGEMENTS):
        query, document = _id(row.get("query")), _id(row.get("document"))
        if not query or not document:
            raise failed(path, number, f"no id of a {'document' if query else 'query'}.")
        yield number, query, document, row.get("grade", 1)


def _has_trec_columns(line: str) -> bool:
    words = line.split()
    return len(words) == 4 and line.count("\t") != 2 and _GRADE.fullmatch(words[3]) is not None


def _trec_judgements(path: Path) -> Iterator[tuple[int, str, str, Any]]:
    for number, line in read_lines(path):
        words = line.split()
        if len(words) != 4:
            raise failed(path, number, f"columns: {len(words)}; judgements of TREC have 4: query, 0, document, grade.")
        yield number, words[0], words[2], words[3]


def _id(value: object) -> str:
    """Return an id as text, empty if it is none. Numbers are ids too."""
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def read_run(path: Path, collection: Collection, top_k: int) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the best documents of each query by a run of TREC (query, Q0, document, rank, score, name), and notes.

    The scores order the documents, as in trec_eval; the ranks are not read. Raises SetupError.
    """
    known, scored = set(collection.documents.ids), dict[str, dict[str, float]]()
    asked = set(collection.queries.ids)
    for number, line in read_lines(path):
        words = line.split()
        if len(words) != 6:
            hint = "six columns: query, Q0, document, rank, score, name"
            raise failed(path, number, f"columns: {len(words)}; a run of TREC has 6.", hint=hint)
        query, document = words[0], words[2]
        if query not in asked:
            continue
        if document not in known:
            raise failed(path, number, f"there is no document {document!r}.", hint="the run must be of these documents")
        if document in scored.setdefault(query, {}):
            raise failed(path, number, f"query {query!r} has document {document!r} above too.")
        scored[query][document] = _number(path, number, words[4])
    if not scored:
        raise SetupError(f"{path} has documents for none of the judged queries.", hint="do the ids agree?")
    left = len(asked) - len(scored)
    notes = (f"queries without documents in {path.name}, which count as 0: {left:,}",) if left else ()
    ranks = {query: _order(scored.get(query, {}))[:top_k] for query in collection.queries.ids}
    return ranks, notes


def _number(path: Path, line: int, text: str) -> float:
    try:
        score = float(np.float32(text))  # as trec_eval reads it
    except ValueError:
        score = nan
    if isnan(score):
        raise failed(path, line, f"the score {text!r} is no number.")
    return score


def _order(scores: Mapping[str, float]) -> list[str]:
    return sorted(trec_order(scores), key=lambda document: scores[document], reverse=True)  # equal scores keep their order
