"""Clients of stores, imported by name when they are needed, as values of any type."""

from importlib import import_module
from typing import Any

from whimbrel.errors import SetupError


def client_module(name: str, extra: str) -> Any:
    """Import a module of a store's client. Raises SetupError that names the extra to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(f"cannot import {name}: {error}.", hint=f"pip install 'whimbrel[{extra}]'") from None
