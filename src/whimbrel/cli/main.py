"""The `whimbrel` command: options, defaults and exit codes.

Data goes to stdout, everything else to stderr. An error is one line and a hint. A command imports the heavy packages that it
needs when it runs, so `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TypeVar

import typer

from whimbrel.cli import verbs
from whimbrel.cli.entry_points import Commands
from whimbrel.cli.options import (
    LIMITS_PANEL,
    LOGS_PANEL,
    REFERENCE_PANEL,
    SECURITY_PANEL,
    SERVER_PANEL,
    AcceptConfig,
    AsJson,
    Device,
    Dtype,
    Matryoshka,
    MaxBatchTokens,
    MaxLength,
    ModelArgument,
    PoolingArgument,
    RerankerOption,
    TokenizerOption,
    flag,
    help_text,
    is_installed,
    model_argument,
    need,
    option,
    read_pooling,
    read_reranker,
)
from whimbrel.errors import CheckpointError, SetupError, WhimbrelError

if TYPE_CHECKING:
    from whimbrel.types.plan import Plan

Choice = TypeVar("Choice", bound=str)

app = typer.Typer(
    name="whimbrel",
    cls=Commands,
    help="Serve and run models for embeddings, reranking and classification.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_MAX_REQUEST_TOKENS: Final = 2**20


def _seconds(text: str, *, least: float) -> Any:
    return option("SECONDS", text, panel=LIMITS_PANEL, min=least, callback=_check_finite)


def _check_finite(seconds: float | None) -> float | None:
    if seconds is not None and not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds.")
    return seconds


def _print_version(is_set: bool) -> None:
    if is_set:
        from whimbrel import __version__

        typer.echo(f"whimbrel {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command(
    help=help_text(
        "Serve one or more models over HTTP.",
        ("whimbrel serve", "the packaged model"),
        ("whimbrel serve intfloat/multilingual-e5-small", "a model of the Hub"),
        ("whimbrel serve path/to/checkpoint --port 9000", "a folder"),
        ("whimbrel serve A B --replicas 2", "two models"),
        ("whimbrel serve --host 0.0.0.0 --api-key-file keys", "for other machines"),
    )
)
def serve(
    models: Annotated[
        list[str] | None,
        model_argument("Checkpoint folders or Hub ids (owner/name). [default: the packaged all-MiniLM-L6-v2]"),
    ] = None,
    *,
    host: Annotated[str, option("HOST", "Address to listen on.", panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[
        int, option("PORT", "Port to listen on. 0 takes any free port.", min=0, max=65535, panel=SERVER_PANEL)
    ] = 8000,
    uds: Annotated[
        Path | None, option("PATH", "Unix socket to listen on, in place of host and port.", panel=SERVER_PANEL)
    ] = None,
    root_path: Annotated[
        str, option("PATH", "Prefix under which a proxy shows the server, e.g. /embeddings.", panel=SERVER_PANEL)
    ] = "",
    workers: Annotated[
        int | None,
        option("N", "Number of HTTP worker processes. [default: one per 8 cores, 1 to 4]", min=1, max=256, panel=SERVER_PANEL),
    ] = None,
    replicas: Annotated[int, option("N", "Number of engine processes per model.", min=1, max=256, panel=SERVER_PANEL)] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    served_name: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Model name for clients, or several separated by commas. Repeat it for the next MODEL. "
            "[default: MODEL; of ID@REVISION both ID and ID@REVISION]",
            panel=SERVER_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            "KEY", "Require this API key of every client. May be repeated. [env var: WHIMBREL_API_KEY]", panel=SECURITY_PANEL
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(
            "PATH",
            "Require one of the API keys in this file: one per line. Lines that start with # are comments.",
            panel=SECURITY_PANEL,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Host name that clients may use. May be repeated. * accepts any. "
            "[default: localhost if only this machine can connect, else any]",
            panel=SECURITY_PANEL,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            "ORIGIN",
            "Accept browser requests from pages of this origin (CORS). May be repeated. * accepts any.",
            panel=SECURITY_PANEL,
        ),
    ] = None,
    public_metrics: Annotated[
        bool, flag("--public-metrics", "Serve /metrics without an API key.", panel=SECURITY_PANEL)
    ] = False,
    no_playground: Annotated[
        bool, flag("--no-playground", "Answer browsers at / as programs are answered.", panel=SECURITY_PANEL)
    ] = False,
    ssl_certfile: Annotated[
        Path | None,
        option("PATH", "Speak TLS with this certificate chain (PEM). SIGHUP reads it again.", panel=SECURITY_PANEL),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, option("PATH", "The certificate's key (PEM). [default: in --ssl-certfile]", panel=SECURITY_PANEL)
    ] = None,
    ssl_keyfile_password: Annotated[
        str | None,
        option("TEXT", "Password of an encrypted key. [env var: WHIMBREL_SSL_KEYFILE_PASSWORD]", panel=SECURITY_PANEL),
    ] = None,
    forwarded_allow_ips: Annotated[
        list[str] | None,
        option(
            "IP",
            "Believe X-Forwarded-For, -Proto and -Host from these proxies: addresses and networks with commas. "
            "unix is a Unix socket, * any peer. [default: none]",
            panel=SECURITY_PANEL,
        ),
    ] = None,
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_request_tokens: Annotated[
        int, option("N", "Maximum tokens in one request.", min=1, panel=LIMITS_PANEL)
    ] = _MAX_REQUEST_TOKENS,
    max_queue_tokens: Annotated[
        int | None,
        option(
            "N",
            "Maximum tokens in the queue of one engine. Above it, requests get 429. [default: by memory]",
            min=1,
            panel=LIMITS_PANEL,
        ),
    ] = None,
    max_queue_seconds: Annotated[
        float | None,
        _seconds("Maximum expected time in the queue. Above it, requests get 429. [default: no limit]", least=0.1),
    ] = None,
    document_cache_bytes: Annotated[
        int,
        option(
            "BYTES",
            "Memory for a cache of reranked documents' token vectors (late interaction). 0 disables it.",
            min=0,
            panel=LIMITS_PANEL,
        ),
    ] = 0,
    prefix_cache_bytes: Annotated[
        int | None,
        option(
            "BYTES",
            "Memory for a cache of prefixes that texts share, of causal models. 0 disables it. [default: 268435456]",
            min=0,
            panel=LIMITS_PANEL,
        ),
    ] = None,
    chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--chunked-prefill/--no-chunked-prefill",
            help="Run texts above --max-batch-tokens in pieces. [default: for causal models]",
            rich_help_panel=LIMITS_PANEL,
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[float, _seconds("Time to finish accepted requests after SIGINT or SIGTERM.", least=0)] = 30.0,
    step_timeout: Annotated[
        float, _seconds("Maximum time for one batch. After it, the engine process is replaced.", least=0.1)
    ] = 60.0,
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    tokenizer: TokenizerOption = "auto",
    matryoshka: Matryoshka = False,
    split_long: Annotated[
        bool,
        flag(
            "--split-long",
            "Run texts above the limit in parts, unless a request asks to cut them: the mean of the parts' dense vectors.",
        ),
    ] = False,
    accept_config: AcceptConfig = None,
    adapter: Annotated[
        list[str] | None,
        option(
            "[MODEL:]NAME=FOLDER",
            "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.",
            "--adapter",
        ),
    ] = None,
    log_format: Annotated[
        Literal["plain", "json"], typer.Option(help="Format of log lines.", rich_help_panel=LOGS_PANEL)
    ] = "plain",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Minimum log level.", rich_help_panel=LOGS_PANEL)
    ] = "info",
    access_log: Annotated[bool, flag("--access-log", "Log one line per request.", panel=LOGS_PANEL)] = False,
    otel: Annotated[
        bool, flag("--otel", "Send OpenTelemetry spans. Configure them with the OTEL_... variables.", panel=LOGS_PANEL)
    ] = False,
) -> None:
    """Serve one or more models over HTTP."""
    need("httptools", "torch")
    from whimbrel.checkpoint import packaged
    from whimbrel.checkpoint.locate import default_names
    from whimbrel.cli import console
    from whimbrel.cli.serve import choose_workers, listen, listen_on_path, name_models, names_of_adapters, serve_until_stopped
    from whimbrel.server.app.limits import read_server_limits
    from whimbrel.server.app.proxies import read_proxies, read_root_path
    from whimbrel.server.http.tls import read_tls_files
    from whimbrel.server.processes.messages import ModelOptions, ServeOptions
    from whimbrel.telemetry import logs
    from whimbrel.telemetry import otel as spans
    from whimbrel.types.machine_limits import usable_memory
    from whimbrel.types.plan import Options
    from whimbrel.types.waiting_memory import share_waiting_memory

    if otel:
        spans.check()
    screen = console.stderr_console()
    model_ids: list[str | None] = [*models] if models else [None]
    if len(set(model_ids)) < len(model_ids) and not served_name:
        raise SetupError(
            "a model is named twice.",
            hint="pass --replicas for several engines of one model, or --served-name to tell them apart",
        )
    names = name_models(model_ids, served_name or [])
    known = [(model or packaged.NAME, *default_names(model), *own) for model, own in zip(model_ids, names, strict=True)]
    adapters = names_of_adapters(adapter or (), known)
    num_workers = workers or choose_workers()
    waiting = share_waiting_memory(usable_memory(), num_workers=num_workers, num_engines=replicas * len(model_ids))
    tls = read_tls_files(ssl_certfile, ssl_keyfile, ssl_keyfile_password)
    with listen_on_path(uds) if uds else listen(host, port) as listener:
        limits = read_server_limits(
            address=None if uds else listener.getsockname()[0],
            api_keys=api_key or (),
            api_key_file=api_key_file,
            allowed_hosts=allowed_host or (),
            cors_origins=cors_origin or (),
            public_metrics=public_metrics,
            playground=not no_playground,
            root_path=read_root_path(root_path),
            forwarded_allow_ips=read_proxies(forwarded_allow_ips or ()),
            secrets=[ssl_keyfile_password or ""],
            max_inflight_bytes=waiting.bodies,
            warn=lambda text: screen.print(f"warning: {text}", style="yellow", markup=False),
        )
        options = ServeOptions(
            models=tuple(
                ModelOptions(
                    model,
                    read_pooling(pooling),
                    Options(
                        device=device,
                        dtype=dtype,
                        served_name=own_names[0],
                        aliases=own_names[1:],
                        max_length=max_length,
                        max_batch_tokens=max_batch_tokens,
                        max_request_tokens=max_request_tokens,
                        max_queue_tokens=max_queue_tokens or waiting.tokens,
                        max_queue_seconds=max_queue_seconds,
                        max_queue_bytes=waiting.results,
                        matryoshka=matryoshka,
                        split_long=split_long,
                        document_cache_bytes=document_cache_bytes,
                        prefix_cache_bytes=prefix_cache_bytes,
                        chunked_prefill=chunked_prefill,
                        tokenizer=tokenizer,
                        accept_config=tuple(accept_config or ()),
                        adapters=own_adapters,
                    ),
                    read_reranker(reranker),
                )
                for model, own_names, own_adapters in zip(model_ids, names, adapters, strict=True)
            ),
            limits=limits,
            num_workers=num_workers,
            num_replicas=replicas,
            drain_seconds=drain_timeout,
            step_seconds=step_timeout,
            logs=logs.LogOptions(log_format, log_level, access_log),
            otel=otel,
            tls=tls,
        )
        logs.configure(options.logs, process="supervisor", secrets=limits.api_keys)
        code = serve_until_stopped(options, listener, console=screen)
    raise typer.Exit(code)


_VERBS: Final = (
    (
        verbs.embed,
        "Embed texts without a server: one vector per text.",
        ('whimbrel embed "some text"', "JSON lines to stdout"),
        ("whimbrel embed -o vectors.npy < lines.txt", "a numpy array"),
        ('whimbrel embed -m MODEL --prompt query "text"', "with the model's prompt"),
    ),
    (
        verbs.score,
        "Score documents for a query without a server, in their order.",
        ('whimbrel score "a query" "a document" "another"', "JSON lines to stdout"),
        ('whimbrel score -m MODEL "a query" < lines.txt', "a document in each line"),
        ("whimbrel score --pairs -o scores.jsonl < lines.tsv", "a query, a tab and a document in each line"),
    ),
    (
        verbs.rerank,
        "Rank documents for a query without a server, best first.",
        ('whimbrel rerank "a query" "a document" "another"', "JSON lines to stdout"),
        ('whimbrel rerank -m MODEL --top-n 10 "a query" < lines.txt', "a document in each line"),
    ),
    (
        verbs.classify,
        "Classify texts without a server: a score for each class, or for each of --labels.",
        ('whimbrel classify -m MODEL "some text"', "JSON lines to stdout"),
        ("whimbrel classify -m MODEL -o classes.jsonl < lines.txt", "a text in each line"),
        ('whimbrel classify -m MODEL --labels "birds, food" "some text"', "by labels of your own, with an NLI model"),
    ),
)
for _verb, _summary, *_examples in _VERBS:
    app.command(help=help_text(_summary, *_examples))(_verb)


@app.command(
    help=help_text(
        "Show a model: its task, size and limits, and how it would run here. Reads only the headers of its weights.",
        ("whimbrel show", "the packaged model"),
        ("whimbrel show intfloat/multilingual-e5-small", "a model of the Hub"),
        ("whimbrel show path/to/checkpoint --json", "every setting"),
    )
)
def show(
    model: ModelArgument = None,
    *,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    tokenizer: TokenizerOption = "auto",
    matryoshka: Matryoshka = False,
    accept_config: AcceptConfig = None,
    as_json: AsJson = False,
) -> None:
    """Show a model and how it would run here. Reads only the headers of its weights."""
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.cli import console
    from whimbrel.engine.prepare import Preprocessor
    from whimbrel.types.machine_limits import usable_memory
    from whimbrel.types.plan import Options, make_plan
    from whimbrel.types.waiting_memory import share_waiting_memory

    checkpoint = resolve_checkpoint(model, weights=False)
    accepted = tuple(accept_config or ())
    card = read_card(
        checkpoint.folder,
        checkpoint.name,
        pooling=read_pooling(pooling),
        reranker=read_reranker(reranker),
        accept_config=accepted,
        tokenizer=tokenizer,
    )
    plan: Plan | None = None
    if is_installed("torch"):
        from whimbrel.model.load import check_weights
        from whimbrel.model.runner import probe

        options = Options(
            device=device,
            dtype=dtype,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            max_request_tokens=_MAX_REQUEST_TOKENS,
            max_queue_tokens=share_waiting_memory(usable_memory()).tokens,
            matryoshka=matryoshka,
            accept_config=accepted,
        )
        plan = replace(make_plan(options, card, probe()), commit=checkpoint.commit)
        preprocessor = Preprocessor(checkpoint.folder, card, plan)  # refuses a tokenizer that does not work
        plan = replace(plan, tokenizer_note=preprocessor.compare_with_files(checkpoint.folder))
        if model is None or Path(model).expanduser().is_dir():  # of a hub id only the card's files were fetched
            check_weights(checkpoint.folder, card)
    console.print_card(card, plan, checkpoint, as_json=as_json)


@app.command(
    help=help_text(
        "Write a checkpoint with pickled weights (pytorch_model.bin) anew, with safetensors.",
        ("whimbrel convert BAAI/bge-m3 --out bge-m3", "a model of the Hub"),
        ("whimbrel serve ./bge-m3", "and then"),
    )
)
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub id.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new folder.", show_default=False)],
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    accept_config: AcceptConfig = None,
) -> None:
    """Write a checkpoint with pickled weights anew, with safetensors."""
    need("torch")
    from whimbrel.checkpoint.convert import convert as convert_checkpoint
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.cli import console
    from whimbrel.model.load import check_weights

    checkpoint = resolve_checkpoint(model, pickles=True)
    accepted = tuple(accept_config or ())
    card = read_card(
        checkpoint.folder,
        checkpoint.name,
        pooling=read_pooling(pooling),
        reranker=read_reranker(reranker),
        accept_config=accepted,
        tokenizer="transformers",  # any: the weights do not depend on it
    )
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


@app.command(
    help=help_text(
        "List the verified models, with their difference from the reference.",
        ("whimbrel models", "a table"),
        ("whimbrel models --json", "with the tests"),
    )
)
def models(*, as_json: AsJson = False) -> None:
    """List the verified models, with their difference from the reference."""
    from whimbrel.cli import console

    console.print_models(as_json=as_json)


@app.command(
    help=help_text(
        "Compare a model's real weights with a reference. The exit code is 1 if a difference is too large.",
        ("whimbrel verify", "the packaged model, with Sentence Transformers"),
        ("whimbrel verify path/to/checkpoint --json", "as JSON"),
        ("whimbrel verify MODEL --against URL --dialect tei", "with another server"),
    )
)
def verify(
    model: ModelArgument = None,
    *,
    against: Annotated[
        str | None,
        option("URL", "Server of the same model to compare with. [default: Sentence Transformers]", panel=REFERENCE_PANEL),
    ] = None,
    dialect: Annotated[
        Literal["whimbrel", "openai", "tei", "cohere"],
        typer.Option(help="API of the server.", rich_help_panel=REFERENCE_PANEL),
    ] = "whimbrel",
    remote_model: Annotated[
        str | None, option("NAME", "Name of the model on the server. [default: MODEL]", panel=REFERENCE_PANEL)
    ] = None,
    device: Device = "auto",
    tokenizer: TokenizerOption = "auto",
    accept_config: AcceptConfig = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's real weights with a reference."""
    need("torch")
    from whimbrel.cli import verify as verification

    server = verification.Server(against, dialect, remote_model) if against else None
    code = verification.run(
        model, server, device=device, tokenizer=tokenizer, accept_config=accept_config or (), as_json=as_json
    )
    raise typer.Exit(code)


@app.command(
    help=help_text(
        "Check this installation and machine. Put the output into a bug report. The exit code is 1 if something is wrong.",
        ("whimbrel doctor", "one screen"),
        ("whimbrel doctor --json", "as JSON"),
    )
)
def doctor(*, as_json: AsJson = False) -> None:
    """Check this installation and machine."""
    from whimbrel.cli import doctor as checks

    raise typer.Exit(checks.run(as_json=as_json))


def main() -> None:
    """Run the command line. The exit code is 0, 1 for an error, 2 for wrong usage or 130 after Ctrl-C."""
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
        _die("out of memory.", "reduce --max-batch-tokens or --max-length")


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
