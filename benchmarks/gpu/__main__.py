"""Everything that is to be known of Whimbrel on one GPU, in one command of at most 420 seconds.

    python benchmarks/gpu [--seconds 420] [--only a,b] [--skip a,b] [--small] [--plan]

The steps (plan.py, printed by --plan) stand in the order of their value. Each is a process of its own with a limit. None is
begun whose estimate does not fit into the time left. After each, its rows are added to $OUT/results.jsonl and $OUT/table.md is
written anew; the table is printed at the end. $OUT is build/gpu by default. Beside these it gets log.txt, profiles.txt and the
junit files of the tests. --small takes tiny sizes, and a CPU where there is no GPU. After Ctrl-C, or if a step is killed, the
rows so far stay. The exit status is 0 if all that ran was right. A machine without our dependencies: see `carry`.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

import orjson
from plan import SECONDS, STEPS, Step, table_of_steps
from report import Outcome, markdown

from whimbrel_bench.processes import family

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]
NAMES: Final = [step.name for step in STEPS]
_PATIENCE: Final = 10.0
"""Seconds in which a step that is stopped must end its processes."""
_PRINTED: Final = 11_000
"""Characters of the table that are printed. It is whole in table.md."""


def main() -> int:
    args = read_arguments()
    if args.plan:
        print(table_of_steps())
        return 0
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results.jsonl", "log.txt", "profiles.txt"):
        (out / name).unlink(missing_ok=True)
    end, outcomes, text = monotonic() + args.seconds, list[Outcome](), ""
    for step in [step for step in STEPS if step.name in (args.only or NAMES) and step.name not in args.skip]:
        left = end - monotonic()
        if left < (2 if args.small else step.seconds):
            outcome = Outcome(step.name, "no time", 0.0, [])
        else:
            print(f"{step.name} ...", file=sys.stderr, flush=True)
            outcome = run_step(step, out, min(2.0 * step.seconds, left), small=args.small)
        outcomes.append(outcome)
        with (out / "results.jsonl").open("ab") as results:
            results.write(orjson.dumps(outcome) + b"\n")
        text = markdown(outcomes)
        (out / "table.md").write_text(text, encoding="utf-8")
        if outcome.status == "stopped":
            break
    print(text if len(text) <= _PRINTED else f"{text[:_PRINTED]}\n\n(cut; the rest is in {out / 'table.md'})")
    if again := [each.step for each in outcomes if each.is_wrong or each.status == "no time"]:
        print(f"again: --only {','.join(again)}")
    return 130 if text and outcomes[-1].status == "stopped" else int(any(each.is_wrong for each in outcomes))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def steps(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in NAMES]:
            raise argparse.ArgumentTypeError(f"no step {unknown[0]!r}; there are {', '.join(NAMES)}")
        return found

    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
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
            stop(process)
        found: list[dict[str, object]] = [orjson.loads(line) for line in _whole_lines(rows)]
    if not status:
        status = "ok" if process.returncode == 0 else f"ended with {process.returncode}"
    if found and "status" in found[-1]:
        status = str(found.pop()["status"])
    if status == "ok" and any("wrong" in row for row in found):
        status = "wrong"
    return Outcome(step.name, status, monotonic() - started, found)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step, so that it stops its server and its tests, and kill its other processes."""
    processes = family(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(_PATIENCE)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _whole_lines(file: Path) -> Sequence[bytes]:
    return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
