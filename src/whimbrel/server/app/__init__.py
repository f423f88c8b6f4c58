"""The ASGI app: guards, routing, one context per request, and the rendering of results and errors by the dialects."""
