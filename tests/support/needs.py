"""Features that a machine lacks, for tests that need them."""

from __future__ import annotations

import pytest

from whimbrel.model.cpu import cpu


def lacks_bfloat16() -> str | None:
    """Return the reason why models cannot run in bfloat16 on this machine's CPU, or None if they can."""
    return f"no bfloat16 on this CPU, {cpu()}" if cpu().bfloat16 == "none" else None


def skip_without_bfloat16() -> None:
    """For fixtures; tests are marked bfloat16."""
    if (reason := lacks_bfloat16()) is not None:
        pytest.skip(reason)
