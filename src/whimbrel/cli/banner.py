"""Banner of a server: its models, limits and URL, with commands to paste."""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from whimbrel.checkpoint.summary import left_out, stated_architecture
from whimbrel.cli.console import count, describe_tokenizer, kernels_of, memory_of_batches, with_text
from whimbrel.dialects.common.responses import served_names
from whimbrel.server.processes.messages import Planned, ServeOptions
from whimbrel.types.card import Card, Output
from whimbrel.types.plan import Plan

_EMBEDDINGS: Final = "/v1/embeddings"


def _server_url(listener: socket.socket, options: ServeOptions) -> tuple[str, str]:
    """Return the URL for calls from this machine, and what curl needs besides."""
    scheme = "http" if options.tls is None else "https"
    # The certificate names the host that clients call, not this address.
    insecure = "" if options.tls is None else " --insecure"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost", f" --unix-socket {listener.getsockname()}{insecure}"
    address, port = listener.getsockname()[:2]
    host = "127.0.0.1" if address in ("0.0.0.0", "::") else f"[{address}]" if ":" in address else address  # noqa: S104
    return f"{scheme}://{host}:{port}", insecure


def print_banner(
    console: Console, models: Sequence[tuple[Planned, Card]], options: ServeOptions, listener: socket.socket
) -> None:
    url, curl_options = _server_url(listener, options)
    is_unix = listener.family == socket.AF_UNIX
    has_key = options.limits.needs_key
    plans = [planned.plan for planned, _ in models]
    console.print()
    for (planned, card), model in zip(models, options.models, strict=True):
        folder, keep = Path(planned.folder), model.keep_seconds
        others = {
            "class": stated_architecture(folder, card),
            "left out": ", ".join(left_out(folder, card)),
            "loaded": keep is not None and f"by its first request, and unloaded when idle for {keep:g} s",
        }
        _print_fields(console, _summary(card, planned.plan) | with_text(others))
        if len(models) > 1:
            console.print()
    pages = f"playground; docs: {url}/docs" if options.limits.playground else f"docs: {url}/docs"
    bodies = options.num_workers * options.limits.max_inflight_bytes / 2**20
    tokens = min(plan.max_queue_tokens for plan in plans)
    waiting = f"up to {bodies:,.0f} MiB of bodies, {tokens:,} tokens in each engine"
    _print_fields(console, {
        "processes": f"{count(options.num_engines, 'engine')}, {count(options.num_workers, 'HTTP worker')}",
        "waiting": f"{waiting}; then clients wait until they are read",
        "API key": "required" if has_key else "none",
        "URL": f"unix:{listener.getsockname()}" if is_unix else f"{url}  ({pages})",
    })  # fmt: skip
    name = plans[0].served_name if len(models) > 1 else None
    path, body = _example(models[0][1])
    header = ' -H "Authorization: Bearer $WHIMBREL_API_KEY"' if has_key else ""
    data = json.dumps({**({"model": name} if name else {}), **body})
    with_key = ", with WHIMBREL_API_KEY set to the key" if has_key else ""
    curl = f"curl{curl_options} {url}{path} -H 'Content-Type: application/json'{header} -d '{data}'"
    console.print(f"\n[bold]In a shell[/bold]{with_key}\n{escape(curl)}")
    if path == _EMBEDDINGS and not is_unix:
        imports, key = ("import os; ", ', api_key=os.environ["WHIMBREL_API_KEY"]') if has_key else ("", "")
        option = f", model={name!r}" if name else ""
        client = f'client = Client("{url}"{key}{option})'
        python = f'{imports}from whimbrel import Client\n{client}\nprint(client.embed("Hello, whimbrel!"))'
        path, here = Path(sys.executable), Path.cwd()
        interpreter = escape(str(path.relative_to(here) if path.is_relative_to(here) else path))
        console.print(f"\n[bold]In Python[/bold] ({interpreter}){with_key}\n{escape(python)}\n")
    if not has_key and not is_unix and not ip_address(listener.getsockname()[0]).is_loopback:
        console.print("warning: anyone who reaches this address can use the server; set --api-key-file", style="yellow")


def _print_fields(console: Console, fields: Mapping[str, str]) -> None:
    for name, value in fields.items():
        console.print(f"  [bold]{name:<14}[/bold]{escape(value)}")


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
    return with_text({
        "model": ", ".join((plan.served_name, *plan.aliases)),
        "outputs": ", ".join(f"{name} ({_shape(output, plan)})" for name, output in card.outputs.items()),
        "max length": f"{', '.join(limits)}; a request may set up to {longest}" if limits else longest,
        "device": f"{plan.device} ({count(plan.num_lanes, 'lane')})",
        "GPU": plan.device_note,
        "dtype": plan.dtype,
        "int8": plan.int8 and str(plan.int8),
        "long texts": plan.split_long and "run in parts, unless a request asks to cut them (split_long)",
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
    })  # fmt: skip


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
