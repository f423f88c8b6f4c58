"""Position encodings in attention: rotary embeddings, ALiBi, and learned biases of relative positions.

Source of the scalings: transformers/modeling_rope_utils.py (5.23). Source of "ntk": NTKScalingRotaryEmbedding of
Alibaba-NLP/new-impl on the Hub, the original code of gte-multilingual-base.

Shapes: R rows, N heads, H head width, F frequencies, L keys, B buckets, D distances of keys from queries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from whimbrel.model.kernels.library import kernels_for
from whimbrel.model.ops.row_kernels import row_kernels
from whimbrel.model.ops.rowwise import Angles
from whimbrel.types.card import Rotary

_Scale: TypeAlias = Callable[[Rotary, Mapping[str, Any]], tuple[Tensor, float]]


def frequencies(rotary: Rotary, device: torch.device) -> tuple[Tensor, float]:
    """Return the radians per position of each pair of columns, (width / 2) in float32, and the factor of cosine and sine."""
    if rotary.scaling is None:
        return _plain(rotary.theta, rotary.width).to(device), 1.0
    frequencies_F, scale = SCALINGS[rotary.scaling["rope_type"]](rotary, rotary.scaling)
    return frequencies_F.to(device), scale


def norm_and_rotate(x_RNH: Tensor, weight_NH: Tensor | None, eps: float, angles: Angles | None) -> Tensor:
    """Return the RMS norm of every head, unless there is no weight, rotated by `angles`, unless they are None.

    With kernels, or if nothing is done, the result has the dtype of x; else it is float32.
    """
    own = kernels_for(x_RNH)
    heads_follow = x_RNH.stride(-1) == 1 and x_RNH.stride(1) == x_RNH.shape[2]
    if own is not None and heads_follow and x_RNH.dtype in (torch.float32, torch.bfloat16) and not (angles and angles[2]):
        return own.norm_and_rotate(x_RNH, weight_NH, eps, angles)
    return row_kernels(x_RNH).norm_and_rotate(x_RNH, weight_NH, eps, angles)


def _plain(theta: float, width: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)


def _ntk(rotary: Rotary, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    factor = max(scaling["factor"], 1.0)
    return _plain(rotary.theta * factor, rotary.width) / factor ** (2 / rotary.width), 1.0


def _llama3(rotary: Rotary, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    plain = _plain(rotary.theta, rotary.width)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    slow = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * slow / factor + smooth * slow
    is_between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_between, between, slow), 1.0


def _yarn(rotary: Rotary, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    width, theta = rotary.width, rotary.theta
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def correction(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))).clamp(0, 1)
    powers = theta ** (torch.arange(0, width, 2).float() / width)
    scaled = 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp)
    attention = scaling.get("attention_factor")
    return scaled, float(attention) if attention is not None else 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


SCALINGS: Final[Mapping[str, _Scale]] = {
    "linear": lambda rotary, scaling: (_plain(rotary.theta, rotary.width) / scaling["factor"], 1.0),
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
}


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Bias of attention scores, which depends on head and distance alone."""

    of: Callable[[Tensor], Tensor]
    """Distances of keys from queries, int64 of any shape -> bias of each head, (N, ...) in float32."""
    device: torch.device | None = None
    """Device of the result; None: the host."""
    slopes_N: Tensor | None = None
    """Slopes, if the bias is minus the distance, times a slope per head."""
    _bands: dict[int, Tensor] = field(default_factory=dict[int, Tensor], init=False)

    def __call__(self, first: int, last: int, length: int) -> Tensor:
        """Return the bias of the queries `first` to `last` of a seq, (N, last - first, L)."""
        keys_L, queries_Q = (torch.arange(*each, device=self.device) for each in ((length,), (first, last)))
        return self.of(keys_L[None, :] - queries_Q[:, None])

    def band(self, reach: int) -> Tensor:
        """Return the bias of distances -M to M, (N, 2 M + 1), of some M from `reach` on. It is kept for later batches."""
        largest = max(_LEAST_BAND, 1 << (reach - 1).bit_length())
        if largest not in self._bands:
            self._bands[largest] = self.of(torch.arange(-largest, largest + 1, device=self.device)).contiguous()
        return self._bands[largest]


_LEAST_BAND: Final = 512


def alibi(num_heads: int, device: torch.device) -> Bias:
    """Return the ALiBi bias: minus the distance, times a slope per head."""
    slopes_N = alibi_slopes(num_heads).to(device)
    return Bias(lambda distances: -slopes_N.view(-1, *[1] * distances.dim()) * distances.abs(), device, slopes_N)


def relative(table_BN: Tensor, max_distance: int) -> Bias:
    """Return the learned bias of the bucket of a distance. All distances from `max_distance` on are alike."""
    buckets_D = _buckets(torch.arange(-max_distance, max_distance + 1), table_BN.shape[0], max_distance)
    values_ND = table_BN[buckets_D.to(table_BN.device)].T.contiguous()
    return Bias(lambda distances: values_ND[:, distances.clamp(-max_distance, max_distance) + max_distance], table_BN.device)


def _buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return buckets: one per small distance, logarithmic ones up to `max_distance`. The upper half is for keys after."""
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    log = torch.log(far.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (half - exact)
    bucket = torch.where(far < exact, far, (exact + log.long()).clamp(max=half - 1))
    return bucket + (distances > 0) * half


def alibi_slopes(num_heads: int) -> Tensor:
    """Return a slope per head: a geometric sequence; after the last power of two, every other slope of the next sequence."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2 ** (-8 / power)
    slopes = [start ** (n + 1) for n in range(power)]
    start = 2 ** (-4 / power)
    slopes += [start ** (2 * n + 1) for n in range(num_heads - power)]
    return torch.tensor(slopes)
