"""The page of metrics in Prometheus' text format (0.0.4), or in OpenMetrics (1.0).

Sources: "Text-based format" in Prometheus' exposition formats; the OpenMetrics specification 1.0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, Literal, TypeAlias

from whimbrel.telemetry.series import Key

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: all series of one name. The name of a counter ends in "_total"."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets. The last bucket has none."""

    @property
    def num_values(self) -> int:
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


def content_type(accept: str) -> str:
    """Return the page's content type for an Accept header: OpenMetrics if it is named there, else plain text."""
    kinds = [each.replace(" ", "").split(";") for each in accept.split(",")]
    named = any(kind == "application/openmetrics-text" and "version=0.0.1" not in rest for kind, *rest in kinds)
    return _OPENMETRICS if named else _PLAIN


def render(families: Iterable[Family], series: Mapping[Key, Sequence[float]], accept: str = "") -> tuple[bytes, str]:
    kind = content_type(accept)
    found: defaultdict[str, list[tuple[Key, Sequence[float]]]] = defaultdict(list)
    for key in sorted(series):
        found[key[0]].append((key[1:], series[key]))
    lines: list[str] = []
    for family in families:
        name = family.name.removesuffix("_total") if kind == _OPENMETRICS else family.name
        lines += [f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}"]
        lines += [line for labels, values in found[family.name] for line in _samples(family, labels, values)]
    if kind == _OPENMETRICS:
        lines.append("# EOF")
    return "\n".join([*lines, ""]).encode(), kind


def _samples(family: Family, labels: Key, values: Sequence[float]) -> Iterator[str]:
    pairs = dict(zip(family.labels, labels, strict=True))
    if family.kind != "histogram":
        yield _sample(family.name, pairs, values[0])
        return
    *counts, total = values
    for bound, count in zip((*family.bounds, inf), accumulate(counts), strict=True):
        yield _sample(f"{family.name}_bucket", {**pairs, "le": _number(bound)}, count)
    yield _sample(f"{family.name}_count", pairs, sum(counts))
    yield _sample(f"{family.name}_sum", pairs, total)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in sorted(labels.items()))
    return f"{name}{{{pairs}}} {_number(value)}"


def _number(value: float) -> str:
    return "+Inf" if value == inf else repr(float(value))
