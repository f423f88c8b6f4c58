"""The ASGI app: routes, guards and request contexts."""
