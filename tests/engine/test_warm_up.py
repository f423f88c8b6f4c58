"""Warm-up: all that a GPU compiles is compiled before the first request, by an engine on a CPU that notes it.

Noted are the variants of attention, and the dtypes, widths, strides and options of the operations on rows, for which kernels
are compiled. Plain formulas compute in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.families import CASES, write_model
from checkpoints.late_interaction import write_pylate
from checkpoints.lora import write_adapter
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import write_splade
from shared_prefixes import PROMPT
from whimbrel import Engine
from whimbrel.model.kernels import library
from whimbrel.model.layer import Layer
from whimbrel.model.ops import attention, linear, row_kernels
from whimbrel.model.ops.attention_ragged import Variant
from whimbrel.model.ops.rowwise import FORMULAS, RowKernels

TEXTS = ["a", "The whimbrel is a wader with a long curved bill.", "far away " * 60]


def write_family(folder: Path, case: str, pooling: str = "mean") -> None:
    name, config = CASES[case]
    model = write_model(folder, name, config | {"max_position_embeddings": 600})
    write_adapter(folder / "adapter", model)
    sentence_layout(folder, modes=(pooling,), max_seq_length=500)


KINDS: dict[str, tuple[Callable[[Path], object], Callable[[Engine], object]]] = {
    "prompts, adapters and long texts": (
        lambda folder: write_family(folder, "qwen3", "lasttoken"),
        lambda engine: [
            engine.embed(TEXTS, prompt=prompt, adapter=name) for prompt in (None, PROMPT) for name in (None, "adapter")
        ],
    ),
    "biases": (lambda folder: write_family(folder, "mpnet"), lambda engine: engine.embed(TEXTS)),
    "caps and prompts": (
        lambda folder: write_family(folder, "gemma2", "lasttoken"),
        lambda engine: engine.embed(TEXTS, prompt=PROMPT),
    ),
    "sparse": (write_splade, lambda engine: engine.sparse(TEXTS)),
    "expanded queries": (
        lambda folder: write_pylate(folder, window=16, do_query_expansion=True),
        lambda engine: [
            engine.rerank("far away", TEXTS),
            engine.explain("far", TEXTS),
            engine.multi_vector(TEXTS, input_type="document"),
        ],
    ),
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """All that a GPU compiles for."""
    noted: set[object] = set()

    def has_ragged(_: torch.device, variant: Variant) -> bool:
        noted.add(variant)
        return False

    def noting(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            noted.add((name, *map(_compiled_for, arguments), *map(str, options.items())))
            return getattr(FORMULAS, name)(*arguments, **options)

        return call

    kernels = RowKernels(*map(noting, ("norm", "norm_and_rotate", "gate", "activate")))
    monkeypatch.setattr(row_kernels, "_kernels_of", lambda _: kernels)
    for module in (library, attention):
        monkeypatch.setattr(module, "kernels", lambda: None)
    monkeypatch.setattr(Layer, "join_parts", lambda _: None)
    monkeypatch.setattr(linear, "prepacked_supported", lambda _: False)
    for name, function in {
        "_is_on_gpu": lambda _: True, "_has_flash": lambda _: True, "_has_ragged": has_ragged, "_attend_varlen": attention._attend_runs
    }.items():  # fmt: skip
        monkeypatch.setattr(attention, name, function)
    return noted


def _compiled_for(argument: Any) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape[1:], argument.stride()[:-1]
    return tuple(map(_compiled_for, argument)) if isinstance(argument, tuple) else argument


@pytest.mark.bfloat16
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_finds_its_kernels_compiled(kind: str, noted: set[object], tmp_path: Path) -> None:
    write, ask = KINDS[kind]
    write(tmp_path)
    options: Any = {"pooling": "splade"} if kind == "sparse" else {}
    options |= {"adapters": {"adapter": str(tmp_path / "adapter")}} if "adapters" in kind else {}
    with Engine(str(tmp_path), dtype="bfloat16", max_batch_tokens=128, **options) as engine:
        engine._warm_up_full_batch()
        engine._warm_up_forms()
        warm = set(noted)
        ask(engine)
    assert noted == warm
    names = {each[0] for each in warm if isinstance(each, tuple)}
    assert "norm" in names
    assert any(isinstance(each, Variant) for each in warm) == (
        kind != "sparse"
    )  # others have more than flash attention computes
