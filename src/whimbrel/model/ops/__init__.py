"""Tensor operations with device-specific code. Every fast path has a plain reference and an equality test.

Shapes: R rows of a batch (T tokens, rounded up by `round_up_rows`), B seqs, D model width, N heads, H head width.
"""
