"""The code blocks of README and docs still run, with a server, the real clients and small checkpoints under their hub ids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import docs_code
from checkpoints.hub import WRITERS, write_hub
from docs_code import LANGUAGES, Block, blocks_of, stray_notes
from serving import Server

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs/recipes.md"
"""Its blocks need other programs: test_recipes.py runs each of them."""
ALL = [page for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if page != RECIPES]
PAGES = [page for page in ALL if any(each.language in LANGUAGES for each in blocks_of(page.read_text(encoding="utf-8")))]
COMMANDS = {"whimbrel", "curl", "echo", "printf", "cat", "export", "mkdir", "chmod", "python"}
"""Commands with which a line of a block of `sh` may begin."""
TEXTS = {"text", "json", "yaml", "toml", "nginx", "dockerfile", "ini", "haproxy", "caddy", "promql", "diff", ""}
"""Languages of blocks that are no code to be run."""


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache of the models that the pages name."""
    cache = tmp_path_factory.mktemp("hub")
    write_hub(cache)
    return cache


def run_page(page: Path, server: Server, folder: Path, **env: str) -> str:
    """Run the blocks of a page; what they printed and what went wrong, empty if nothing did."""
    own = dict(re.findall(r"^<!-- env: (\w+)=(.*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, docs_code.__file__, str(page), server.url],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1", "PATH": path} | own | env, check=False, timeout=600,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_of(page: Path, server: Server, hub: Path, tmp_path: Path) -> None:
    """A page's code does what the page says, offline and in the order of the page."""
    said = run_page(page, server, tmp_path, HF_HUB_CACHE=str(hub))
    assert not said, said


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    """No block is skipped without a word: an unknown language or command fails here, as does a fence that is not understood."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^[ \t>]*(?:`{3,}|~{3,})", text, re.MULTILINE)) == 2 * len(blocks_of(text)), (
        "a fence is not understood"
    )
    assert stray_notes(text) == []
    for block in blocks_of(text):
        place = f"{page.name}:{block.line}"
        if "not run" in block.notes or block.language in TEXTS:
            continue
        assert block.language in LANGUAGES, f"{place}: ```{block.language} is neither run nor text"
        if block.language == "sh":
            assert commands_of(block) <= COMMANDS, f"{place}: say <!-- not run: REASON --> or use only {COMMANDS}"


def commands_of(block: Block) -> set[str]:
    """Return the first words of a block's commands, without variables that are set before them."""
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith(("#", " "))]
    return {re.sub(r"^(?:\w+=(?:'[^']*'|\S*) )*", "", line).split()[0] for line in lines}


BAD = {
    "python": "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
    "curl": "```sh\ncurl http://127.0.0.1:8000/nowhere\n```\n",
    "command": "```sh\nwhimbrel embed a --dtype int3\n```\n",
    "pipe": "```sh\nwhimbrel embed a --model nobody/nothing | cat\n```\n",
    "later": '```sh\ncurl http://127.0.0.1:8000/nowhere\necho "fine"\n```\n',
    "and": "```sh\ncurl http://127.0.0.1:8000/nowhere && echo fine\necho later\n```\n",
    "two": "```sh\ncurl http://127.0.0.1:8000/nowhere http://127.0.0.1:8000/health\n```\n",
    "inside": "```sh\necho $(curl http://127.0.0.1:8000/nowhere)\n```\n",
    "exit": "```python\nraise SystemExit(0)\n```\n",
    "annotation": "```python\ndef f(x: Undefined): ...\n```\n",
    "own words": "<!-- fails: marker -->\n```sh\ntest marker = other\n```\n",
    "fails": "<!-- fails: 404 -->\n```sh\ncurl http://127.0.0.1:8000/health\n```\n",
    "fails otherwise": "<!-- fails: no such thing -->\n```python\n1 / 0\n```\n",
}
GOOD = """
```python
x = 1
```

<!-- fails: division -->
```python
x / 0
```

<!-- not run: it would fail -->
```python
x = 2
```

- in a list

  ```python
  assert x == 1
  ```

```sh
curl http://127.0.0.1:8000/health
echo one > file
```

```python
assert open("file").read() == "one\\n"
```
"""


@pytest.mark.parametrize("name", BAD)
def test_a_block_that_no_longer_runs_is_found(name: str, server: Server, tmp_path: Path) -> None:
    """A page is broken on purpose."""
    (tmp_path / "page.md").write_text(BAD[name])
    assert "page.md" in run_page(tmp_path / "page.md", server, tmp_path)


def test_blocks_that_run(server: Server, tmp_path: Path) -> None:
    """Names, files and comments carry from block to block."""
    (tmp_path / "page.md").write_text(GOOD)
    assert run_page(tmp_path / "page.md", server, tmp_path) == ""
    assert [block.line for block in blocks_of(GOOD)] == [2, 7, 12, 18, 22, 27]


@pytest.mark.parametrize(
    "note", ["<!-- server: a -->\n", "<!-- sever: a -->", "<!-- not run -->", " <!-- not run: a -->", "<!-- not run: a --> "]
)
def test_a_note_that_is_bound_to_no_block_is_found(note: str) -> None:
    assert len(stray_notes(f"text\n\n{note}\n```python\n1\n```\n")) == 1
    assert stray_notes("<!-- not run: why -->\n<!-- server: a -->\n```python\n1\n```\n") == []


@pytest.mark.extended
def test_a_server_of_a_page(hub: Path, server: Server, tmp_path: Path) -> None:
    """A command that serves, and a comment, change what later blocks call."""
    commands = "```sh\nwhimbrel serve dslim/bert-base-NER --port 8000  # a comment\n```\n"
    comment = "<!-- server: naver/splade-v3 -->\n"
    ask = (
        "```python\nimport httpx2\nassert httpx2.get('http://127.0.0.1:8000/v1/models').json()['data'][0]['id'] == '{}'\n```\n"
    )
    (tmp_path / "page.md").write_text(
        commands + ask.replace("{}", "dslim/bert-base-NER") + comment + ask.replace("{}", "naver/splade-v3")
    )
    assert run_page(tmp_path / "page.md", server, tmp_path, HF_HUB_CACHE=str(hub)) == ""
    assert set(WRITERS) >= {"dslim/bert-base-NER", "naver/splade-v3"}
