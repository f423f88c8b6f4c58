"""Everything that is to be known of Whimbrel on one GPU, in one command of at most 420 seconds.

    python benchmarks/gpu [--seconds 420] [--only a,b] [--skip a,b] [--small] [--plan]

The steps (plan.py, printed by --plan) stand in the order of their value. Each is a process of its own with a limit. None is
begun whose estimate does not fit into the time left. After each, its rows are added to $OUT/results.jsonl and $OUT/table.md is
written anew. At the end the table is printed, and the command that runs again what failed or had no time. $OUT is build/gpu by
default. Beside these it gets log.txt, profiles.txt and the junit files of the tests; an earlier run's move to $OUT/before.
--small takes tiny sizes, and a CPU where there is no GPU. After Ctrl-C, or if a step is killed, the rows so far stay. The exit
status is 0 if all that ran was right. Without --small a step that lacks a GPU is not. A machine without our dependencies: see
`carry`.
"""

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import orjson
from plan import ROOM, SECONDS, STEPS, Step, table_of_steps
from report import Outcome, markdown

from whimbrel_bench.processes import family

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]
NAMES: Final = [step.name for step in STEPS]
_PATIENCE: Final = ROOM - 2.0
"""Seconds in which a step that is stopped must end its processes."""
_PRINTED: Final = 11_000
"""Characters of the table that are printed. It is whole in table.md."""
_AGAIN: Final = 300
"""Seconds of the second call that is printed."""
_SET_CHILD_SUBREAPER: Final = 36
"""Option of prctl(2) by which processes whose parent died become children of this one."""


def main() -> int:
    args = read_arguments()
    if args.plan:
        print(table_of_steps())
        return 0
    end = monotonic() + args.seconds - ROOM
    out = Path(args.out).absolute()
    try:
        make_folder(out)
    except OSError as error:
        print(f"{out}: {error.strerror}. --out or OUT names another folder.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outcomes, text = list[Outcome](), ""
    for step in [step for step in STEPS if step.name in (args.only or NAMES) and step.name not in args.skip]:
        left = end - monotonic()
        if left < (2 if args.small else step.seconds):
            outcome = Outcome(step.name, "no time", 0.0, [])
        else:
            print(f"{step.name} ...", file=sys.stderr, flush=True)
            outcome = run_step(step, out, left if args.small else min(2.0 * step.seconds, left), small=args.small)
        outcomes.append(outcome)
        with (out / "results.jsonl").open("ab") as results:
            results.write(orjson.dumps(outcome) + b"\n")
        text = markdown(outcomes)
        (out / "table.md").write_text(text, encoding="utf-8")
        if outcome.status == "stopped":
            break
    print(text if len(text) <= _PRINTED else f"{text[:_PRINTED]}\n\n(cut; the rest is in {out / 'table.md'})")
    if again := [each.step for each in outcomes if each.is_wrong or each.status == "no time"]:
        print(f"again: {second_call(again, small=args.small)}")
    if outcomes and outcomes[-1].status == "stopped":
        return 130
    return int(any(each.is_wrong or (each.status == "needs a GPU" and not args.small) for each in outcomes))


def make_folder(out: Path) -> None:
    """Make the folder of the files, and move those of an earlier run to a folder in it. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").touch()
    if (out / "results.jsonl").exists():
        shutil.rmtree(out / "before", ignore_errors=True)
        (out / "before").mkdir()
        for file in [file for file in out.iterdir() if file.suffix in (".jsonl", ".md", ".txt", ".xml")]:
            file.rename(out / "before" / file.name)


def second_call(steps: Sequence[str], *, small: bool) -> str:
    """Return the command that runs these steps again, where this one ran."""
    path = f"PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} " if "PYTHONPATH" in os.environ else ""
    time = "--small" if small else f"--seconds {_AGAIN}"
    return f"{path}{shlex.quote(sys.executable)} {shlex.quote(sys.argv[0])} {time} --only {','.join(steps)}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def steps(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in NAMES]:
            raise argparse.ArgumentTypeError(f"no step {unknown[0]!r}; there are {', '.join(NAMES)}")
        return found

    def positive(text: str) -> float:
        if not 0 < (number := float(text)) < 1e6:
            raise ValueError
        return number

    parser.add_argument("--seconds", type=positive, default=SECONDS, help="default: %(default)s")
    parser.add_argument("--only", type=steps, default=[], metavar="STEPS")
    parser.add_argument("--skip", type=steps, default=[], metavar="STEPS")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--plan", action="store_true", help="print the steps and run nothing")
    parser.add_argument("--out", default=os.environ.get("OUT", ROOT / "build/gpu"), help="default: $OUT, else build/gpu")
    return parser.parse_args()


def run_step(step: Step, out: Path, limit: float, *, small: bool) -> Outcome:
    """Run a step in a session of its own, and return its rows, also if it had to be stopped."""
    started, status = monotonic(), ""
    with tempfile.TemporaryDirectory() as folder, (out / "log.txt").open("a") as log:
        rows = Path(folder) / "rows.jsonl"
        log.write(f"\n===== {step.name} =====\n")
        log.flush()
        command = [sys.executable, str(FOLDER / "step.py"), step.module, step.name, str(out), str(rows), *["small"] * small]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"killed after {limit:.0f} s"
        except KeyboardInterrupt:
            status = "stopped"
        if status:
            interrupt(process)
        end_processes()
        found: list[dict[str, object]] = [orjson.loads(line) for line in _whole_lines(rows)]
    if not status:
        status = "ok" if process.returncode == 0 else f"ended with {process.returncode}"
    if found and "status" in found[-1]:
        status = str(found.pop()["status"])
    if status == "ok" and any("wrong" in row for row in found):
        status = "wrong"
    return Outcome(step.name, status, monotonic() - started, found)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step, so that it stops its server and its tests, and kill it if it does not end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def end_processes() -> None:
    """Kill what a step that ended has left running, so that the next has the device to itself, and wait for a second."""
    end = monotonic() + 1.0
    while (left := family(os.getpid())[1:]) and monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        sleep(0.01)


def _whole_lines(file: Path) -> Sequence[bytes]:
    return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
