"""Heads: layers between the encoder and the pooling, or after the pooling. `model/head_functions.py` runs them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class Dense:
    """Linear layer: activation(x @ weight.T + bias); `residual` adds x or its projection."""

    source: str | None
    """Folder or .pt file of the weights in the checkpoint; None: the transformer's weights."""
    name: str
    """Name of the tensors without ".weight" and ".bias"; "": the names are "weight" and "bias"."""
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over each row, with `source` and `name` as in Dense."""

    source: str | None
    name: str
    dimension: int
    eps: float = 1e-5
    bias: bool = True


@dataclass(frozen=True, slots=True)
class LogitScore:
    """Logit of a token as the next one, minus the logit of another token if there is one."""

    name: str
    """Name of the table of output embeddings among the transformer's weights, without ".weight"."""
    vocab_size: int
    in_features: int
    true_id: int
    false_id: int | None = None


@dataclass(frozen=True, slots=True)
class DivideBy:
    divisor: float


@dataclass(frozen=True, slots=True)
class Normalize:
    """Division by the Euclidean norm."""


@dataclass(frozen=True, slots=True)
class SparseAutoencoder:
    """Encoder of a sparse autoencoder: keeps the k largest latents if they are positive; all others are 0."""

    source: str
    in_features: int
    out_features: int
    k: int
    normalize: bool = False
    """Subtract the mean of each row and divide by its standard deviation before encoding."""


@dataclass(frozen=True, slots=True)
class MlmHead:
    """Decoder of a masked-language-model head, pooled to one row over the vocabulary (SPLADE)."""

    weight: str
    """Name of the tensor among the transformer's weights."""
    table: str | None
    """Name of the word embeddings, used if `weight` is missing; None: `weight` must exist."""
    biases: tuple[str, ...]
    """Possible names of the bias; the first that exists is used. Empty: no bias."""
    in_features: int
    out_features: int
    strategy: Literal["max", "sum"] = "max"
    """Reduction of an entry's scores over the tokens of a text."""
    num_logs: int = 1
    """Number of times log(1 + x) is applied to the scores, after ReLU."""
    source: None = None
    """Always None: the tensors are among the transformer's weights."""


@dataclass(frozen=True, slots=True)
class SpanHead:
    """Scores of spans of words for labels: an LSTM over the words, layers over both ends of a span, a product with each label.

    All tensors are among the transformer's weights."""

    in_features: int
    width: int
    """Columns of words, spans and labels; if not `in_features`, a linear layer comes first."""
    max_words: int
    """Words of the longest span."""
    num_lstms: int
    """Layers of the LSTM, which reads in both directions; 0: there is none."""


Head: TypeAlias = Dense | LayerNorm | Normalize | LogitScore | DivideBy | SparseAutoencoder | MlmHead | SpanHead

OutputActivation: TypeAlias = Literal["normalize", "sigmoid", "softmax", "relu", "identity"]
"""Last step of a row, which a request can turn on or off."""
