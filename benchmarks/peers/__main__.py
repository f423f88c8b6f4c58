"""Whimbrel against other engines and servers: the same texts and weights, each peer with its own packages, rounds interleaved.

    python benchmarks/peers [--only NAME ...] [--tasks dense,rerank,token-vectors,sparse] [--kind engines|servers]
                            [--workload NAME] [--rounds 3] [--quick] [--out results.json] [--build build/peers]
                            [--table peers.toml]

The table of peers is peers.toml. Its environments are built below --build by pip, once. Checkpoints are written there too
(models.py) and exported to ONNX and OpenVINO. A peer that cannot be installed, exported, started or run is a row with the
reason, and its log is kept. After Ctrl-C the rounds so far are reported.

Engines: each peer has a process of its own for each checkpoint, all warmed up, and one works at a time on all cores while
the others are stopped. Rounds take turns in rotating order. Before any is timed, its rows are compared with those of Sentence
Transformers in float32.
Servers: each has a port of its own, and one gets load at a time.

A ratio is the peer's median over that of Whimbrel in bfloat16; of engines, in float32 where a processor has no bfloat16.
Above 1 Whimbrel is faster. Bare ONNX Runtime and OpenVINO run in a loop of ours that sorts texts by length and runs a batch on
each core (adapters/batches.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import note, options
from engines import measure_engines
from environments import Builder, Peer, PeerFailure, read_table
from measure import Measured
from models import write_models
from report import print_report, setting, to_rows
from servers import SERVED, measure_servers
from workloads import MODELS, make_calibration, make_workloads

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def install(peers: list[Peer], builder: Builder, failures: dict[str, str]) -> list[Peer]:
    """Build the environments and return the peers that have one."""
    for peer in peers:
        note(f"installing {peer.name}")
        try:
            builder.install(peer.environment)
        except PeerFailure as failure:
            failures[peer.name] = str(failure)
    return [peer for peer in peers if peer.name not in failures]


def export(peers: list[Peer], model: str, folder: Path, builder: Builder, failures: dict[str, str]) -> list[Peer]:
    """Export one checkpoint for the peers that need that, and return the peers that can run it."""
    texts = builder.build / "calibration.json"
    texts.write_text(json.dumps(make_calibration()))
    able: list[Peer] = []
    for peer in peers:
        try:
            if peer.exports:
                builder.export(peer.exports, folder, MODELS[model], texts)
            able.append(peer)
        except PeerFailure as failure:
            failures[f"{peer.name}, {model}"] = str(failure)
    return able


def run_engines(
    peers: list[Peer], args: argparse.Namespace, builder: Builder, *, found: list[Measured], failures: dict[str, str]
) -> None:
    """Measure all engines, one checkpoint after another."""
    for model, task in MODELS.items():
        workloads = [each for each in make_workloads(quick=args.quick) if each.model == model and args.workload in each.name]
        if task in args.tasks and workloads:
            folder = write_models(builder.build / "models", [model])[model]
            able = export([peer for peer in peers if task in peer.tasks], model, folder, builder, failures)
            measure_engines(folder, able, builder, workloads, args.rounds, found=found, failures=failures)


def run_servers(
    peers: list[Peer], args: argparse.Namespace, builder: Builder, *, found: list[Measured], failures: dict[str, str]
) -> None:
    """Measure all servers, one task after another."""
    for task, model in SERVED.items():
        if task in args.tasks:
            folder = write_models(builder.build / "models", [model])[model]
            measure_servers(task, folder, peers, builder, args.rounds, quick=args.quick, found=found, failures=failures)


def main() -> None:
    """Run the comparison."""
    parser = options(
        __doc__, workload="", kind="", rounds=3, quick=False, build=ROOT / "build/peers", table=HERE / "peers.toml"
    )
    parser.add_argument("--only", action="append", default=[], help="peers whose name contains this")
    parser.add_argument("--tasks", default="dense,rerank,token-vectors,sparse", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    table = read_table(args.table)
    (args.build / "logs").mkdir(parents=True, exist_ok=True)
    builder = Builder(table, args.build.resolve())
    wanted = [peer for peer in table.peers if not args.only or any(name in peer.name for name in args.only)]
    failures: dict[str, str] = {}
    peers = install([peer for peer in wanted if set(peer.tasks) & set(args.tasks)], builder, failures)
    measured, served = list[Measured](), list[Measured]()
    try:
        if peers and args.kind != "servers":
            run_engines(peers, args, builder, found=measured, failures=failures)
        if peers and args.kind != "engines":
            run_servers(peers, args, builder, found=served, failures=failures)
    except KeyboardInterrupt:
        note("interrupted: here are the rounds so far")
    results: dict[str, Any] = setting(builder, wanted, failures, args.rounds)
    results |= {"engines": to_rows([row for row in measured if row.rounds])}
    results |= {"servers": to_rows([row for row in served if row.rounds])}
    print_report(results)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
