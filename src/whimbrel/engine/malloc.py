"""Tuning of glibc malloc: freed buffers are reused instead of being returned to the kernel.

Activations and responses are some MB, freed and allocated anew for each batch. By default glibc unmaps or trims freed memory,
so that every allocation touches fresh pages. With MiniLM on two Zen 4 cores, 320,000 page faults for 35,000 tokens took a tenth
of the time. Encoding 128 vectors as base64 took 440 us instead of 65. `_TRIM_THRESHOLD` bounds the memory that each arena
keeps.
"""

import ctypes
from contextlib import suppress
from typing import Final

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3

_MIB: Final = 2**20
_TRIM_THRESHOLD: Final = 128 * _MIB
_MMAP_THRESHOLD: Final = 8 * _MIB
"""Larger blocks are mapped each time. Only long texts have them, and kept, they take up to seven times the memory: a lane's
arena is made of heaps of 64 MiB."""


def tune_glibc_malloc() -> None:
    """Tune the allocator of this process if it is glibc's; else do nothing."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
        mallopt(_M_TOP_PAD, 16 * _MIB)
