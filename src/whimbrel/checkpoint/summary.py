"""Summary of a checkpoint for people: parameters, languages, and parts that no output uses.

Read from config.json, the headers of the weights and the front matter of README.md. None of it affects an output, so a value
that is missing or cannot be read is None or empty, never an error. The loader knows the heads of transformers' classes by their
names, and refuses every other tensor that it does not take.
"""

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final, cast

import msgspec

from whimbrel.checkpoint.config.reader import read_config
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Card

_MAX_HEADER: Final = 100_000_000
TASK_HEADS: Final = "classifier pre_classifier qa_outputs score sequence_summary".split()
"""Modules of transformers' classes for texts, tokens, questions and choices, which stand beside the model's own."""
FAMILY_HEADS: Final = """
    classification_head cls decoder dense discriminator_predictions generator_lm_head generator_predictions head lm_head
    predictions sop_classifier vocab_layer_norm vocab_projector vocab_transform
""".split()
"""Those of some families only: `model/families.py` says of which."""
_NAME: Final = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]+)*|multilingual|code")


class _Tensor(msgspec.Struct):
    shape: list[int] = []


def count_parameters(folder: Path) -> int | None:
    """Return the number of entries of all tensors in the safetensors files of `folder`. None if there is no such file."""
    shapes = weight_shapes([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")])
    return sum(prod(shape) for _, shape in shapes) if shapes else None


def weight_shapes(files: Sequence[Path]) -> list[tuple[str, list[int]]] | None:
    """Return the names and shapes of all tensors in safetensors files. None if there is no file, or one cannot be read."""
    try:
        return [row for file in files for row in read_shapes(file)] if files else None
    except (OSError, msgspec.DecodeError):
        return None


def read_shapes(path: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of a file's tensors: 8 bytes of length, then JSON. Raises OSError and msgspec.DecodeError."""
    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER))
    tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    return [(name, tensor.shape) for name, tensor in tensors.items() if name != "__metadata__"]


def _front_matter(folder: Path) -> str:
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    matter = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|\Z)", text, re.DOTALL)
    return matter[1] if matter else ""


def licence(folder: Path) -> str:
    """Return the licence that the front matter of README.md states, by its own name if that is `other`. Empty if none is."""
    found = dict[str, str](re.findall(r"^(license|license_name):[ \t]*['\"]?([\w.+-]+)", _front_matter(folder), re.MULTILINE))
    stated = found.get("license", "")
    return found.get("license_name", stated) if stated == "other" else stated


def languages(folder: Path) -> list[str]:
    """Return the languages that the front matter of README.md names."""
    entry = re.search(r"^language:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)", _front_matter(folder), re.MULTILINE)
    if entry is None:
        return []
    words = re.split(r"[\[\],\n]|(?<![^\s])-(?=\s)", entry[1])
    return [word for word in (each.strip(" \t\r'\"") for each in words) if _NAME.fullmatch(word)]


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
