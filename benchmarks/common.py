"""Shared helpers of the benchmarks: texts, plans and token counts, worker processes, tables."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.runner import probe
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.types.arrays import Float32Array
from whimbrel.types.plan import Options, Plan, make_plan
from whimbrel.types.request import Request

T = TypeVar("T")

FOLDER: Final = resolve_checkpoint(None).folder
NUM_CORES: Final = len(os.sched_getaffinity(0))
_TICKS: Final = os.sysconf("SC_CLK_TCK")

MIXED: Final = (4, 200)
SHORT: Final = (4, 24)


def make_texts(count: int, *, words: tuple[int, int], seed: int = 0) -> list[str]:
    """Return `count` random texts with a number of words in the range `words`, both ends included.

    Words are the tokenizer's whole words, which are about in the order of their frequency, drawn by Zipf's law. One in ten is
    made of two words and splits into subwords, as rare words do. One in eight ends a sentence or has a comma.
    """
    rng = random.Random(seed)
    vocab: dict[str, int] = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    whole = [word for word in sorted(vocab, key=vocab.__getitem__) if len(word) > 1 and word.isascii() and word.isalpha()]
    cum_weights = list(accumulate(1 / (rank + 3) for rank in range(len(whole))))

    def draw(k: int) -> list[str]:
        return rng.choices(whole, cum_weights=cum_weights, k=k)

    def text(num_words: int) -> str:
        drawn = [word + draw(1)[0] if rng.random() < 0.1 else word for word in draw(num_words)]
        marks = rng.choices(["", ",", "."], weights=[14, 1, 1], k=num_words - 1)
        drawn = [word.capitalize() if before == "." else word for word, before in zip(drawn, [".", *marks], strict=True)]
        return " ".join(word + mark for word, mark in zip(drawn, [*marks, "."], strict=True))

    return [text(rng.randint(*words)) for _ in range(count)]


def chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Return lists of `size` items."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def default_plan(dtype: str) -> Plan:
    """Return the plan by which the engine runs the packaged model here."""
    return make_plan(Options(dtype=dtype), read_card(FOLDER, FOLDER.name), probe())


def count_tokens(texts: Sequence[str], max_length: int | None = None) -> int:
    """Return the number of tokens that the packaged model computes for `texts`, cut to its limit or to `max_length`."""
    card = read_card(FOLDER, FOLDER.name)
    tokenizer = Tokenizer(FOLDER, card, make_plan(Options(max_length=max_length), card, probe()))
    return sum(seq.ids.size for seq in tokenizer.encode(Request(texts)))


def min_cosine(a_ND: Float32Array, b_ND: Float32Array) -> float:
    """Return the smallest cosine between rows of the same index."""
    a, b = a_ND.astype(np.float64), b_ND.astype(np.float64)
    cosines: NDArray[np.float64] = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return float(cosines.min())


def compare(*contenders: Callable[[], object], rounds: int, pause: float = 0.0) -> list[list[float]]:
    """Return the seconds of each contender in each round. They take turns, after a round that is not counted.

    `pause` is the seconds before each call. OpenMP threads spin for some milliseconds after their work is done.
    """
    found: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for contender, seconds in zip(contenders, found, strict=True):
            sleep(pause)
            started = perf_counter()
            contender()
            if number:
                seconds.append(perf_counter() - started)
    return found


class Worker:
    """Process that calls `make(*args)` once, and the returned function once per `ask`.

    `make` must be a top-level function of a module. The process ends with its parent.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_work, args=(theirs, make, args), daemon=True).start()
        theirs.close()

    def ask(self, message: Any) -> Any:
        """Call the function with `message` and wait. Raises EOFError if it failed; the traceback is on stderr."""
        self._pipe.send(message)
        return self._pipe.recv()


def _work(pipe: Connection, make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]) -> None:
    function = make(*args)
    with suppress(EOFError):  # the parent has ended
        while True:
            pipe.send(function(pipe.recv()))


def _read(path: Path) -> str:
    """Return the contents of a file in /proc, or "" if the process has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(i for task in tasks for child in _read(task).split() for i in family(int(child)))]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, including those that ended."""
    stats = [_read(Path(f"/proc/{i}/stat")).rpartition(")")[2].split() for i in family(pid)]
    return sum(int(ticks) for stat in stats for ticks in stat[11:15]) / _TICKS


def peak_mebibytes(pid: int) -> float:
    """Return the sum of the peak resident memory of a process and of each descendant, in MiB."""
    lines = [line for i in family(pid) for line in _read(Path(f"/proc/{i}/status")).splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def _others_seconds() -> float:
    """Return the processor time of the machine outside this process and its descendants."""
    user, nice, system, _idle, _iowait, *more = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(more)) / _TICKS - cpu_seconds(os.getpid())


_AT_START: Final = perf_counter(), _others_seconds()


def others_cores() -> float:
    """Return the cores that other work has taken on average since this process started."""
    return (_others_seconds() - _AT_START[1]) / (perf_counter() - _AT_START[0])


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table. The first column is text, the others are numbers."""
    print(f"| {' | '.join(header)} |")
    print(f"|---|{'---:|' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def print_setting(plan: Plan | None, **settings: object) -> None:
    """Print one line with the machine, the versions and the load."""
    git = ("git", "-C", str(Path(__file__).parent))
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../src"], check=False).returncode
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    parts = [
        f"commit {commit}{' with changes in src' if changed else ''}",
        cpu[1] if cpu else platform.machine(),
        f"{NUM_CORES} cores",
        f"of which other work took {others_cores():.2f}",
        f"torch {version('torch')}",
    ]
    if plan is not None:
        parts += [f"device {plan.device}", plan.dtype]
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in settings.items()]
    print(f"\n{', '.join(parts)}")
