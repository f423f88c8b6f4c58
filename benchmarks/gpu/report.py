"""Table of a run: the steps, then their rows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whimbrel_bench.tables import table


@dataclass(frozen=True)
class Outcome:
    """End of a step, and its rows."""

    step: str
    status: str
    seconds: float
    rows: list[dict[str, Any]]

    @property
    def is_wrong(self) -> bool:
        return self.status not in ("ok", "no time", "needs a GPU")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the steps with their ends, and for each a table of all rows that have the same names."""
    parts = [table(["step", "end", "s"], [[each.step, cell(each.status), f"{each.seconds:.1f}"] for each in outcomes])]
    for each in outcomes:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in each.rows:
            groups.setdefault(tuple(name for name in row if name != "wrong"), []).append(row)
        for names, rows in groups.items():
            head = [*names, *["wrong"] * any("wrong" in row for row in rows)]
            parts.append(f"{each.step}:\n\n{table(head, [[cell(row.get(name, '')) for name in head] for row in rows])}")
    return "\n\n".join(parts) + "\n"


def cell(value: object) -> str:
    """Return a value in few signs, on one line."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).replace("|", "/").split())[:160]
