"""Requests sent to an engine over a channel, as a worker sends them."""

from __future__ import annotations

import asyncio
from typing import Any

from whimbrel import Engine
from whimbrel.server.processes.channel import pair
from whimbrel.server.processes.engine_process import WorkerChannel
from whimbrel.server.processes.remote_engine import RemoteEngine
from whimbrel.server.processes.replica import Replica
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs


async def run_over_a_channel(engine: Engine, requests: list[Request]) -> list[Outputs]:
    """Return the outputs that a worker receives for these requests over a channel to an engine."""
    broken: list[Any] = []
    replica = Replica(8, broken.append)
    remote = RemoteEngine(0, engine.card, engine.plan, engine.folder, replicas=[replica], on_crash=lambda _: None)
    near, far = pair()
    WorkerChannel(engine, 0, far)
    board, _ = StatusBoard.create(4, 4)
    remote.attach(0, near, board)
    try:
        results = await asyncio.gather(*(remote.run(request) for request in requests))
    finally:
        replica.disconnect()
    assert not broken
    return [result.outputs for result in results]
