"""Foreground server: socket, names of models, load progress and exit code."""

import asyncio
import os
import select
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.locate import default_names
from whimbrel.cli.banner import print_banner
from whimbrel.cli.console import stderr_console
from whimbrel.cli.progress import LoadProgress
from whimbrel.errors import SetupError
from whimbrel.server.app.limits import ServerLimits, engine_options, read_server_limits
from whimbrel.server.config_file import Config
from whimbrel.server.http.limits import BACKLOG, limit_silence
from whimbrel.server.http.tls import TlsFiles, read_tls_files
from whimbrel.server.keys import check_keys
from whimbrel.server.processes.messages import BytesRead, ModelOptions, Phase, Planned, ServeOptions, read_planned_card
from whimbrel.server.processes.supervisor import Supervisor
from whimbrel.server.secret_file import read_secret
from whimbrel.server.settings import ModelTable, Settings
from whimbrel.server.settings_table import OF_MODELS
from whimbrel.telemetry import audit, logs
from whimbrel.telemetry import otel as spans
from whimbrel.types.machine_limits import expects_gpu, share_waiting_memory, usable_memory, usable_processors
from whimbrel.types.plan import Options


def serve(models: Sequence[str], config: Config) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError."""
    settings = config.settings
    if settings.otel:
        spans.check()
    audit_log = settings.audit_log and settings.audit_log.expanduser().resolve()
    if audit_log is not None:
        audit.check(audit_log)
    screen = stderr_console()

    def warn(text: str) -> None:
        screen.print(f"warning: {text}", style="yellow", markup=False)

    served = models_to_serve(models, config)
    num_workers = settings.workers or max(choose_workers(model.options.get("device")) for model in served)
    num_engines = sum(model.num_replicas for model in served)
    waiting = share_waiting_memory(usable_memory(), num_workers=num_workers, num_engines=num_engines)
    bounds = Options(max_queue_tokens=settings.max_queue_tokens or waiting.tokens, max_queue_bytes=waiting.results)
    tls = read_tls(settings, warn)
    use_hub_token(settings, warn)
    with listen_on_path(settings.uds) if settings.uds else listen(settings.host, settings.port) as listener:
        address = None if settings.uds else listener.getsockname()[0]
        limits = _read_limits(config, address, waiting.bodies, warn)
        options = ServeOptions(
            models=tuple(replace(model, options=model.options | bounds) for model in served),
            limits=limits,
            num_workers=num_workers,
            drain_seconds=settings.drain_timeout,
            step_seconds=settings.step_timeout,
            logs=logs.LogOptions(settings.log_format, settings.log_level, settings.access_log),
            otel=settings.otel,
            audit_log="" if audit_log is None else str(audit_log),
            tls=tls,
        )
        logs.configure(options.logs, process="supervisor", secrets=limits.api_keys)
        return serve_until_stopped(options, listener, console=screen)


def check_config(config: Config, warn: Callable[[str], None]) -> None:
    """Raise SetupError if `serve` would refuse the configuration before it listens or loads a model."""
    models_to_serve((), config)
    read_tls(config.settings, warn)
    use_hub_token(config.settings, warn)
    _read_limits(config, None, config.settings.max_body_bytes, warn)


def _read_limits(config: Config, address: str | None, max_inflight_bytes: int, warn: Callable[[str], None]) -> ServerLimits:
    """Return limits and access rules. Raises SetupError, with the place of the setting that its message begins with."""
    try:
        return read_server_limits(
            config.settings, address=address, max_inflight_bytes=max_inflight_bytes, keys=config.keys, warn=warn
        )
    except SetupError as error:
        place = config.sources.get((error.message.partition(" ")[0],))
        raise (error if place is None else SetupError(f"{place}: {error.message}", hint=error.hint)) from None


def models_to_serve(model_ids: Sequence[str], config: Config) -> tuple[ModelOptions, ...]:
    """Return the models of the command line or of the file, with their names and adapters. Raises SetupError."""
    _refuse_unfinished(config)
    named = _models_of_file(model_ids, config) if config.models else _models_of_line(model_ids or [None], config.settings)
    known = [(table.model or packaged.NAME, *default_names(table.model), *names) for names, table in named]
    adapters = names_of_adapters(config.settings.adapter, known)
    served = tuple(
        ModelOptions(
            table.model,
            table.pooling,
            engine_options(config.settings, table)
            | Options(
                served_name=names[0],
                aliases=names[1:],
                adapters={name: str(folder.resolve()) for name, folder in (table.adapters or {}).items()} | of_line,
                prompts=table.prompts or {},
            ),
            table.reranker,
            table.replicas,
            table.keep_seconds,
        )
        for (names, table), of_line in zip(named, adapters, strict=True)
    )
    _check_keys(config, served)
    return served


def _refuse_unfinished(config: Config) -> None:
    """Raise SetupError for what a file may state but does nothing yet."""
    for name, table in config.models.items():
        if table.keep_seconds is not None:
            place = config.source("models", name, "keep")
            raise SetupError(
                f"{place}: {name} is to be kept {table.keep}; only always can be served yet.", hint='keep = "always"'
            )


def _models_of_line(model_ids: Sequence[str | None], settings: Settings) -> list[tuple[tuple[str, ...], ModelTable]]:
    """Return the names and settings of the models that the command line names. None is the packaged one."""
    if len(set(model_ids)) < len(model_ids) and not settings.served_name:
        raise SetupError(
            "a model is named twice.",
            hint="pass --replicas for several engines of one model, or --served-name to tell them apart",
        )
    shared = {key: getattr(settings, key) for key in OF_MODELS}
    names = name_models(model_ids, settings.served_name)
    return [(own, ModelTable(source=each, **shared)) for own, each in zip(names, model_ids, strict=True)]


def _models_of_file(model_ids: Sequence[str], config: Config) -> list[tuple[tuple[str, ...], ModelTable]]:
    """Return the names and settings of a file's models. Raises SetupError if the command line names models too."""
    if model_ids or config.settings.served_name:
        what = model_ids[0] if model_ids else config.source("served_name")
        hint = "models and their names stand in one place: add a table [models.NAME], or take those of the file away"
        raise SetupError(f"{what} is given, and {config.file} has models of its own.", hint=hint)
    return [((name, *table.names), table) for name, table in config.models.items()]


def read_tls(settings: Settings, warn: Callable[[str], None]) -> TlsFiles | None:
    """Return the files of TLS, after a try to load them. Raises SetupError."""
    password, file = settings.ssl_keyfile_password, settings.ssl_keyfile_password_file
    if file is not None:
        password = read_secret(file, "the password of the TLS key", warn)
    return read_tls_files(settings.ssl_certfile, settings.ssl_keyfile, password)


def use_hub_token(settings: Settings, warn: Callable[[str], None]) -> None:
    """Let engines find the hub's token, by the variable of huggingface_hub that names its file. Raises SetupError."""
    if settings.hf_token_file is not None:
        read_secret(settings.hf_token_file, "the hub's token", warn)
        os.environ["HF_TOKEN_PATH"] = str(settings.hf_token_file.absolute())


def _check_keys(config: Config, served: Sequence[ModelOptions]) -> None:
    """Raise SetupError if a key names a model or a route that is not served."""
    if not config.keys:
        return
    from whimbrel.server.app.openapi import key_routes

    names = [(model.options.get("served_name"), *model.options.get("aliases", ())) for model in served]
    check_keys(config.keys, models=[name for each in names for name in each if name], routes=key_routes())


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
