"""Foreground server: socket, names of models, load progress and exit code."""

import asyncio
import select
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from whimbrel.cli.banner import print_banner
from whimbrel.cli.console import stderr_console
from whimbrel.cli.progress import LoadProgress
from whimbrel.cli.serve_options import first_reader
from whimbrel.errors import SetupError
from whimbrel.server.batches.store import Store, StoreLimits
from whimbrel.server.config_file import Config
from whimbrel.server.http.limits import BACKLOG, limit_silence
from whimbrel.server.processes.messages import BytesRead, Phase, Planned, ServeOptions, read_planned_card
from whimbrel.server.processes.supervisor import Supervisor
from whimbrel.telemetry import audit, logs
from whimbrel.telemetry import otel as spans


def serve(models: Sequence[str], read: Callable[[], Config]) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError.

    `read` reads the configuration: now, and at a SIGHUP if it has a file.
    """
    config = read()
    settings = config.settings
    if settings.otel:
        spans.check()
    if settings.audit_log is not None:
        audit.check(settings.audit_log.expanduser().resolve())
    screen = stderr_console()

    def warn(text: str) -> None:
        screen.print(f"warning: {text}", style="yellow", markup=False)

    reader = first_reader(models, config)
    with listen_on_path(settings.uds) if settings.uds else listen(settings.host, settings.port) as listener:
        address = None if settings.uds else listener.getsockname()[0]
        options = reader.options(config, address, warn)
        if options.limits.batch_dir:
            Store(Path(options.limits.batch_dir), StoreLimits()).prepare()
        logs.configure(options.logs, process="supervisor", secrets=options.limits.api_keys)
        again = None if config.file is None else partial(reader.read_again, read, address)
        return serve_until_stopped(options, listener, console=screen, read_again=again)


def serve_until_stopped(
    options: ServeOptions, listener: socket.socket, *, console: Console, read_again: Callable[[], ServeOptions] | None = None
) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError.

    `read_again` gives the options as they are at a SIGHUP, and raises SetupError.
    """
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
        return await Supervisor(options, listener, on_load=on_load, on_ready=on_ready, read_again=read_again).run()

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
