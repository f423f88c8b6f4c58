"""LoRA adapters: loading of the low-rank matrices that they add to the weights.

Three layouts are read. Stacked: all adapters of a checkpoint in one tensor beside the weight, as torch's parametrizations name
them (Source: jinaai/xlm-roberta-flash-implementation on the Hub, modeling_lora.py). In folders of the checkpoint, or anywhere,
if the user adds them: each adapter as PEFT saves it (Source: peft/tuners/lora/layer.py and utils/other.py, 0.21;
jinaai/jina-embeddings-v3-hf). Those of the user may differ in their ranks and in the layers that they change.

Shapes: N adapters, R highest rank, K columns of all adapters (N times R, padded), I input and O output columns, V entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.errors import CheckpointError
from whimbrel.model.families import WeightNames, WeightRole
from whimbrel.model.ops.linear import LowRank
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder, LoraAdapter

T = TypeVar("T")

_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_COLUMN_STEP: Final = 16


@dataclass(frozen=True, slots=True)
class _Folder:
    """The matrices of one adapter."""

    weights: Weights
    names: WeightNames
    adapter: LoraAdapter | None
    """The user's settings; None: those of the checkpoint, for every module."""

    def matrices(self, spec: Encoder, name: str, rows: int, columns: int, *, table: bool) -> tuple[Tensor, Tensor]:
        """Return A, (R, columns), and B times the scale, (rows, R); zeros where the user's adapter changes nothing."""
        a, b = (
            f"{name}.{kind}"
            for kind in (("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight"))
        )
        if self.adapter is None:
            rank, scale = spec.adapter_rank, spec.adapter_scale
        elif not self.weights.has(a) and not self.weights.has(b):
            return torch.zeros(spec.adapter_rank, columns), torch.zeros(rows, spec.adapter_rank)
        else:
            rank, scale = _settings(self.adapter, name)
        missing = spec.adapter_rank - rank
        down, up = self.weights.take(a, rank, columns), self.weights.take(b, rows, rank) * scale
        return F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))


class Adapters:
    """The adapters of a model while it is loaded."""

    def __init__(
        self, spec: Encoder, names: WeightNames, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._weights = weights
        self._names = names
        self._folders: list[_Folder] = []
        self._stack = ExitStack()
        if spec.adapter_paths:
            assert names.adapters is not None
            for path in spec.adapter_paths:
                file = weights.beside(path, _FILE, names.adapters.prefixes)
                self._folders.append(_Folder(file, names.adapters.select(file.has, "lora_A.weight"), None))
        prefixes = (_PREFIX, *(_PREFIX + prefix for prefix in names.prefixes))
        for adapter in spec.lora:
            if not Path(adapter.folder, _FILE).is_file():
                message = f"not found in {adapter.folder}; PEFT writes it, unless it was told to write a pickle."
                raise CheckpointError(message, file=_FILE)
            file = Weights(Path(adapter.folder), prefixes=prefixes, single=_FILE, on_meta=device.type == "meta")
            self._folders.append(_Folder(self._stack.enter_context(file), names, adapter))

    def lora_columns(self) -> Tensor | None:
        """Return the adapter of each of the K columns; None without adapters. Padding columns belong to no adapter."""
        if not self._spec.adapters:
            return None
        width = len(self._spec.adapters) * self._spec.adapter_rank
        lora_columns_K = torch.arange(width + -width % _COLUMN_STEP, dtype=torch.int32) // self._spec.adapter_rank
        return lora_columns_K.to(self._device)

    def linear(
        self, part: WeightRole, i: int, rows: Sequence[int], columns: int, *, order: Tensor | None = None
    ) -> LowRank | None:
        """Load the matrices of a linear layer; `rows` are those of queries, keys and values, of gate and up, or of one weight.

        `order` is that of the weight's own rows, if it is not the stored one.
        """
        if not self._spec.adapters or not self._changes(part, i):
            return None
        names = self._folders[0].names if self._folders else self._names
        if len(names.for_layer(part, i)) == 1:
            rows = (sum(rows),)
        pairs = [self._pair(part, i, number, num_rows, columns) for number, num_rows in enumerate(rows)]
        down = torch.cat([down for down, _ in pairs])
        up, row, column = down.new_zeros(sum(rows), down.shape[0]), 0, 0
        for _, block in pairs:
            up[row : row + block.shape[0], column : column + block.shape[1]] = block
            row, column = row + block.shape[0], column + block.shape[1]
        up = up if order is None else up[order]
        return LowRank(down.to(self._device, self._dtype), up.to(self._device, self._dtype))

    def table(self, part: WeightRole, rows: int, columns: int) -> LowRank | None:
        """Load the matrices of an embedding table with `rows` entries."""
        if not self._spec.adapters or not self._changes(part, 0):
            return None
        self._check_tables(part, rows, columns)
        down, up = self._pair(part, 0, 0, columns, rows, table=True)
        table_VK = down.T.contiguous().to(self._device, self._dtype)
        return LowRank(table_VK, up.to(self._device, self._dtype), table=True)

    def finish(self) -> None:
        """Reject other tensors in the adapters' files. In the stacked layout, the owner of the weights does that."""
        with self._stack:
            for folder in self._folders:
                folder.weights.finish(folder.names.unused)

    def _check_tables(self, part: WeightRole, rows: int, columns: int) -> None:
        """Raise CheckpointError unless the tables that PEFT saves beside an adapter's matrices are those of the model."""
        for folder in self._folders:
            (name,) = folder.names.for_layer(part, 0)
            base = f"{name}.base_layer.weight"
            if folder.adapter is None or not folder.weights.has(base):
                continue
            if not torch.equal(folder.weights.take(base, rows, columns), self._weights.take(f"{name}.weight", rows, columns)):
                message = "is another table than the model's; the adapter belongs to another model."
                raise CheckpointError(message, file=folder.weights.file, key=base)

    def _changes(self, part: WeightRole, i: int) -> bool:
        """Return whether any adapter changes a layer. Those of a checkpoint change all of one part, or none."""
        if not self._spec.lora:
            names = self._folders[0].names if self._folders else self._names
            return any(names.for_layer(part, i))
        return any(
            folder.weights.has(f"{name}.{kind}")
            for folder in self._folders
            for name in folder.names.for_layer(part, i)
            for kind in ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
        )

    def _pair(
        self, part: WeightRole, i: int, number: int, rows: int, columns: int, *, table: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return A of all adapters, (K, columns), and B times the scale, (rows, K)."""
        if self._folders:
            matrices = [
                folder.matrices(self._spec, folder.names.for_layer(part, i)[number], rows, columns, table=table)
                for folder in self._folders
            ]
            down, up = torch.cat([a for a, _ in matrices]), torch.cat([b for _, b in matrices], 1)
        else:
            a_NRI, b_NOR = self._stacked(self._names.for_layer(part, i)[number], rows, columns, table=table)
            down = a_NRI.reshape(-1, columns)
            up = b_NOR.permute(1, 0, 2).reshape(rows, -1) * self._spec.adapter_scale
        missing = -down.shape[0] % _COLUMN_STEP
        return F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))

    def _stacked(self, name: str, rows: int, columns: int, *, table: bool) -> tuple[Tensor, Tensor]:
        at, num, rank = f"{name}.parametrizations.weight.0", len(self._spec.adapters), self._spec.adapter_rank
        if table:
            a = self._weights.take(f"{at}.lora_A", num, columns, rank)
            return a.transpose(1, 2), self._weights.take(f"{at}.lora_B", num, rank, rows).transpose(1, 2)
        return self._weights.take(f"{at}.lora_A", num, rank, columns), self._weights.take(f"{at}.lora_B", num, rows, rank)


def _settings(adapter: LoraAdapter, name: str) -> tuple[int, float]:
    """Return the rank and the scale of an adapter in the module called `name`."""
    rank = _of_pattern(adapter.rank_pattern, name, adapter.rank)
    alpha = _of_pattern(adapter.alpha_pattern, name, adapter.alpha)
    return rank, alpha / (rank**0.5 if adapter.by_root else rank)


def _of_pattern(patterns: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name. Source: peft, `get_pattern_key`."""
    names = (name, f"model.{name}", f"bert.{name}", f"roberta.{name}")
    return next(
        (value for pattern, value in patterns.items() if any(re.match(rf"(.*\.)?({pattern})$", each) for each in names)),
        default,
    )
