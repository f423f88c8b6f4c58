"""Heads: what becomes of hidden states after the encoder, and of rows after pooling. `models.heads` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(x @ weight.T + bias), plus x itself (or its projection) with `residual`."""

    source: str | None
    """The folder of its weights, or a .pt file, in the checkpoint's; None: they lie among the transformer's."""
    name: str
    """Of the tensors, without ".weight" and ".bias"; "": they are called just that."""
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over each row; source and name as of Dense."""

    source: str | None
    name: str
    dimension: int
    eps: float = 1e-5
    bias: bool = True


@dataclass(frozen=True, slots=True)
class LogitScore:
    """The logit of a token of the vocabulary as the next one, less that of another: rows of the table of output embeddings."""

    name: str
    """Of the table, without ".weight"; it lies among the transformer's weights."""
    vocab_size: int
    in_features: int
    true_id: int
    false_id: int | None = None


@dataclass(frozen=True, slots=True)
class DivideBy:
    """Division by a number."""

    divisor: float


@dataclass(frozen=True, slots=True)
class Normalize:
    """Division by the Euclidean norm."""


@dataclass(frozen=True, slots=True)
class SparseAutoencoder:
    """The encoder of a sparse autoencoder: the k largest latents, if they are positive; all others are 0."""

    source: str
    """The folder of its weights."""
    in_features: int
    out_features: int
    k: int
    normalize: bool = False
    """Whether each row is first freed of its mean and divided by its standard deviation."""


@dataclass(frozen=True, slots=True)
class MlmHead:
    """The decoder of a masked-language-model head, pooled: tokens become one row over the whole vocabulary (SPLADE)."""

    weight: str
    """The tensor's name, among those of the transformer."""
    table: str | None
    """The table of words, which stands in for a weight that is not there; None: there must be one."""
    biases: tuple[str, ...]
    """Names of the bias, of which the first that is there is taken; none: it has no bias."""
    in_features: int
    out_features: int
    strategy: Literal["max", "sum"] = "max"
    """What becomes of an entry's scores from all tokens of a text."""
    num_logs: int = 1
    """How often log(1 + x) is taken of scores, after negative ones have become 0."""
    source: None = None
    """Its tensors lie among the transformer's."""


Head: TypeAlias = Dense | LayerNorm | Normalize | LogitScore | DivideBy | SparseAutoencoder | MlmHead

OutputActivation: TypeAlias = Literal["normalize", "sigmoid", "softmax", "identity"]
"""What is done to a row at last, if a request does not say otherwise."""
