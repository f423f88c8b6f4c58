"""Servers against servers: each on its own port, one under load at a time, rounds in rotating order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import orjson
from common import MIXED, SHORT, chunks, cpu_seconds, make_texts, min_cosine, note
from driver import get, vectors_of
from environments import OURS, Builder, Peer, PeerFailure, reason_in

from load import Served, load

_START_SECONDS: Final = 600
SERVED: Final = {"dense": "minilm", "rerank": "cross-encoder"}
"""Checkpoint that servers get for each task."""


class Server:
    """Running server of one peer."""

    def __init__(self, peer: Peer, builder: Builder, folder: Path) -> None:
        self.peer = peer
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        python = builder.python(peer.environment)
        places = {"python": python, "bin": python.parent, "model": folder, "port": self.port}
        self._log = builder.build / "logs" / f"server-{folder.name}-{peer.name.replace(' ', '-')}.log"
        with self._log.open("w") as log:
            command = [part.format(**places) for part in peer.server["command"]]
            variables = builder.variables(peer.environment)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
        try:
            self._wait()
        except BaseException:  # also Ctrl-C while it loads
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        end = perf_counter() + _START_SECONDS
        while perf_counter() < end:
            if self._process.poll() is not None:
                raise PeerFailure(f"start: {reason_in(self._log)}")
            with suppress(OSError, HTTPException):
                if get(self.port, self.peer.server["ready"]).status == 200:
                    return
            time.sleep(0.5)
        raise PeerFailure(f"start: not ready in {_START_SECONDS} s")

    def stop(self) -> None:
        """Stop the server and all of its processes."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def make_loads(task: str, *, quick: bool) -> dict[str, tuple[int, list[list[dict[str, Any]]]]]:
    """Return the bodies of each connection for each workload of a task, with the number of texts."""
    if task == "rerank":
        query, documents = make_texts(1, words=(8, 12), seed=4)[0], make_texts(160, words=MIXED, seed=5)
        documents = documents[:80] if quick else documents
        bodies = [
            {"query": query, "documents": each, "return_documents": False} for each in chunks(documents, len(documents) // 8)
        ]
        return {"rerank, 8 connections, one request each": (len(documents), [[body] for body in bodies])}
    mixed = make_texts(256 if quick else 512, words=MIXED)
    short = make_texts(64 if quick else 320, words=SHORT, seed=2)
    return {
        "8 connections, 32 mixed texts, base64": (len(mixed), _connections(chunks(mixed, 32), 8, encoding_format="base64")),
        "8 connections, 32 mixed texts, JSON": (len(mixed), _connections(chunks(mixed, 32), 8, encoding_format="float")),
        "16 connections, one short text": (len(short), _connections(chunks(short, 1), 16, encoding_format="base64")),
    }


def _connections(requests: list[list[str]], count: int, **fields: str) -> list[list[dict[str, Any]]]:
    return chunks([{"input": texts} | fields for texts in requests], len(requests) // count)


def measure_servers(
    task: str,
    folder: Path,
    peers: Sequence[Peer],
    builder: Builder,
    rounds: int,
    *,
    quick: bool,
    found: list[Served],
    failures: dict[str, str],
) -> None:
    """Add the rounds of all servers with one task to `found`, and the reasons of those that fail to `failures`."""
    servers: dict[str, Server] = {}
    try:
        for peer in peers:
            if task in peer.server.get("paths", ()):
                note(f"starting the server {peer.name}")
                try:
                    servers[peer.name] = Server(peer, builder, folder)
                except PeerFailure as failure:
                    failures[f"{peer.name}, server, {task}"] = str(failure)
        for name, (texts, connections) in make_loads(task, quick=quick).items():
            note(f"{task}, {name}")
            encoded = [[orjson.dumps(body | {"model": "model"}) for body in each] for each in connections]
            rows = [row for server in servers.values() if (row := _warm(task, name, texts, encoded, server, failures))]
            found += rows
            _compare(task, rows)
            _time(task, rows, servers, encoded, rounds)
    finally:
        for server in servers.values():
            server.stop()


def _compare(task: str, rows: Sequence[Served]) -> None:
    """Take the answers of the first round, and compare them with those of our server."""
    answers = {row.peer.name: _values(task, row.rounds.pop().bodies) for row in rows}
    for row in rows if OURS in answers else ():
        row.cosine = _cosine(answers[row.peer.name], answers[OURS])


def _time(task: str, rows: Sequence[Served], servers: dict[str, Server], encoded: list[list[bytes]], rounds: int) -> None:
    for turn in range(rounds):
        for row in [*rows[turn % len(rows) :], *rows[: turn % len(rows)]] if rows else []:
            server = servers[row.peer.name]
            before = cpu_seconds(server.pid)
            row.rounds.append(load(server.port, server.peer.server["paths"][task], encoded))
            row.server_cores.append((cpu_seconds(server.pid) - before) / row.rounds[-1].seconds)


def _warm(
    task: str, name: str, texts: int, encoded: list[list[bytes]], server: Server, failures: dict[str, str]
) -> Served | None:
    """Return a row with one round of load, or enter why there is none."""
    try:
        first = load(server.port, server.peer.server["paths"][task], encoded)
    except (SystemExit, OSError, HTTPException) as error:
        failures[f"{server.peer.name}, server, {name}"] = f"run: {error}"[:240]
        return None
    return Served(server.peer, name, texts, None, [first])


def _values(task: str, bodies: list[bytes]) -> np.ndarray:
    """Return the vectors, or the scores of documents in order."""
    if task == "dense":
        return np.concatenate([vectors_of(body) for body in bodies])
    answers: list[list[dict[str, Any]]] = [orjson.loads(body)["results"] for body in bodies]
    ordered = [sorted(answer, key=lambda row: row["index"]) for answer in answers]
    return np.array([[row["relevance_score"]] for answer in ordered for row in answer])


def _cosine(values: np.ndarray, reference: np.ndarray) -> float:
    if values.shape != reference.shape:
        return float("nan")
    if values.shape[1] == 1:
        return float(np.corrcoef(values[:, 0], reference[:, 0])[0, 1])
    return min_cosine(values, reference)
