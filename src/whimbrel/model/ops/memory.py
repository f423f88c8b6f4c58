"""Errors of a device: no memory, and a device that is lost.

No names of requests or batches. After some errors a GPU fails every operation of the process.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

from whimbrel.errors import Unavailable

_NO_MEMORY: Final = (
    "you tried to allocate",
    "bad_alloc",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
)
"""Phrases of errors for which torch has no class: on a CPU, of the driver (also for pinned memory of the host), of kernels that
are loaded, and of libraries. cuBLASLt has the words of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a device or the host is out of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY)


_USUAL: Final = 2**30
"""Bytes that a GPU's driver and this process's context take beside the tensors; more is somebody else's."""


@contextmanager
def memory_errors() -> Generator[None]:
    """Raise out-of-memory errors of the block as MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(str(error)) from None


def reserved_bytes(device: str) -> int:
    """Return the bytes of a GPU's memory that PyTorch has taken for this process; 0 on a CPU."""
    return 0 if device == "cpu" else torch.cuda.memory_reserved(device)


def raise_if_lost(error: BaseException, device: torch.device) -> None:
    """Raise Unavailable if the device fails every operation from now on, as a GPU does after an illegal access."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise Unavailable(f"{device} fails every operation of this process: {error}") from error


def describe_memory(device: str) -> str:
    """Return how much memory a GPU has and has free, and how much of it others hold."""
    try:
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
    except (RuntimeError, AssertionError):  # not even this has room, or PyTorch was built without CUDA
        return f"{device} has no memory free"
    text = f"{device} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    others = total - free - own
    return f"{text}; other processes hold {others / 2**30:.1f}" if others > _USUAL else text
