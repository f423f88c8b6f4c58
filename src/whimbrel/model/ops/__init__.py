"""Tensor operations with device-specific code. Tests compare each with its plain formula.

Shapes: R rows of a batch (T tokens, rounded up by `round_up_rows`), B seqs, D model width, N heads, H head width.
"""
