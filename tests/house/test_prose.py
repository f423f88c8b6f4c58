"""Rules of prose: docstrings that stand alone, and references to files, decisions and names that exist."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "packages", "tests", "benchmarks")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "tests/support/*.md")
FIRST_WORDS = set("What How Who Whose Whom Whether Where When Why Of By As And Likewise".split())
"""A title, an imperative or a noun phrase begins with none of these."""
LOWER_CASE = set("curl nginx numpy pytest safetensors scipy systemd tokenizers torch transformers uvicorn uvloop".split())
"""Projects whose names begin with a lower-case letter."""
NAME = re.compile(r"\S*[A-Z\d/_#^]|\S*\w[-.]\w|\w\W")
"""A beginning that may be in lower case: a name with a capital or a digit in it, a file, or a variable of one letter."""
RIDDLES = re.compile(r"\b(?:[Nn]obody|so many|but for|[Ww]hat is)\b|(?:^|[.:;,] )(?:Who|who (?:is|comes|has))\b")
"""Words that stand for a noun, a number or "except"; a reader has to guess which."""
MOST_WORDS = 30
"""The rule is 25, with which few sentences read worse in two parts."""
ELSEWHERE = re.compile(
    r"(?:inference|multi_vector_encoder|peft|sentence_transformers|torch|transformers)/"
    r"|modeling_\w+\.py|custom_st\.py|llama_bidirectional_model\.py|masking_utils\.py|mxbai_rerank_v2\.py"
)
"""Files of other projects that are mentioned outside the paragraphs that begin with "Source"."""
FOREIGN = set(
    """
    RING_HASH cu130 envoy.retry_host_predicates.previous_hosts hash_policy leastconn per_request_buffer_limit_bytes
    retry_policy roundrobin tune.bufsize
    HttpClient OTEL_EXPORTER_OTLP_HEADERS OTEL_TRACES_SAMPLER _process_colbert_vecs _process_token_weights
    livenessProbe pair_to_messages readinessProbe returned_token_ids step_tag_id
    terminationGracePeriodSeconds vertex_compatibility whimbrel.commands whimbrel.schema.json whimbrel.toml whimbrel.request_id
""".split()
)
"""Names of other projects that are mentioned in backquotes and that our code does not use."""


METRICS = ("whimbrel_", "process_")
"""Names of metrics are made of parts; tests/telemetry/test_metrics.py checks docs/metrics.md."""


class Prose(NamedTuple):
    """A docstring, a comment or a line of a page."""

    file: Path
    line: int
    text: str

    def lines(self) -> list[Prose]:
        """Return the lines, without the paragraphs that name sources."""
        text = re.sub(r"\bSources?\b.*?(\n\n|\Z)", lambda match: "\n" * match[0].count("\n"), self.text, flags=re.DOTALL)
        return [Prose(self.file, self.line + number, line) for number, line in enumerate(text.splitlines())]

    def offence(self, words: str) -> str:
        """Return a line of the report."""
        return f"{self.file.relative_to(ROOT)}:{self.line}: {words}: {' '.join(self.text.split())[:90]}"


def sources(*folders: str) -> list[Path]:
    """Return the Python files under `folders`."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(file: Path) -> Iterator[Prose]:
    """Yield the docstrings of a file, and the string literals that describe a field or a constant."""
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, each in zip([None, *node.body], node.body, strict=False):
            text = getattr(getattr(each, "value", None), "value", None) if isinstance(each, ast.Expr) else None
            if isinstance(text, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield Prose(file, each.lineno, cleandoc(text))


def comments(file: Path) -> Iterator[Prose]:
    """Yield the comments of a file."""
    for number, line in enumerate(_text(file).splitlines(), 1):
        if match := re.search(r"(?:^|\s)# (.*)", line):
            yield Prose(file, number, match[1])


@cache
def kernels() -> list[Prose]:
    """Return the comments in C++ that stand on lines of their own, those of consecutive lines as one."""
    found: list[Prose] = []
    for file in sorted((ROOT / "src").rglob("*")):
        for number, line in enumerate(_text(file).splitlines() if file.suffix in (".h", ".cpp") else (), 1):
            if match := re.match(r"\s*// ?(.*)", line):
                before = found[-1] if found and found[-1].file == file else None
                if before is not None and before.line + before.text.count("\n") == number - 1:
                    found[-1] = before._replace(text=f"{before.text}\n{match[1]}")
                else:
                    found.append(Prose(file, number, match[1]))
    return found


def remarks() -> list[Prose]:
    """Return the comments of all files in Python, and those in C++ that stand behind code."""
    found = [prose for file in sources(*FOLDERS) for prose in comments(file)]
    for file in {prose.file for prose in kernels()}:
        for number, line in enumerate(_text(file).splitlines(), 1):
            if match := re.search(r"\S.*\s// ?(.*)", line):
                found.append(Prose(file, number, match[1]))
    return found


@cache
def deployment() -> list[Prose]:
    """Return the headings and paragraphs of docs/deploy, without code, comments and tables."""
    found: list[Prose] = []
    for page in sorted((ROOT / "docs/deploy").glob("*.md")):
        blank = re.compile(r"^```.*?^```$|<!--.*?-->|^\|[^\n]*", re.MULTILINE | re.DOTALL)
        text, line = blank.sub(lambda match: "\n" * match[0].count("\n"), _text(page)), 1
        for paragraph in text.split("\n\n"):
            found.append(Prose(page, line, re.sub(r"^(?:#+ |- |\*\*)+", "", paragraph.strip())))
            line += paragraph.count("\n") + 2
    return [prose for prose in found if prose.text]


@cache
def everything() -> list[Prose]:
    """Return all lines of prose: docstrings, comments and pages."""
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    return [
        *(line for file in sources(*FOLDERS) for prose in docstrings(file) for line in prose.lines()),
        *(prose for file in sources(*FOLDERS) for prose in comments(file)),
        *(Prose(page, number, line) for page in pages for number, line in enumerate(_text(page).splitlines(), 1)),
    ]


def opening(prose: Prose) -> str | None:
    """Return the offence of a docstring's first word."""
    if (word := re.match(r"[A-Za-z]+", prose.text)) is None:
        return None
    lower = word[0][0].islower() and word[0] not in LOWER_CASE and not NAME.match(prose.text)
    return f"begins with {word[0]!r}" if lower or word[0] in FIRST_WORDS else None


def ending(prose: Prose) -> str | None:
    """Return the offence of a docstring's last line; an indented block and a table need no full stop."""
    last = prose.text.rpartition("\n")[2]
    return None if last.startswith((" ", "|")) or re.search(r"[.?!][)\"'`*]*$", last) else "has no full stop"


def length(prose: Prose) -> str | None:
    """Return the offence of the first sentence with more than MOST_WORDS words. Lists, tables and trees are not counted."""
    for paragraph in prose.text.split("\n\n"):
        if not re.search(r"^(?: |- |\||Shapes:|Sources?:)", paragraph, re.MULTILINE):
            for sentence in re.split(r"(?<=[.!?:])\s", paragraph):
                if (count := len(sentence.split())) > MOST_WORDS:
                    return f"a sentence of {count} words"
    return None


def riddle(prose: Prose) -> str | None:
    """Return the first word that stands for a noun which the reader has to guess."""
    return f"says {found[0].strip(' .,:;')!r}" if (found := RIDDLES.search(" ".join(prose.text.split()))) else None


def references(prose: Prose) -> str | None:
    """Return the first file, module or decision that the prose mentions and that does not exist."""
    for path in re.findall(r"(?<![\w./:-])((?:src|packages|tests|benchmarks|docs|requirements|dev)/[\w./*-]*\w)", prose.text):
        if not any(ROOT.glob(path)):
            return f"{path} does not exist"
    for path in re.findall(r"(?<![\w./-])((?:\w+/)*\w+\.py)\b", prose.text):
        if not ELSEWHERE.match(path) and not any(f"/{file}".endswith(f"/{path}") for file in _files()):
            return f"{path} does not exist"
    for name in re.findall(r"(?<![\w./-])(whimbrel(?:\.[A-Za-z_]\w*)+)", prose.text):
        if name not in FOREIGN and not _resolves(name):
            return f"{name} does not exist"
    for number in re.findall(r"\bADR (\d+)", prose.text):
        if not any(ROOT.glob(f"docs/adr/{int(number):04}-*.md")):
            return f"ADR {number} does not exist"
    return None


def names(prose: Prose) -> str | None:
    """Return the first name in backquotes that no code uses. Pages about other programs name what these have."""
    if ROOT / "docs/coming-from" in prose.file.parents:
        return None
    for quoted in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`", prose.text):
        parts = quoted.split(".")
        known = quoted in FOREIGN or quoted.startswith(METRICS) or quoted.endswith("...") or parts[0] in _imported()
        missing = [] if known else [part for part in parts if part not in _identifiers()]
        if missing:
            return f"`{quoted}`: {missing[0]} is no name in the code"
    return None


def placeholder(prose: Prose) -> str | None:
    """Return the offence of a line that stands for something that is still to be written."""
    return "is a placeholder" if re.search(r"\b(?:TO" r"DO|FIX" r"ME)\b", prose.text) else None


def offences(rule: Callable[[Prose], str | None], prose: list[Prose]) -> list[str]:
    """Return a line for each breach of a rule."""
    return [each.offence(words) for each in prose if (words := rule(each))]


@cache
def described() -> list[Prose]:
    """Return the docstrings of the package, its tests and benchmarks."""
    return [prose for file in sources(*FOLDERS) for prose in docstrings(file)]


def report(lines: list[str]) -> str:
    """Return the offences as one text."""
    return f"{len(lines)} offences\n" + "\n".join(lines)


def test_docstrings_begin_with_a_capital_and_a_noun_or_a_verb() -> None:
    assert not (found := offences(opening, [*described(), *kernels(), *deployment()])), report(found)


def test_docstrings_end_with_a_full_stop() -> None:
    assert not (found := offences(ending, [*described(), *kernels()])), report(found)


def test_sentences_are_short() -> None:
    assert not (found := offences(length, [*described(), *kernels(), *deployment()])), report(found)


def test_no_reader_has_to_guess_a_noun() -> None:
    assert not (found := offences(riddle, [*described(), *remarks(), *kernels(), *deployment()])), report(found)


def test_files_modules_and_decisions_that_are_mentioned_exist() -> None:
    assert not (found := offences(references, everything())), report(found)


def test_names_in_backquotes_exist() -> None:
    assert not (found := offences(names, everything())), report(found)


def test_nothing_is_left_to_be_written() -> None:
    assert not (found := offences(placeholder, everything())), report(found)


def test_the_rules_find_what_they_look_for() -> None:
    def breaches(text: str) -> list[bool]:
        prose = Prose(ROOT / "README.md", 1, text)
        return [rule(prose) is not None for rule in (opening, ending, references, names)]

    assert (
        breaches("Admission control. It refuses `test_prose.py` in `tests/house`, see ADR 1 and `whimbrel.errors`.")
        == [False] * 4
    )
    assert breaches("`seq` is a text.\n\n    as in code") == [False] * 4
    assert breaches("What waits.")[0]
    assert breaches("the queue.")[0]
    assert breaches("A queue:")[1]
    assert breaches("A queue")[1]
    assert length(Prose(ROOT / "README.md", 1, "word " * (MOST_WORDS + 1)))
    assert not length(Prose(ROOT / "README.md", 1, "word " * (MOST_WORDS - 1) + "word. Word."))
    assert not opening(Prose(ROOT / "README.md", 1, "config.json, int8, vLLM and x begin so."))
    for text in ("It serves nobody.", "Write what is left.", "A config, but for sizes.", "Who waits.", "Up to so many bytes."):
        assert riddle(Prose(ROOT / "README.md", 1, text)), text
    assert not riddle(Prose(ROOT / "README.md", 1, "A user who waits reads what the server sends."))
    assert min(map(len, (described(), kernels(), deployment()))) > 90
    assert placeholder(Prose(ROOT / "README.md", 1, "TODO."))
    for text in ("See tests/nowhere.py.", "In `nowhere.py`.", "ADR 999.", "`whimbrel.nowhere`.", "whimbrel.errors.Nothing."):
        assert breaches(text)[2], text
    for text in (f"It calls `no_such_{'name'}_at_all`.", f"It calls `scheduler.no_{'way'}`."):
        assert breaches(text)[3], text


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(_text(file))


@cache
def _files() -> list[str]:
    return [file.relative_to(ROOT).as_posix() for file in sources(*FOLDERS)]


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT / "src" / "/".join(parts[:length])
        file = next((each for each in (module.with_suffix(".py"), module / "__init__.py") if each.exists()), None)
        if file is not None:
            return length == len(parts) or parts[length] in _words(file)
    return False


@cache
def _words(file: Path) -> set[str]:
    """Return the words of a file's code, those of strings among them, without its docstrings."""
    described = {prose.line for prose in docstrings(file)}
    words: set[str] = set()
    for node in ast.walk(_tree(file)):
        for value in vars(node).values():
            if isinstance(value, str) and not (isinstance(node, ast.Constant) and node.lineno in described):
                words.update(re.findall(r"[A-Za-z_]\w*", value))
    return words


@cache
def _identifiers() -> set[str]:
    words = {word for file in sources(*FOLDERS) for word in _words(file)}
    return words.union(dir(builtins), (part for file in _files() for part in re.split(r"[/.]", file)))


@cache
def _imported() -> set[str]:
    """Return the packages of others that the code imports: their names are theirs."""
    imported = set(sys.stdlib_module_names)
    for file in sources(*FOLDERS):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
                imported.update(alias.asname for alias in node.names if alias.asname)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    return imported - {"whimbrel"} - {Path(file).stem for file in _files()}
