"""Runners around the model's own, which WHIMBREL_RUNNER names: one that measures, and one that computes nothing."""

from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch

from whimbrel.checkpoint.reader import read_card
from whimbrel.types.batch import Batch
from whimbrel.types.plan import Plan


class _Around:
    def __init__(self, runner: Any, folder: Path, plan: Plan) -> None:
        self._runner = runner
        self._on_gpu = plan.device != "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class MeasuringRunner(_Around):
    """Keeps the tokens of each batch, the host's seconds of its launch, and the events around it on a GPU."""

    launches: ClassVar[list[tuple[int, float, Any]]] = []

    def launch(self, batch: Batch, *others: Any) -> Any:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._on_gpu else []
        begin = perf_counter()
        if events:
            events[0].record()
        launched = self._runner.launch(batch, *others)
        if events:
            events[1].record()
        self.launches.append((batch.num_tokens, perf_counter() - begin, events))
        return launched


class NullRunner(_Around):
    """Answers every batch with ones, from memory that is there already. The loaded model is not run."""

    def __init__(self, runner: Any, folder: Path, plan: Plan) -> None:
        super().__init__(runner, folder, plan)
        self._outputs = read_card(folder, folder.name).all_outputs
        self._rows: dict[int, Any] = {}

    def launch(self, batch: Batch, selections: Any, *_: Any) -> Any:
        return {
            name: self._ones(each.starts_P.size, each.num_columns(self._outputs[name])) for name, each in selections.items()
        }

    def collect(self, pending: Any) -> Any:
        return pending

    def _ones(self, num_rows: int, width: int) -> Any:
        known = self._rows.get(width)
        if known is None or len(known) < num_rows:
            known = self._rows[width] = np.ones((num_rows, width), np.float32)
        return known[:num_rows]
