"""Foreground server: socket, names of models, load progress and exit code."""

import asyncio
import select
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from rich.console import Console

from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.locate import default_names
from whimbrel.cli.banner import print_banner
from whimbrel.cli.console import stderr_console
from whimbrel.cli.flags import read_choice
from whimbrel.cli.progress import LoadProgress
from whimbrel.errors import SetupError
from whimbrel.server.app.limits import engine_options, read_server_limits
from whimbrel.server.http.limits import BACKLOG, limit_silence
from whimbrel.server.http.tls import read_tls_files
from whimbrel.server.processes.messages import BytesRead, ModelOptions, Phase, Planned, ServeOptions, read_planned_card
from whimbrel.server.processes.model_table import read_keep
from whimbrel.server.processes.supervisor import Supervisor
from whimbrel.server.settings import Settings
from whimbrel.telemetry import logs
from whimbrel.telemetry import otel as spans
from whimbrel.types.machine_limits import WaitingMemory, expects_gpu, share_waiting_memory, usable_memory, usable_processors
from whimbrel.types.plan import Options


def serve(models: Sequence[str], settings: Settings) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError."""
    if settings.otel:
        spans.check()
    screen = stderr_console()
    model_ids: list[str | None] = [*models] if models else [None]
    num_workers = settings.workers or choose_workers(settings.device)
    waiting = share_waiting_memory(usable_memory(), num_workers=num_workers, num_engines=settings.replicas * len(model_ids))
    served = _models(model_ids, settings, waiting)
    tls = read_tls_files(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    with listen_on_path(settings.uds) if settings.uds else listen(settings.host, settings.port) as listener:
        limits = read_server_limits(
            settings,
            address=None if settings.uds else listener.getsockname()[0],
            max_inflight_bytes=waiting.bodies,
            warn=lambda text: screen.print(f"warning: {text}", style="yellow", markup=False),
        )
        options = ServeOptions(
            models=served,
            limits=limits,
            num_workers=num_workers,
            drain_seconds=settings.drain_timeout,
            step_seconds=settings.step_timeout,
            logs=logs.LogOptions(settings.log_format, settings.log_level, settings.access_log),
            otel=settings.otel,
            tls=tls,
            memory=settings.memory,
            defaults=_defaults(settings, waiting),
        )
        logs.configure(options.logs, process="supervisor", secrets=limits.secrets)
        return serve_until_stopped(options, listener, console=screen)


def _models(model_ids: Sequence[str | None], settings: Settings, waiting: WaitingMemory) -> tuple[ModelOptions, ...]:
    """Return the models to serve, with their names and adapters. Raises SetupError."""
    if len(set(model_ids)) < len(model_ids) and not settings.served_name:
        raise SetupError(
            "a model is named twice.",
            hint="pass --replicas for several engines of one model, or --served-name to tell them apart",
        )
    names = name_models(model_ids, settings.served_name)
    known = [(model or packaged.NAME, *default_names(model), *own) for model, own in zip(model_ids, names, strict=True)]
    shared, keep = _defaults(settings, waiting), read_keep(settings.keep)
    return tuple(
        ModelOptions(
            model,
            read_choice("pooling", settings.pooling),
            shared | Options(served_name=own_names[0], aliases=own_names[1:], adapters=own_adapters),
            read_choice("reranker", settings.reranker),
            settings.replicas,
            keep,
        )
        for model, own_names, own_adapters in zip(model_ids, names, names_of_adapters(settings.adapter, known), strict=True)
    )


def _defaults(settings: Settings, waiting: WaitingMemory) -> Options:
    """Return the options of an engine that all models share."""
    bounds = Options(max_queue_tokens=settings.max_queue_tokens or waiting.tokens, max_queue_bytes=waiting.results)
    return engine_options(settings) | bounds


def choose_workers(device: str | None = None) -> int:
    """Return the default number of HTTP processes for the processors that this process may use.

    A CPU's engine wants most of them: one for each 8, 1 to 4. A GPU's engine leaves them to those who tokenize and encode: one
    for each 2, 1 to 16.
    """
    per_worker, most = (2, 16) if expects_gpu(device) else (8, 4)
    return max(1, min(most, usable_processors() // per_worker))


def name_models(models: Sequence[str | None], served_names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names of each model: those of --served-name, or the model's own. Raises SetupError if two share a name."""
    given = [tuple(name.strip() for name in value.split(",")) for value in served_names]
    if len(models) == 1:
        given = [tuple(chain(*given))]
    if len(given) > len(models):
        raise SetupError(f"--served-name is given {len(given)} times, for {len(models)} models.", hint="give it once per MODEL")
    stated = [*chain(*given)]
    if not all(stated) or len(set(stated)) < len(stated):
        raise SetupError("--served-name is empty or names two models alike.", hint="give every model names of its own")
    given += [()] * (len(models) - len(given))
    names = [own or default_names(model) for model, own in zip(models, given, strict=True)]
    counts = Counter(chain(*names))
    if shared := [name for name, count in counts.items() if count > 1]:
        raise SetupError(
            f"two models are named {shared[0]}.", hint="give each MODEL a name, in their order: --served-name A --served-name B"
        )
    return names


def names_of_adapters(values: Sequence[str], models: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return, for each model, the folders of its adapters by name, from the values of --adapter. Raises SetupError.

    `models` has the names by which a value may choose each model. A server of one model needs none.
    """
    adapters: list[dict[str, str]] = [{} for _ in models]
    for value in values:
        named, equals, folder = value.partition("=")
        model, colon, name = named.rpartition(":")
        if not equals or not name or not folder or (colon and not model):
            raise SetupError(f"--adapter takes NAME=FOLDER, not {value!r}.", hint="e.g. --adapter law=adapters/law")
        chosen = [own for own, names in zip(adapters, models, strict=True) if not model or model in names]
        if len(chosen) != 1:
            several = "no model" if not chosen else "one of several models" if not model else "several models"
            known = ", ".join(dict.fromkeys(each for names in models for each in names))
            raise SetupError(
                f"--adapter {value!r} is for {several}.", hint=f"name a model: --adapter MODEL:NAME=FOLDER, of {known}"
            )
        if name in chosen[0]:
            raise SetupError(f"two adapters have the name {name!r}.", hint="give each a name of its own")
        chosen[0][name] = str(Path(folder).expanduser().resolve())  # an engine that starts again has the same adapters
    return adapters


def serve_until_stopped(options: ServeOptions, listener: socket.socket, *, console: Console) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError."""
    if listener.family != socket.AF_UNIX:
        limit_silence(listener, options.limits.write_pause)
    progress = LoadProgress(console, [each.model or "the packaged model" for each in options.models])

    def on_ready(planned: list[Planned]) -> None:
        progress.finish()
        cards = [read_planned_card(model, each) for model, each in zip(options.models, planned, strict=True)]
        print_banner(console, list(zip(planned, cards, strict=True)), options, listener)

    def on_load(model: int, step: Phase | BytesRead) -> None:
        if isinstance(step, Phase):
            progress.start_phase(model, step.text)
        else:
            progress.read(model, step.done, step.total)

    async def run() -> int:
        asyncio.get_running_loop().call_soon(progress.start)  # when the supervisor handles signals
        return await Supervisor(options, listener, on_load=on_load, on_ready=on_ready).run()

    with closing(progress):
        code = asyncio.run(run())
    if select.select([], [sys.stderr], [], 1.0)[1]:  # stderr has a reader with room
        console.print("stopped")
    return code


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket that all workers share. No other process can listen on its address. Raises SetupError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise SetupError(f"cannot listen on {host}: {error}.", hint="--host takes an address of this machine") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        hint = f"choose another: --port {port + 1}" if 1024 <= port < 65535 else "choose another --port or --host"
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}.", hint=hint) from None
    return sock


def listen_on_path(path: Path) -> socket.socket:
    """Return a listening Unix socket that is removed at the end. One that a dead server left is replaced. Raises SetupError."""
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise SetupError(f"cannot listen on {path}: another server does.", hint="choose another path")
            path.unlink()
        sock = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        reason = "there is another file" if path.exists() else error.strerror or error
        hint = "uds takes a path of at most some 100 bytes in a folder that can be written to"
        raise SetupError(f"cannot listen on {path}: {reason}.", hint=hint) from None
    return sock


class _UnixSocket(socket.socket):
    """A socket whose file goes with it."""

    def close(self) -> None:
        if self.fileno() >= 0:
            with suppress(OSError):
                Path(self.getsockname()).unlink()
        super().close()
