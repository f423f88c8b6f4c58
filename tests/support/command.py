"""The `whimbrel` command, in a process of its own or in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from whimbrel.cli import main


def run(*args: str, stdin: str | bytes = b"", code: int = 0, **env: str) -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = [sys.executable, "-m", "whimbrel", *args]
    done = subprocess.run(command, input=data, capture_output=True, env=os.environ | env, check=False, timeout=120)
    assert done.returncode == code, (done.stdout[:500], done.stderr.decode())
    assert b"Traceback" not in done.stderr
    return done


def error(*args: str, **env: str) -> str:
    """Return the error of a command that must fail with exit code 1, one line on stderr and nothing on stdout."""
    done = run(*args, code=1, **env)
    return one_error(done.stdout, done.stderr)


def one_error(stdout: bytes, stderr: bytes) -> str:
    lines = [line for line in stderr.decode().splitlines() if line.startswith(("error:", "hint:"))]
    assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"])
    assert stdout == b""
    return "\n".join(lines)


class Stream(io.BytesIO):
    """Stream whose bytes can be read after it is closed."""

    written = b""

    def close(self) -> None:
        if not self.closed:
            self.written = self.getvalue()
        super().close()


@dataclass
class Here:
    """The command in this process, without another import of PyTorch."""

    patch: pytest.MonkeyPatch

    def run(self, *args: str, stdin: bytes = b"", code: int = 0) -> tuple[bytes, bytes]:
        """Return stdout and stderr."""
        streams = {"stdin": Stream(stdin), "stdout": Stream(), "stderr": Stream()}
        with self.patch.context() as patch:
            patch.setattr(sys, "argv", ["whimbrel", *args])
            for name, stream in streams.items():
                patch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
            with pytest.raises(SystemExit) as end:
                main.main()
        for stream in streams.values():
            stream.close()
        out, err = streams["stdout"].written, streams["stderr"].written
        assert (end.value.code or 0) == code, (out[:500], err.decode())
        return out, err

    def error(self, *args: str, stdin: bytes = b"") -> str:
        return one_error(*self.run(*args, stdin=stdin, code=1))


def jsonl(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]
