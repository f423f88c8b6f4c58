"""Token pooling and MUVERA as options of verbs, routes and checkpoints, against Sentence Transformers."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling
from sentence_transformers.util import maxsim as reference_maxsim

import whimbrel.outputs.multi_vector
from checkpoints.bge_m3 import write_m3
from checkpoints.files import edit_json, write_json
from checkpoints.late_interaction import write_pylate, write_sentence_transformers, write_stanford
from checkpoints.late_references import DOCUMENTS, QUERIES, late_reference
from comparisons import assert_close_vectors
from fake_embedder import CARD, FakeModel, asked
from process_boundary import run_over_a_channel
from serving import Server
from whimbrel import AsyncEngine, Engine
from whimbrel.dialects import native
from whimbrel.dialects.common import rerank
from whimbrel.dialects.vllm import pair_scores
from whimbrel.errors import ComputeError, InvalidRequest, NonFinite, OutOfMemory, SetupError, TooLarge, WhimbrelError
from whimbrel.outputs.muvera import Muvera, make_muvera
from whimbrel.outputs.token_pooling import pool_tokens
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling
from whimbrel.types.request import InputType, Request
from whimbrel.types.result import Ragged

MIN = {"strategy": "min", "attend": True, "token": "[SEP]", "length": 16}
CASES: dict[str, Callable[[Path], None]] = {
    "stanford": write_stanford,
    "pylate": write_pylate,
    "min": lambda folder: write_sentence_transformers(folder, MIN),
    "m3": write_m3,
}
LATE = ["stanford", "pylate", "min"]
POOL_FILE = "4_HierarchicalTokenPooling/config.json"
LONG = "Der Regenbrachvogel zieht im Herbst nach Afrika; ein großer Vogel! " * 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    @cache
    def make(case: str) -> Engine:
        folder = tmp_path_factory.mktemp("late")
        CASES[case](folder)
        made.append(Engine(str(folder), dtype="float32", matryoshka=True))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pooled_scores(queries: list[Any], documents: list[Any]) -> Any:
    return reference_maxsim([torch.as_tensor(q) for q in queries], [torch.as_tensor(d) for d in documents]).numpy()


# As an option


@pytest.mark.parametrize("case", LATE)
@pytest.mark.parametrize(
    ("option", "stated"),
    [
        (2, {"pool_factor": 2}),
        (1.5, {"pool_factor": 1.5}),
        ({"pool_factor": 3, "num_protected_tokens": 2, "normalize_embeddings": False},) * 2,
        ({"pool_factor": 1e300, "num_protected_tokens": 0},) * 2,
    ],
    ids=str,
)
def test_pooled_documents_are_sentence_transformers(
    case: str, option: Any, stated: dict[str, Any], engine: Callable[[str], Engine]
) -> None:
    """Vectors and scores equal those of Sentence Transformers, which never pools queries."""
    ours, theirs = engine(case), late_reference(engine(case).folder)
    wanted = theirs.encode_document(DOCUMENTS, token_pooling=HierarchicalTokenPooling(**stated), convert_to_numpy=True)
    assert_close_vectors(ours.multi_vector(DOCUMENTS, input_type="document", token_pooling=option), wanted)
    plain = ours.multi_vector(DOCUMENTS, input_type="document")
    assert sum(map(len, wanted)) < sum(map(len, plain))
    expected = pooled_scores(theirs.encode_query(QUERIES, convert_to_numpy=True), wanted)
    for query, row in zip(QUERIES, expected, strict=True):
        found = ours.score(query, DOCUMENTS, token_pooling=option)
        np.testing.assert_allclose(found, row, rtol=0, atol=1e-5 * np.abs(expected).max())
        ranked = ours.rerank(query, DOCUMENTS, token_pooling=option)
        assert [each.index for each in ranked] == np.argsort(-found, kind="stable").tolist()


def test_pairs_in_any_order(engine: Callable[[str], Engine]) -> None:
    """A text that is a query in one pair and a document in another is pooled only as a document."""
    model, texts = engine("min"), [LONG, "a bird", "far away flies the whimbrel", LONG]
    queries = model.multi_vector(texts, input_type="query")
    documents = pool_tokens(model.multi_vector(texts, input_type="document"), TokenPooling(2))
    expected = pooled_scores(list(queries), list(documents))
    for turn in range(4):
        others = texts[turn:] + texts[:turn]
        found = model.score(texts, others, token_pooling=2)
        np.testing.assert_allclose(found, [expected[i, (i + turn) % 4] for i in range(4)], rtol=1e-5)
        alone = [model.score(one, other, token_pooling=2)[0] for one, other in zip(texts, others, strict=True)]
        assert found.tolist() == alone


def test_vectors_in_place_of_texts_are_compared_as_they_are(engine: Callable[[str], Engine]) -> None:
    """Stored vectors may have been pooled when they were made; only texts beside them are pooled."""
    model, pooling = engine("min"), {"token_pooling": 2}
    stored = model.multi_vector(DOCUMENTS, input_type="document", token_pooling=2)
    expected = model.score("a bird", DOCUMENTS, token_pooling=2)
    np.testing.assert_allclose(model.score("a bird", stored), expected, rtol=1e-6)
    mixed: Any = [rows if i % 2 else text for i, (rows, text) in enumerate(zip(stored, DOCUMENTS, strict=True))]
    np.testing.assert_allclose(model.score("a bird", mixed, token_pooling=2), expected, rtol=1e-6)
    query = model.multi_vector("a bird", input_type="query")[0]
    np.testing.assert_allclose(model.score(query, DOCUMENTS, token_pooling=2), expected, rtol=1e-6)
    with pytest.raises(InvalidRequest, match="token_pooling: is for texts"):
        model.score("a bird", stored, **pooling)  # pyright: ignore[reportArgumentType]


def test_pooled_vectors_have_no_explanation(engine: Callable[[str], Engine], tmp_path: Path) -> None:
    shutil.copytree(engine("min").folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / POOL_FILE, pool_factor=2.0)
    with Engine(str(tmp_path), dtype="float32") as baked:
        with pytest.raises(InvalidRequest, match="explain: pooled vectors are of no one token"):
            baked.explain("a bird", DOCUMENTS)
        with pytest.raises(InvalidRequest, match="explain: pooled vectors are of no one token"):
            engine("min").explain("a bird", DOCUMENTS, token_pooling=2)
        plain = engine("min").explain("a bird", DOCUMENTS)
        for ours, theirs in zip(baked.explain("a bird", DOCUMENTS, token_pooling=1), plain, strict=True):
            assert ours.document_tokens == theirs.document_tokens
            assert np.array_equal(ours.places_Q, theirs.places_Q)


def test_kept_documents_are_known_by_how_they_were_pooled(engine: Callable[[str], Engine]) -> None:
    options: list[Any] = [None, 2, 3, {"pool_factor": 3, "num_protected_tokens": 4}]
    with Engine(str(engine("min").folder), dtype="float32", document_cache_bytes=10**6) as keeping:
        for _ in range(2):
            for option in options:
                found = keeping.score("a bird", DOCUMENTS, token_pooling=option)
                np.testing.assert_allclose(found, engine("min").score("a bird", DOCUMENTS, token_pooling=option), rtol=1e-6)
        cache = keeping._document_cache
        assert cache is not None
        assert len(cache._rows) == len(options) * len(DOCUMENTS)


def test_texts_of_which_nothing_is_said_are_documents(engine: Callable[[str], Engine]) -> None:
    """Sentence Transformers treats them as documents."""
    model = engine("m3")
    plain = model.multi_vector(DOCUMENTS)
    found = model.encode(DOCUMENTS, ("dense", "multi_vector"), token_pooling=2)
    module = HierarchicalTokenPooling(2)
    assert found.multi_vector is not None
    assert_close_vectors(
        found.multi_vector, [rows.numpy() for rows in module.pool([torch.from_numpy(rows) for rows in plain], task=None)]
    )
    assert np.array_equal(found.dense, model.embed(DOCUMENTS))  # pyright: ignore[reportArgumentType]


def test_a_cut_comes_first(engine: Callable[[str], Engine]) -> None:
    model = engine("min")
    cut = model.multi_vector(DOCUMENTS, input_type="document", dimensions=8)
    found = model.multi_vector(DOCUMENTS, input_type="document", dimensions=8, token_pooling=2)
    assert_close_vectors(found, list(pool_tokens(cut, TokenPooling(2))), 0)


# In checkpoints


BAKED: list[tuple[dict[str, Any], bool]] = [
    ({"pool_factor": 2.0}, True),  # of the first versions: without a word, nothing is normalised
    ({"pool_factor": 2, "normalize_embeddings": True}, True),
    ({"pool_factor": 2.5, "num_protected_tokens": 3, "normalize_embeddings": True, "tasks": "document"}, True),
    ({"pool_factor": 4.0, "num_protected_tokens": 0, "normalize_embeddings": False, "tasks": None}, True),
    ({"pool_factor": 2.0, "tasks": []}, True),
    ({"pool_factor": 1.0, "normalize_embeddings": True}, True),
    ({"pool_factor": 2.0, "normalize_embeddings": True}, False),
    ({"pool_factor": 2.0}, False),
    ({"pool_factor": 1.0, "normalize_embeddings": True}, False),
    ({"pool_factor": 1.0}, False),
]


def write_baked(folder: Path, stated: dict[str, Any], *, normalized: bool = True) -> None:
    write_sentence_transformers(folder, MIN)
    write_json(folder / POOL_FILE, {"num_protected_tokens": 1, "tasks": ["document"]} | stated)
    if not normalized:
        rows = [row for row in json.loads((folder / "modules.json").read_text()) if "Normalize" not in row["path"]]
        write_json(folder / "modules.json", rows)


@pytest.mark.parametrize(("stated", "normalized"), BAKED, ids=str)
def test_checkpoints_that_pool(stated: dict[str, Any], normalized: bool, tmp_path: Path) -> None:
    """Vectors and scores equal those of Sentence Transformers' module, also without normalization."""
    write_baked(tmp_path, stated, normalized=normalized)
    theirs = MultiVectorEncoder(str(tmp_path), device="cpu")
    queries = theirs.encode_query(QUERIES, convert_to_numpy=True)
    documents = theirs.encode_document(DOCUMENTS, convert_to_numpy=True)
    expected = pooled_scores(queries, documents)
    with Engine(str(tmp_path), dtype="float32") as ours:
        assert_close_vectors(ours.multi_vector(QUERIES, input_type="query"), queries)
        assert_close_vectors(ours.multi_vector(DOCUMENTS, input_type="document"), documents)
        found = np.stack([ours.score(query, DOCUMENTS) for query in QUERIES])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_request_replaces_what_the_checkpoint_says(tmp_path: Path, engine: Callable[[str], Engine]) -> None:
    shutil.copytree(engine("min").folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / POOL_FILE, pool_factor=2.0)
    plain = engine("min")
    with Engine(str(tmp_path), dtype="float32") as baked:
        for option in (1, 3, {"pool_factor": 1.0, "normalize_embeddings": False}):
            documents = [one.multi_vector(DOCUMENTS, input_type="document", token_pooling=option) for one in (plain, baked)]
            assert np.array_equal(documents[0].rows_XD, documents[1].rows_XD)
            assert np.array_equal(documents[0].offsets_N1, documents[1].offsets_N1)
            scores = [one.score("a bird", DOCUMENTS, token_pooling=option) for one in (plain, baked)]
            assert np.array_equal(*scores)
        assert not np.array_equal(baked.score("a bird", DOCUMENTS), plain.score("a bird", DOCUMENTS))
        pooled = baked.multi_vector(DOCUMENTS, input_type="document")
        normalized = baked.multi_vector(DOCUMENTS, input_type="document", normalize=True)
        assert np.linalg.norm(pooled.rows_XD, axis=1).min() < 1 - 1e-4
        np.testing.assert_allclose(np.linalg.norm(normalized.rows_XD, axis=1), 1, atol=1e-6)
        with pytest.raises(InvalidRequest, match="pools the vectors of documents") as caught:
            baked.multi_vector(DOCUMENTS, input_type="document", normalize=False)
        assert caught.value.param == "normalize"
        baked.multi_vector(DOCUMENTS, input_type="document", normalize=False, token_pooling=1)
        baked.multi_vector(QUERIES, input_type="query", normalize=False)


# MUVERA


@pytest.mark.parametrize("case", ["stanford", "m3"])
@pytest.mark.parametrize("input_type", ["query", "document"])
def test_one_vector_for_each_text(case: str, input_type: InputType, engine: Callable[[str], Engine]) -> None:
    """The vector is the encoding of the vectors of `multi_vector`."""
    model = engine(case)
    rows = model.multi_vector(DOCUMENTS, input_type=input_type)
    width = rows.rows_XD.shape[1]
    wanted = Muvera(width).encode(rows, input_type)
    found = model.muvera(DOCUMENTS, input_type=input_type)
    assert (found.shape, found.dtype) == ((len(DOCUMENTS), 10_240), np.float32)
    assert np.array_equal(found, wanted)
    assert np.array_equal(model.muvera(DOCUMENTS[0], input_type=input_type), wanted[0])
    some = model.muvera(DOCUMENTS, input_type=input_type, muvera={"r_reps": 3, "k_sim": 2, "dim_proj": 4, "seed": 7})
    assert np.array_equal(some, Muvera(width, 2, 4, 3, 7).encode(rows, input_type))
    assert np.array_equal(some, model.muvera(DOCUMENTS, input_type=input_type, muvera=MuveraParameters(2, 4, 3, 7)))


def test_among_other_outputs_and_after_pooling(engine: Callable[[str], Engine]) -> None:
    model = engine("m3")
    rows = model.multi_vector(DOCUMENTS, input_type="document", token_pooling=2)
    names = ("dense", "sparse", "multi_vector")
    outputs = model.encode(DOCUMENTS, names, input_type="document", token_pooling=2, muvera=True)
    assert outputs.multi_vector is None
    assert np.array_equal(outputs.muvera, Muvera(48).encode(rows, "document"))  # pyright: ignore[reportArgumentType]
    assert np.array_equal(outputs.dense, model.embed(DOCUMENTS, input_type="document"))  # pyright: ignore[reportArgumentType]
    assert model.encode(DOCUMENTS, names, input_type="document", muvera=False).multi_vector is not None


def test_async(engine: Callable[[str], Engine]) -> None:
    model = engine("stanford")

    async def ask() -> Any:
        same = AsyncEngine(model)
        with pytest.raises(InvalidRequest, match="muvera: gives no token vectors"):
            await same.multi_vector(DOCUMENTS, input_type="document", muvera=True)
        one, many = await same.muvera("a", input_type="query"), await same.muvera(DOCUMENTS, input_type="document")
        pooled = await same.multi_vector(DOCUMENTS, input_type="document", token_pooling=2)
        return one, many, pooled, await same.score("a", DOCUMENTS, token_pooling=2)

    one, many, pooled, scores = asyncio.run(ask())
    assert np.array_equal(one, model.muvera("a", input_type="query"))
    assert np.array_equal(many, model.muvera(DOCUMENTS, input_type="document"))
    assert np.array_equal(pooled.rows_XD, model.multi_vector(DOCUMENTS, input_type="document", token_pooling=2).rows_XD)
    assert np.array_equal(scores, model.score("a", DOCUMENTS, token_pooling=2))


def test_draws_are_kept_but_few() -> None:
    assert make_muvera.cache_info().maxsize == 4
    assert make_muvera(48, MuveraParameters(seed=3)) is make_muvera(48, MuveraParameters(seed=3))


# Wrong requests


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"token_pooling": 0}, "token_pooling", "of at least 1, is 0"),
    ({"token_pooling": 0.5}, "token_pooling", "of at least 1"),
    ({"token_pooling": float("nan")}, "token_pooling", "is nan"),
    ({"token_pooling": float("inf")}, "token_pooling", "is inf"),
    ({"token_pooling": 10**400}, "token_pooling", "of at least 1"),
    ({"token_pooling": True}, "token_pooling", "a factor or parameters, is True"),
    ({"token_pooling": "2"}, "token_pooling", "a factor or parameters, is '2'"),
    ({"token_pooling": [2]}, "token_pooling", "a factor or parameters"),
    ({"token_pooling": {}}, "token_pooling.pool_factor", "is missing"),
    ({"token_pooling": {"pool_factor": None}}, "token_pooling.pool_factor", "is None"),
    ({"token_pooling": {"pool_factor": 2, "protected": 1}}, "token_pooling", "'protected' is not known; it takes pool_factor"),
    ({"token_pooling": {"pool_factor": 2, "num_protected_tokens": -1}}, "token_pooling.num_protected_tokens", "is -1"),
    ({"token_pooling": {"pool_factor": 2, "num_protected_tokens": 2**70}}, "token_pooling.num_protected_tokens", "to 2,147"),
    ({"token_pooling": {"pool_factor": 2, "normalize_embeddings": 1}}, "token_pooling.normalize_embeddings", "is 1"),
    ({"token_pooling": 2, "input_type": "query"}, "token_pooling", "is for documents"),
    ({"token_pooling": 2, "normalize": False}, "token_pooling", "joins vectors of norm 1"),
    ({"token_pooling": 2, "outputs": ("dense", "sparse")}, "token_pooling", "is for multi_vector; .* dense, sparse"),
    ({"muvera": 1}, "muvera", "true, false or parameters, is 1"),
    ({"muvera": "yes"}, "muvera", "true, false or parameters"),
    ({"muvera": {"width": 48}}, "muvera", "'width' is not known; it takes k_sim"),
    ({"muvera": {"k_sim": 0}}, "muvera.k_sim", "from 1 to 17, is 0"),
    ({"muvera": {"k_sim": float("nan")}}, "muvera.k_sim", "is nan"),
    ({"muvera": {"k_sim": 17}}, "muvera.k_sim", "numbers; the limit is 131,072"),
    ({"muvera": {"r_reps": 10**9}}, "muvera.r_reps", "from 1 to 4,096"),
    ({"muvera": {"r_reps": 200, "dim_proj": 20, "k_sim": 1}}, "muvera.r_reps", "4,200 products for each token"),
    ({"muvera": {"dim_proj": 49}}, "muvera.dim_proj", "at most 48, the width of the token vectors"),
    ({"muvera": {"seed": -1}}, "muvera.seed", "is -1"),
    ({"muvera": {"seed": 2**64}}, "muvera.seed", "from 0 to"),
    ({"muvera": True, "input_type": None}, "input_type", "encoded differently"),
    ({"muvera": True, "outputs": "dense"}, "muvera", "is for multi_vector"),
]


@pytest.mark.parametrize(("fields", "param", "said"), WRONG, ids=str)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str, engine: Callable[[str], Engine]) -> None:
    options = {"input_type": "document", "outputs": "multi_vector"} | fields
    with pytest.raises(InvalidRequest, match=said) as caught:
        engine("m3").encode(DOCUMENTS, options.pop("outputs"), **options)
    assert caught.value.param == param


def test_what_verbs_take(engine: Callable[[str], Engine]) -> None:
    model: Any = engine("m3")
    asks: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.score("a", DOCUMENTS, token_pooling=2, score_by="dense"), "token_pooling: is for multi_vector"),
        (lambda: model.rerank("a", DOCUMENTS, token_pooling=2), "token_pooling: is for multi_vector"),
        (lambda: model.rerank("a", DOCUMENTS, token_pooling=0, score_by="multi_vector"), "token_pooling: must be a number"),
        (lambda: model.score("a", DOCUMENTS, muvera=True), "muvera: is no option"),
        (lambda: model.embed("a", token_pooling=2), "token_pooling: is for multi_vector"),
        (lambda: model.embed("a", muvera=True), "muvera: is for multi_vector"),
        (lambda: model.sparse("a", muvera=True), "muvera: is for multi_vector"),
        (lambda: model.multi_vector("a", muvera=True, input_type="query"), "muvera: gives no token vectors"),
        (lambda: model.muvera("a", muvera=False, input_type="query"), "muvera: is what this verb is for"),
        (lambda: model.run(Request(["a"], ("multi_vector",), token_pooling=2)), "token_pooling: must be a TokenPooling"),  # type: ignore[arg-type]
        (lambda: model.run(Request(["a"], ("multi_vector",), muvera=True)), "muvera: must be MuveraParameters"),  # type: ignore[arg-type]
        (
            lambda: model.run(Request([("a", "b")], ("scores",), score_by="multi_vector", muvera=MuveraParameters())),
            "muvera: pairs are compared",
        ),
    ]
    for ask, said in asks:
        with pytest.raises(InvalidRequest, match=said):
            ask()
    assert len(model.multi_vector(["a"], muvera=False)) == 1


BODIES: list[tuple[Any, str | None]] = [
    ("2", "token_pooling"),
    (True, "token_pooling"),
    (0, "token_pooling"),
    ([2], "token_pooling"),
    ({}, "token_pooling.pool_factor"),
    ({"pool_factor": 0}, "token_pooling.pool_factor"),
    ({"pool_factor": "2"}, "token_pooling.pool_factor"),
    ({"pool_factor": 2, "num_protected_tokens": 1.5}, "token_pooling.num_protected_tokens"),
    ({"pool_factor": 2, "num_protected_tokens": 2**40}, "token_pooling.num_protected_tokens"),
    ({"pool_factor": 2, "normalize_embeddings": "no"}, "token_pooling.normalize_embeddings"),
    ({"pool_factor": 2, "tasks": ["query"]}, "token_pooling"),
]


@pytest.mark.parametrize(("given", "param"), BODIES, ids=str)
def test_bodies_that_are_wrong(given: Any, param: str) -> None:
    for read, body in (
        (native.parse_embed, {"input": "a"}),
        (rerank.parse_rerank, {"query": "a", "documents": ["b"]}),
        (pair_scores.parse_score, {"queries": "a", "documents": "b"}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read(orjson.dumps(body | {"token_pooling": given}))
        assert caught.value.param == param
    for number in ("1e999", "NaN", "-1e400"):
        with pytest.raises(InvalidRequest):
            native.parse_embed(f'{{"input": "a", "token_pooling": {number}}}'.encode())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (1, "muvera"), ("yes", "muvera"), ({"k_sim": 0}, "muvera.k_sim"), ({"k_sim": 1.5}, "muvera.k_sim"),
        ({"r_reps": 10**30}, "muvera.r_reps"), ({"seed": 2**64}, "muvera"), ({"k_sim": 17}, "muvera"), ({"width": 1}, "muvera"),
    ],
    ids=str,
)  # fmt: skip
def test_bodies_that_are_wrong_of_muvera(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        native.parse_embed(json.dumps({"input": "a", "muvera": given}).encode())
    assert caught.value.param == param


def test_bodies() -> None:
    body = {"input": "a", "token_pooling": {"pool_factor": 2, "num_protected_tokens": 3, "normalize_embeddings": False}}
    request = asked(native.parse_embed(orjson.dumps(body | {"muvera": {"seed": 2**64 - 1}})))
    assert request == Request(["a"], token_pooling=TokenPooling(2, 3, False), muvera=MuveraParameters(seed=2**64 - 1))
    assert asked(native.parse_embed(b'{"input": "a", "token_pooling": 2, "muvera": true}')).muvera == MuveraParameters()
    assert asked(native.parse_embed(b'{"input": "a", "token_pooling": null, "muvera": false}')) == Request(["a"])
    model = FakeModel.named("m", CARD)
    ranked = rerank.parse_rerank(b'{"query": "a", "documents": ["b"], "token_pooling": 1.5}').request(model)
    assert ranked.token_pooling == TokenPooling(1.5)
    scored = pair_scores.parse_score(b'{"text_1": "a", "text_2": "b", "token_pooling": 2}').request(model)
    assert scored.token_pooling == TokenPooling(2)


def test_without_scipy(engine: Callable[[str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine("min")
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / POOL_FILE, pool_factor=2.0)
    monkeypatch.setattr(whimbrel.outputs.multi_vector, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match="needs scipy"):
        model.score("a", DOCUMENTS, token_pooling=2)
    with pytest.raises(SetupError, match="needs scipy"):
        Engine(str(tmp_path))
    assert model.score("a", DOCUMENTS, token_pooling=1).tolist() == model.score("a", DOCUMENTS).tolist()


def test_texts_without_token_vectors(engine: Callable[[str], Engine]) -> None:
    model = engine("stanford")
    skipped = model.card.outputs["multi_vector"].skip_ids
    ids, kept = np.array(skipped[:3], np.int64), np.array([i for i in range(20, 60) if i not in skipped][:2], np.int64)
    some = Request([kept, ids], input_type="document", muvera=MuveraParameters())
    with pytest.raises(InvalidRequest, match="no token vectors") as caught:
        model.run(some)
    assert caught.value.param == "input[1]"
    pooled = model.run(Request([kept, ids], input_type="document", token_pooling=TokenPooling(2)))
    assert pooled.outputs.multi_vector is not None
    assert [len(rows) for rows in pooled.outputs.multi_vector] == [2, 0]


def test_what_takes_too_much_memory_is_refused_at_the_door(
    engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine("stanford")
    monkeypatch.setattr(whimbrel.outputs.multi_vector, "MAX_TOKENS", 8)
    with pytest.raises(InvalidRequest, match="token vectors; at most 9 are pooled") as caught:
        model.multi_vector(["a bird", LONG], input_type="document", token_pooling=2)
    assert caught.value.param == "input[1]"
    with pytest.raises(InvalidRequest, match="token vectors; at most 9 are pooled") as caught:
        model.rerank(LONG, ["a bird", LONG], token_pooling=2)
    assert caught.value.param == "documents[1]"
    model.score(LONG, ["a bird"], token_pooling=2)  # queries may be as long as they are
    model.multi_vector(LONG, input_type="document", token_pooling=1)
    monkeypatch.setattr(whimbrel.outputs.multi_vector, "_MAX_REQUEST_NUMBERS", 3 * 10_240)
    model.muvera(["a"] * 3, input_type="document")
    with pytest.raises(TooLarge, match="4 texts of 10,240 numbers each"):
        model.muvera(["a"] * 4, input_type="document")


# Failures, and waiting


class Failing:
    """Stand-in for pool_tokens that fails or waits for one text, known by its number of vectors."""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self._length, self._error = length, error
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, documents: Ragged, pooling: TokenPooling) -> Ragged:
        if self._length in np.diff(documents.offsets_N1):
            if self._error is not None:
                raise self._error
            self.entered.set()
            assert self.go_on.wait(30)
        return pool_tokens(documents, pooling)


@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError("8,192 squared"), OutOfMemory), (ValueError("not finite"), ComputeError)], ids=str
)
def test_a_failure_is_that_of_its_request(
    error: Exception, kind: type[WhimbrelError], engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine("min")
    length = len(model.multi_vector(LONG, input_type="document")[0])
    wanted = model.multi_vector("a bird", input_type="document", token_pooling=2)[0]
    monkeypatch.setattr(whimbrel.outputs.multi_vector, "pool_tokens", Failing(length, error))
    late, pooling = ("multi_vector",), TokenPooling(2)
    texts, scores = Request([LONG], late, input_type="document", token_pooling=pooling), ("scores",)
    good = Request(["a bird"], late, input_type="document", token_pooling=pooling)
    for bad in (texts, Request([("a", LONG)], scores, token_pooling=pooling)):
        futures = [model.submit(each) for each in (good, bad, good)]
        with pytest.raises(kind):
            futures[1].result()
        for future in (futures[0], futures[2]):
            found = future.result().outputs.multi_vector
            assert found is not None
            assert np.array_equal(found[0], wanted)
        with pytest.raises(kind):
            asyncio.run(run_over_a_channel(model, [bad]))
        assert np.array_equal(asyncio.run(run_over_a_channel(model, [good]))[0].multi_vector[0], wanted)  # pyright: ignore[reportOptionalSubscript]


def test_nobody_else_waits_for_it(engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the threads of an engine nor the event loop of a worker wait."""
    model = engine("min")
    length = len(model.multi_vector(LONG, input_type="document")[0])
    pooling = TokenPooling(2)
    documents = Request([LONG], ("multi_vector",), input_type="document", token_pooling=pooling)
    for slow in (documents, Request([("a", LONG)], ("scores",), token_pooling=pooling)):
        waiting = Failing(length)
        monkeypatch.setattr(whimbrel.outputs.multi_vector, "pool_tokens", waiting)
        future = model.submit(slow)
        assert waiting.entered.wait(30)
        assert len(model.multi_vector(QUERIES, input_type="query")) == len(QUERIES)
        assert len(model.score("a", DOCUMENTS)) == len(DOCUMENTS)
        waiting.go_on.set()
        future.result(30)

    async def ask() -> None:
        asked = asyncio.ensure_future(run_over_a_channel(model, [documents]))
        while not waiting.entered.is_set():
            await asyncio.sleep(0.001)
        waiting.go_on.set()  # the loop turns while another thread waits for this
        await asked

    waiting = Failing(length)
    monkeypatch.setattr(whimbrel.outputs.multi_vector, "pool_tokens", waiting)
    asyncio.run(ask())


def test_means_that_are_not_finite_are_an_error(engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(documents: Ragged, pooling: TokenPooling) -> Ragged:
        found = pool_tokens(documents, pooling)
        found.rows_XD[0, 0] = np.nan
        return found

    monkeypatch.setattr(whimbrel.outputs.multi_vector, "pool_tokens", broken)
    for ask in (
        lambda: engine("min").multi_vector(LONG, input_type="document", token_pooling=2),
        lambda: engine("min").score("a", LONG, token_pooling=2),
    ):
        with pytest.raises(NonFinite, match="too large"):
            ask()


# Through processes


@pytest.mark.extended
def test_a_real_server(tmp_path: Path, engine: Callable[[str], Engine]) -> None:
    """Answers from other processes have the same bits as those of an engine in this one, also for many texts."""
    shutil.copytree(engine("min").folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / POOL_FILE, pool_factor=2.0)
    many = DOCUMENTS + [f"text {i} of birds that fly far away" for i in range(200)]
    pooling = {"pool_factor": 3, "num_protected_tokens": 2}
    with (
        Engine(str(tmp_path), dtype="float32") as local,
        Server(str(tmp_path), "--dtype", "float32") as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        for option in (None, 1, 1.5, pooling):
            body = {"input": many, "input_type": "document", "token_pooling": option}
            outputs = client.post("/v1/embed", json=body).raise_for_status().json()["outputs"]
            expected = local.multi_vector(many, input_type="document", token_pooling=option)
            for rows, wanted in zip(outputs["multi_vector"], expected, strict=True):
                assert np.array_equal(np.array(rows, np.float32), wanted)
            outputs = client.post("/v1/embed", json=body | {"muvera": True, "encoding_format": "base64"}).json()["outputs"]
            encoded = [np.frombuffer(base64.b64decode(row), "<f4") for row in outputs["muvera"]]
            assert outputs.keys() == {"muvera"}
            assert np.array_equal(encoded, local.muvera(many, input_type="document", token_pooling=option))
            body = {"queries": "a bird", "documents": many, "token_pooling": option, "truncate": True}
            scores = [np.float32(each["score"]) for each in client.post("/v1/score", json=body).json()["data"]]
            assert scores == local.score("a bird", many, token_pooling=option).tolist()
            body = {"query": "a bird", "documents": many, "token_pooling": option, "truncate": True}
            ranked = client.post("/v1/rerank", json=body).raise_for_status().json()["results"]
            wanted = local.rerank("a bird", many, token_pooling=option)
            assert [each["index"] for each in ranked] == [each.index for each in wanted]
        body = {"input": ["a"], "input_type": "query", "muvera": {"r_reps": 2, "dim_proj": 3}}
        outputs = client.post("/v1/embed", json=body).json()["outputs"]
        wanted = local.muvera(["a"], input_type="query", muvera=MuveraParameters(r_reps=2, dim_proj=3))
        assert np.array_equal(np.array(outputs["muvera"], np.float32), wanted)
        for change, param in (
            ({"token_pooling": 2}, "token_pooling"),
            ({"muvera": {"dim_proj": 17}}, "muvera.dim_proj"),
            ({"muvera": {"k_sim": 20}}, "muvera.k_sim"),
        ):
            answer = client.post("/v1/embed", json=body | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        info = client.get("/info").raise_for_status().json()["models"][0]
        assert info["card"]["outputs"]["multi_vector"]["token_pooling"]["document"]["steps"][0]["pool_factor"] == 2
