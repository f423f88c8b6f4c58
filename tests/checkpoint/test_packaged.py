"""The packaged model: every file that is read is checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from whimbrel import Engine
from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.errors import CheckpointError


@pytest.fixture
def folder(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the packaged model that is found in its place."""
    copy = shutil.copytree(minilm, tmp_path / "model")
    monkeypatch.setattr(packaged, "find_packaged", lambda: copy)
    return copy


def test_the_package_is_as_it_should_be(minilm: Path) -> None:
    packaged.check_packaged(minilm, weights=True)


@pytest.mark.parametrize("name", packaged.SHA256)
def test_a_changed_byte_is_an_error(name: str, folder: Path) -> None:
    with (folder / name).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read()[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{name}: SHA-256 is .* must be "):
        packaged.check_packaged(folder, weights=True)
    with pytest.raises(CheckpointError, match=f"{name}: SHA-256"):
        Engine(None)


def test_a_missing_file_is_an_error(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: is missing .* install it again"):
        resolve_checkpoint(None)


def test_a_foreign_file_is_an_error(folder: Path) -> None:
    """It could change how the others are read."""
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: is no file of the packaged model"):
        resolve_checkpoint(None)
