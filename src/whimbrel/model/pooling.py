"""Pooling: hidden states to the rows of the requested outputs, with heads, truncation and activation.

All values are float32. `outputs/rows.py` selects the tokens of each row; an excluded prompt moves the start of a row, except
for "lasttoken". The modes are those of sentence_transformers/sentence_transformer/modules/pooling.py (6.2).

Shapes: R rows of a batch, T tokens, P pooled rows, D columns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.model.activations import in_blocks
from whimbrel.model.kernels.library import kernels_for
from whimbrel.model.ops.linear import round_up_rows
from whimbrel.outputs.rows import RowSelection
from whimbrel.types.card import Output
from whimbrel.types.choices import PoolingMode
from whimbrel.types.heads import Head, OutputActivation

_LEAST_NORM: Final = 1e-12
"""Least divisor, as in torch.nn.functional.normalize."""

Put: TypeAlias = Callable[[NDArray[Any]], Tensor]
"""Copies an array to the device."""
HeadFunction: TypeAlias = Callable[[Tensor], Tensor]
"""(R, in) -> (R, out), where R is a result of `round_up_rows`."""
LoadedHead: TypeAlias = Callable[..., Tensor]
"""HeadFunction; for an MlmHead, also of the number of rows of each text; for a SpanHead, a `SpanScorer`."""


class Pooling:
    """Pooling of one output, with its loaded heads."""

    def __init__(self, output: Output, heads: Mapping[Head, LoadedHead]) -> None:
        self._output = output
        self._token_head: list[HeadFunction] = [heads[head] for head in output.token_head]
        self._head: list[HeadFunction] = [heads[head] for head in output.head]
        self._spans = None if output.spans is None else heads[output.spans]
        self._vocabulary = None if output.vocabulary is None else heads[output.vocabulary]

    def __call__(self, hidden_RD: Tensor, rows: RowSelection, put: Put) -> Tensor:
        """Return the rows, (P, width); columns from widths_P[i] on are zero in row i.

        With `rows.with_logits`, as many columns follow, of the values before the activation.
        """
        starts_P, ends_P, modes = put(rows.starts_P), put(rows.ends_P), self._output.modes
        if self._spans is not None:
            assert rows.marks_B2 is not None
            return self._spans(hidden_RD[starts_P], put(rows.activated_P), rows.marks_B2)
        if self._vocabulary is not None:
            assert rows.tokens_X is not None
            num_tokens = rows.tokens_X.size  # no others are decoded: the decoder costs as much as several layers
            tokens_R = F.pad(put(rows.tokens_X), (0, round_up_rows(num_tokens) - num_tokens))
            return self._vocabulary(self._on_tokens(hidden_RD[tokens_R]), ends_P - starts_P)
        if modes:
            x_TD = self._on_tokens(hidden_RD)
            origins_P = put(rows.origins_P) if "weightedmean" in modes else starts_P  # which others do not read
            parts = [_POOLS[mode](x_TD, origins_P, starts_P, ends_P) for mode in modes]
            x_PD = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        else:
            x_PD = hidden_RD[starts_P]
        x_PD = apply_heads(x_PD, self._head if modes else [*self._token_head, *self._head])
        if rows.widths_P is not None:
            x_PD = truncate_columns(x_PD, put(rows.widths_P))
        all_activated = rows.activated_P.all()
        if self._output.activation == "identity" or not (all_activated or rows.activated_P.any()):
            return x_PD
        activated_PD = ACTIVATIONS[self._output.activation](x_PD)
        if not all_activated:
            activated_PD = torch.where(put(rows.activated_P)[:, None], activated_PD, x_PD)
        return torch.cat((activated_PD, x_PD), dim=1) if rows.with_logits else activated_PD

    def _on_tokens(self, hidden_RD: Tensor) -> Tensor:
        for head in self._token_head:
            hidden_RD = head(hidden_RD)
        return hidden_RD


def apply_heads(x_PD: Tensor, heads: Sequence[HeadFunction]) -> Tensor:
    """Return rows that went through all heads, which see a number of rows that `round_up_rows` gives."""
    if not heads:
        return x_PD
    num_rows = x_PD.shape[0]
    x_PD = F.pad(x_PD, (0, 0, 0, round_up_rows(num_rows) - num_rows))
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


def _mean(x_TD: Tensor, _: Tensor, starts_P: Tensor, ends_P: Tensor) -> Tensor:
    if (own := kernels_for(x_TD)) is not None and x_TD.dtype == torch.float32:
        return own.means(x_TD.contiguous(), starts_P.contiguous(), ends_P.contiguous())
    return segment_reduce(x_TD, starts_P, ends_P, "sum") / (ends_P - starts_P)[:, None]


def _mean_sqrt_len(x_TD: Tensor, _: Tensor, starts_P: Tensor, ends_P: Tensor) -> Tensor:
    return segment_reduce(x_TD, starts_P, ends_P, "sum") / (ends_P - starts_P)[:, None].float().sqrt()


def _weighted_mean(x_TD: Tensor, origins_P: Tensor, starts_P: Tensor, ends_P: Tensor) -> Tensor:
    """Return means in which token i of its seq weighs i, from 1 on; tokens of an excluded prompt are counted."""
    positions = torch.arange(x_TD.shape[0], device=x_TD.device, dtype=torch.int32)
    row_T = torch.searchsorted(ends_P, positions, right=True).clamp_(max=ends_P.shape[0] - 1)
    weights_T1 = (positions - origins_P[row_T] + 1).float()[:, None]
    total_P1 = segment_reduce(weights_T1, starts_P, ends_P, "sum")
    return segment_reduce(x_TD * weights_T1, starts_P, ends_P, "sum") / total_P1


_POOLS: Final[Mapping[PoolingMode, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "cls": lambda x_TD, _, starts_P, ends_P: x_TD[starts_P],
    "max": lambda x_TD, _, starts_P, ends_P: segment_reduce(x_TD, starts_P, ends_P, "max"),
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x_TD, _, starts_P, ends_P: x_TD[ends_P - 1],
}
"""Functions of the tokens, the first of each row's seq, the first of each row, and one after its last."""


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
