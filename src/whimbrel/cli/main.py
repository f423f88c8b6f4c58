"""The `whimbrel` command: options, defaults and exit codes.

Data goes to stdout, everything else to stderr. An error is one line and a hint. A command imports the heavy packages that it
needs when it runs, so `--help` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TypeVar

import typer
from rich.markup import escape

from whimbrel.errors import CheckpointError, SetupError, WhimbrelError

if TYPE_CHECKING:
    from whimbrel.types.card import PoolingOption, RerankerName
    from whimbrel.types.plan import Plan

Choice = TypeVar("Choice", bound=str)

app = typer.Typer(
    name="whimbrel",
    help="Serve and run models for embeddings, reranking and classification.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_MAX_REQUEST_TOKENS: Final = 2**20
_MAX_QUEUE_BYTES: Final = 2**31
"""Bytes of token ids and vectors of unanswered requests that one engine holds. It refuses more."""
_MAX_QUEUED_REQUESTS: Final = 4
"""Number of requests of the maximum size that a server queues by default."""

_MODEL_HELP: Final = "Checkpoint folder or Hub id (owner/name). [default: the packaged all-MiniLM-L6-v2]"


_MODEL_PANEL: Final = "Model"
_SERVER_PANEL: Final = "Server"
_LIMITS_PANEL: Final = "Limits"
_SECURITY_PANEL: Final = "Security"
_LOGS_PANEL: Final = "Logs and metrics"
_OUTPUT_PANEL: Final = "Input and output"
_REFERENCE_PANEL: Final = "Reference"


def _option(metavar: str, text: str, *names: str, panel: str = _MODEL_PANEL, **rest: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=escape(text), rich_help_panel=panel, **rest)


def _flag(name: str, text: str, *, panel: str = _MODEL_PANEL) -> Any:
    return typer.Option(name, help=escape(text), rich_help_panel=panel)


def _model_argument(text: str) -> Any:
    return typer.Argument(metavar="MODEL", help=escape(text))


def _help(summary: str, *examples: tuple[str, str]) -> str:
    """Return the help text of a command: its examples with what they do, then the summary."""
    width = max(len(command) for command, _ in examples)
    lines = "\n".join(f"  {command:<{width}}  {meaning}".rstrip() for command, meaning in examples)
    return f"{summary}\n\n\b\nExamples:\n{escape(lines)}"


ModelArgument = Annotated[str | None, _model_argument(_MODEL_HELP)]
ModelOption = Annotated[str | None, _option("MODEL", _MODEL_HELP, "--model", "-m")]
Device = Annotated[str, _option("DEVICE", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.")]
Dtype = Annotated[
    str,
    _option(
        "DTYPE", "auto, float32, bfloat16, or float16 (GPU only). auto takes bfloat16 where the hardware has it, else float32."
    ),
]
MaxLength = Annotated[
    int | None,
    _option("N", "Maximum tokens per text, at most the model's number of positions. [default: from the checkpoint]"),
]
MaxBatchTokens = Annotated[
    int | None,
    _option(
        "N", "Maximum tokens in one batch, 1 to 1048576. A longer text runs alone. [default: 512 on a CPU, 16384 on a GPU]"
    ),
]
PoolingArgument = Annotated[
    str | None,
    _option(
        "NAME",
        "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
        "lasttoken, splade or math-shepherd.",
    ),
]
RerankerOption = Annotated[
    str | None,
    _option("NAME", "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank."),
]
AcceptConfig = Annotated[
    list[str] | None,
    _option(
        "KEY",
        "Accept this key of the checkpoint's JSON files, which Whimbrel does not know and would refuse. May be repeated.",
        "--accept-config",
    ),
]
AsJson = Annotated[bool, _flag("--json", "Print JSON instead of text.", panel=_OUTPUT_PANEL)]
Matryoshka = Annotated[
    bool, _flag("--matryoshka", "Allow truncated vectors (`dimensions`) for a model whose files do not declare it.")
]


def _seconds(text: str, *, least: float) -> Any:
    return _option("SECONDS", text, panel=_LIMITS_PANEL, min=least, callback=_check_finite)


def _check_finite(seconds: float) -> float:
    if not isfinite(seconds):
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
    help=_help(
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
        _model_argument("Checkpoint folders or Hub ids (owner/name). [default: the packaged all-MiniLM-L6-v2]"),
    ] = None,
    *,
    host: Annotated[str, _option("HOST", "Address to listen on.", panel=_SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[
        int, _option("PORT", "Port to listen on. 0 takes any free port.", min=0, max=65535, panel=_SERVER_PANEL)
    ] = 8000,
    uds: Annotated[
        Path | None, _option("PATH", "Unix socket to listen on, in place of host and port.", panel=_SERVER_PANEL)
    ] = None,
    root_path: Annotated[
        str, _option("PATH", "Prefix under which a proxy shows the server, e.g. /embeddings.", panel=_SERVER_PANEL)
    ] = "",
    workers: Annotated[
        int | None,
        _option(
            "N", "Number of HTTP worker processes. [default: one per 8 cores, 1 to 4]", min=1, max=256, panel=_SERVER_PANEL
        ),
    ] = None,
    replicas: Annotated[int, _option("N", "Number of engine processes per model.", min=1, max=256, panel=_SERVER_PANEL)] = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    served_name: Annotated[
        list[str] | None,
        _option(
            "NAME",
            "Model name for clients, or several separated by commas. Repeat it for the next MODEL. [default: MODEL]",
            panel=_SERVER_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            "KEY", "Require this API key of every client. May be repeated. [env var: WHIMBREL_API_KEY]", panel=_SECURITY_PANEL
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option(
            "PATH",
            "Require one of the API keys in this file: one per line. Lines that start with # are comments.",
            panel=_SECURITY_PANEL,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "NAME",
            "Host name that clients may use. May be repeated. * accepts any. "
            "[default: localhost if only this machine can connect, else any]",
            panel=_SECURITY_PANEL,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _option(
            "ORIGIN",
            "Accept browser requests from pages of this origin (CORS). May be repeated. * accepts any.",
            panel=_SECURITY_PANEL,
        ),
    ] = None,
    public_metrics: Annotated[
        bool, _flag("--public-metrics", "Serve /metrics without an API key.", panel=_SECURITY_PANEL)
    ] = False,
    ssl_certfile: Annotated[
        Path | None,
        _option("PATH", "Speak TLS with this certificate chain (PEM). SIGHUP reads it again.", panel=_SECURITY_PANEL),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, _option("PATH", "The certificate's key (PEM). [default: in --ssl-certfile]", panel=_SECURITY_PANEL)
    ] = None,
    ssl_keyfile_password: Annotated[
        str | None,
        _option("TEXT", "Password of an encrypted key. [env var: WHIMBREL_SSL_KEYFILE_PASSWORD]", panel=_SECURITY_PANEL),
    ] = None,
    forwarded_allow_ips: Annotated[
        list[str] | None,
        _option(
            "IP",
            "Believe X-Forwarded-For, -Proto and -Host from these proxies: addresses and networks with commas. "
            "unix is a Unix socket, * any peer. [default: none]",
            panel=_SECURITY_PANEL,
        ),
    ] = None,
    max_length: MaxLength = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_request_tokens: Annotated[
        int, _option("N", "Maximum tokens in one request.", min=1, panel=_LIMITS_PANEL)
    ] = _MAX_REQUEST_TOKENS,
    max_queue_tokens: Annotated[
        int | None,
        _option(
            "N",
            "Maximum tokens in the queue of one engine. Above it, requests get 429. [default: 4 * --max-request-tokens]",
            min=1,
            panel=_LIMITS_PANEL,
        ),
    ] = None,
    max_queue_seconds: Annotated[
        float, _seconds("Maximum expected time in the queue. Above it, requests get 429.", least=0.1)
    ] = 30.0,
    document_cache_bytes: Annotated[
        int,
        _option(
            "BYTES",
            "Memory for a cache of reranked documents' token vectors (late interaction). 0 disables it.",
            min=0,
            panel=_LIMITS_PANEL,
        ),
    ] = 0,
    drain_timeout: Annotated[float, _seconds("Time to finish accepted requests after SIGINT or SIGTERM.", least=0)] = 30.0,
    step_timeout: Annotated[
        float, _seconds("Maximum time for one batch. After it, the engine process is replaced.", least=0.1)
    ] = 60.0,
    pooling: PoolingArgument = None,
    reranker: RerankerOption = None,
    matryoshka: Matryoshka = False,
    split_long: Annotated[
        bool,
        _flag(
            "--split-long",
            "Run texts above the limit in parts, unless a request asks to cut them: the mean of the parts' dense vectors.",
        ),
    ] = False,
    accept_config: AcceptConfig = None,
    adapter: Annotated[
        list[str] | None,
        _option("NAME=FOLDER", "LoRA adapter as PEFT saves it, which requests choose by MODEL:NAME. Repeatable.", "--adapter"),
    ] = None,
    log_format: Annotated[
        Literal["plain", "json"], typer.Option(help="Format of log lines.", rich_help_panel=_LOGS_PANEL)
    ] = "plain",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Minimum log level.", rich_help_panel=_LOGS_PANEL)
    ] = "info",
    access_log: Annotated[bool, _flag("--access-log", "Log one line per request.", panel=_LOGS_PANEL)] = False,
    otel: Annotated[
        bool, _flag("--otel", "Send OpenTelemetry spans. Configure them with the OTEL_... variables.", panel=_LOGS_PANEL)
    ] = False,
) -> None:
    """Serve one or more models over HTTP."""
    _need("httptools", "torch")
    from whimbrel.cli import console
    from whimbrel.cli.serve import listen, listen_on_path, names_of_adapters, names_of_models, serve_until_stopped
    from whimbrel.server.app.limits import read_server_limits
    from whimbrel.server.app.proxies import read_proxies, read_root_path
    from whimbrel.server.http.tls import read_tls_files
    from whimbrel.server.processes.messages import ModelOptions, ServeOptions
    from whimbrel.telemetry import logs
    from whimbrel.telemetry import otel as spans
    from whimbrel.types.plan import Options

    if otel:
        spans.check()
    screen = console.stderr_console()
    model_ids: list[str | None] = [*models] if models else [None]
    if len(set(model_ids)) < len(model_ids) and not served_name:
        raise SetupError(
            "a model is named twice.",
            hint="pass --replicas for several engines of one model, or --served-name to tell them apart",
        )
    names = names_of_models(served_name or [], num_models=len(model_ids))
    adapters = names_of_adapters(adapter or (), num_models=len(model_ids))
    tls = read_tls_files(ssl_certfile, ssl_keyfile, ssl_keyfile_password)
    with listen_on_path(uds) if uds else listen(host, port) as listener:
        limits = read_server_limits(
            address=None if uds else listener.getsockname()[0],
            api_keys=api_key or (),
            api_key_file=api_key_file,
            allowed_hosts=allowed_host or (),
            cors_origins=cors_origin or (),
            public_metrics=public_metrics,
            root_path=read_root_path(root_path),
            forwarded_allow_ips=read_proxies(forwarded_allow_ips or ()),
            secrets=[ssl_keyfile_password or ""],
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
                        served_name=own_names[0] if own_names else None,
                        aliases=own_names[1:],
                        max_length=max_length,
                        max_batch_tokens=max_batch_tokens,
                        max_request_tokens=max_request_tokens,
                        max_queue_tokens=max_queue_tokens or _MAX_QUEUED_REQUESTS * max_request_tokens,
                        max_queue_seconds=max_queue_seconds,
                        max_queue_bytes=_MAX_QUEUE_BYTES,
                        matryoshka=matryoshka,
                        split_long=split_long,
                        document_cache_bytes=document_cache_bytes,
                        accept_config=tuple(accept_config or ()),
                        adapters=adapters,
                    ),
                    _reranker(reranker),
                )
                for model, own_names in zip(model_ids, names, strict=True)
            ),
            limits=limits,
            num_workers=workers or max(1, min(4, (os.cpu_count() or 1) // 8)),
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


@app.command(
    help=_help(
        "Embed texts without a server: one vector per text.",
        ('whimbrel embed "some text"', "JSON lines to stdout"),
        ("whimbrel embed -o vectors.npy < lines.txt", "a numpy array"),
        ('whimbrel embed -m MODEL --prompt query "text"', "with the model's prompt"),
    )
)
def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help=escape("Texts to embed. [default: the lines of stdin]"))
    ] = None,
    *,
    model: ModelOption = None,
    out: Annotated[
        Path | None,
        _option(
            "PATH",
            "Output file: an array if it ends in .npy, else JSONL. [default: JSONL to stdout]",
            "--out",
            "-o",
            panel=_OUTPUT_PANEL,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        _option("PROMPT", "Name of one of the model's prompts, or a text to put before each input.", panel=_OUTPUT_PANEL),
    ] = None,
    dimensions: Annotated[
        int | None, _option("N", "Keep the first N columns of each vector. [default: all]", min=1, panel=_OUTPUT_PANEL)
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_length: MaxLength = None,
    pooling: PoolingArgument = None,
    matryoshka: Matryoshka = False,
    accept_config: AcceptConfig = None,
) -> None:
    """Embed texts without a server: one vector per text."""
    _need("torch")
    from whimbrel.cli import console
    from whimbrel.types.plan import Options

    if not texts and sys.stdin.isatty():
        raise SetupError("nothing to embed.", hint='whimbrel embed "some text", or whimbrel embed < lines.txt')
    accepted = tuple(accept_config or ())
    options = Options(device=device, dtype=dtype, max_length=max_length, matryoshka=matryoshka, accept_config=accepted)
    with console.load(console.stderr_console(), model, pooling=_pooling(pooling), **options) as engine:
        chunks = console.chunked(texts or console.read_lines(sys.stdin.buffer))
        vectors = ((chunk, engine.embed(chunk, prompt=prompt, dimensions=dimensions)) for chunk in chunks)
        dense = engine.card.dense
        console.write_vectors(out, vectors, dimension=dimensions or dense.default_width or dense.width)


@app.command(
    help=_help(
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
    matryoshka: Matryoshka = False,
    accept_config: AcceptConfig = None,
    as_json: AsJson = False,
) -> None:
    """Show a model and how it would run here. Reads only the headers of its weights."""
    from whimbrel.checkpoint.locate import resolve_checkpoint
    from whimbrel.checkpoint.reader import read_card
    from whimbrel.cli import console
    from whimbrel.types.plan import Options, make_plan

    checkpoint = resolve_checkpoint(model, weights=False)
    accepted = tuple(accept_config or ())
    card = read_card(
        checkpoint.folder,
        checkpoint.name,
        pooling=_pooling(pooling),
        reranker=_reranker(reranker),
        accept_config=accepted,
    )
    plan: Plan | None = None
    if _installed("torch"):
        from whimbrel.model.load import check_weights
        from whimbrel.model.runner import probe

        options = Options(
            device=device,
            dtype=dtype,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            max_request_tokens=_MAX_REQUEST_TOKENS,
            max_queue_tokens=_MAX_QUEUED_REQUESTS * _MAX_REQUEST_TOKENS,
            matryoshka=matryoshka,
            accept_config=accepted,
        )
        plan = make_plan(options, card, probe())
        if model is None or Path(model).expanduser().is_dir():  # of a hub id only the card's files were fetched
            check_weights(checkpoint.folder, card)
    console.print_card(card, plan, checkpoint.folder, as_json=as_json)


@app.command(
    help=_help(
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
    _need("torch")
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
        pooling=_pooling(pooling),
        reranker=_reranker(reranker),
        accept_config=accepted,
    )
    stderr = console.stderr_console()
    with _signals_exit(), stderr.status("converting") as status:
        done = convert_checkpoint(
            checkpoint, out, path=card.path, check=lambda folder: check_weights(folder, card), progress=status.update
        )
    stderr.print(f"wrote {done.num_tensors:,} tensors, {done.num_bytes / 1e6:,.0f} MB, to {done.folder}", soft_wrap=True)


@app.command(
    help=_help(
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
    help=_help(
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
        _option("URL", "Server of the same model to compare with. [default: Sentence Transformers]", panel=_REFERENCE_PANEL),
    ] = None,
    dialect: Annotated[
        Literal["whimbrel", "openai", "tei", "cohere"],
        typer.Option(help="API of the server.", rich_help_panel=_REFERENCE_PANEL),
    ] = "whimbrel",
    remote_model: Annotated[
        str | None, _option("NAME", "Name of the model on the server. [default: MODEL]", panel=_REFERENCE_PANEL)
    ] = None,
    device: Device = "auto",
    accept_config: AcceptConfig = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model's real weights with a reference."""
    _need("torch")
    from whimbrel.cli import verify as verification

    server = verification.Server(against, dialect, remote_model) if against else None
    raise typer.Exit(verification.run(model, server, device=device, accept_config=accept_config or (), as_json=as_json))


@app.command(
    help=_help(
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
        _die(str(error), error.hint if isinstance(error, SetupError | CheckpointError) else None)
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


@contextmanager
def _signals_exit() -> Generator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can tidy up."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]  # nohup
    before = [(each, signal.signal(each, leave)) for each in handled]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


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


def _one_of(option: str, name: str | None, choices: Collection[Choice]) -> Choice | None:
    match = next((choice for choice in choices if choice == name), None)
    if name is not None and match is None:
        raise SetupError(f"no {option} {name!r}.", hint=f"--{option} takes one of: {', '.join(choices)}")
    return match
