"""Keys and values that outlive the rows which they belong to: those of shared prefixes, and of a long text's earlier pieces.

A `KeySource` gives the queries of a group of equally long seqs all keys and values that they attend to: those of earlier tokens
and their own. Earlier tokens were computed before, in the same layer of this batch or in another batch.

Shapes: B seqs of a group, L tokens, K key heads, H head width, R rows of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

KeySource: TypeAlias = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, keys, values), of the group's own tokens, (B, L, K, H) -> all keys and values that they attend to, in order."""
KeptKeys: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of a prefix by layer, (L, K, H) each, in the form in which attention takes them."""


def keeping(kept: Sequence[KeptKeys]) -> KeySource:
    """Return the source of prefixes themselves. It fills `kept` layer by layer."""

    def keep(layer: int, k_BLKH: Tensor, v_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        for each, k_LKH, v_LKH in zip(kept, k_BLKH, v_BLKH, strict=True):
            each[layer] = k_LKH.clone(), v_LKH.clone()  # a view would keep all rows of the batch
        return k_BLKH, v_BLKH

    return keep


@dataclass(frozen=True, slots=True, eq=False)
class AfterPrefixes:
    """Source of seqs of which each follows its prefix. All prefixes have one length."""

    prefixes: Sequence[KeptKeys]

    def __call__(self, layer: int, k_BLKH: Tensor, v_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = zip(*(each[layer] for each in self.prefixes), strict=True)
        return _concatenate(keys, k_BLKH), _concatenate(values, v_BLKH)


def pieces(bounds: Sequence[tuple[int, int]]) -> list[KeySource]:
    """Return the sources of the pieces of one text, for the bounds (first, last) of each. They share the memory of a layer."""
    num_rows, buffers = bounds[-1][1], list[Tensor]()

    def append(first: int, _: int, k_1LKH: Tensor, v_1LKH: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows from `first` on, and return all rows until their end. The next layer writes over them."""
        if not buffers:
            buffers.extend(x.new_empty(1, x.shape[2], num_rows, x.shape[3]).transpose(1, 2) for x in (k_1LKH, v_1LKH))
        last = first + k_1LKH.shape[1]
        for buffer_1RKH, rows in zip(buffers, (k_1LKH, v_1LKH), strict=True):
            buffer_1RKH[:, first:last] = rows
        return buffers[0][:, :last], buffers[1][:, :last]

    return [partial(append, first) for first, _ in bounds]


def _concatenate(before: Sequence[Tensor], own_BLKH: Tensor) -> Tensor:
    """Return the prefix and the own rows of each seq, (B, L, K, H). Each head's rows are contiguous, as attention wants."""
    seqs, length, heads, width = own_BLKH.shape
    num_before = len(before[0])
    out_BLKH = own_BLKH.new_empty(seqs, heads, num_before + length, width).transpose(1, 2)
    if all(each is before[0] for each in before):
        out_BLKH[:, :num_before] = before[0]  # one copy for all
    else:
        for number, before_LKH in enumerate(before):
            out_BLKH[number, :num_before] = before_LKH
    out_BLKH[:, num_before:] = own_BLKH
    return out_BLKH
