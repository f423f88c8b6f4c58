"""Bare OpenVINO: a stream for each thread that runs batches."""

import threading
from collections.abc import Callable
from typing import Any

import batches
import numpy as np
import openvino as ov


def load(folder: str, task: str, *, threads: int, file: str, precision: str) -> Callable[[Any], Any]:
    settings = {"NUM_STREAMS": threads, "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    compiled = ov.Core().compile_model(f"{folder}/{file}", "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]
    local = threading.local()

    def run(inputs: batches.Inputs) -> np.ndarray:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        local.request.infer({name: inputs[name] for name in names}, share_inputs=True)
        return local.request.get_output_tensor(0).data

    return batches.around(run, folder, task, threads)
