"""Bare ONNX Runtime: a session of one thread, and as many threads that run batches."""

from collections.abc import Callable
from typing import Any

import batches
import numpy as np
import onnxruntime


def load(folder: str, task: str, *, threads: int, file: str) -> Callable[[Any], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(f"{folder}/{file}", options, ["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(inputs: batches.Inputs) -> np.ndarray:
        return session.run(None, {name: inputs[name] for name in names})[0]

    return batches.around(run, folder, task, threads)
