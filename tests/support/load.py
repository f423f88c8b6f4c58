"""Clients that keep a server busy and remember every answer."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2
import numpy as np
import orjson

from whimbrel.types.arrays import Float32Array

PATH = "/v1/embeddings"


def vectors_of(answer: httpx2.Response) -> Float32Array:
    """The vectors of a 200 answer that was asked for as base64, in order."""
    rows = answer.json()["data"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return np.array([np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in rows])


def ask(client: httpx2.Client, texts: Sequence[str], **fields: Any) -> httpx2.Response:
    """One request for base64 vectors."""
    body = orjson.dumps({"input": list(texts), "encoding_format": "base64"} | fields)
    return client.post(PATH, content=body, headers={"content-type": "application/json"})


def queued_tokens(client: httpx2.Client) -> float:
    """Tokens that wait, as /metrics says."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("whimbrel_queue_tokens"))


@dataclass
class Load:
    """Threads that send requests of random texts, one after another each, and compare every vector with `expected`."""

    url: str
    texts: Sequence[str]
    expected: Float32Array
    num_clients: int = 4
    sizes: tuple[int, int] = (1, 40)
    statuses: list[int] = field(default_factory=list[int])
    wrong: list[str] = field(default_factory=list[str])
    seconds: list[float] = field(default_factory=list[float])
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx2.Client(base_url=self.url, timeout=100) as client:
            while not self._stop.is_set():
                chosen = rng.choices(range(len(self.texts)), k=rng.randint(*self.sizes))
                started = time.perf_counter()
                try:
                    answer = ask(client, [self.texts[i] for i in chosen])
                except httpx2.HTTPError as error:
                    self.wrong.append(repr(error))
                    continue
                self.seconds.append(time.perf_counter() - started)
                self.statuses.append(answer.status_code)
                if answer.status_code != 200:
                    self.wrong.append(answer.text[:300])
                elif not np.array_equal(vectors_of(answer), self.expected[chosen]):
                    self.wrong.append(f"other vectors for {chosen}")


def holds(seconds: str) -> str:
    """A text that holds a lane up for so long; two of them are more than lanes put into a batch while others are idle."""
    return "word " * 190 + f"@@sleep:{seconds}"
