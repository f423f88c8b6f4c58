"""Load generator, comparisons and a live view of servers, with their results as text and pictures.

    options -> datasets -> backends -> target -> clients (processes) -> load -> connection
                                          |
                              picture <- results

The load generator imports neither the engine nor PyTorch. `offline` and `compare` import the engine when they run.
"""

__version__ = "0.1.0"
