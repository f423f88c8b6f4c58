"""H10 to H12 and G10 of the catalogue: folders from strangers. What could run code, read elsewhere or eat memory is refused.

G8 and more of G10 and H11 are in test_cli.py, where a user meets them.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import OLD, sentence_layout
from whimbrel import Engine
from whimbrel.errors import CheckpointError

TANH = "torch.nn.modules.activation.Tanh"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    write_bert(folder)
    sentence_layout(folder, heads=(("Dense", 20, TANH, {}), "Normalize"))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def sentinel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that the code in `folder` makes if anybody runs it. Root may read every file."""
    file = folder.parent / "sentinel"
    code = f"open({str(file)!r}, 'w').close()\nclass Evil: pass\ndef evil(*_): pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "2_Dense/modeling_evil.py"):
        (folder / name).write_text(code)
    for name in ("torch.py", "json.py", "tokenizers.py", "sitecustomize.py", "conftest.py"):
        (folder / name).write_text(code)
    monkeypatch.chdir(folder)
    yield file
    assert not file.exists(), "code of the checkpoint's folder was run"


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, Engine(str(folder), dtype="float32"):
        pass
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value


def vectors(folder: Path) -> Any:
    with Engine(str(folder), dtype="float32") as engine:
        return engine.embed(["a bird", "two birds"])


# H10: code

AUTO_MAP = {"AutoModel": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
CODE: list[tuple[str, str, Any]] = [
    ("config.json", "auto_map", AUTO_MAP),
    ("config.json", "auto_map", {"AutoModel": "somebody/else--modeling_evil.Evil"}),
    ("config.json", "trust_remote_code", True),
    ("config.json", "custom_pipelines", {"x": {"impl": "modeling_evil.Evil"}}),
    ("config.json", "architectures", ["Evil"]),
    ("config.json", "hidden_act", "os.abort"),
    ("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["tokenization_evil.Evil", None]}),
    ("tokenizer_config.json", "tokenizer_class", "modeling_evil.Evil"),
    ("tokenizer_config.json", "trust_remote_code", True),
    ("sentence_bert_config.json: model_args", "code_revision", "main"),
    ("sentence_bert_config.json: model_kwargs", "auto_map", AUTO_MAP),
    ("sentence_bert_config.json", "trust_remote_code", True),
    ("config_sentence_transformers.json", "trust_remote_code", True),
    ("config_sentence_transformers.json", "similarity_fn_name", "modeling_evil.evil"),
    ("1_Pooling/config.json", "pooling_mode", "modeling_evil.evil"),
    ("2_Dense/config.json", "activation_function", "os.abort"),
    ("2_Dense/config.json", "activation_function", "modeling_evil.Evil"),
    ("2_Dense/config.json", "activation_function", "torch.nn.modules.module.Module"),
    ("2_Dense/config.json", "activation_function", {"type": "os.abort"}),
    ("3_Normalize/config.json", "module_input_name", "modeling_evil.evil"),
]


@pytest.mark.parametrize(("file", "key", "value"), CODE, ids=lambda value: str(value)[:40])
def test_H10_what_names_code_is_refused(file: str, key: str, value: Any, folder: Path, sentinel: Path) -> None:
    name, _, inner = file.partition(": ")
    edit_json(folder / name, **({inner: {key: value}} if inner else {key: value}))
    error = refused(folder)
    assert (error.file, error.key) == (file, key)


@pytest.mark.parametrize("key", ["model_args", "config_args", "tokenizer_args", "model_kwargs"])
def test_H10_a_wish_to_be_trusted_is_nothing(key: str, folder: Path, saved: Path, sentinel: Path) -> None:
    """Files of jina-embeddings-v2 hold it. No code is run with it either."""
    edit_json(folder / "sentence_bert_config.json", **{key: {"trust_remote_code": True}})
    (folder / "modeling_evil.py").write_text(f"open({str(sentinel)!r}, 'w')")
    assert np.array_equal(vectors(folder), vectors(saved))


KINDS = ["modeling_evil.Evil", "2_Dense.modeling_evil.Evil", "os.abort", "builtins.eval", OLD + "LSTM", OLD + "Dense.__init__"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_H10_module_classes_come_from_a_list(kind: str, index: int, folder: Path, sentinel: Path) -> None:
    rows = json.loads((folder / "modules.json").read_text())
    rows[index]["type"] = kind
    write_json(folder / "modules.json", rows)
    assert (refused(folder).file, refused(folder).key) == ("modules.json", "type")


def test_H10_arguments_of_modules_are_refused(folder: Path, sentinel: Path) -> None:
    rows = json.loads((folder / "modules.json").read_text())
    rows[0]["kwargs"] = ["trust_remote_code"]
    write_json(folder / "modules.json", rows)
    assert refused(folder).key == "kwargs"


def test_H10_code_that_only_lies_there_is_not_run(folder: Path, saved: Path, sentinel: Path) -> None:
    """Not even where the folder is the current one, and files in it are named as modules that we import."""
    expected = vectors(saved)
    assert np.array_equal(vectors(folder), expected)
    command = [str(Path(sys.executable).with_name("whimbrel")), "embed", "a bird", "--model", ".", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120, cwd=folder)
    assert np.array_equal(np.array(json.loads(done.stdout)["embedding"], np.float32), expected[0])


# H11: pickles


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl", "model.pth"])
def test_H11_pickled_weights_alone_are_refused(name: str, folder: Path, sentinel: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"w": Bomb(sentinel)}))
    error = refused(folder)
    assert error.hint is not None
    assert "whimbrel convert" in error.hint
    assert error.file in ("pytorch_model.bin", "model.safetensors")


def test_H11_pickles_beside_safetensors_are_not_opened(folder: Path, saved: Path, sentinel: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "2_Dense/pytorch_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(sentinel)))
    assert np.array_equal(vectors(folder), vectors(saved))


@pytest.mark.parametrize("zipped", [False, True])
def test_H11_a_pickled_head_holds_tensors_and_nothing_else(zipped: bool, folder: Path, sentinel: Path) -> None:
    """The only pickle that is read: heads of old models, through torch's weights_only."""
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save({"linear.weight": Bomb(sentinel)}, folder / "2_Dense/pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert refused(folder).file == "2_Dense/pytorch_model.bin"


# H12: safetensors


def with_header(header: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def tensor(start: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def of(tensors: dict[str, Any], size: int) -> bytes:
    return with_header(json.dumps(tensors).encode(), data=bytes(size))


BOMBS = {
    "a header of 8 GB": with_header(b"{}", length=8 * 10**9),
    "a header of 2**64 - 1 bytes": with_header(b"{}", length=2**64 - 1),
    "a header longer than the file": with_header(b"{}", length=50),
    "a header of 99 MB that is not there": with_header(b"{}", length=99_000_000),
    "a header that is no JSON": with_header(b"not json"),
    "a header of 100,000 brackets": with_header(b"[" * 100_000),
    "a header that is no UTF-8": with_header(b'{"\xff": 1}'),
    "overlapping offsets": of({"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, 12),
    "offsets past the end": of({"a": tensor(0, 4_000_000_000, 1_000_000_000)}, 8),
    "offsets that end before they start": of({"a": tensor(8, 0, 2)}, 8),
    "negative offsets": of({"a": tensor(-8, 0, 2)}, 8),
    "a hole": of({"a": tensor(4, 12, 2)}, 12),
    "a shape that overflows": of({"a": tensor(0, 8, 2**32, 2**32, 2**32)}, 8),
    "a negative dimension": of({"a": tensor(0, 8, -2)}, 8),
    "an unknown dtype": of({"a": tensor(0, 8, 2, dtype="F3.5")}, 8),
    "bytes after the last tensor": of({"a": tensor(0, 8, 2)}, 4000),
}


@pytest.mark.parametrize("path", ["", "2_Dense"])
@pytest.mark.parametrize("how", BOMBS)
def test_H12_broken_headers_are_refused_at_no_cost(how: str, path: str, folder: Path) -> None:
    (folder / path / "model.safetensors").write_bytes(BOMBS[how])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refused(folder)
    assert error.file == f"{path}/model.safetensors".lstrip("/")
    assert "cannot be read" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def split_in_two(folder: Path) -> Path:
    """Make two shards of the weights; the index of shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / shard)
    weight_map = {name: shard for shard, some in shards.items() for name in some}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder / "model.safetensors.index.json"


def test_H12_shards_are_read_whatever_the_index_is_like_else(folder: Path, saved: Path) -> None:
    split_in_two(folder)
    assert np.array_equal(vectors(folder), vectors(saved))


OUTSIDE = [
    "../stolen.safetensors",
    "x/../../stolen.safetensors",
    "{absolute}",
    "..",
    ".",
    "",
    "a.bin",
    "x\0.safetensors",
    3,
    None,
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_H12_shards_are_files_of_the_folder(name: Any, folder: Path) -> None:
    index = split_in_two(folder)
    shutil.copy(folder / "b.safetensors", stolen := folder.parent / "stolen.safetensors")
    name = str(stolen) if name == "{absolute}" else name
    text = json.dumps(name)
    index.write_text(index.read_text().replace('"b.safetensors"', text))
    error = refused(folder)
    assert error.file in (index.name, name, repr(name))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": {}}}', "[" * 100_000, "\x00"])
def test_H12_a_broken_index_is_refused(content: str, folder: Path) -> None:
    index = split_in_two(folder)
    index.write_text(content)
    assert refused(folder).file == index.name


def link(path: Path, target: Path) -> None:
    """Move the file or folder `path` to `target`, and leave a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "2_Dense/model.safetensors", "config.json", "tokenizer.json", "1_Pooling", "2_Dense"]
)
def test_H12_links_that_lead_out_of_the_folder_are_refused(name: str, folder: Path) -> None:
    link(folder / name, folder.parent / "elsewhere")
    assert "leads out of the checkpoint's folder" in str(refused(folder))


def test_H12_a_shard_that_is_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    split_in_two(folder)
    link(folder / "b.safetensors", folder.parent / "elsewhere")
    assert refused(folder).file == "b.safetensors"


def test_H12_links_that_go_round_are_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert refused(folder).file == "config.json"


def within(folder: Path) -> Path:
    link(folder / "model.safetensors", folder / "big/weights")
    return folder


def linked_itself(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder)
    return folder.parent / "link"


def as_in_the_hub_s_cache(folder: Path, *, shared: bool = False) -> Path:
    """Every file is a link to a blob; shared ones to one of the whole cache."""
    snapshot = folder.parent / "hub/models--a--b/snapshots/abc"
    shutil.copytree(folder, snapshot)
    for number, file in enumerate(sorted(snapshot.rglob("*.*"))):
        if file.is_file():
            blob = folder.parent / f"hub/models--a--b/blobs/{number}"
            link(file, blob)
            if shared:
                link(blob, folder.parent / f"hub/blobs/00/{number}")
    return snapshot


def as_in_a_shared_cache(folder: Path) -> Path:
    return as_in_the_hub_s_cache(folder, shared=True)


@pytest.mark.parametrize("arrange", [within, linked_itself, as_in_the_hub_s_cache, as_in_a_shared_cache])
def test_H12_honest_links_are_followed(arrange: Callable[[Path], Path], folder: Path, saved: Path) -> None:
    assert np.array_equal(vectors(arrange(folder)), vectors(saved))


# G10: damaged files


@pytest.mark.parametrize(
    "file", ["model.safetensors", "2_Dense/model.safetensors", "config.json", "modules.json", "tokenizer.json"]
)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_G10_a_file_that_was_cut_short_is_named(file: str, keep: float, folder: Path) -> None:
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * keep)])
    assert refused(folder).file == file


@pytest.mark.parametrize("file", ["model.safetensors", "2_Dense/model.safetensors", "config.json", "tokenizer.json"])
def test_G10_a_file_that_is_missing_or_a_folder_is_named(file: str, folder: Path) -> None:
    (folder / file).unlink()
    assert refused(folder).file == file
    (folder / file).mkdir()
    assert refused(folder).file == file
