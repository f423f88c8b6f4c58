"""MaxSim against the formula in float64: ragged, quantized, mixed, split into parts and tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from token_vectors import all_pairs, binary, quantised, random_vectors, reference_scores, vectors_of
from whimbrel.model.cpu import cpu, has_small_kernels
from whimbrel.model.ops import tile_products
from whimbrel.model.ops.maxsim import best_matches, maxsim
from whimbrel.model.ops.token_vectors import EMPTY, TokenVectors

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 48, 96, 128, 320, 1024])
def test_scores_are_those_of_the_formula(width: int, dtype: torch.dtype) -> None:
    queries = random_vectors([32, 1, 3, 70, 200], width, seed=1, dtype=dtype)
    documents = random_vectors([0, 1, 2, 180, 1024, 1023, 1025, 7, 0], width, seed=2, dtype=dtype)
    pairs = all_pairs(queries, documents)
    expected = reference_scores(queries, documents, *pairs)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_a_long_document() -> None:
    queries, documents = random_vectors([32], 128, seed=1), random_vectors([10_000], 128, seed=2)
    pairs = all_pairs(queries, documents)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), reference_scores(queries, documents, *pairs), rtol=1e-5)


@pytest.mark.parametrize("quantise", [quantised, binary])
def test_quantised_documents_stand_for_what_they_say(quantise: type) -> None:
    queries, documents = random_vectors([32, 5], 128, seed=1), quantise(random_vectors([0, 1, 180, 6000], 128, seed=2))
    pairs = all_pairs(queries, documents)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), reference_scores(queries, documents, *pairs), rtol=1e-5)


def test_quantised_queries_too() -> None:
    queries, documents = quantised(random_vectors([32, 5], 128, seed=1)), binary(random_vectors([3, 180], 128, seed=2))
    pairs = all_pairs(queries, documents)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), reference_scores(queries, documents, *pairs), rtol=1e-5)


def test_similarities_below_zero_are_not_cut_off() -> None:
    documents = random_vectors([3, 900, 5], 64, seed=3)
    negative = TokenVectors(documents.rows_TD.abs(), documents.starts_N, documents.ends_N)
    queries = vectors_of(-random_vectors([4], 64, seed=4).rows_TD.abs(), np.array([0, 4]))
    pairs = all_pairs(queries, negative)
    scores = maxsim(queries, negative, *pairs)
    assert (scores < 0).all()
    np.testing.assert_allclose(scores, reference_scores(queries, negative, *pairs), rtol=1e-5)


def test_an_empty_document_is_below_all_others_and_an_empty_query_scores_nothing() -> None:
    queries, documents = random_vectors([4, 0], 16, seed=1), random_vectors([0, 5], 16, seed=2)
    assert maxsim(queries, documents, np.array([0, 1]), np.array([0, 1])).tolist() == [EMPTY, 0.0]
    assert maxsim(queries, documents, np.array([], int), np.array([], int)).size == 0


def test_the_mean_is_over_the_tokens_of_the_query() -> None:
    queries, documents = random_vectors([4, 7], 16, seed=1), random_vectors([9, 0], 16, seed=2)
    pairs = all_pairs(queries, documents)
    sums, means = maxsim(queries, documents, *pairs), maxsim(queries, documents, *pairs, reduce="mean")
    assert means.tolist() == [sums[0] / np.float32(4), EMPTY, sums[2] / np.float32(7), EMPTY]


@pytest.mark.parametrize("small_kernels", [False, True])
@pytest.mark.parametrize(("seed", "width"), [*enumerate([16, 48, 96, 128, 320, 1024])])
@pytest.mark.sample(4)
def test_a_score_has_the_same_bits_alone_and_in_any_mix(
    seed: int, width: int, small_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test numpy's product where it is faster, and torch's."""
    if small_kernels and not has_small_kernels():
        pytest.skip(f"numpy has no kernels for small products on {cpu()}")
    monkeypatch.setattr(tile_products, "has_small_kernels", lambda: small_kernels)
    monkeypatch.setattr("whimbrel.model.ops.maxsim._TILE", 1000 * width)
    rng = np.random.default_rng(seed)
    queries = random_vectors(rng.integers(1, 90, 6).tolist(), width, seed=seed)
    documents = random_vectors(rng.integers(0, 400, 30).tolist(), width, seed=seed + 100)
    query_P, document_P = all_pairs(queries, documents)
    alone = np.concatenate([maxsim(queries, documents, query_P[i : i + 1], document_P[i : i + 1]) for i in range(180)])
    some = rng.permutation(180)[: rng.integers(1, 181)]
    assert np.array_equal(maxsim(queries, documents, query_P, document_P), alone)
    assert np.array_equal(maxsim(queries, documents, query_P[some], document_P[some]), alone[some])
    monkeypatch.setattr("whimbrel.model.ops.maxsim._SLAB", 500)
    assert np.array_equal(maxsim(queries, documents, query_P, document_P), alone)


def test_documents_may_lie_anywhere() -> None:
    queries, store = random_vectors([12], 32, seed=1), random_vectors([3000], 32, seed=2)
    starts, ends = np.array([2500, 10, 10, 1400]), np.array([3000, 11, 900, 1500])
    documents = TokenVectors(store.rows_TD, starts, ends)
    pairs = all_pairs(queries, documents)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), reference_scores(queries, documents, *pairs), rtol=1e-5)


def test_rows_may_be_part_of_wider_ones() -> None:
    queries, wide = random_vectors([12], 24, seed=1), random_vectors([100, 5, 300], 32, seed=2)
    documents = TokenVectors(wide.rows_TD[:, :24], wide.starts_N, wide.ends_N)
    pairs = all_pairs(queries, documents)
    np.testing.assert_allclose(maxsim(queries, documents, *pairs), reference_scores(queries, documents, *pairs), rtol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_vanish(value: float) -> None:
    """There is no warning: the caller checks the scores."""
    queries, documents = random_vectors([4], 32, seed=1), random_vectors([40, 40], 32, seed=2)
    queries.rows_TD[1, 4] = 0.0
    documents.rows_TD[50, 3:5] = value
    scores = maxsim(queries, documents, *all_pairs(queries, documents))
    assert np.isfinite(scores).tolist() == [True, False]


def test_widths_must_be_equal() -> None:
    with pytest.raises(ValueError, match="width 16, document vectors 32"):
        maxsim(random_vectors([4], 16, seed=1), random_vectors([4], 32, seed=1), np.array([0]), np.array([0]))


def test_an_explanation_names_the_first_of_the_best_tokens() -> None:
    query, document = torch.eye(3), torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, -1.0], [0.5, 1.0, -2.0]])
    of_query = vectors_of(query, np.array([0, 3]))
    of_documents = vectors_of(document, np.array([0, 3, 3]))
    found = best_matches(of_query, of_documents, np.array([0, 0]), np.array([1, 0]))
    assert found[0].tolist() == [[0, -1]] * 3
    assert found[1].tolist() == [[0.5, 1], [1, 0], [0, 0]]
    assert len(best_matches(of_query, of_documents, np.empty(0, np.int64), np.empty(0, np.int64))) == 0
