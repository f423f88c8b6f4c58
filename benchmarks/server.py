"""Server under load against the engine alone: tokens/s for the same texts, on the packaged all-MiniLM-L6-v2.

    python benchmarks/server.py [--connections 16] [--requests 2] [--format base64|float] [--dtype auto] [--rounds 7]

This is `whimbrel bench compare` with an engine of this process as one side, and `python -m whimbrel serve` as the other. The
work of a round are `--requests` requests of 32 texts of 4 to 200 words for each connection. The engine gets them at once, the
server `--connections` at a time at POST /v1/embeddings. After a round that is not counted and that compares vectors, both take
turns. The ratio is that of the medians, server over engine. Load generator and server share the cores.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Final

from common import (
    MIXED,
    chunks,
    count_tokens,
    cpu_seconds,
    default_plan,
    make_texts,
    note,
    peak_mebibytes,
    print_setting,
    print_table,
)
from driver import serving

from whimbrel_bench.backends import Sample
from whimbrel_bench.compare import EngineContender, ServerContender, compare
from whimbrel_bench.target import Load, Target, TargetOptions

TEXTS_PER_REQUEST: Final = 32
_CHECKED: Final = 2
"""Requests whose vectors are compared."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="requests of each connection in a round")
    parser.add_argument("--format", default="base64", choices=["base64", "float"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    plan = default_plan(args.dtype)
    texts = make_texts(args.connections * args.requests * TEXTS_PER_REQUEST, words=MIXED)
    samples = [Sample(tuple(each)) for each in chunks(texts, TEXTS_PER_REQUEST)]
    with (
        serving(plan.dtype) as server,
        EngineContender(None, plan.dtype, plan.device, samples, _CHECKED) as engine,
    ):
        target = Target(f"http://127.0.0.1:{server.port}", TargetOptions(extra_body={"encoding_format": args.format}))
        target.connect()
        served = ServerContender(target, samples, Load(concurrency=args.connections), _CHECKED)
        found = compare(
            engine,
            served,
            rounds=args.rounds,
            threshold=0.999,
            on_round=lambda number: note(f"round {number} of {args.rounds}"),
        )
        peak, busy = peak_mebibytes(server.pid), cpu_seconds(server.pid)
    tokens, ratio = count_tokens(texts), found.ratio
    rows: list[list[str]] = []
    for name, seconds in zip((f"server, {args.connections} connections", "engine"), reversed(found.rounds), strict=True):
        rows.append([name, *(f"{tokens / each:,.0f}" for each in (median(seconds), max(seconds), min(seconds)))])
    print_table(["", "tokens/s", "slowest round", "fastest round"], rows)
    print(f"\nRatio of medians, server over engine: {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f}).")
    print(f"Peak memory of the server: {peak:,.0f} MiB; its processor time: {busy:,.1f} s in all.")
    print(f"Smallest of {found.num_compared} cosines to the engine's vectors: {found.min_cosine:.6f}.")
    print_setting(plan, format=args.format, requests_per_connection=args.requests, rounds=len(found.rounds[0]))


if __name__ == "__main__":
    main()
