"""Configs that name no architecture, or one for another task, where vectors are wanted: read by model_type, as AutoModel does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from typer.testing import CliRunner

from checkpoints.classifiers import FAMILIES, SMALL, write_classifier
from checkpoints.encoders import write_bert
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from parity import Parity
from serving import Server
from texts import TEXTS
from whimbrel import Engine
from whimbrel.checkpoint.config import fallback, reader
from whimbrel.checkpoint.config.fallback import OTHER_TASKS
from whimbrel.checkpoint.reader import read_card
from whimbrel.checkpoint.summary import left_out, stated_architecture
from whimbrel.cli.main import app
from whimbrel.errors import CheckpointError

TEXTS = [text for text in TEXTS if text]
SEVERAL = ["modernbert of means", "eurobert of means"]
"""Cases of FAMILIES whose classes another case has."""
OTHER_BASE = [(family, "ForQuestionAnswering") for family in ("llama", "mistral", "qwen2", "qwen3")]
"""Classes whose base has another name in the weights, so that AutoModel makes random weights of them."""
CLASSES = [
    (family, form)
    for family in FAMILIES
    if family not in SEVERAL
    for form in sorted(("Model", *OTHER_TASKS))
    if hasattr(transformers, FAMILIES[family][0] + form) and (family, form) not in OTHER_BASE
]
UNSTATED: dict[str, Any] = {"absent": None, "null": "null", "empty": []}


def state(folder: Path, value: Any) -> None:
    """Write the value of `architectures`: None takes the key away."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures", None)
    if value is not None:
        config["architectures"] = None if value == "null" else value
    write_json(folder / "config.json", config)


def vectors(folder: Path, **options: Any) -> Any:
    with Engine(folder, dtype="float32", **options) as engine:
        found = engine.embed(TEXTS)
        assert (engine.embed(TEXTS[3]) == found[3]).all()
        return found


@pytest.mark.parametrize(("family", "form"), CLASSES, ids=[f"{family} {form}" for family, form in CLASSES])
@pytest.mark.sample(10)
def test_every_class_gives_the_vectors_of_its_model(family: str, form: str, parity: Parity, tmp_path: Path) -> None:
    """Beside a modules.json every class of a family gives what AutoModel does; its head is named, and so is what was read."""
    model = write_classifier(tmp_path, family, form)
    sentence_layout(tmp_path)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    name = FAMILIES[family][0]
    for stated in ([name + form], *UNSTATED.values()):
        state(tmp_path, stated)
        parity(vectors(tmp_path), expected)
        card = read_card(tmp_path, "m")
        said = stated_architecture(tmp_path, card)
        if not isinstance(stated, list) or not stated:
            assert said.endswith("by its model_type; config.json names no architecture")
        elif said:
            assert said.endswith(f"Model, by its model_type; config.json names {name + form}")
    own = {name.partition(".")[0] for name in load_file(tmp_path / "model.safetensors")} - {model.base_model_prefix}
    assert left_out(tmp_path, card) == ([] if form == "Model" else sorted(own))


def test_every_model_type_is_that_of_transformers() -> None:
    """A model_type alone says what runs it where transformers has a class for it, and nowhere else."""
    known = {model_type for model_type, _, _ in reader._FORMS.values()}  # pyright: ignore[reportPrivateUsage]
    stems = reader._STEMS  # pyright: ignore[reportPrivateUsage]
    if missing := stems.keys() - MODEL_MAPPING_NAMES.keys():
        pytest.skip(f"transformers {transformers.__version__} has no {', '.join(sorted(missing))}")
    assert set(stems) == known & set(MODEL_MAPPING_NAMES)
    for model_type, stem in stems.items():
        name = MODEL_MAPPING_NAMES[model_type]
        assert name.startswith(stem) or model_type == "internlm3", "transformers computes InternLM3 by LlamaModel"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_that_automodel_does_not_find_are_refused(family: str, tmp_path: Path) -> None:
    """The class for questions over a decoder calls its base by another name: AutoModel makes random weights of it."""
    write_classifier(tmp_path, family, "ForQuestionAnswering")
    sentence_layout(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: embed_tokens\.weight: this tensor is missing"):
        Engine(tmp_path)


def write_fallback(folder: Path, form: str) -> Any:
    """ALBERT, which transformers runs."""
    write_bert(folder)
    sizes = {**SMALL, "embedding_size": 24, "vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"]}
    model = getattr(transformers, f"Albert{form}")(transformers.AlbertConfig(**sizes)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "form", ["Model", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM", "ForSequenceClassification"]
)
def test_models_that_transformers_runs(form: str, parity: Parity, tmp_path: Path) -> None:
    """A family that is not Whimbrel's own is read by its model_type too."""
    write_fallback(tmp_path, form)
    sentence_layout(tmp_path)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    for stated in ([f"Albert{form}"], None):
        state(tmp_path, stated)
        parity(vectors(tmp_path), expected)
    assert stated_architecture(tmp_path, read_card(tmp_path, "m")).startswith("AlbertModel, by its model_type")


def test_a_tensor_that_is_no_head_is_refused(tmp_path: Path) -> None:
    """Only heads of transformers' classes are left out; another tensor may belong to the vectors."""
    for write in (write_bert, lambda folder: write_fallback(folder, "Model")):
        write(tmp_path)
        sentence_layout(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        save_file(weights | {"linear.weight": weights[min(weights)].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
        for stated in (None, json.loads((tmp_path / "config.json").read_text())["architectures"]):
            state(tmp_path, stated)
            with pytest.raises(CheckpointError, match=r"linear\.weight: this tensor is not known"):
                Engine(tmp_path, dtype="float32")


def test_a_plain_model_of_no_architecture_may_be_a_classifier(parity: Parity, tmp_path: Path) -> None:
    """It is no embedder unless the user says so; as one, it gives what Sentence Transformers makes of it."""
    write_classifier(tmp_path, "bert", num_labels=1)
    state(tmp_path, None)
    with pytest.raises(
        CheckpointError, match=r"config\.json: architectures: is missing, so this may be .* a reranker"
    ) as caught:
        Engine(tmp_path)
    assert '"architectures": ["BertForSequenceClassification"]' in str(caught.value.hint)
    assert "--pooling mean, as Sentence Transformers pools then" in str(caught.value.hint)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    parity(vectors(tmp_path, pooling="mean"), expected)
    assert left_out(tmp_path, read_card(tmp_path, "m", pooling="mean")) == ["classifier"]
    state(tmp_path, ["BertForSequenceClassification"])
    with Engine(tmp_path, dtype="float32") as engine:
        assert (list(engine.card.outputs), left_out(tmp_path, engine.card)) == (["scores"], [])
    parity(vectors(tmp_path, pooling="mean"), expected)


@pytest.mark.parametrize("stated", UNSTATED.values(), ids=UNSTATED)
def test_a_cross_encoder_that_its_files_state(stated: Any, parity: Parity, tmp_path: Path) -> None:
    """The task of the module says which class of the model_type it is."""
    write_classifier(tmp_path / "plain", "bert", num_labels=1)
    CrossEncoder(str(tmp_path / "plain"), device="cpu").save_pretrained(str(tmp_path / "saved"))
    state(tmp_path / "saved", stated)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    expected = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(pairs)
    with Engine(tmp_path / "saved", dtype="float32") as engine:
        parity(engine.score(*map(list, zip(*pairs, strict=True))), expected)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_sparse_encoder(family: str, parity: Parity, tmp_path: Path) -> None:
    """The language-modelling head is used, and not left out."""
    write_classifier(tmp_path / "plain", family, "ForMaskedLM")
    SparseEncoder(str(tmp_path / "plain"), device="cpu").save_pretrained(str(tmp_path / "saved"))
    state(tmp_path / "saved", None)
    expected = SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    with Engine(tmp_path / "saved", dtype="float32") as engine:
        found = np.zeros((len(TEXTS), engine.card.output("sparse").width), np.float32)
        for row, (ids, weights) in zip(found, engine.sparse(TEXTS), strict=True):
            row[ids] = weights
        assert left_out(tmp_path / "saved", engine.card) == []
    parity(found, np.array([row.tolist() for row in expected]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"model_type": None}, "model_type: is missing, and so is architectures"),
    "unknown": ({"model_type": "none"}, "architectures: is missing, and model_type 'none' does not tell"),
    "no class in transformers": ({"model_type": "new"}, "architectures: is missing, and model_type 'new' does not tell"),
    "own code": ({"auto_map": {"AutoModel": "modeling_mine.MyModel"}}, "auto_map: this checkpoint needs code of its own"),
    "own code of a known name": (
        {"auto_map": {"AutoModel": "modeling_mine.BertModel"}},
        "auto_map: this checkpoint needs code",
    ),
    "code for another task": (
        {"auto_map": {"AutoModelForMaskedLM": "modeling.BertForMaskedLM"}},
        "auto_map: this checkpoint needs",
    ),
    "wrong type": ({"architectures": "BertModel"}, "architectures: must be list, is 'BertModel'"),
    "another family": (
        {"architectures": ["RobertaForQuestionAnswering"]},
        "model_type: 'bert' is not supported; must be 'roberta'",
    ),
    "no class of transformers": (
        {"architectures": ["BertForMine"]},
        "architectures: 'BertForMine' is not supported; supported: BertModel",
    ),
    "two families": (
        {"architectures": ["BertForMultipleChoice", "RobertaForMultipleChoice"]},
        "architectures: 'BertForMultipleChoice' is not",
    ),
    "no name": ({"architectures": [7]}, "architectures: 7 is not supported"),
    "a decoder": ({"architectures": ["BertLMHeadModel"], "is_decoder": True}, "is_decoder: True is not supported"),
    "cannot be packed": ({"model_type": "deberta"}, "model_type: deberta cannot be run"),
    "ALiBi without its code": ({"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_refused(case: str, tmp_path: Path) -> None:
    """A config that does not tell what the model computes, or tells that it is another, is an error with file and key."""
    changes, says = REFUSED[case]
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", architectures=None)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        read_card(tmp_path, "m")
    assert str(caught.value).startswith(f"config.json: {says}")


def test_classes_that_are_not_supported_are_no_embedder(tmp_path: Path) -> None:
    """A plain classifier of a family without classes here is told as such, and as vectors only when asked."""
    write_bert(tmp_path)
    edit_json(tmp_path / "config.json", model_type="lfm2", architectures=["Lfm2ForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"classes of \['Lfm2ForSequenceClassification'\] are not supported. If you want"):
        read_card(tmp_path, "m")


def test_without_transformers_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model_type that transformers may know asks for the extra."""
    write_fallback(tmp_path, "Model")
    sentence_layout(tmp_path)
    state(tmp_path, None)
    for module in (fallback, reader):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "transformers" else True)
    with pytest.raises(CheckpointError, match=r"others need transformers: pip install 'whimbrel\[hf\]'"):
        read_card(tmp_path, "m")


def test_show_and_the_banner_name_what_is_left_out(tmp_path: Path) -> None:
    """They tell the class that runs, what config.json names, and the heads that no output uses."""
    write_classifier(tmp_path, "roberta", "ForQuestionAnswering")
    sentence_layout(tmp_path)
    shown = " ".join(CliRunner().invoke(app, ["show", str(tmp_path)]).output.split())
    said = "class RobertaModel, by its model_type; config.json names RobertaForQuestionAnswering left out qa_outputs"
    assert said in shown
    with Server(str(tmp_path), "--dtype", "float32") as server:
        assert said in " ".join(server.log.split())
