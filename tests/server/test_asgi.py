"""The app of `whimbrel.asgi` under other servers and within other apps gives the answers of `whimbrel serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from waiting import wait_for
from whimbrel import Engine
from whimbrel.asgi import create_app
from whimbrel.errors import SetupError
from whimbrel.types.arrays import Float32Array

BODY = {"input": "A whimbrel is a wader."}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Float32Array:
    return engine.embed(BODY["input"])


def test_under_uvicorn(expected: Float32Array, tmp_path: Path) -> None:
    """With a key, a prefix, a name and a folder of batches; the vectors are those of Engine."""
    (tmp_path / "served.py").write_text(
        "from whimbrel.asgi import create_app\napp = create_app(api_keys=['key'], served_name='minilm', dtype='float32')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "served:app", "--port", str(port), "--root-path", "/vectors"]
    environment = os.environ | {"WHIMBREL_BATCH_DIR": str(tmp_path / "batches")}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            with httpx2.Client(
                timeout=60, base_url=f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer key"}
            ) as client:

                def answers() -> bool:
                    try:
                        return client.get("/health").status_code == 200
                    except httpx2.TransportError:
                        return False

                assert wait_for(answers, 60)
                answer = client.post("/v1/embeddings", json=BODY | {"model": "minilm"})
                assert np.array_equal(np.float32(answer.json()["data"][0]["embedding"]), expected)
                assert client.post("/v1/embeddings", json=BODY, headers={"Authorization": "Bearer x"}).status_code == 401
                assert client.post("/v1/embeddings", json={"input": []}).status_code == 400
                assert client.get("/openapi.json").json()["servers"] == [{"url": "/vectors"}]
                assert "whimbrel_requests_total" in client.get("/metrics").text
                line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": BODY}
                files = {"file": ("in.jsonl", json.dumps(line).encode())}
                file = client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
                asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
                path = f"/v1/batches/{client.post('/v1/batches', json=asked).json()['id']}"
                assert wait_for(lambda: client.get(path).json()["status"] == "completed", 30)
                content = client.get(f"/v1/files/{client.get(path).json()['output_file_id']}/content").json()
                assert np.array_equal(np.float32(content["response"]["body"]["data"][0]["embedding"]), expected)
        finally:
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=60)[1]
    assert "Application shutdown complete" in log
    assert "Traceback" not in log
    assert time.monotonic() - started < 30


def test_within_another_app(expected: Float32Array) -> None:
    """Nothing starts an app that is mounted, so the first request loads the models."""
    with TestClient(Starlette(routes=[Mount("/vectors", create_app(dtype="float32"))])) as client:
        answer = client.post("/vectors/v1/embeddings", json=BODY)
        assert np.array_equal(np.float32(answer.json()["data"][0]["embedding"]), expected)
        assert client.get("/vectors/health").status_code == 200


def test_a_loaded_engine_serves_and_is_closed_at_the_end() -> None:
    engine = Engine(dtype="float32", served_name="mine")
    with TestClient(create_app(engine)) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/embeddings"):
            pass
        assert client.post("/v1/embeddings", json=BODY).status_code == 200
    with pytest.raises(Exception, match="closed"):
        engine.embed("a")


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        (("/no/such/folder",), {}, "no folder /no/such/folder"),
        ((None, None), {}, "two models are named"),
        ((), {"max_length": 10**6}, "max_length"),
    ],
)
def test_models_that_cannot_be_loaded_stop_the_start(models: Any, options: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said), TestClient(create_app(*models, **options)):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"api_keys": [""]}, "key"),
        ({"api_key_file": "/no/such/file"}, "/no/such/file"),
        ({"root_path": "no-slash"}, "root"),
        ({"forwarded_allow_ips": ["nobody"]}, "nobody"),
        ({"cors_origins": ["not an origin"]}, "origin"),
    ],
)
def test_wrong_arguments_are_refused_when_the_app_is_made(options: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        create_app(**options)
