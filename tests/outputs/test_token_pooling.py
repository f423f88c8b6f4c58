"""Token pooling against Sentence Transformers' own class."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

import whimbrel.outputs.token_pooling
from whimbrel.errors import InvalidRequest
from whimbrel.outputs.token_pooling import pool_tokens, ward_linkage
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.result import Ragged

Floats = NDArray[np.float32]

LENGTHS = [0, 1, 2, 3, 0, 4, 5, 31, 180, 0, 7, 300, 1, 0]
FACTORS = [1, 1.25, 1.5, 2, 4, 1000.0]


def ragged(documents: list[Floats]) -> Ragged:
    return Ragged(np.concatenate(documents), np.cumsum([0, *map(len, documents)], dtype=np.int64))


def unit(rows: NDArray[Any]) -> Floats:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def random_documents(width: int = 48) -> list[Floats]:
    rng = np.random.default_rng(5)
    return [unit(rng.standard_normal((length, width)) + 0.5) for length in LENGTHS]


def equal_rows() -> list[Floats]:
    """Rows of four halves: every distance is exact, most occur many times, and rows repeat."""
    rng = np.random.default_rng(6)
    rows = np.zeros((12, 8), np.float32)
    for row in rows:
        row[rng.choice(8, 4, replace=False)] = rng.choice([-0.5, 0.5], 4)
    return [rows[rng.integers(0, 12, length)] for length in LENGTHS]


def expected(documents: list[Floats], pooling: TokenPooling) -> list[Floats]:
    module = HierarchicalTokenPooling(
        pooling.pool_factor,
        num_protected_tokens=pooling.num_protected_tokens,
        normalize_embeddings=pooling.normalize_embeddings,
    )
    return [rows.numpy() for rows in module.pool([torch.from_numpy(document) for document in documents])]


def check(documents: list[Floats], pooling: TokenPooling) -> Ragged:
    pooled, wanted = pool_tokens(ragged(documents), pooling), expected(documents, pooling)
    assert pooled.rows_XD.dtype == np.float32
    assert pooled.offsets_N1.dtype == np.int64
    assert [len(rows) for rows in pooled] == [len(rows) for rows in wanted]
    for rows, theirs in zip(pooled, wanted, strict=True):
        np.testing.assert_allclose(rows, theirs, rtol=0, atol=1e-6)
    return pooled


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_protected_tokens", [0, 1, 3, 100])
@pytest.mark.parametrize("pool_factor", FACTORS)
@pytest.mark.sample(12)
def test_vectors_are_sentence_transformers(pool_factor: float, num_protected_tokens: int, normalize: bool) -> None:
    pooling = TokenPooling(pool_factor, num_protected_tokens, normalize)
    pooled = check(random_documents(), pooling)
    wanted = [min(length, num_protected_tokens) for length in LENGTHS]
    wanted = [kept + max(int((n - kept) // pool_factor), min(n - kept, 1)) for n, kept in zip(LENGTHS, wanted, strict=True)]
    assert np.diff(pooled.offsets_N1).tolist() == wanted
    check(equal_rows(), pooling)


@pytest.mark.parametrize("num_rows", [2, 3, 12, 97, 540])
def test_clusters_of_what_is_long_are_scipys(num_rows: int) -> None:
    """Bit for bit, also where many distances are equal."""
    rng = np.random.default_rng(num_rows)
    for rows in (
        unit(rng.standard_normal((num_rows, 24))),
        np.tile(equal_rows()[8], (3, 1))[:num_rows],
        np.ones((num_rows, 4)),
    ):
        distances = squareform(np.clip(1 - rows @ rows.T, 0, 2).astype(np.float32), checks=False)
        np.testing.assert_array_equal(ward_linkage(squareform(distances).astype(np.float64)), linkage(distances, method="ward"))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_distances_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        ward_linkage(np.array([[0, number], [number, 0]]))


def test_what_is_long_has_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for documents in (random_documents(), equal_rows()):
        wanted = pool_tokens(ragged(documents), TokenPooling(2))
        monkeypatch.setattr(whimbrel.outputs.token_pooling, "_LONG", 3)
        np.testing.assert_array_equal(pool_tokens(ragged(documents), TokenPooling(2)).rows_XD, wanted.rows_XD)
        monkeypatch.undo()


def test_other_threads_run_meanwhile() -> None:
    """A second thread runs during the clustering, unlike during that of scipy."""
    rows, ticks, done = unit(np.random.default_rng(3).standard_normal((2000, 8))), list[int](), threading.Event()
    distances = (1 - rows @ rows.T).clip(0, 2).astype(np.float64)

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        ward_linkage(distances)
    finally:
        done.set()
    thread.join()
    assert len(ticks) > 20


def test_ties_leave_fewer() -> None:
    """Four directions, each four times, have no cut into five."""
    rows = np.repeat(np.eye(4, 8, dtype=np.float32), 4, axis=0)
    pooled = check([rows], TokenPooling(3.2, num_protected_tokens=0))
    assert len(pooled[0]) == 4


def test_long_rows_are_shortened_only_if_asked() -> None:
    documents = [rows * 3 for rows in random_documents()]
    documents[5][2] = 0  # a vector without a direction stays 0
    for factor in (1, 2):
        pooled = check(documents, TokenPooling(factor))
        norms = np.linalg.norm(pooled.rows_XD, axis=1)
        assert np.all(np.isclose(norms, 1, atol=1e-6) | (norms == 0))
        check(documents, TokenPooling(factor, normalize_embeddings=False))
    same = pool_tokens(ragged(documents), TokenPooling(1, normalize_embeddings=False))
    np.testing.assert_array_equal(same.rows_XD, ragged(documents).rows_XD)


def test_same_bits_alone_and_in_any_mix() -> None:
    documents = random_documents()
    pooled = pool_tokens(ragged(documents), TokenPooling(2))
    for index, document in enumerate(documents):
        np.testing.assert_array_equal(pool_tokens(ragged([document]), TokenPooling(2))[0], pooled[index])


def test_input_is_left_alone() -> None:
    documents = ragged(random_documents())
    before = documents.rows_XD.copy()
    for factor in (1, 2):
        pooled = pool_tokens(documents, TokenPooling(factor))
        assert not np.shares_memory(pooled.rows_XD, documents.rows_XD)
    np.testing.assert_array_equal(documents.rows_XD, before)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_vectors(lengths: list[int]) -> None:
    empty = Ragged(np.empty((0, 16), np.float32), np.zeros(len(lengths) + 1, np.int64))
    pooled = pool_tokens(empty, TokenPooling(2))
    assert pooled.rows_XD.shape == (0, 16)
    assert pooled.offsets_N1.tolist() == [0] * (len(lengths) + 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pool_factor", 0.99, "a number of at least 1, is 0.99"),
        ("pool_factor", -2, "a number of at least 1, is -2"),
        ("pool_factor", float("nan"), "a number of at least 1, is nan"),
        ("pool_factor", float("inf"), "a number of at least 1, is inf"),
        ("pool_factor", "2", "a number of at least 1, is '2'"),
        ("pool_factor", True, "a number of at least 1, is True"),
        ("pool_factor", None, "a number of at least 1, is None"),
        ("pool_factor", 10**400, "a number of at least 1, is 1000"),
        ("num_protected_tokens", 2**31, "an integer from 0 to 2,147,483,647, is 2147483648"),
        ("num_protected_tokens", -1, "an integer from 0 to 2,147,483,647, is -1"),
        ("num_protected_tokens", 1.0, "an integer from 0 to 2,147,483,647, is 1.0"),
        ("num_protected_tokens", True, "an integer from 0 to 2,147,483,647, is True"),
        ("normalize_embeddings", 1, "true or false, is 1"),
    ],
)
def test_bad_parameters(name: str, value: Any, said: str) -> None:
    options: dict[str, Any] = {"pool_factor": 2.0, name: value}
    with pytest.raises(InvalidRequest, match=said) as raised:
        TokenPooling(**options)
    assert raised.value.param == name


def test_long_documents_whose_vectors_are_not_normalised() -> None:
    """Their distances may be none of a space. Clustering them ends with an error instead of never."""
    rows = (3 * np.random.default_rng(5).standard_normal((1100, 16))).astype(np.float32)
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="none of a space"):
        pool_tokens(Ragged(rows, np.array([0, len(rows)])), TokenPooling(2.0, normalize_embeddings=False))
