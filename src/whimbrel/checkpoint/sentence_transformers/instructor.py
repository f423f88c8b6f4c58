"""Checkpoints of INSTRUCTOR, whose prompts are instructions that the mean leaves out.

The files of hkunlp/instructor-base, -large and -xl do not say so, but Sentence Transformers knows these ids. Fine-tunes that
the package InstructorEmbedding has saved name its classes in modules.json.

Sources: InstructorEmbedding/instructor.py (1.0.1), and sentence_transformers/sentence_transformer/model.py (6.2).
"""

from pathlib import Path
from typing import Final

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, Rows, has_own_classes
from whimbrel.types.card import Encoder

OWN_LENGTH: Final = 512
"""Limit in tokens per text of the package's classes, whatever the files say."""
_NAMES: Final = frozenset(f"instructor-{size}" for size in ("base", "large", "xl"))
_FAMILIES: Final = ("t5", "t5_gated")


def is_instructor(folder: Path, name: str, rows: Rows, encoder: Encoder) -> bool:
    """Return whether prompts are INSTRUCTOR's. Raises CheckpointError if neither modules.json nor the name nor a key tells."""
    if has_own_classes(folder):
        return True
    last = name.rpartition("/")[2].lower()
    pooling = next((path for kind, path in rows if kind == "Pooling"), None)
    if "instructor" not in last or pooling is None or encoder.family not in _FAMILIES:
        return False
    stated = JsonFile.read(folder, f"{pooling}/config.json")
    if stated.data.get("include_prompt") is not None or last in _NAMES:
        return stated.get("include_prompt", bool, False) is False
    message = f"is missing. {name} seems to be an INSTRUCTOR, whose prompts are not pooled."
    hint = f"add the key to {pooling}/config.json: false for an INSTRUCTOR, true for another model; or see {MODULES}"
    raise stated.error(message, "include_prompt", hint)
