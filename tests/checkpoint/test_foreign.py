"""Folders that hold a model in another form: the error says what it is, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.encoders import write_bert
from checkpoints.files import write_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError

FORMS = [
    ("pytorch_model.bin", "only pickled weights are here", "whimbrel convert"),
    ("pytorch_model-00001-of-00002.bin", "only pickled weights are here", "whimbrel convert"),
    ("model-Q8_0.gguf", "is a GGUF file", "model.safetensors"),
    ("model.onnx", "is an ONNX file", "model.safetensors"),
    ("onnx/model_quantized.onnx", "is an ONNX file", "model.safetensors"),
    ("openvino_model.xml", "is a model of OpenVINO", "model.safetensors"),
    ("model.bin", "is a model of fastText or CTranslate2", "model.safetensors"),
    ("tf_model.h5", "are weights of TensorFlow", "model.safetensors"),
    ("flax_model.msgpack", "are weights of Flax", "model.safetensors"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("layout", ["alone", "with its config", "with modules"])
@pytest.mark.parametrize(("file", "what", "remedy"), FORMS)
def test_forms_of_weights_that_are_not_read(file: str, what: str, remedy: str, layout: str, tmp_path: Path) -> None:
    """The error names the file, what it is and the way on."""
    if layout != "alone":
        write_bert(tmp_path, num_hidden_layers=1)
        (tmp_path / "model.safetensors").unlink()
    if layout == "with modules":
        sentence_layout(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=what) as refused:
        Engine(str(tmp_path))
    assert refused.value.file == file
    assert refused.value.hint is not None
    assert remedy in refused.value.hint


@pytest.mark.parametrize("has_modules", [False, True])
def test_an_adapter_alone(has_modules: bool, tmp_path: Path) -> None:
    """A PEFT adapter names its model, also where Sentence Transformers saved it."""
    if has_modules:
        write_bert(tmp_path, num_hidden_layers=1)
        sentence_layout(tmp_path)
        (tmp_path / "config.json").unlink()
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-Embedding-0.6B"})
    with pytest.raises(
        CheckpointError, match=r"^adapter_config.json: this folder holds a PEFT adapter of Qwen/Qwen3"
    ) as refused:
        read_card(tmp_path, "m")
    assert refused.value.hint == (
        f"serve the model with the adapter: whimbrel serve Qwen/Qwen3-Embedding-0.6B --adapter NAME={tmp_path}"
    )


def test_a_pointer_in_place_of_a_json_file(tmp_path: Path) -> None:
    """A large tokenizer.json that Git LFS did not fetch is called that."""
    write_bert(tmp_path, num_hidden_layers=1)
    sentence_layout(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 711661\n")
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is a pointer of Git LFS") as refused:
        Engine(str(tmp_path))
    assert refused.value.hint is not None
    assert "git lfs pull" in refused.value.hint


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: not found in .*; is this a checkpoint's folder\?$"):
        read_card(tmp_path, "m")


def test_what_an_adapter_says_is_no_command(tmp_path: Path) -> None:
    """A hint may be pasted into a shell."""
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "a; rm b"})
    with pytest.raises(CheckpointError) as refused:
        read_card(tmp_path, "m")
    assert refused.value.hint is not None
    assert "whimbrel serve 'a; rm b' --adapter" in refused.value.hint
