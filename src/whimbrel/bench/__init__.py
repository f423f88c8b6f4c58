"""Benchmarks: load against servers, the engine alone, comparisons, sweeps of rates, and their results as text and pictures.

    datasets -> backends -> target -> clients (processes) -> load -> connection
                                                              |
                                          picture, chart <- results

The load generator imports neither the engine nor PyTorch. `offline` and `compare` import the engine when they run.
"""
