"""Unsupported settings of late-interaction checkpoints: each is refused with file and key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints.files import edit_json, write_json
from checkpoints.late_interaction import write_pylate, write_sentence_transformers, write_stanford
from checkpoints.late_references import checkpoints_of
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.late_interaction.colbert import read_expansion
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Layer

FIXED = {"strategy": "fixed", "attend": False, "token": None, "length": 16}
CASES: dict[str, Callable[[Path], None]] = {
    "stanford": write_stanford,
    "pylate": write_pylate,
    "fixed": lambda folder: write_sentence_transformers(folder, FIXED, document_length=30),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints_of(tmp_path_factory, CASES)


ST, BERT = "config_sentence_transformers.json", "sentence_bert_config.json"
MASK_FILE, POOL_FILE = "2_MultiVectorMask/config.json", "4_HierarchicalTokenPooling/config.json"
WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("stanford", "artifact.metadata", {"query_token_id": "[unused9]"}, "query_token_id: '.unused9.' is not a token"),
    ("stanford", "artifact.metadata", {"interaction": "flipr"}, "interaction"),
    ("stanford", "artifact.metadata", {"similarity": "l2"}, "similarity"),
    ("stanford", "artifact.metadata", {"pool_factor": 2}, "pool_factor"),
    ("stanford", "artifact.metadata", {"doc_maxlen": 0}, "doc_maxlen"),
    ("stanford", "artifact.metadata", {"query_maxlen": 81}, "query_maxlen: every query would be filled up to 81 tokens"),
    ("stanford", "artifact.metadata", {"context": "yes"}, "context: this key"),
    ("stanford", "config.json", {"dim": 128}, "config.json: dim"),
    ("stanford", "config.json", {"model_type": "deberta-v2"}, "config.json: model_type"),
    ("pylate", ST, {"do_query_expansion": True}, "attend_to_expansion_tokens: .* window"),
    ("pylate", ST, {"query_prefix": "[X] "}, "query_prefix: '.X. ' is not a token"),
    ("pylate", ST, {"query_prefix": None, "document_prefix": None, "skiplist_words": [1]}, "skiplist_words"),
    ("pylate", ST, {"query_expansion": {}}, "query_expansion: this key"),
    ("pylate", ST, {"similarity_fn_name": "xtr"}, "similarity_fn_name"),
    ("pylate", ST, {"truncate_dim": 8}, "truncate_dim"),
    ("pylate", ST, {"document_length": -1}, "document_length"),
    ("pylate", "1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
    ("pylate", "1_Dense/config.json", {"in_features": 47}, "in_features"),
    ("fixed", BERT, {"query_expansion": FIXED | {"strategy": "most"}}, "query_expansion: strategy"),
    ("fixed", BERT, {"query_expansion": FIXED | {"token": "[X]"}}, "query_expansion: token"),
    ("fixed", BERT, {"query_expansion": {"strategy": "fixed"}}, "query_expansion: length"),
    ("fixed", BERT, {"query_expansion": FIXED | {"pad": 1}}, "query_expansion: pad: this key"),
    ("fixed", BERT, {"query_expansion": FIXED | {"length": 5000}}, "query_expansion: length: every query"),
    ("fixed", BERT, {"query_length": 15}, "query_length: is 15"),
    ("fixed", POOL_FILE, {"pool_factor": 0.5}, "4_HierarchicalTokenPooling/config.json: pool_factor: must be a number of at"),
    ("fixed", POOL_FILE, {"pool_factor": "2"}, "pool_factor: must be float"),
    ("fixed", POOL_FILE, {"pool_factor": float("nan")}, "pool_factor: .* is nan"),
    ("fixed", POOL_FILE, {"pool_factor": 2, "num_protected_tokens": -1}, "num_protected_tokens: must be an integer from 0"),
    ("fixed", POOL_FILE, {"pool_factor": 2, "normalize_embeddings": 1}, "normalize_embeddings: must be bool"),
    ("fixed", POOL_FILE, {"linkage": "average"}, "linkage: this key"),
    ("fixed", "3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "3_Normalize/config.json: module_input"),
    ("fixed", ST, {"query_prefix": "[Q] "}, "query_prefix: this key"),
]


@pytest.mark.parametrize(("case", "file", "change", "says"), WRONG)
def test_what_is_not_supported_is_refused(
    case: str, file: str, change: dict[str, Any], says: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(case), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / file, **change)
    with pytest.raises(CheckpointError, match=says):
        read_card(tmp_path, "m")


def test_modules_that_are_not_there_or_not_known(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def modules(case: str, keep: Callable[[int], bool]) -> Path:
        folder = tmp_path / case
        shutil.copytree(checkpoint(case), folder, dirs_exist_ok=True)
        rows = [row for i, row in enumerate(json.loads((checkpoint(case) / "modules.json").read_text())) if keep(i)]
        write_json(folder / "modules.json", rows)
        return folder

    for case, keep, says in (
        ("fixed", lambda i: i != 2, "no MultiVectorMask .*query_expansion"),
        ("fixed", lambda i: i != 0, "must begin with one Transformer"),
        ("pylate", lambda i: i != 1, "must be a Transformer and Dense layers"),
    ):
        with pytest.raises(CheckpointError, match=says):
            read_card(modules(case, keep), "m")
    with pytest.raises(CheckpointError, match="leave out --pooling"):
        read_card(checkpoint("stanford"), "m", pooling="mean")
    folder = tmp_path / "stanford"
    shutil.copytree(checkpoint("stanford"), folder)
    (folder / "artifact.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"artifact\.metadata: not found"):
        read_card(folder, "m")


def test_tokens_that_are_not_attended_to_need_a_model_in_which_they_see_the_query(checkpoint: Callable[[str], Path]) -> None:
    encoder = read_card(checkpoint("stanford"), "m").encoder
    file = JsonFile("f.json", {})
    for one, fits in (
        (encoder, True),
        (replace(encoder, causal=True), True),
        (replace(encoder, layers=()), False),
        (replace(encoder, layers=(Layer(window=11),)), True),
        (replace(encoder, layers=(Layer(window=10),)), False),
    ):
        base: Any = SimpleNamespace(encoder=one)
        assert read_expansion(base, file, ("length", "attend"), 12, token_id=4, attended=True).attended
        if fits:
            assert not read_expansion(base, file, ("length", "attend"), 12, token_id=4, attended=False).attended
        else:
            with pytest.raises(CheckpointError, match=r"f\.json: attend: .* 12 tokens"):
                read_expansion(base, file, ("length", "attend"), 12, token_id=4, attended=False)


def test_reading_a_card_of_stanford_imports_no_other_library(checkpoint: Callable[[str], Path]) -> None:
    """transformers has no such class. Each process of a server reads the card, and importing it takes seconds."""
    program = f"""if True:
        import sys
        from pathlib import Path
        from whimbrel.checkpoint.reader import read_card
        read_card(Path({str(checkpoint("stanford"))!r}), "stanford")
        print({{"torch", "transformers"}} & set(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
