"""The glossary of CONTRIBUTING.md: every term that names code names code that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
SOURCE = ROOT / "src/whimbrel"
MOST_WORDS = 22


def rows() -> list[tuple[str, str, str]]:
    """Return term, code and meaning of each row."""
    glossary = PAGE.read_text(encoding="utf-8").partition("## Glossary")[2]
    return [
        (row[1], row[2], row[3]) for row in re.finditer(r"^\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \|$", glossary, re.MULTILINE)
    ]


def definitions() -> set[str]:
    """Return the classes, functions and fields of the package and of the tests' helpers; a field also behind its class."""
    names: set[str] = set()
    for file in (*SOURCE.rglob("*.py"), *(ROOT / "packages").rglob("*.py"), *(ROOT / "tests/support").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                members = [*methods, *(field.id for field in fields if isinstance(field, ast.Name))]
                names.update(members, (f"{node.name}.{member}" for member in members))
    return names


def test_every_term_names_code_that_exists() -> None:
    known = definitions()
    unknown = [code for _, code, _ in rows() if code not in known and not ("/" in code and (SOURCE / code).exists())]
    assert unknown == []


def test_terms_are_defined_once_and_briefly() -> None:
    terms = [term for term, _, _ in rows()]
    assert len(terms) == len(set(terms)) >= 30
    assert [term for term, _, meaning in rows() if len(meaning.split()) > MOST_WORDS] == []
    lines = PAGE.read_text(encoding="utf-8").partition("## Glossary")[2].splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(terms) + 1, "a row without code"
