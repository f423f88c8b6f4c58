"""Whimbrel on clusters: Ray Data, Ray Serve and Spark.

`Embed` needs neither Ray nor Spark to be imported; `deployment` needs Ray Serve. `whimbrel run --ray` is made of the other
modules.
"""

from typing import TYPE_CHECKING, Any

from whimbrel.ray.embed import Embed

if TYPE_CHECKING:
    from whimbrel.ray.serving import deployment

__all__ = ["Embed", "deployment"]


def __getattr__(name: str) -> Any:
    """Import the part that needs the server's packages when it is asked for."""
    if name == "deployment":
        from whimbrel.ray.serving import deployment

        return deployment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
