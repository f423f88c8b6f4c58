"""The `whimbrel` command: options, defaults and exit codes.

Data goes to stdout, everything else to stderr. An error is one line and a hint. A command imports the heavy packages that it
needs when it runs, so `--help` is quick.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer
from typer.core import TyperCommand

from whimbrel import __version__
from whimbrel.cli import (
    admin_commands,
    config_commands,
    console,
    models_on_disk,
    run_batch_command,
    run_command,
    run_on_ray,
    store_command,
    verb_commands,
)
from whimbrel.cli import shared_options as shared
from whimbrel.cli.config_commands import ConfigOption
from whimbrel.cli.entry_points import Commands
from whimbrel.cli.flags import OLD_FLAGS, SERVE_FLAGS, engine_arguments, with_flags
from whimbrel.cli.key_command import key
from whimbrel.cli.shared_options import AsJson, ModelArgument, help_text, need, option
from whimbrel.errors import CheckpointError, SetupError, WhimbrelError
from whimbrel.server.config_file import read_config
from whimbrel.server.settings import Settings

app = typer.Typer(
    name="whimbrel",
    cls=Commands,
    help="Serve and run models for embeddings, reranking and classification.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"whimbrel {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def _command(
    summary: str, *examples: tuple[str, str], name: str | None = None, cls: type[TyperCommand] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command with this help, by default with the function's name."""
    return app.command(name, cls=cls, help=help_text(summary, *examples))


@_command(
    "Serve one or more models over HTTP.",
    ("whimbrel serve", "the packaged model"),
    ("whimbrel serve intfloat/multilingual-e5-small", "a model of the Hub"),
    ("whimbrel serve path/to/checkpoint --port 9000", "a folder"),
    ("whimbrel serve --config whimbrel.toml", "models with settings of their own, from a file"),
    ("whimbrel serve --host 0.0.0.0 --api-key-file keys", "for other machines"),
)
@with_flags(*SERVE_FLAGS, hidden=OLD_FLAGS)
def serve(
    models: Annotated[
        list[str] | None,
        shared.model_argument("Checkpoint folders or Hub ids (owner/name). [default: the packaged all-MiniLM-L6-v2]"),
    ] = None,
    *,
    file: ConfigOption = None,
    assignments: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE", "Any other setting. Repeatable. `whimbrel config show` lists them.", "--set", panel=shared.SERVER_PANEL
        ),
    ] = None,
    **given: Any,
) -> None:
    need("httptools", "torch")
    from whimbrel.cli.serve import serve as serve_models

    environ = dict(os.environ)  # as it is now, also for later readings
    raise typer.Exit(serve_models(models or (), lambda: read_config(file, given, assignments or (), environ)))


_VERBS: Final = (
    (
        verb_commands.embed,
        "Embed texts without a server: one vector per text.",
        ('whimbrel embed "some text"', "JSON lines to stdout"),
        ("whimbrel embed -o vectors.npy < lines.txt", "a numpy array"),
        ('whimbrel embed -m MODEL --prompt query "text"', "with the model's prompt"),
    ),
    (
        verb_commands.score,
        "Score documents for a query without a server, in their order.",
        ('whimbrel score "a query" "a document" "another"', "JSON lines to stdout"),
        ('whimbrel score -m MODEL "a query" < lines.txt', "a document in each line"),
        ("whimbrel score --pairs -o scores.jsonl < lines.tsv", "a query, a tab and a document in each line"),
    ),
    (
        verb_commands.rerank,
        "Rank documents for a query without a server, best first.",
        ('whimbrel rerank "a query" "a document" "another"', "JSON lines to stdout"),
        ('whimbrel rerank -m MODEL --top-n 10 "a query" < lines.txt', "a document in each line"),
    ),
    (
        verb_commands.classify,
        "Classify texts without a server: a score for each class, or for each of --labels.",
        ('whimbrel classify -m MODEL "some text"', "JSON lines to stdout"),
        ("whimbrel classify -m MODEL -o classes.jsonl < lines.txt", "a text in each line"),
        ('whimbrel classify -m MODEL --labels "birds, food" "some text"', "by labels of your own, with an NLI model"),
    ),
)
for _verb, _summary, *_examples in _VERBS:
    _command(_summary, *_examples)(_verb)

_command(
    "Run a file of requests, as of OpenAI's Batch API, to a file of answers. The same command goes on after any end.",
    ("whimbrel run-batch -i in.jsonl -o out.jsonl", "the packaged model"),
    ("whimbrel run-batch -i in.jsonl -o out.jsonl -m MODEL", "another one"),
    ("whimbrel run-batch -i in.jsonl -o out.jsonl --url URL", "by a server"),
    name="run-batch",
)(run_batch_command.run_batch)

_command(
    "Run the texts of files: vectors or scores into a folder, in parts. The same command goes on after any end.",
    ("whimbrel run docs.jsonl --text title,body --id id --out vectors", "Parquet files"),
    ("whimbrel run 'data/*.parquet' -m MODEL --outputs dense,sparse --out vectors", "several outputs in one pass"),
    ("whimbrel run data/ --url http://127.0.0.1:8000 --out vectors", "by a server"),
    ("whimbrel run data/ --out vectors --ray", "on a Ray cluster"),
    cls=run_on_ray.RunCommand,
)(run_command.run)

_command(
    "Store the output of whimbrel run: vectors and columns into LanceDB, Qdrant, PostgreSQL or OpenSearch, by their ids.",
    ("whimbrel store vectors --to lancedb:birds-db --table birds", "a table in a folder"),
    ("whimbrel store vectors --to qdrant+http://127.0.0.1:6333 -t birds", "a collection"),
    ("whimbrel store vectors --to postgresql://me@127.0.0.1/db -t birds", "a table with pgvector"),
)(store_command.store)


@_command(
    "Show a model: its task, size and limits, and how it would run here. Reads only the headers of its weights.",
    ("whimbrel show", "the packaged model"),
    ("whimbrel show intfloat/multilingual-e5-small", "a model of the Hub"),
    ("whimbrel show path/to/checkpoint --json", "every setting"),
)
@with_flags(
    "device", "dtype", "max_length", "max_batch_tokens", "pooling", "reranker", "tokenizer", "matryoshka", "accept_config"
)
def show(model: ModelArgument = None, *, as_json: AsJson = False, **given: Any) -> None:
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.engine.prepare import Preprocessor
    from whimbrel.types.machine_limits import share_waiting_memory, usable_memory
    from whimbrel.types.plan import Options, make_plan

    checkpoint = resolve_checkpoint(model, weights=False)
    arguments = engine_arguments(given)
    choices = {name: arguments.pop(name) for name in ("pooling", "reranker")}
    read: dict[str, Any] = {"accept_config": arguments["accept_config"], "tokenizer": arguments.get("tokenizer")}
    card = read_card(checkpoint.folder, checkpoint.name, **choices, **read)
    plan = None
    if find_spec("torch") is not None:
        from whimbrel.model.load import check_weights
        from whimbrel.model.runner import probe

        waiting = share_waiting_memory(usable_memory())
        limits = Options(max_request_tokens=Settings().max_request_tokens, max_queue_tokens=waiting.tokens)
        options = Options(**arguments) | limits
        plan = replace(make_plan(options, card, probe()), commit=checkpoint.commit)
        preprocessor = Preprocessor(checkpoint.folder, card, plan)  # refuses a tokenizer that does not work
        plan = replace(plan, tokenizer_note=preprocessor.compare_with_files(checkpoint.folder))
        if model is None or Path(model).expanduser().is_dir():  # of a hub id only the card's files were fetched
            check_weights(checkpoint.folder, card)
    console.print_card(card, plan, checkpoint, as_json=as_json)


@_command(
    "Write a checkpoint with pickled weights (pytorch_model.bin) anew, with safetensors.",
    ("whimbrel convert BAAI/bge-m3 --out bge-m3", "a model of the Hub"),
    ("whimbrel serve ./bge-m3", "and then"),
)
@with_flags("pooling", "reranker", "accept_config")
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub id.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new folder.", show_default=False)],
    **given: Any,
) -> None:
    need("torch")
    from whimbrel.checkpoint.convert import convert as convert_checkpoint
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.model.load import check_weights

    checkpoint = resolve_checkpoint(model, pickles=True)
    reading = "transformers"  # any: the weights do not depend on it
    card = read_card(checkpoint.folder, checkpoint.name, **engine_arguments(given), tokenizer=reading)
    stderr = console.stderr_console()
    try:
        with console.signals_exit(), stderr.status("converting") as status:
            done = convert_checkpoint(
                checkpoint, out, path=card.path, check=lambda folder: check_weights(folder, card), progress=status.update
            )
    except (KeyboardInterrupt, SystemExit):
        stderr.print(f"stopped: nothing was written to {out}.", markup=False)
        raise
    size = f"{done.num_bytes / 1e6:,.0f} MB" if done.num_bytes >= 1e7 else f"{done.num_bytes / 1e3:,.0f} kB"
    stderr.print(f"wrote {done.num_tensors:,} tensors, {size}, to {done.folder}", soft_wrap=True)


@_command(
    "List the verified models, with their difference from the reference. `whimbrel list` lists those on this machine.",
    ("whimbrel models", "a table"),
    ("whimbrel models --json", "with the tests"),
)
def models(*, as_json: AsJson = False) -> None:
    console.print_models(as_json=as_json)


_command(
    "Fetch a model of the Hub into its cache, with the files that Whimbrel reads. Prints the folder.",
    ("whimbrel pull BAAI/bge-small-en-v1.5", "goes on if it was interrupted"),
    ("whimbrel pull owner/name@v1", "a branch, a tag or a commit"),
    ("whimbrel pull BAAI/bge-m3 --pickles", "for whimbrel convert"),
)(models_on_disk.pull)
_command(
    "List the models in the Hub's cache on this machine. `whimbrel models` lists the verified ones.",
    ("whimbrel list", "a table"),
    ("whimbrel list --json", "with folders and reasons"),
    name="list",
)(models_on_disk.list_models)
_command(
    "Remove a model, or one revision of it, from the Hub's cache on this machine.",
    ("whimbrel rm BAAI/bge-m3", "says what it frees, and asks"),
    ("whimbrel rm BAAI/bge-m3@v1 --yes", "one revision, without asking"),
    name="rm",
)(models_on_disk.remove)

_command(
    "Load a model into a server that runs, or replace the one of this name. No request is lost.",
    ("whimbrel load e5 intfloat/multilingual-e5-small", "a further model, or another one named e5"),
    ("whimbrel load e5", "its files as they are now"),
    ("whimbrel load e5 --set keep=10m --set dtype=bfloat16", "with other options"),
)(admin_commands.load)
_command(
    "Unload a model of a server that runs. Requests that it has accepted are answered.",
    ("whimbrel unload e5", "clients get 404 from then on"),
)(admin_commands.unload)
_command(
    "List the models of a server that runs: state, revision, memory and requests in flight.",
    ("whimbrel ps", "a table"),
    ("whimbrel ps --json", "with process ids"),
)(admin_commands.ps)


@_command(
    "Compare a model's real weights with a reference. The exit code is 1 if a difference is too large.",
    ("whimbrel verify", "the packaged model, with Sentence Transformers"),
    ("whimbrel verify path/to/checkpoint --json", "as JSON"),
    ("whimbrel verify MODEL --against URL --dialect tei", "with another server"),
)
@with_flags("device", "tokenizer", "accept_config")
def verify(
    model: ModelArgument = None,
    *,
    against: Annotated[
        str | None,
        option(
            "URL", "Server of the same model to compare with. [default: Sentence Transformers]", panel=shared.REFERENCE_PANEL
        ),
    ] = None,
    dialect: Annotated[
        Literal["whimbrel", "openai", "tei", "cohere"],
        typer.Option(help="API of the server.", rich_help_panel=shared.REFERENCE_PANEL),
    ] = "whimbrel",
    remote_model: Annotated[
        str | None, option("NAME", "Name of the model on the server. [default: MODEL]", panel=shared.REFERENCE_PANEL)
    ] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    need("torch")
    from whimbrel.cli import verify as verification

    server = verification.Server(against, dialect, remote_model) if against else None
    raise typer.Exit(verification.run(model, server, engine_arguments(given), as_json=as_json))


@_command(
    "Check this installation and machine. Put the output into a bug report. The exit code is 1 if something is wrong.",
    ("whimbrel doctor", "one screen"),
    ("whimbrel doctor --json", "as JSON"),
)
def doctor(*, as_json: AsJson = False) -> None:
    from whimbrel.cli import doctor as checks

    raise typer.Exit(checks.run(as_json=as_json))


app.add_typer(config_commands.app)
_command(
    "Make an API key. The key goes to the terminal, its table for the configuration file to stdout.",
    ("whimbrel key search >> whimbrel.toml", "a key named search"),
    ("whimbrel key --hash < key.txt", "the hash of a key that exists"),
)(key)


def main() -> None:
    """Run the command line. The exit code is 0, 1 for an error, 2 for wrong usage, 3 for refused rows, 130 after Ctrl-C."""
    _open_standard_streams()
    try:
        app()
    except WhimbrelError as error:
        asks_outputs = error.location is not None and error.location.field == "outputs"  # which no command has
        hint = error.hint if isinstance(error, SetupError | CheckpointError) else None
        _die(error.message if asks_outputs else str(error), hint)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: no error at exit
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        _die("out of memory.", "reduce max_batch_tokens or max_length")


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise a file or socket would take their descriptor."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            if stream.fileno() != number:
                os.dup2(stream.fileno(), number)
            setattr(sys, name, stream)


def _die(message: str, hint: str | None = None) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    if hint:
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201
    sys.exit(1)
