"""Sparse encoders, small and random: SPLADE and sparse autoencoders, as Sentence Transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

from checkpoints.encoders import write_bert
from checkpoints.families import CASES, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel.types.result import Sparse

OLD_SPARSE = "sentence_transformers.sparse_encoder.models."


NEW_SPARSE = "sentence_transformers.sparse_encoder.modules."


def splade_layout(folder: Path, *, new: bool = False, **pooling: Any) -> None:
    """Make a masked-language model of transformers what Sentence Transformers saves as a SparseEncoder."""
    transformer = "sentence_transformers.base.modules.transformer.Transformer" if new else f"{OLD_SPARSE}MLMTransformer"
    kinds = [transformer, f"{NEW_SPARSE}splade_pooling.SpladePooling" if new else f"{OLD_SPARSE}SpladePooling"]
    rows = zip(kinds, ("", "1_SpladePooling"), strict=True)
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(rows)]
    write_json(folder / "modules.json", modules)
    size = {"embedding_dimension" if new else "word_embedding_dimension": None}
    config = {"pooling_strategy": "max", "activation_function": "relu"} | size | pooling
    write_json(folder / "1_SpladePooling/config.json", config)
    task = {
        "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "token_embeddings",
    }
    write_json(folder / "sentence_bert_config.json", task if new else {"max_seq_length": 40, "do_lower_case": False})
    edit_json(folder / "tokenizer_config.json", model_max_length=40)
    sentence = {"__version__": {"sentence_transformers": "6.2.0" if new else "5.0.0"}, "model_type": "SparseEncoder"}
    more = {"prompts": {"query": "", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "dot"}
    write_json(folder / "config_sentence_transformers.json", sentence | more)


def write_splade(folder: Path, case: str = "bert", **changes: Any) -> Any:
    """A random masked-language model; its decoder is tied to its table, and has a bias."""
    name, config = CASES[case]
    model = write_model(folder, name, config | changes, form="ForMaskedLM")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key, tensor in weights.items():  # on the whole, scores are negative
        if key.endswith(("predictions.bias", "lm_head.bias", "projector.bias", "decoder.bias")):
            weights[key] = torch.randn(tensor.shape, generator=generator) - 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def as_matrix(sparse: Sparse, width: int) -> NDArray[np.float32]:
    """Return sparse vectors as a matrix."""
    found = np.zeros((len(sparse), width), np.float32)
    for row, (ids, weights) in zip(found, sparse, strict=True):
        assert (np.diff(ids) > 0).all()
        assert (weights != 0).all()
        row[ids] = weights
    return found


def write_code(folder: Path, *, heads: tuple[Any, ...] = (), new: bool = False, safe: bool = True, **config: Any) -> None:
    """A sparse autoencoder after mean pooling (CSR), as Sentence Transformers saves it."""
    write_bert(folder)
    sentence_layout(folder, new=new, heads=heads)
    path = f"{2 + len(heads)}_SparseAutoEncoder"
    kind = f"{NEW_SPARSE}sparse_auto_encoder.SparseAutoEncoder" if new else f"{OLD_SPARSE}SparseAutoEncoder"
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*modules, {"idx": len(modules), "name": "code", "path": path, "type": kind}])
    values = {"input_dim": 48, "hidden_dim": 192, "k": 16, "k_aux": 32, "normalize": False, "dead_threshold": 30} | config
    (folder / path).mkdir()
    code = SparseAutoEncoder(**values)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in code.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    code.save(str(folder / path), safe_serialization=safe)
    edit_json(folder / "config_sentence_transformers.json", model_type="SparseEncoder", similarity_fn_name=None)
