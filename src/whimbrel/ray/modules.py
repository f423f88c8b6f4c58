"""Modules of Ray, imported when they are needed, as values of any type. The only place that knows whether Ray is there."""

from importlib import import_module
from typing import Any

from whimbrel.errors import SetupError


def ray_module(name: str = "ray") -> Any:
    """Import Ray or one of its modules. Raises SetupError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(f"cannot import {name}: {error}.", hint="pip install 'whimbrel[serve,ray]'") from None
