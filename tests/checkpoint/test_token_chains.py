"""Chains of modules in a MultiVectorEncoder, as Sentence Transformers saves and runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from sentence_transformers.util import maxsim

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest

WIDTH = 48
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
QUERIES = ["which bird has a long, curved bill?", "a bird", "Zürich!! fly. Or not, or not"]
DOCUMENTS = ["The whimbrel is a wader, with a long curved bill.", "a", "Terns dive, for fish. They do! " * 3, "..."]
BOTH = ["query", "document"]
EXPANSION = {"strategy": "fixed", "length": 12, "attend": False}
Modules = list[Any]


def dense() -> Dense:
    torch.manual_seed(5)
    return Dense(WIDTH, 16, **TOKENS)


def norm() -> Normalize:
    return Normalize(**TOKENS)


mask, pool = MultiVectorMask, HierarchicalTokenPooling
CHAINS: dict[str, Callable[[], Modules]] = {
    "pooling before Normalize": lambda: [dense(), mask(), pool(2.0, normalize_embeddings=False), norm()],
    "pooling that normalises before Normalize": lambda: [dense(), mask(), pool(2.0), norm()],
    "pooling between two Normalize": lambda: [dense(), norm(), pool(3.0, normalize_embeddings=False), norm()],
    "pooling before a mask without words": lambda: [dense(), norm(), pool(2.0), mask()],
    "pooling before a mask of queries": lambda: [dense(), norm(), pool(2.0), mask([".", ","], skiplist_tasks="query")],
    "two poolings": lambda: [dense(), mask(["."]), norm(), pool(2.0), pool(1.5, num_protected_tokens=0)],
    "poolings of each side": lambda: [dense(), norm(), pool(1.5, tasks="query"), pool(3.0, num_protected_tokens=2)],
    "pooling of both sides": lambda: [dense(), mask([",", "."]), norm(), pool(1.7, tasks=BOTH)],
    "pooling of both sides before Normalize": lambda: [dense(), pool(2.0, tasks=BOTH), norm()],
    "pooling of queries": lambda: [dense(), norm(), pool(2, tasks="query")],
    "pooling of queries before Normalize": lambda: [dense(), pool(2, tasks="query"), norm()],
    "pooling alone": lambda: [pool(2.0)],
    "normalising of one side": lambda: [dense(), pool(1.0, tasks="query")],
    "pooling without a task": lambda: [dense(), norm(), pool(2.0, tasks=[])],
    "two masks": lambda: [mask(["."]), dense(), mask([",", "bird"], skiplist_tasks=BOTH), norm()],
    "mask of queries": lambda: [dense(), mask([".", ","], skiplist_tasks="query"), norm()],
    "tokens that are kept": lambda: [dense(), mask(keep_only_token_ids=[5, 6, 7, 8, 9, 10, 11, 12]), norm()],
    "kept by two masks": lambda: [
        mask(["bird"], keep_only_token_ids=[2, 6, 7, 8, 9, 10, 11, 12]),
        dense(),
        mask(keep_only_token_ids=[2, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]),
        norm(),
        pool(2.0),
    ],
    "a vector of the text besides": lambda: [Pooling(WIDTH, "mean"), LayerNorm(WIDTH), Dropout(0.2), dense(), mask(), norm()],
}
FILLED: dict[str, Callable[[], Modules]] = {
    "filled up, pooling of both sides": lambda: [dense(), mask(), norm(), pool(2.0, tasks=BOTH)],
    "filled up, pooling before a mask": lambda: [dense(), norm(), pool(2.0), mask()],
}


def save(folder: Path, modules: Modules, **transformer: Any) -> MultiVectorEncoder:
    """Save a model as Sentence Transformers does, and load it from there."""
    base = folder / "base"
    base.mkdir()
    write_bert(base)
    saved = MultiVectorEncoder(modules=[Transformer(str(base), **transformer), *modules], device="cpu")
    saved.save_pretrained(str(folder / "model"))
    return MultiVectorEncoder(str(folder / "model"), device="cpu")


@pytest.mark.parametrize("case", [*CHAINS, *FILLED])
def test_modules_in_any_order_are_sentence_transformers(case: str, tmp_path: Path) -> None:
    """Vectors of both sides, and scores, equal those of Sentence Transformers to 1e-5."""
    filled = {"query_expansion": EXPANSION} if case in FILLED else {}
    theirs = save(tmp_path, (CHAINS | FILLED)[case](), **filled)
    wanted = [theirs.encode_query(QUERIES), theirs.encode_document(DOCUMENTS)]
    expected = maxsim(*wanted).numpy()
    with Engine(str(tmp_path / "model"), dtype="float32") as ours:
        for texts, kind, rows in ((QUERIES, "query", wanted[0]), (DOCUMENTS, "document", wanted[1])):
            found = ours.multi_vector(texts, input_type=kind)  # pyright: ignore[reportArgumentType]
            assert [each.shape for each in found] == [tuple(each.shape) for each in rows]
            for one, other in zip(found, rows, strict=True):
                np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-5)
        scores = np.stack([ours.score(query, DOCUMENTS) for query in QUERIES])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


REFUSED: list[tuple[Callable[[], Modules], dict[str, Any], str]] = [
    (lambda: [pool(2.0), dense(), norm()], {}, r"'2_Dense' follows a HierarchicalTokenPooling, after which only Normalize"),
    (lambda: [dense(), pool(2.0), mask(["."])], {}, r"'3_MultiVectorMask' chooses tokens of a document after a Hierarch"),
    (lambda: [dense(), pool(2.0), mask(keep_only_token_ids=[5])], {}, r"'3_MultiVectorMask' chooses tokens of a document"),
    (
        lambda: [pool(2.0, tasks="query"), mask()],
        {"query_expansion": EXPANSION},
        r"'2_MultiVectorMask' chooses tokens of a query",
    ),
    (lambda: [mask(keep_only_token_ids=[5]), mask(keep_only_token_ids=[6])], {}, r"keep_only_token_ids .* no token in common"),
    (lambda: [LayerNorm(WIDTH), norm()], {}, r"'1_LayerNorm' works on 'sentence_embedding', but"),
    (lambda: [Dropout(0.2), norm()], {}, r"'1_Dropout' is a Dropout of 'sentence_embedding', but"),
]


@pytest.mark.parametrize(("modules", "transformer", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_chains_that_cannot_run_are_refused(
    modules: Callable[[], Modules], transformer: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Sentence Transformers fails at all of these but a Dense after a pooling, and a document without any vector."""
    theirs = save(tmp_path, modules(), **transformer)
    with pytest.raises(CheckpointError, match=r"modules\.json: .*" + says):
        read_card(tmp_path / "model", "m")
    if "Dense" not in says and "in common" not in says:
        encode = theirs.encode_query if "query" in says else theirs.encode_document
        with pytest.raises((RuntimeError, KeyError)):
            encode([*QUERIES, *DOCUMENTS])


def test_tasks_and_ids_are_checked(tmp_path: Path) -> None:
    save(tmp_path, [dense(), mask(), norm(), pool(2.0)])
    for file, change, says in (
        ("2_MultiVectorMask", {"skiplist_tasks": ["passage"]}, "skiplist_tasks: .* must be of query and document"),
        ("2_MultiVectorMask", {"skiplist_tasks": None, "keep_only_token_ids": ["a"]}, "keep_only_token_ids: must be a list of"),
        ("4_HierarchicalTokenPooling", {"tasks": "passage"}, "tasks: .* must be of query and document"),
    ):
        path = tmp_path / "model" / file / "config.json"
        before = json.loads(path.read_text())
        edit_json(path, **change)
        with pytest.raises(CheckpointError, match=says):
            read_card(tmp_path / "model", "m")
        path.write_text(json.dumps(before))


def test_options_of_requests_where_queries_are_pooled(tmp_path: Path) -> None:
    save(tmp_path, [dense(), norm(), pool(2.0, normalize_embeddings=False, tasks=BOTH)])
    with Engine(str(tmp_path / "model"), dtype="float32") as ours:
        plain = ours.multi_vector(DOCUMENTS, input_type="document", token_pooling=1)
        assert sum(map(len, plain)) > sum(map(len, ours.multi_vector(DOCUMENTS, input_type="document")))
        with pytest.raises(InvalidRequest, match="normalize: this checkpoint pools the vectors of queries"):
            ours.multi_vector(QUERIES, input_type="query", normalize=False)
        for token_pooling in (None, 1):
            with pytest.raises(InvalidRequest, match="explain: this checkpoint pools queries"):
                ours.explain(QUERIES[0], DOCUMENTS, token_pooling=token_pooling)
        unit = ours.multi_vector(QUERIES, input_type="query", normalize=True)
        np.testing.assert_allclose(np.linalg.norm(unit.rows_XD, axis=1), 1, atol=1e-6)


def test_options_of_requests_where_pooled_vectors_are_normalised_later(tmp_path: Path) -> None:
    theirs = save(tmp_path, [dense(), pool(2.0, normalize_embeddings=False), norm()])
    raw = MultiVectorEncoder(modules=list(theirs)[:3], device="cpu").encode_document(DOCUMENTS)
    with Engine(str(tmp_path / "model"), dtype="float32") as ours:
        found = ours.multi_vector(DOCUMENTS, input_type="document", normalize=False)
        for one, other in zip(found, raw, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-5)
        plain = ours.multi_vector(DOCUMENTS, input_type="document", token_pooling=1)
        np.testing.assert_allclose(np.linalg.norm(plain.rows_XD, axis=1), 1, atol=1e-6)
