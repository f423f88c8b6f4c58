"""Dialects are leaves: a new one is a file and a row of the table."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import whimbrel.dialects

FOLDER = Path(whimbrel.dialects.__file__).parent
DIALECT = '''
import msgspec

from whimbrel.dialects.common.bodies import decode
from whimbrel.dialects.common.openai_errors import OpenAIError, render_error
from whimbrel.dialects.common.route import Parsed, Route, ready
from whimbrel.types.request import Request
from whimbrel.wire.json_base64 import to_json


class TinyRequest(msgspec.Struct):
    """Body of POST /tiny."""

    text: str
    model: str | None = None


class TinyResponse(msgspec.Struct):
    """Answer of POST /tiny."""

    vector: list[float]


def parse(raw: bytes) -> Parsed[TinyRequest]:
    body = decode(TinyRequest, raw)
    return ready(body, Request([body.text], ("dense",)))


def render(body, result, model):
    return to_json({"vector": result.dense[0]})


ROUTES = (
    Route("/tiny", "The vector of a text.", parse, render, response_type=TinyResponse, made_for="dense",
          example='{"text": "a"}', render=render_error, error_type=OpenAIError),
)
'''
ROW = '    API("Tiny", "The smallest of APIs.", tiny.ROUTES),\n'
PROGRAM = """
import sys, asyncio, json
import whimbrel
whimbrel.__path__.insert(0, sys.argv[1])
from asgi import call
from fake_embedder import FakeEmbedder
from whimbrel.server.app.app import create_app
from whimbrel.server.app.openapi import openapi_document
from whimbrel.server.app.routing import ModelRegistry
app = create_app(ModelRegistry(FakeEmbedder()))
def answer(path, body=None):
    method, headers = ("GET", None) if body is None else ("POST", {"content_type": "application/json"})
    return asyncio.run(call(app, method, path, body=json.dumps(body).encode(), headers=headers))
assert len(json.loads(answer("/tiny", {"text": "a"}).body)["vector"]) == 4
refused = answer("/tiny", {"text": 1})
assert refused.status == 400 and json.loads(refused.body)["error"]["param"] == "text"
document = openapi_document()
assert document["paths"]["/tiny"]["post"]["tags"] == ["Tiny"] and "TinyResponse" in document["components"]["schemas"]
assert 'id="tiny-tiny.text"' in answer("/docs").body.decode()
"""


def test_a_new_dialect_is_a_file_and_a_row(tmp_path: Path) -> None:
    """The server answers its route, /openapi.json describes it, and /docs has its section."""
    copy = tmp_path / "dialects"
    shutil.copytree(FOLDER, copy)
    (copy / "tiny.py").write_text(DIALECT, encoding="utf-8")
    table = (copy / "__init__.py").read_text(encoding="utf-8")
    for before, added in ((" tei,", " tiny,"), ("llama_cpp.ROUTES),\n", ROW)):
        assert table.count(before) == 1
        table = table.replace(before, before + added)
    (copy / "__init__.py").write_text(table, encoding="utf-8")
    support = Path(__file__).parents[1] / "support"
    program = f"import sys; sys.path.insert(0, {str(support)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
