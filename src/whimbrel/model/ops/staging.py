"""Copies of arrays to a device and of results from it, none of which waits for the device."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.outputs.rows import RowSelection
from whimbrel.types.arrays import Int32Array
from whimbrel.types.batch import Batch
from whimbrel.types.request import OutputName

_ALIGNED: Final = 64
"""Numbers at whose multiples an array begins, 256 bytes apart: as apart as if each had memory of its own."""


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device. On a CPU it shares the memory."""
    tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def start_copy(x: Tensor) -> Tensor:
    """Return a tensor on the host that has the numbers of `x` once the current stream has got there."""
    if not x.is_cuda:
        return x
    copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copied.copy_(x, non_blocking=True)
    return copied


class StagedArrays:
    """Arrays of the batches that are launched now, each batch's in one copy: a copy costs more than the bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged: dict[tuple[int, int], Tensor] = {}
        """Arrays on the device, with zeros up to a multiple of `_ALIGNED`, by address and bytes on the host. There they live as
        long as they are here."""

    def put(self, array: NDArray[Any]) -> Tensor:
        """Return an array on the device: as it was staged, or in a copy of its own."""
        room = self._find(array)
        return put(array, self._device) if room is None else room[: array.size].view(array.shape)

    def put_rows(self, array_T: Int32Array, num_rows: int) -> Tensor:
        """Return an array on the device, with zeros up to a number of rows."""
        room = self._find(array_T)
        if room is not None and num_rows <= room.shape[0]:
            return room[:num_rows]
        padded_R = np.zeros(num_rows, np.int32)
        padded_R[: array_T.size] = array_T
        return put(padded_R, self._device)

    def _find(self, array: NDArray[Any]) -> Tensor | None:
        return self._staged.get(_key(array)) if array.dtype == np.int32 and array.flags.c_contiguous else None

    @contextmanager
    def of_batch(self, batch: Batch, selections: Mapping[OutputName, RowSelection]) -> Generator[None]:
        """Stage the int32 arrays of a batch, as long as the block runs. On a CPU, which shares their memory, do nothing.

        A batch may be launched while another is, in the same thread.
        """
        if self._device.type == "cpu":
            yield
            return
        arrays = [batch.ids_T, batch.positions_T, batch.type_ids_T, batch.cu_seqlens, batch.num_attended_B]
        for rows in selections.values():
            arrays += [each for each in (rows.starts_P, rows.ends_P, rows.widths_P, rows.tokens_X) if each is not None]
        fitting = [each for each in arrays if each.size and each.dtype == np.int32 and each.flags.c_contiguous]
        staged = _stage(fitting, self._device)
        self._staged |= staged
        try:
            yield
        finally:
            for key in staged:
                del self._staged[key]


def _stage(arrays: list[Int32Array], device: torch.device) -> dict[tuple[int, int], Tensor]:
    by_key = {_key(each): each for each in arrays}
    sizes = [-(-each.size // _ALIGNED) * _ALIGNED for each in by_key.values()]
    buffer = np.zeros(sum(sizes), np.int32)
    for first, each in zip(accumulate(sizes, initial=0), by_key.values(), strict=False):
        buffer[first : first + each.size] = each.reshape(-1)
    on_device = put(buffer, device)
    return dict(zip(by_key, torch.split(on_device, sizes), strict=True))


def _key(array: NDArray[Any]) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.nbytes
