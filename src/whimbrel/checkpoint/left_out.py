"""Parts of a checkpoint that no output uses: heads for other tasks, and an architecture that config.json does not name.

Read from config.json and the headers of the weights. The loader knows the heads of transformers' classes by their names, and
refuses every other tensor that it does not take.
"""

from pathlib import Path
from typing import Final, cast

from whimbrel.checkpoint.config.reader import read_config
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.summary import weight_shapes
from whimbrel.types.card import Card

TASK_HEADS: Final = "classifier pre_classifier qa_outputs score sequence_summary".split()
"""Modules of transformers' classes for texts, tokens, questions and choices, which stand beside the model's own."""
FAMILY_HEADS: Final = """
    classification_head cls decoder dense discriminator_predictions generator_lm_head generator_predictions head lm_head
    predictions sop_classifier vocab_layer_norm vocab_projector vocab_transform
""".split()
"""Those of some families only: `model/families.py` says of which."""


def left_out(folder: Path, card: Card) -> list[str]:
    """Return the heads in the weights of `folder` that no output of `card` uses. Empty if the weights are not there."""
    files = sorted((folder / card.path).glob("*.safetensors"))
    found = {name.partition(".")[0] for name, _ in weight_shapes(files) or ()}
    heads = [head for tower in card.towers or (card,) for output in tower.outputs.values() for head in output.heads]
    used = {str(getattr(head, "name", getattr(head, "weight", ""))).partition(".")[0] for head in heads}
    return sorted(found & {*TASK_HEADS, *FAMILY_HEADS} - used)


def stated_architecture(folder: Path, card: Card) -> str:
    """Return how config.json differs from the architecture that runs. Empty if it names that architecture."""
    root = folder / card.path
    stated = JsonFile.read_optional(root, "config.json").data
    if not stated or (config := read_config(root)).data == stated:
        return ""
    names = cast(list[str], stated.get("architectures") or [])
    return f"{config.data['architectures'][0]}, by its model_type; config.json names {' and '.join(names) or 'no architecture'}"
