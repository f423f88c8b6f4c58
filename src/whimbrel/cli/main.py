"""The `whimbrel` command: the one file that joins everything.

Data goes to stdout, everything else to stderr. An error is one line and a hint. Heavy packages are imported by the
command that needs them, so that --help is quick.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Collection
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn, TypeVar

import typer

from whimbrel.errors import SetupError, WhimbrelError

if TYPE_CHECKING:
    from whimbrel.types.card import PoolingOption, RerankerName
    from whimbrel.types.plan import Plan

Word = TypeVar("Word", bound=str)

app = typer.Typer(
    name="whimbrel",
    help="Embeddings from pooling models, at the speed of the hardware.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_REQUEST_TOKENS: Final = 2**20
_QUEUE_BYTES: Final = 2**31
"""Of token ids and vectors that an engine holds for unanswered requests, before it refuses more."""
_QUEUED_REQUESTS: Final = 4
"""How many of the largest requests a server lets wait before it refuses more."""

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A checkpoint's folder or a hub id (owner/name). Default: the packaged all-MiniLM-L6-v2."
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="A checkpoint's folder or a hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16 on a GPU.")]
MaxLength = Annotated[
    int | None, typer.Option(help="Tokens per text, up to the model's positions. [default: as the checkpoint says]")
]
MaxBatchTokens = Annotated[int | None, typer.Option(help="Tokens in one batch. [default: 512 per core, 16384 on a GPU]")]
PoolingArgument = Annotated[
    str | None,
    typer.Option(help="Only for a checkpoint without modules.json: mean, cls, lasttoken, max, ..., splade, math-shepherd."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RerankerOption = Annotated[
    str | None,
    typer.Option(
        help="Only for a reranker whose files do not say how it is asked: qwen3, mxbai-v2, bge-gemma, nemotron, zerank"
    ),
]
Matryoshka = Annotated[
    bool, typer.Option("--matryoshka", help="Allow `dimensions` though the checkpoint does not say that it may be cut.")
]


def _finite(seconds: float) -> float:
    if not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


def _version(wanted: bool) -> None:
    if wanted:
        from whimbrel import __version__

        typer.echo(f"whimbrel {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer calls it
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoints' folders or hub ids (owner/name). Default: the packaged all-MiniLM-L6-v2."
        ),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="HTTP worker processes. [default: one per 8 cores, 1 to 4]")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=256, help="Engine processes per model.")] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    served_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; commas between several names. Again for the next MODEL. [default: MODEL]"
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Ask every client for this key; may be repeated. [env var: WHIMBREL_API_KEY]"),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Ask every client for one of the keys in this file.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that clients may call this server by; may be repeated; *: any."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A site whose pages may call from a browser; may be repeated; *: any."),
    ] = None,
    public_metrics: Annotated[bool, typer.Option("--public-metrics", help="Ask for no key at /metrics.")] = False,
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_request_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one request.")] = _REQUEST_TOKENS,
    max_queue_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that may wait. [default: four of the largest requests]")
    ] = None,
    max_queue_seconds: Annotated[float, typer.Option(min=0.1, callback=_finite, help="Refuse what would wait longer.")] = 30.0,
    document_cache_bytes: Annotated[
        int, typer.Option(min=0, help="Keep so many bytes of token vectors of documents that were reranked.")
    ] = 0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=_finite, help="Seconds for accepted requests to finish after a signal.")
    ] = 30.0,
    step_timeout: Annotated[
        float, typer.Option(min=0.1, callback=_finite, help="Seconds for one batch, before its engine is replaced.")
    ] = 60.0,
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    matryoshka: Matryoshka = False,
    log_format: Annotated[Literal["plain", "json"], typer.Option(help="Form of the log's lines.")] = "plain",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Log nothing that matters less.")
    ] = "info",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line per request.")] = False,
    otel: Annotated[bool, typer.Option("--otel", help="Send OpenTelemetry spans, as the variables OTEL_... say.")] = False,
) -> None:
    """Serve models over HTTP."""
    _need("httptools", "torch")
    from whimbrel.cli import console
    from whimbrel.cli.serve import listen, names_of_models, serve_until_stopped
    from whimbrel.server.app.limits import read_server_limits
    from whimbrel.server.processes.supervisor import ModelOptions, ServeOptions
    from whimbrel.telemetry import logs
    from whimbrel.telemetry import otel as spans
    from whimbrel.types.plan import Options

    if otel:
        spans.check()
    screen = console.console()
    wanted: list[str | None] = [*models] if models else [None]
    if len(set(wanted)) < len(wanted) and not served_name:
        raise SetupError("a model is named twice.", hint="--replicas gives it several engines; --served-name tells them apart")
    names = names_of_models(served_name or [], num_models=len(wanted))
    listener = listen(host, port)
    guards = read_server_limits(
        address=listener.getsockname()[0],
        api_keys=api_key or (),
        api_key_file=api_key_file,
        allowed_hosts=allowed_host or (),
        cors_origins=cors_origin or (),
        public_metrics=public_metrics,
        warn=lambda text: screen.print(f"warning: {text}", style="yellow", markup=False),
    )
    options = ServeOptions(
        models=tuple(
            ModelOptions(
                model,
                _pooling(pooling),
                Options(
                    device=device,
                    dtype=dtype,
                    served_name=own[0] if own else None,
                    aliases=own[1:],
                    max_length=max_length,
                    max_batch_tokens=max_batch_tokens,
                    max_request_tokens=max_request_tokens,
                    max_queue_tokens=max_queue_tokens or _QUEUED_REQUESTS * max_request_tokens,
                    max_queue_seconds=max_queue_seconds,
                    max_queue_bytes=_QUEUE_BYTES,
                    matryoshka=matryoshka,
                    document_cache_bytes=document_cache_bytes,
                ),
                _reranker(reranker),
            )
            for model, own in zip(wanted, names, strict=True)
        ),
        limits=guards,
        num_workers=workers or max(1, min(4, (os.cpu_count() or 1) // 8)),
        num_replicas=replicas,
        drain_seconds=drain_timeout,
        step_seconds=step_timeout,
        logs=logs.LogOptions(log_format, log_level, access_log),
        otel=otel,
    )
    logs.configure(options.logs, process="supervisor", secrets=guards.api_keys)
    with listener:
        code = serve_until_stopped(options, listener, console=screen)
    raise typer.Exit(code)


@app.command()
def embed(
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; without any, lines of stdin.")] = None,
    *,
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write here: .npy for an array, else JSONL. [default: JSONL to stdout]")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The name of one of the model's prompts, or a text to put before each input.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep the first so many columns.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_length: MaxLength = None,
    pooling: PoolingArgument = None,
    matryoshka: Matryoshka = False,
) -> None:
    """Embed texts without a server: one vector per TEXT, or per line of stdin."""
    _need("torch")
    from whimbrel.cli import console, streams

    if not texts and sys.stdin.isatty():
        raise SetupError("nothing to embed.", hint='whimbrel embed "some text", or whimbrel embed < lines.txt')
    engine = console.load(
        console.console(),
        model,
        device=device,
        dtype=dtype,
        max_length=max_length,
        pooling=_pooling(pooling),
        matryoshka=matryoshka,
    )
    with engine:
        chunks = streams.chunks(texts or streams.read_lines(sys.stdin.buffer))
        vectors = ((chunk, engine.embed(chunk, prompt=prompt, dimensions=dimensions)) for chunk in chunks)
        dense = engine.card.dense
        streams.write(out, vectors, dimension=dimensions or dense.default_width or dense.width)


@app.command()
def show(
    model: ModelArgument = None,
    *,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    matryoshka: Matryoshka = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint says (card) and how it would be run (plan). Loads no weights."""
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.cli import console
    from whimbrel.types.plan import Options, make_plan

    checkpoint = resolve_checkpoint(model, weights=False)
    card = read_card(checkpoint.folder, checkpoint.name, pooling=_pooling(pooling), reranker=_reranker(reranker))
    plan: Plan | None = None
    if _installed("torch"):
        from whimbrel.model.runner import probe

        options = Options(
            device=device,
            dtype=dtype,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            max_request_tokens=_REQUEST_TOKENS,
            max_queue_tokens=_QUEUED_REQUESTS * _REQUEST_TOKENS,
            matryoshka=matryoshka,
        )
        plan = make_plan(options, card, probe())
    console.print_card(card, plan, as_json=as_json)


@app.command()
def models(*, as_json: AsJson = False) -> None:
    """List the models whose layouts tests have proven, and how near their numbers are to the reference's."""
    from whimbrel.cli import console

    console.print_models(as_json=as_json)


def main() -> None:
    """Entry point. Exit code 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    atexit.register(gc.freeze)  # looking for garbage among PyTorch's objects at the end would take a third of a second
    _open_standard_streams()
    try:
        app()
    except WhimbrelError as error:
        _die(str(error), error.hint if isinstance(error, SetupError) else None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; say nothing at exit
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        _die("out of memory.", "a smaller --max-batch-tokens or --max-length needs less")


def _open_standard_streams() -> None:
    """Where a standard stream is closed, the next file or socket would take its number, and print or uvloop trip over it."""
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


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _need(*packages: str) -> None:
    missing = [package for package in packages if not _installed(package)]
    if missing:
        raise SetupError(f"this command needs {' and '.join(missing)}.", hint="pip install 'whimbrel[serve]'")


def _pooling(name: str | None) -> PoolingOption | None:
    from whimbrel.types.card import POOLING_OPTIONS

    return _one_of("pooling", name, POOLING_OPTIONS)


def _reranker(name: str | None) -> RerankerName | None:
    from whimbrel.types.card import RERANKERS

    return _one_of("reranker", name, RERANKERS)


def _one_of(option: str, name: str | None, words: Collection[Word]) -> Word | None:
    """The word that was said, if any."""
    found = next((word for word in words if word == name), None)
    if name is not None and found is None:
        raise SetupError(f"no {option} {name!r}.", hint=f"--{option} takes one of: {', '.join(words)}")
    return found
