"""Conversion of pickled weights: the same vectors, nothing run, nothing left of what failed."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoints.bge_m3 import write_m3
from checkpoints.encoders import write_bert
from checkpoints.files import write_json
from checkpoints.sentence_layout import sentence_layout
from waiting import wait_for
from whimbrel import Engine
from whimbrel.checkpoint.convert import Converted
from whimbrel.checkpoint.convert import convert as convert_checkpoint
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.cli.main import app
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.model import unpickle

TEXTS = ["A whimbrel is a wader.", "a sandwich", "雪 and 🙂"]


def pickled(folder: Path, *, shards: int = 0) -> dict[str, Any]:
    """Write the weights of a folder as pickles in place of safetensors; the tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not shards:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    places: dict[str, str] = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        torch.save(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return tensors


def run(folder: Path, out: Path, check: Callable[[Path], None] = lambda _: None) -> Converted:
    return convert_checkpoint(resolve_checkpoint(str(folder)), out, check=check, progress=lambda _: None)


def write_dense(folder: Path) -> None:
    torch.manual_seed(7)
    write_bert(folder)
    sentence_layout(folder)


def left_of(out: Path) -> list[str]:
    """Return the files that lie beside the source."""
    return sorted(each.name for each in out.parent.iterdir() if each.name != "source")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_dense(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("shards", [0, 3])
def test_converted_weights_give_the_same_bits(shards: int, source: Path, tmp_path: Path) -> None:
    """A converted checkpoint gives the vectors of its source bit for bit, and has all its other files."""
    with Engine(str(source), dtype="float32") as engine:
        expected = engine.embed(TEXTS)
    others = {each.relative_to(source) for each in source.rglob("*") if each.is_file()} - {Path("model.safetensors")}
    tensors = pickled(source, shards=shards)
    result = CliRunner().invoke(app, ["convert", str(source), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert f"wrote {len(tensors)} tensors" in result.output
    with Engine(str(tmp_path / "out"), dtype="float32") as engine:
        np.testing.assert_array_equal(engine.embed(TEXTS), expected)
    found = {each.relative_to(tmp_path / "out") for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert {each for each in found if each.suffix != ".safetensors"} - others == (
        {Path("model.safetensors.index.json")} if shards else set()
    )
    assert others <= found
    assert left_of(tmp_path / "out") == ["out"]


def test_bge_m3_as_the_hub_has_it(tmp_path: Path) -> None:
    """BGE-M3's dense, sparse and token vectors are those of its pickled source; its heads come along as they are."""
    torch.manual_seed(7)
    write_m3(tmp_path / "source")
    with Engine(str(tmp_path / "source"), dtype="float32") as engine:
        expected = engine.encode(TEXTS, outputs=("dense", "sparse", "multi_vector"))
    pickled(tmp_path / "source")
    run(tmp_path / "source", tmp_path / "out")
    with Engine(str(tmp_path / "out"), dtype="float32") as engine:
        found = engine.encode(TEXTS, outputs=("dense", "sparse", "multi_vector"))
    np.testing.assert_array_equal(found.dense, expected.dense)
    for i in range(len(TEXTS)):
        np.testing.assert_array_equal(found.multi_vector[i], expected.multi_vector[i])
        np.testing.assert_array_equal(found.sparse[i][1], expected.sparse[i][1])
    assert (tmp_path / "out" / "sparse_linear.pt").read_bytes() == (tmp_path / "source" / "sparse_linear.pt").read_bytes()


def test_pickled_weights_are_never_read_without_being_asked(source: Path) -> None:
    """A folder of pickles is refused by every other verb, with the command that converts it."""
    pickled(source)
    with pytest.raises(CheckpointError) as caught:
        Engine(str(source))
    assert f"whimbrel convert {source} --out DIR" in str(caught.value.hint)


class Evil:
    """An object that would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", ["torch", "plain"])
def test_a_pickle_with_code_is_refused_and_nothing_runs(protocol: str, source: Path, tmp_path: Path) -> None:
    """A pickle that would run code runs none, and nothing is written."""
    tensors: dict[str, Any] = pickled(source)
    file = source / "pytorch_model.bin"
    content = tensors | {"evil": Evil(tmp_path / "ran")}
    if protocol == "torch":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read as tensors alone") as refused:
        run(source, tmp_path / "out")
    assert "weights_only" not in str(refused.value)
    if protocol == "torch":
        assert "it names posix.system, which is no part of a tensor" in str(refused.value)
    assert not (tmp_path / "ran").exists()
    assert left_of(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": 3}, "'a' is int, no tensor"),
        ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is dict, no tensor"),
        ([torch.ones(2)], "something else than tensors by name"),
        ({}, "something else than tensors by name"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "'a' has dtype torch.complex128; known are bfloat16, bool"),
        ({3: torch.ones(2)}, "'3' is Tensor, no tensor by name"),
        ({"a": torch.tensor([1.0, float("nan")])}, "'a' has values that are no numbers"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' is no plain tensor"),
        ({"a": torch.empty(2, device="meta")}, "'a' is no plain tensor"),
        (None, "something else than tensors by name"),
    ],
)
def test_what_is_no_plain_tensor_is_refused(content: Any, words: str, source: Path, tmp_path: Path) -> None:
    """A pickle of anything but plain tensors by name is refused with the name of what it holds."""
    pickled(source)
    torch.save(content, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        run(source, tmp_path / "out")
    assert words in str(caught.value)
    assert left_of(tmp_path / "out") == []


@pytest.mark.parametrize("cut", [0, 100, -100])
@pytest.mark.sample(1)
def test_a_pickle_that_is_cut_off_is_refused(cut: int, source: Path, tmp_path: Path) -> None:
    """A pickle that ends early is refused."""
    pickled(source)
    whole = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"cannot be read as tensors alone, .*: it is damaged, or no file of torch\.save"):
        run(source, tmp_path / "out")
    assert left_of(tmp_path / "out") == []


def test_a_pointer_in_place_of_a_pickle(source: Path, tmp_path: Path) -> None:
    """A pickle that Git LFS did not fetch is called that, by the conversion and where it is refused."""
    pickled(source)
    (source / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 711661\n")
    for attempt in (lambda: run(source, tmp_path / "out"), lambda: Engine(str(source))):
        with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin: is a pointer of Git LFS"):
            attempt()
    assert left_of(tmp_path / "out") == []


def test_an_adapter_with_the_config_of_its_model(source: Path, tmp_path: Path) -> None:
    """A folder of a PEFT adapter is called that, and not sent in a circle, also if config.json and modules.json are in it."""
    tensors = pickled(source)
    (source / "pytorch_model.bin").unlink()
    write_json(source / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    save_file({"a": torch.ones(1)}, source / "adapter_model.safetensors")
    for attempt in (lambda: run(source, tmp_path / "out"), lambda: Engine(str(source))):
        with pytest.raises(
            CheckpointError, match=r"^adapter_config\.json: this folder holds a PEFT adapter of org/base"
        ) as refused:
            attempt()
        assert "whimbrel serve org/base --adapter" in str(refused.value.hint)
    torch.save(tensors, source / "pytorch_model.bin")  # a model beside its adapter can be converted
    assert run(source, tmp_path / "out").num_tensors == len(tensors)


def test_others_may_read_what_is_written(source: Path, tmp_path: Path) -> None:
    """All files of the new folder have the same rights, and the size that is told is never 0."""
    pickled(source)
    result = CliRunner().invoke(app, ["convert", str(source), "--out", str(tmp_path / "out")])
    (tmp_path / "other").touch()
    expected = oct((tmp_path / "other").stat().st_mode & 0o777)
    assert {oct(each.stat().st_mode & 0o777) for each in (tmp_path / "out").rglob("*") if each.is_file()} == {expected}
    assert re.search(r"tensors, [1-9]\d* kB, to ", result.output) is not None, result.output


def test_shared_and_strided_tensors_are_written_whole(source: Path, tmp_path: Path) -> None:
    """Tensors that share memory, or lie in it otherwise, have the same numbers afterwards."""
    tensors = pickled(source)
    base = torch.arange(12.0).reshape(3, 4)
    torch.save(
        tensors | {"x.all": base, "x.part": base[1:], "x.turned": base.T, "x.p": torch.nn.Parameter(base)},
        source / "pytorch_model.bin",
    )
    run(source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in {"x.all": base, "x.part": base[1:], "x.turned": base.T, "x.p": base}.items():
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize("of_modules_alone", [False, True])
def test_pickles_of_modules_are_converted(of_modules_alone: bool, tmp_path: Path) -> None:
    """A module's pickle becomes safetensors too, also where the Transformer has them already; the vectors stay the same."""
    source, out = tmp_path / "source", tmp_path / "out"
    torch.manual_seed(7)
    write_bert(source)
    sentence_layout(source, heads=(("Dense", 20, "torch.nn.modules.activation.Tanh", {}), "Normalize"))
    with Engine(str(source), dtype="float32") as engine:
        expected = engine.embed(TEXTS)
    num_tensors = len(pickled(source / "2_Dense")) + (0 if of_modules_alone else len(pickled(source)))
    result = CliRunner().invoke(app, ["convert", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"wrote {num_tensors} tensors" in result.output
    assert list(out.rglob("*.bin")) == []
    found, stated = load_file(out / "2_Dense/model.safetensors"), torch.load(source / "2_Dense/pytorch_model.bin")
    assert found.keys() == stated.keys()
    assert all(torch.equal(found[name], stated[name]) for name in stated)
    with Engine(str(out), dtype="float32") as engine:
        np.testing.assert_array_equal(engine.embed(TEXTS), expected)


def test_a_place_in_the_source(source: Path) -> None:
    """The new folder must not be in the folder that is copied."""
    pickled(source)
    before = sorted(source.rglob("*"))
    with pytest.raises(SetupError, match="is in the model's folder"):
        run(source, source / "out")
    assert sorted(source.rglob("*")) == before


def test_links_that_lead_elsewhere(source: Path, tmp_path: Path) -> None:
    """Other files of the machine are not copied, and no folder is left out silently."""
    pickled(source)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    for target, words in (("secret", "leads out"), ("", "link to a folder")):
        (source / "link").symlink_to(tmp_path / "elsewhere" / target)
        with pytest.raises(CheckpointError, match=f"^link: .*{words}"):
            run(source, tmp_path / "out")
        (source / "link").unlink()
    (source / "pytorch_model.bin").rename(tmp_path / "elsewhere" / "weights")
    (source / "pytorch_model.bin").symlink_to(tmp_path / "elsewhere" / "weights")
    with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin: .*leads out"):
        run(source, tmp_path / "out")
    assert left_of(tmp_path / "out") == ["elsewhere"]


@contextmanager
def reading(source: Path, out: Path) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """Convert in another process, and give it and the id of the process that reads, which is stopped."""
    command = [sys.executable, "-m", "whimbrel", "convert", str(source), "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert wait_for(children.read_text)
        reader = int(children.read_text())
        # A child has its parent's memory, and with it PyTorch, until it runs its own program.
        assert wait_for(lambda: b"unpickle" in Path(f"/proc/{reader}/cmdline").read_bytes())
        assert wait_for(lambda: "libtorch" in Path(f"/proc/{reader}/maps").read_text())
        os.kill(reader, signal.SIGSTOP)
        try:
            yield process, reader
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(reader, signal.SIGKILL)


def has_ended(process: int) -> bool:
    """Return True if no process has this id, or only a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing(name: str, source: Path, tmp_path: Path) -> None:
    """Ctrl-C and the signals that end a service leave no files and no process that reads."""
    pickled(source)
    number = getattr(signal, name)
    with reading(source, tmp_path / "out") as (process, reader):
        assert left_of(tmp_path / "out") != []
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert left_of(tmp_path / "out") == []
    assert wait_for(lambda: has_ended(reader))


@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends it")
def test_a_reader_ends_with_its_parent(source: Path, tmp_path: Path) -> None:
    """A conversion that is killed leaves no process that goes on reading."""
    pickled(source)
    with reading(source, tmp_path / "out") as (process, reader):
        process.kill()
        assert wait_for(lambda: has_ended(reader), seconds=60)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: you tried to allocate 1 byte")], ids=repr)
def test_a_machine_without_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lack of memory is told as that, not as a full disk or a bad pickle."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(unpickle, "leave_network", lambda: True)
    monkeypatch.setattr(unpickle, "end_with_parent", lambda _: None)
    monkeypatch.setattr(unpickle.resource, "setrlimit", lambda *_: None)
    assert unpickle.main("1", "folder", "out", "pytorch_model.bin", "model.safetensors") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["kind"]) == ("pytorch_model.bin", "memory")


def test_places_that_are_taken(source: Path, tmp_path: Path) -> None:
    """Nothing is overwritten: --out is a new folder, or an empty one, whose parent exists."""
    pickled(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    (tmp_path / "file").touch()
    for place in ("full", "file", "no/where"):
        with pytest.raises(SetupError, match="--out"):
            run(source, tmp_path / place)
    (tmp_path / "empty").mkdir()
    assert run(source, tmp_path / "empty").num_tensors > 10


def test_nothing_to_convert(source: Path, tmp_path: Path) -> None:
    """A checkpoint of safetensors, or without weights, is refused."""
    with pytest.raises(CheckpointError, match="safetensors already"):
        run(source, tmp_path / "out")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="nothing to convert"):
        run(source, tmp_path / "out")


def test_an_index_that_does_not_fit(source: Path, tmp_path: Path) -> None:
    """An index that names other tensors, files elsewhere or none is refused."""
    pickled(source, shards=2)
    index = source / "pytorch_model.bin.index.json"
    told = json.loads(index.read_text())
    for weight_map, words in (
        (told["weight_map"] | {"more": "pytorch_model-00001-of-00002.bin"}, "does not say where 'more' is"),
        ({"a": "../../etc/passwd"}, "names no files of weights beside it"),
        ({}, "names no files of weights"),
        ([], "must be dict"),
        ({"a": 3}, "names no files of weights"),
        ({"a": "pytorch_model-9.bin"}, "not found"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=words):
            run(source, tmp_path / "out")
        assert left_of(tmp_path / "out") == []


def test_a_check_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A conversion that could not be loaded, or is interrupted, leaves nothing behind."""
    pickled(source)

    def refuse(error: BaseException, folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise error

    for error in (CheckpointError("x", file="y"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            run(source, tmp_path / "out", partial(refuse, error))
        assert left_of(tmp_path / "out") == []


def test_a_disk_that_fills_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full while files are copied, or while weights are written, is one line, and nothing is left."""
    pickled(source)
    popen = subprocess.Popen
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); from whimbrel.model import unpickle; sys.exit(unpickle.main(*sys.argv[1:]))"

    def start(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", limited, *command[4:]], **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        with pytest.raises(SetupError, match="Nothing is left of it"):
            run(source, tmp_path / "out")
    assert left_of(tmp_path / "out") == []

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SetupError, match="No space left on device"):
        run(source, tmp_path / "out")
    assert left_of(tmp_path / "out") == []


def test_a_reader_that_is_killed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading process that is killed is one line, and nothing is left."""
    pickled(source)
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)
    )
    with pytest.raises(CheckpointError, match="ended with -9"):
        run(source, tmp_path / "out")
    assert left_of(tmp_path / "out") == []


def test_the_reader_has_no_network_and_no_keys(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads pickles has no secret in its environment, and no network where it can give it up."""
    pickled(source)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WHIMBREL_API_KEY", "secret")
    seen: dict[str, str] = {}
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        seen.update(options.get("env") or {})
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    run(source, tmp_path / "out")
    assert "secret" not in json.dumps(seen)
    code = "from whimbrel.model.unpickle import leave_network; import socket; print(leave_network()); socket.create_connection(('127.0.0.1', 9), 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    if done.stdout.startswith("False"):
        pytest.skip("this system lets no process give up its network")
    assert "Network is unreachable" in done.stderr


def test_files_of_other_versions(source: Path) -> None:
    """A pickle that torch wrote before it wrote zips is read too."""
    tensors = pickled(source)
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = unpickle.read_tensors(source / "pytorch_model.bin")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
