"""Client and AsyncClient: the engine's verbs over HTTP, numpy arrays out. Needs no PyTorch and no web framework."""

from whimbrel.client.async_client import AsyncClient
from whimbrel.client.client import Client

__all__ = ["AsyncClient", "Client"]
