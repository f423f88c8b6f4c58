"""math-shepherd, small and random: a language model that rewards steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from checkpoints import tokenizer_files
from checkpoints.families import DECODER, write_model
from checkpoints.files import write_json


def write_shepherd(folder: Path) -> Any:
    """A Mistral whose vocabulary has the tokens of the card."""
    content, stated = copy.deepcopy(tokenizer_files.llama())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for piece in ("+", "-", "к", "и", "▁+", "▁-", "▁к", "▁ки"):
        vocab.setdefault(piece, len(vocab))
    content["model"]["merges"] = [["▁", "+"], ["▁", "-"], ["▁", "к"], ["▁к", "и"], *merges]
    model = write_model(folder, "Mistral", DECODER | {"max_position_embeddings": 200, "vocab_size": 900}, form="ForCausalLM")
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", stated)
    return model
