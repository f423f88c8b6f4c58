"""Measures of rankings, with trec_eval's definitions and, for equal scores, its order. Pure.

Gains of nDCG are the grades themselves, and the discount of rank r is log2(r + 1). A document is relevant from grade 1 on;
documents without a grade, or with a negative one, gain nothing. Recall and MAP divide by the number of a query's relevant
documents, those that are missing in the collection included.

Source: trec_eval 9 (m_ndcg_cut.c, m_recall.c, m_recip_rank.c, m_map_cut.c, m_P.c).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

from whimbrel.errors import SetupError

DEFAULT: Final = "ndcg@10,recall@10,recall@100,mrr@10,map@100"
MAX_DEPTH: Final = 10_000


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of the first `depth` documents of a ranking."""

    kind: str
    depth: int

    @property
    def label(self) -> str:
        return f"{_LABELS.get(self.kind, self.kind)}@{self.depth}"

    def value(self, ranked: Sequence[str], grades: Mapping[str, int]) -> float:
        """Return the measure of a ranking of document ids, for a query with at least one relevant document."""
        gains = [max(0, grades.get(document, 0)) for document in ranked[: self.depth]]
        relevant = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
        return _MEASURES[self.kind](gains, relevant, self.depth)


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains, start=1))


def _ndcg(gains: Sequence[int], relevant: Sequence[int], depth: int) -> float:
    return _dcg(gains) / _dcg(relevant[:depth])


def _recall(gains: Sequence[int], relevant: Sequence[int], _depth: int) -> float:
    return sum(gain > 0 for gain in gains) / len(relevant)


def _reciprocal_rank(gains: Sequence[int], _relevant: Sequence[int], _depth: int) -> float:
    return next((1 / rank for rank, gain in enumerate(gains, start=1) if gain > 0), 0.0)


def _average_precision(gains: Sequence[int], relevant: Sequence[int], _depth: int) -> float:
    found, total = 0, 0.0
    for rank, gain in enumerate(gains, start=1):
        if gain > 0:
            found += 1
            total += found / rank
    return total / len(relevant)


def _precision(gains: Sequence[int], _relevant: Sequence[int], depth: int) -> float:
    return sum(gain > 0 for gain in gains) / depth


_MEASURES: Final[Mapping[str, Callable[[Sequence[int], Sequence[int], int], float]]] = {
    "ndcg": _ndcg,
    "recall": _recall,
    "mrr": _reciprocal_rank,
    "map": _average_precision,
    "precision": _precision,
}
_LABELS: Final = {"ndcg": "nDCG", "mrr": "MRR", "map": "MAP"}


def read_measures(text: str) -> tuple[Measure, ...]:
    """Return the measures of a list such as "ndcg@10,recall@100". Raises SetupError."""
    found: dict[Measure, None] = {}
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        match = re.fullmatch(r"(\w+)@(\d{1,6})", part)
        if match is None or match[1] not in _MEASURES or not 1 <= int(match[2]) <= MAX_DEPTH:
            hint = f"a measure is one of {', '.join(_MEASURES)}, then @ and a depth of 1 to {MAX_DEPTH:,}: ndcg@10"
            raise SetupError(f"{part!r} is no measure.", hint=hint)
        found[Measure(match[1], int(match[2]))] = None
    if not found:
        raise SetupError("--measures names none.", hint=f"for example {DEFAULT}")
    return tuple(found)
