"""Rules of the house, as tests: arrows between modules, light imports, the public names."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import whimbrel

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "transformers", "tokenizers", "safetensors", "starlette", "httptools", "huggingface_hub", "scipy"]


def test_import_contracts() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import whimbrel", [*HEAVY, "numpy", "httpx2"]),
        ("from whimbrel import Client, AsyncClient, WhimbrelError", HEAVY),
        ("import whimbrel.wire, whimbrel.dialects, whimbrel.types.card, whimbrel.types.plan", HEAVY),
        ("import whimbrel.outputs.muvera, whimbrel.outputs.token_pooling", HEAVY),
        ("import whimbrel.cli.main; whimbrel.cli.main.app(['--help'], standalone_mode=False)", [*HEAVY, "numpy", "httpx2"]),
        ("import whimbrel.cli.main; whimbrel.cli.main.app(['models'], standalone_mode=False)", [*HEAVY, "numpy", "httpx2"]),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['pull', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2"],
        ),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['list'], standalone_mode=False)",
            [*(each for each in HEAVY if each != "huggingface_hub"), "numpy"],
        ),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['serve', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2"],
        ),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['run', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2", "pyarrow", "fsspec"],
        ),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['store', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2", "pyarrow", "fsspec"],
        ),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['bench', 'serve', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2"],
        ),
        ("import whimbrel_bench.cli.runs, whimbrel_bench.compare", [each for each in HEAVY if each != "httptools"]),
        (
            "import whimbrel.cli.main; whimbrel.cli.main.app(['eval', '--help'], standalone_mode=False)",
            [*HEAVY, "numpy", "httpx2"],
        ),
        ("import whimbrel_bench.evaluation.run", [each for each in HEAVY if each != "httptools"]),
    ],
)
def test_light_parts_import_nothing_heavy(code: str, absent: list[str]) -> None:
    program = f"import sys, json; {code}; print(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(absent) & set(json.loads(done.stdout.splitlines()[-1]))


def test_whimbrel_bench_depends_on_what_it_imports() -> None:
    """It is installed with the light part of Whimbrel, without the server's libraries. Imports in functions may need those."""
    stated = [
        requirement
        for folder in (ROOT, ROOT / "packages/whimbrel-bench")
        for requirement in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    known = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in stated} | {"whimbrel_bench"}
    imported: set[str] = set()
    for path in (ROOT / "packages/whimbrel-bench/src").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                imported.update(each.name.partition(".")[0] for each in node.names)
    assert "uvloop" in imported
    assert imported <= known | sys.stdlib_module_names


def test_public_names() -> None:
    assert whimbrel.__all__ == [
        "AsyncClient",
        "AsyncEngine",
        "Client",
        "Engine",
        "TruncationWarning",
        "WhimbrelError",
        "__version__",
    ]
    assert all(getattr(whimbrel, name) is not None for name in whimbrel.__all__)
    assert dir(whimbrel) == whimbrel.__all__
    with pytest.raises(AttributeError):
        _ = whimbrel.nothing  # pyright: ignore[reportAttributeAccessIssue]
