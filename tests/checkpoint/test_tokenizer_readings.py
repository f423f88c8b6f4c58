"""Readings of a tokenizer's files: as transformers 5, as transformers 4, or tokenizer.json as it is, and the choice between them.

The ids are written down, so that they do not depend on the version of transformers that is installed. Those of transformers 4
were made with 4.57.6 (tokenizers 0.22.2), those of transformers 5 with 5.23.0 (tokenizers 0.23.3).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from transformers import AutoTokenizer

from checkpoints.classifiers import write_classifier
from checkpoints.encoders import bert_tokenizer, write_bert
from checkpoints.families import DECODER, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.late_interaction import write_pylate, write_stanford
from checkpoints.letter_tokenizers import LAYOUTS, around, write_tokenizer
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import load
from hidden_states import reference_states
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.types.request import Request

JSON = dict[str, Any]

TEXTS = ["ab", " a", "a  b", "a b ", "a\nb", "AB"]
PAIR = ("a", "b")
IDS: dict[str, dict[str, str]] = {
    "e5-mistral": {
        "transformers-4": "1 3 4 5 2 | 1 3 3 4 2 | 1 3 4 3 3 5 2 | 1 3 4 3 5 3 2 | 1 3 4 0 5 2 | 1 3 30 31 2 | 1 3 4 2 1 3 5 2",
        "transformers": "1 3 4 5 | 1 3 3 4 | 1 3 4 3 3 5 | 1 3 4 3 5 3 | 1 3 4 0 5 | 1 3 30 31 | 1 3 4 1 3 5",
        "file": "1 3 4 5 | 1 3 3 4 | 1 3 4 3 3 5 | 1 3 4 3 5 3 | 1 3 4 0 5 | 1 3 30 31 | 1 3 4 1 3 5",
    },
    "llama": {
        "transformers-4": "1 3 4 5 2 | 1 3 3 4 2 | 1 3 4 3 3 5 2 | 1 3 4 3 5 3 2 | 1 3 4 0 5 2 | 1 3 30 31 2 | 1 3 4 2 1 3 5 2",
        "transformers": "1 3 4 5 | 1 3 4 | 1 3 4 3 3 5 | 1 3 4 3 5 3 | 1 3 4 5 | 1 3 30 31 | 1 3 4 1 3 5",
        "file": "1 3 4 5 | 1 3 3 4 | 1 3 4 3 3 5 | 1 3 4 3 5 3 | 1 3 4 0 5 | 1 3 30 31 | 1 3 4 1 3 5",
    },
    "llama without flags": {
        "transformers-4": "1 3 4 5 | 1 3 3 4 | 1 3 4 3 3 5 | 1 3 4 3 5 3 | 1 3 4 0 5 | 1 3 30 31 | 1 3 4 1 3 5",
        "transformers": "1 3 4 5 2 | 1 3 4 2 | 1 3 4 3 3 5 2 | 1 3 4 3 5 3 2 | 1 3 4 5 2 | 1 3 30 31 2 | 3 4 3 5",
        "file": "1 3 4 5 2 | 1 3 3 4 2 | 1 3 4 3 3 5 2 | 1 3 4 3 5 3 2 | 1 3 4 0 5 2 | 1 3 30 31 2 | 3 4 3 5",
    },
    "llama without a post-processor": {
        "transformers-4": "1 3 4 5 2 | 1 3 3 4 2 | 1 3 4 3 3 5 2 | 1 3 4 3 5 3 2 | 1 3 4 0 5 2 | 1 3 30 31 2 | 1 3 4 2 1 3 5 2",
        "transformers": "3 4 5 | 3 4 | 3 4 3 3 5 | 3 4 3 5 3 | 3 4 5 | 3 30 31 | 3 4 3 5",
        "file": "3 4 5 | 3 3 4 | 3 4 3 3 5 | 3 4 3 5 3 | 3 4 0 5 | 3 30 31 | 3 4 3 5",
    },
    "gemma": {
        "transformers-4": "2 5 6 1 | 2 4 5 1 | 2 5 4 4 6 1 | 2 5 4 6 4 1 | 2 5 3 6 1 | 2 31 32 1 | 2 5 1 2 6 1",
        "transformers": "2 5 6 | 2 4 5 | 2 5 4 4 6 | 2 5 4 6 4 | 2 5 3 6 | 2 31 32 | 2 5 2 6",
        "file": "2 5 6 | 2 4 5 | 2 5 4 4 6 | 2 5 4 6 4 | 2 5 3 6 | 2 31 32 | 2 5 2 6",
    },
    "qwen2": {
        "transformers-4": "4 5 | 2 4 | 4 2 2 5 | 4 2 5 2 | 4 3 5 | 30 31 | 4 5",
        "transformers": "4 5 | 2 4 | 4 2 2 5 | 4 2 5 2 | 4 3 5 | 30 31 | 4 5",
        "file": "4 5 | 2 4 | 4 2 2 5 | 4 2 5 2 | 4 3 5 | 30 31 | 4 5",
    },
    "deepseek": {
        "transformers-4": "0 5 6 | 0 3 5 | 0 5 3 3 6 | 0 5 3 6 3 | 0 5 4 6 | 0 31 32 | 0 5 0 6",
        "transformers": "5 6 | 3 5 | 5 3 3 6 | 5 3 6 3 | 5 4 6 | 31 32 | 5 6",
        "file": "5 6 | 3 5 | 5 3 3 6 | 5 3 6 3 | 5 4 6 | 31 32 | 5 6",
    },
    "olmo2": {
        "transformers-4": "3 4 0 | 1 3 0 | 3 1 1 4 0 | 3 1 4 1 0 | 3 2 4 0 | 29 30 0 | 3 0 4 0",
        "transformers": "3 4 | 1 3 | 3 1 1 4 | 3 1 4 1 | 3 2 4 | 29 30 | 3 4",
        "file": "3 4 | 1 3 | 3 1 1 4 | 3 1 4 1 | 3 2 4 | 29 30 | 3 4",
    },
    "bert in capitals": {
        "transformers-4": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 4 37 3 | 2 4 3 5 3",
        "transformers": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 4 37 3 | 2 4 3 5 3",
        "file": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 30 63 3 | 2 4 3 5 3",
    },
    "bert in lower case": {
        "transformers-4": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 4 37 3 | 2 4 3 5 3",
        "transformers": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 30 63 3 | 2 4 3 5 3",
        "file": "2 4 37 3 | 2 4 3 | 2 4 5 3 | 2 4 5 3 | 2 4 5 3 | 2 4 37 3 | 2 4 3 5 3",
    },
    "roberta with a space": {
        "transformers-4": "0 6 7 2 | 0 4 6 2 | 0 6 4 4 7 2 | 0 6 4 7 4 2 | 0 6 5 7 2 | 0 32 33 2 | 0 6 2 2 7 2",
        "transformers": "0 6 7 2 | 0 4 6 2 | 0 6 4 4 7 2 | 0 6 4 7 4 2 | 0 6 5 7 2 | 0 32 33 2 | 0 6 2 2 7 2",
        "file": "0 4 6 7 2 | 0 4 6 2 | 0 4 6 4 4 7 2 | 0 4 6 4 7 4 2 | 0 4 6 5 7 2 | 0 4 32 33 2 | 0 4 6 2 2 4 7 2",
    },
    "xlm-roberta": {
        "transformers-4": "0 4 5 6 2 | 0 4 5 2 | 0 4 5 4 4 6 2 | 0 4 5 4 6 4 2 | 0 4 5 3 6 2 | 0 4 31 32 2 | 0 4 5 2 2 4 6 2",
        "transformers": "0 4 5 6 2 | 0 4 5 2 | 0 4 5 4 6 2 | 0 4 5 4 6 2 | 0 4 5 4 6 2 | 0 4 31 32 2 | 0 4 5 2 2 4 6 2",
        "file": "0 4 5 6 2 | 0 4 5 2 | 0 4 5 4 4 6 2 | 0 4 5 4 6 4 2 | 0 4 5 3 6 2 | 0 4 31 32 2 | 0 4 5 2 2 4 6 2",
    },
}
"""Layout -> reading -> ids of each text, then of the pair."""
NAMES = {"mistral": "Mistral", "llama": "Llama", "gemma": "Gemma", "qwen2": "Qwen2", "olmo2": "Olmo2"}
ENCODERS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
SMALL = DECODER | {"vocab_size": 80, "max_position_embeddings": 64}
VERSION = "4.34.0"


def write_config(folder: Path, name: str, version: object = VERSION, **config: Any) -> None:
    """A folder with the files of a layout and a config.json that was written with a version of transformers."""
    model_type, *_ = LAYOUTS[name]
    sizes = {"vocab_size": 80, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    decoder = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
    activation = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 12} if model_type == "gemma" else {}
    encoder = {"type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    own = decoder | activation if model_type in NAMES else encoder
    about = {"model_type": model_type, "max_position_embeddings": 64, "pad_token_id": 0, "transformers_version": version}
    write_tokenizer(folder, name, **config)
    write_json(folder / "config.json", {"architectures": [f"{(NAMES | ENCODERS)[model_type]}Model"], **sizes, **own, **about})


def encode(folder: Path, reading: str | None) -> list[list[int]]:
    raw = load(folder, pooling="mean", tokenizer=reading).backend.raw
    return [*(raw.encode(text).ids for text in TEXTS), raw.encode(*PAIR).ids]


def stated(name: str, reading: str) -> list[list[int]]:
    return [[int(number) for number in row.split()] for row in IDS[name][reading].split("|")]


@pytest.mark.parametrize("reading", ["transformers-4", "transformers", "file"])
@pytest.mark.parametrize("name", IDS)
def test_each_reading_gives_the_ids_of_its_program(name: str, reading: str, tmp_path: Path) -> None:
    write_config(tmp_path, name)
    assert encode(tmp_path, reading) == stated(name, reading)


@pytest.mark.parametrize("name", IDS)
def test_the_default_is_the_newest_but_for_special_tokens_of_the_version_that_made_the_model(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, name)
    differs = stated(name, "transformers-4")[0] != stated(name, "transformers")[0]
    reading = "transformers-4" if differs else "transformers"
    for option in (None, "auto"):
        assert encode(tmp_path, option) == stated(name, reading)
    card = read_card(tmp_path, "m", pooling="mean")
    assert (card.tokenizer.reading, bool(card.tokenizer.reason)) == (reading, differs)


BEGIN_AND_END = {"mistral": (1, 2), "llama": (1, 2), "gemma": (2, 1), "qwen2": (None, None)}
"""Ids of the tokens that the flags add; Qwen2's class has no such flags, in no version."""
BODIES: dict[str, list[list[int]]] = {
    "mistral": [[3, 4, 5], [3, 30, 31]],
    "llama": [[3, 4, 5], [3, 30, 31]],
    "gemma": [[5, 6], [31, 32]],
    "qwen2": [[4, 5], [30, 31]],
}
"""Ids of "ab" and "AB" alone."""
PUBLISHED = {"mistral": "e5-mistral", "llama": "llama", "gemma": "gemma", "qwen2": "qwen2"}


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize(("begins", "ends"), [*product([True, False], repeat=2)])
@pytest.mark.parametrize("family", BEGIN_AND_END)
def test_the_flags_of_a_model_that_was_made_with_transformers_4(
    family: str, begins: bool, ends: bool, pooling: str, parity: Parity, tmp_path: Path
) -> None:
    """Whatever the post-processor, which adds only a token that begins a text; the vectors are those of these ids."""
    head = {"head_dim": 16} if family == "gemma" else {}
    model = write_model(tmp_path, NAMES[family], SMALL | head)
    write_tokenizer(tmp_path, PUBLISHED[family], add_bos_token=begins, add_eos_token=ends)
    edit_json(tmp_path / "config.json", transformers_version="4.40.1")
    sentence_layout(tmp_path, modes=(pooling,), heads=("Normalize",), max_seq_length=32)
    begin, end = BEGIN_AND_END[family]
    rows = [[*([begin] if begins else []), *body, *([end] if ends else [])] for body in BODIES[family]]
    rows = [np.array([number for number in row if number is not None], np.int32) for row in rows]
    with Engine(str(tmp_path), dtype="float32") as engine:
        seqs = [engine.preprocessor.preprocess(Request([text])).seqs[0] for text in ("ab", "AB")]
        assert [seq.ids.tolist() for seq in seqs] == [row.tolist() for row in rows]
        got = engine.embed(["ab", "AB"])
        assert np.array_equal(got[0], engine.embed("ab"))
    expected = np.stack([one[-1] if pooling == "lasttoken" else one.mean(0) for one in reference_states(model, rows)])
    parity(got, expected / np.linalg.norm(expected, axis=1, keepdims=True))


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_the_published_e5_mistral(pooling: str, parity: Parity, tmp_path: Path) -> None:
    """Its own vector is that with </s>, which Sentence Transformers gives with transformers 4, or if it is told both flags."""
    write_model(tmp_path, "Mistral", SMALL)
    write_tokenizer(tmp_path, "e5-mistral", pad_token="</s>")
    edit_json(tmp_path / "config.json", transformers_version=VERSION)
    sentence_layout(tmp_path, modes=(pooling,), heads=("Normalize",), max_seq_length=32)
    flags = {"add_bos_token": True, "add_eos_token": True}
    right = SentenceTransformer(str(tmp_path), device="cpu", processor_kwargs=flags).encode(TEXTS)
    wrong = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        parity(engine.embed(TEXTS), right)
        assert engine.plan.tokenizer == "transformers-4"
    with Engine(str(tmp_path), dtype="float32", tokenizer="transformers") as engine:
        parity(engine.embed(TEXTS), wrong)
    assert (right * wrong).sum(1).min() < 0.99


REFUSED: dict[str, tuple[object, JSON, JSON]] = {
    "version 5, which writes no flags": ("5.23.0", {}, {}),
    "no version": (None, {}, {}),
    "a version that is none": ("four", {}, {}),
    "an empty version": ("", {}, {}),
    "a version of another type": (4, {}, {}),
    "versions that disagree": ("4.34.0", {}, {"transformers": "5.1.0"}),
    "versions that disagree the other way": ("5.1.0", {}, {"transformers": "4.34.0"}),
    "one flag": (None, {"add_bos_token": "ABSENT"}, {}),
}
"""Version in config.json, changes of tokenizer_config.json, versions in config_sentence_transformers.json."""


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("case", REFUSED)
def test_files_that_disagree_and_do_not_tell_are_refused(case: str, pooling: Any, tmp_path: Path) -> None:
    version, config, versions = REFUSED[case]
    write_config(tmp_path, "e5-mistral", version, **config)
    if versions:
        write_json(tmp_path / "config_sentence_transformers.json", {"__version__": versions})
    with pytest.raises(CheckpointError, match=r"^tokenizer_config\.json: add_eos_token: with .*add_eos_token true, ") as caught:
        read_card(tmp_path, "m", pooling=pooling)
    assert "'<s> A </s>' of a text" in str(caught.value)
    assert "--tokenizer transformers-4 makes '<s> A </s>', --tokenizer transformers '<s> A'" in str(caught.value.hint)
    for reading in ("transformers-4", "transformers", "file"):
        assert read_card(tmp_path, "m", pooling=pooling, tokenizer=reading).tokenizer.reading == reading


@pytest.mark.parametrize("version", ["5.23.0", None, 4, VERSION])
@pytest.mark.parametrize("name", ["llama without flags", "qwen2", "bert in capitals"])
def test_files_without_a_flag_that_counts_are_not_refused(name: str, version: object, tmp_path: Path) -> None:
    write_config(tmp_path, name, version)
    is_old = version == VERSION and name.startswith("llama")
    assert encode(tmp_path, None) == stated(name, "transformers-4" if is_old else "transformers")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_tokenizer_that_transformers_5_saved_again(name: str, tmp_path: Path) -> None:
    """It writes no flags, but the tokens that they ask for into the post-processor. config.json keeps the older version."""
    write_config(tmp_path, name)
    flags = {"add_bos_token": True, "add_eos_token": True}
    AutoTokenizer.from_pretrained(tmp_path, **flags).save_pretrained(tmp_path)
    expected = [AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] for text in TEXTS]
    assert encode(tmp_path, None)[:-1] == expected
    begin, end = BEGIN_AND_END[name]
    assert all(ids[0] == begin and ids[-1] == end for ids in expected)
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=True, add_eos_token=False)
    with pytest.raises(CheckpointError, match=r"config\.json says transformers 4\.34\.0 and tokenizer_config\.json .* 5"):
        read_card(tmp_path, "m", pooling="lasttoken")


def test_the_version_of_sentence_transformers_files_counts(tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral", None)
    write_json(tmp_path / "config_sentence_transformers.json", {"__version__": {"transformers": "4.37.2"}})
    card = read_card(tmp_path, "m", pooling="lasttoken")
    assert card.tokenizer.reading == "transformers-4"
    assert card.tokenizer.reason == (
        "'<s> A </s>' by its flags, not '<s> A' by the post-processor: config_sentence_transformers.json says transformers 4.37.2"
    )


@pytest.mark.parametrize("null", ["add_bos_token", "add_eos_token"])
def test_a_null_flag_is_false_as_in_transformers_4(null: str, tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral", **{null: None})
    begins, ends = null != "add_bos_token", null != "add_eos_token"
    assert encode(tmp_path, "transformers-4")[0] == [*([1] if begins else []), 3, 4, 5, *([2] if ends else [])]


BAD: list[tuple[JSON, str]] = [
    ({"add_eos_token": "true"}, r"^tokenizer_config\.json: add_eos_token: must be bool, is 'true'"),
    ({"add_bos_token": 1}, r"^tokenizer_config\.json: add_bos_token: must be bool, is 1"),
    ({"legacy": "no"}, r"^tokenizer_config\.json: legacy: must be bool"),
]


@pytest.mark.parametrize(("config", "says"), BAD)
def test_flags_of_another_type_are_refused(config: JSON, says: str, tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral", **config)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, pooling="mean")


@pytest.mark.parametrize(
    "post_processor",
    [
        7, {}, {"type": "TemplateProcessing"}, {"type": "TemplateProcessing", "single": [1]}, {"type": "Sequence"},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "pair": [], "special_tokens": {}},
        {"type": "Sequence", "processors": [around("<s> A", "A B", {"<s>": 1})] * 2},
    ],
)  # fmt: skip
def test_a_malformed_post_processor_is_refused(post_processor: object, tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral")
    edit_json(tmp_path / "tokenizer.json", post_processor=post_processor)
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: "):
        load(tmp_path, pooling="mean")


def test_a_post_processor_in_other_words_says_the_same(tmp_path: Path) -> None:
    """Bytes and a template in a sequence, as Llama 3's; nothing disagrees, so the version does not matter."""
    write_config(tmp_path, "e5-mistral", "5.23.0")
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    template = around("<s> A </s>", "<s> A </s> B </s>", {"<s>": 1, "</s>": 2})
    edit_json(tmp_path / "tokenizer.json", post_processor={"type": "Sequence", "processors": [bytes_, template]})
    card = read_card(tmp_path, "m", pooling="mean")
    assert (card.tokenizer.reading, card.tokenizer.reason) == ("transformers", "")


def test_flags_without_the_token_are_no_statement(tmp_path: Path) -> None:
    """transformers 4 cannot load such files."""
    write_config(tmp_path, "e5-mistral", eos_token=None)
    assert encode(tmp_path, None)[0] == [1, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"^tokenizer_config\.json: eos_token: must not be null"):
        load(tmp_path, pooling="mean", tokenizer="transformers-4")


def test_pairs_of_a_cross_encoder_have_the_tokens_of_the_version_that_made_it(tmp_path: Path) -> None:
    """Single texts are the same in both readings; pairs are not."""
    write_model(tmp_path, "Llama", SMALL | {"num_labels": 1}, form="ForSequenceClassification")
    write_tokenizer(tmp_path, "llama", add_eos_token=False)
    edit_json(tmp_path / "tokenizer.json", post_processor=around("<s> A", "<s> A B", {"<s>": 1}))
    with pytest.raises(CheckpointError, match=r"add_eos_token: .* makes '<s> A <s> B' .* makes '<s> A B'"):
        read_card(tmp_path, "m")
    edit_json(tmp_path / "config.json", transformers_version="4.51.0", pad_token_id=0)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.preprocessor.preprocess(Request([PAIR])).seqs[0].ids.tolist() == [1, 3, 4, 1, 3, 5]
    with Engine(str(tmp_path), dtype="float32", tokenizer="file") as engine:
        assert engine.preprocessor.preprocess(Request([PAIR])).seqs[0].ids.tolist() == [1, 3, 4, 3, 5]
    assert read_card(tmp_path, "m", tokenizer="file").tokenizer.reading == "file"


@pytest.mark.parametrize("option", ["tei", "", "Transformers", 5])
def test_an_unknown_reading_is_refused(option: Any, tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral")
    with pytest.raises(SetupError, match=r"no tokenizer ") as caught:
        Engine(tmp_path, pooling="mean", tokenizer=option)
    assert caught.value.hint == "--tokenizer takes auto, transformers, transformers-4, file"


def test_a_vocabulary_alone_has_one_reading(tmp_path: Path) -> None:
    write_config(tmp_path, "bert in capitals")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"]) + "\n")
    assert load(tmp_path, pooling="mean").backend.raw.encode("a b").ids == [2, 4, 5, 3]
    for reading in ("file", "transformers-4"):
        with pytest.raises(
            CheckpointError, match=rf"tokenizer\.json: not found, so it cannot be read as --tokenizer {reading} says"
        ):
            load(tmp_path, pooling="mean", tokenizer=reading)


def test_a_class_that_transformers_4_does_not_have_is_not_read_as_its(tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral", tokenizer_class="TokenizersBackend")
    assert encode(tmp_path, None) == stated("e5-mistral", "file")
    with pytest.raises(CheckpointError, match=r"tokenizer_class: transformers 4 has no class 'TokenizersBackend'"):
        load(tmp_path, pooling="mean", tokenizer="transformers-4")


SIDES = [(True, True, [3, 3, 4]), (True, False, [3, 4]), (False, True, [3, 4]), (False, False, [3, 4])]
"""add_prefix_space, legacy, and the ids of " a" that LlamaConverter of transformers 4 leads to."""


@pytest.mark.parametrize(("add", "legacy", "ids"), SIDES)
def test_a_stated_prefix_space_is_built_anew_by_transformers_4(add: bool, legacy: bool, ids: list[int], tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral", add_prefix_space=add, legacy=legacy)
    raw = load(tmp_path, pooling="mean", tokenizer="transformers-4").backend.raw
    assert raw.encode(" a", add_special_tokens=False).ids == ids


def test_an_added_token_without_a_row_is_no_token_in_any_reading(tmp_path: Path) -> None:
    write_config(tmp_path, "e5-mistral")
    _, content, _ = LAYOUTS["e5-mistral"]
    image = content["added_tokens"][0] | {"id": 80, "content": "<image>"}
    edit_json(tmp_path / "tokenizer.json", added_tokens=[*content["added_tokens"], image])
    edit_json(tmp_path / "config.json", vocab_size=1 + max(content["model"]["vocab"].values()))
    for reading in ("transformers-4", "transformers", "file"):
        assert load(tmp_path, pooling="mean", tokenizer=reading).backend.raw.token_to_id("<image>") is None


@pytest.mark.parametrize("reading", ["transformers-4", "file"])
@pytest.mark.parametrize("layout", ["late interaction", "late interaction of PyLate", "cross-encoder", "static", "two towers"])
def test_every_layout_has_every_reading(layout: str, reading: str, tmp_path: Path) -> None:
    """Files that agree give the same vectors in each reading."""
    _write_other(layout, tmp_path)
    options: JSON = {"input_type": "document"} if layout.startswith(("late", "two")) else {}
    results = list[Any]()
    for each in ("auto", reading):
        with Engine(tmp_path, dtype="float32", tokenizer=each) as engine:
            towers = engine.card.towers or (engine.card,)
            texts = ["The whimbrel flies", "a  b"]
            if layout == "cross-encoder":
                results.append(engine.score(texts[0], texts))
            elif layout.startswith("late"):
                results.append(np.concatenate([*engine.multi_vector(texts, **options)]))
            else:
                results.append(engine.embed(texts, **options))
            if each == reading:
                assert {tower.tokenizer.reading for tower in towers} <= {reading, "file"}
    assert np.array_equal(*results)


def _write_other(layout: str, folder: Path) -> None:
    if layout == "late interaction":
        write_stanford(folder)
    elif layout == "late interaction of PyLate":
        write_pylate(folder)
    elif layout == "cross-encoder":
        write_classifier(folder, "bert", num_labels=1)
    elif layout == "static":
        table = StaticEmbedding(bert_tokenizer().backend_tokenizer, embedding_dim=8)
        SentenceTransformer(modules=[table], device="cpu").save_pretrained(str(folder))
    else:
        write_bert(folder / "bert")
        modules = [Transformer(str(folder / "bert")), Pooling(48, "mean")]
        table = StaticEmbedding(bert_tokenizer().backend_tokenizer, embedding_dim=48)
        router = Router.for_query_document(query_modules=[table], document_modules=modules)
        SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(folder))
