"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx2


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> bool:
    """True if `condition` comes true in time. Its HTTP errors count as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return True
        except httpx2.HTTPError:
            pass
        time.sleep(0.02)
    return False
