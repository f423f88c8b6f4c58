"""HTTP/1.1 on httptools and asyncio: listener, connections and exchanges. Knows ASGI, and nothing of dialects or models."""
