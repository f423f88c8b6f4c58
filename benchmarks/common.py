"""Shared by all scripts: texts, the packaged model's plan and tokens, tables and conditions."""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.prepare import Preprocessor
from whimbrel.model.runner import probe
from whimbrel.types.plan import Options, Plan, make_plan
from whimbrel.types.request import Request
from whimbrel_bench.backends import Sample
from whimbrel_bench.machine import describe_machine
from whimbrel_bench.processes import others_cores
from whimbrel_bench.results import Result
from whimbrel_bench.server import Serving, serving
from whimbrel_bench.tables import table
from whimbrel_bench.target import Target, TargetOptions

T = TypeVar("T")

FOLDER: Final = resolve_checkpoint(None).folder
NUM_CORES: Final = len(os.sched_getaffinity(0))
MIXED: Final = (4, 200)
SHORT: Final = (4, 24)


def make_texts(count: int, *, words: tuple[int, int] = MIXED, seed: int = 0) -> list[str]:
    """Return `count` random texts with a number of words in the range `words`, both ends included.

    Words are the tokenizer's whole words, which are about in the order of their frequency, drawn by Zipf's law. One in ten is
    made of two words and splits into subwords, as rare words do. One in eight ends a sentence or has a comma.
    """
    rng = random.Random(seed)
    vocab: dict[str, int] = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    whole = [word for word in sorted(vocab, key=vocab.__getitem__) if len(word) > 1 and word.isascii() and word.isalpha()]
    cum_weights = list(accumulate(1 / (rank + 3) for rank in range(len(whole))))

    def draw(k: int) -> list[str]:
        return rng.choices(whole, cum_weights=cum_weights, k=k)

    def text(num_words: int) -> str:
        drawn = [word + draw(1)[0] if rng.random() < 0.1 else word for word in draw(num_words)]
        marks = rng.choices(["", ",", "."], weights=[14, 1, 1], k=num_words - 1)
        drawn = [word.capitalize() if before == "." else word for word, before in zip(drawn, [".", *marks], strict=True)]
        return " ".join(word + mark for word, mark in zip(drawn, [*marks, "."], strict=True))

    return [text(rng.randint(*words)) for _ in range(count)]


def chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Return lists of `size` items."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def default_plan(dtype: str) -> Plan:
    """Return the plan by which the engine runs the packaged model here."""
    return make_plan(Options(dtype=dtype), read_card(FOLDER, FOLDER.name), probe())


def count_tokens(texts: Sequence[str], max_length: int | None = None) -> int:
    """Return the number of tokens that the packaged model computes for `texts`, cut to its limit or to `max_length`."""
    card = read_card(FOLDER, FOLDER.name)
    plan = make_plan(Options(max_length=max_length), card, probe())
    return Preprocessor(FOLDER, card, plan).preprocess(Request(texts)).num_tokens


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with --dtype, and an option of the same type for each default; False is a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", help="default: %(default)s")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
    return parser


@contextmanager
def served(dtype: str, arguments: str = "", *, encoding_format: str = "base64") -> Generator[tuple[Serving, Target]]:
    """Run `whimbrel serve` with the packaged model and further arguments, and yield it with a target for load."""
    with serving(None, "--dtype", dtype, *shlex.split(arguments)) as server:
        target = Target(server.url, TargetOptions(extra_body={"encoding_format": encoding_format}))
        target.connect()
        yield server, target


def count_wrong(target: Target, runs: Iterable[tuple[Result, Sequence[Sample]]], dtype: str) -> tuple[int, int]:
    """Return the number of kept answers whose vectors are not bit by bit those of the in-process Engine, and of all."""
    from whimbrel import Engine

    answers = [(samples[index], rows) for result, samples in runs for index, rows in target.rows(result).items()]
    with Engine(dtype=dtype) as engine:
        expected = {each: engine.embed(list(each.texts), truncate=True) for each in {sample for sample, _ in answers}}
    return sum(not np.array_equal(np.stack(rows), expected[sample]) for sample, rows in answers), len(answers)


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table. The first column is text, the others are numbers."""
    print(f"\n{table(head, [[str(cell) for cell in row] for row in rows])}")


def commit() -> str:
    """Return the commit of the checkout, and whether its sources are others; "unknown" in a copy without git's folder."""
    git = ("git", "-C", str(Path(__file__).parent))
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        return "unknown"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../src"], check=False).returncode
    return found + (" with changes in src" if changed else "")


def print_setting(plan: Plan | None, **settings: object) -> None:
    """Print one line with the machine, the versions and the load."""
    parts = [f"commit {commit()}", describe_machine(), f"of which other work took {others_cores():.2f}"]
    parts += [f"torch {version('torch')}", *([f"device {plan.device}", plan.dtype] if plan is not None else [])]
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in settings.items()]
    print(f"\n{re.sub(r' +', ' ', ', '.join(parts))}")
