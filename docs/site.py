"""Build of the docs site: `make docs` writes it to site/ and fails on a broken link.

The pages in docs/ are copied to build/docs, and the root's pages (BENCHMARKS.md, ...) go beside them. The command line,
errors, limits and Python's reference are made from the code. Zensical then renders all pages.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from inspect import get_annotations
from itertools import groupby
from pathlib import Path
from typing import Any

from whimbrel import AsyncClient, AsyncEngine, Client, Engine, errors
from whimbrel.server.config_file import SECTIONS
from whimbrel.server.settings_table import MODEL_TABLE, TABLE, flag_name
from whimbrel.types.options import ScoreOptions, SharedOptions, TextOptions
from whimbrel.types.plan import Options

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
ROOT_PAGES = {
    "BENCHMARKS.md": "about/benchmarks.md", "ARCHITECTURE.md": "about/architecture.md", "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md", "SECURITY.md": "about/security.md",
}  # fmt: skip
"""Pages of the repository's root and their places on the site."""
_WIDTH = 100
COMMANDS = (
    "serve", "embed", "score", "rerank", "classify", "run-batch", "run", "store", "show", "convert", "models", "pull", "list",
    "rm", "load", "unload", "ps", "verify", "doctor", "top", "bench serve", "bench offline", "bench compare", "eval",
    "config check", "config show", "config schema",
)  # fmt: skip


def copy_pages() -> None:
    """Copy all pages. Links between docs/ and the root are changed to the places of the site."""
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py"))
    for page in PAGES.rglob("*.md"):
        source = ROOT / "docs" / page.relative_to(PAGES)
        page.write_text(relink(page.read_text(encoding="utf-8"), source.parent, page.parent), encoding="utf-8")
    for name, place in ROOT_PAGES.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relink((ROOT / name).read_text(encoding="utf-8"), ROOT, target.parent), encoding="utf-8")


def relink(text: str, source: Path, target: Path) -> str:
    """Return a page whose relative links lead from the folder `target` on the site to where they led from `source`."""

    def place(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if "://" in path or path.startswith(("mailto:", "#")):
            return found[0]
        file = (source / path).resolve()
        if not file.exists():
            return found[0]  # Zensical reports it
        inside = file.relative_to(ROOT).as_posix()
        if inside in ROOT_PAGES:
            on_site = PAGES / ROOT_PAGES[inside]
        elif inside.startswith("docs/"):
            on_site = PAGES / inside.removeprefix("docs/")
        else:
            return f"]({inside})" if inside.startswith("http") else f"<!-- {inside} -->]()"
        return f"]({os.path.relpath(on_site, target)}{anchor})"

    text = re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", place, text)
    return re.sub(r"\[([^\]]*)<!-- ([^ ]*) -->\]\(\)", r"\1 (`\2`)", text)


def command_line() -> str:
    """Return the page of all commands, as their --help prints them."""
    parts = ["# Command line\n", "`python -m whimbrel` is the same command. Each text is what `--help` prints.\n"]
    environ = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    for command in ((), *(tuple(name.split()) for name in COMMANDS)):
        line = [sys.executable, "-m", "whimbrel", *command, "--help"]
        said = subprocess.run(line, env=environ, capture_output=True, text=True, check=True).stdout  # noqa: S603
        text = "\n".join(each.rstrip() for each in said.strip("\n").splitlines())
        parts.append(f"## whimbrel {' '.join(command)}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def error_classes() -> str:
    """Return the table of all errors."""
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.WhimbrelError)]
    rows = [
        f"| {each.status} | `{each.code}` | `{each.__name__}` | {first_sentence(each)} |"
        for each in sorted(classes, key=lambda each: (each.status, each.code))
    ]
    return "\n".join(["| status | `code` | class | meaning |", "|---|---|---|---|", *rows])


def first_sentence(each: type) -> str:
    return (inspect.getdoc(each) or "").partition("\n")[0]


def limits() -> str:
    """Return the table of the limits of connections and bodies."""
    bodies = [TABLE["max_body_bytes"], TABLE["max_inflight_bytes"]]
    rows = [
        f"| `{row.key}` | {row.computed or f'{row.default:,.0f}'} | {row.text} |"
        for row in [*(row for row in TABLE.values() if row.group == "HTTP"), *bodies]
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def settings() -> str:
    """Return the tables of all settings, a group after the other."""
    parts: list[str] = []
    for group, rows in groupby(TABLE.values(), key=lambda row: row.group):
        parts.append(f"## {group}\n\n| setting | default | meaning |\n|---|---|---|")
        for row in rows:
            name = f"`{row.key}`" + (f", `{flag_name(row.key)}`" if row.has_flag else "")
            parts.append(f"| {name} | {row.shown_default or 'none'} | {row.text} |")
        parts.append("")
    return "\n".join(parts)


def config() -> str:
    """Return the tables of the keys of a file of settings, a table of the file after the other."""
    parts: list[str] = []
    for name, rows in {**SECTIONS, "models.NAME": MODEL_TABLE}.items():
        parts.append(f"### [{name}]\n\n| key | takes | default | meaning |\n|---|---|---|---|")
        known = SECTIONS["defaults"] if rows is MODEL_TABLE else {}
        parts += [
            f"| `{row.key}` | {row.takes} | {row.shown_default or 'none'} | {row.text} |"
            for row in rows.values()
            if row.key not in known
        ]
        parts.append("\nAnd all keys of [defaults].\n" if known else "")
    return "\n".join(parts)


def field_docs(each: type) -> dict[str, str]:
    """Return the docstrings that follow the fields of a class."""
    (node,) = ast.parse(inspect.getsource(each)).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for field, doc in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[ast.unparse(field.target)] = str(doc.value.value)
    return found


def options() -> str:
    """Return the tables of the options of verbs and engines."""
    parts: list[str] = []
    for each in (TextOptions, ScoreOptions, Options):
        parts.append(f"### {each.__name__}\n\n{first_sentence(each)}\n\n| option | type | meaning |\n|---|---|---|")
        shared = {} if each is Options else field_docs(SharedOptions)
        for name, doc in (shared | field_docs(each)).items():
            kind = str(get_annotations(each)[name]).removeprefix("ForwardRef('").partition("'")[0].replace(" | ", " or ")
            parts.append(f"| `{name}` | `{kind}` | {' '.join(doc.split())} |")
        parts.append("")
    return "\n".join(parts)


def classes() -> str:
    """Return the docstrings and signatures of the public classes and their methods."""
    parts: list[str] = []
    for each in (Engine, AsyncEngine, Client, AsyncClient):
        parts.append(f"## {each.__name__}\n\n{inspect.getdoc(each)}\n\n```python\n{call(each.__name__, each)}\n```\n")
        for name, method in inspect.getmembers(each, inspect.isfunction):
            if not name.startswith("_"):
                parts.append(
                    f"### {each.__name__}.{name}\n\n```python\n{call(name, method)}\n```\n\n{inspect.getdoc(method)}\n"
                )
    return "\n".join(parts)


def call(name: str, function: Any) -> str:
    """Return a signature, one parameter to a line if it is long."""
    signature = inspect.signature(function)
    kept = [each for each in signature.parameters.values() if each.name not in ("self", "progress", "observer")]
    parameters = [_parameter(each) for each in kept]
    by_name = [index for index, each in enumerate(kept) if each.kind is inspect.Parameter.KEYWORD_ONLY]
    parameters[min(by_name, default=0) : 0] = ["*"] if by_name else []
    result = "" if signature.return_annotation in (inspect.Signature.empty, "None") else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parameters)}){result}"
    return line if len(line) <= _WIDTH else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){result}"


def _parameter(each: inspect.Parameter) -> str:
    stars = "**" if each.kind is inspect.Parameter.VAR_KEYWORD else ""
    default = "" if each.default is inspect.Parameter.empty else f" = {each.default!r}"
    return f"{stars}{each.name}: {each.annotation}{default}"


GENERATED = {
    "COMMANDS": command_line, "ERRORS": error_classes, "LIMITS": limits, "SETTINGS": settings, "CONFIG": config,
    "OPTIONS": options, "CLASSES": classes,
}  # fmt: skip
"""What stands for `<!-- generated: NAME -->` in a page."""


def fill() -> None:
    """Fill in what is made from the code."""
    for page in PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, make in GENERATED.items():
            if (mark := f"<!-- generated: {name} -->") in text:
                text = text.replace(mark, make())
        page.write_text(text, encoding="utf-8")


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    copy_pages()
    fill()
    shutil.copy(ROOT / "zensical.toml", BUILD)
    zensical = Path(sys.executable).parent / "zensical"
    done = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=BUILD, check=False)  # noqa: S603
    if done.returncode == 0:
        shutil.rmtree(ROOT / "site", ignore_errors=True)
        shutil.move(BUILD / "site", ROOT / "site")
        print("the site is in site/; look at it with: python -m http.server -d site")  # noqa: T201
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
