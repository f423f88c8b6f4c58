"""What torch says when there is no memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

_NO_MEMORY: Final = ("you tried to allocate", "bad_alloc")
"""What torch says on a CPU; there it has no error class for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


@contextmanager
def memory_errors() -> Generator[None]:
    """Such an error within becomes MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(str(error)) from None
