"""Cost of responses on the wire and in clients, with an engine that costs nothing because its arrays are ready.

    python benchmarks/wire.py [--rounds 15] [--texts 50000] [--quick]

1. The response of POST /v1/embeddings for 128 rows of 384 to 3,072 dimensions, in microseconds: construction alone, then
   float, base64 and raw bytes, each as the server writes it, with all chunks made; `orjson.dumps` of the bare array, as the
   lower bound of printing; and each row's `.tolist()` in the same object, constructed only, and printed by orjson and json.
2. The experiment of "Serving embeddings at blazing speed": 100 requests at once of 32 texts x 1,024 dimensions, in seconds
   from the first request to the last array in the client. FastAPI with JSON, orjson and raw bytes, read by an asyncio client
   (httpx2) with json, orjson and `np.frombuffer`; Whimbrel with the same client, and with AsyncClient. Then 256 texts, raw.
3. AsyncClient against AsyncOpenAI: `--texts` short texts. AsyncOpenAI has its defaults (base64, 2 retries), and all its
   requests are gathered, with a fixed number of texts in each. Processor time is that of the client's process.

Contenders take turns, and the first round is not counted. Numbers are medians over the rounds, and ratios are within this run.
Clients and servers share the machine. FastAPI is skipped with a note if it is not installed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import httpx2
import numpy as np
import openai as sdk
import orjson
from common import chunks, note, options, print_setting, print_table, turns
from wire_servers import DIMENSION, vectors

from whimbrel import AsyncClient
from whimbrel.dialects import openai
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.types.arrays import Float32Array
from whimbrel.types.result import Outputs, Result, Timings

NUM_ROWS: Final = 128
DIMENSIONS: Final = (384, 768, 1536, 3072)
CONSTRUCTION: Final = "construction"
NUM_REQUESTS: Final = 100
_MIN_SECONDS: Final = 0.005
_BATCHES: Final = (2048, 512, 32)
_LONE: Final = 500
"""Texts in the case of one text per request, which is too slow for all of them."""


# Constructing and printing


def make_cases(vectors_ND: Float32Array) -> Mapping[str, Callable[[], object]]:
    """Return the measured functions by name."""
    result = Result(Outputs(vectors_ND), num_tokens=16 * len(vectors_ND), num_truncated=0, timings=Timings())
    model: Any = SimpleNamespace(plan=SimpleNamespace(served_name="model"))

    def answer(form: Any) -> int:
        body = openai.EmbeddingsRequest(input="", encoding_format=form)
        written = openai.render_response(body, result, model)
        return len(written) if isinstance(written, bytes) else sum(map(len, written.chunks))

    def listed() -> dict[str, Any]:
        rows = enumerate(result.dense)
        data = [{"object": "embedding", "index": i, "embedding": vector.tolist()} for i, vector in rows]
        usage = {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
        return {"object": "list", "data": data, "model": "model", "usage": usage}

    return {
        CONSTRUCTION: partial(answer, "float"),
        "float": partial(answer, "float"),
        "base64": partial(answer, "base64"),
        "bytes": partial(answer, "bytes"),
        "bare array, orjson": lambda: orjson.dumps(vectors_ND, option=orjson.OPT_SERIALIZE_NUMPY),
        "tolist, construction": listed,
        "tolist, orjson": lambda: orjson.dumps(listed()),
        "tolist, json": lambda: json.dumps(listed()).encode(),
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
    columns: list[dict[str, float]] = []
    for array in arrays:
        cases = make_cases(array / np.linalg.norm(array, axis=1, keepdims=True))
        seconds = turns(*(partial(seconds_of, *case) for case in cases.items()), rounds=rounds)
        columns.append(dict(zip(cases, map(median, seconds), strict=True)))
    print_table(
        [f"{NUM_ROWS} rows, us", *map(str, DIMENSIONS)],
        [[name, *(f"{times[name] * 1e6:,.0f}" for times in columns)] for name in columns[0]],
    )


# The article and the clients


def start(kind: str, stack: ExitStack) -> str:
    """Return the URL of a server that runs until `stack` is closed."""
    command = [sys.executable, str(Path(__file__).with_name("wire_servers.py")), kind]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    return f"http://127.0.0.1:{int(process.stdout.readline())}"


async def ask_all(url: str, path: str, rows: int, fields: Mapping[str, Any], read: Callable[[bytes], Any]) -> None:
    """Send all requests at once and read each response as an array."""
    body = orjson.dumps({"input": ["a"] * rows} | fields)
    limits = httpx2.Limits(max_connections=NUM_REQUESTS)
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one() -> None:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert read(response.content).shape == (rows, DIMENSION), path

        await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))


async def embed_all(url: str, rows: int) -> None:
    """Send all requests through AsyncClient."""
    async with AsyncClient(url) as client:
        await asyncio.gather(*(client.embed(["a"] * rows) for _ in range(NUM_REQUESTS)))


def from_raw(content: bytes) -> Float32Array:
    """Read bytes of float32 values."""
    return np.frombuffer(content, np.float32).reshape(-1, DIMENSION)


def from_openai(content: bytes) -> Float32Array:
    """Read JSON floats of POST /v1/embeddings."""
    return np.array([row["embedding"] for row in orjson.loads(content)["data"]], np.float32)


def measure_article(ours: str, theirs: str | None, rounds: int) -> None:
    """Measure part 2."""
    path, raw = "/v1/embeddings", {"encoding_format": "bytes_only"}
    cases: dict[str, Callable[[], Awaitable[None]]] = {}
    for count in (32, 256):
        if theirs and count == 32:
            cases["32 texts: FastAPI, JSON"] = partial(
                ask_all, theirs, "/json", 32, {}, lambda text: np.array(json.loads(text))
            )
            cases["32 texts: FastAPI, orjson"] = partial(
                ask_all, theirs, "/orjson", 32, {}, lambda text: np.array(orjson.loads(text))
            )
        if theirs:
            cases[f"{count} texts: FastAPI, raw"] = partial(ask_all, theirs, "/raw", count, {}, from_raw)
        if count == 32:
            floats = {"encoding_format": "float"}
            cases["32 texts: Whimbrel, JSON floats"] = partial(ask_all, ours, path, 32, floats, from_openai)
        cases[f"{count} texts: Whimbrel, raw"] = partial(ask_all, ours, path, count, raw, from_raw)
        cases[f"{count} texts: Whimbrel, AsyncClient"] = partial(embed_all, ours, count)
    found = turns(*(partial(run, case) for case in cases.values()), rounds=rounds)
    seconds = dict(zip(cases, map(median, found), strict=True))
    first = {name.partition(":")[0]: value for name, value in reversed(seconds.items())}
    print_table(
        [f"{NUM_REQUESTS} requests x {DIMENSION} dimensions", "seconds", "times as fast as the first"],
        [[name, f"{value:.3f}", f"{first[name.partition(':')[0]] / value:.2f}"] for name, value in seconds.items()],
    )


def run(case: Callable[[], Awaitable[Any]]) -> Any:
    """Run a case in an event loop of its own."""

    async def awaited() -> Any:
        return await case()

    return asyncio.run(awaited())


async def by_sdk(size: int, url: str, texts: list[str]) -> Any:
    async with sdk.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = (client.embeddings.create(model="ready", input=part) for part in chunks(texts, size))
        return [row.embedding for answer in await asyncio.gather(*asked) for row in answer.data]


async def by_client(url: str, texts: list[str]) -> Any:
    async with AsyncClient(url) as client:
        return await client.embed(texts)


def measure_clients(url: str, count: int, rounds: int) -> None:
    """Measure part 3."""
    texts = [f"text number {number}" for number in range(count)]
    contenders: dict[str, tuple[Callable[..., Awaitable[Any]], list[str]]] = {"AsyncClient": (by_client, texts)}
    contenders |= {f"AsyncOpenAI, {size:,} texts in a request": (partial(by_sdk, size), texts) for size in _BATCHES}
    contenders["AsyncOpenAI, a text in a request"] = (partial(by_sdk, 1), texts[:_LONE])
    processor: dict[str, list[float]] = {name: [] for name in contenders}

    def ask(name: str) -> float:
        embed, some = contenders[name]
        started, before = perf_counter(), process_time()
        found = run(partial(embed, url, some))
        seconds = perf_counter() - started
        processor[name].append((process_time() - before) / len(some))
        np.testing.assert_array_equal(np.asarray(found[0], np.float32), vectors(1)[0])
        return seconds / len(some)

    seconds = dict(zip(contenders, turns(*(partial(ask, name) for name in contenders), rounds=rounds), strict=True))
    base = median(seconds["AsyncClient"])
    rows = [
        [name, f"{1 / median(each):,.0f}", f"{1 / min(each):,.0f}", f"{base / median(each):.3f}",
         f"{1e6 * median(processor[name][1:]):.2f}"]
        for name, each in seconds.items()
    ]  # fmt: skip
    print_table(["", "texts/s", "fastest", "of AsyncClient", "client's processor time, ms per 1,000 texts"], rows)


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__, rounds=15, texts=50_000, quick=False).parse_args()
    rounds, texts = (1, 2000) if args.quick else (args.rounds, args.texts)
    measure_printing(rounds)
    with ExitStack() as stack:
        ours = start("whimbrel", stack)
        has_theirs = find_spec("fastapi") is not None and find_spec("uvicorn") is not None
        if not has_theirs:
            note("FastAPI is not installed, so it is not compared with")
        measure_article(ours, start("fastapi", stack) if has_theirs else None, max(1, rounds // 3))
        measure_clients(ours, texts, max(1, rounds // 3))
    print_setting(None, orjson=orjson.__version__, numpy=np.__version__, rounds=rounds, texts=texts)


if __name__ == "__main__":
    main()
