"""HTTP clients with the verbs of Engine. Results are numpy arrays. PyTorch and a web framework are not needed."""

from whimbrel.client.async_client import AsyncClient
from whimbrel.client.client import Client

__all__ = ["AsyncClient", "Client"]
