"""Commands of other distributions: listed, missing, and of another version."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import whimbrel_bench
from whimbrel import __version__
from whimbrel.cli.entry_points import COMMANDS, GROUP, load_command
from whimbrel.errors import SetupError

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "packages/whimbrel-bench"
ENTRY_POINTS = f"[{GROUP}]\nbench = absent:bench\neval = absent:evaluate\ntop = absent:top\n"


def whimbrel(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a wide terminal."""
    command = [sys.executable, "-m", "whimbrel", *args]
    environment = os.environ | {"COLUMNS": "300"} | env
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_both_distributions_are_of_one_version_and_require_it() -> None:
    assert whimbrel_bench.__version__ == __version__ == metadata.version("whimbrel-bench")
    assert project(ROOT)["optional-dependencies"]["bench"] == [f"whimbrel-bench=={__version__}"]
    assert f"whimbrel=={__version__}" in project(BENCH)["dependencies"]
    assert set(project(BENCH)["entry-points"][GROUP]) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_it_says_itself(name: str) -> None:
    assert COMMANDS[name] in whimbrel("--help").stdout
    assert COMMANDS[name] in whimbrel(name, "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_not_installed_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(SetupError) as raised:
        load_command(name)
    assert str(raised.value) == (
        f"`whimbrel {name}` is not installed: pip install 'whimbrel[bench]', or ./packages/whimbrel-bench in a checkout"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_another_version_is_one_line_with_both_versions_and_the_repair(name: str, tmp_path: Path) -> None:
    """Nothing of it is imported: here there is not even a module."""
    info = tmp_path / "whimbrel_bench-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: whimbrel-bench\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = whimbrel(name, "--help", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.stderr == (
        f"error: whimbrel-bench is of version 9.9 and whimbrel of {__version__}: pip install 'whimbrel[bench]=={__version__}'\n"
    )
    assert (done.returncode, done.stdout) == (1, "")
