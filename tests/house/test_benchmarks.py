"""Benchmarks still run. Their numbers are not looked at: timings belong in BENCHMARKS.md."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = Path("/proc/cpuinfo")


def test_it_runs() -> None:
    command = [sys.executable, str(FOLDER / "engine.py"), "--models", "minilm", "--tokens", "32", "--rounds", "1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "one text of 32 tokens at a time, 8 threads; 256 at a time" in done.stdout


@pytest.mark.skipif(
    not CPU.exists() or "cpuid_fault" not in CPU.read_text() or shutil.which("cc") is None,
    reason="needs a processor whose CPUID can fault, and a C compiler",
)
def test_libraries_see_a_lesser_processor() -> None:
    """A child sees it too, and a fault that is not CPUID's still ends a program."""
    program = """if True:
        import ctypes, subprocess, sys, torch
        has = torch.cpu.get_capabilities()
        print(has["avx2"], has["avx512_f"], has["avx512_bf16"], torch.backends.cpu.get_cpu_capability())
        child = subprocess.run([sys.executable, "-c", "import torch; print(torch.cpu._is_avx512_supported())"], text=True, stdout=-1)
        print(child.stdout.strip(), flush=True)
        ctypes.string_at(0)"""
    command = [sys.executable, str(FOLDER / "lesser_cpu.py"), "avx2", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["True", "False", "False", "AVX2", "False"], done.stderr
    assert done.returncode == 128 + 11


def gpu_benchmark(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "gpu"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def outcomes(out: Path) -> dict[str, str]:
    """Return the end of each step."""
    lines = (out / "results.jsonl").read_text().splitlines()
    return {line["step"]: line["status"] for line in map(json.loads, lines)}


def test_the_estimates_of_the_steps_fit_into_the_time_of_a_run_on_a_gpu(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path, "--plan")
    *steps, last = [line.split() for line in done.stdout.splitlines()]
    assert int(last[0]) == sum(int(step[0]) for step in steps) <= 420
    assert not list(tmp_path.iterdir())


def test_the_steps_for_a_gpu_run_on_a_cpu_in_small(tmp_path: Path) -> None:
    """All but the tests for a GPU, and the files are few."""
    done = gpu_benchmark(tmp_path, "--small")
    found = outcomes(tmp_path)
    assert done.returncode == 0, done.stdout
    assert set(found.values()) <= {"ok", "needs a GPU"}
    assert [name for name, end in found.items() if end != "ok"] in (["tests"], [])
    assert len(found) == 10
    assert done.stdout[:500] == (tmp_path / "table.md").read_text()[:500]
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_run_on_a_gpu_that_is_interrupted_keeps_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu"), "--out", str(tmp_path), "--small", "--only", "facts,kernels,host"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "kernels" not in process.stderr.readline():
            pass
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert outcomes(tmp_path) == {"facts": "ok", "kernels": "stopped"}
    assert "facts:" in printed


def test_a_step_on_a_gpu_that_takes_too_long_keeps_its_rows(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef run(*_):\n    yield {'a': 1}\n    time.sleep(60)\n")
    program = f"""if True:
        import runpy, sys
        from pathlib import Path
        sys.path.insert(0, {str(FOLDER / "gpu")!r})
        run_step = runpy.run_path({str(FOLDER / "gpu/__main__.py")!r})["run_step"]
        from plan import Step
        print(run_step(Step("slow", 1, "slow", ""), Path({str(tmp_path)!r}), 5.0, small=True))"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert "status='killed after 5 s'" in done.stdout, done.stderr
    assert "rows=[{'a': 1}]" in done.stdout
