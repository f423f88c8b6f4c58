"""Secrets in files of their own, as orchestrators mount them."""

from collections.abc import Callable
from pathlib import Path

from whimbrel.errors import SetupError


def read_secret_lines(file: Path, what: str, warn: Callable[[str], None]) -> list[str]:
    """Return the lines of a file. `what` names the secret in errors and in the warning that all may read it."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if file.stat().st_mode & 0o004:
            warn(f"everybody on this machine can read {what} in {file}; chmod 600 it")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SetupError(f"cannot read {what} in {file}: {reason}.") from None
    return lines


def read_secret(file: Path, what: str, warn: Callable[[str], None]) -> str:
    """Return the first line of a file of one secret. Raises SetupError."""
    lines = read_secret_lines(file, what, warn)
    if not lines or not lines[0].strip():
        raise SetupError(f"{file}: holds nothing in its first line.", hint=f"write {what} there")
    return lines[0]
