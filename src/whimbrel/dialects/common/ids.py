"""What answers of some dialects carry that is in no request: an id of their own, and when they were made.

The one place where dialects look at a clock or at chance.
"""

from __future__ import annotations

import os
import time


def new_id(prefix: str, given: str | None = None) -> str:
    """`prefix`-`given`, or something that was not there before."""
    return f"{prefix}-{given or os.urandom(16).hex()}"


def created() -> int:
    """Seconds since 1970."""
    return int(time.time())
