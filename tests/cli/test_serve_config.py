"""`whimbrel serve --config`: models with settings of their own, and the commands `whimbrel config`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from command import Here
from serving import Server
from whimbrel import Client
from whimbrel.checkpoint import packaged
from whimbrel.cli.serve_options import use_hub_token
from whimbrel.server.settings import Settings

FILE = """
[server]
workers = 2
api_key_file = "keys"

[defaults]
dtype = "float32"

[models.e5]
source = "model"
names = ["text-embedding-3-small"]
prompts = { query = "query: ", document = "The " }

[models.short]
source = "./model"
max_length = 6

[models.minilm]
max_batch_tokens = 64
"""
TEXTS = ["bird", "The whimbrel flies far away in a year.", "far " * 30]
AUTHORIZED = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    write_bert(folder / "model")
    sentence_layout(folder / "model", prompts={"query": "far "})
    (folder / "keys").write_text("secret\n")
    (folder / "keys").chmod(0o600)
    (folder / "whimbrel.toml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server("--config", str(folder / "whimbrel.toml")) as server:
        yield server


def embed(server: Server, model: str, **options: Any) -> np.ndarray:
    with Client(server.url, api_key="secret", model=model) as client:
        return client.embed(TEXTS, truncate="right", **options)


def test_three_models_of_different_options(server: Server, folder: Path) -> None:
    """Workers tokenise with the prompts and lengths of each model, engines compute with them."""
    reference = SentenceTransformer(str(folder / "model"), device="cpu", prompts={"query": "query: ", "document": "The "})
    for name in ("e5", "text-embedding-3-small"):
        assert np.allclose(embed(server, name, input_type="query"), reference.encode_query(TEXTS), atol=1e-5)
        assert np.allclose(embed(server, name, input_type="document"), reference.encode_document(TEXTS), atol=1e-5)
        assert np.allclose(embed(server, name), reference.encode(TEXTS, prompt=""), atol=1e-5)
    of_files = SentenceTransformer(str(folder / "model"), device="cpu")
    of_files.max_seq_length = 6
    assert np.allclose(embed(server, "short", input_type="query"), of_files.encode_query(TEXTS), atol=1e-5)
    minilm = embed(server, "minilm")
    assert minilm.shape == (3, 384)
    info = httpx2.get(f"{server.url}/info", headers=AUTHORIZED).json()["models"]
    assert [each["plan"]["served_name"] for each in info] == ["e5", "short", "minilm"]
    assert [each["plan"]["max_length"] for each in info][1:] == [6, 256]
    assert [each["plan"]["max_batch_tokens"] for each in info] == [512, 512, 64]
    assert len(server.children("worker")) == 2


def test_names_are_those_of_the_file(server: Server) -> None:
    assert httpx2.get(f"{server.url}/v1/models").status_code == 401
    ids = [each["id"] for each in httpx2.get(f"{server.url}/v1/models", headers=AUTHORIZED).json()["data"]]
    assert set(ids) >= {"e5", "text-embedding-3-small", "short", "minilm"}
    assert packaged.NAME not in ids


def test_the_variable_names_the_file_and_flags_go_before_it(folder: Path) -> None:
    file = folder / "one.toml"
    file.write_text('[defaults]\ndtype = "bfloat16"\n[models.short]\nsource = "model"\n')
    with Server("--max-length", "7", "--dtype", "float32", WHIMBREL_CONFIG=str(file)) as server:
        (info,) = httpx2.get(f"{server.url}/info").json()["models"]
        assert (info["plan"]["max_length"], info["plan"]["dtype"], info["plan"]["served_name"]) == (7, "float32", "short")


# whimbrel config


def test_check_says_yes_or_names_the_fault(folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(folder / "whimbrel.toml")
    assert here.run("config", "check", file)[0].decode() == f"{file} is right. Models: e5, short, minilm.\n"
    monkeypatch.setenv("WHIMBREL_CONFIG", file)
    assert b"is right" in here.run("config", "check")[0]
    monkeypatch.delenv("WHIMBREL_CONFIG")
    assert "no file of settings is named" in here.error("config", "check")
    assert "it is a folder" in here.error("config", "check", str(folder))
    (folder / "wrong.toml").write_text("[server]\nprot = 1\n")
    assert f"{folder}/wrong.toml:2: server.prot is not known." in here.error("config", "check", str(folder / "wrong.toml"))
    assert "wrong.toml:2: server.prot is not known." in here.error("serve", "--config", str(folder / "wrong.toml"))
    assert "o/m is given" in here.error("serve", "o/m", "--config", file)


def test_show_says_where_each_value_came_from(folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(folder / "whimbrel.toml")
    monkeypatch.setenv("WHIMBREL_API_KEY", "s3cret")
    monkeypatch.setenv("WHIMBREL_HOST", "::1")
    text = here.run("config", "show", "--config", file, "--set", "port=9")[0].decode()
    for line in (
        "  port = 9  (--set port)", "  host = ::1  (WHIMBREL_HOST)", f"  workers = 2  ({file}:3)", "  uds = none", "Model short",
        f"  api_key_file = {folder}/keys  ({file}:4)", f"  max_length = 6  ({file}:16)", "  max_length = from the checkpoint",
        f"  prompts = query='query: ', document='The '  ({file}:12)", f"  names = text-embedding-3-small  ({file}:11)",
    ):  # fmt: skip
        assert line in text.splitlines()
    rows = json.loads(here.run("config", "show", "--config", file, "--json")[0])
    of_short = {row["key"]: (row["value"], row["source"]) for row in rows if row.get("model") == "short"}
    assert of_short["dtype"] == ("float32", f"{file}:7")
    assert of_short["max_length"] == (6, f"{file}:16")
    assert of_short["keep"] == ("always", "default")
    assert "s3cret" not in text
    shown = here.run("config", "show", "--set", "ssl_keyfile_password=s3cret")[0].decode()
    assert "ssl_keyfile_password = ***  (--set ssl_keyfile_password)" in shown
    assert "s3cret" not in shown


def test_the_schema_is_printed(here: Here) -> None:
    schema = json.loads(here.run("config", "schema")[0])
    assert jsonschema_rs.meta.is_valid(schema)
    assert "models" in schema["properties"]


# Secrets


def test_the_hubs_token_is_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines find it as huggingface_hub finds its own file. The variable of the hub goes before it there."""
    from huggingface_hub import constants, get_token

    monkeypatch.setenv("HF_TOKEN_PATH", "")
    (tmp_path / "token").write_text("hf_x\n")
    (tmp_path / "token").chmod(0o644)
    warnings: list[str] = []
    use_hub_token(Settings(hf_token_file=tmp_path / "token"), warnings.append)
    assert len(warnings) == 1
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.environ["HF_TOKEN_PATH"])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert get_token() == "hf_x"
    monkeypatch.setenv("HF_TOKEN", "hf_y")
    assert get_token() == "hf_y"
