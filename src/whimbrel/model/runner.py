"""Owns a device: loads a model onto it, launches batches and collects the rows of their outputs.

`launch` gives the device its work and returns at once on a GPU (on a CPU the calling thread is the device); `collect` waits
for the rows. Each lane calls `launch` from its own thread; weights are shared and never written. Whatever way a device has
to say that its memory is full, here it becomes MemoryError.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.model.load import load_model
from whimbrel.model.ops.attention import AttentionLayout
from whimbrel.model.ops.cpu import cpu, num_physical_cores
from whimbrel.model.ops.memory import is_out_of_memory
from whimbrel.model.ops.row_blocks import round_up_rows
from whimbrel.model.ops.tile_products import find_tile_products
from whimbrel.model.ops.trials import loading
from whimbrel.model.pooling import DeviceRowSelection, Pooling
from whimbrel.outputs.rows import DeviceRows, OutputRows, RowSelection, to_host
from whimbrel.types.arrays import Int32Array
from whimbrel.types.batch import Batch, equal_length_groups
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Plan
from whimbrel.types.request import OutputName

T = TypeVar("T")

_NICE: Final = 5
"""By so much lanes are nicer than the rest, with which they share the cores: a third of the others' weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A batch on its way: `rows` may be read once `done` has happened."""

    rows: Mapping[OutputName, Tensor]
    finite: Mapping[OutputName, Tensor]
    """Of outputs whose rows stay on the device: which of them are finite."""
    wanted: Mapping[OutputName, RowSelection]
    tower: int
    done: torch.cuda.Event | None


def probe() -> Hardware:
    """What this machine has. Counts the cores that this process may use, not those there are."""
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return Hardware(
        num_cores=_usable_cores(),
        cpu=cpu(),
        gpus=gpus,
        gpu_bfloat16=bool(gpus) and torch.cuda.get_device_capability(0) >= (8, 0),
    )


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = num_physical_cores() or cores  # two hyper-threads share one multiplier
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        share = physical if quota == "max" else round(int(quota) / int(period))
    except (OSError, ValueError):
        share = physical
    return max(1, min(cores, physical, share))


class Runner:
    """A model on a device."""

    def __init__(self, checkpoint: Checkpoint, card: Card, plan: Plan) -> None:
        self._device = torch.device(plan.device)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._compares = self._copies is not None
        """Whether token vectors that are only compared stay on the device."""
        with torch.inference_mode(), loading(plan.num_lanes) as unstable:
            dtype: torch.dtype = getattr(torch, plan.dtype)
            folder = checkpoint.folder
            load = partial(load_model, folder, device=self._device, dtype=dtype, sha256=checkpoint.sha256)
            self._cards = card.towers or (card,)
            by_path = {tower.path: replace(tower, towers=card.towers) for tower in self._cards}  # some share a model
            loaded = {path: load(tower) for path, tower in by_path.items()}
            self._models = [loaded[tower.path][0] for tower in self._cards]
            self._poolings = [Pooling(tower, loaded[tower.path][1]) for tower in self._cards]
            if self._copies is None:
                for tower in self._cards:
                    if "multi_vector" in tower.outputs:
                        find_tile_products(tower.output("multi_vector").width)
        self.unstable: Sequence[str] = unstable
        """The parts of the model that give a text other bits in other batches."""

    def init_thread(self) -> None:
        """Called once by each lane's thread before it launches anything: one intra-op thread per lane.

        Lanes are the parallelism; an operation split over threads would wait for the slowest at every step, and its
        bits would depend on the number of threads. On a CPU, lanes yield to threads that read, tokenise and write: those take
        little, and somebody waits for them.
        """
        if self._device.type == "cpu":
            torch.set_num_threads(1)
            _be_nice()
        else:
            torch.cuda.set_device(self._device)

    def launch(
        self, batch: Batch, selections: Mapping[OutputName, RowSelection], between_layers: Callable[[], None] | None = None
    ) -> Pending:
        """Run a batch.

        `between_layers` is called at each boundary between two layers, in this thread; it may launch another batch. It makes
        sense where the calling thread is the device. Raises MemoryError.
        """
        return self._in_memory(lambda: self._launch(batch, selections, between_layers))

    def collect(self, pending: Pending) -> dict[OutputName, OutputRows]:
        """Wait for a launched batch and give its rows, on the host, in the order of its seqs. Raises MemoryError."""
        if (done := pending.done) is not None:
            self._in_memory(done.synchronize)
        found: dict[OutputName, OutputRows] = {}
        for name, rows_PD in pending.rows.items():
            if name in pending.finite:
                found[name] = DeviceRows(rows_PD, pending.finite[name].numpy())
            else:
                found[name] = to_host(self._cards[pending.tower].output(name), pending.wanted[name], rows_PD.numpy())
        return found

    @torch.inference_mode()
    def _launch(
        self, batch: Batch, wanted: Mapping[OutputName, RowSelection], between_layers: Callable[[], None] | None
    ) -> Pending:
        num_rows = round_up_rows(batch.num_tokens)
        ids_R, positions_R, type_ids_R = (
            self._put(_fill(x, num_rows)) for x in (batch.ids_T, batch.positions_T, batch.type_ids_T)
        )
        hidden_RD = self._models[batch.tower](ids_R, positions_R, type_ids_R, self._layout(batch), between_layers)
        rows = self._poolings[batch.tower](hidden_RD, {name: self._rows(each) for name, each in wanted.items()})
        return self._copy_back(rows, wanted, batch.tower)

    def _layout(self, batch: Batch) -> AttentionLayout:
        lengths = np.diff(batch.cu_seqlens)
        num_keys_B = None if np.array_equal(batch.num_attended_B, lengths) else self._put(batch.num_attended_B)
        return AttentionLayout(
            self._put(batch.cu_seqlens),
            equal_length_groups(batch.cu_seqlens, batch.num_attended_B),
            batch.num_tokens,
            int(lengths.max()),
            num_keys_B,
            adapters_R=self._put(_fill(np.repeat(batch.adapters_B, lengths), round_up_rows(batch.num_tokens)))
            if (batch.adapters_B >= 0).any()
            else None,
        )

    def _rows(self, wanted: RowSelection) -> DeviceRowSelection:
        activated_P, tokens_X = wanted.activated_P, wanted.tokens_X
        return DeviceRowSelection(
            self._put(wanted.origins_P),
            self._put(wanted.starts_P),
            self._put(wanted.ends_P),
            None if wanted.widths_P is None else self._put(wanted.widths_P),
            self._put(activated_P),
            bool(activated_P[0]) if activated_P.size and (activated_P == activated_P[0]).all() else None,
            None if tokens_X is None else self._put(_fill(tokens_X, round_up_rows(tokens_X.size))),
        )

    def _in_memory(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        # Only here, with the exception and its frames, are the tensors of the failed batch gone.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(message)

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        if self._copies is None:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _copy_back(self, rows: Mapping[OutputName, Tensor], wanted: Mapping[OutputName, RowSelection], tower: int) -> Pending:
        """Rows that are only compared stay where the comparing is done, and only whether they are finite is copied."""
        stays: set[OutputName] = {name for name in rows if wanted[name].keep_on_device and self._compares}
        finite: dict[OutputName, Tensor] = {name: torch.isfinite(rows[name]).all(dim=1) for name in stays}
        if self._copies is None:
            return Pending(rows, finite, wanted, tower, None)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            copied: dict[OutputName, Tensor] = {
                name: self._to_host(finite.get(name, rows_PD)) for name, rows_PD in rows.items()
            }
            done = torch.cuda.Event()
            done.record(self._copies)
        there: dict[OutputName, Tensor] = {name: rows[name] if name in stays else copied[name] for name in rows}
        return Pending(there, {name: copied[name] for name in stays}, wanted, tower, done)

    def _to_host(self, x: Tensor) -> Tensor:
        assert self._copies is not None
        found = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        found.copy_(x, non_blocking=True)
        x.record_stream(self._copies)
        return found


def _be_nice() -> None:
    """Lower the priority of this thread. Only Linux has one per thread."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE
        with suppress(OSError):  # a sandbox may forbid even this
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, nice))


def _fill(array_T: Int32Array, num_rows: int) -> Int32Array:
    """Rows up to the next multiple that the linear layers like; nothing reads what becomes of them."""
    filled = np.zeros(num_rows, np.int32)
    filled[: array_T.size] = array_T
    return filled
