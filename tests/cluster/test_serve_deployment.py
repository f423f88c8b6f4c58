"""The deployment of Ray Serve: the answers of the app, and replicas by the tokens that wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_nodes import nodes
from whimbrel import Client, Engine
from whimbrel.errors import SetupError
from whimbrel.ray.scaling import WAITING, WaitingTokens

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("waiting", "current", "wanted"),
    [({}, 1, 0), ({"a": 50_000.0}, 1, 5), ({"a": 9_000.0, "b": 21_000.0}, 2, 3), ({"a": 0.0, "b": 0.0, "c": 10.0}, 3, 2)],
)
def test_replicas_follow_the_tokens_that_wait(waiting: Any, current: int, wanted: float) -> None:
    """Many at once are added, and one at a time is taken away."""
    context = SimpleNamespace(aggregated_metrics={WAITING: waiting} if waiting else {}, current_num_replicas=current)
    assert WaitingTokens(10_000)(context) == (wanted, {})


@pytest.fixture(scope="module")
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ray Serve on a cluster of one node, at a port of its own."""
    if not request.config.getoption("--recipes"):
        pytest.importorskip("ray", reason="Ray is not installed; `make ray` installs it")
    with nodes(2):
        from ray import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        try:
            yield SimpleNamespace(run=serve.run, status=serve.status, url=f"http://127.0.0.1:{port}")
        finally:
            serve.shutdown()


def test_a_deployment_gives_the_answers_of_the_app_and_follows_the_load(serve: Any) -> None:
    """One request has the vectors of the engine; many at once bring a second replica, which ends when few come."""
    from whimbrel.ray import deployment

    with pytest.raises(SetupError, match="min_replicas 3 must be from 1 to max_replicas, 2"):
        deployment(min_replicas=3, max_replicas=2)
    scaling = {"upscale_delay_s": 0.5, "downscale_delay_s": 2.0, "look_back_period_s": 2.0}
    app = deployment(max_replicas=2, waiting_tokens=1000, scaling=scaling, dtype="float32")
    serve.run(app, name="vectors", route_prefix="/")
    with Client(serve.url, progress=False) as client, Engine(dtype="float32") as engine:
        vector = client.embed(["A whimbrel is a wader."])
        assert np.abs(vector - engine.embed(["A whimbrel is a wader."])).max() < 1e-5
        assert client.info()["models"][0]["plan"]["num_lanes"] == 1
        assert replicas(serve) == 1
        deadline = time.monotonic() + 90
        while replicas(serve) < 2 and time.monotonic() < deadline:
            client.embed([f"{number} " + "word " * 100 for number in range(400)])
        assert replicas(serve) == 2
        deadline = time.monotonic() + 90
        while replicas(serve) > 1 and time.monotonic() < deadline:
            assert client.embed(["one text"]).shape == (1, 384)
        assert replicas(serve) == 1


def replicas(serve: Any) -> int:
    states = serve.status().applications["vectors"].deployments["whimbrel"].replica_states
    return sum(states.values())
