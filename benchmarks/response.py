"""The cost of constructing the answer of POST /v1/embeddings: 128 rows of 384 to 3,072 dimensions, microseconds.

    python benchmarks/response.py [--rounds 15]

- construction: `write_result` with `to_json` replaced by a function that returns b"": all that is done before the printing.
- float response, base64 response: `write_result` as it is.
- bare array: `orjson.dumps` of the array of vectors and nothing else, the least that printing the floats costs.
- tolist: each row's `.tolist()` in the same object, printed by orjson, and by json.

In a round each runs for at least 5 ms; rounds of all are interleaved, and the first is not counted. Numbers are medians over
the rounds; in brackets, relative to the float response of the same width in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import orjson
from common import print_setting, print_table

from whimbrel.dialects import openai
from whimbrel.types import Float32Array, Outputs, Result, Timings

NUM_ROWS: Final = 128
DIMENSIONS: Final = (384, 768, 1536, 3072)
CONSTRUCTION: Final = "construction"
REFERENCE: Final = "float response"
_MIN_SECONDS: Final = 0.005


def make_cases(vectors_ND: Float32Array) -> Mapping[str, Callable[[], object]]:
    """What is measured, by name."""
    result = Result(Outputs(vectors_ND), num_tokens=16 * len(vectors_ND), num_truncated=0, timings=Timings())
    as_float, as_base64 = (openai.EmbeddingsRequest(input="", encoding_format=kind) for kind in ("float", "base64"))
    model: Any = SimpleNamespace(plan=SimpleNamespace(served_name="model"))
    return {
        CONSTRUCTION: lambda: openai.write_result(as_float, result, model),
        REFERENCE: lambda: openai.write_result(as_float, result, model),
        "base64 response": lambda: openai.write_result(as_base64, result, model),
        "bare array, orjson": lambda: orjson.dumps(vectors_ND, option=orjson.OPT_SERIALIZE_NUMPY),
        "tolist, orjson": lambda: orjson.dumps(tolist_response(result)),
        "tolist, json": lambda: json.dumps(tolist_response(result)).encode(),
    }


def tolist_response(result: Result) -> dict[str, Any]:
    """The same object with a Python float per number."""
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector.tolist()} for i, vector in enumerate(result.dense)],
        "model": "model",
        "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
    }


def _print_nothing(_: object) -> bytes:
    return b""


def seconds_of(name: str, function: Callable[[], object]) -> float:
    """Seconds per call, over as many calls as last for _MIN_SECONDS."""
    num_calls = 0
    with patch.object(openai, "to_json", _print_nothing) if name == CONSTRUCTION else nullcontext():
        started = perf_counter()
        while (seconds := perf_counter() - started) < _MIN_SECONDS:
            function()
            num_calls += 1
    return seconds / num_calls


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((NUM_ROWS, dimension), np.float32) for dimension in DIMENSIONS]
    cases = [make_cases(array / np.linalg.norm(array, axis=1, keepdims=True)) for array in arrays]
    rounds = [
        [{name: seconds_of(name, function) for name, function in functions.items()} for functions in cases]
        for _ in range(args.rounds + 1)
    ]
    medians = [{name: median(each[i][name] for each in rounds[1:]) for name in functions} for i, functions in enumerate(cases)]
    print_table(
        ["", *map(str, DIMENSIONS)],
        [[name, *(f"{each[name] * 1e6:,.0f} ({each[name] / each[REFERENCE]:.3g})" for each in medians)] for name in medians[0]],
    )
    print_setting(None, orjson=orjson.__version__, numpy=np.__version__, rounds=args.rounds)


if __name__ == "__main__":
    main()
