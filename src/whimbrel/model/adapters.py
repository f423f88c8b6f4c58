"""LoRA adapters of a checkpoint: loading of the low-rank matrices that they add to the weights.

Two layouts are read. Stacked: all adapters in one tensor beside the weight, as torch's parametrizations name them (Source:
jinaai/xlm-roberta-flash-implementation on the Hub, modeling_lora.py). In folders: each adapter as PEFT saves it (Source:
peft/tuners/lora/layer.py, 0.21; jinaai/jina-embeddings-v3-hf).

Shapes: N adapters, K columns of all adapters (their ranks, padded), r rank of one, I input and O output columns, V entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.families import WeightNames, WeightRole
from whimbrel.model.ops.linear import LowRank
from whimbrel.model.weights import Weights
from whimbrel.types.card import Encoder

_FILE: Final = "adapter_model.safetensors"
_COLUMN_STEP: Final = 16


class Adapters:
    def __init__(
        self, spec: Encoder, names: WeightNames, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._sources = [(weights, names)]
        if spec.adapter_paths:
            assert names.adapters is not None
            files = [weights.beside(path, _FILE, names.adapters.prefixes) for path in spec.adapter_paths]
            self._sources = [(each, names.adapters.select(each.has, "lora_A.weight")) for each in files]

    def lora_columns(self) -> Tensor | None:
        """Return the adapter of each of the K columns; None without adapters. Padding columns belong to no adapter."""
        if not self._spec.adapters:
            return None
        width = len(self._spec.adapters) * self._spec.adapter_rank
        lora_columns_K = torch.arange(width + -width % _COLUMN_STEP, dtype=torch.int32) // self._spec.adapter_rank
        return lora_columns_K.to(self._device)

    def linear(self, part: WeightRole, i: int, rows: Sequence[int], columns: int) -> LowRank | None:
        """Load the matrices of a linear layer; `rows` are those of queries, keys and values, or of the one weight."""
        if not self._spec.adapters:
            return None
        if len(self._sources[0][1].for_layer(part, i)) == 1:
            rows = (sum(rows),)
        pairs = [self._pair(part, i, number, num_rows, columns) for number, num_rows in enumerate(rows)]
        down = torch.cat([down for down, _ in pairs])
        up, row, column = down.new_zeros(sum(rows), down.shape[0]), 0, 0
        for _, block in pairs:
            up[row : row + block.shape[0], column : column + block.shape[1]] = block
            row, column = row + block.shape[0], column + block.shape[1]
        return LowRank(down.to(self._device, self._dtype), up.to(self._device, self._dtype))

    def table(self, part: WeightRole, rows: int, columns: int) -> LowRank | None:
        """Load the matrices of an embedding table with `rows` entries."""
        if not self._spec.adapters:
            return None
        down, up = self._pair(part, 0, 0, columns, rows, table=True)
        table_VK = down.T.contiguous().to(self._device, self._dtype)
        return LowRank(table_VK, up.to(self._device, self._dtype), table=True)

    def finish(self) -> None:
        """Reject other tensors in the adapters' files. In the stacked layout, the owner of the weights does that."""
        if self._spec.adapter_paths:
            for weights, names in self._sources:
                weights.finish(names.unused)

    def _pair(
        self, part: WeightRole, i: int, number: int, rows: int, columns: int, *, table: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return A of all adapters, (K, columns), and B times the scale, (rows, K)."""
        matrices = [
            self._matrices(weights, names.for_layer(part, i)[number], rows, columns, table=table)
            for weights, names in self._sources
        ]
        a_NrI, b_NOr = torch.cat([a for a, _ in matrices]), torch.cat([b for _, b in matrices])
        down = a_NrI.reshape(-1, columns)
        up = b_NOr.permute(1, 0, 2).reshape(rows, -1) * self._spec.adapter_scale
        missing = -down.shape[0] % _COLUMN_STEP
        return F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))

    def _matrices(self, weights: Weights, name: str, rows: int, columns: int, *, table: bool) -> tuple[Tensor, Tensor]:
        rank = self._spec.adapter_rank
        if self._spec.adapter_paths:
            kinds = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight")
            a, b = weights.take(f"{name}.{kinds[0]}", rank, columns), weights.take(f"{name}.{kinds[1]}", rows, rank)
            return a[None], b[None]
        at, num = f"{name}.parametrizations.weight.0", len(self._spec.adapters)
        if table:
            a, b = weights.take(f"{at}.lora_A", num, columns, rank), weights.take(f"{at}.lora_B", num, rank, rows)
            return a.transpose(1, 2), b.transpose(1, 2)
        return weights.take(f"{at}.lora_A", num, rank, columns), weights.take(f"{at}.lora_B", num, rows, rank)
