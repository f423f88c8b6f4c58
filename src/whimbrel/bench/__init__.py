"""Benchmarks: load against servers, the engine alone, comparisons, sweeps of rates, and their results as text and pictures.

datasets -> backends -> load (in client processes) -> results -> picture, page
"""
