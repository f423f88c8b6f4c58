"""Detection of out-of-memory errors of torch."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

_NO_MEMORY: Final = (
    "you tried to allocate",
    "bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Phrases of errors for which torch has no class: on a CPU, of memory that the GPU shares with the host, and of libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a device or the host is out of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY)


@contextmanager
def memory_errors() -> Generator[None]:
    """Raise out-of-memory errors of the block as MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(str(error)) from None
