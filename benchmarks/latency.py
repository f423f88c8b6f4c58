"""Latency of single queries under bulk load: their p99 beside 2,048-text requests of two clients, over that on an idle server.

    python benchmarks/latency.py [--rounds 5] [--queries 300] [--bulk 2 | --batch TEXTS] [--dtype auto] [--serve ARGUMENTS]

The server is `whimbrel serve` of the packaged all-MiniLM-L6-v2, with a queue without limits. In a round the same queries, texts
of 12 words, are sent one after another on a kept connection: first while the server is otherwise idle, then, in the time that
this took at least and again and again, beside bulk clients. Each of these sends requests of 2,048 texts of 4 to 60 words as
base64, one after another. Queries begin once bulk is queued, and each round has its own. With `--batch` a batch file runs in
place of the clients, by /v1/batches. Its lines have this number of such texts each.

All responses to queries are compared with the vectors of the in-process Engine, bit by bit. Percentiles are over the queries of
all rounds. The last column has the smallest and the largest percentile of one round. Clients and server share the cores.
"""

import json
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import httpx2
import numpy as np
from common import chunks, count_wrong, default_plan, make_texts, note, options, print_setting, print_table, served

from whimbrel_bench.backends import Sample
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, total
from whimbrel_bench.target import Load, Target

_BULK_TEXTS: Final = 2048
_MIN_SECONDS: Final = 15.0
"""Seconds beside bulk, so that bulk is also read, tokenized and written meanwhile."""
_PATIENCE: Final = 120.0
_BATCH_TEXTS: Final = 20_000


def wait_for_queue(server: Serving, *, busy: bool) -> None:
    """Return once bulk is queued, or once nothing is queued."""
    end = time.monotonic() + _PATIENCE
    while (total(server.metrics(), "whimbrel_queue_tokens") > 0) != busy:
        if time.monotonic() > end:
            raise SystemExit(f"the queue did not become {'busy' if busy else 'empty'}")
        time.sleep(0.1)
    time.sleep(1.0)  # running batches end, and new ones begin


@contextmanager
def bulk_clients(target: Target, num_clients: int, seconds: float, *, seed: int) -> Generator[None]:
    """Let clients send bulk for some seconds, and wait for their answers."""
    texts = chunks(make_texts(_BULK_TEXTS * num_clients, words=(4, 60), seed=seed), _BULK_TEXTS)
    load = Load(concurrency=num_clients, duration=seconds + 2.0, processes=1)
    with ThreadPoolExecutor(1) as pool:
        bulk = pool.submit(target.run, [Sample(tuple(each)) for each in texts], load)
        yield
        note(f"{bulk.result().all_answered().completed} requests of bulk were answered in full")


@contextmanager
def batch_file(server: Serving, num_texts: int, *, seed: int) -> Generator[None]:
    """Let the server run a batch file with this number of texts to a line, and cancel it at the end."""
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"input": texts}})
        for number, texts in enumerate(chunks(make_texts(_BATCH_TEXTS, words=(4, 60), seed=seed), num_texts))
    ]
    with httpx2.Client(base_url=f"{server.url}/v1", timeout=60, trust_env=False) as client:
        sent = client.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", "\n".join(lines).encode())})
        asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        path = f"/batches/{client.post('/batches', json=asked).json()['id']}"
        yield
        seen = client.post(f"{path}/cancel").json()
        if seen["status"] != "cancelling":
            raise SystemExit(f"the batch is {seen['status']} before the queries are answered")
        while (seen := client.get(path).json())["status"] == "cancelling":
            time.sleep(0.1)
        of_these = len(client.get(f"/files/{seen['output_file_id']}/content").content.splitlines())
        note(f"{of_these} lines of the batch were answered")


def main() -> None:
    args = options(__doc__, rounds=5, queries=300, bulk=2, batch=0, serve="").parse_args()
    plan = default_plan(args.dtype)
    found: dict[str, list[tuple[Result, list[Sample]]]] = {"idle": [], "beside a batch" if args.batch else "beside bulk": []}
    arguments = f"--max-queue-seconds 3600 {args.serve}"
    with (
        tempfile.TemporaryDirectory() as folder,
        served(plan.dtype, f"{arguments} --set batch_dir={folder}") as (server, target),
    ):
        alone = Load(concurrency=1, num_warmups=20, keep_bodies=True, processes=1)
        for number in range(args.rounds):
            note(f"round {number + 1} of {args.rounds}")
            queries = [Sample((text,)) for text in make_texts(args.queries, words=(12, 12), seed=number)]
            target.warm_up(queries, alone)
            idle = target.run(queries, alone).all_answered()
            seconds = max(idle.duration, _MIN_SECONDS)
            seed, load = 1000 + number, Load(concurrency=1, duration=seconds, keep_bodies=True, processes=1)
            other = (
                batch_file(server, args.batch, seed=seed) if args.batch else bulk_clients(target, args.bulk, seconds, seed=seed)
            )
            with other:
                wait_for_queue(server, busy=True)
                beside = target.run(queries, load).all_answered()
            wait_for_queue(server, busy=False)
            for name, result in zip(found, (idle, beside), strict=True):
                found[name].append((result, queries))
    wrong, _ = count_wrong(target, [run for runs in found.values() for run in runs], plan.dtype)
    if wrong:
        raise SystemExit(f"{wrong} vectors of the server are not the engine's")
    report({name: [1e3 * result.latencies for result, _ in runs] for name, runs in found.items()})
    other = {"texts_of_a_line": args.batch} if args.batch else {"clients_of_bulk": args.bulk}
    print_setting(plan, rounds=args.rounds, queries=args.queries, **other)


def report(latencies: dict[str, list[np.ndarray]]) -> None:
    """Print the table of milliseconds, by name and round."""
    rows: list[list[str]] = []
    percentiles: list[np.ndarray] = []
    for name, rounds in latencies.items():
        together = np.concatenate(rounds)
        percentiles.append(np.percentile(together, [50, 99]))
        each = [np.percentile(one, 99) for one in rounds]
        p50, p99 = (f"{value:,.1f}" for value in percentiles[-1])
        rows.append([name, f"{together.size:,}", p50, p99, f"{together.max():,.1f}", f"{min(each):,.1f} to {max(each):,.1f}"])
    rows.append(["ratio", "", *(f"{ratio:.2f}" for ratio in percentiles[1] / percentiles[0]), "", ""])
    print_table(["queries, ms", "number", "p50", "p99", "slowest", "p99 of rounds"], rows)


if __name__ == "__main__":
    main()
