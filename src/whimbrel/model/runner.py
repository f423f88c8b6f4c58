"""Execution of batches on a device: tokens in, rows of outputs out.

A batch takes four steps:

1. `launch` chooses the rows to compute, pads them for linear layers and copies them to the device (`forward.py`).
2. The model of its tower (`transformer.py`) computes their hidden states.
3. `pooling.py` turns them into the rows of each selected output, which are copied back to the host.
4. `collect` waits for the copies and returns numpy arrays. Token vectors that are only scored stay on a GPU, and of rows over a
   vocabulary all but their nonzero entries (`nonzero.py`).

On a GPU `launch` only enqueues steps 1 to 3 and returns at once; on a CPU the calling thread computes them. Each lane calls
`launch` from its own thread; weights are shared and never written. Every out-of-memory error becomes MemoryError. After some
errors a GPU fails every operation of this process; then `launch` and `collect` raise Unavailable.

Shapes: R rows of a batch, T tokens, B seqs, P pooled rows, D columns.
"""

import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.model.cpu import cpu
from whimbrel.model.fallback.prepacked import prepacked_problem, version_note
from whimbrel.model.fallback.trials import loading
from whimbrel.model.forward import Forward, PrefixCache
from whimbrel.model.gpus import find_gpus, has_driver
from whimbrel.model.kernels.library import kernels
from whimbrel.model.kernels.team import Team, num_helpers
from whimbrel.model.load import load_model
from whimbrel.model.ops.attention import LayerHook
from whimbrel.model.ops.linear import takes_any_rows
from whimbrel.model.ops.maxsim_device import prepare_kernels
from whimbrel.model.ops.memory import is_out_of_memory, raise_if_lost
from whimbrel.model.ops.nonzero import NonzeroEntries, find_nonzero
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.ops.staging import StagedArrays, start_copy
from whimbrel.model.ops.tile_products import find_tile_products
from whimbrel.model.pooling import Pooling
from whimbrel.model.transformer import Transformer
from whimbrel.outputs.rows import CheckedRows, DeviceRows, OutputRows, RowSelection, to_host
from whimbrel.types.batch import Batch
from whimbrel.types.card import Card, Output
from whimbrel.types.hardware import Hardware
from whimbrel.types.machine_limits import read_limits
from whimbrel.types.plan import Plan
from whimbrel.types.request import OutputName

T = TypeVar("T")

_NICE: Final = 5
"""Added to the nice value of lanes, which gives them a third of the CPU weight of other threads."""
_ONE_CALL: Final = 2**29
"""Multiplications of a batch, some milliseconds of one core, up to which it does not look for helpers between its layers."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedBatch:
    """A batch on the device. `rows` may be read after `done`; None: at once."""

    rows: Mapping[OutputName, Tensor]
    kept: Collection[OutputName]
    """Outputs that stay on the device."""
    finite: Mapping[OutputName, Tensor]
    """Mask of the finite rows, for outputs that were checked on the device."""
    entries: Mapping[OutputName, NonzeroEntries]
    """Nonzero entries of rows over a vocabulary, which stay on the device."""
    selections: Mapping[OutputName, RowSelection]
    tower: int
    done: torch.cuda.Event | None


class Runner:
    """Models of a checkpoint on a device, one for each tower."""

    def __init__(self, checkpoint: Checkpoint, card: Card, plan: Plan) -> None:
        self._device = torch.device(plan.device)
        self._staged = StagedArrays(self._device)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._keeps_vectors = self._copies is not None
        """Token vectors that are only scored stay on the device; a test sets it on a CPU."""
        self._finds_entries = self._copies is not None
        """Nonzero entries of rows over a vocabulary are found on the device; a test sets it on a CPU."""
        self._halves_vectors = plan.dtype in ("bfloat16", "float16")
        """Those of length 1 are kept in float16, if the model computes in half precision. Tensor cores multiply them, at half
        the bytes; rounding moves a number by 2^-11 of itself at most, less than the model's own rounding does. Other vectors
        stay in float32, as they may exceed float16's range."""
        with torch.inference_mode(), loading(plan.num_lanes) as unstable:
            quantization = self._quantization = Quantization() if plan.dtype == "int8" else None
            dtype: torch.dtype = torch.float32 if quantization is not None else getattr(torch, plan.dtype)
            load = partial(load_model, checkpoint.folder, device=self._device, dtype=dtype, sha256=checkpoint.sha256)
            self._cards = card.towers or (card,)
            by_path = {tower.path: replace(tower, towers=card.towers) for tower in self._cards}  # towers may share a model
            loaded = {path: load(tower, quantization=quantization) for path, tower in by_path.items()}
            self.prefix_cache = PrefixCache(plan.prefix_cache_bytes, model=plan.served_name)
            self._models = [loaded[tower.path][0] for tower in self._cards]
            own_products = takes_any_rows(dtype, self._device) and all(isinstance(each, Transformer) for each in self._models)
            piece_tokens = plan.max_batch_tokens if plan.chunked_prefill else None
            self._forward = Forward(
                self._models,
                self._staged.put,
                self.prefix_cache,
                piece_tokens=piece_tokens,
                any_rows=own_products,
                put_rows=self._staged.put_rows,
            )
            self._poolings = [
                {name: Pooling(output, loaded[tower.path][1]) for name, output in tower.all_outputs.items()}
                for tower in self._cards
            ]
            for tower in self._cards:
                if "multi_vector" in tower.outputs and tower.list_template is None:
                    self._prepare_scores(tower.output("multi_vector"))
        own, helpers = kernels() if self._copies is None else None, num_helpers(plan.num_lanes)
        self._team = Team(own.call, helpers, _lower_priority) if own is not None and helpers and own_products else None
        self._multiplications = [12 * len(each.encoder.layers) * each.encoder.hidden_size**2 for each in self._cards]
        """About those of each token, by tower."""
        self.unstable: Sequence[str] = unstable
        """Parts of the model whose bits depend on the batch."""

    def _prepare_scores(self, output: Output) -> None:
        """Choose or compile the products of MaxSim, which takes seconds the first time."""
        if self._copies is None:
            find_tile_products(output.width)
        else:
            halves = self._halves_vectors and output.activation == "normalize"
            prepare_kernels(output.width, torch.float16 if halves else torch.float32, self._device)

    def quantize(self) -> None:
        """Round the weights of a model in int8, which has computed in float32 so far. No batch may run meanwhile."""
        assert self._quantization is not None
        with torch.inference_mode():
            self._quantization.finish()
        for model in self._models:
            if isinstance(model, Transformer):
                model.join_parts()

    def init_thread(self, *, urgent: bool = False) -> None:
        """Set up a lane's thread before its first launch: on a CPU, one intra-op thread and, unless `urgent`, a lower priority.

        Lanes are the parallelism: an operation split over threads would wait for the slowest, and its bits would depend on
        their number. Lanes yield to threads that read, tokenize and write, whose work is short.
        """
        if self._device.type == "cpu":
            torch.set_num_threads(1)
            if not urgent:
                _lower_priority()
        else:
            torch.cuda.set_device(self._device)

    def launch(
        self, batch: Batch, selections: Mapping[OutputName, RowSelection], between_layers: LayerHook = None
    ) -> LaunchedBatch:
        """Run a batch. Raises MemoryError, or Unavailable if the device is lost.

        `between_layers` is called between any two layers, in this thread, and may launch another batch.
        """
        if self._team is None:
            return self._map_errors(lambda: self._launch(batch, selections, between_layers))
        with self._team.batch() as look_for_helpers:

            def between() -> None:
                if between_layers is not None:
                    between_layers()
                look_for_helpers()

            small = between_layers is None and batch.num_tokens * self._multiplications[batch.tower] < _ONE_CALL
            return self._map_errors(lambda: self._launch(batch, selections, None if small else between))

    @torch.inference_mode()
    def _launch(self, batch: Batch, selections: Mapping[OutputName, RowSelection], between_layers: LayerHook) -> LaunchedBatch:
        with self._staged.of_batch(batch, selections):
            hidden_RD = self._forward(batch, between_layers)
            poolings = self._poolings[batch.tower]
            rows: dict[OutputName, Tensor] = {
                name: poolings[name](hidden_RD, selection, self._staged.put) for name, selection in selections.items()
            }
        return self._copy_back(rows, selections, batch.tower)

    def _copy_back(
        self, rows: Mapping[OutputName, Tensor], selections: Mapping[OutputName, RowSelection], tower: int
    ) -> LaunchedBatch:
        """Copy rows to the host, with a mask of those that are finite; of outputs that stay on the device, only the mask."""
        kept: set[OutputName] = {name for name in rows if selections[name].keep_on_device and self._keeps_vectors}
        on_gpu, output = self._copies is not None, self._cards[tower].output
        of_tokens: set[OutputName] = {name for name in rows if on_gpu and output(name).rows == "token"}
        checked = kept | of_tokens
        finite: dict[OutputName, Tensor] = {name: torch.isfinite(rows[name]).all(dim=1) for name in checked}
        found: dict[OutputName, NonzeroEntries] = {
            name: find_nonzero(rows_PV) for name, rows_PV in rows.items() if self._has_entries(tower, name, selections[name])
        }
        rows = {name: self._halved(x, name, selections[name], tower) if name in kept else x for name, x in rows.items()}
        if self._copies is None:
            return LaunchedBatch(rows, kept, finite, found, selections, tower, None)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            stays = kept | found.keys()
            pending: dict[OutputName, Tensor] = {name: x if name in stays else self._to_host(x) for name, x in rows.items()}
            finite = {name: self._to_host(mask_P) for name, mask_P in finite.items()}
            entries: dict[OutputName, NonzeroEntries] = {name: each.map(self._to_host) for name, each in found.items()}
            done = torch.cuda.Event()
            done.record(self._copies)
        return LaunchedBatch(pending, kept, finite, entries, selections, tower, done)

    def _has_entries(self, tower: int, name: OutputName, selection: RowSelection) -> bool:
        return self._finds_entries and self._cards[tower].output(name).rows == "vocabulary" and selection.groups_G is None

    def _halved(self, rows_PD: Tensor, name: OutputName, selection: RowSelection, tower: int) -> Tensor:
        """Return vectors of length 1 in float16, if the model computes in half precision."""
        is_normalized = self._cards[tower].output(name).activation == "normalize" and selection.activated_P.all()
        return rows_PD.half() if self._halves_vectors and is_normalized else rows_PD

    def _to_host(self, x: Tensor) -> Tensor:
        assert self._copies is not None
        x.record_stream(self._copies)
        return start_copy(x)

    def collect(self, pending: LaunchedBatch) -> dict[OutputName, OutputRows]:
        """Wait for a launched batch and return its rows, in the order of its seqs. Raises MemoryError and Unavailable."""
        if (done := pending.done) is not None:
            self._map_errors(done.synchronize)
        outputs: dict[OutputName, OutputRows] = {}
        for name, rows_PD in pending.rows.items():
            if name in pending.kept:
                outputs[name] = DeviceRows(rows_PD, pending.finite[name].numpy())
            elif name in pending.finite:
                outputs[name] = CheckedRows(rows_PD.numpy(), pending.finite[name].numpy())
            elif name in pending.entries and (sparse := pending.entries[name].to_sparse()) is not None:
                outputs[name] = sparse
            else:
                on_host_PD = self._map_errors(rows_PD.cpu)  # of rows over a vocabulary a copy, if there was no room for entries
                outputs[name] = to_host(self._cards[pending.tower].output(name), pending.selections[name], on_host_PD.numpy())
        return outputs

    def _map_errors(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise_if_lost(error, self._device)
                raise
            message = str(error)
        # The exception held the frames, and these the tensors of the failed batch; only here are they freed.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(message)


def probe() -> Hardware:
    """Return the resources that this process may use."""
    gpus, gpu_note = find_gpus()
    processor = cpu()  # before the self-test, which makes oneDNN's first primitive
    version = str(torch.__version__)  # of a class of its own
    limits = read_limits()
    return Hardware(
        limits.usable_cores,
        processor,
        own.name if (own := kernels()) is not None else "",
        gpus,
        gpu_note,
        has_driver(),
        torch=version,
        torch_note=version_note(version, prepacked_problem()),
        memory=limits.usable_memory,
    )


def gpu_names() -> tuple[str, ...]:
    """Return a line for each GPU: its name, memory and the CUDA version of PyTorch."""
    numbers = [int(gpu.name.partition(":")[2]) for gpu in find_gpus()[0]]
    properties: list[Any] = [cast(Any, torch.cuda).get_device_properties(number) for number in numbers]
    return tuple(f"{each.name} ({each.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda})" for each in properties)


def _lower_priority() -> None:
    if sys.platform == "linux":  # has a priority per thread
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE
        with suppress(OSError):  # a sandbox may forbid even this
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, nice))
