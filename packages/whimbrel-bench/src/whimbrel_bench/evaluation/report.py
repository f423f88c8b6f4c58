"""Report of an evaluation: intervals, differences from the first system, tables, JSON and a page. Pure.

Shapes: S systems, Q queries, M measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Final

import numpy as np

from whimbrel_bench import page as pages
from whimbrel_bench.evaluation.collection import Collection, Ranks
from whimbrel_bench.evaluation.drawing import intervals_part
from whimbrel_bench.evaluation.intervals import MIN_DIFFERENT, Float64Array, Interval, draw_means, interval_of
from whimbrel_bench.evaluation.measures import Measure
from whimbrel_bench.tables import table

_WORST: Final = 5
_WIDTH: Final = 70
"""Characters of a query in a list."""
_SAME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class System:
    """A system under evaluation, and what it found."""

    name: str
    about: str
    ranks: Ranks
    num_bytes: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of a system from the first one, by the first measure."""

    interval: Interval
    better: int
    worse: int
    same: int
    worst: tuple[int, ...]
    """Queries that lost most, the first lost most."""


@dataclass(frozen=True, slots=True)
class Report:
    """All numbers of an evaluation."""

    collection: Collection
    measures: tuple[Measure, ...]
    systems: tuple[System, ...]
    values_SQM: Float64Array
    intervals: tuple[tuple[Interval, ...], ...]
    """Intervals of each system by each measure."""
    differences: tuple[Difference, ...]
    """Those of each system but the first."""


def make_report(collection: Collection, measures: Sequence[Measure], systems: Sequence[System]) -> Report:
    """Compute the measures of each query, their means and the intervals."""
    queries, judged = collection.queries.ids, collection.judgements
    values_SQM = np.array(
        [
            [[measure.value(system.ranks[query], judged[query]) for measure in measures] for query in queries]
            for system in systems
        ]
    )
    columns_QC = values_SQM.transpose(1, 0, 2).reshape(len(queries), -1)
    means_SDM = draw_means(columns_QC).reshape(-1, len(systems), len(measures)).transpose(1, 0, 2)
    intervals = tuple(
        tuple(interval_of(values_QM[:, m], means_DM[:, m]) for m in range(len(measures)))
        for values_QM, means_DM in zip(values_SQM, means_SDM, strict=True)
    )
    differences = tuple(
        _difference(values_QM[:, 0] - values_SQM[0, :, 0], means_DM[:, 0] - means_SDM[0, :, 0])
        for values_QM, means_DM in zip(values_SQM[1:], means_SDM[1:], strict=True)
    )
    return Report(collection, tuple(measures), tuple(systems), values_SQM, intervals, differences)


def _difference(gained_Q: Float64Array, means_D: Float64Array) -> Difference:
    better, worse = int((gained_Q > _SAME).sum()), int((gained_Q < -_SAME).sum())
    worst = tuple(int(query) for query in np.argsort(gained_Q, kind="stable")[:_WORST] if gained_Q[query] < -_SAME)
    return Difference(interval_of(gained_Q, means_D), better, worse, len(gained_Q) - better - worse, worst)


def facts(report: Report) -> dict[str, str]:
    """Return what was evaluated, in words."""
    collection = report.collection
    judged = sum(len(grades) for grades in collection.judgements.values())
    found = {
        "collection": f"{len(collection.queries):,} queries, {len(collection.documents):,} documents, {judged:,} judgements",
        "intervals": "95 %, bootstrap over queries; of differences with the same queries of both",
    }
    alike: dict[str, list[str]] = {}
    for system in report.systems:
        alike.setdefault("; ".join(filter(None, (system.about, *system.notes))), []).append(system.name)
    found |= {", ".join(names): words for words, names in alike.items()}
    return found | ({"notes": "; ".join(collection.notes)} if collection.notes else {})


def _range(interval: Interval, sign: str = "") -> str:
    return f"{interval.low:{sign}.4f} to {interval.high:{sign}.4f}"


def means_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of means."""
    first, *others = report.measures
    head = ["system", first.label, "95 %", *(each.label for each in others), "bytes a document"]
    rows = [
        [
            system.name,
            f"{own[0].value:.4f}",
            _range(own[0]),
            *(f"{each.value:.4f}" for each in own[1:]),
            "" if system.num_bytes is None else f"{system.num_bytes:,.0f}",
        ]
        for system, own in zip(report.systems, report.intervals, strict=True)
    ]
    return head, rows


def differences_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of differences from the first system."""
    head = [f"{report.measures[0].label} against {report.systems[0].name}", "difference", "95 %", "better", "worse", "same"]
    rows = [
        [
            system.name,
            f"{each.interval.value:+.4f}",
            _range(each.interval, "+"),
            f"{each.better:,}",
            f"{each.worse:,}",
            f"{each.same:,}",
        ]
        for system, each in zip(report.systems[1:], report.differences, strict=True)
    ]
    return head, rows


def worst_table(report: Report, number: int) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the queries that lost most with the system of this number."""
    values_SQ = report.values_SQM[:, :, 0]
    head = [f"worst queries of {report.systems[number].name}", "id", "first system", "this one"]
    rows = [
        [
            shorten(report.collection.queries.texts[query], _WIDTH, placeholder=" ..."),
            report.collection.queries.ids[query],
            f"{values_SQ[0, query]:.4f}",
            f"{values_SQ[number, query]:.4f}",
        ]
        for query in report.differences[number - 1].worst
    ]
    return head, rows


def verdict(report: Report) -> list[str]:
    """Return a sentence for each difference."""
    differences = zip(report.systems[1:], report.differences, strict=True)
    return [_sentence(system.name, report.systems[0].name, report.measures[0].label, each) for system, each in differences]


def _sentence(name: str, other: str, label: str, difference: Difference) -> str:
    if not difference.better and not difference.worse:
        return f"{name} has the {label} of {other} for every query."
    if (different := difference.better + difference.worse) < MIN_DIFFERENT:
        return f"{name} and {other}: queries that differ by {label}: {different}, too few to show which is better."
    word = "better" if difference.interval.value > 0 else "worse"
    if difference.interval.excludes_zero:
        return f"{name} is {word} than {other} by {label}."
    return f"{name} and {other}: these queries do not show which is better by {label}, as the interval holds 0."


def _tables(report: Report) -> list[tuple[list[str], list[list[str]]]]:
    found = [means_table(report)]
    if report.differences:
        found.append(differences_table(report))
    found += [worst_table(report, number) for number, each in enumerate(report.differences, start=1) if each.worst]
    return found


def to_text(report: Report) -> str:
    """Return facts and tables for a terminal."""
    about = "\n".join(f"{name}: {value}" for name, value in facts(report).items())
    return "\n\n".join(
        [about, *(table(*each) for each in _tables(report)), *(["\n".join(verdict(report))] if report.differences else [])]
    )


def to_json(report: Report) -> dict[str, Any]:
    """Return all numbers, those of each query too."""
    labels = [each.label for each in report.measures]
    return {
        "facts": facts(report),
        "measures": labels,
        "query_ids": list(report.collection.queries.ids),
        "systems": [
            {
                "name": system.name,
                "about": system.about,
                "notes": list(system.notes),
                "bytes_per_document": system.num_bytes,
                "means": {label: _interval(each) for label, each in zip(labels, own, strict=True)},
                "values": dict(zip(labels, values_QM.T.tolist(), strict=True)),
            }
            for system, own, values_QM in zip(report.systems, report.intervals, report.values_SQM, strict=True)
        ],
        "differences": [
            {
                "system": system.name,
                "from": report.systems[0].name,
                "measure": labels[0],
                **_interval(each.interval),
                "better": each.better,
                "worse": each.worse,
                "same": each.same,
                "worst_query_ids": [report.collection.queries.ids[query] for query in each.worst],
            }
            for system, each in zip(report.systems[1:], report.differences, strict=True)
        ],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "interval_95": [interval.low, interval.high]}


def to_page(report: Report) -> str:
    """Return a page with pictures of the intervals, the tables and the facts."""
    label = report.measures[0].label
    means = [(system.name, own[0]) for system, own in zip(report.systems, report.intervals, strict=True)]
    gains = [(system.name, each.interval) for system, each in zip(report.systems[1:], report.differences, strict=True)]
    parts = [pages.paragraph_part(each) for each in verdict(report)]
    parts.append(intervals_part(f"{label} with the interval of 95 %", means))
    if gains:
        parts.append(intervals_part(f"Difference of {label} from {report.systems[0].name}, with its interval", gains, "+"))
    parts += [pages.table_part(*each) for each in _tables(report)]
    return pages.page("Evaluation", *parts, pages.facts_part(facts(report)))
