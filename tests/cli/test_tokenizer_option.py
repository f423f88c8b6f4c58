"""The option --tokenizer: what show, the banner, /info and verify say of a tokenizer's reading, and that a server keeps to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from checkpoints.families import DECODER, write_model
from checkpoints.files import edit_json
from checkpoints.letter_tokenizers import write_tokenizer
from checkpoints.sentence_layout import sentence_layout
from command import Here
from serving import Server
from whimbrel import Engine
from whimbrel.cli import verify
from whimbrel.cli.banner import _summary

SMALL = DECODER | {"vocab_size": 80, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in the layout of e5-mistral: flags that ask for </s>, and a post-processor that adds none."""
    write_model(tmp_path, "Llama", SMALL)
    write_tokenizer(tmp_path, "llama")
    edit_json(tmp_path / "config.json", transformers_version="4.34.0")
    sentence_layout(tmp_path, modes=("lasttoken",), heads=("Normalize",), max_seq_length=60)
    return tmp_path


SAID = {
    "auto": ["as transformers 4 reads it; '<s> A </s>' by its flags, not '<s> A' by the post-processor: config.json says "
             "transformers 4.34.0", "gives other ids for 22 of 22 probe texts"],
    "transformers": ["as transformers 5 reads it; tokenizer.json itself gives other ids for", "is [<s> ▁ <unk>], here [<s> ▁]"],
    "transformers-4": ["as transformers 4 reads it; tokenizer.json itself gives other ids for 22 of 22", "(--tokenizer file)"],
    "file": ["tokenizer.json as it is"],
}  # fmt: skip


@pytest.mark.parametrize("reading", SAID)
def test_show_and_banner_say_which_reading_was_taken(reading: str, folder: Path, here: Here) -> None:
    text = " ".join(here.run("show", str(folder), "--tokenizer", reading)[0].decode().split())
    with Engine(folder, dtype="float32", tokenizer=reading) as engine:
        banner = _summary(engine.card, engine.plan)["tokenizer"]
    for words in SAID[reading]:
        assert words in banner
        assert words in text.replace("post- processor", "post-processor")
    assert ("probe texts" in banner) == (reading != "file")


def test_a_tokenizer_that_all_read_alike_needs_no_words(here: Here) -> None:
    assert "tokenizer.json says the same" in " ".join(here.run("show")[0].decode().split())
    with Engine() as engine:
        assert "tokenizer" not in _summary(engine.card, engine.plan)


def test_show_refuses_an_unknown_reading_and_files_that_disagree(folder: Path, here: Here) -> None:
    assert "hint: --tokenizer takes auto, transformers, transformers-4, file" in here.error("show", "--tokenizer", "tei")
    edit_json(folder / "config.json", transformers_version="5.2.0")
    said = here.error("show", str(folder))
    assert "--tokenizer transformers-4 makes '<s> A </s>', --tokenizer transformers '<s> A'" in said
    assert here.run("show", str(folder), "--tokenizer", "transformers")


def embedded(url: str, texts: list[str]) -> Any:
    answer = httpx2.post(f"{url}/v1/embeddings", json={"input": texts}).json()
    return np.array([row["embedding"] for row in answer["data"]], np.float32)


@pytest.mark.parametrize("reading", ["auto", "file"])
def test_a_server_keeps_to_its_reading(reading: str, folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers tokenize in processes of their own. verify against it finds the other readings, and names a text."""
    texts = [" a b", "a  b", "a\nb", "ab"]
    monkeypatch.setattr(verify, "dtypes", lambda _: ["float32"])
    with Server(str(folder), "--dtype", "float32", "--tokenizer", reading) as server:
        with Engine(folder, dtype="float32", tokenizer=reading) as engine:
            assert np.allclose(embedded(server.url, texts), engine.embed(texts), atol=1e-6)
            plan = engine.plan
        (about,) = httpx2.get(f"{server.url}/info").json()["models"]
        assert (about["plan"]["tokenizer"], about["plan"]["tokenizer_note"]) == (plan.tokenizer, plan.tokenizer_note)
        against = ("verify", str(folder), "--against", server.url)
        assert json.loads(here.run(*against, "--tokenizer", reading, "--json")[0])["results"][0]["within"]
        said = " ".join(here.run(*against, "--tokenizer", "transformers", code=1)[0].decode().split())
        assert "float32 differs most of " in said
        assert "compare with --tokenizer file and --tokenizer transformers-4" in said


def test_sentence_transformers_has_one_reading(folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is read as transformers 4 differs from what transformers 5 gives: verify says why, and how to compare."""
    monkeypatch.setattr(verify, "dtypes", lambda _: ["float32"])
    edit_json(folder / "tokenizer_config.json", pad_token="</s>")
    said = " ".join(here.run("verify", str(folder), code=1)[0].decode().split())
    assert (
        "as transformers 5, this model is read as --tokenizer transformers-4 says: compare with --tokenizer transformers"
        in said
    )
    assert "BROKEN" not in here.run("verify", str(folder), "--tokenizer", "transformers")[0].decode()
