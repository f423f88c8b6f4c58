"""The seeds' workloads on our server, each in its own protocol, and what its client could read from a canned answer.

Our server runs with its default batch of tokens, and draws its weights (`drawn.py`). The client of token vectors is the seed's:
four threads of one process, a new connection for each request, and the JSON parsed. Beside it the same vectors are asked for as
bytes by four processes.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from setting import Row, Setting, wrapped_by

from bench_servers import always, answer, fake_server
from whimbrel_bench import random_models
from whimbrel_bench.backends import Sample
from whimbrel_bench.options import Load
from whimbrel_bench.presets import read_preset
from whimbrel_bench.processes import Worker, cpu_seconds
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, serving
from whimbrel_bench.target import Target

_SERVERS: Final = {"rerank": ("", "--max-batch-tokens 4096"), "gritlm": ("",), "token-vectors": ("",)}
"""Arguments of the servers of a workload, beside the preset's."""


def run(name: str, setting: Setting) -> Iterator[Row]:
    if not setting.small:
        print(f"{name} on {setting.device}")  # raises NeedsGpu
    preset = read_preset(name, "small" if setting.small else "full")
    samples, times = (preset.samples()[:8], 1) if setting.small else (preset.samples(), 2)
    load = replace(preset.load, duration=preset.load.duration and (0.5 if setting.small else 8.0))
    load = replace(load, num_warmups=0) if setting.small else load
    with tempfile.TemporaryDirectory() as folder, wrapped_by("drawn:as_it_is"):
        path = Path(folder) / name
        write_hollow(preset.write, path)
        for arguments in _SERVERS[name][:times]:
            with serving(str(path), *preset.serve, *arguments.split()) as server:
                target = Target(server.url, preset.target)
                target.connect()
                target.warm_up(samples, load)
                runs = token_vectors if name == "token-vectors" else requests
                yield from ({"server": arguments or "defaults"} | row for row in runs(server, target, samples, load, times))
                print(server.log)


def write_hollow(write: Callable[[Path], None], folder: Path) -> None:
    """Write a random model by `write`, with holes in place of weights."""

    def write_header(path: Path, shapes: random_models.Shapes) -> None:
        with path.open("wb") as stream:
            num_bytes = random_models.write_header(stream, shapes)
            stream.truncate(stream.tell() + num_bytes)

    with patch.object(random_models, "write_safetensors", write_header):
        write(folder)


def requests(server: Serving, target: Target, samples: list[Sample], load: Load, times: int) -> Iterator[Row]:
    """Run the preset's own load, and once on a canned answer."""
    for _ in range(times):
        with measured(server) as cores:
            result = target.run(samples, load)
        yield {"client": "the seed's"} | of_result(result) | cores
    with canned(target, samples[0]) as fake:
        yield {"client": "the seed's, canned answer"} | of_result(fake.run(samples, load)) | {"server cores": ""}


def token_vectors(server: Serving, target: Target, samples: list[Sample], load: Load, times: int) -> Iterator[Row]:
    """Run the seed's client, on a canned answer too, and processes that read bytes."""
    seconds = load.duration or 0.0
    with measured(server) as cores:
        row = seed_client(target, samples[0], seconds)
    yield {"client": "the seed's"} | row | cores
    with canned(target, samples[0]) as fake:
        row = seed_client(fake, samples[0], seconds / 2)
    yield {"client": "the seed's, canned answer"} | row | {"server cores": ""}
    raw = Target(server.url, replace(target.options, extra_body={"task": "token_embed", "encoding_format": "bytes"}))
    raw.connect()
    raw.warm_up(samples, load)
    with measured(server) as cores:
        result = raw.run(samples * 2 * times, Load(concurrency=8 * times, duration=seconds, processes=2 * times))
    yield {"client": f"{2 * times} processes, bytes"} | of_result(result) | cores


def seed_client(target: Target, sample: Sample, seconds: float) -> Row:
    """Run the seed's client for some seconds in a process of its own."""
    body = target.payload(sample).partition(b"\r\n\r\n")[2]
    client = Worker(make_seed_client, target.endpoint.host, target.endpoint.port, target.path, body)
    row: Row = client.ask(seconds)
    client.close()
    return row


def make_seed_client(host: str, port: int, path: str, body: bytes) -> Callable[[float], Row]:
    """Return a function that sends a body from four threads for some seconds, parses each answer, and returns the row."""

    def work(end: float) -> list[tuple[float, int]]:
        done: list[tuple[float, int]] = []
        while (begin := perf_counter()) < end:
            connection = HTTPConnection(host, port, timeout=60)
            connection.request("POST", path, body, {"content-type": "application/json"})
            parsed: Any = json.loads(connection.getresponse().read())
            connection.close()
            done.append((perf_counter() - begin, int(parsed["usage"]["prompt_tokens"])))
        return done

    def send(seconds: float) -> Row:
        begin = perf_counter()
        with ThreadPoolExecutor(4) as threads:
            found = [each for done in threads.map(work, [begin + seconds] * 4) for each in done]
        took, latencies = perf_counter() - begin, [latency for latency, _ in found]
        return _row(len(found) / took, sum(tokens for _, tokens in found) / took, *np.percentile(latencies, (50, 99)) * 1e3)

    return send


def of_result(result: Result) -> Row:
    """Return the row of a load, which is wrong if a request failed."""
    ms = result.milliseconds()
    row = _row(result.request_throughput, result.token_throughput, ms["median_e2el_ms"], ms["p99_e2el_ms"])
    row["limit"] = "client" if result.client.was_limit else ""
    return row | ({"wrong": f"{result.failed} failed: {next(filter(None, result.errors))}"} if result.failed else {})


def _row(rate: float, tokens: float, middle: float, late: float) -> Row:
    return {"requests/s": rate, "tokens/s": tokens, "median ms": middle, "p99 ms": late, "limit": ""}


@contextmanager
def canned(target: Target, sample: Sample) -> Iterator[Target]:
    """Serve the answer to a sample to every request, and yield a target for it."""
    with fake_server(always(answer(200, target.ask(sample)))) as server:
        found = Target(server.url, target.options)
        found.connect()
        yield found


@contextmanager
def measured(server: Serving) -> Iterator[Row]:
    """Yield a row that gets the cores which the server has taken on average."""
    row: Row = {}
    begin, spent = perf_counter(), cpu_seconds(server.pid)
    yield row
    row["server cores"] = (cpu_seconds(server.pid) - spent) / (perf_counter() - begin)
