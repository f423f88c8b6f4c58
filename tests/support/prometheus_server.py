"""A real Prometheus with the files of deploy/prometheus, made quick, and an exporter whose numbers a test sets."""

from __future__ import annotations

import http.server
import re
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx2

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
RANGE = "5s"
"""Range of rates: five minutes of the rules as seconds."""


class Alert(NamedTuple):
    """An alert that fires, and the target that it is about."""

    name: str
    instance: str


class Series(NamedTuple):
    """A series of an answer and its last value."""

    labels: Mapping[str, str]
    value: float


def shortened(rules: str) -> str:
    """Return rules whose ranges are a sixtieth, seconds for minutes, and whose alerts wait one second for each `for`."""
    return re.sub(r"\bfor: \d+m\b", "for: 1s", re.sub(r"\[(\d+)m\]", r"[\1s]", rules))


def configuration(key: Path, *targets: str) -> str:
    """Return deploy/prometheus/prometheus.yml with other targets, another file of the key, and a second as interval."""
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    named = ", ".join(f'"{target}"' for target in targets)
    for old, new in (
        ("scrape_interval: 15s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("/run/secrets/whimbrel_metrics_key", str(key)),
        ('["whimbrel:8000"]', f"[{named}]"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


class Prometheus:
    """A process of Prometheus that reads `targets` with the key in the file `key`."""

    def __init__(self, folder: Path, key: Path, *targets: str) -> None:
        (folder / "prometheus.yml").write_text(configuration(key, *targets))
        (folder / "rules.yml").write_text(shortened((FOLDER / "rules.yml").read_text(encoding="utf-8")))
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": "127.0.0.1:0",
        }
        command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = ""
        port = None
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r'[Ll]istening on"? .*address=127\.0\.0\.1:(\d+)', line):
                port = found[1]
            if "ready to receive web requests" in line:
                break
        assert port is not None, self.log
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def query(self, expression: str) -> list[Series]:
        """Return the series of an instant query. Raises AssertionError with Prometheus' words if it is wrong."""
        answer = self._client.get("/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text[:300]}"
        return [Series(each["metric"], float(each["value"][1])) for each in answer.json()["data"]["result"]]

    def firing(self) -> set[Alert]:
        """Return the alerts that fire now."""
        return self._alerts('ALERTS{alertstate="firing"}')

    def fired(self) -> set[Alert]:
        """Return the alerts that fire or have fired."""
        return self._alerts('max_over_time(ALERTS{alertstate="firing"}[1h])')

    def _alerts(self, expression: str) -> set[Alert]:
        return {Alert(each.labels["alertname"], each.labels["instance"]) for each in self.query(expression)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line


class Exporter:
    """Another target, which says what a Whimbrel server would say whose memory, files or starts are at fault."""

    def __init__(self) -> None:
        self.faulty = False
        self._starts = 1000
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = exporter.page().encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def page(self) -> str:
        """Return the metrics; while it is faulty, each page tells of another start."""
        self._starts += self.faulty
        used = 95 if self.faulty else 50
        values = {
            "whimbrel_memory_limit_bytes": 100,
            'process_resident_memory_bytes{process="supervisor"}': used,
            'process_open_fds{process="supervisor"}': used,
            'process_max_fds{process="supervisor"}': 100,
            'process_start_time_seconds{process="supervisor"}': self._starts,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
