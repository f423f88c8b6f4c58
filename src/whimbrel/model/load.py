"""Loading of models and their heads. A model knows nothing of pooling or requests.

Shapes: R rows, D model width, V entries of a table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from whimbrel.checkpoint.gliner import GLINER_PREFIX
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.summary import TASK_HEADS
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.model.families import FAMILIES
from whimbrel.model.head_functions import load_head
from whimbrel.model.ops.attention import AttentionLayout, LayerHook
from whimbrel.model.ops.quantization import Quantization
from whimbrel.model.pooling import LoadedHead
from whimbrel.model.transformer import Transformer
from whimbrel.model.weights import Weights
from whimbrel.types.card import FALLBACK, Card, Encoder
from whimbrel.types.heads import Head

_OTHER_HEADS: Final = rf"({'|'.join(TASK_HEADS)})\..*"
"""Pattern of the tensors of heads that a model of vectors leaves out, as AutoModel does."""

Model: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionLayout, LayerHook], Tensor]
"""(ids, positions, types, (R,) each, layout, function to call between layers) -> hidden states, (R, D) in float32."""


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
        return _idf(folder, card, device), {}
    if card.encoder.family == FALLBACK:
        from whimbrel.model.hf import load_hf

        with Weights(folder, path=card.path, sha256=sha256) as weights:  # rejects pickles and files that are damaged or outside
            model = load_hf(folder, card, device=device, dtype=dtype)
            return model, _heads(folder, card, weights, device, dtype, quantization=None)
    names = FAMILIES[card.encoder.family]
    on_meta = device.type == "meta"
    prefixes = names.prefixes if card.span_prompt is None else (GLINER_PREFIX,)
    with Weights(folder, path=card.path, prefixes=prefixes, sha256=sha256, on_meta=on_meta) as weights:
        if card.encoder.family == "static":
            model = _static_model(card.encoder, weights, device)
        else:
            model = Transformer(card.encoder, weights, device=device, dtype=dtype, quantization=quantization)
        heads = _heads(folder, card, weights, device, dtype, quantization=quantization)
        if isinstance(model, Transformer):
            _check_left_out(model.left_out, weights)
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
                _heads(folder, tower, weights, device, dtype, quantization=None)
        else:
            load_model(folder, tower, device=device, dtype=dtype)


def _heads(
    folder: Path, card: Card, weights: Weights, device: torch.device, dtype: torch.dtype, *, quantization: Quantization | None
) -> Mapping[Head, LoadedHead]:
    sharing = [tower for tower in card.towers if tower.path == card.path] or [card]
    heads = [head for tower in sharing for output in tower.outputs.values() for head in output.heads]
    return {head: load_head(head, folder, weights, device, dtype, quantization=quantization) for head in heads}


_STATIC_NAMES: Final = ("embedding.weight", "embeddings", "weight")
"""Names of a static table: in Sentence Transformers' StaticEmbedding, in model2vec, and in SparseStaticEmbedding."""


def _static_model(spec: Encoder, weights: Weights, device: torch.device) -> Model:
    """Load a table of token vectors, without layers. model2vec adds "mapping" and "weights". Raises CheckpointError."""
    name = next((name for name in _STATIC_NAMES if weights.has(name)), _STATIC_NAMES[0])
    table = weights.stored(name)  # integers of a quantised table are used as they are
    table = weights.take(name, *table.shape) if table.is_floating_point() else table.float()
    mapping_V = weights.stored("mapping").long() if weights.has("mapping") else torch.arange(len(table))
    if mapping_V.shape != (spec.vocab_size,) or not (mapping_V.is_meta or 0 <= mapping_V.min() <= mapping_V.max() < len(table)):
        raise CheckpointError(f"names rows that {name} does not have.", file=weights.file, key="mapping")
    weight_V = weights.take("weights", spec.vocab_size) if weights.has("weights") else None
    return _lookup(table if table.ndim == 2 else table[:, None], mapping_V, weight_V, device)


def _idf(folder: Path, card: Card, device: torch.device) -> Model:
    """Load the weights of tokens from a JSON file, 0 for tokens that are not in it. Raises CheckpointError."""
    spec, file = card.encoder, JsonFile.read(folder, card.encoder.idf or "")
    ids, _ = read_vocabulary(folder / card.path, card.tokenizer, spec.vocab_size)
    weight_V = torch.zeros(spec.vocab_size)
    for token in file.data:
        if token not in ids:
            raise file.error("this token is not in tokenizer.json.", token)
        weight_V[ids[token]] = file.get(token, float)
    return _lookup(weight_V[:, None], torch.arange(spec.vocab_size), None, device)


def _lookup(table_VD: Tensor, mapping_V: Tensor, weight_V: Tensor | None, device: torch.device) -> Model:
    """Return the model that gives token i the vector table[mapping[i]] * weight[i], in float32: less is no faster.

    The id after the last token stands for a text without tokens; its vector is zero.
    """
    padded_VD = F.pad(table_VD, (0, 0, 0, 1)).to(device)
    row_V = F.pad(mapping_V, (0, 1), value=len(table_VD)).to(device)
    factor_V1 = None if weight_V is None else F.pad(weight_V, (0, 1)).to(device)[:, None]

    def lookup(ids_R: Tensor, *_: object) -> Tensor:
        x_RD = F.embedding(row_V[ids_R], padded_VD)
        return x_RD if factor_V1 is None else x_RD * factor_V1[ids_R]

    return lookup
