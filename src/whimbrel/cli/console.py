"""Input and output of the command.

Texts are lines of UTF-8 on stdin. Vectors, cards, plans and tables go to stdout or a file; progress goes to stderr
(progress.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO, FileIO
from itertools import islice
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console

from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.checkpoint.locate import Checkpoint
    from whimbrel.types.card import Card, Output
    from whimbrel.types.plan import Plan

T = TypeVar("T")

_MIN_CHUNK: Final = 64
_MAX_CHUNK: Final = 2048
_CHUNK_SECONDS: Final = 5.0
"""Longest time that a chunk should take, so that results are soon written, also by a slow model."""
_MAX_COLUMNS: Final = 100
_READINGS: Final[dict[str, str]] = {
    "transformers": "as transformers 5 reads it",
    "transformers-4": "as transformers 4 reads it",
    "file": "tokenizer.json as it is",
}
_PER: Final = {"none": "", "text": "", "token": " per token", "entry": " by token id", "vocabulary": " over the vocabulary"}
_TASKS: Final[dict[str, str]] = {
    "dense": "dense embeddings",
    "sparse": "sparse embeddings",
    "multi_vector": "multi-vector embeddings (late interaction)",
    "scores": "scores",
    "token_scores": "classes of tokens",
}


def stderr_console() -> Console:
    """Return a console that writes to stderr and ignores a reader that left."""

    class TolerantConsole(Console):
        def on_broken_pipe(self) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    return TolerantConsole(stderr=True, highlight=False, soft_wrap=True)


def print_card(card: Card, plan: Plan | None, checkpoint: Checkpoint, *, as_json: bool) -> None:
    """Print a card and its plan. `plan` is None where PyTorch is not installed."""
    if as_json:
        about = {"name": checkpoint.name, "revision": checkpoint.revision, "commit": checkpoint.commit}
        print_json({"checkpoint": about, "card": card} | ({} if plan is None else {"plan": plan}))
        return
    write_fields(describe(card, checkpoint))
    typer.echo("\nHere")
    if plan is None:
        typer.echo("  Whimbrel cannot run it yet: pip install 'whimbrel[serve]'")
        return
    same_bits = {None: "found out when the weights are loaded", True: "yes", False: f"no: {plan.same_bits_reason}"}
    write_fields(with_text({
        "device": f"{plan.device}, {count(plan.num_lanes, 'lane')}",
        "GPU": plan.device_note,
        "processor": str(plan.cpu),
        "kernels": plan.device == "cpu" and kernels_of(plan),
        "dtype": plan.dtype,
        "int8": plan.int8 and str(plan.int8),
        "max length": f"{plan.max_length:,} tokens",
        "batch": f"{plan.max_batch_tokens:,} tokens{'; longer texts run in pieces' if plan.chunked_prefill else ''}",
        "batch memory": plan.batch_bytes and memory_of_batches(plan),
        "prefix cache": plan.prefix_cache_bytes and f"{plan.prefix_cache_bytes:,} bytes",
        "tokenizer": describe_tokenizer(card, plan) or "as its class in transformers 5 reads it; tokenizer.json says the same",
        "same bits": same_bits[plan.same_bits],
        "accepted": plan.accept_config and f"{', '.join(plan.accept_config)} (unknown keys)",
    }))  # fmt: skip


def with_text(fields: Mapping[str, object]) -> dict[str, str]:
    return {name: text for name, text in fields.items() if isinstance(text, str) and text}


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_tokenizer(card: Card, plan: Plan) -> str:
    """Return how the tokenizer's files are read, if tokenizer.json, run as it is, gives other ids, or if it is run so."""
    towers = card.towers or (card,)
    reasons = [tower.tokenizer.reason for tower in towers if tower.tokenizer.reason]
    is_usual = plan.tokenizer == "transformers" or card.tokenizer.static is not None
    if is_usual and not reasons and not plan.tokenizer_note:
        return ""
    reading = ", ".join(dict.fromkeys(_READINGS[tower.tokenizer.reading] for tower in towers))
    note = f"tokenizer.json itself {plan.tokenizer_note} (--tokenizer file)" if plan.tokenizer_note else ""
    return "; ".join([reading, *reasons[:1], *([note] if note else [])])


def kernels_of(plan: Plan) -> str:
    return plan.kernels or "PyTorch's, which are slower: Whimbrel's own are not for this processor, were not built, or are off"


def memory_of_batches(plan: Plan) -> str:
    """Return what batches may take beside the weights, with a warning if the device has less."""
    size = f"up to {plan.batch_bytes / 1e6:,.0f} MB"
    taken = plan.num_lanes * plan.batch_bytes
    text = size if plan.num_lanes == 1 else f"{size} in each of {plan.num_lanes} lanes"
    if not 0 < plan.memory < taken:
        return text
    return f"{text}, more than the {plan.memory / 1e6:,.0f} MB of the device; --max-length and --max-batch-tokens lower it"


def describe(card: Card, checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a user wants to know of a model, by its name on the screen."""
    from whimbrel.checkpoint.summary import count_parameters, languages, left_out, stated_architecture

    folder = checkpoint.folder
    number = count_parameters(folder)
    heads = left_out(folder, card)
    by_default = f"; by default: {card.default_prompt_name}" if card.default_prompt_name else ""
    prompts = ", ".join(f"{name} ({text!r})" if text else name for name, text in card.prompts.items()) or "none"
    sizes = ", ".join(map(str, card.matryoshka_dimensions)) or "any number of leading columns"
    branch = "" if checkpoint.revision in ("", checkpoint.commit) else f" ({checkpoint.revision})"
    return with_text({
        "model": card.name,
        "commit": checkpoint.commit and f"{checkpoint.commit}{branch}",
        "task": ", ".join(_task(card, name) for name in card.outputs if card.list_template is None or name == "scores"),
        "architecture": f"{card.encoder.family}, {len(card.encoder.layers)} layers",
        "parameters": "unknown: the weights are not here yet" if number is None else f"{number / 1e6:,.1f} million",
        "max length": f"{card.max_length:,} tokens",
        "languages": ", ".join(languages(folder)) or "not stated",
        "outputs": ", ".join(_shape(name, output) for name, output in card.outputs.items()),
        "prompts": f"{prompts}{by_default}",
        "verified": _verified(card.name),
        "class": stated_architecture(folder, card),
        "left out": heads and f"{', '.join(heads)} (heads that no output uses)",
        "tasks": card.tasks and f"{', '.join(card.tasks)} (adapters); by default: {card.default_adapter or 'none'}",
        "labels": _labels(card),
        "matryoshka": card.matryoshka and f"yes: {sizes}",
    })  # fmt: skip


def _labels(card: Card) -> str:
    if card.span_prompt is not None:
        return "those of a request"
    more = f" and {len(card.labels) - 8} more" if len(card.labels) > 8 else ""
    zero_shot = "; or those of a request (zero-shot)" if card.entailment is not None else ""
    return f"{', '.join(card.labels[:8])}{more}{zero_shot}"


def _task(card: Card, name: str) -> str:
    if name == "scores":
        return "reranking (scores of pairs)" if card.judges_pairs else "classification"
    return _TASKS.get(name, name)


def _shape(name: str, output: Output) -> str:
    if output.spans is not None:
        return f"entities (spans of up to {output.spans.max_words} words)"
    per = _PER[output.rows]
    width = f"{output.default_width} of {output.width}" if 0 < output.default_width < output.width else f"{output.width}"
    modes = f", {' + '.join(output.modes)} pooling" if output.modes else ""
    modes += "" if output.include_prompt else " without the prompt"
    return f"{name}: {width}{per}{modes}{', normalised' if output.activated and output.activation == 'normalize' else ''}"


def _verified(model: str) -> str:
    """Return how far tests verify a model."""
    from whimbrel.checkpoint.verified import format_difference, read_results, rows

    row = next((row for row in rows(read_results()) if row.model == model), None)
    if row is None:
        return "no test copies this model; compare its weights: whimbrel verify MODEL"
    compared = {"layout": "layout-verified with random weights", "weights": "weights-verified"}[row.verified]
    return f"{compared}, to {format_difference(row.difference)} of the reference"


def write_fields(fields: dict[str, str]) -> None:
    """Print names and values. Long values are wrapped at the width of the terminal, or of 100 columns."""
    for name, value in fields.items():
        typer.echo(fill(value, screen_width(), initial_indent=f"  {name:<16}", subsequent_indent=" " * 18))


def screen_width() -> int:
    """Return the number of columns to print in: those of the terminal, at most 100."""
    return max(40, min(_MAX_COLUMNS, get_terminal_size((_MAX_COLUMNS, 24)).columns))


def print_models(*, as_json: bool) -> None:
    from whimbrel.checkpoint.verified import format_difference, read_results, rows

    table = rows(read_results())
    if as_json:
        print_json(table)
        return
    cells = [(row.family, row.verified, format_difference(row.difference)) for row in table]
    head = ("FAMILY", "VERIFIED", "DIFFERENCE")
    write = row_writer(head, [row.model for row in table], cells)
    for tasks in dict.fromkeys(row.tasks for row in table):
        typer.echo("; ".join(_TASKS[task] for task in tasks))
        write("MODEL", head)
        for row, values in zip(table, cells, strict=True):
            if row.tasks == tasks:
                write(row.model, values)
        typer.echo()
    legend = (
        "layout: a test compares random weights in the model's layout with the reference. weights: a test compares the model's "
        "own weights. DIFFERENCE is relative to the largest number. "
        "To compare the weights of another model: whimbrel verify MODEL. Models on this machine: whimbrel list"
    )
    typer.echo(fill(legend, screen_width()))


def row_writer(
    head: Sequence[str], names: Sequence[str], cells: Sequence[Sequence[str]]
) -> Callable[[str, Sequence[str]], None]:
    """Return the function that prints a row of a table with these names and cells. A name that is too long has its own line."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    name_width = max(5, min(max(map(len, names)), screen_width() - sum(widths) - 2 * len(widths) - 2))

    def write(name: str, values: Sequence[str]) -> None:
        if len(name) > name_width:
            typer.echo(f"  {name}")
            name = ""
        values = [value.ljust(width) for value, width in zip(values, widths, strict=True)]
        typer.echo(f"  {name:<{name_width}}  {'  '.join(values)}".rstrip())

    return write


@contextmanager
def signals_exit() -> Generator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can tidy up."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    with ExitStack() as handlers:
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) != signal.SIG_IGN:  # nohup
                handlers.callback(signal.signal, each, signal.signal(each, leave))
        yield


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield lines of UTF-8 text without line ends and byte order mark. Raises SetupError."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SetupError(f"line {number} of stdin is not valid UTF-8 (byte {error.start}).") from None


def chunked(items: Iterable[T], times: int = 1) -> Iterator[list[T]]:
    """Yield lists of 64 to 2,048 items, which take some seconds to run; fewer if the model reads each item several `times`."""
    iterator, size = iter(items), _MIN_CHUNK
    while chunk := list(islice(iterator, max(1, size // times))):
        begin = perf_counter()
        yield chunk
        size = next_chunk_size(len(chunk) * times, perf_counter() - begin)


def next_chunk_size(size: int, seconds: float) -> int:
    fitting = int(size * _CHUNK_SECONDS / max(seconds, 1e-3))
    return max(_MIN_CHUNK, min(2 * size, fitting, _MAX_CHUNK))


def write_npy(path: Path, arrays: Iterable[Any], dimension: int) -> None:
    """Write arrays, each (N, dimension), as one. After each, and after an early end, the file is whole. Raises SetupError."""
    import numpy as np
    from numpy.lib.format import write_array_header_1_0

    about = {"descr": np.lib.format.dtype_to_descr(np.dtype("<f4")), "fortran_order": False}
    rows = 0
    with _write_errors(path), path.open("wb", buffering=0) as raw, _whole(raw) as keep:

        def write_header() -> None:
            header = BytesIO()
            write_array_header_1_0(header, {**about, "shape": (rows, dimension)})  # as long as the first: numpy leaves room
            raw.seek(0)
            _write_all(raw, header.getbuffer())

        write_header()
        keep()
        for array in arrays:
            raw.seek(0, os.SEEK_END)
            _write_all(raw, np.ascontiguousarray(array, "<f4").data.cast("B"))
            rows += len(array)
            write_header()
            keep()


def write_json_lines(path: Path | None, batches: Iterable[Iterable[dict[str, Any]]]) -> None:
    """Write objects as lines to a file or to stdout, a batch at a time. No line of a file is ever cut. Raises SetupError."""
    from whimbrel.wire.json_base64 import to_json

    with _write_errors(path):
        if path is None:
            with sys.stdout.buffer as stream:
                for batch in batches:
                    stream.write(b"".join(to_json(row) + b"\n" for row in batch))
                    stream.flush()
            return
        with path.open("wb", buffering=0) as raw, _whole(raw) as keep:
            for batch in batches:
                _write_all(raw, memoryview(b"".join(to_json(row) + b"\n" for row in batch)))
                keep()


def _write_all(raw: FileIO, data: memoryview) -> None:
    while data:
        data = data[raw.write(data) :]


@contextmanager
def _whole(raw: FileIO) -> Generator[Callable[[], None]]:
    """Cut a file after an early end of the block, to its size at the last call of what this yields."""
    size = 0

    def keep() -> None:
        nonlocal size
        if raw.seekable():
            size = os.fstat(raw.fileno()).st_size

    try:
        yield keep
    except BaseException:
        with suppress(OSError):  # it is no file: what a pipe has taken is gone
            os.ftruncate(raw.fileno(), size)
        raise


@contextmanager
def _write_errors(path: Path | None) -> Generator[None]:
    """Turn an OSError into a SetupError, except for a reader of stdout that left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"cannot write {path or 'stdout'}: {error.strerror or error}.") from None


def print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
