"""Tables and JSON of the comparison."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from common import NUM_CORES, commit, print_table
from environments import OURS, SINGLE, Peer
from measure import MIN_COSINES, Measured, Run

from whimbrel_bench.machine import processor
from whimbrel_bench.processes import others_cores

_FEATURES: Final = (
    "avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
_COLUMNS: Final = {
    "ratio": "ratio", "fastest": "fastest", "cpu_ratio": "processor time", "cores": "its cores",
    "p50_ms": "p50, ms", "p99_ms": "p99, ms", "client_cores": "generator's cores",
}  # fmt: skip
"""Columns of the tables by their key in the JSON."""


def setting(run: Run, peers: Sequence[Peer]) -> dict[str, Any]:
    """Return the command, the commit, the hardware and the versions."""
    found = torch.cpu.get_capabilities()  # of lesser_cpu.py too, which /proc/cpuinfo knows nothing of
    features = [each for each in _FEATURES if found.get(each)]
    table = run.builder.table.environments
    environments = {peer.environment for peer in peers if run.builder.python(peer.environment).exists()}
    return {
        "command": " ".join(["python benchmarks/peers", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": {"cpu": processor(), "cores": NUM_CORES, "features": features},
        "others_cores": round(others_cores(), 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "rounds": run.rounds,
        "versions": {name: table[name].get("packages", []) + table[name].get("alone", []) for name in sorted(environments)},
        "failures": run.failures,
    }


def to_rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows of the JSON. Ratios are to Whimbrel's row for the same workload, in bfloat16 if there is one."""
    timed = [row for row in measured if row.rounds]
    return [_row(row, {each.peer.name: each for each in timed if each.workload == row.workload}) for row in timed]


def _row(row: Measured, same: dict[str, Measured]) -> dict[str, Any]:
    ours = same.get(OURS, same.get(SINGLE))
    ratios = [theirs / mine for mine, theirs in zip(ours.seconds, row.seconds, strict=False)] if ours else []
    found = {
        "workload": row.workload,
        "model": row.model,
        "tokens": row.tokens,
        "peer": row.peer.name,
        "dtype": row.peer.dtype,
        "seconds": [round(each, 5) for each in row.seconds],
        "median": round(row.median, 5),
        "ratio": round(row.median / ours.median, 3) if ours else None,
        "cpu": round(median(row.cpu), 2),
        "cpu_ratio": round(median(row.cpu) / median(ours.cpu), 3) if ours and all(ours.cpu) else None,
        "fastest": round(min(row.seconds) / min(ours.seconds), 3) if ours else None,
        "rounds": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
        "cosine": row.cosine,
        "wrong": row.is_wrong,
        "cores": round(max(cpu / each for cpu, each in zip(row.cpu, row.seconds, strict=True)), 2),
        "idle_cores": round(row.idle_cores, 3),
    }
    if latencies := [1e3 * each for one in row.rounds for each in one.latencies]:
        p50, p99 = np.percentile(latencies, [50, 99]).round(2).tolist()
        found |= {"p50_ms": p50, "p99_ms": p99, "client_cores": round(max(one.client_cores for one in row.rounds), 2)}
    return found


def print_report(results: dict[str, Any]) -> None:
    for kind, unit in (("engines", "tokens"), ("servers", "texts")):
        if rows := results[kind]:
            _print_kind(kind, unit, rows)
    if results["failures"]:
        print("\nNot measured:")
        print_table(["peer", "reason"], [[name, reason.replace("|", "\\|")] for name, reason in results["failures"].items()])
    hardware = results["hardware"]
    cores = f"{hardware['cores']} cores, of which other work took {results['others_cores']}, {', '.join(hardware['features'])}"
    print(f"\n`{results['command']}` (commit {results['commit']}, {hardware['cpu']}, {cores})")


def _print_kind(kind: str, unit: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of ratios, with a row for each peer and a column for each workload, then a table for each workload."""
    workloads, peers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("workload", "peer"))
    found = {(row["peer"], row["workload"]): row for row in rows}
    print("\nRatios: the peer's median over that of Whimbrel in bfloat16 (float32 if that's all). Above 1 Whimbrel is faster.")
    print_table([kind, *workloads], [[peer, *(_ratio(found.get((peer, each))) for each in workloads)] for peer in peers])
    for workload in workloads:
        these = [row for row in rows if row["workload"] == workload]
        columns = {key: name for key, name in _COLUMNS.items() if key in these[0]}
        print(f"\n{workload}, {these[0]['tokens']:,} {unit}:")
        header = [kind, "dtype", "ms", f"{unit}/s", *columns.values(), "rounds", "smallest cosine"]
        print_table(header, [_cells(row, columns) for row in these])
    limits = ", ".join(f"{dtype} {limit}" for dtype, limit in MIN_COSINES.items())
    reference = "Sentence Transformers in float32" if kind == "engines" else OURS
    print(f"\nThe cosine is to {reference}; for scores it is their correlation. Wrong: below {limits}.")
    print("Processor time is the ratio of the processes' seconds on all cores, which other work changes less.")
    print(f"Those that waited took at most {max(row['idle_cores'] for row in rows):.2f} cores.")


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return "wrong" if row["wrong"] else _number(row["ratio"])


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.2f}"


def _cells(row: dict[str, Any], columns: dict[str, str]) -> list[str]:
    between = "n/a" if row["rounds"] is None else "{:.2f} to {:.2f}".format(*row["rounds"])
    cosine = "n/a" if row["cosine"] is None else f"{row['cosine']:.6f}" + (" wrong" if row["wrong"] else "")
    seconds = f"{1e3 * row['median']:,.1f}", f"{row['tokens'] / row['median']:,.1f}"
    return [row["peer"], row["dtype"], *seconds, *(_number(row[key]) for key in columns), between, cosine]
