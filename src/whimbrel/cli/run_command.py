"""The command `whimbrel run`: files of texts to files of vectors, by a model in this process or by servers.

The exit code is 0, 3 if rows were refused, 1 for an error that ended the run, and 130 after Ctrl-C. After each of the last two
the same command goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.markup import escape

from whimbrel.cli import console
from whimbrel.cli.flags import with_flags
from whimbrel.cli.run_on_ray import RAY_PANEL, RayOptions, on_cluster, read_ray_options
from whimbrel.cli.run_progress import RunProgress
from whimbrel.cli.shared_options import OUTPUT_PANEL, SERVER_PANEL, ModelOption, flag, need, option
from whimbrel.cli.verb_commands import loaded
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.bulk.embedder import Embedder
    from whimbrel.bulk.job import Job
    from whimbrel.bulk.pipeline import ShardRunner

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
_SOME_REFUSED: Final = 3
_OUTPUTS: Final = ("dense", "sparse", "multi_vector", "scores")
_NONE: Final = "none"
_WAIT_SECONDS: Final = 600.0
_SHAPE_PANEL: Final = "Outputs"
_Number = Literal["float32", "float16", "int8"]
_Format = Literal["parquet", "arrow", "npy"]
_Side = Literal["query", "document"]
_End = Literal["right", "left", "never"]
_file, _shape = partial(option, panel=OUTPUT_PANEL), partial(option, panel=_SHAPE_PANEL)
_ray = partial(option, panel=RAY_PANEL)


@with_flags(
    "device", "dtype", "max_length", "max_batch_tokens", "pooling", "reranker", "matryoshka", "tokenizer", "accept_config"
)
def run(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help=escape("Files, folders, globs or URLs: Parquet, Arrow, JSON lines, CSV, text; lines also as .gz or .zst."),
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder of the output.", show_default=False, rich_help_panel=OUTPUT_PANEL
        ),
    ],
    model: ModelOption = None,
    url: Annotated[
        list[str] | None,
        option(
            "URL",
            f"Server to ask in place of a model here. Repeatable, for servers of one model. --model is its name there. "
            f"The key is in {KEY_VARIABLE}.",
            "--url",
            panel=SERVER_PANEL,
        ),
    ] = None,
    wait_seconds: Annotated[
        float,
        option(
            "SECONDS",
            "Time to wait for servers that do not answer. [default: 600]",
            panel=SERVER_PANEL,
            min=0,
            show_default=False,
        ),
    ] = _WAIT_SECONDS,
    text: Annotated[
        list[str] | None, _file("COLUMN,COLUMN", "Columns with the text. Several are joined. [default: text]", "--text")
    ] = None,
    separator: Annotated[
        str | None, _file("TEXT", "Text between the texts of several columns. [default: a line end]", "--separator")
    ] = None,
    query: Annotated[
        str | None, _file("COLUMN", "Column with a query: each text is scored for the query of its row.", "--query")
    ] = None,
    id_column: Annotated[
        str | None, _file("COLUMN", "Column with the id of a row. [default: columns file and row are added]", "--id")
    ] = None,
    keep: Annotated[
        list[str] | None,
        _file("COLUMN,COLUMN", "Columns to copy into the output; none for none. [default: all others]", "--keep"),
    ] = None,
    file_format: Annotated[
        _Format, typer.Option("--format", help="Format of the output.", rich_help_panel=OUTPUT_PANEL)
    ] = "parquet",
    shard_rows: Annotated[
        int | None, _file("N", "Rows in a part of the output, at most. [default: 50,000, fewer where outputs are large]", min=1)
    ] = None,
    verify: Annotated[bool, flag("--verify", "Hash the parts that are finished, before going on.", panel=OUTPUT_PANEL)] = False,
    restart: Annotated[
        bool, flag("--restart", "Remove what an earlier run wrote into DIR, and start anew.", panel=OUTPUT_PANEL)
    ] = False,
    outputs: Annotated[
        list[str] | None,
        _shape("NAME,NAME", f"Outputs to compute in one pass: {', '.join(_OUTPUTS)}. [default: the model's main output]"),
    ] = None,
    side: Annotated[
        _Side | None, _shape("query|document", "Role of the texts, for models that tell them apart.", "--as")
    ] = None,
    prompt: Annotated[
        str | None, _shape("PROMPT", "Name of one of the model's prompts, or a text to put before each input.")
    ] = None,
    dimensions: Annotated[int | None, _shape("N", "Keep the first N columns of each vector. [default: all]", min=1)] = None,
    dtype_out: Annotated[
        _Number, typer.Option("--dtype-out", help="Number type of the vectors.", rich_help_panel=_SHAPE_PANEL)
    ] = "float32",
    pool_tokens: Annotated[
        float | None, _shape("FACTOR", "Join token vectors until about 1 / FACTOR of them remain.", min=1)
    ] = None,
    muvera: Annotated[
        bool, flag("--muvera", "One MUVERA vector in place of token vectors. Needs --as.", panel=_SHAPE_PANEL)
    ] = False,
    truncate: Annotated[
        _End | None,
        _shape("right|left|never", "End to cut from a long text; with never it is refused. [default: as the model does]"),
    ] = None,
    chunk: Annotated[
        int | None, _shape("TOKENS", "Split each text into chunks of up to this many tokens, a row each.", min=1)
    ] = None,
    overlap: Annotated[
        int, _shape("TOKENS", "Tokens that a chunk shares with the one before. [default: 0]", min=0, show_default=False)
    ] = 0,
    ray: Annotated[
        str | None,
        _ray(
            "[ADDRESS]",
            "Compute on a Ray cluster: HOST:PORT, local to start Ray here. [default: that of RAY_ADDRESS, or of this machine]",
            "--ray",
        ),
    ] = None,
    ray_actors: Annotated[
        str | None, _ray("N|MIN:MAX", "Number of actors with an engine each. [default: as many as there is room for]")
    ] = None,
    ray_cpus: Annotated[
        float | None, _ray("N", "CPUs of an actor. [default: 1 beside a GPU, else all of the largest node]", min=0.01)
    ] = None,
    ray_gpus: Annotated[float | None, _ray("N", "GPUs of an actor. [default: 1 if the cluster has any]", min=0)] = None,
    **given: Any,
) -> None:
    need("pyarrow", "fsspec", extra="bulk")
    if re.match(r"\w{2,}:/", str(out)):
        raise SetupError(f"--out takes a folder of this machine, not {out}.")
    if out.exists() and not out.is_dir():
        raise SetupError(f"--out takes a folder, and {out} is a file.")
    if chunk is None and overlap:
        raise SetupError("--overlap is for --chunk.")
    if chunk is not None and overlap >= chunk:
        raise SetupError(f"--overlap {overlap:,} must be less than --chunk {chunk:,}.")
    names = _names(outputs) or ()
    if unknown := [name for name in names if name not in _OUTPUTS]:
        raise SetupError(f"--outputs takes {', '.join(_OUTPUTS)}, not {unknown[0]}.")
    if query is not None and (chunk is not None or side or muvera or names not in ((), ("scores",))):
        raise SetupError("--query gives scores, and goes with no other --outputs and not with --as, --muvera and --chunk.")
    names = ("scores",) if query is not None else names
    options = {
        "input_type": side, "prompt": prompt, "dimensions": dimensions, "token_pooling": pool_tokens, "muvera": muvera or None,
        "truncate": truncate,
    }  # fmt: skip
    cluster = read_ray_options(ray, ray_actors, ray_cpus, ray_gpus)
    _check_place(url, cluster, given)
    load = partial(_connected, url, pairs=query is not None) if url else partial(_engine, given)
    load = load if cluster is None else partial(on_cluster, given, cluster)

    from whimbrel.bulk.chunks import Chunking
    from whimbrel.bulk.job import Job
    from whimbrel.bulk.manifest import ColumnNames

    kept = _names(keep)
    columns = ColumnNames(
        tuple(_names(text) or ("text",)),
        "\n" if separator is None else separator,
        id_column,
        () if kept == (_NONE,) else kept,
        query,
    )
    own = {name: value for name, value in given.items() if name in _CHANGING and value not in (None, False, [], ())}
    job = Job(
        inputs, out, columns, dtype_out, file_format, None if chunk is None else Chunking(chunk, overlap), shard_rows,
        {"outputs": list(names), **options, **own}, restart, verify,
    )  # fmt: skip
    load = partial(load, model, names, _given(options), wait_seconds=wait_seconds)
    raise typer.Exit(_run(job, lambda watch: load(tell=watch.tell), is_remote=cluster is not None))


_CHANGING: Final = ("pooling", "reranker", "matryoshka", "tokenizer", "accept_config")
"""Settings of a model that change its numbers, beside those that its plan says."""


def _check_place(url: list[str] | None, cluster: RayOptions | None, given: Mapping[str, Any]) -> None:
    """Raise SetupError for options that do not go with the place of the model, or if it needs a package."""
    if url:
        if cluster is not None:
            raise SetupError("--ray is for a model, and not for --url: servers are asked from one machine.")
        if used := next((name for name, value in given.items() if value not in (None, False, [], ())), None):
            raise SetupError(f"--{used.replace('_', '-')} is for a model that runs here, and not for --url.")
    elif cluster is None:
        need("torch")


def _run(job: Job, load: Callable[[RunProgress], Any], *, is_remote: bool) -> int:
    from whimbrel.bulk.job import Totals
    from whimbrel.bulk.run import run as run_job

    totals, runner = Totals(), _runner(is_remote=is_remote)
    with RunProgress(console.stderr_console(), totals) as progress, console.signals_exit():
        try:
            run_job(job, lambda: load(progress), progress, totals, runner)
        except (KeyboardInterrupt, SystemExit):
            progress.stop(f"stopped: {job.out} has {progress.parts()}. The same command goes on.")
            raise
        except Exception:
            if totals.shards_done:
                progress.stop(f"stopped: {job.out} has {progress.parts()}.")
            raise
        progress.finish(job.out)
    return _SOME_REFUSED if totals.refused else 0


def _runner(*, is_remote: bool) -> Callable[..., ShardRunner]:
    if is_remote:
        from whimbrel.ray.pipeline import ClusterPipeline

        return ClusterPipeline
    from whimbrel.bulk.pipeline import Pipeline

    return Pipeline


@contextmanager
def _engine(given: Mapping[str, Any], model: str | None, outputs: Sequence[Any], options: Any, **_: Any) -> Generator[Embedder]:
    with loaded(model, given) as engine:
        from whimbrel.bulk.embedder import EngineEmbedder

        yield EngineEmbedder(engine, tuple(outputs), options)


@contextmanager
def _connected(urls: list[str], model: str | None, outputs: Sequence[Any], options: Any, **waits: Any) -> Generator[Embedder]:
    from whimbrel.bulk.embedder import ServerEmbedder
    from whimbrel.client import Client

    client = Client(urls, api_key=os.environ.get(KEY_VARIABLE), model=model, progress=False)
    with client:
        yield ServerEmbedder(client, tuple(outputs), options, model=model, **waits)


def _given(options: Mapping[str, Any]) -> Any:
    return {name: value for name, value in options.items() if value is not None}


def _names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names that commas separate in the values of an option."""
    if values is None:
        return None
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())
