"""Exchanges of SDKs with a server, as golden files; and the server, of small random models of several kinds.

WHIMBREL_RECORD=1 pytest tests/dialects writes the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch

from checkpoints import jina_v3
from checkpoints.classifiers import write_classifier
from checkpoints.encoders import write_bert
from checkpoints.late_interaction import write_stanford
from checkpoints.sentence_layout import sentence_layout
from serving import Server
from whimbrel import Engine

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = {"query": "search for: ", "document": "text: ", "Classification": "kind of "}


def _write_dense(folder: Path) -> None:
    write_bert(folder)
    sentence_layout(folder, prompts=PROMPTS)


WRITE: dict[str, Callable[[Path], object]] = {
    "dense": _write_dense,
    "late": write_stanford,
    "ranker": partial(write_classifier, family="bert", num_labels=1),
    "classes": partial(write_classifier, family="bert", num_labels=3),
    "jina": partial(jina_v3.write, layout="stacked"),
}


@dataclass
class Small:
    """A server of the models of WRITE, by these names; the same in this process."""

    server: Server
    engines: dict[str, Engine]

    @property
    def url(self) -> str:
        return self.server.url


@contextmanager
def small_server(folder: Path) -> Iterator[Small]:
    """The server, while the block runs."""
    for name, write in WRITE.items():
        torch.manual_seed(7)
        write(folder / name)
    names = tuple(WRITE)
    served = [word for name in names for word in ("--served-name", name)]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(str(folder / name), dtype="float32", matryoshka=True)) for name in names}
        models = [str(folder / name) for name in names]
        server = stack.enter_context(Server(*models, *served, "--dtype", "float32", "--matryoshka"))
        yield Small(server, engines)


class Exchanges:
    """Requests and answers as they were sent, without the parts that differ between runs and machines."""

    def __init__(self) -> None:
        self._said: list[dict[str, Any]] = []

    def note(self, path: str, request: bytes, status: int, answer: bytes, *, headers: dict[str, str] | None = None) -> None:
        """One of each; a request without a body is a GET. `headers` are those by which a client is known."""
        asked = orjson.loads(request) if request else None
        about: dict[str, Any] = {"path": path, "request": asked, **({"headers": headers} if headers else {})}
        self._said.append({**about, "status": status, "answer": _plain(orjson.loads(answer))})

    def hook(self, response: Any) -> None:
        """Note an exchange of httpx, as a hook of its answers."""
        self.note(response.request.url.path, response.request.content, response.status_code, response.read())

    def check(self, name: str) -> None:
        """Compare with the golden file of that name, or write it."""
        file = GOLDEN / f"{name}.json"
        if "WHIMBREL_RECORD" in os.environ:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(orjson.dumps(self._said, option=orjson.OPT_INDENT_2) + b"\n")
        recorded = orjson.loads(file.read_bytes())
        assert [each for each, other in zip(self._said, recorded, strict=True) if each != other] == []


_MASKED = ("id", "text", "label", "digest", "created", "document", "input", "prediction", "predictions")


def _plain(value: Any, name: str = "") -> Any:
    """Leave out numbers, which depend on random weights and tokenizers, and texts made of them; keep their count."""
    if isinstance(value, dict):
        return {key: _plain(inner, key) for key, inner in value.items()}
    if name in ("tokens", "token_strings"):
        return f"<{name}>"
    if isinstance(value, list) and len(value) > 4 and all(isinstance(each, int | float) for each in value):
        return f"<{len(value)} numbers>"
    if isinstance(value, list):
        return [_plain(each, name) for each in value]
    if isinstance(value, float) or (
        isinstance(value, int) and (name == "size" or name.endswith(("index", "tokens", "_duration")))
    ):
        return "<number>"
    if name in _MASKED and isinstance(value, str | int):
        return f"<{name}>"
    if name in ("embedding", "base64"):
        return f"<{len(value)} characters>"
    if name in ("message", "detail", "error") and isinstance(value, str):
        return re.sub(r"\d+ tokens", "<number> tokens", value)
    return value
