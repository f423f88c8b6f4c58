"""HTTP/1.1 on asyncio, for any ASGI app."""
