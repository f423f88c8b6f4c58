"""G10 of the catalogue: weights that are damaged, or do not belong together. Refused at the start with file and tensor."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from waiting import wait_for
from whimbrel import Engine
from whimbrel.errors import CheckpointError
from whimbrel.model.weights import Weights

INDEX = "model.safetensors.index.json"
WORDS = "embeddings.word_embeddings.weight"
DENSE = "encoder.layer.1.output.dense.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    write_bert(folder)
    sentence_layout(folder, heads=(("Dense", 20, "torch.nn.modules.activation.Tanh", {}), "LayerNorm", "Normalize"))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def refused(folder: Path, dtype: str = "float32") -> CheckpointError:
    """Nothing of the engine is left then."""
    threads = set(threading.enumerate())
    with pytest.raises(CheckpointError) as caught, Engine(str(folder), dtype=dtype):
        pass
    assert wait_for(lambda: set(threading.enumerate()) <= threads)
    return caught.value


def change(file: Path, action: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    action(tensors)
    save_file(tensors, file)


def spoil(file: Path, name: str, value: float) -> None:
    def action(tensors: dict[str, Tensor]) -> None:
        tensors[name][0] = value

    change(file, action)


SPOILT = [
    ("model.safetensors", WORDS, float("nan")),
    ("model.safetensors", "embeddings.LayerNorm.bias", float("inf")),
    ("model.safetensors", DENSE, float("nan")),
    ("model.safetensors", "encoder.layer.0.attention.self.query.weight", float("-inf")),
    ("model.safetensors", "encoder.layer.2.output.LayerNorm.weight", float("nan")),
    ("2_Dense/model.safetensors", "linear.weight", float("nan")),
    ("2_Dense/model.safetensors", "linear.bias", float("nan")),
    ("3_LayerNorm/model.safetensors", "norm.weight", float("inf")),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
@pytest.mark.parametrize(("file", "name", "value"), SPOILT, ids=str)
def test_G10_weights_that_are_not_finite_are_found(file: str, name: str, value: float, dtype: str, folder: Path) -> None:
    spoil(folder / file, name, value)
    error = refused(folder, dtype)
    assert (error.file, error.key) == (file, name)
    assert str(error).endswith("holds NaN or infinity.")


def test_G10_one_word_that_is_not_finite_is_enough(folder: Path) -> None:
    """No warm-up would have used it."""

    def action(tensors: dict[str, Tensor]) -> None:
        tensors[WORDS][37, 5] = float("nan")

    change(folder / "model.safetensors", action)
    error = refused(folder)
    assert (error.file, error.key) == ("model.safetensors", WORDS)


def test_G10_a_pickled_head_that_is_not_finite_is_named(folder: Path) -> None:
    tensors = load_file(folder / "2_Dense/model.safetensors")
    tensors["linear.bias"][3] = float("nan")
    torch.save(tensors, folder / "2_Dense/pytorch_model.bin")
    (folder / "2_Dense/model.safetensors").unlink()
    error = refused(folder)
    assert (error.file, error.key) == ("2_Dense/pytorch_model.bin", "linear.bias")


def test_G10_finite_weights_that_give_infinity_are_refused_too(folder: Path) -> None:
    change(folder / "3_LayerNorm/model.safetensors", lambda tensors: tensors["norm.weight"].fill_(3e38))
    error = refused(folder)
    assert str(error) == "config.json: gives NaN or infinity though all its weights are finite."


def test_G10_a_head_in_a_pickle_of_its_own_that_is_missing_or_no_pickle_is_named(folder: Path) -> None:
    for content, says in (
        (None, "not found"),
        (b"", "is not a pickle of tensors"),
        (b"\x80\x04N.", "is not a pickle of tensors"),
    ):
        if content is not None:
            (folder / "linear.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=says) as caught, Weights(folder, path="linear.pt", allow_pickle=True):
            pass
        assert caught.value.file == "linear.pt"


# Shards


def shards(folder: Path) -> dict[str, list[str]]:
    """Split the weights in two, and return the names in each."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / shard)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": {name: shard for shard, some in parts.items() for name in some}})
    return parts


def test_G10_the_shard_with_weights_that_are_not_finite_is_named(folder: Path) -> None:
    parts = shards(folder)
    shard = next(shard for shard, names in parts.items() if DENSE in names)
    spoil(folder / shard, DENSE, float("nan"))
    error = refused(folder)
    assert (error.file, error.key) == (shard, DENSE)


def test_G10_a_shard_of_the_wrong_shape_is_named(folder: Path) -> None:
    parts = shards(folder)
    shard = next(shard for shard, names in parts.items() if DENSE in names)
    change(folder / shard, lambda tensors: tensors.update({DENSE: torch.zeros(3, 4)}))
    error = refused(folder)
    assert (error.file, error.key) == (shard, DENSE)
    assert "has shape [3, 4]" in str(error)


def test_G10_a_shard_that_is_missing_is_named(folder: Path) -> None:
    shards(folder)
    (folder / "b.safetensors").unlink()
    assert refused(folder).file == "b.safetensors"


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_G10_a_shard_that_was_cut_short_is_named(keep: float, folder: Path) -> None:
    shards(folder)
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(data[: int(len(data) * keep)])
    error = refused(folder)
    assert error.file == "b.safetensors"
    assert "is the download complete?" in str(error)


def test_G10_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    """Even where both are the same: they may not always be."""
    name = shards(folder)["a.safetensors"][0]
    tensor = load_file(folder / "a.safetensors")[name]
    change(folder / "b.safetensors", lambda tensors: tensors.update({name: tensor}))
    error = refused(folder)
    assert (error.file, error.key) == ("b.safetensors", name)
    assert "is in a.safetensors too" in str(error)


def test_G10_a_tensor_that_no_shard_has_is_missing_from_the_index(folder: Path) -> None:
    shards(folder)
    for shard in ("a.safetensors", "b.safetensors"):
        change(folder / shard, lambda tensors: tensors.pop(DENSE, None))
    error = refused(folder)
    assert (error.file, error.key) == (INDEX, DENSE)


# Tensors that do not fit their description


@pytest.mark.parametrize("file", ["model.safetensors", "2_Dense/model.safetensors", "3_LayerNorm/model.safetensors"])
@pytest.mark.parametrize("how", ["missing", "extra", "shape", "dtype"])
def test_G10_tensors_that_do_not_fit_are_named(how: str, file: str, folder: Path) -> None:
    tensors = load_file(folder / file)
    name = {"model.safetensors": DENSE, "2_Dense/model.safetensors": "linear.weight"}.get(file, "norm.weight")
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors[name := "one.more"] = torch.zeros(2)
    elif how == "shape":
        tensors[name] = torch.zeros(5, 5)
    else:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / file)
    error = refused(folder)
    assert (error.file, error.key) == (file, name)


# As a user meets them


def nan_head(folder: Path) -> str:
    spoil(folder / "2_Dense/model.safetensors", "linear.weight", float("nan"))
    return "2_Dense/model.safetensors: linear.weight: holds NaN or infinity."


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json: not found"


def length_0(folder: Path) -> str:
    edit_json(folder / "sentence_bert_config.json", max_seq_length=0)
    return "sentence_bert_config.json: max_seq_length: must be positive, is 0."


def out_of_the_folder(folder: Path) -> str:
    shards(folder)
    shutil.move(folder / "b.safetensors", folder.parent / "b.safetensors")
    (folder / INDEX).write_text((folder / INDEX).read_text().replace('"b.safetensors"', '"../b.safetensors"'))
    return f"{INDEX}: weight_map: '../b.safetensors' is no file of this folder."


@pytest.mark.parametrize("damage", [nan_head, no_tokenizer, length_0, out_of_the_folder])
@pytest.mark.sample(2)
def test_G10_a_server_does_not_start_with_a_bad_checkpoint(damage: Callable[[Path], str], folder: Path) -> None:
    """One line says why, and no port is open."""
    says = damage(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "whimbrel", "serve", str(folder), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {says}")
    assert "Traceback" not in done.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_G10_a_weights_file_that_is_empty_or_a_folder_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"")
    assert "is the download complete?" in str(refused(folder))
    file.unlink()
    file.mkdir()
    assert str(refused(folder)) == "model.safetensors: cannot be read: it is a folder; put the file itself there."
    with pytest.raises(CheckpointError, match="it is a folder"), Weights(folder, sha256="0" * 64):
        pass


UNMAPPED = [
    (OSError(errno.ENODEV, "No such device"), "its file system cannot map files"),
    (OSError("No such device (os error 19)"), "its file system cannot map files"),
    (PermissionError(errno.EACCES, "Permission denied"), "allow this user to read it."),
    (MemoryError("Cannot allocate memory (os error 12)"), "there is no memory to map it"),
    (MemoryError(), "there is no memory to map it"),
    (
        RuntimeError("unable to mmap 912 bytes from file <x>: Cannot allocate memory (12)\nat y.cpp"),
        "there is no memory to map it",
    ),
    (RuntimeError("unable to open file <x> in read-only mode: Input/output error (5)"), "is the download complete?"),
    (SafetensorError("invalid"), "is the download complete?"),
]


@pytest.mark.parametrize(("error", "says"), UNMAPPED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("when", ["opened", "taken"])
def test_G10_weights_that_cannot_be_mapped_are_one_line(
    when: str, error: Exception, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handle:
        def __init__(self, *_: Any, **__: Any) -> None:
            if when == "opened":
                raise error

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def keys(self) -> list[str]:
            return [WORDS]

        def get_tensor(self, name: str) -> Tensor:
            raise error

    monkeypatch.setattr("whimbrel.model.weights.safe_open", Handle)
    with pytest.raises(CheckpointError) as caught, Weights(folder) as weights:
        weights.take(WORDS, 1, 1)
    assert str(caught.value).startswith("model.safetensors: cannot be read (")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


MAPPED = """
import resource, sys
from whimbrel.model.weights import Weights
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, resource.RLIM_INFINITY))
from pathlib import Path
with Weights(Path(sys.argv[1])):
    pass
"""


def test_G10_weights_without_memory_to_map_them_are_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[268435456],"data_offsets":[0,1073741824]}}'
    with (tmp_path / "model.safetensors").open("wb") as file:  # a file of one hole
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**30)
    command = [sys.executable, "-c", MAPPED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "CheckpointError: model.safetensors: cannot be read" in done.stderr
    assert "there is no memory to map it" in done.stderr


@pytest.mark.slow
def test_G10_a_failed_load_always_ends_with_exit_code_1(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:1000])
    for command in (["serve", str(folder), "--port", "0"], ["embed", "a", "--model", str(folder)]):
        for _ in range(40):
            done = subprocess.run([sys.executable, "-m", "whimbrel", *command], capture_output=True, check=False, timeout=120)
            assert (done.returncode, done.stderr.count(b"error: model.safetensors: ")) == (1, 1)


def test_G10_what_is_whole_is_served(folder: Path, saved: Path) -> None:
    """In shards too."""
    shards(folder)
    with Engine(str(folder), dtype="float32") as one, Engine(str(saved), dtype="float32") as other:
        assert np.array_equal(one.embed(["a bird"]), other.embed(["a bird"]))
