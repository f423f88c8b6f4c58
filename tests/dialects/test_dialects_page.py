"""docs/dialects.md lists every route, and which fields decide where several share a path. `python tests/dialects/test_dialects_page.py` fills it in."""

from __future__ import annotations

from pathlib import Path

from whimbrel.dialects import GET_ROUTES
from whimbrel.server.app.routing import ROUTES_BY_PATH

PAGE = Path(__file__).parents[2] / "docs/dialects.md"
START, END = "<!-- routes -->\n", "<!-- end -->"


def table() -> str:
    """A line for each route."""
    lines = ["| path | a body with | is for |", "|---|---|---|"]
    for path, ways in ROUTES_BY_PATH.items():
        for route in ways.routes:
            last = route is ways.default and len(ways.routes) > 1
            marks = "anything else" if last else " or ".join(f"`{mark}`" for mark in sorted(route.discriminators)) or "anything"
            lines.append(f"| `POST {path}` | {marks} | {route.summary} |")
    lines += [f"| `GET {page.path}` | | {page.summary} |" for page in GET_ROUTES]
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    before, _, rest = page.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def test_the_page_lists_the_routes_that_there_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, "run `PYTHONPATH=src python tests/dialects/test_dialects_page.py`"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
