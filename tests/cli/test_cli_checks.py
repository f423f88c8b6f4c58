"""Commands that check: verify, and doctor."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from transformers import AutoTokenizer

from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.late_interaction import write_stanford
from checkpoints.sentence_layout import sentence_layout
from command import Here
from serving import Server
from whimbrel import __version__
from whimbrel.cli import doctor, verify
from whimbrel.errors import WhimbrelError
from whimbrel.model import reference
from whimbrel.types.hardware import Cpu, Hardware


@pytest.mark.parametrize("output", ["dense", "sparse", "multi_vector", "scores", "classes"])
def test_verify_compares_weights_with_sentence_transformers(
    output: str, here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if output == "dense":
        write_bert(tmp_path)
        sentence_layout(tmp_path)
    elif output == "sparse":
        write_bert(tmp_path / "bert")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert", model_max_length=30)
        table = torch.rand(len(tokenizer.get_vocab()), generator=torch.Generator().manual_seed(2))
        SparseEncoder(modules=[SparseStaticEmbedding(tokenizer, table, frozen=True)], device="cpu").save_pretrained(
            str(tmp_path)
        )
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    elif output == "multi_vector":
        write_stanford(tmp_path)
    else:
        write_classifier(tmp_path, "bert", num_labels=1 if output == "scores" else 3)
    monkeypatch.setattr(verify, "dtypes", lambda _: ["float32"])  # random weights are rough in half precision
    report = json.loads(here.run("verify", str(tmp_path), "--json")[0])
    results = report["results"]
    assert report["output"] == ("scores" if output == "classes" else output)
    assert results[0]["dtype"] == "float32"
    assert 0 <= results[0]["difference"] <= 1e-5
    assert all(result["within"] for result in results)
    assert results[0]["same_order"]


def test_verify_finds_other_weights(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that differs by a thousandth breaks the promise in float32, and the exit code is 1."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    compute = reference.compute
    monkeypatch.setattr(reference, "compute", lambda *args: [row + np.float32(1e-3) for row in compute(*args)])
    text = here.run("verify", str(tmp_path), code=1)[0].decode()
    assert "BROKEN" in text
    assert "not compared    nothing left out" in text


def test_verify_says_what_it_cannot_compare(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    monkeypatch.setattr(verify, "find_spec", lambda _: None)
    assert "pip install 'whimbrel[hf]' sentence-transformers" in here.error("verify", str(tmp_path))
    classifier = tmp_path / "tokens"
    write_classifier(classifier, "bert", "ForTokenClassification", num_labels=3)
    assert "token_scores cannot be compared" in here.error("verify", str(classifier))


@pytest.mark.parametrize("dialect", ["whimbrel", "openai", "tei", "cohere"])
def test_verify_against_a_server(dialect: str, here: Here, server32: Server) -> None:
    report = json.loads(here.run("verify", "--against", server32.url, "--dialect", dialect, "--json")[0])
    assert report["results"][0]["difference"] <= 1e-5
    assert report["results"][0]["same_order"]
    assert "empty and long texts" in report["not_compared"]


def test_verify_against_a_server_that_is_not_there(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "error:" in here.error("verify", "--against", f"http://127.0.0.1:{port}")


def test_order_and_cosine_of_comparisons() -> None:
    theirs = np.array([3.0, 2.0, 1.0])
    assert verify.same_order(np.array([9.0, 5.0, 4.0]), theirs, tolerance=0)
    assert not verify.same_order(np.array([5.0, 9.0, 4.0]), theirs, tolerance=0.1)
    assert verify.same_order(np.array([5.0, 9.0, 4.0]), theirs, tolerance=0.5)
    rows = [np.array([1.0, 0.0], np.float32), np.zeros(2, np.float32)]
    found = verify.compare("dense", "bfloat16", [np.array([1.0, 1.0], np.float32), rows[1]], rows)
    assert found.cosine == pytest.approx(0.5**0.5)
    assert found.difference == 1
    assert not found.within
    with pytest.raises(WhimbrelError, match="text 1: the result has shape"):
        verify.compare("dense", "float32", [rows[0], np.zeros(3, np.float32)], rows)


def test_doctor_reports_this_machine(here: Here) -> None:
    out, _ = here.run("doctor", "--json")
    report = json.loads(out)
    assert report["problems"] == []
    assert report["facts"]["versions"]["whimbrel"] == __version__
    assert report["facts"]["packaged_model"] == "its hashes are right"
    assert report["facts"]["hardware"]["cpu"]["name"]
    lines = here.run("doctor")[0].decode().splitlines()
    assert lines[-1] == "Nothing is wrong."
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 40


def test_doctor_in_a_light_install(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    light = {"numpy": "2", "msgspec": "1"}
    monkeypatch.setattr(doctor, "_version", light.get)
    monkeypatch.setattr(doctor, "_packaged_model", lambda: "not installed")
    text = " ".join(here.run("doctor")[0].decode().split())
    assert "cannot run here: pip install 'whimbrel[serve]'" in text
    assert "not installed torch, tokenizers" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"open_files": 100}, "100 files"), ({"packaged_model": "damaged: x"}, "packaged model"), ({"memory_limit": 2**28}, "0.2 GiB of memory"), ({"core_quota": 0.5, "core_quota_file": "/sys/m"}, "/sys/m allows 0.5"),
        ({"hub_cache_free": 2**28}, "hub cache"), ({"hub_cache_writable": False}, "cannot be written"), ({"core_quota": 0.5}, "0.5 of a core"),
        ({"import_error": "libc"}, "cannot be imported: libc"), ({"gpu_driver": "NVRM 1", "hardware": Hardware(1)}, "sees no GPU"),
        ({"hardware": Hardware(1, Cpu(switches=("ONEDNN_MAX_CPU_ISA=AVX2",)))}, "held back by ONEDNN_MAX_CPU_ISA=AVX2"),
        ({"versions": {"torch": "2"}}, "missing: tokenizers"),
    ],
)  # fmt: skip
def test_doctor_finds_problems(changes: dict[str, Any], words: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = doctor.Facts(dict.fromkeys(doctor.ENGINE_PACKAGES, "1"))
    assert doctor.find_problems(healthy) == []
    monkeypatch.setattr(doctor, "collect", lambda: replace(healthy, **changes))
    text = " ".join(here.run("doctor", code=1)[0].decode().split())
    assert words in text
    assert "hint" in text
