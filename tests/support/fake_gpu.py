"""A GPU that computes nothing: tensors without numbers, on the device "meta", that say they are on a GPU; and events that count.

Whatever would make the host wait for a GPU raises here, as there is no number to wait for: reading one, a shape that depends on
numbers, and a copy to the host that is not asynchronous. Events that are waited for are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import whimbrel.model.maxsim_scorer
import whimbrel.model.runner
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.ops import maxsim_device, maxsim_torch, staging
from whimbrel.model.runner import Runner
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.rows import select_rows
from whimbrel.types.batch import pack
from whimbrel.types.card import Card
from whimbrel.types.hardware import Gpu, Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.seq import Seq

GPU = torch.device("meta")


class Event:
    waits: list[str]

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        self.waits.append("event")


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


def put(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def start_copy(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let operations of the block run on a GPU that computes nothing. Gives the list of events that were waited for."""
    waits: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_cuda", property(lambda self: self.is_meta))
        patched.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patched.setattr(torch.cuda, "Event", type("CountedEvent", (Event,), {"waits": waits}))
        patched.setattr(torch.cuda, "current_stream", Stream)
        patched.setattr(torch.cuda, "stream", lambda _: nullcontext())
        for module in (staging, maxsim_torch, whimbrel.model.maxsim_scorer):
            patched.setattr(module, "put", put)
        for module in (staging, whimbrel.model.runner, maxsim_device):
            patched.setattr(module, "start_copy", start_copy)
        patched.setattr(maxsim_device, "_backend", lambda _: maxsim_torch)  # Triton launches nothing without a GPU
        yield waits


def load(folder: Path, dtype: str, *, pooling: Any = None) -> tuple[Runner, Card]:
    """Load a model without its numbers. Call it within `fake_gpu`."""
    checkpoint = resolve_checkpoint(str(folder))
    card = read_card(folder, "m", pooling=pooling)
    hardware = Hardware(2, gpus=(Gpu("cuda:0", 2**36, bfloat16=True),))
    plan = make_plan(Options(device="cuda", dtype=dtype), card, hardware)
    runner: Any = Runner(checkpoint, card, replace(plan, device=GPU.type))
    runner._copies, runner._keeps_vectors = Stream(), True
    return runner, card


def launch(runner: Runner, card: Card, *, keep_on_device: bool = False, mixed: bool = False) -> Any:
    """Launch a batch of some texts with every output of a model, or `mixed`: each text with another one."""
    seqs = [Seq(np.arange(5, 5 + size, dtype=np.int32), index) for index, size in enumerate((3, 9, 9, 40))]
    outputs = {name: output for name, output in card.outputs.items() if output.rows != "none"}
    specs = [OutputSpec(name, output.width, True, keep_on_device=keep_on_device) for name, output in outputs.items()]
    batch, layouts = pack(seqs), [plan_layout(card, seqs, each) for each in ([[spec] for spec in specs] if mixed else [specs])]
    return runner.launch(batch, select_rows(card, batch, [layouts[i % len(layouts)] for i in range(len(seqs))]))
