"""oneDNN's private calls in PyTorch: the self-test sees each way in which they can change, and the fallback is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from texts import TEXTS
from whimbrel import Engine
from whimbrel.model.fallback import prepacked
from whimbrel.model.runner import probe

CPU = torch.device("cpu")
REAL = torch.ops.mkldnn


def missing(*_: Any, **__: Any) -> Any:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


def other_signature(*_: Any, **__: Any) -> Any:
    raise TypeError("_linear_pointwise(): incompatible function arguments.\nThe following are supported: ...")


def drops_the_activation(x: Any, **options: Any) -> Any:
    return REAL._linear_pointwise(x, **options | {"attr": "none", "algorithm": ""})


def drops_the_bias(x: Any, **options: Any) -> Any:
    return REAL._linear_pointwise(x, **options | {"B": None})


def other_dtype(x: Any, **options: Any) -> Any:
    return REAL._linear_pointwise(x, **options).double()


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Replaces the private call, as another version of PyTorch might."""

    def replace(call: Any) -> None:
        changed = SimpleNamespace(
            _reorder_linear_weight=REAL._reorder_linear_weight,
            _linear_pointwise=call,
            _is_mkldnn_bf16_supported=REAL._is_mkldnn_bf16_supported,
        )
        monkeypatch.setattr(prepacked, "_mkldnn", lambda: changed)
        prepacked.prepacked_problem.cache_clear()

    yield replace
    monkeypatch.undo()
    prepacked.prepacked_problem.cache_clear()


def test_this_version_passes() -> None:
    assert prepacked.prepacked_problem() is None
    assert torch.__version__.startswith(prepacked.TRIED_VERSIONS)
    assert probe().torch_note == ""


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (missing, "AttributeError: '_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'"),
        (other_signature, "TypeError: _linear_pointwise(): incompatible function arguments."),
        (drops_the_activation, "other results for gelu in float32"),
        (drops_the_bias, "other results for identity in float32"),
        (other_dtype, "other results for identity in float32"),
    ],
)
def test_a_changed_call_is_found(call: Any, problem: str, change: Callable[[Any], None]) -> None:
    change(call)
    assert prepacked.prepacked_problem() == problem
    assert not prepacked.prepacked_supported(CPU)
    assert problem in probe().torch_note


def test_the_public_operators_give_the_same_vectors(change: Callable[[Any], None], engine32: Engine, minilm: Path) -> None:
    texts = TEXTS[:40]
    change(missing)
    with Engine(dtype="float32") as slower:
        found = slower.embed(texts)
        assert "slower public ones" in slower.plan.torch_note
        assert slower.plan.same_bits
    expected = SentenceTransformer(str(minilm), device="cpu").encode(texts)
    assert np.abs(found - expected).max() <= 1e-5
    assert np.abs(found - engine32.embed(texts)).max() <= 1e-5


def test_what_a_user_is_told() -> None:
    assert prepacked.version_note("2.13.0+cpu", None) == ""
    assert prepacked.version_note("2.11.0+cu130", None) == ""
    assert prepacked.version_note("2.10.0", None) == "untried version; self-test passed"
    assert prepacked.version_note("2.130.0", None) == "untried version; self-test passed"
    assert prepacked.version_note("3.0.0", None) == "untried version; self-test passed"
    assert "slower public ones" in prepacked.version_note("2.13.0", "TypeError: x")
