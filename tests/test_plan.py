from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from whimbrel.card import Card
from whimbrel.cards.reader import read_card
from whimbrel.errors import SetupError
from whimbrel.plan import Hardware, Options, make_plan

CPU = Hardware(num_cores=3, cpu_bfloat16=True)
OLD_CPU = replace(CPU, cpu_bfloat16=False)
GPU = replace(CPU, gpus=("cuda:0", "cuda:1"), gpu_bfloat16=True)


@pytest.fixture(scope="module")
def card(minilm: Path) -> Card:
    return read_card(minilm, "all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("hardware", "options", "device", "dtype", "lanes", "tokens"),
    [
        (CPU, Options(), "cpu", "bfloat16", 3, 512),
        (OLD_CPU, Options(), "cpu", "float32", 3, 512),
        (OLD_CPU, Options(dtype="bfloat16"), "cpu", "bfloat16", 3, 512),
        (GPU, Options(), "cuda:0", "bfloat16", 1, 16_384),
        (GPU, Options(device="cuda"), "cuda:0", "bfloat16", 1, 16_384),
        (GPU, Options(device="cuda:1", dtype="float16", max_batch_tokens=7), "cuda:1", "float16", 1, 7),
        (GPU, Options(device="cpu"), "cpu", "bfloat16", 3, 512),
    ],
)
def test_auto_is_resolved(
    card: Card, hardware: Hardware, options: Options, device: str, dtype: str, lanes: int, tokens: int
) -> None:
    plan = make_plan(options, card, hardware)
    assert (plan.device, plan.dtype, plan.num_lanes, plan.max_batch_tokens) == (device, dtype, lanes, tokens)
    assert (plan.served_name, plan.max_length, plan.matryoshka) == ("all-MiniLM-L6-v2", 256, False)


def test_max_length_may_go_up_to_the_positions(card: Card) -> None:
    assert make_plan(Options(max_length=512), card, CPU).max_length == 512


@pytest.mark.parametrize(
    "options",
    [
        Options(device="cuda"), Options(device="tpu"), Options(dtype="float16"), Options(dtype="int8"), Options(max_length=513),
        Options(max_length=0), Options(max_batch_tokens=0), Options(max_request_tokens=0), Options(max_queue_tokens=-1),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_hint(card: Card, options: Options) -> None:
    with pytest.raises(SetupError) as caught:
        make_plan(options, card, CPU)
    assert "take" in (caught.value.hint or "")
