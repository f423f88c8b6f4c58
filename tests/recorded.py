"""What an SDK and a server said to each other, compared with golden files; WHIMBREL_RECORD=1 writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

GOLDEN = Path(__file__).parent / "golden"


class Recorded:
    """Requests and answers as they were sent, but for what differs between machines. `hook` is one of httpx's, of answers."""

    def __init__(self) -> None:
        self._said: list[dict[str, Any]] = []

    def hook(self, response: Any) -> None:
        """Note an exchange."""
        response.read()
        request = response.request
        sent = {"method": request.method, "path": request.url.path}
        if request.content:
            sent["body"] = orjson.loads(request.content)
        self._said.append(sent | {"status": response.status_code, "answer": _plain(orjson.loads(response.content))})

    def check(self, name: str) -> None:
        """Compare with the golden file of that name, or write it."""
        file = GOLDEN / f"{name}.json"
        if "WHIMBREL_RECORD" in os.environ:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(orjson.dumps(self._said, option=orjson.OPT_INDENT_2) + b"\n")
        assert self._said == orjson.loads(file.read_bytes())


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner, key) for key, inner in value.items()}
    if isinstance(value, list) and len(value) > 4 and all(isinstance(each, float) for each in value):
        return f"<{len(value)} numbers>"
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) or name.endswith("_duration"):
        return "<number>"
    if name == "digest":
        return "<digest>"  # of all that a card says
    if name == "label":
        return "<label>"  # the vocabularies of random models differ from run to run
    return value
