"""Our own kernels for CPUs, in C++ (`model/native`), as Python calls them. Nothing here knows PyTorch's operators.

Shapes: R rows, I input and O output columns, N query heads, K key heads, H head width, B seqs, D model width.
"""
