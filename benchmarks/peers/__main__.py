"""Whimbrel against other engines and servers: the same texts and weights, each peer with its own packages, rounds interleaved.

    python benchmarks/peers [--only NAME ...] [--tasks dense,rerank,token-vectors,sparse] [--kind engines|servers]
                            [--workload NAME] [--rounds 3] [--quick] [--out results.json] [--build build/peers]
                            [--table peers.toml]

The table of peers is peers.toml. Its environments are built below --build by pip, once. Checkpoints are written there too
(models.py) and exported to OpenVINO. A peer that cannot be installed, exported, started or run is a row with the
reason, and its log is kept. After Ctrl-C the rounds so far are reported.

Engines: each peer has a process of its own for each checkpoint, all warmed up, and one works at a time on all cores while
the others are stopped. Rounds take turns in rotating order. Before any is timed, its rows are compared with those of Sentence
Transformers in float32.
Servers: each has a port of its own, and one gets load at a time.

A ratio is the peer's median over that of Whimbrel in bfloat16; of engines, in float32 where a processor has no bfloat16.
Above 1 Whimbrel is faster. Bare OpenVINO runs in a loop of ours that sorts texts by length and runs a batch on each core
(adapters/run_openvino.py).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import note, options
from engines import measure_engines
from environments import Builder, Peer, read_table
from measure import Run
from models import write_model
from report import print_report, setting, to_rows
from servers import SERVED, measure_servers
from workloads import MODELS, make_calibration, make_workloads

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_engines(run: Run, peers: list[Peer], args: argparse.Namespace) -> None:
    """Measure all engines, one checkpoint after another."""
    texts = run.builder.build / "calibration.json"
    texts.write_text(json.dumps(make_calibration()))
    for model, task in MODELS.items():
        workloads = [each for each in make_workloads(quick=args.quick) if each.model == model and args.workload in each.name]
        if task not in args.tasks or not workloads:
            continue
        folder = write_model(run.builder.build / "models", model)
        able: list[Peer] = []
        for peer in peers:
            with run.noting(f"{peer.name}, {model}"):
                if task in peer.tasks:
                    run.builder.export(peer, folder, task, texts)
                    able.append(peer)
        measure_engines(run, folder, able, workloads)


def run_servers(run: Run, peers: list[Peer], args: argparse.Namespace) -> None:
    """Measure all servers, one task after another."""
    for task, model in SERVED.items():
        if task in args.tasks:
            measure_servers(run, task, write_model(run.builder.build / "models", model), peers)


def main() -> None:
    parser = options(
        __doc__, workload="", kind="", rounds=3, quick=False, build=ROOT / "build/peers", table=HERE / "peers.toml"
    )
    parser.add_argument("--only", action="append", default=[], help="peers whose name contains this")
    parser.add_argument("--tasks", default="dense,rerank,token-vectors,sparse", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    table = read_table(args.table)
    (args.build / "logs").mkdir(parents=True, exist_ok=True)
    run = Run(Builder(table, args.build.resolve()), args.rounds, args.quick)
    wanted = [peer for peer in table.peers if not args.only or any(name in peer.name for name in args.only)]
    peers: list[Peer] = []
    for peer in wanted:
        with run.noting(peer.name):
            if set(peer.tasks) & set(args.tasks):
                note(f"installing {peer.name}")
                run.builder.install(peer.environment)
                peers.append(peer)
    try:
        if peers and args.kind != "servers":
            run_engines(run, peers, args)
        if peers and args.kind != "engines":
            run_servers(run, peers, args)
    except KeyboardInterrupt:
        note("interrupted: here are the rounds so far")
    results = setting(run, wanted) | {kind: to_rows(rows) for kind, rows in run.measured.items()}
    print_report(results)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
