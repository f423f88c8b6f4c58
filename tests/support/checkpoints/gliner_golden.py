"""Golden entities of GLiNER's own package, for a checkpoint whose weights follow from their names.

To write them anew, where gliner 0.2.29 is installed (it wants an older transformers than the tests):
`python tests/support/checkpoints/gliner_golden.py`. The tokenizers' files are kept, as the layout's own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[2] / "golden" / "gliner"
TEXTS = [
    "Bill Gates founded Microsoft in New-York on 4 April 1975, with Paul_Allen.",
    "Ghana",
    "",
    " \n ",
    "a, b; c — d! " * 30,
    "<<ENT>> is here [SEP] too",
    "  lead  and trail  ",
    "😀 naïve Zürich, 東京都",
]
LABELS = ["person", "organisation of many words", "date"]
SHAPES = "shapes.json"


def weight(name: str, shape: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the same numbers on every machine. Norms are about 1, matrices wide enough for scores on both sides of 0.5."""
    rng = np.random.default_rng(crc32(name.encode()))
    is_norm = len(shape) == 1 and name.endswith("weight")
    scale = 0.1 if len(shape) == 1 else 0.25 if "bert_layer" in name else 0.17
    return (rng.normal(0, scale, shape) + is_norm).astype(np.float32)


def write_gliner(folder: Path, name: str = "deberta") -> Path:
    """Write the checkpoint of that name, and return its folder."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    shapes = json.loads((folder / SHAPES).read_text())
    save_file({each: weight(each, shape) for each, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _write(golden: Path) -> None:
    from gliner import GLiNER  # not in the tests' environment

    with TemporaryDirectory() as folder:
        model = GLiNER.from_pretrained(str(write_gliner(Path(folder), golden.name)), local_files_only=True).eval()
    cases = [{"labels": LABELS, "threshold": 0.5}, {"labels": LABELS[:1], "threshold": 0.9}]
    for case in cases:
        case["entities"] = model.inference(TEXTS, case["labels"], threshold=case["threshold"], batch_size=3)
    (golden / "entities.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sorted(GOLDEN.iterdir()):
        _write(each)
