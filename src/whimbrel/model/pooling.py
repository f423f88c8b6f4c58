"""Pooling: hidden states to the rows of the requested outputs, with heads, truncation and activation.

All values are float32. `outputs/rows.py` selects the tokens of each row; an excluded prompt moves the start of a row, except
for "lasttoken". The modes are those of sentence_transformers/sentence_transformer/modules/pooling.py (6.2).

Shapes: R rows of a batch, T tokens, P pooled rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

import torch
from torch import Tensor

from whimbrel.model.kernels.library import kernels_for
from whimbrel.model.ops.activations import in_blocks
from whimbrel.model.ops.linear import round_up_rows
from whimbrel.types.card import Output, PoolingMode
from whimbrel.types.heads import Head, OutputActivation

_LEAST_NORM: Final = 1e-12
"""Least divisor, as in torch.nn.functional.normalize."""

HeadFunction: TypeAlias = Callable[[Tensor], Tensor]
"""(R, in) -> (R, out), where R is a result of `round_up_rows`."""
LoadedHead: TypeAlias = Callable[..., Tensor]
"""HeadFunction; for an MlmHead, a `Decoder`; for a SpanHead, a `SpanScorer`."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRowSelection:
    """Row selection (`outputs.rows.RowSelection`) on the device: the tokens of each of P rows, and its settings."""

    origins_P: Tensor
    starts_P: Tensor
    ends_P: Tensor
    widths_P: Tensor | None
    activated_P: Tensor
    all_activated: bool | None
    """True if all rows are activated, False if none; None: some are."""
    tokens_R: Tensor | None = None
    """Tokens of rows over the vocabulary, padded for linear layers; None: other outputs."""
    with_logits: bool = False
    marks_B2: list[tuple[int, int]] | None = None
    """Labels and words of each seq, of rows of spans."""


class Pooling:
    """Pooling of one output, with its loaded heads."""

    def __init__(self, output: Output, heads: Mapping[Head, LoadedHead]) -> None:
        self._output = output
        self._token_head: list[HeadFunction] = [heads[head] for head in output.token_head]
        self._head: list[HeadFunction] = [heads[head] for head in output.head]
        self._spans = None if output.spans is None else heads[output.spans]
        self._vocabulary = None if output.vocabulary is None else heads[output.vocabulary]

    def __call__(self, hidden_RD: Tensor, rows: DeviceRowSelection) -> Tensor:
        """Return the rows, (P, width); columns from widths_P[i] on are zero in row i.

        With `rows.with_logits`, as many columns follow, of the values before the activation.
        """
        if self._spans is not None:
            assert rows.marks_B2 is not None
            return self._spans(hidden_RD[rows.starts_P], rows.activated_P, rows.marks_B2)
        if self._vocabulary is not None:
            return self._decode(self._vocabulary, hidden_RD, rows)
        pools = self._output.modes
        x_PD = self._pool(hidden_RD, rows) if pools else hidden_RD[rows.starts_P]
        x_PD = apply_heads(x_PD, self._head if pools else [*self._token_head, *self._head])
        if rows.widths_P is not None:
            x_PD = truncate_columns(x_PD, rows.widths_P)
        if rows.all_activated is False or self._output.activation == "identity":
            return x_PD
        activated_PD = ACTIVATIONS[self._output.activation](x_PD)
        if not rows.all_activated:
            activated_PD = torch.where(rows.activated_P[:, None], activated_PD, x_PD)
        return torch.cat((activated_PD, x_PD), dim=1) if rows.with_logits else activated_PD

    def _decode(self, decoder: LoadedHead, hidden_RD: Tensor, rows: DeviceRowSelection) -> Tensor:
        """Return rows over the vocabulary. Only selected tokens are decoded: the decoder costs as much as several layers."""
        assert rows.tokens_R is not None
        x_RD = hidden_RD[rows.tokens_R]
        for head in self._token_head:
            x_RD = head(x_RD)
        return decoder(x_RD, rows.ends_P - rows.starts_P)

    def _pool(self, hidden_RD: Tensor, rows: DeviceRowSelection) -> Tensor:
        for head in self._token_head:
            hidden_RD = head(hidden_RD)
        parts = [_POOLS[mode](hidden_RD, rows) for mode in self._output.modes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def apply_heads(x_PD: Tensor, heads: Sequence[HeadFunction]) -> Tensor:
    """Return rows that went through all heads, which see a number of rows that `round_up_rows` gives."""
    if not heads:
        return x_PD
    num_rows = x_PD.shape[0]
    x_PD = torch.nn.functional.pad(x_PD, (0, 0, 0, round_up_rows(num_rows) - num_rows))
    for head in heads:
        x_PD = head(x_PD)
    return x_PD[:num_rows]


def guard_rows(layer: HeadFunction) -> HeadFunction:
    """Set rows to NaN whose input is not finite: most activations map infinity, and oneDNN's ReLU NaN, to finite values."""
    return lambda x_RI: layer(x_RI).masked_fill_(~x_RI.isfinite().all(-1, keepdim=True), torch.nan)


def segment_reduce(x_TD: Tensor, starts_P: Tensor, ends_P: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Reduce tokens starts_P[i] to ends_P[i] for each i, in token order -> (P, D). The ranges are in order and disjoint.

    An empty range gives 0 for "sum" and -inf for "max".
    """
    offsets = torch.cat((starts_P.new_zeros(1), torch.stack((starts_P, ends_P), dim=1).flatten()))
    return torch.segment_reduce(x_TD.float(), how, offsets=offsets.long(), axis=0)[1::2].contiguous()


def normalize(x_PD: Tensor) -> Tensor:
    """Divide rows by their Euclidean norm. A row of zeros stays zero; a row whose norm overflows becomes NaN."""
    if (own := kernels_for(x_PD)) is not None and x_PD.dtype == torch.float32:
        return own.normalize(x_PD, _LEAST_NORM)
    norms_P1 = cast(Tensor, x_PD.norm(dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    return x_PD / norms_P1.clamp_min(_LEAST_NORM).masked_fill(norms_P1.isinf(), torch.nan)


def truncate_columns(x_PD: Tensor, widths_P: Tensor) -> Tensor:
    """Zero all but the first widths_P[i] columns of row i.

    A slice would not let a batch mix widths, and the bits of a row's norm would depend on its width.
    """
    columns = torch.arange(x_PD.shape[1], device=x_PD.device)
    return x_PD.masked_fill(columns >= widths_P[:, None], 0.0)


def _mean(x_TD: Tensor, rows: DeviceRowSelection) -> Tensor:
    if (own := kernels_for(x_TD)) is not None and x_TD.dtype == torch.float32:
        return own.means(x_TD.contiguous(), rows.starts_P.contiguous(), rows.ends_P.contiguous())
    return segment_reduce(x_TD, rows.starts_P, rows.ends_P, "sum") / (rows.ends_P - rows.starts_P)[:, None]


def _mean_sqrt_len(x_TD: Tensor, rows: DeviceRowSelection) -> Tensor:
    return segment_reduce(x_TD, rows.starts_P, rows.ends_P, "sum") / (rows.ends_P - rows.starts_P)[:, None].float().sqrt()


def _weighted_mean(x_TD: Tensor, rows: DeviceRowSelection) -> Tensor:
    """Return means in which token i of its seq weighs i, from 1 on; tokens of an excluded prompt are counted."""
    positions = torch.arange(x_TD.shape[0], device=x_TD.device, dtype=torch.int32)
    row_T = torch.searchsorted(rows.ends_P, positions, right=True).clamp_(max=rows.ends_P.shape[0] - 1)
    weights_T1 = (positions - rows.origins_P[row_T] + 1).float()[:, None]
    total_P1 = segment_reduce(weights_T1, rows.starts_P, rows.ends_P, "sum")
    return segment_reduce(x_TD * weights_T1, rows.starts_P, rows.ends_P, "sum") / total_P1


_POOLS: Final[Mapping[PoolingMode, Callable[[Tensor, DeviceRowSelection], Tensor]]] = {
    "cls": lambda x_TD, rows: x_TD[rows.starts_P],
    "max": lambda x_TD, rows: segment_reduce(x_TD, rows.starts_P, rows.ends_P, "max"),
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x_TD, rows: x_TD[rows.ends_P - 1],
}


def _nan_unless_finite(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation that maps infinity to NaN, which is detected, instead of a probability."""
    return lambda x_PD: activation(x_PD).masked_fill_(~x_PD.isfinite(), torch.nan)


ACTIVATIONS: Final[Mapping[OutputActivation, Callable[[Tensor], Tensor]]] = {
    "normalize": normalize,
    "sigmoid": _nan_unless_finite(lambda x_PD: in_blocks(torch.sigmoid, x_PD)),
    "softmax": _nan_unless_finite(lambda x_PD: x_PD.softmax(-1)),
    "relu": torch.relu,
    "identity": lambda x_PD: x_PD,
}
