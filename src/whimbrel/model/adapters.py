"""LoRA adapters: loading of the low-rank matrices that they add to the weights.

Three layouts are read. Stacked: all adapters of a checkpoint in one tensor beside the weight, as torch's parametrizations name
them (Source: jinaai/xlm-roberta-flash-implementation on the Hub, modeling_lora.py). In folders of the checkpoint, or anywhere,
if the user adds them: each adapter as PEFT saves it (Source: peft/tuners/lora/layer.py and utils/other.py, 0.21;
jinaai/jina-embeddings-v3-hf). Those of the user may differ in their ranks and in the layers that they change.

Shapes: N adapters, R highest rank, K columns of all adapters (N times R, padded), I input and O output columns, V entries.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.errors import CheckpointError
from whimbrel.model.families import WeightNames, WeightRole
from whimbrel.model.ops.linear import LowRank
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder, LoraAdapter

T = TypeVar("T")
_Pair: TypeAlias = tuple[Tensor, Tensor]
"""A and B."""

_FILE: Final = "adapter_model.safetensors"
_LINEAR_KINDS: Final = ("lora_A.weight", "lora_B.weight")
_TABLE_KINDS: Final = ("lora_embedding_A", "lora_embedding_B")
_PREFIX: Final = "base_model.model."
_COLUMN_STEP: Final = 16


@dataclass(frozen=True, slots=True)
class _Folder:
    """The matrices of one adapter, in a folder of its own unless it is stacked."""

    weights: Weights
    names: WeightNames
    adapter: LoraAdapter | None = None
    """The user's settings; None: those of the checkpoint, for every module."""
    number: int | None = None
    """Index in the stack of all adapters beside each weight; None: this one is not stacked."""

    def matrices(self, spec: Encoder, name: str, rows: int, columns: int, *, table: bool = False) -> _Pair:
        """Return A, (R, columns), and B times the scale, (rows, R); zeros where the user's adapter changes nothing."""
        if self.number is not None:
            return self._stacked(spec, name, rows, columns, table=table)
        a, b = (f"{name}.{kind}" for kind in (_TABLE_KINDS if table else _LINEAR_KINDS))
        if self.adapter is None:
            rank, scale = spec.adapter_rank, spec.adapter_scale
        elif not self.changes([name]):
            return torch.zeros(spec.adapter_rank, columns), torch.zeros(rows, spec.adapter_rank)
        else:
            rank, scale = _settings(self.adapter, name, self.names.prefixes)
        missing = spec.adapter_rank - rank
        down, up = self.weights.take(a, rank, columns), self.weights.take(b, rows, rank) * scale
        return F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))

    def _stacked(self, spec: Encoder, name: str, rows: int, columns: int, *, table: bool) -> _Pair:
        rank = spec.adapter_rank
        shapes = ((columns, rank), (rank, rows)) if table else ((rank, columns), (rows, rank))
        a, b = (
            self.weights.take(f"{name}.parametrizations.weight.0.{kind}", len(spec.adapters), *shape)[self.number]
            for kind, shape in zip(("lora_A", "lora_B"), shapes, strict=True)
        )
        return (a.T, b.T * spec.adapter_scale) if table else (a, b * spec.adapter_scale)

    def blocks(
        self, spec: Encoder, names: Sequence[str], rows: Sequence[int], columns: int, order: Tensor | None
    ) -> list[_Pair]:
        """Return A and B of each block of rows. Blocks of one weight share its A."""
        if len(names) > 1:  # these are in the order of the blocks, however the weight is stored
            return [self.matrices(spec, name, num, columns) for name, num in zip(names, rows, strict=True)]
        a, b = self.matrices(spec, names[0], sum(rows), columns)
        blocks = torch.split(b if order is None else b[order], list(rows))
        return [(a, block) for block in blocks]

    def changes(self, names: Sequence[str]) -> bool:
        return any(self.weights.has(f"{name}.{kind}") for name in names for kind in (*_LINEAR_KINDS, *_TABLE_KINDS))


class Adapters:
    """The adapters of a model while it is loaded."""

    def __init__(
        self, spec: Encoder, names: WeightNames, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._weights = weights
        self._folders: list[_Folder] = []
        if spec.adapter_paths:
            assert names.adapters is not None
            for path in spec.adapter_paths:
                file = weights.beside(path, _FILE, names.adapters.prefixes)
                self._folders.append(_Folder(file, names.adapters.select(file.has, "lora_A.weight")))
        elif not spec.lora:
            self._folders = [_Folder(weights, names, number=number) for number in range(len(spec.adapters))]
        prefixes = (_PREFIX, *(_PREFIX + prefix for prefix in names.prefixes))
        for adapter in spec.lora:
            if not Path(adapter.folder, _FILE).is_file():
                message = f"not found in {adapter.folder}; PEFT writes it, unless it was told to write a pickle."
                raise CheckpointError(message, file=_FILE)
            file = Weights(Path(adapter.folder), prefixes=prefixes, single=_FILE, on_meta=device.type == "meta")
            folder = _Folder(weights.enter_context(file), names, adapter)
            self._folders.append(replace(folder, names=_names_in(folder, len(spec.layers))))

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
        if not self._spec.adapters or not self.changes(part, i):
            return None
        return self._load([folder.names.for_layer(part, i) for folder in self._folders], rows, columns, order)

    def named(self, names: Sequence[str], rows: Sequence[int], columns: int) -> LowRank | None:
        """Load the matrices of layers that WeightNames does not list, which only adapters of the user change."""
        if not self._spec.lora or not any(folder.changes(names) for folder in self._folders):
            return None
        return self._load([names] * len(self._folders), rows, columns, None)

    def _load(self, names: Sequence[Sequence[str]], rows: Sequence[int], columns: int, order: Tensor | None) -> LowRank:
        """Load the matrices of a layer, which each folder calls by its own names."""
        if all(len(own) == 1 for own in names):
            rows = (sum(rows),)
        blocks = [
            folder.blocks(self._spec, own, rows, columns, order) for folder, own in zip(self._folders, names, strict=True)
        ]
        pairs = [_side_by_side(each) for each in zip(*blocks, strict=True)]
        down: Tensor = torch.cat([down for down, _ in pairs])
        up: Tensor = cast(Any, torch).block_diag(*(up for _, up in pairs))
        return LowRank(down.to(self._device, self._dtype), up.to(self._device, self._dtype))

    def table(self, part: WeightRole, rows: int, columns: int) -> LowRank | None:
        """Load the matrices of an embedding table with `rows` entries."""
        if not self._spec.adapters or not self.changes(part, 0):
            return None
        self._check_tables(part, rows, columns)
        named = [(folder, folder.names.for_layer(part, 0)[0]) for folder in self._folders]
        down, up = _side_by_side([folder.matrices(self._spec, name, columns, rows, table=True) for folder, name in named])
        table_VK = down.T.contiguous().to(self._device, self._dtype)
        return LowRank(table_VK, up.to(self._device, self._dtype), table=True)

    def finish(self) -> list[str]:
        """Reject other tensors in the adapters' files. Return the modules of those that hidden states do not depend on.

        In the stacked layout, the owner of the weights rejects tensors.
        """
        folders = [folder for folder in self._folders if folder.number is None]
        left = [name for folder in folders for name in folder.weights.finish(folder.names.unused)]
        return [re.sub(r"\.lora_\w+(\.weight)?$", "", name) for name in left]

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

    def changes(self, part: WeightRole, i: int) -> bool:
        """Return whether any adapter changes a layer. Those of a checkpoint change all of one part, or none."""
        if not self._spec.lora:
            return any(self._folders[0].names.for_layer(part, i))
        return any(folder.changes(folder.names.for_layer(part, i)) for folder in self._folders)


def _side_by_side(pairs: Sequence[_Pair]) -> _Pair:
    """Return A of all adapters, (K, columns), and B, (rows, K)."""
    down, up = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
    missing = -down.shape[0] % _COLUMN_STEP
    return F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))


def _names_in(folder: _Folder, num_layers: int) -> WeightNames:
    """Return the names that a folder's layers have: those of transformers' class or those of the checkpoint."""
    other = folder.names.in_transformers
    parts: tuple[WeightRole, ...] = ("qkv", "out", "up", "down")
    if other and any(folder.changes(other.for_layer(part, i)) for i in range(num_layers) for part in parts):
        return other
    return folder.names


def _settings(adapter: LoraAdapter, name: str, prefixes: Sequence[str]) -> tuple[int, float]:
    """Return the rank and the scale of an adapter in the module called `name`."""
    names = (name, *(prefix + name for prefix in prefixes))
    rank = _of_pattern(adapter.rank_pattern, names, adapter.rank)
    alpha = _of_pattern(adapter.alpha_pattern, names, adapter.alpha)
    return rank, alpha / (rank**0.5 if adapter.by_root else rank)


def _of_pattern(patterns: Mapping[str, T], names: Sequence[str], default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name. Source: peft, `get_pattern_key`."""
    return next(
        (value for pattern, value in patterns.items() if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)),
        default,
    )
