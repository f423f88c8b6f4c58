"""Cost of responses on the wire, with an engine that costs nothing because its arrays are ready.

    python benchmarks/wire.py [--rounds 15] [--seconds 2] [--quick]

1. The response of POST /v1/embeddings for 128 rows of 384 to 3,072 dimensions, in microseconds: construction alone, then
   float, base64 and raw bytes, each as the server writes it, with all chunks made; `orjson.dumps` of the bare array, as the
   lower bound of printing; and each row's `.tolist()` in the same object, constructed only, and printed by orjson and json.
2. Raw bytes of 256 x 1,024 float32 per response over 16 connections, in MiB/s: Whimbrel with one worker and with two; FastAPI
   on uvicorn with httptools and uvloop, and with the defaults of both; and bare TCP without requests, with one stream and with
   16 in a thread each. Another process reads, with threads that receive into a buffer.
3. The experiment of "Serving embeddings at blazing speed": 100 requests at once of 32 texts x 1,024 dimensions, in seconds
   from the first request to the last array in the client. FastAPI with JSON, orjson and raw bytes, read by an asyncio client
   (httpx2) with json, orjson and `np.frombuffer`; Whimbrel with the same client, and with AsyncClient. Then 256 texts, raw.

Contenders take turns, and the first round is not counted. Numbers are medians over the rounds, and ratios are within this run.
FastAPI and uvicorn are skipped with a note if they are not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import httpx2
import numpy as np
import orjson
from common import note, print_setting, print_table
from driver import request_of
from wire_servers import DIMENSION, ROWS

from whimbrel import AsyncClient
from whimbrel.dialects import openai
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.types.arrays import Float32Array
from whimbrel.types.result import Outputs, Result, Timings

NUM_ROWS: Final = 128
DIMENSIONS: Final = (384, 768, 1536, 3072)
CONSTRUCTION: Final = "construction"
CONNECTIONS: Final = 16
ONE_STREAM: Final = "one TCP stream"
OTHERS: Final = (ONE_STREAM, "tcp", "fastapi", "fastapi-plain")
NUM_REQUESTS: Final = 100
_MIN_SECONDS: Final = 0.005


# Constructing and printing


def make_cases(vectors_ND: Float32Array) -> Mapping[str, Callable[[], object]]:
    """Return the measured functions by name."""
    result = Result(Outputs(vectors_ND), num_tokens=16 * len(vectors_ND), num_truncated=0, timings=Timings())
    model: Any = SimpleNamespace(plan=SimpleNamespace(served_name="model"))

    def answer(form: Any) -> int:
        body = openai.EmbeddingsRequest(input="", encoding_format=form)
        written = openai.render_response(body, result, model)
        return len(written) if isinstance(written, bytes) else sum(map(len, written.chunks))

    return {
        CONSTRUCTION: partial(answer, "float"),
        "float": partial(answer, "float"),
        "base64": partial(answer, "base64"),
        "bytes": partial(answer, "bytes"),
        "bare array, orjson": lambda: orjson.dumps(vectors_ND, option=orjson.OPT_SERIALIZE_NUMPY),
        "tolist, construction": lambda: tolist_response(result),
        "tolist, orjson": lambda: orjson.dumps(tolist_response(result)),
        "tolist, json": lambda: json.dumps(tolist_response(result)).encode(),
    }


def tolist_response(result: Result) -> dict[str, Any]:
    """Return the response object with a Python float per number."""
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector.tolist()} for i, vector in enumerate(result.dense)],
        "model": "model",
        "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
    }


def seconds_of(name: str, function: Callable[[], object]) -> float:
    """Return the seconds per call, over at least _MIN_SECONDS of calls."""
    num_calls = 0
    with patch.object(openai, "json_answer", lambda *_, **__: b"") if name == CONSTRUCTION else nullcontext():
        started = perf_counter()
        while (seconds := perf_counter() - started) < _MIN_SECONDS:
            function()
            num_calls += 1
    return seconds / num_calls


def measure_printing(rounds: int) -> None:
    """Measure part 1."""
    tune_glibc_malloc()  # as a worker does
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((NUM_ROWS, dimension), np.float32) for dimension in DIMENSIONS]
    cases = [make_cases(array / np.linalg.norm(array, axis=1, keepdims=True)) for array in arrays]
    found = [
        [{name: seconds_of(name, function) for name, function in functions.items()} for functions in cases]
        for _ in range(rounds + 1)
    ]
    each = [{name: median(one[i][name] for one in found[1:]) for name in functions} for i, functions in enumerate(cases)]
    print_table(
        [f"{NUM_ROWS} rows, us", *map(str, DIMENSIONS)],
        [[name, *(f"{times[name] * 1e6:,.0f}" for times in each)] for name in each[0]],
    )
    print()
    ratios = {
        "construction: tolist / ours": ("tolist, construction", CONSTRUCTION),
        "JSON floats: bare orjson / ours": ("bare array, orjson", "float"),
        "float / base64": ("float", "base64"),
        "float / bytes": ("float", "bytes"),
        "tolist with json / float": ("tolist, json", "float"),
    }
    print_table(
        ["ratio", *map(str, DIMENSIONS)],
        [[name, *(f"{times[top] / times[bottom]:.3g}" for times in each)] for name, (top, bottom) in ratios.items()],
    )


# Servers


def start(kind: str, stack: ExitStack) -> int:
    """Return the port of a server that runs until `stack` is closed."""
    command = [sys.executable, str(Path(__file__).with_name("wire_servers.py")), kind]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    return int(process.stdout.readline())


def stream_rate(port: int, request: bytes, seconds: float, connections: int = CONNECTIONS) -> float:
    """Return the MiB/s of responses over all connections, or of any bytes if there is no request."""
    end = perf_counter() + seconds

    def read(_: int) -> int:
        buffer = bytearray(2**20)
        received = 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while perf_counter() < end:
                received += _answer(connection, request, buffer) if request else connection.recv_into(buffer)
        return received

    with ThreadPoolExecutor(connections) as pool:
        started = perf_counter()
        return sum(pool.map(read, range(connections))) / 2**20 / (perf_counter() - started)


def _answer(connection: socket.socket, request: bytes, buffer: bytearray) -> int:
    """Receive one response and return the size of its body."""
    connection.sendall(request)
    count = connection.recv_into(buffer)
    while (end := buffer.find(b"\r\n\r\n", 0, count)) < 0:
        count += connection.recv_into(memoryview(buffer)[count:])
    head = bytes(buffer[:end]).lower()
    assert head.startswith(b"http/1.1 200"), head
    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    left = size - (count - end - 4)
    while left > 0:
        left -= connection.recv_into(buffer, min(left, len(buffer)))
    return size


def measure_stream(ports: Mapping[str, int], rounds: int, seconds: float) -> None:
    """Measure part 2."""
    body = {"input": ["a"] * ROWS, "encoding_format": "bytes_only"}
    request = request_of(orjson.dumps(body))
    contenders = {name: partial(stream_rate, port, b"" if name == "tcp" else request, seconds) for name, port in ports.items()}
    contenders[ONE_STREAM] = partial(stream_rate, ports["tcp"], b"", seconds, 1)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            rate = contender()
            if number:
                found[name].append(rate)
    rates = {name: median(each) for name, each in found.items()}
    print()
    print_table(
        [
            f"{ROWS} x {DIMENSION} float32, {CONNECTIONS} connections",
            "MiB/s",
            *(f"of {name}" for name in OTHERS if name in rates),
        ],
        [
            [name, f"{rate:,.0f}", *(f"{rate / rates[other]:.2f}" for other in OTHERS if other in rates)]
            for name, rate in rates.items()
        ],
    )


# The article


async def ask_all(port: int, path: str, rows: int, fields: Mapping[str, Any], read: Callable[[bytes], Any]) -> None:
    """Send all requests at once and read each response as an array."""
    body = orjson.dumps({"input": ["a"] * rows} | fields)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=60, limits=httpx2.Limits(max_connections=NUM_REQUESTS)
    ) as client:

        async def one() -> None:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert read(response.content).shape == (rows, DIMENSION), path

        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))


async def embed_all(port: int, rows: int) -> None:
    """Send all requests through AsyncClient."""
    async with AsyncClient(f"http://127.0.0.1:{port}") as client:
        await asyncio.gather(*(client.embed(["a"] * rows) for _ in range(NUM_REQUESTS)))


def from_raw(content: bytes) -> Float32Array:
    """Read bytes of float32 values."""
    return np.frombuffer(content, np.float32).reshape(-1, DIMENSION)


def from_openai(content: bytes) -> Float32Array:
    """Read JSON floats of POST /v1/embeddings."""
    return np.array([row["embedding"] for row in orjson.loads(content)["data"]], np.float32)


def measure_article(ports: Mapping[str, int], rounds: int) -> None:
    """Measure part 3."""
    cases: dict[str, Callable[[], Awaitable[None]]] = {}
    ours, theirs = ports["whimbrel"], ports.get("fastapi", 0)
    path = "/v1/embeddings"
    if theirs:
        cases["32 texts: FastAPI, JSON"] = lambda: ask_all(theirs, "/json", 32, {}, lambda text: np.array(json.loads(text)))
        cases["32 texts: FastAPI, orjson"] = lambda: ask_all(
            theirs, "/orjson", 32, {}, lambda text: np.array(orjson.loads(text))
        )
        cases["32 texts: FastAPI, raw"] = lambda: ask_all(theirs, "/raw", 32, {}, from_raw)
    cases["32 texts: Whimbrel, JSON floats"] = lambda: ask_all(ours, path, 32, {"encoding_format": "float"}, from_openai)
    cases["32 texts: Whimbrel, raw"] = lambda: ask_all(ours, path, 32, {"encoding_format": "bytes_only"}, from_raw)
    cases["32 texts: Whimbrel, AsyncClient"] = lambda: embed_all(ours, 32)
    if theirs:
        cases["256 texts: FastAPI, raw"] = lambda: ask_all(theirs, "/raw", 256, {}, from_raw)
    cases["256 texts: Whimbrel, raw"] = lambda: ask_all(ours, path, 256, {"encoding_format": "bytes_only"}, from_raw)
    cases["256 texts: Whimbrel, AsyncClient"] = lambda: embed_all(ours, 256)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            started = perf_counter()
            asyncio.run(_awaited(case))
            if number:
                found[name].append(perf_counter() - started)
    seconds = {name: median(each) for name, each in found.items()}
    first = {name.partition(":")[0]: value for name, value in reversed(seconds.items())}
    print()
    print_table(
        [f"{NUM_REQUESTS} requests x {DIMENSION} dimensions", "seconds", "times as fast as the first"],
        [[name, f"{value:.3f}", f"{first[name.partition(':')[0]] / value:.2f}"] for name, value in seconds.items()],
    )


async def _awaited(case: Callable[[], Awaitable[None]]) -> None:
    await case()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round of part 2")
    parser.add_argument("--quick", action="store_true", help="only whether it runs")
    args = parser.parse_args()
    rounds, seconds = (1, 0.2) if args.quick else (args.rounds, args.seconds)
    measure_printing(rounds)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        note(f"not installed, so not compared with: {', '.join(missing)}")
    with ExitStack() as stack:
        theirs = [] if missing else ["fastapi", "fastapi-plain"]
        ports = {kind: start(kind, stack) for kind in ("whimbrel", "whimbrel-2", "tcp", *theirs)}
        measure_stream(ports, rounds, seconds)
        measure_article(ports, max(1, rounds // 3))
    print_setting(None, orjson=orjson.__version__, numpy=np.__version__, rounds=rounds)


if __name__ == "__main__":
    main()
