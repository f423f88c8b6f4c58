"""Attention of a batch by the ragged kernel for GPUs: keys, tiles and biases as the kernel reads them.

The kernel runs where flash attention lacks something: biases, caps, and windows over the first tokens alone.
It runs behind shared prefixes too, because it reads their kept keys in place: seqs share them, and nothing is copied for each
seq. A batch has one table of tiles for all its layers, which is made on the host and copied once, without a wait.

Shapes: R rows, S seqs, N query heads, K key heads, H head width, W tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.model.ops.attention_tiles import MAX_WIDTH, STEP, make_tiles, suits
from whimbrel.model.ops.kept_keys import AfterPrefixes, KeptKeys
from whimbrel.types.arrays import Int64Array

if TYPE_CHECKING:
    from whimbrel.model.ops.attention import AttentionLayout, ScoreOptions


@dataclass(frozen=True, slots=True)
class Variant:
    """Properties for which the kernel is compiled."""

    dtype: torch.dtype
    width: int
    causal: bool
    window: bool
    capped: bool
    biased: bool
    sloped: bool
    """Bias that is computed from slopes, not read from a band."""
    after_prefixes: bool

    def __str__(self) -> str:
        forms = [each.name.replace("_", " ") for each in fields(self) if getattr(self, each.name) is True]
        return f"{self.width} columns in {str(self.dtype).removeprefix('torch.')} ({', '.join(forms) or 'plain'})"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTiles:
    """Tiles of a batch, on the device."""

    table_W8: Tensor
    num_small: int
    reach: int
    """A distance that no key has from a query."""


def follows_prefixes(layout: AttentionLayout) -> bool:
    return any(isinstance(each, AfterPrefixes) for each in layout.sources.values())


def variant_of(v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Variant | None:
    """Return the variant that computes `scores`; None: the kernel has none."""
    width = v_RKH.shape[2] + -v_RKH.shape[2] % STEP
    if scores.tables is not None or width > MAX_WIDTH:
        return None
    bias = scores.bias
    return Variant(
        v_RKH.dtype,
        width,
        causal=scores.causal,
        window=scores.window is not None,
        capped=scores.softcap is not None,
        biased=bias is not None,
        sloped=bias is not None and bias.slopes_N is not None,
        after_prefixes=follows_prefixes(layout),
    )


def attend_ragged(q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, scores: ScoreOptions) -> Tensor:
    """Return softmax(scores) v within each seq, (R, N * H) in the dtype of v. Rows after the tokens are 0."""
    from whimbrel.model.ops.attention_triton import attend_triton

    width = q_RNH.shape[2]
    q, k, v = (_fit(x.to(v_RKH.dtype)) for x in (q_RNH, k_RKH, v_RKH))
    prefixes, own = _read_sources(k, v, layout, scores.layer)
    distinct = [each[scores.layer] for each in {id(each): each for _, each in prefixes}.values()]
    if not layout.tiles:
        seqs_S7 = _seqs(layout, prefixes, scores.layer) if own is None else _piece(layout, own[0].shape[0])
        layout.tiles.append(_put_tiles(seqs_S7, q.device))
    tiles, bias = layout.tiles[0], scores.bias
    out_RNH = q.new_empty(q.shape)
    out_RNH[layout.num_tokens :] = 0
    attend_triton(
        q, own or (k, v), out_RNH, tiles.table_W8, tiles.num_small, kept=_joined(distinct) if distinct else None,
        scale=scores.scale, causal=scores.causal, window=scores.window, softcap=scores.softcap,
        band_ND=None if bias is None or bias.slopes_N is not None else bias.band(tiles.reach),
        slopes_N=None if bias is None else bias.slopes_N,
    )  # fmt: skip
    return out_RNH[..., :width].flatten(1)


def _fit(x_RNH: Tensor) -> Tensor:
    """Return heads as the kernel reads them."""
    if missing := -x_RNH.shape[2] % STEP:
        x_RNH = F.pad(x_RNH, (0, missing))
    return x_RNH if suits(x_RNH) else x_RNH.clone(memory_format=torch.contiguous_format)


def _read_sources(
    k_RKH: Tensor, v_RKH: Tensor, layout: AttentionLayout, layer: int
) -> tuple[list[tuple[int, KeptKeys]], tuple[Tensor, Tensor] | None]:
    """Return the first row and the prefix of each seq that follows one, and keys and values of a piece of a text.

    A piece is a batch of its own, which attends to all rows of the text until its end. None: the batch is none.
    """
    prefixes: list[tuple[int, KeptKeys]] = []
    piece = None
    for start, count, length, _ in layout.equal_length_groups:
        source = layout.sources.get(start)
        if isinstance(source, AfterPrefixes):
            prefixes += zip(range(start, start + count * length, length), source.prefixes, strict=True)
        elif source is not None:
            rows = slice(start, start + count * length)
            k_BLKH, v_BLKH = source(layer, *(x[rows].view(count, length, *x.shape[1:]) for x in (k_RKH, v_RKH)))
            if k_BLKH.shape[1] > length:
                assert len(layout.equal_length_groups) == count == 1
                piece = k_BLKH[0], v_BLKH[0]
    return prefixes, piece


def _joined(kept: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return keys and values of prefixes: those of one as they lie, those of several one after another."""
    if len(kept) == 1:
        return kept[0]
    keys, values = zip(*kept, strict=True)
    return torch.cat(keys), torch.cat(values)


def _seqs(layout: AttentionLayout, prefixes: Sequence[tuple[int, KeptKeys]], layer: int) -> Int64Array:
    """Return the fields of each seq's tiles. Prefixes stand one after another, in the order of `prefixes`."""
    start_S, length_S, _, keys_S, _ = layout.kernel_seqs.T
    seqs_S7 = np.stack((start_S, length_S, *[np.zeros_like(start_S)] * 5), axis=1)
    seqs_S7[:, 3], seqs_S7[:, 4] = start_S, keys_S
    kept_rows: dict[int, int] = {}
    num_rows = 0
    seq_at = dict(zip(start_S.tolist(), range(len(start_S)), strict=True))
    for start, prefix in prefixes:
        size = prefix[layer][0].shape[0]
        if id(prefix) not in kept_rows:
            kept_rows[id(prefix)] = num_rows
            num_rows += size
        seqs_S7[seq_at[start], [2, 5, 6]] = size, kept_rows[id(prefix)], size
    return seqs_S7


def _piece(layout: AttentionLayout, num_keys: int) -> Int64Array:
    """Return the fields of the only seq, a piece of a text, which ends with the last of its keys."""
    (seq,) = layout.kernel_seqs.tolist()
    return np.array([(seq[0], seq[1], num_keys - seq[1], 0, num_keys, 0, 0)], np.int64)


def _put_tiles(seqs_S7: Int64Array, device: torch.device) -> DeviceTiles:
    tiles = make_tiles(seqs_S7)
    table_W8 = torch.from_numpy(tiles.table_W8)  # pyright: ignore[reportUnknownMemberType]
    if device.type == "cuda":
        table_W8 = table_W8.pin_memory().to(device, non_blocking=True)
    ends_S = np.maximum(seqs_S7[:, 1] + seqs_S7[:, 2], seqs_S7[:, 4] + seqs_S7[:, 6])
    return DeviceTiles(table_W8, tiles.num_small, int(ends_S.max(initial=1)))
