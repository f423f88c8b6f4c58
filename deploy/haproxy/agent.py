#!/usr/bin/env python3
"""Agent of HAProxy's agent-check: the weight of a Whimbrel server, by the tokens that wait in it.

    python3 agent.py http://127.0.0.1:8000 --port 8001 --half 20000

It answers each connection with a line such as `50%`. A server without waiting tokens has its whole weight, one in which
`--half` tokens wait has half. A server whose metrics cannot be read keeps its weight: its life is for the health check to say.
The first API key of the file that WHIMBREL_API_KEY_FILE names is sent. It needs Python alone.
"""

import argparse
import os
import re
import socketserver
import urllib.request
from pathlib import Path

_QUEUE = re.compile(r"^whimbrel_queue_tokens(?:\{[^}]*\})? ([\d.eE+]+)$", re.MULTILINE)
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def waiting_tokens(page: str) -> float:
    """Return the tokens that wait for all models of a server, from its page of metrics."""
    return sum(float(number) for number in _QUEUE.findall(page))


def weight(tokens: float, half: float) -> int:
    """Return the percentage of its weight that a server has, 1 to 100."""
    return max(1, round(100 * half / (half + tokens)))


def read_page(url: str) -> str:
    """Return the metrics of a server. Raises OSError."""
    request = urllib.request.Request(f"{url}/metrics")  # noqa: S310
    if file := os.environ.get("WHIMBREL_API_KEY_FILE"):
        lines = map(str.strip, Path(file).read_text(encoding="utf-8").splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        request.add_header("Authorization", f"Bearer {keys[0]}")
    with _DIRECT.open(request, timeout=2) as answer:
        return answer.read().decode()


def main() -> None:
    """Answer until a signal ends the process."""
    parser = argparse.ArgumentParser(description="Weights for HAProxy's agent-check.")
    parser.add_argument("url")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--half", type=float, default=20_000)
    options = parser.parse_args()
    if not options.url.startswith(("http://", "https://")):
        parser.error("the URL of a server begins with http:// or https://")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                line = f"{weight(waiting_tokens(read_page(options.url)), options.half)}%\n"
            except OSError:
                line = "\n"
            self.wfile.write(line.encode())

    class Agent(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Agent((options.host, options.port), Handler) as agent:
        agent.serve_forever()


if __name__ == "__main__":
    main()
