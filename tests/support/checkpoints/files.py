"""JSON files of a checkpoint, written and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def edit_json(path: Path, /, **changes: Any) -> None:
    """Change keys of a JSON file, or make one; None removes a key."""
    value = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | changes
    write_json(path, {key: item for key, item in value.items() if item is not None})
