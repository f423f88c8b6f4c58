"""Vocabularies that the tokenizer's class cannot read: refused by `show` too, with the class, its origin and the repair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from checkpoints.encoders import write_bert, write_xlmr, xlmr_tokenizer
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import FAMILIES, load, write
from parity import Parity
from texts import TEXTS
from whimbrel import Engine
from whimbrel.checkpoint.tokenizer.classes import find_mismatch
from whimbrel.cli.main import app
from whimbrel.errors import CheckpointError
from whimbrel.types.card import TokenizerClass

CLASSES = [name for name in get_args(TokenizerClass) if name != "tokenizer.json"]
KINDS = {"bert": "WordPiece", "xlm-roberta": "Unigram", "roberta": "byte-level BPE", "llama": "BPE over pieces"}
"""A family whose vocabulary is of each kind."""
WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}


def repair(folder: Path, hint: str) -> None:
    """Do what the hint says."""
    line = hint.partition("write into tokenizer_config.json: ")[2]
    assert line, hint
    edit_json(folder / "tokenizer_config.json", **json.loads(f"{{{line}}}"))


def refused(folder: Path, **options: Any) -> CheckpointError:
    """The error of the engine, after `show` has given the same."""
    with pytest.raises(CheckpointError) as caught:
        Engine(folder, dtype="float32", **options)
    shown = CliRunner().invoke(app, ["show", str(folder)])
    assert str(shown.exception) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("layout", ["Unigram under the class of BERT", "XLM-R's files under that of RoBERTa"])
def test_what_a_class_cannot_read_is_refused_and_repaired(layout: str, parity: Parity, tmp_path: Path) -> None:
    """A fine-tune of paraphrase-multilingual-MiniLM without a class, and one of XLM-R with RoBERTa's."""
    if layout == "Unigram under the class of BERT":
        write_bert(tmp_path, vocab_size=len(xlmr_tokenizer()), pad_token_id=1)
        xlmr_tokenizer().save_pretrained(tmp_path)
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=None)
        origin = (
            "BertTokenizer reads WordPiece. This class is the default of model_type 'bert' (config.json), as no tokenizer_class"
        )
    else:
        write_xlmr(tmp_path)
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
        origin = "RobertaTokenizer reads byte-level BPE. This class is named in tokenizer_config.json: tokenizer_class is 'RobertaTokenizer'"
    sentence_layout(tmp_path)
    error = refused(tmp_path)
    assert str(error).startswith(f"tokenizer.json: model: is of the kind Unigram; {origin}")
    repair(tmp_path, str(error.hint))
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with Engine(tmp_path, dtype="float32") as engine:
        parity(engine.embed(TEXTS), expected)
    assert CliRunner().invoke(app, ["show", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.sample(12)
def test_every_class_reads_its_own_kind(name: TokenizerClass, family: str, tmp_path: Path) -> None:
    """A class reads each kind of vocabulary as the same class of transformers does, or refuses it by name."""
    content, settings = FAMILIES[family][1]
    write(tmp_path, "xlm-roberta")
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", {**settings, "tokenizer_class": f"{name}Fast", "add_prefix_space": True})
    kind: Any = getattr(transformers, name).model or Unigram  # CamembertTokenizer's class does not say
    model: str = kind.__name__
    mismatch = find_mismatch(content, name)
    if mismatch is None or (name, family) == ("LlamaTokenizer", "roberta"):  # transformers reads bytes under it as they are
        assert content["model"]["type"] == model
        load(tmp_path, pooling="mean")
        return
    assert (content["model"]["type"] != model) or model == "BPE"
    assert mismatch[0] == KINDS[family]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, pooling="mean")
    assert f"tokenizer_class is '{name}Fast'" in str(caught.value)
    repair(tmp_path, str(caught.value.hint))
    load(tmp_path, pooling="mean")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.sample(2)
def test_no_class_reads_whole_words(name: str, tmp_path: Path) -> None:
    """A WordLevel vocabulary is read only as it is."""
    write(tmp_path, "xlm-roberta", {"tokenizer_class": name})
    write_json(tmp_path / "tokenizer.json", {"model": WORDS, "added_tokens": []})
    with pytest.raises(CheckpointError, match=f"is of the kind WordLevel; {name} reads"):
        load(tmp_path, pooling="mean")


def test_the_oldest_files_do_not_name_their_kind(tmp_path: Path) -> None:
    """The form of the vocabulary tells its kind."""
    for family, (_, (content, _)) in FAMILIES.items():
        unnamed = {**content, "model": {key: value for key, value in content["model"].items() if key != "type"}}
        for name in CLASSES:
            assert find_mismatch(unnamed, name) == find_mismatch(content, name), (family, name)


@pytest.mark.parametrize("stated", [None, "PreTrainedTokenizerFast", "BertTokenizer"])
def test_a_class_that_no_setting_replaces(stated: str | None, tmp_path: Path) -> None:
    """Qwen2's is taken whatever tokenizer_class says, as in transformers; so no other value is recommended."""
    write(tmp_path, "qwen2", {"tokenizer_class": stated or "ABSENT"})
    write_json(tmp_path / "tokenizer.json", FAMILIES["bert"][1][0])
    with pytest.raises(CheckpointError, match="that of every model_type 'qwen2'") as caught:
        load(tmp_path, pooling="mean")
    assert "no setting replaces" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("bert", "RobertaTokenizer", "vocab.txt: model: is of the kind WordPiece; RobertaTokenizer reads byte-level BPE"),
        ("roberta", "BertTokenizer", "vocab.json: model: is of the kind byte-level BPE; BertTokenizer reads WordPiece"),
    ],
)
def test_vocabularies_without_a_tokenizer_json(family: str, name: str, says: str, tmp_path: Path) -> None:
    """The file that was read is named, and how to have a tokenizer.json."""
    write(tmp_path, family, {"tokenizer_class": name})
    vocab = FAMILIES[family][1][0]["model"]["vocab"]
    (tmp_path / "tokenizer.json").unlink()
    if family == "bert":
        (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    else:
        write_json(tmp_path / "vocab.json", vocab)
        (tmp_path / "merges.txt").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, pooling="mean")
    assert str(caught.value).startswith(says)
    assert "load and save the tokenizer once" in str(caught.value.hint)


def test_a_model_type_that_implies_no_class(tmp_path: Path) -> None:
    """The error is over the class that is missing, with the line to write."""
    write(tmp_path, "olmo2", {"tokenizer_class": "ABSENT"}, model_type="olmo")
    edit_json(tmp_path / "config.json", architectures=["OlmoModel"])
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: tokenizer_class: is missing, and model_type 'olmo'"
    ) as caught:
        load(tmp_path, pooling="mean")
    repair(tmp_path, str(caught.value.hint))
    load(tmp_path, pooling="mean")


@pytest.mark.parametrize("vocab", [None, [], {}, [[1, 0.5]], [["a"]], {"a": "b"}, "x", [[["a"], 1]]], ids=json.dumps)
@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece", "Other", 7, None])
@pytest.mark.sample(6)
def test_a_vocabulary_that_is_none(vocab: Any, kind: Any, tmp_path: Path) -> None:
    """Any other value in place of a vocabulary is an error that names tokenizer.json."""
    write_bert(tmp_path)
    write_json(tmp_path / "tokenizer.json", {"model": {"type": kind, "vocab": vocab}, "added_tokens": []})
    sentence_layout(tmp_path)
    assert str(refused(tmp_path)).startswith("tokenizer.json: ")


def test_show_refuses_every_tokenizer_that_does_not_load(tmp_path: Path) -> None:
    """Tokens that the class needs and the vocabulary lacks, and a file of another version, are found before the weights."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")))
    bare.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "config.json", vocab_size=2)
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=None)
    assert "'[CLS]' is not in the vocabulary" in str(refused(tmp_path))
    write_json(tmp_path / "tokenizer.json", {"model": {"type": "WordPiece", "vocab": {"[UNK]": 0}, "new": 1}, "version": "9.0"})
    assert str(refused(tmp_path)).startswith("tokenizer.json: ")
