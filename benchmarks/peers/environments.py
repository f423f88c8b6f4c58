"""Environments of peers: each is built once by pip, and a failure becomes a reason."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common import NUM_CORES, note

from whimbrel.errors import WhimbrelError

OURS: Final = "Whimbrel bfloat16"
SINGLE: Final = "Whimbrel float32"
REFERENCE: Final = "Sentence Transformers float32"
ADAPTERS: Final = Path(__file__).parent / "adapters"
SOURCES: Final = Path(__file__).parents[2] / "src"
_USEFUL: Final = re.compile(r"^(?!.*warning).*(error|exception|no matching distribution|refused|not found)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Peer:
    """Row of the table of peers."""

    name: str
    environment: str
    adapter: str
    dtype: str
    tasks: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    exports: str = ""
    """Script in adapters/ that exports a checkpoint for the peer, or ""."""
    server: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Table:
    """Contents of peers.toml."""

    environments: dict[str, dict[str, Any]]
    peers: list[Peer]


def read_table(path: Path) -> Table:
    """Read peers.toml. Raises TypeError if a peer has an unknown key or lacks one."""
    content = tomllib.loads(path.read_text())
    peers = [Peer(**(row | {"tasks": tuple(row["tasks"])})) for row in content["peers"]]
    return Table(content["environments"], peers)


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds environments and exports below a folder."""

    table: Table
    build: Path

    def python(self, name: str) -> Path:
        """Return the interpreter of an environment."""
        if self.table.environments[name].get("interpreter"):
            return Path(sys.executable)
        return self.build / "environments" / name / "bin/python"

    def variables(self, name: str) -> dict[str, str]:
        """Return the environment variables of its processes."""
        places = {
            "venv": str(self.python(name).parents[1]),
            "cache": str(self.build / "cache" / name),
            "cores": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        }
        extra: dict[str, str] = self.table.environments[name].get("variables", {})
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        threads = {"OMP_NUM_THREADS": str(NUM_CORES), "MKL_NUM_THREADS": str(NUM_CORES), "TOKENIZERS_PARALLELISM": "true"}
        if self.table.environments[name].get("interpreter"):
            threads |= {"PYTHONPATH": str(SOURCES)}
        own = {key: value.format(**places) for key, value in extra.items()}
        if "LD_PRELOAD" in own and "LD_PRELOAD" in os.environ:  # of lesser_cpu.py
            own["LD_PRELOAD"] += ":" + os.environ["LD_PRELOAD"]
        return os.environ | offline | threads | own

    def install(self, name: str) -> None:
        """Build an environment unless it is there and of the same packages. Raises WhimbrelError."""
        wanted = self.table.environments[name]
        if wanted.get("interpreter"):
            return
        venv, log = self.build / "environments" / name, self.build / "logs" / f"install-{name}.log"
        stamp = venv / "packages.json"
        if stamp.exists() and stamp.read_text() == json.dumps(wanted):
            return
        shutil.rmtree(venv, ignore_errors=True)
        log.unlink(missing_ok=True)
        run_step([sys.executable, "-m", "venv", str(venv)], log, what="install")
        pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--progress-bar", "off"]
        steps = {"packages": install, "alone": [*install, "--no-deps"], "remove": [*pip, "uninstall", "-y"]}
        for key, command in steps.items():
            if wanted.get(key):
                run_step([*command, *wanted[key]], log, what="install")
        stamp.write_text(json.dumps(wanted))

    def export(self, peer: Peer, folder: Path, task: str, texts: Path) -> None:
        """Export a checkpoint for a peer, if it needs that, unless it is done. Raises WhimbrelError."""
        if not peer.exports:
            return
        script = ADAPTERS / peer.exports
        stamp, log = folder / f"exported-by-{script.stem}", self.build / "logs" / f"{script.stem}-{folder.name}.log"
        if stamp.exists() and stamp.read_text() == script.read_text():
            return
        note(f"exporting {folder.name}: {script.name}")
        log.unlink(missing_ok=True)
        command = [str(self.python(peer.environment)), str(script), str(folder), task, str(texts)]
        run_step(command, log, what="export", variables=self.variables(peer.environment))
        stamp.write_text(script.read_text())


def run_step(command: Sequence[str], log: Path, *, what: str, variables: dict[str, str] | None = None) -> None:
    """Run a command and append its output to a log. Raises WhimbrelError if it fails."""
    with log.open("a") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=variables, check=False)
    if done.returncode:
        raise WhimbrelError(f"{what}: {reason_of(log.read_text(errors='replace'))}")


def reason_of(text: str) -> str:
    """Return the last error in a text, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    useful = [line for line in lines if _USEFUL.search(line)]
    return (useful or lines or ["no output"])[-1]
