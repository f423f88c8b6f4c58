"""One engine in a process of its own: `worker.py ADAPTER FOLDER TASK OPTIONS WORKLOADS`, with the adapter's own packages.

OPTIONS is JSON for the adapter, WORKLOADS a JSON file: a list of workloads, each a list of calls. A call is a list of texts, or
`{"query": ..., "documents": [...]}` for the task "rerank". The worker prints `ready`, then answers each line of stdin:

- `check I FILE`: run workload I and save all its rows as float32 (.npz: `rows`, and `sizes`, the rows of each text).
- `time I`: run workload I and print the seconds of its calls.

Libraries that print to stdout reach stderr, so that the pipe carries the protocol alone.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

WORDS = 30_522
"""Columns of sparse vectors: the vocabulary of the packaged tokenizer."""
_END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main() -> None:
    """Serve one engine until stdin ends."""
    if sys.platform == "linux":  # end with the comparison, also while stopped
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    adapter, folder, task, options, workloads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    calls: list[list[Any]] = json.loads(Path(workloads).read_text())
    run: Callable[[Any], Any] = importlib.import_module(adapter).load(folder, task, **json.loads(options))
    print("ready", file=answers)
    for line in sys.stdin:
        command, number, *file = line.split()
        if command == "check":
            save(file[0], [run(call) for call in calls[int(number)]])
            print("saved", file=answers)
        else:
            print(time_calls(run, calls[int(number)]), file=answers)


def time_calls(run: Callable[[Any], Any], calls: list[Any]) -> float:
    """Return the seconds of all calls, one after another."""
    started = perf_counter()
    for call in calls:
        run(call)
    return perf_counter() - started


def save(file: str, results: list[Any]) -> None:
    """Save the rows of all results: one row per text, one number per document, or one row per token."""
    items = [np.atleast_2d(_whole(item)) for result in results for item in result]
    np.savez(file, rows=np.concatenate(items), sizes=np.array([len(item) for item in items]))


def _whole(item: Any) -> np.ndarray:
    """Return a row as an array: sparse ones are PyTorch's, or (ids, weights)."""
    if getattr(item, "is_sparse", False):
        item = item.float().to_dense()
    if isinstance(item, tuple):
        row = np.zeros(WORDS, np.float32)
        row[item[0]] = item[1]
        return row
    return np.asarray(item, np.float32)


if __name__ == "__main__":
    main()
