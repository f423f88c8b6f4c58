"""The code blocks of a page, run in the order in which a reader meets them.

`python docs_code.py PAGE URL` runs a page in this process, in an empty folder. CONTRIBUTING.md tells writers which blocks are run:

- `python` blocks share one namespace.
- `sh` blocks run in bash, and stop at the first command that fails. Any call of curl that fails, and any answer of HTTP with an
  error status, is a failure of the block.
- `whimbrel serve ...` starts a server that takes the place of the one at http://127.0.0.1:8000, as does the comment
  `<!-- server: ARGUMENTS -->`. A page without these finds the server of the packaged model there, at URL.
- A `toml` block that begins with `# NAME.toml` is written to a file of that name.
- `<!-- env: NAME=VALUE -->` sets a variable for the whole page.
- A block after `<!-- not run: REASON -->` is not run. A block after `<!-- fails: WORDS -->` must fail and say the words.
"""

from __future__ import annotations

import linecache
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import Server

ADDRESS = "127.0.0.1:8000"
LANGUAGES = ("python", "sh")
_FENCE = re.compile(
    r"(?P<notes>(?:^<!-- [^\n]* -->\n)*)^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_SERVE = re.compile(r"^((?:\w+=(?:'[^'\n]*'|\S*) )*whimbrel serve\b.*)$", re.MULTILINE)
"""Commands that serve, with the variables before them."""
_FILE = re.compile(r"# ([\w-]+\.toml)\n")
_NOTE = re.compile(r"<!-- (server|not run|fails): (.+?) -->")
_CURL = """#!/bin/sh
"{curl}" --silent --show-error --fail-with-body --fail-early "$@"
status=$?
test $status -eq 0 || echo "$@" >> "{log}"
exit $status
"""
"""A script in the place of curl. It notes every call that fails, even if the shell ignores the failure."""
_SECONDS = 120
"""The longest time of a block of commands."""
_KNOWN = ("server", "not run", "fails", "env")


@dataclass(frozen=True)
class Block:
    """Code of a page, with the notes of the comments before it."""

    language: str
    code: str
    line: int
    notes: dict[str, str]


def stray_notes(text: str) -> list[str]:
    """Return the comments that look like notes and are none: misspelt, without a reason, or not right before a block."""
    bound = {line for found in _FENCE.finditer(text) for line in found["notes"].splitlines()}
    lines = [
        line
        for line in text.splitlines()
        if line.strip().startswith("<!-- ") and not re.match(r"<!-- (routes|end|generated)\b", line)
    ]
    notes = [line for line in lines if re.fullmatch(rf"<!-- (?:{'|'.join(_KNOWN)}): \S.* -->", line)]
    return [line for line in lines if line not in notes or (line not in bound and not line.startswith("<!-- env: "))]


def blocks_of(text: str) -> list[Block]:
    """Return all blocks of a page."""
    blocks: list[Block] = []
    for found in _FENCE.finditer(text):
        notes = dict(_NOTE.findall(found["notes"]))
        code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        blocks.append(Block(found["language"], code, text[: found.start("code")].count("\n"), notes))
    return blocks


class Page:
    """The state between the blocks of a page."""

    def __init__(self, file: Path, address: str, *, own_server: bool) -> None:
        self._file, self._address, self._own_server = file, address, own_server
        self._server: Server | None = None
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        """Run a block, or raise what went wrong."""
        if "server" in block.notes:
            self.serve(shlex.split(block.notes["server"]))
        if block.language == "toml" and (name := _FILE.match(block.code)) is not None:
            Path(name[1]).write_text(block.code, encoding="utf-8")
        if "not run" in block.notes or block.language not in LANGUAGES:
            return
        if (words := block.notes.get("fails")) is None:
            self._execute(block)
            return
        try:
            self._execute(block)
        except Exception as error:
            if words not in (error.args[1] if isinstance(error, CommandError) else str(error)):
                raise
        else:
            raise AssertionError(f"the block did not fail, though it should, with: {words}")

    def _execute(self, block: Block) -> None:
        if block.language == "python":
            self._python(block)
            return
        for command in _SERVE.split(block.code.replace("\\\n", "")):
            if _SERVE.fullmatch(command) and "--help" not in command:
                words = shlex.split(command, comments=True)
                program = words.index("whimbrel")
                self.serve(words[program + 2 :], **dict(word.split("=", 1) for word in words[:program]))
            elif command.strip():
                self._shell(command)

    def _python(self, block: Block) -> None:
        """Errors show the lines of the page."""
        name = f"{self._file}"
        source = "\n" * block.line + self._with_address(block.code)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            exec(compile(source, name, "exec", dont_inherit=True), self._names)
        except SystemExit as error:
            raise AssertionError(f"the block ends Python ({error.code}), so that later blocks would not run") from error

    def _shell(self, code: str) -> None:
        log = Path("curl.failed")
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._with_address(code)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
        if done.returncode != 0 or log.exists():
            raise CommandError(f"exit status {done.returncode}\n{code}", f"{done.stdout}\n{done.stderr}")

    def _with_address(self, code: str) -> str:
        if self._own_server and self._server is None:
            self.serve([])
        return code.replace(ADDRESS, self._address)

    def serve(self, arguments: list[str], **env: str) -> None:
        """Start a server in place of the last one, on its port: clients made earlier go on with it."""
        if "--port" in arguments:
            place = arguments.index("--port")
            del arguments[place : place + 2]
        if self._server is None:
            self._address = f"127.0.0.1:{free_port()}"
        self.close()
        self._server = Server(*arguments, "--port", self._address.partition(":")[2], **env)

    def close(self) -> None:
        """Stop the page's own server."""
        if self._server is not None:
            self._server.stop()
            self._server.__exit__(None, None, None)


class CommandError(Exception):
    """A failed command: the command with its status, and what it printed."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(file: Path, url: str) -> int:
    """Run a page; 0 if all of its blocks did what they should."""
    (Path.cwd() / "bin").mkdir()
    curl = Path.cwd() / "bin/curl"
    curl.write_text(_CURL.format(curl=shutil.which("curl"), log=Path.cwd() / "curl.failed"))
    curl.chmod(0o755)
    os.environ["PATH"] = f"{curl.parent}{os.pathsep}{os.environ['PATH']}"
    blocks = blocks_of(file.read_text(encoding="utf-8"))
    serves = any("server" in block.notes or "whimbrel serve" in block.code for block in blocks if "not run" not in block.notes)
    page = Page(file, url.removeprefix("http://"), own_server=serves)
    try:
        for block in blocks:
            try:
                page.run(block)
            except BaseException:
                traceback.print_exc()
                sys.stderr.write(f"\n{file}:{block.line}: this block no longer does what it should\n")
                return 1
    finally:
        page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
