"""Loading of models and their heads. A model knows nothing of pooling or requests.

Shapes: R rows, D model width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from whimbrel.checkpoint.gliner import GLINER_PREFIX
from whimbrel.checkpoint.summary import TASK_HEADS
from whimbrel.errors import CheckpointError
from whimbrel.model.families import FAMILIES
from whimbrel.model.head_functions import load_head
from whimbrel.model.ops.attention import AttentionLayout
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.pooling import LoadedHead
from whimbrel.model.static_table import StaticTable, load_static_table, read_idf
from whimbrel.model.transformer import Transformer
from whimbrel.model.weights import Weights
from whimbrel.types.card import FALLBACK, Card
from whimbrel.types.heads import Head

_OTHER_HEADS: Final = rf"({'|'.join(TASK_HEADS)})\..*"
"""Pattern of the tensors of heads that a model of vectors leaves out, as AutoModel does."""

Model: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionLayout, Callable[[], None] | None], Tensor]
"""(ids, positions, types, (R,) each, layout, function to call between any two layers) -> hidden states, (R, D) in float32."""


def load_model(
    folder: Path,
    card: Card,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    sha256: str | None = None,
) -> tuple[Model, Mapping[Head, LoadedHead]]:
    """Load the model, its heads, and the heads of towers that share it. Raises CheckpointError.

    `quantization` takes the model's linear layers and a decoder over the vocabulary, not those of other heads.
    """
    if card.encoder.idf is not None:
        idf_V = read_idf(folder, card)
        return StaticTable(idf_V, torch.arange(len(idf_V)), None, device), {}
    if card.encoder.family == FALLBACK:
        from whimbrel.model.hf_load import load_hf

        with Weights(folder, path=card.path, sha256=sha256) as weights:  # rejects pickles and files that are damaged or outside
            return load_hf(folder, card, device=device, dtype=dtype), _heads(folder, card, weights, device, dtype)
    names = FAMILIES[card.encoder.family]
    on_meta = device.type == "meta"
    prefixes = names.prefixes if card.span_prompt is None else (GLINER_PREFIX,)
    with Weights(folder, path=card.path, prefixes=prefixes, sha256=sha256, on_meta=on_meta) as weights:
        model: Model
        left_out: Sequence[str] = ()
        if card.encoder.family == "static":
            model = load_static_table(card.encoder, weights, device)
        else:
            model = Transformer(card.encoder, weights, device=device, dtype=dtype, quantization=quantization)
            left_out = model.left_out
        heads = _heads(folder, card, weights, device, dtype, quantization=quantization)
        _check_left_out(left_out, weights)
        gives_scores = not {"scores", "token_scores"}.isdisjoint(card.outputs)
        weights.finish(names.unused if gives_scores else (*names.unused, _OTHER_HEADS))
    return model, heads


def _check_left_out(modules: Sequence[str], weights: Weights) -> None:
    """Raise CheckpointError if adapters change modules that the heads use."""
    if used := sorted(module for module in modules if weights.was_taken(f"{module}.weight")):
        message = "this layer belongs to the model's head, which adapters cannot change; merge the adapter into the model."
        raise CheckpointError(message, file="adapter_model.safetensors", key=used[0])


def check_weights(folder: Path, card: Card) -> None:
    """Raise CheckpointError if files of weights, tensors or shapes are not those that the loader wants. Reads only headers.

    Of a model that transformers runs, only its files are checked, and its heads.
    """
    device, dtype = torch.device("meta"), torch.float32
    for tower in {tower.path: replace(tower, towers=card.towers) for tower in card.towers or (card,)}.values():
        if tower.encoder.family == FALLBACK:
            with Weights(folder, path=tower.path, on_meta=True) as weights:
                _heads(folder, tower, weights, device, dtype)
        else:
            load_model(folder, tower, device=device, dtype=dtype)


def _heads(
    folder: Path,
    card: Card,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: Quantization | None = None,
) -> Mapping[Head, LoadedHead]:
    sharing = [tower for tower in card.towers if tower.path == card.path] or [card]
    heads = [head for tower in sharing for output in tower.outputs.values() for head in output.heads]
    return {head: load_head(head, folder, weights, device, dtype, quantization=quantization) for head in heads}
