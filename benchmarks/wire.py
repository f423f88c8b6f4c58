"""Cost of responses on the wire and in clients, with an engine that costs nothing because its arrays are ready.

    python benchmarks/wire.py [--rounds 15] [--texts 50000] [--quick]

1. The response of POST /v1/embeddings for 128 rows of 384 and of 3,072 dimensions, in microseconds: float, base64 and raw
   bytes, each as the server writes it, with all chunks made; and each row's `.tolist()` in the same object, by orjson and json.
2. The experiment of "Serving embeddings at blazing speed": 100 requests at once of 32 texts x 1,024 dimensions, in seconds
   from the first request to the last array in the client. FastAPI with JSON, orjson and raw bytes, read by an asyncio client
   (httpx2) with json, orjson and `np.frombuffer`; Whimbrel with the same client, and with AsyncClient. Then 256 texts, raw.
3. AsyncClient against AsyncOpenAI: `--texts` short texts. AsyncOpenAI has its defaults (base64, 2 retries), and all its
   requests are gathered, with a fixed number of texts in each.

Contenders take turns, and the first round is not counted. Numbers are medians over the rounds, and ratios are within this run.
Clients and servers share the machine. FastAPI is skipped with a note if it is not installed.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final

import httpx2
import numpy as np
import openai as sdk
import orjson
from common import chunks, note, options, print_setting, print_table, turns
from wire_servers import DIMENSION, running, serve_fastapi, serve_whimbrel, vectors

from whimbrel import AsyncClient
from whimbrel.dialects import openai
from whimbrel.engine.malloc import tune_glibc_malloc
from whimbrel.types.arrays import Float32Array
from whimbrel.types.result import Outputs, Result, Timings

NUM_ROWS: Final = 128
DIMENSIONS: Final = (384, 3072)
NUM_REQUESTS: Final = 100
_MIN_SECONDS: Final = 0.005
_BATCHES: Final = (2048, 32)
_LONE: Final = 500
"""Texts in the case of one text per request, which is too slow for all of them."""

Case = Callable[..., Coroutine[Any, Any, Any]]


# Printing


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

    written = {name: partial(answer, name) for name in ("float", "base64", "bytes")}
    return {**written, "tolist, orjson": lambda: orjson.dumps(listed()), "tolist, json": lambda: json.dumps(listed()).encode()}


def seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds per call, over at least _MIN_SECONDS of calls."""
    num_calls, started = 0, perf_counter()
    while (seconds := perf_counter() - started) < _MIN_SECONDS:
        function()
        num_calls += 1
    return seconds / num_calls


def measure_printing(rounds: int) -> None:
    tune_glibc_malloc()  # as a worker does
    rng = np.random.default_rng(0)
    columns: list[dict[str, float]] = []
    for dimension in DIMENSIONS:
        array = rng.standard_normal((NUM_ROWS, dimension), np.float32)
        cases = make_cases(array / np.linalg.norm(array, axis=1, keepdims=True))
        seconds = turns(*(partial(seconds_of, case) for case in cases.values()), rounds=rounds)
        columns.append(dict(zip(cases, map(median, seconds), strict=True)))
    rows = [[name, *(f"{times[name] * 1e6:,.0f}" for times in columns)] for name in columns[0]]
    print_table([f"{NUM_ROWS} rows, us", *map(str, DIMENSIONS)], rows)


# The article and the clients


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


def measure_article(ours: str, theirs: str | None, rounds: int) -> None:
    cases: dict[str, Case] = {}
    for count in (32, 256):
        if theirs and count == 32:
            for name, loads in (("JSON", json.loads), ("orjson", orjson.loads)):
                read = lambda text, loads=loads: np.array(loads(text))  # noqa: E731
                cases[f"32 texts: FastAPI, {name}"] = partial(ask_all, theirs, f"/{name.lower()}", 32, {}, read)
        if theirs:
            cases[f"{count} texts: FastAPI, raw"] = partial(ask_all, theirs, "/raw", count, {}, from_raw)
        raw = {"encoding_format": "bytes_only"}
        cases[f"{count} texts: Whimbrel, raw"] = partial(ask_all, ours, "/v1/embeddings", count, raw, from_raw)
        cases[f"{count} texts: Whimbrel, AsyncClient"] = partial(embed_all, ours, count)
    found = turns(*(lambda case=case: asyncio.run(case()) for case in cases.values()), rounds=rounds)
    seconds = dict(zip(cases, map(median, found), strict=True))
    first = {name.partition(":")[0]: value for name, value in reversed(seconds.items())}
    rows = [[name, f"{value:.3f}", f"{first[name.partition(':')[0]] / value:.2f}"] for name, value in seconds.items()]
    print_table([f"{NUM_REQUESTS} requests x {DIMENSION} dimensions", "seconds", "times as fast as the first"], rows)


async def by_sdk(size: int, url: str, texts: list[str]) -> Any:
    async with sdk.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = (client.embeddings.create(model="ready", input=part) for part in chunks(texts, size))
        return [row.embedding for answer in await asyncio.gather(*asked) for row in answer.data]


async def by_client(url: str, texts: list[str]) -> Any:
    async with AsyncClient(url) as client:
        return await client.embed(texts)


def measure_clients(url: str, count: int, rounds: int) -> None:
    texts = [f"text number {number}" for number in range(count)]
    contenders: dict[str, tuple[Case, list[str]]] = {"AsyncClient": (by_client, texts)}
    contenders |= {f"AsyncOpenAI, {size:,} texts in a request": (partial(by_sdk, size), texts) for size in _BATCHES}
    contenders["AsyncOpenAI, a text in a request"] = (partial(by_sdk, 1), texts[:_LONE])

    def ask(embed: Case, some: list[str]) -> float:
        started = perf_counter()
        found = asyncio.run(embed(url, some))
        seconds = perf_counter() - started
        np.testing.assert_array_equal(np.asarray(found[0], np.float32), vectors(1)[0])
        return seconds / len(some)

    found = turns(*(partial(ask, *each) for each in contenders.values()), rounds=rounds)
    base = median(found[0])
    rows = [
        [name, f"{1 / median(each):,.0f}", f"{1 / min(each):,.0f}", f"{base / median(each):.3f}"]
        for name, each in zip(contenders, found, strict=True)
    ]
    print_table(["", "texts/s", "fastest", "of AsyncClient"], rows)


def main() -> None:
    args = options(__doc__, rounds=15, texts=50_000, quick=False).parse_args()
    rounds, texts = (1, 2000) if args.quick else (args.rounds, args.texts)
    measure_printing(rounds)
    has_theirs = find_spec("fastapi") is not None and find_spec("uvicorn") is not None
    if not has_theirs:
        note("FastAPI is not installed, so it is not compared with")
    with running(serve_whimbrel) as ours, running(serve_fastapi) if has_theirs else nullcontext() as theirs:
        measure_article(ours, theirs, max(1, rounds // 3))
        measure_clients(ours, texts, max(1, rounds // 3))
    print_setting(None, orjson=orjson.__version__, numpy=np.__version__, rounds=rounds, texts=texts)


if __name__ == "__main__":
    main()
