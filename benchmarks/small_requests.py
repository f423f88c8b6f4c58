"""16 connections with one short text in each request, against the engine with the same texts in one call: texts/s.

    python benchmarks/small_requests.py [--connections 16] [--seconds 8] [--rounds 5] [--dtype auto] [--peer NAME=URL ...]

The load comes from wrk, a compiled generator that takes a few microseconds for a request (Debian's package wrk). The server is
`python -m whimbrel serve` of the packaged all-MiniLM-L6-v2, and the engine a process of its own. Peers are servers that you
have started, with the same model under the name "model", at POST /v1/embeddings. All take turns, after a round that is not
counted; one works at a time. The texts in a batch are read from the server's metrics. Server and generator share the cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import orjson
from common import SHORT, Worker, default_plan, make_texts, note, print_setting, print_table
from driver import read_metrics, serving, total

_TEXTS: Final = 512
_SCRIPT: Final = """
local file = io.open(os.getenv("BODIES"), "r")
local bodies = {}
for line in file:lines() do bodies[#bodies + 1] = line end
local next_body = 0
request = function()
    next_body = next_body % #bodies + 1
    return wrk.format("POST", nil, {["Content-Type"] = "application/json"}, bodies[next_body])
end
"""


def make_engine(dtype: str) -> Callable[[list[str]], float]:
    """Return a function that runs texts in one call and returns their number per second."""
    from whimbrel import Engine

    engine = Engine(dtype=dtype)

    def run(texts: list[str]) -> float:
        started = perf_counter()
        engine.embed(texts)
        return len(texts) / (perf_counter() - started)

    return run


def load(folder: Path, url: str, connections: int, seconds: int) -> float:
    """Return the requests per second that wrk counts. Ends the program if any failed."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(folder / "load.lua"), f"{url}/v1/embeddings"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"BODIES": str(folder / "bodies")})
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        sys.exit(f"{url}: {done.stdout}")
    found = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    assert found is not None
    return float(found[1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32", "int8"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed; Debian's package is wrk")
    plan = default_plan(args.dtype)
    texts = make_texts(_TEXTS, words=SHORT)
    engine = Worker(make_engine, plan.dtype)
    with serving(plan.dtype) as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "load.lua").write_text(_SCRIPT)
        bodies = [orjson.dumps({"model": "model", "input": each, "encoding_format": "base64"}) for each in texts]
        bare = [orjson.dumps({"input": each, "encoding_format": "base64"}) for each in texts]
        peers = dict(each.split("=", 1) for each in args.peer)
        run = partial(load, folder, connections=args.connections, seconds=args.seconds)
        rates: dict[str, list[float]] = {name: [] for name in ("engine", "server", *peers)}
        for turn in range(args.rounds + 1):
            note(f"round {turn} of {args.rounds}")
            (folder / "bodies").write_bytes(b"\n".join(bare))
            found = {"engine": engine.ask(texts), "server": run(url=f"http://127.0.0.1:{server.port}")}
            (folder / "bodies").write_bytes(b"\n".join(bodies))
            found |= {peer: run(url=url) for peer, url in peers.items()}
            if turn:
                for each, rate in found.items():
                    rates[each].append(rate)
        metrics = read_metrics(server.port)
        batches, batched = (total(metrics, f"whimbrel_batch_seqs_{part}") for part in ("count", "sum"))
    print_setting(plan, batch=f"{batched / max(batches, 1):.1f} texts")
    ours = median(rates["server"])
    print_table(
        ["", "texts/s", "server's rate over it"],
        [[each, f"{median(values):,.1f}", f"{ours / median(values):.2f}"] for each, values in rates.items()],
    )


if __name__ == "__main__":
    main()
