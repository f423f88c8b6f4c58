"""Foreground server: socket, load progress, startup banner with commands to paste, and exit code."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from whimbrel.checkpoint.left_out import left_out, stated_architecture
from whimbrel.checkpoint.locate import default_names
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.console import describe_tokenizer, kernels_of, memory_of_batches
from whimbrel.cli.progress import LoadProgress
from whimbrel.dialects.common.responses import served_names
from whimbrel.errors import SetupError
from whimbrel.server.http.limits import BACKLOG, limit_silence
from whimbrel.server.processes.messages import Planned, ServeOptions
from whimbrel.server.processes.supervisor import Supervisor
from whimbrel.types.card import Card, Output
from whimbrel.types.machine_limits import usable_processors
from whimbrel.types.plan import Plan

_EMBEDDINGS: Final = "/v1/embeddings"


def choose_workers() -> int:
    """Return the default number of HTTP processes: one for each 8 processors that this process may use, 1 to 4."""
    return max(1, min(4, usable_processors() // 8))


def names_of_models(served_names: Sequence[str], *, num_models: int) -> list[tuple[str, ...]]:
    """Return the names of each model from the values of --served-name. Raises SetupError."""
    split = [tuple(name.strip() for name in value.split(",")) for value in served_names]
    if num_models == 1:
        split = [tuple(name for names in split for name in names)]
    if len(split) > num_models:
        raise SetupError(f"--served-name is given {len(split)} times, for {num_models} models.", hint="give it once per MODEL")
    names = [name for each in split for name in each]
    if not all(names) or len(set(names)) < len(names):
        raise SetupError("--served-name is empty or names two models alike.", hint="give every model names of its own")
    return [*split, *[()] * (num_models - len(split))]


def name_models(models: Sequence[str | None], served_names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names of each model: those of --served-name, or the model's own. Raises SetupError if two share a name."""
    given = names_of_models(served_names, num_models=len(models))
    names = [own or default_names(model) for model, own in zip(models, given, strict=True)]
    counts = Counter(name for own in names for name in own)
    if shared := [name for name, count in counts.items() if count > 1]:
        raise SetupError(
            f"two models are named {shared[0]}.", hint="give each MODEL a name, in their order: --served-name A --served-name B"
        )
    return names


def names_of_adapters(values: Sequence[str], models: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return, for each model, the folders of its adapters by name, from the values of --adapter. Raises SetupError.

    `models` has the names by which a value may choose each model. A server of one model needs none. Folders are absolute and
    without links, so that an engine that starts again has the same adapters.
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
        chosen[0][name] = str(Path(folder).expanduser().resolve())
    return adapters


def serve_until_stopped(options: ServeOptions, listener: socket.socket, *, console: Console) -> int:
    """Load the models, print a banner and serve until a signal. Returns the exit code. Raises SetupError."""
    if listener.family != socket.AF_UNIX:
        limit_silence(listener, options.limits.write_pause)
    progress = LoadProgress(console, [each.model or "the packaged model" for each in options.models])

    def on_ready(planned: list[Planned]) -> None:
        progress.finish()
        models = [
            (
                Path(each.folder),
                read_card(
                    Path(each.folder),
                    each.card_name,
                    pooling=model.pooling,
                    reranker=model.reranker,
                    accept_config=each.plan.accept_config,
                    adapters=each.plan.adapters,
                    tokenizer=model.options.get("tokenizer"),
                ),
                each.plan,
            )
            for each, model in zip(planned, options.models, strict=True)
        ]
        _print_banner(console, models, options, listener)
        if _is_open(listener) and not options.limits.api_keys:
            console.print("warning: anyone who reaches this address can use the server; set --api-key", style="yellow")

    async def run() -> int:
        asyncio.get_running_loop().call_soon(progress.start)  # when the supervisor handles signals
        return await Supervisor(
            options, listener, on_phase=progress.start_phase, on_bytes=progress.read, on_ready=on_ready
        ).run()

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
            _refuse_living(path)
            path.unlink()
        sock = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        reason = "there is another file" if path.exists() else error.strerror or error
        hint = "--uds takes a path of at most some 100 bytes in a folder that can be written to"
        raise SetupError(f"cannot listen on {path}: {reason}.", hint=hint) from None
    return sock


def _refuse_living(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise SetupError(f"cannot listen on {path}: another server does.", hint="choose another --uds")


class _UnixSocket(socket.socket):
    """A socket whose file goes with it."""

    def close(self) -> None:
        if self.fileno() >= 0:
            with suppress(OSError):
                Path(self.getsockname()).unlink()
        super().close()


def _is_open(listener: socket.socket) -> bool:
    """Return whether other machines may reach the server."""
    return listener.family != socket.AF_UNIX and not ip_address(listener.getsockname()[0]).is_loopback


def _server_url(listener: socket.socket, options: ServeOptions) -> tuple[str, str]:
    """Return the URL for calls from this machine, and what curl needs besides."""
    scheme = "http" if options.tls is None else "https"
    insecure = (
        "" if options.tls is None else " --insecure"
    )  # the certificate names the host that clients call, not this address
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost", f" --unix-socket {listener.getsockname()}{insecure}"
    address, port = listener.getsockname()[:2]
    return f"{scheme}://{_url_host(address)}:{port}", insecure


def _url_host(address: str) -> str:
    """Return the host part of a URL for calls from this machine; 127.0.0.1 for a wildcard address."""
    if address in ("0.0.0.0", "::"):  # noqa: S104
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _print_banner(
    console: Console, models: list[tuple[Path, Card, Plan]], options: ServeOptions, listener: socket.socket
) -> None:
    url, curl_options = _server_url(listener, options)
    has_key = bool(options.limits.api_keys)
    console.print()
    for folder, card, plan in models:
        files = {"class": stated_architecture(folder, card), "left out": ", ".join(left_out(folder, card))}
        for name, value in (_summary(card, plan) | {name: text for name, text in files.items() if text}).items():
            console.print(f"  [bold]{name:<14}[/bold]{escape(value)}")
        if len(models) > 1:
            console.print()
    pages = f"playground; docs: {url}/docs" if options.limits.playground else f"docs: {url}/docs"
    processes = f"{_count(options.num_replicas * len(models), 'engine')}, {_count(options.num_workers, 'HTTP worker')}"
    for name, value in {
        "processes": processes,
        "waiting": _waiting(models, options),
        "API key": "required" if has_key else "none",
        "URL": f"{url}  ({pages})" if listener.family != socket.AF_UNIX else f"unix:{listener.getsockname()}",
    }.items():
        console.print(f"  [bold]{name:<14}[/bold]{escape(value)}")
    header = ' -H "Authorization: Bearer $WHIMBREL_API_KEY"' if has_key else ""
    imports, key = ("import os; ", ', api_key=os.environ["WHIMBREL_API_KEY"]') if has_key else ("", "")
    card, first = models[0][1], models[0][2].served_name
    model, option = ({"model": first}, f", model={first!r}") if len(models) > 1 else ({}, "")
    path, body = _example(card)
    curl = (
        f"""curl{curl_options} {url}{path} -H 'Content-Type: application/json'{header} -d '{json.dumps({**model, **body})}'"""
    )
    python = (
        f'{imports}from whimbrel import Client\nclient = Client("{url}"{key}{option})\nprint(client.embed("Hello, whimbrel!"))'
    )
    with_key = ", with WHIMBREL_API_KEY set to the key" if has_key else ""
    console.print(f"\n[bold]In a shell[/bold]{with_key}\n{escape(curl)}")
    if path == _EMBEDDINGS and listener.family != socket.AF_UNIX:
        console.print(f"\n[bold]In Python[/bold] ({escape(_interpreter())}){with_key}\n{escape(python)}\n")


def _waiting(models: list[tuple[Path, Card, Plan]], options: ServeOptions) -> str:
    """Return the bounds of the work that may wait."""
    bodies, tokens = (
        options.num_workers * options.limits.max_inflight_bytes,
        min(plan.max_queue_tokens for _, _, plan in models),
    )
    return f"up to {bodies / 2**20:,.0f} MiB of bodies, {tokens:,} tokens in each engine; then clients wait until they are read"


def _example(card: Card) -> tuple[str, Mapping[str, object]]:
    """Return the path and the body of a request that suits the model."""
    if "dense" in card.outputs and not card.text_formats and (not card.towers or None in card.tower_of):
        return _EMBEDDINGS, {"input": "Hello, whimbrel!"}
    if card.judges_pairs or (card.text_formats and "multi_vector" in card.outputs):
        documents = ["On coasts of Africa.", "In a sandwich."]
        return "/v1/rerank", {"query": "Where do whimbrels winter?", "documents": documents}
    return "/v1/embed", {"input": "Hello, whimbrel!"} | ({"input_type": "query"} if card.towers else {})


def _summary(card: Card, plan: Plan) -> dict[str, str]:
    limits = [f"{min(form.max_length, plan.max_length):,} of a {kind}" for kind, form in card.text_formats.items()]
    longest = f"{plan.max_length:,} tokens"
    others = [f"{each.name} of {each.other_base}" for each in card.encoder.lora if each.other_base]
    summary = {
        "model": ", ".join((plan.served_name, *plan.aliases)),
        "outputs": ", ".join(f"{name} ({_shape(output, plan)})" for name, output in card.outputs.items()),
        "max length": f"{', '.join(limits)}; a request may set up to {longest}" if limits else longest,
        "device": f"{plan.device} ({_count(plan.num_lanes, 'lane')})",
        "dtype": plan.dtype,
        "int8": plan.int8 and str(plan.int8),
        "long texts": plan.split_long and "run in parts, unless a request asks to cut them (--split-long)",
        "batch": plan.chunked_prefill and f"{plan.max_batch_tokens:,} tokens; longer texts run in pieces",
        "batch memory": plan.batch_bytes and memory_of_batches(plan),
        "prefix cache": plan.prefix_cache_bytes and f"{plan.prefix_cache_bytes:,} bytes",
        "adapters": ", ".join(served_names(plan)[1 + len(plan.aliases) :] if plan.adapters else ()),
        "warning": others and f"made for a model of another name: {', '.join(others)}",
        "tokenizer": describe_tokenizer(card, plan),
        "commit": plan.commit,
        "accepted": plan.accept_config and f"{', '.join(plan.accept_config)} (unknown keys of the checkpoint)",
        "CPU": plan.device == "cpu" and str(plan.cpu),
        "kernels": plan.device == "cpu" and kernels_of(plan),
        "PyTorch": plan.torch_note and f"{plan.torch}: {plan.torch_note}",
        "same bits": plan.same_bits is False and f"no: {plan.same_bits_reason}",
    }
    return {name: text for name, text in summary.items() if isinstance(text, str) and text}


def _shape(output: Output, plan: Plan) -> str:
    if output.rows == "entry":
        return "by token id"
    default = f"{output.default_width} of " if 0 < output.default_width < output.width else ""
    parts = [f"{default}{output.width}{' or fewer' if plan.matryoshka and output.activation == 'normalize' else ''}"]
    if output.modes:
        parts.append(" + ".join(output.modes))
    if output.activated and output.activation != "identity":
        parts.append({"normalize": "normalised"}.get(output.activation, output.activation))
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _interpreter() -> str:
    """Return the path of this Python, relative to the working directory if it is inside."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
