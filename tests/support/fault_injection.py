"""Fault injection: a runner that breaks when a text tells it to, so that tests prove from outside that the rest survives.

An engine uses it where WHIMBREL_RUNNER=fault_injection:FaultyRunner stands in its environment and this folder is on its path
(ENVIRONMENT sets both). Each text of a batch is decoded again, and obeyed if it holds one of these words. Spaces and letter case
are lost on the way, so a number ends where no digit follows.

    @@abort       the process aborts (SIGABRT)              @@raise      the batch fails
    @@segv        the process reads address 0 (SIGSEGV)     @@oom        there is no memory for the batch
    @@exit        the process ends, with code 3             @@oom>8      the same, if it has more than 8 texts
    @@lost        the device is lost
    @@hang        the lane sleeps for ever                  @@rows       the batch's outputs lack a row
    @@hang-gil    the same, and keeps the interpreter       @@width      the batch's outputs lack a column
    @@sleep:2     the lane sleeps 2 s (or 0.5)              @@nan        the text's outputs are not finite
                                                            @@nan-low    the same, unless computed in float32
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import tokenizers

from whimbrel.errors import Unavailable
from whimbrel.outputs.rows import CheckedRows, DeviceRows, OutputRows, RowSelection
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.batch import Batch
from whimbrel.types.plan import Plan
from whimbrel.types.request import OutputName
from whimbrel.types.result import Sparse

ENVIRONMENT: Final = {
    "WHIMBREL_RUNNER": "fault_injection:FaultyRunner",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Variables that make a server obey; in this process WHIMBREL_RUNNER is enough."""

_WORD: Final = re.compile(r"@@(abort|lost|segv|exit|hang-gil|hang|sleep:\d+(?:\.\d)?|raise|oom>\d+|oom|rows|width|nan-low|nan)")
_NOT_TEXT: Final = re.compile(r"\s|##|[▁Ġ]")
"""Spaces, and the marks that tokenizers without a decoder leave."""


@dataclass(frozen=True, slots=True)
class _LaunchedBatch:
    pending: Any
    wanted: Mapping[OutputName, RowSelection]
    words_B: list[list[str]]


class FaultyRunner:
    """A runner around another, which computes in the dtype of `plan` with the tokenizer in `folder`."""

    def __init__(self, runner: Any, folder: Path, plan: Plan) -> None:
        self._runner = runner
        self.unstable = runner.unstable
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._not_finite = {"nan"} if plan.dtype == "float32" else {"nan", "nan-low"}

    def init_thread(self, *, urgent: bool = False) -> None:
        """Prepare a thread for the other runner."""
        self._runner.init_thread(urgent=urgent)

    def launch(
        self, batch: Batch, selections: Mapping[OutputName, RowSelection], between_layers: Callable[[], None] | None = None
    ) -> _LaunchedBatch:
        """Obey the texts, then launch the batch."""
        words_B = [self._words(batch.ids_T[start:end].tolist()) for start, end in pairwise(batch.cu_seqlens)]
        for words in words_B:
            for word in words:
                _obey(word, batch.num_seqs)
        return _LaunchedBatch(self._runner.launch(batch, selections, between_layers), selections, words_B)

    def collect(self, pending: _LaunchedBatch) -> dict[OutputName, OutputRows]:
        """Collect the batch and spoil every output as the texts say."""
        outputs = self._runner.collect(pending.pending)
        return {name: self._spoilt(rows, pending.wanted[name].offsets_B1, pending.words_B) for name, rows in outputs.items()}

    def _spoilt(self, rows: OutputRows, offsets_B1: Int64Array, words_B: Sequence[list[str]]) -> OutputRows:
        said = {word for words in words_B for word in words}
        if isinstance(rows, DeviceRows):
            return self._spoilt(cast(Float32Array, rows.rows_PD.float().cpu().numpy()), offsets_B1, words_B)
        if isinstance(rows, CheckedRows):
            return self._spoilt(rows.rows_PD, offsets_B1, words_B)
        if isinstance(rows, Sparse):
            values, offsets = rows.weights_X.copy(), rows.offsets_N1[offsets_B1]
        else:
            values, offsets = rows.copy(), offsets_B1
        for (start, end), words in zip(pairwise(offsets.tolist()), words_B, strict=True):
            if self._not_finite.intersection(words):
                values[max(start, end - 1) : end] = np.nan
        if isinstance(rows, Sparse):
            return Sparse(rows.ids_X, values, rows.offsets_N1[:-1] if "rows" in said else rows.offsets_N1)
        values = values[:-1] if "rows" in said else values
        return values[:, :-1] if "width" in said else values

    def _words(self, ids: list[int]) -> list[str]:
        return find_words(self._tokenizer.decode(ids))


def find_words(text: str) -> list[str]:
    """Return the words in a decoded text, without their @@."""
    return _WORD.findall(_NOT_TEXT.sub("", text).lower())


def _obey(word: str, num_seqs: int) -> None:
    name, _, number = word.replace(">", ":").partition(":")
    if name == "raise":
        raise RuntimeError("a text said @@raise")
    if name == "lost":
        raise Unavailable("a text said @@lost")
    if name == "oom" and num_seqs > int(number or 0):
        raise MemoryError(f"a text said @@{word}")
    if name == "sleep":
        time.sleep(float(number))
    elif action := _ENDS.get(name):
        action()


def _hang() -> None:
    threading.Event().wait()


def _hang_with_interpreter() -> None:
    while True:
        ctypes.PyDLL(None).sleep(2**31 - 1)


_ENDS: Final[dict[str, Callable[[], object]]] = {
    "abort": os.abort,
    "segv": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "hang": _hang,
    "hang-gil": _hang_with_interpreter,
}
