"""Scores of spans of words for labels (GLiNER), in float32.

The products run for the words, spans and labels of all texts, or of one text at a time, which makes no difference to their
bits. The LSTM and the last product run for each text alone. Source: gliner/modeling/{base,layers,span_rep}.py (0.2.29).

Shapes: P labels and words of all texts, W words of a text, C its labels, S its spans, D columns, E columns of the model.
"""

from typing import Final

import torch
from torch import Tensor

from whimbrel.model.ops.linear import Linear
from whimbrel.model.pooling import HeadFunction, apply_heads, guard_rows
from whimbrel.model.weights import Weights
from whimbrel.outputs.entities import word_spans
from whimbrel.types.heads import Activation, SpanHead

_SPANS: Final = "span_rep_layer.span_rep_layer"


class SpanScorer:
    """The layers over labels and words, loaded. Raises CheckpointError."""

    def __init__(self, head: SpanHead, weights: Weights, device: torch.device) -> None:
        width = head.width
        self._head = head
        self._project: list[HeadFunction] = []
        if head.in_features != width:
            self._project = [_linear(weights, device, "token_rep_layer.projection", (width, head.in_features))]
        self._lstm = [weight.to(device) for number in range(head.num_lstms) for weight in _lstm(weights, number, width)]
        self._labels = _two_layers(weights, device, "prompt_rep_layer", width, width)
        self._starts = _two_layers(weights, device, f"{_SPANS}.project_start", width, width)
        self._ends = _two_layers(weights, device, f"{_SPANS}.project_end", width, width)
        self._both = _two_layers(weights, device, f"{_SPANS}.out_project", 2 * width, width)

    def __call__(self, x_PE: Tensor, activated_P: Tensor, marks: list[tuple[int, int]]) -> Tensor:
        """Return the scores of spans and labels, one a row. Of each text, the labels come before the words."""
        x_PD = apply_heads(x_PE, self._project)
        scores: list[Tensor] = [x_PD.new_empty(0)]
        start = 0
        for num_labels, num_words in marks:
            words, end = start + num_labels, start + num_labels + num_words
            if num_words:
                logits = self._score(x_PD[start:words], x_PD[words:end]).flatten()
                found = torch.where(activated_P[start], logits.sigmoid(), logits)
                scores.append(found.masked_fill_(~logits.isfinite(), torch.nan))
            start = end
        return torch.cat(scores)[:, None]

    def _score(self, labels_CD: Tensor, words_WD: Tensor) -> Tensor:
        if layers := self._head.num_lstms:
            state = words_WD.new_zeros(2 * layers, 1, self._head.width // 2)
            (words_WD,), _, _ = torch.lstm(
                words_WD.clone()[None], (state, state), self._lstm, True, layers, 0.0, False, True, True
            )
        starts_WD, ends_WD = apply_heads(words_WD, [self._starts]), apply_heads(words_WD, [self._ends])
        spans_S2 = torch.tensor(word_spans(len(words_WD), self._head.max_words), device=words_WD.device)
        both_SD = torch.cat((starts_WD[spans_S2[:, 0]], ends_WD[spans_S2[:, 1]]), dim=1).relu()
        return apply_heads(both_SD, [self._both]) @ apply_heads(labels_CD, [self._labels]).clone().T


def _linear(
    weights: Weights, device: torch.device, name: str, shape: tuple[int, int], activation: Activation = "identity"
) -> Linear:
    weight, bias = weights.take(f"{name}.weight", *shape), weights.take(f"{name}.bias", shape[0])
    return Linear(weight.to(device), bias.to(device), activation)


def _two_layers(weights: Weights, device: torch.device, name: str, inner: int, width: int) -> HeadFunction:
    first = guard_rows(_linear(weights, device, f"{name}.0", (4 * width, inner), "relu"))
    second = _linear(weights, device, f"{name}.3", (width, 4 * width))

    return lambda x_RD: second(first(x_RD))


def _lstm(weights: Weights, number: int, width: int) -> list[Tensor]:
    """Return the tensors of one layer in torch's order: forwards, then backwards."""
    half = width // 2
    shapes = {"weight_ih": (4 * half, width), "weight_hh": (4 * half, half), "bias_ih": (4 * half,), "bias_hh": (4 * half,)}
    return [
        weights.take(f"rnn.lstm.{name}_l{number}{way}", *shape) for way in ("", "_reverse") for name, shape in shapes.items()
    ]
