"""MUVERA against its formula, written out text by text, bucket by bucket, with fastembed's draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import whimbrel.outputs.muvera
from whimbrel.errors import InvalidRequest
from whimbrel.outputs.muvera import encode_muvera
from whimbrel.types.late_interaction import MAX_DIMS, MuveraParameters
from whimbrel.types.request import InputType
from whimbrel.types.result import Ragged

Floats = NDArray[np.float32]

LENGTHS = [1, 2, 7, 100, 32, 1, 3]
OTHERS: list[dict[str, int]] = [
    {},
    {"k_sim": 1, "dim_proj": 1, "r_reps": 1},
    {"k_sim": 3, "dim_proj": 48, "r_reps": 4},  # as wide as the vectors: not projected
    {"k_sim": 7, "dim_proj": 5, "r_reps": 3, "seed": 7},
]


def ragged(texts: list[Floats]) -> Ragged:
    return Ragged(np.concatenate(texts), np.cumsum([0, *map(len, texts)], dtype=np.int64))


def random_texts(width: int = 48, lengths: list[int] = LENGTHS) -> list[Floats]:
    rng = np.random.default_rng(8)
    texts = [rng.standard_normal((length, width)) for length in lengths]
    return [(rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32) for rows in texts]


def draws(width: int, k_sim: int, dim_proj: int, r_reps: int, seed: int) -> tuple[list[Any], Any]:
    """Draw as fastembed does: the planes of each repetition, and then all signs."""
    rng = np.random.default_rng(seed)
    planes = [rng.normal(size=(width, k_sim)) for _ in range(r_reps)]
    return planes, rng.choice([-1, 1], size=(r_reps, width, dim_proj))


def formula(text: Floats, is_query: bool, muvera: MuveraParameters) -> NDArray[np.float64]:
    width = text.shape[1]
    planes, signs = draws(width, muvera.k_sim, muvera.dim_proj, muvera.r_reps, muvera.seed)
    blocks: list[NDArray[np.float64]] = []
    for repetition in range(muvera.r_reps):
        members: list[list[int]] = [[] for _ in range(2**muvera.k_sim)]
        for index, row in enumerate(text):
            members[sum(1 << bit for bit, dot in enumerate(row @ planes[repetition]) if dot > 0)].append(index)
        used = [bucket for bucket, tokens in enumerate(members) if tokens]
        block = np.zeros((len(members), width))
        for bucket, tokens in enumerate(members):
            if tokens:
                block[bucket] = sum(text[token].astype(np.float64) for token in tokens)
                block[bucket] /= 1 if is_query else len(tokens)
            elif not is_query:
                nearest = min(used, key=lambda other: ((bucket ^ other).bit_count(), other))
                block[bucket] = text[members[nearest][0]]
        if muvera.dim_proj < width:
            block = block @ signs[repetition] / np.sqrt(muvera.dim_proj)
        blocks.append(block.ravel())
    return np.concatenate(blocks)


def check(muvera: MuveraParameters, texts: list[Floats], input_type: InputType) -> None:
    encoded = encode_muvera(ragged(texts), muvera, input_type)
    assert encoded.dtype == np.float32
    assert encoded.shape == (len(texts), muvera.r_reps * 2**muvera.k_sim * muvera.dim_proj)
    for row, text in zip(encoded, texts, strict=True):
        np.testing.assert_allclose(row, formula(text, input_type == "query", muvera), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("input_type", ["query", "document"])
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_encodings_are_those_of_the_formula(options: dict[str, int], input_type: InputType) -> None:
    check(MuveraParameters(**options), random_texts(), input_type)


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_more_buckets_than_16_bits_number(input_type: InputType) -> None:
    check(MuveraParameters(k_sim=13, dim_proj=1, r_reps=9), random_texts()[:3], input_type)


def test_defaults_are_fastembeds() -> None:
    assert repr(MuveraParameters()) == "MuveraParameters(k_sim=5, dim_proj=16, r_reps=20, seed=42)"
    assert MuveraParameters().num_dims == 10_240


@pytest.mark.parametrize("fixed", [1, -1])
def test_equal_and_vanishing_vectors(fixed: int) -> None:
    """All in one bucket; a vector of zeros lies on every plane, which counts as below."""
    texts = [np.full((5, 48), fixed / 7, np.float32), np.zeros((2, 48), np.float32), np.zeros((1, 48), np.float32)]
    texts.append(np.concatenate((texts[2], random_texts()[2])))  # it fills the neighbours of the lowest bucket
    check(MuveraParameters(), texts, "query")
    check(MuveraParameters(), texts, "document")


def test_dot_products_follow_late_interaction() -> None:
    """Which is what it is for: over random documents, some near to the query, the order is nearly that of MaxSim."""
    rng = np.random.default_rng(9)
    query = random_texts(64, [32])[0]
    documents = random_texts(64, [60] * 40)
    for share, document in enumerate(documents):
        document[: share // 2] = query[: share // 2] + rng.normal(0, 0.03, (share // 2, 64))
    muvera = MuveraParameters()
    approximate = encode_muvera(ragged(documents), muvera, "document") @ encode_muvera(ragged([query]), muvera, "query")[0]
    exact = [float((document @ query.T).max(axis=0).sum()) for document in documents]
    assert np.corrcoef(approximate, exact)[0, 1] > 0.9


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_same_alone_and_in_any_mix(input_type: InputType, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, muvera = random_texts(), MuveraParameters()
    mixed = encode_muvera(ragged(texts), muvera, input_type)
    for index, text in enumerate(texts):
        np.testing.assert_array_equal(encode_muvera(ragged([text]), muvera, input_type)[0], mixed[index])
    monkeypatch.setattr(whimbrel.outputs.muvera, "_CHUNK_NUMBERS", 40 * 320)
    np.testing.assert_array_equal(encode_muvera(ragged(texts), muvera, input_type), mixed)
    monkeypatch.setattr(whimbrel.outputs.muvera, "_CHUNK_BUCKETS", 2 * 640)
    np.testing.assert_array_equal(encode_muvera(ragged(texts), muvera, input_type), mixed)


def test_no_texts() -> None:
    nothing = Ragged(np.empty((0, 48), np.float32), np.zeros(1, np.int64))
    assert encode_muvera(nothing, MuveraParameters(), "document").shape == (0, 10_240)


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_empty_texts_are_refused(input_type: InputType) -> None:
    texts = ragged([*random_texts()[:2], np.empty((0, 48), np.float32), *random_texts()[:1], np.empty((0, 48), np.float32)])
    with pytest.raises(InvalidRequest, match="no token vectors") as raised:
        encode_muvera(texts, MuveraParameters(), input_type)
    assert raised.value.param == "input[2]"


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"dim_proj": 0}, "dim_proj", "from 1 to"),
        ({"k_sim": 0}, "k_sim", "from 1 to 17, is 0"),
        ({"k_sim": 10**9}, "k_sim", "from 1 to 17"),
        ({"k_sim": 12}, "k_sim", "1,310,720 numbers; the limit is 131,072"),
        ({"r_reps": 120, "dim_proj": 30}, "r_reps", "4,200 products for each token; the limit is 4,096"),
        ({"r_reps": -1}, "r_reps", "is -1"),
        ({"r_reps": 2.0}, "r_reps", "an integer from 1 to 4,096, is 2.0"),
        ({"seed": -1}, "seed", "of at least 0, is -1"),
        ({"seed": None}, "seed", "is None"),
        ({"seed": True}, "seed", "is True"),
    ],
)
def test_bad_parameters(options: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        MuveraParameters(**options)
    assert raised.value.param == param


def test_largest_parameters() -> None:
    largest = MuveraParameters(k_sim=17, dim_proj=1, r_reps=1)
    assert largest.num_dims == MAX_DIMS
    assert np.isfinite(encode_muvera(ragged(random_texts(16)), largest, "document")).all()
