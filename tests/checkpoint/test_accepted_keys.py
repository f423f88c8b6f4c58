"""Unknown keys: metadata, keys that a person accepts, and all others, which are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModel

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import write
from whimbrel import Engine
from whimbrel.checkpoint.json_file import METADATA
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, SetupError

FILES = (
    "config.json",
    "tokenizer_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
def test_metadata_changes_nothing(file: str, folder: Path) -> None:
    """Every key of the table is known in every file of a checkpoint, and does not change its card."""
    card = read_card(folder, "m")
    before: dict[str, Any] = json.loads((folder / file).read_text())
    edit_json(folder / file, **{key: {"anything": [1]} for key in METADATA if key not in before})
    assert len(METADATA) > 100
    assert read_card(folder, "m") == card


@pytest.mark.parametrize("file", FILES)
def test_a_key_that_a_person_accepts(file: str, folder: Path) -> None:
    """It is refused with the way to accept it; accepted by its name it changes nothing."""
    card = read_card(folder, "m")
    edit_json(folder / file, house_style=3)
    with pytest.raises(CheckpointError, match=f"^{re.escape(file)}: house_style: this key .value 3. is not known") as refused:
        read_card(folder, "m")
    assert refused.value.hint is not None
    assert "--accept-config house_style" in refused.value.hint
    assert "accept_config=('house_style',)" in refused.value.hint
    assert read_card(folder, "m", accept_config=["house_style"]) == card
    with pytest.raises(CheckpointError, match="house_style"):  # of this one call
        read_card(folder, "m")


def test_an_accepted_key_that_is_nowhere(folder: Path) -> None:
    """It is an error, which names similar keys of the checkpoint."""
    with pytest.raises(SetupError, match="--accept-config hidden_sise: no JSON file of the checkpoint has this key") as refused:
        read_card(folder, "m", accept_config=["hidden_sise"])
    assert refused.value.hint is not None
    assert "hidden_size" in refused.value.hint
    edit_json(folder / "config.json", house_style=3)
    with pytest.raises(CheckpointError, match="house_style") as refused:  # the key that is not accepted is found first
        read_card(folder, "m", accept_config=["house_stile"])
    assert "house_stile, which is accepted, is another key" in str(refused.value.hint)


def test_an_accepted_key_that_is_known(folder: Path) -> None:
    """A key whose value matters is refused with a word that it is known; metadata may be accepted, as it changes nothing."""
    for key in ("hidden_size", "hidden_act", "pooling_mode_mean_tokens"):
        with pytest.raises(SetupError, match=f"--accept-config {key}: Whimbrel knows this key and goes by its value"):
            read_card(folder, "m", accept_config=[key])
    edit_json(folder / "config.json", author="me")
    assert read_card(folder, "m", accept_config=["author"]) == read_card(folder, "m")


def test_one_key_as_a_string(folder: Path) -> None:
    """It is that key, not its letters."""
    edit_json(folder / "config.json", house_style=3)
    assert read_card(folder, "m", accept_config="house_style") == read_card(folder, "m", accept_config=["house_style"])
    with Engine(str(folder), dtype="float32", accept_config="house_style") as engine:  # pyright: ignore[reportArgumentType]
        assert engine.plan.accept_config == ("house_style",)


def test_the_activation_of_scores_in_a_model_of_vectors(folder: Path) -> None:
    """CrossEncoder writes it into config.json; a model that gives vectors has no scores."""
    card = read_card(folder, "m")
    edit_json(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.Sigmoid", "version": "5.1.0"})
    assert read_card(folder, "m") == card
    edit_json(folder / "config.json", sentence_transformers={"pooling": "max"})
    with pytest.raises(CheckpointError, match="sentence_transformers: pooling: this key"):
        read_card(folder, "m")


@pytest.mark.parametrize("key", ["hf_repo", "co2", "__version__", "use_flash_attn", "neuron"])
def test_metadata_that_people_write(key: str) -> None:
    assert key in METADATA


def test_a_value_that_is_known_to_matter_is_not_accepted(folder: Path) -> None:
    """Only an unknown key can be accepted."""
    edit_json(folder / "config.json", is_decoder=True)
    with pytest.raises(CheckpointError, match=r"config\.json: is_decoder: True is not supported") as refused:
        read_card(folder, "m", accept_config=["is_decoder"])
    assert refused.value.hint is None


def test_an_engine_accepts_a_key_and_its_plan_says_so(folder: Path) -> None:
    with Engine(str(folder), dtype="float32") as engine:
        expected = engine.embed("birds")
    edit_json(folder / "config.json", house_style=3)
    with Engine(str(folder), dtype="float32", accept_config=("house_style",)) as engine:
        assert engine.plan.accept_config == ("house_style",)
        assert np.array_equal(engine.embed("birds"), expected)


def test_keys_of_models_that_transformers_runs(tmp_path: Path) -> None:
    """They are checked at load, and accepted there too."""
    write(tmp_path, "gpt2", bos_token_id=0, eos_token_id=0)
    AutoModel.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", house_style=3)
    assert read_card(tmp_path, "m", pooling="mean").encoder.family == "hf"
    with pytest.raises(CheckpointError, match="house_style") as refused:
        Engine(str(tmp_path), pooling="mean")
    assert refused.value.hint is not None
    with Engine(str(tmp_path), pooling="mean", accept_config=("house_style",)) as engine:
        assert engine.embed("birds").shape == (48,)
