"""Self-contained HTML pages of results: a picture, facts and tables. They fetch nothing. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final

_PAGE: Final = files("whimbrel_bench").joinpath("page.html").read_text("utf-8")


def page(title: str, *parts: str) -> str:
    """Return a page of parts in HTML."""
    return _PAGE.format(title=escape(title), body="\n".join(parts))


def picture_part(svg: str) -> str:
    """Return the picture of an SVG file, without what stands before it."""
    return svg[svg.index("<svg") :]


def paragraph_part(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def facts_part(about: Mapping[str, str]) -> str:
    facts = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in about.items())
    return f"<ul>{facts}</ul>"


def table_part(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. The first column is text, the others numbers."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>'
