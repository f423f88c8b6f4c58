"""Client and AsyncClient: the engine's verbs over HTTP, numpy arrays out. Needs no PyTorch and no web framework."""

from whimbrel.client.aio import AsyncClient
from whimbrel.client.sync import Client

__all__ = ["AsyncClient", "Client"]
