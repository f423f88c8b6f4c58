"""The HTTP server: an ASGI app over any AsyncEmbedder, and what runs it."""
