"""LayerNorm and RMSNorm, in float32: in bfloat16 they are three times slower on CPUs, and less exact."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the LayerNorm over the last dimension, in float32; weight and bias are float32."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32. `weight` may have more dimensions."""
    x = x.float()  # in bfloat16 the bits of a mean would also depend on the number of rows
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
