"""`whimbrel top` against real servers, one that restarts, and answers that are not metrics."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import numpy as np
import pytest
from rich.console import Console

from serving import Server
from waiting import wait_for
from whimbrel import __version__
from whimbrel_bench.top.page import Page, quantile, rates_between, read_page, together
from whimbrel_bench.top.page import summed as sums_of
from whimbrel_bench.top.table import STAGES, make_figures, render
from whimbrel_bench.top.watch import Watch, open_http, total

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = [f"text {number} of the load" for number in range(7)]


def embed(url: str, count: int, **headers: str) -> int:
    """Send `count` good requests and one bad one; return the tokens of the good ones."""
    tokens = 0
    for _ in range(count):
        answer = httpx2.post(f"{url}/v1/embeddings", json={"input": TEXTS}, headers=headers).raise_for_status()
        tokens += int(answer.headers["x-whimbrel-tokens"])
    assert httpx2.post(f"{url}/v1/embeddings", json={"input": 1.5}, headers=headers).status_code == 400
    return tokens


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whimbrel", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def samples(url: str, **headers: str) -> dict[str, float]:
    """Return the samples of a page by name and labels as they are written, without any parser."""
    page = httpx2.get(f"{url}/metrics", headers=headers).text
    return {name: float(value) for name, value in re.findall(r"^(\w+\{.*\}|\w+) (\S+)$", page, re.MULTILINE)}


def summed(page: dict[str, float], name: str, *labels: str, route: str = "") -> dict[str, float]:
    """Return sums of the samples called `name`, by the value of `le` or of `outcome`."""
    sums: dict[str, float] = {}
    for key, value in page.items():
        if key.startswith(name + "{") and all(label in key for label in (*labels, route)):
            found = re.search(r'(?:le|outcome)="([^"]*)"', key)
            sums[found[1] if found else ""] = sums.get(found[1] if found else "", 0.0) + value
    return sums


def percentile(before: dict[str, float], after: dict[str, float], q: float) -> float:
    """Return a percentile of what was observed in between, by numpy's interpolation of the cumulative counts."""
    bounds = sorted(after, key=float)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    first = next(index for index, each in enumerate(counts) if each >= q * counts[-1])
    low, below = (float(bounds[first - 1]), counts[first - 1]) if first else (0.0, 0.0)
    return float(np.interp(q * counts[-1], [below, counts[first]], [low, float(bounds[first])]))


def polling(urls: list[str], course: Callable[[list[Watch]], Awaitable[None]], key: str | None = None) -> None:
    async def run() -> None:
        async with open_http(urls, key, verify=True) as http:
            await course([Watch(url, http) for url in urls])

    asyncio.run(run())


def test_rates_and_percentiles_are_those_of_the_metrics(server: Server) -> None:
    embed(server.url, 1)
    route = 'route="/v1/embeddings"'

    async def course(watches: list[Watch]) -> None:
        first = samples(server.url)
        await watches[0].poll()
        tokens = await asyncio.to_thread(embed, server.url, 5)
        done = sum(summed(first, "whimbrel_requests_total", route).values()) + 6
        assert wait_for(lambda: sum(summed(samples(server.url), "whimbrel_requests_total", route).values()) == done)
        await watches[0].poll()
        last, found = samples(server.url), watches[0].figures
        assert (found.state, found.reason, found.version, found.models) == ("up", "", __version__, [MINILM])
        assert found.figures is not None
        assert found.seconds is not None
        seconds, figures = found.seconds, found.figures
        assert figures.requests_per_second == {"ok": pytest.approx(5 / seconds), "invalid": pytest.approx(1 / seconds)}
        assert figures.texts_per_second == pytest.approx(5 * len(TEXTS) / seconds)
        assert figures.tokens_per_second == pytest.approx(tokens / seconds)
        assert figures.truncated_per_second == 0
        assert (figures.engines_up, figures.engine_restarts, figures.requests_in_flight) == (1, 0, 0)
        assert figures.memory_bytes is not None
        assert figures.memory_bytes > 1e8
        assert figures.latency_seconds is not None
        assert list(figures.latency_seconds) == list(STAGES)
        for stage, latency in figures.latency_seconds.items():
            name, label = ("request", route) if stage == "request" else ("stage", f'stage="{stage}"')
            before, after = (summed(page, f"whimbrel_{name}_seconds_bucket", label) for page in (first, last))
            assert latency.per_second * seconds == pytest.approx(after["+Inf"] - before.get("+Inf", 0.0)), stage
            for q, value in ((0.5, latency.p50), (0.95, latency.p95), (0.99, latency.p99)):
                assert value == pytest.approx(percentile(before, after, q)), (stage, q)
        await watches[0].poll()  # without traffic
        assert watches[0].figures.figures is not None
        quiet = watches[0].figures.figures
        assert quiet.requests_per_second == {}
        assert {each.p99 for each in (quiet.latency_seconds or {}).values()} == {None}

    polling([server.url], course)


def test_a_restart_gives_no_negative_rate_and_a_wrong_key_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url, key = f"http://127.0.0.1:{port}", {"authorization": "Bearer right"}
    arguments = ("--port", port, "--api-key", "right")

    async def course(watches: list[Watch]) -> None:
        seen, missed = watches[0], Watch(url, watches[0]._http)  # it polls in none of the moments without a server
        for each in (seen, missed):
            await each.poll()
        with Server(*arguments) as first:
            await asyncio.to_thread(embed, url, 4, **key)
            await asyncio.gather(seen.poll(), missed.poll())
            async with open_http([url], "wrong", verify=True) as http:
                stranger = Watch(url, http)
                await stranger.poll()
            assert stranger.figures.state == "refused"
            assert (
                stranger.figures.reason == "401: the API key is missing or wrong. Pass it with --api-key or WHIMBREL_API_KEY."
            )
            await asyncio.to_thread(first.stop)
        await seen.poll()
        assert (seen.figures.state, seen.figures.figures) == ("unreachable", None)
        assert "Is the server running?" in seen.figures.reason
        with Server(*arguments):
            await asyncio.to_thread(embed, url, 2, **key)
            assert wait_for(lambda: 'outcome="invalid"' in httpx2.get(f"{url}/metrics", headers=key).text)
            await asyncio.gather(seen.poll(), missed.poll())
            assert seen.figures.state == "up"
            assert seen.figures.figures is not None
            assert seen.figures.figures.requests_per_second is None
            assert missed.figures.seconds is not None
            assert missed.figures.figures is not None
            assert missed.figures.figures.requests_per_second == {
                "ok": pytest.approx(2 / missed.figures.seconds), "invalid": pytest.approx(1 / missed.figures.seconds)
            }  # fmt: skip
            figures = total([seen, missed])
            assert figures.requests_per_second == missed.figures.figures.requests_per_second
            assert figures.engines_up == 2

    polling([url], course, "right")


PAGE = """# TYPE whimbrel_requests_total counter
whimbrel_requests_total{{model="m",outcome="ok",route="/v1/embeddings",status="200"}} {count}
whimbrel_requests_total{{model="",outcome="ok",route="/metrics",status="200"}} {count}
# TYPE whimbrel_prefix_cache_hits_total counter
whimbrel_prefix_cache_hits_total{{model="m"}} {count}
# TYPE whimbrel_prefix_cache_misses_total counter
whimbrel_prefix_cache_misses_total{{model="m"}} 4
# TYPE whimbrel_engines_up gauge
whimbrel_engines_up{{model="m\\n\x1b]0;title"}} 1
# TYPE whimbrel_queue_tokens gauge
whimbrel_queue_tokens{{model="m"}} NaN
# TYPE process_start_time_seconds gauge
process_start_time_seconds{{process="supervisor"}} {started}
"""


def page(count: float, *, started: float = 100.0, received: float = 0.0) -> Page:
    return read_page(PAGE.format(count=count, started=started), received=received)


def requests(before: Page, after: Page) -> dict[str, float]:
    """Return the rates of requests by outcome."""
    return sums_of(rates_between(before, after), "whimbrel_requests_total", "outcome")


def test_counters_that_fall_count_from_zero() -> None:
    assert requests(page(10), page(16, received=2.0)) == {"ok": 3.0}
    assert requests(page(10), page(6, received=2.0)) == {"ok": 3.0}
    assert requests(page(10), page(16, started=160.0, received=2.0)) == {"ok": 8.0}
    assert requests(page(10), page(16, started=100.01, received=2.0)) == {"ok": 3.0}
    figures = make_figures(page(10).samples, rates_between(page(0, started=50.0), page(12, received=1.0)))
    assert figures.prefix_cache_hit_ratio == 0.75
    assert figures.queue_tokens == 0  # NaN says nothing
    two = together([page(1).samples, page(2).samples])
    assert sums_of(two, "whimbrel_prefix_cache_hits_total", model="m") == {"": 3.0}


def test_quantiles_are_prometheus_s() -> None:
    buckets = {1.0: 2.0, 2.0: 6.0, 4.0: 6.0, float("inf"): 8.0}
    assert [quantile(q, buckets) for q in (0.0, 0.125, 0.25, 0.5, 0.75, 0.99)] == [0.0, 0.5, 1.0, 1.5, 2.0, 4.0]
    assert quantile(0.5, {}) is None
    assert quantile(0.5, dict.fromkeys(buckets, 0.0)) is None
    mixed = {1.0: 5.0, 2.0: 2.0, 3.0: 4.0, 9.0: 8.0}  # of two servers with bounds of their own at 2 and 3
    assert [quantile(q, mixed) for q in (0.25, 0.99)] == [quantile(q, {1.0: 5.0, 9.0: 8.0}) for q in (0.25, 0.99)]


@pytest.mark.parametrize(
    "text", ["", "<!doctype html><p>{", "a b c d\n", "# TYPE up gauge\nup 1\n", "x{le=} 1\n", 'x{a="b 1\n']
)
def test_other_pages_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no metrics of Whimbrel|not in Prometheus' text format"):
        read_page(text, received=0.0)


@contextlib.contextmanager
def fake(metrics: Callable[[], tuple[int, str, str]]) -> Iterator[str]:
    """Serve what `metrics` returns, a status, a type and a text, at every path. Yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, text = metrics()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{web.server_port}"
        finally:
            web.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, "text/html", "<!doctype html>"), "/metrics answers with text/html. Is this the URL of a Whimbrel server?"),
        ((200, "text/plain", "up 1\n"), "/metrics answers with text/plain, no metrics of Whimbrel."),
        ((403, "application/json", '{"error":"no entry"}'), "403: no entry"),
        ((302, "text/html", ""), "302: "),
        ((200, "text/plain", "#" * 17 * 2**20), "answers with more than 16 MiB"),
    ],
)
def test_what_is_no_metrics_is_named(answer: tuple[int, str, str], says: str) -> None:
    async def course(watches: list[Watch]) -> None:
        await watches[0].poll()
        assert watches[0].figures.state == "refused"
        assert says in watches[0].figures.reason

    with fake(lambda: answer) as url:
        polling([url], course)


def test_json_and_text_once(server: Server) -> None:
    nobody = "http://127.0.0.1:1"
    done = top(server.url + "/v1/", nobody, "--once", "--json", "--interval", "0.2")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 1, "")
    assert list(document) == ["time", "interval", "servers", "total"]
    up, down = document["servers"]
    assert (up["url"], up["state"], up["version"], up["models"]) == (server.url, "up", __version__, [MINILM])
    assert (down["url"], down["state"], down["figures"]) == (nobody, "unreachable", None)
    assert list(up["figures"]["latency_seconds"]) == list(STAGES)
    assert set(up["figures"]) == set(document["total"])
    done = top(server.url, "--interval", "0.2")  # stdout is no terminal
    text = done.stdout
    assert done.returncode == 0
    assert re.search(r"^SERVER +STATE +REQ/S", text)
    assert re.search(rf"^{re.escape(server.url.removeprefix('http://'))} +up ", text, re.MULTILINE)
    assert "\x1b" not in text
    assert "error: ftp://127.0.0.1 is no URL" in top("ftp://127.0.0.1").stderr


def test_a_narrow_terminal(server: Server) -> None:
    """Each width shows all rows and fits."""

    async def course(watches: list[Watch]) -> None:
        for each in (*watches, *watches):
            await each.poll()
        for width in (20, 60, 80, 120):
            screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
            screen.print(render([each.figures for each in watches], total(watches), width=width))
            lines = screen.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
            assert max(map(len, lines)) <= width
            assert width < 60 or sum(bool(re.match(r"127\.0\.0\.1|a-very-long|total", line)) for line in lines) == 3

    polling([server.url, "http://a-very-long-name-of-a-host.invalid:8000"], course)


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_the_live_view_in_a_terminal(key: bytes, code: int) -> None:
    """It survives a resize and odd names, ends by a key, and leaves the terminal as it was."""
    counts = iter(range(10**6))
    with fake(lambda: (200, "text/plain", PAGE.format(count=next(counts), started=1))) as url:
        pid, terminal = pty.fork()
        if pid == 0:
            command = [sys.executable, "-m", "whimbrel", "top", url, "http://127.0.0.1:1", "--interval", "0.2"]
            for name in ("COLUMNS", "LINES"):  # xdist sets them, and they would stand for the terminal's size
                os.environ.pop(name, None)
            os.execve(sys.executable, command, os.environ | {"TERM": "xterm"})
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        before, shown = termios.tcgetattr(terminal), b""

        def shows(words: bytes) -> bool:
            nonlocal shown
            with contextlib.suppress(OSError):  # the command has ended
                shown += os.read(terminal, 65536)
            return words in shown

        assert wait_for(lambda: shows(b"REQ/S") and shows(b"127.0.0.1:1 "))
        assert termios.tcgetattr(terminal) != before
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        os.kill(pid, signal.SIGWINCH)
        assert wait_for(lambda: shows(b"FAILED/S") and shows(b"]0;title"))  # the first server's answer, too
        os.write(terminal, key)
        assert wait_for(lambda: shows(b"\x1b[?1049l"))  # the end of the alternate screen
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            shows(b"")
        assert os.waitstatus_to_exitcode(ended[1]) == code
        assert b"Traceback" not in shown
        assert b"\x1b]" not in shown
        os.close(terminal)
