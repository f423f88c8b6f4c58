"""The image of deploy/Containerfile: its instructions, and a container without an image, made of namespaces of this machine.

Such a container has the image's variables, command and health check, a root that cannot be written, processes of its own, and a
user that /etc/passwd does not have. Its programs are this machine's. A test builds the image itself where podman is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "Containerfile"
USER = 1_000_700_000
"""A user id as OpenShift gives it."""

_ENTER = """
set -eu
root={root}
mount --make-rprivate /
mount --bind / "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=0775 tmpfs "$root/mnt"
{reveal}
mount -o remount,bind,ro "$root"
exec chroot --userspec={user}:0 --groups=0 "$root" env -i {variables} {command}
"""


class Instruction(NamedTuple):
    """An instruction of a Containerfile, and its words."""

    name: str
    text: str


def stages() -> list[list[Instruction]]:
    """Return the instructions of each stage, without comments; what precedes the first stage is a stage too."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, words = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, " ".join(words.split())))
    return found


def last(name: str) -> str:
    """Return the words of the only instruction of a name in the image's own stage."""
    (words,) = (each.text for each in stages()[-1] if each.name == name)
    return words


def variables() -> dict[str, str]:
    """Return the variables of the image, but PATH."""
    pairs = [word.split("=", 1) for word in shlex.split(last("ENV"))]
    return {name: value for name, value in pairs if name != "PATH"}


def health_command() -> list[str]:
    """Return the command of the health check."""
    return json.loads(last("HEALTHCHECK").partition(" CMD ")[2])


def reasons_against() -> str | None:
    """Return the reason why this machine can make no container of namespaces, or None."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "this machine gives no namespaces"


def _reveal(folders: list[str]) -> str:
    """Return commands that show folders inside which others than root do not reach, such as those below /root, or in /tmp."""
    lines: list[str] = []
    for folder in folders:
        hidden = next((each for each in reversed(Path(folder).parents) if not each.stat().st_mode & 0o001), None)
        is_temporary = Path("/tmp") in Path(folder).parents  # the container has a /tmp of its own
        if hidden is not None and not is_temporary:
            lines.append(f'mountpoint -q "$root{hidden}" || mount -t tmpfs -o mode=0755 tmpfs "$root{hidden}"')
        if hidden is not None or is_temporary:
            lines.append(f'mkdir -p "$root{folder}"; mount --bind {shlex.quote(folder)} "$root{folder}"')
    return "\n".join(dict.fromkeys(lines))


class Container:
    """A server as in the image, in namespaces of its own; `wait` returns its exit code."""

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        root = folder / "root"
        root.mkdir()
        ours = variables() | {"HF_HOME": "/mnt", "WHIMBREL_HOST": "127.0.0.1", "WHIMBREL_PORT": str(port)}
        ours |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        ours["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin:/usr/bin:/bin"])
        first = ["tini", "--"] if shutil.which("tini") else []
        command = [*first, sys.executable, "-m", "whimbrel", *json.loads(last("CMD")), *arguments]
        script = _ENTER.format(
            root=shlex.quote(str(root)),
            reveal=_reveal([sys.base_prefix, sys.prefix, *(each for each in sys.path if Path(each).is_dir())]),
            user=USER,
            variables=shlex.join(f"{name}={value}" for name, value in ours.items()),
            command=shlex.join(command),
        )
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "sh", "-c", script],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that is number 1 inside."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as the container's user."""
        enter = ["nsenter", f"--target={self.pid}", "--all", "--root", "--wd", f"--setuid={USER}", "--setgid=0"]
        environment = Path(f"/proc/{self.pid}/environ").read_text().split("\0")
        names = dict(each.split("=", 1) for each in environment if each)
        return subprocess.run([*enter, *command], capture_output=True, text=True, check=False, env=names, timeout=60)

    def stop(self, name: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to process 1, and return the exit code."""
        os.kill(self.pid, name)
        return self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
