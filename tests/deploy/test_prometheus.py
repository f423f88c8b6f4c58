"""A real Prometheus reads a loaded server: every query gives data, and every alert fires at its fault and clears after it.

The rules are those of deploy/prometheus with seconds for minutes (`shortened`); rules_test.yml tests the true times. Faults of
memory, files and whole servers come from an exporter of the test, all others from a real server.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

import fault_injection
from dashboards import dashboard_queries, rules
from load import ask, holds
from prometheus_server import FOLDER, RANGE, Alert, Exporter, Prometheus, Series, configuration
from serving import Server
from texts import TEXTS
from waiting import wait_for

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("prometheus", "promtool")), reason="no Prometheus: apt install prometheus"
)

KEYS = ("key-of-clients", "key-of-prometheus")
SOME = [text for text in TEXTS if 20 < len(text) < 200][:8]
OPTIONS = ("--workers", "2", "--max-queue-tokens", "2000", "--max-queue-seconds", "1000")
NUM_CONNECTIONS = 32
OF_EXPORTER = {"WhimbrelMemoryFull", "WhimbrelFilesFull", "WhimbrelServerRestarts"}
OF_TEXTS = {"WhimbrelServerFaults", "WhimbrelMissedDeadlines", "WhimbrelTruncation", "WhimbrelNotFinite", "WhimbrelOutOfMemory"}
OF_PROCESSES = {"WhimbrelWorkerRestarts", "WhimbrelConnectionsFull"}
OF_LOAD = {"WhimbrelOverloaded", "WhimbrelSlowQueue"}
OF_ENGINES = {"WhimbrelNoEngine", "WhimbrelEngineRestarts"}
OF_START = {"WhimbrelDown"}
QUEUED = "sum by (instance) (whimbrel_queue_tokens) > 0 and on (instance) sum by (instance) (whimbrel_engines_up) == 0"
ALERTS = OF_EXPORTER | OF_TEXTS | OF_PROCESSES | OF_LOAD | OF_ENGINES | OF_START


@dataclass
class Report:
    """The observations of one run: what queries gave, and which alerts fired and cleared."""

    server: str
    exporter: str
    data: dict[str, list[Series]] = field(default_factory=dict[str, list[Series]])
    healthy: set[Alert] = field(default_factory=set[Alert])
    fired: set[Alert] = field(default_factory=set[Alert])
    left: set[Alert] = field(default_factory=set[Alert])
    queued: bool = False
    """True if tokens were in the queue while no engine was up."""

    def alert(self, name: str) -> Alert:
        """Return an alert about the target that has its fault."""
        return Alert(name, self.exporter if name in OF_EXPORTER else self.server)


class Site:
    """A server, the exporter, and a Prometheus that reads both."""

    def __init__(self, server: Server, prometheus: Prometheus, report: Report) -> None:
        self.server, self.prometheus, self.report = server, prometheus, report

    def await_alerts(self, names: set[str]) -> None:
        """Wait until these alerts have fired. Those that do not are for the tests to report."""
        wanted = {self.report.alert(name) for name in names}
        wait_for(lambda: wanted <= self.prometheus.fired())

    @contextmanager
    def sending(self, *requests: Callable[[httpx2.Client], object], pause: float = 0.1) -> Iterator[None]:
        """Send these requests again and again, each in a thread of its own. Connections that break are made again."""
        stop = threading.Event()

        def run(send: Callable[[httpx2.Client], object]) -> None:
            with httpx2.Client(base_url=self.server.url, timeout=6, headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
                while not stop.wait(pause):
                    with suppress(httpx2.HTTPError):
                        send(client)

        with ThreadPoolExecutor(len(requests)) as threads:
            futures = [threads.submit(run, send) for send in requests]
            try:
                yield
            finally:
                stop.set()
        for future in futures:
            future.result()


def text(content: str, **headers: str) -> Callable[[httpx2.Client], object]:
    """Return a request for one text."""
    return lambda client: client.post("/v1/embeddings", json={"input": content, "truncate": True}, headers=headers)


def observe_health(site: Site) -> None:
    """Put a moderate load on the server and run every query."""
    expressions = {**dashboard_queries(RANGE), **{each["record"]: each["record"] for each in rules("record")}}
    requests = (lambda client: ask(client, SOME), text("word " * 20), lambda client: client.get("/v1/models"))
    with site.sending(*requests):
        time.sleep(6)  # until the ranges of all queries are full
        site.report.healthy = site.prometheus.firing()
        site.report.data = {name: site.prometheus.query(expression) for name, expression in expressions.items()}


def kill(site: Site, kind: str) -> None:
    """Kill three processes of a kind, each when its predecessor's successor is there."""
    killed = set[int]()
    for _ in range(3):
        assert wait_for(lambda: set(site.server.children(kind)) - killed)
        pid = min(set(site.server.children(kind)) - killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)


def take_all_connections(site: Site) -> None:
    """Open more connections than the workers have places, with requests that have begun."""
    with ExitStack() as stack:
        for _ in range(3 * NUM_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", site.server.port), timeout=10))
            with suppress(OSError):
                connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        time.sleep(0.5)


def make_faults(site: Site) -> None:
    """Make every fault of the real server until its alerts have fired: of texts and workers, of load, then of engines."""
    faulty = (text("a @@raise"), text("a @@nan"), text("a @@oom"), text("word " * 300), text("a", **{"x-request-timeout": "0"}))
    with site.sending(text("fine"), *faulty):
        take_all_connections(site)
        kill(site, "worker")
        site.await_alerts(OF_TEXTS | OF_PROCESSES | OF_EXPORTER)
    with site.sending(*[text(holds("2.5"))] * 6, *[lambda client: ask(client, SOME * 6)] * 3):
        site.await_alerts(OF_LOAD)
        kill(site, "engine")
        site.report.queued = wait_for(lambda: site.prometheus.query(QUEUED))
        site.await_alerts(OF_ENGINES)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """All observations: the server starts after Prometheus, is loaded, suffers every fault, and recovers."""
    folder = tmp_path_factory.mktemp("prometheus")
    keys, key = folder / "keys", folder / "key"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    key.write_text(KEYS[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exporter = Exporter()
    report = Report(f"127.0.0.1:{port}", exporter.address)
    guards = json.dumps({"max_connections": NUM_CONNECTIONS})
    options = (*OPTIONS, "--port", str(port), "--api-key-file", str(keys))
    cores = sorted(os.sched_getaffinity(0))[:2]  # a few holding texts fill all lanes
    with Prometheus(folder, key, report.server, exporter.address) as prometheus:
        assert wait_for(lambda: report.alert("WhimbrelDown") in prometheus.firing())
        environment = fault_injection.ENVIRONMENT | {"WHIMBREL_GUARDS": guards}
        with Server(*options, preexec_fn=lambda: os.sched_setaffinity(0, cores), **environment) as server:
            site = Site(server, prometheus, report)
            assert wait_for(lambda: not prometheus.firing())
            observe_health(site)
            exporter.faulty = True
            make_faults(site)
            exporter.faulty = False
            wait_for(lambda: not prometheus.firing(), 90)
            report.left, report.fired = prometheus.firing(), prometheus.fired()
            yield report
    exporter.close()


@pytest.mark.parametrize("name", [*dashboard_queries(RANGE), *(each["record"] for each in rules("record"))])
def test_every_query_gives_data_of_a_loaded_server(name: str, report: Report) -> None:
    series = report.data[name]
    assert series, "no data"
    assert all(math.isfinite(each.value) for each in series), series


def test_keys_are_told_apart_and_not_told(report: Report) -> None:
    """Clients send the first key, Prometheus the second."""
    series = report.data["Requests by key A"]
    assert {each.labels["key"] for each in series if each.value} >= {"key1", "key2"}
    assert not any(key in str(each.labels) for every in report.data.values() for each in every for key in KEYS)


def test_tokens_that_wait_while_no_engine_is_up_are_in_the_queue(report: Report) -> None:
    assert report.queued


def test_a_healthy_server_has_no_alert(report: Report) -> None:
    assert {each for each in report.healthy if each.name != "WhimbrelDown"} == set()  # a busy machine answers after a second


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_fires_at_its_fault_and_clears(name: str, report: Report) -> None:
    assert report.alert(name) in report.fired
    assert report.alert(name) not in report.left


def test_every_alert_has_its_fault_and_no_other_fires(report: Report) -> None:
    assert {each["alert"] for each in rules("alert")} == ALERTS
    late = Alert("WhimbrelDown", report.exporter)  # a busy machine answers after a second
    assert report.fired - {late} == {report.alert(name) for name in ALERTS}


@pytest.mark.parametrize("arguments", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules_and_their_tests(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    (tmp_path / "prometheus.yml").write_text(configuration(tmp_path / "key", "whimbrel:8000"))
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_an_alert_that_no_longer_fires(tmp_path: Path) -> None:
    """A rule is broken on purpose."""
    rules_text = (FOLDER / "rules.yml").read_text(encoding="utf-8")
    (tmp_path / "rules.yml").write_text(rules_text.replace('outcome="overloaded"', 'outcome="overload"'))
    shutil.copy(FOLDER / "rules_test.yml", tmp_path)
    command = ["promtool", "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "WhimbrelOverloaded" in done.stdout + done.stderr
