"""Server under load against the engine alone: texts per second, on the packaged all-MiniLM-L6-v2.

    python benchmarks/server.py [--connections 16] [--texts 32] [--requests 2] [--format base64|float] [--rounds 7]
    python benchmarks/server.py --texts 1 --requests 32

This is `whimbrel bench compare` with an engine of this process as one side, and `whimbrel serve` as the other. The work of a
round are `--requests` requests of `--texts` texts for each connection: 4 to 200 words, or 4 to 24 if each is alone. The engine
gets all texts in one call, the server `--connections` requests at a time at POST /v1/embeddings. After a round that is not
counted and that compares vectors, both take turns. The ratio is that of the medians, server over engine. Load generator and
server share the cores.
"""

from statistics import median
from typing import Final

from common import MIXED, SHORT, count_tokens, default_plan, make_texts, note, options, print_setting, print_table, served

from whimbrel_bench.backends import Sample
from whimbrel_bench.compare import compare, engine_contenders, server_contender
from whimbrel_bench.datasets import in_requests
from whimbrel_bench.processes import cpu_seconds, mebibytes
from whimbrel_bench.server import total
from whimbrel_bench.target import Load

_CHECKED: Final = 64
"""Texts whose vectors are compared."""


def main() -> None:
    args = options(__doc__, connections=16, texts=32, requests=2, format="base64", rounds=7).parse_args()
    plan = default_plan(args.dtype)
    texts = make_texts(args.connections * args.requests * args.texts, words=SHORT if args.texts == 1 else MIXED)
    samples = in_requests(texts, args.texts)
    with (
        served(plan.dtype, encoding_format=args.format) as (server, target),
        engine_contenders([(None, plan.dtype)], plan.device, [Sample(tuple(texts))], num_checked=1) as (engine,),
    ):
        side = server_contender(target, samples, Load(concurrency=args.connections), _CHECKED // args.texts)
        found = compare(engine, side, rounds=args.rounds, threshold=0.999, on_round=lambda number: note(f"round {number}"))
        metrics = server.metrics()
        batches, batched = (total(metrics, f"whimbrel_batch_seqs_{part}") for part in ("count", "sum"))
        peak, busy = mebibytes(server.pid, "status", "VmHWM"), cpu_seconds(server.pid)
    tokens, ratio = count_tokens(texts), found.ratio
    rows: list[list[str]] = []
    for name, seconds in zip((f"server, {args.connections} connections", "engine"), reversed(found.rounds), strict=True):
        times = median(seconds), max(seconds), min(seconds)
        rows.append([name, f"{len(texts) / times[0]:,.1f}", *(f"{tokens / each:,.0f}" for each in times)])
    print_table(["", "texts/s", "tokens/s", "slowest round", "fastest round"], rows)
    print(f"\nRatio of medians, server over engine: {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f}).")
    print(
        f"Batches of {batched / max(batches, 1):.1f} texts. Smallest of {found.num_compared} cosines: {found.min_cosine:.6f}."
    )
    print(f"Peak memory of the server: {peak:,.0f} MiB; its processor time: {busy:,.1f} s in all.")
    print_setting(plan, texts=args.texts, format=args.format, requests=args.requests, rounds=len(found.rounds[0]))


if __name__ == "__main__":
    main()
