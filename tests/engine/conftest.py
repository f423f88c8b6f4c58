"""Lanes on a runner that a test leads step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripted_runner import EngineThreads
from stepped_runner import Start, StepRunner
from waiting import wait_for
from whimbrel.checkpoint.reader import read_card
from whimbrel.types.card import Card
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan


@pytest.fixture(scope="module")
def card(minilm: Path) -> Card:
    return read_card(minilm, "all-MiniLM-L6-v2")


@pytest.fixture
def runner() -> StepRunner:
    return StepRunner()


@pytest.fixture
def start(runner: StepRunner, card: Card) -> Iterator[Start]:
    """Start lanes on the runner; options are those of a plan, and of Lanes."""
    started: list[EngineThreads] = []

    def start(
        num_lanes: int = 1, *, observer: Any = None, device: str = "cpu", chunked_prefill: bool = False, **options: Any
    ) -> EngineThreads:
        plan = make_plan(Options(**options), card, Hardware(num_cores=num_lanes))
        lanes = EngineThreads(runner, card, replace(plan, device=device, chunked_prefill=chunked_prefill), observer)
        started.append(lanes)
        dispatcher: Any = lanes.dispatcher
        assert wait_for(lambda: dispatcher._num_idle == plan.num_lanes)
        return lanes

    yield start
    for lanes in started:
        lanes.close()
