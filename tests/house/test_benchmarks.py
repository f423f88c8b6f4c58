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
    assert int(last[0]) == sum(int(step[0]) for step in steps) <= 420 - 10  # seconds to stop a step, and for the table
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_the_steps_for_a_gpu_run_on_a_cpu_in_small(tmp_path: Path) -> None:
    """All but the tests for a GPU. The files are few, and those of an earlier run stay."""
    (tmp_path / "results.jsonl").write_text("earlier")
    done = gpu_benchmark(tmp_path, "--small")
    assert (tmp_path / "before/results.jsonl").read_text() == "earlier"
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


def test_a_run_on_a_gpu_needs_a_folder_and_a_time(tmp_path: Path) -> None:
    """It says so before it begins."""
    done = gpu_benchmark(Path("/dev/null/there"), "--only", "facts")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("/dev/null/there: Not a directory.")
    for option in ("--seconds=nan", "--seconds=0", "--only=speed"):
        done = gpu_benchmark(tmp_path, option)
        assert done.returncode == 2
        assert option.partition("=")[0] in done.stderr


def test_a_step_on_a_gpu_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    """Its server would hold the memory of the card. The last line is the command that runs the step again."""
    (tmp_path / "orphan.py").write_text(
        "import os, subprocess\n"
        "def run(*_):\n"
        "    yield {'pid': subprocess.Popen(['sleep', '60'], start_new_session=True).pid}\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    program = f"""if True:
        import runpy, sys
        sys.path.insert(0, {str(FOLDER / "gpu")!r})
        import plan
        plan.STEPS = (plan.Step("orphan", 5, "orphan", ""),)
        sys.argv = ["benchmarks/gpu", "--out", {str(tmp_path)!r}]
        runpy.run_path({str(FOLDER / "gpu")!r}, run_name="__main__")"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1, done.stderr
    assert outcomes(tmp_path) == {"orphan": "ended with -9"}
    assert done.stdout.splitlines()[-1].endswith("benchmarks/gpu --seconds 300 --only orphan")
    pid = json.loads((tmp_path / "results.jsonl").read_text())["rows"][0]["pid"]
    assert not Path(f"/proc/{pid}").exists()


def test_weights_that_are_drawn_take_no_place_on_the_disk(tmp_path: Path) -> None:
    """They are as those that are written: vectors of different texts differ, and a second load gives the same."""
    program = f"""if True:
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(FOLDER / "gpu")!r})
        from workloads import write_hollow
        from whimbrel import Engine
        from whimbrel_bench.random_models import Size, write_gritlm
        folder = Path({str(tmp_path)!r})
        write_hollow(lambda path: write_gritlm(path, Size(64, 128, 2, 4, 2, 16)), folder)
        for _ in range(2):
            with Engine(str(folder), dtype="float32") as engine:
                one, other = engine.embed(["the of and to", "a system"])
            print(f"{{one @ one:.4f}} {{one @ other:.4f}} {{one[0]:.6f}}")"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "WHIMBREL_RUNNER": "drawn:as_it_is"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=env)
    first, second = done.stdout.splitlines()
    norm, cosine, _ = map(float, first.split())
    assert first == second
    assert norm == 1.0
    assert abs(cosine) < 0.99
    weights = (tmp_path / "model.safetensors").stat()
    assert weights.st_size > 3e6
    assert weights.st_blocks * 512 < 1e5


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
