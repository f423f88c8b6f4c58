"""The comparison with other engines: its table is well formed, and a peer that fails is a row that says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks/peers"
TASKS = {"dense", "rerank", "token-vectors", "sparse"}

HERE = """
[environments.here]
interpreter = true

[[peers]]
name = "Whimbrel bfloat16"
environment = "here"
adapter = "run_whimbrel"
dtype = "float32"
options = { dtype = "float32" }
tasks = ["dense"]

[[peers]]
name = "Sentence Transformers float32"
environment = "here"
adapter = "run_sentence_transformers"
dtype = "float32"
options = { dtype = "float32" }
tasks = ["dense"]

[[peers]]
name = "Absent"
environment = "here"
adapter = "run_nothing"
dtype = "int8"
tasks = ["dense"]
"""

ABSENT = """
[environments.absent]
packages = ["no-such-package==1.0"]

[[peers]]
name = "Absent"
environment = "absent"
adapter = "run_whimbrel"
dtype = "float32"
tasks = ["dense"]
"""


def compare(tmp_path: Path, table: str, *args: str) -> tuple[str, dict[str, Any]]:
    """Run the comparison, and return what it prints and its results."""
    (tmp_path / "peers.toml").write_text(table)
    out = tmp_path / "results.json"
    places = ["--table", str(tmp_path / "peers.toml"), "--build", str(tmp_path / "build"), "--out", str(out)]
    command = [sys.executable, str(FOLDER), *places, *args]
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return re.sub(" +", " ", done.stdout), json.loads(out.read_text())


def test_the_table_of_peers_is_well_formed() -> None:
    table = tomllib.loads((FOLDER / "peers.toml").read_text())
    names = [peer["name"] for peer in table["peers"]]
    assert len(set(names)) == len(names)
    assert names[:4] == ["Whimbrel bfloat16", "Whimbrel float32", "Whimbrel int8", "Sentence Transformers float32"]
    for peer in table["peers"]:
        assert peer["environment"] in table["environments"]
        assert (FOLDER / "adapters" / f"{peer['adapter']}.py").exists()
        assert set(peer["tasks"]) <= TASKS
        assert (FOLDER / "adapters" / peer.get("exports", "")).exists()
        assert set(peer.get("server", {"paths": []})["paths"]) <= set(peer["tasks"])


def test_no_environment_leaves_the_version_of_torch_open() -> None:
    """An open version of torch would fetch gigabytes of CUDA."""
    environments = tomllib.loads((FOLDER / "peers.toml").read_text())["environments"]
    installed = {name: row["packages"] for name, row in environments.items() if not row.get("interpreter")}
    assert all(any("==" in package for package in packages) for packages in installed.values())
    assert all("torch==2.13.0" in packages for packages in installed.values())


def test_a_peer_that_cannot_be_installed_is_a_row(tmp_path: Path) -> None:
    printed, results = compare(tmp_path, ABSENT, "--tasks", "dense")
    reason = "install: ERROR: No matching distribution found for no-such-package==1.0"
    assert results["failures"] == {"Absent": reason}
    assert f"| Absent | {reason} |" in printed
    assert results["engines"] == results["servers"] == []


def test_engines_are_compared_and_one_that_does_not_start_is_a_row(tmp_path: Path) -> None:
    options = ["--kind", "engines", "--workload", "one short text", "--rounds", "1", "--quick"]
    printed, results = compare(tmp_path, HERE, *options)
    assert [row["peer"] for row in results["engines"]] == ["Whimbrel bfloat16", "Sentence Transformers float32"]
    assert all(row["cosine"] > 0.99999 and not row["wrong"] and len(row["seconds"]) == 1 for row in results["engines"])
    assert results["failures"] == {"Absent, minilm": "run: ModuleNotFoundError: No module named 'run_nothing'"}
    assert "| Whimbrel bfloat16 | 1.00 |" in printed
