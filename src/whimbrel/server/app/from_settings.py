"""Limits and access rules of a server process from its settings, with the files of keys that these name."""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel.server.app.limits import ServerLimits, host_name, origin_name
from whimbrel.server.app.proxies import read_proxies, read_root_path
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.settings import Settings
from whimbrel.types.plan import Options

_OF_ENGINE: Final = (
    "device", "dtype", "max_length", "max_batch_tokens", "max_request_tokens", "max_queue_tokens", "max_queue_seconds",
    "matryoshka", "split_long", "document_cache_bytes", "prefix_cache_bytes", "chunked_prefill", "tokenizer", "accept_config",
)  # fmt: skip
"""Settings that are options of an engine under the same name."""


def read_server_limits(
    settings: Settings, *, address: str | None, max_inflight_bytes: int, warn: Callable[[str], None] = lambda text: None
) -> ServerLimits:
    """Return the limits and access rules that the settings state, with the keys of their files.

    `address` is the server's IP address, None for a Unix socket; `max_inflight_bytes` is the default of that limit. Removes
    secrets from the process' title. Raises SetupError.
    """
    _redact_argv([*settings.api_key, settings.ssl_keyfile_password or ""])
    stated, max_body_bytes = settings.max_inflight_bytes, settings.max_body_bytes
    if stated is not None and stated < max_body_bytes:
        raise SetupError(f"max_inflight_bytes is {stated:,}, less than max_body_bytes, {max_body_bytes:,}.")
    return ServerLimits(
        **{item.name: getattr(settings.http, item.name) for item in fields(HttpLimits)},
        api_keys=_keys(settings.api_key, settings.api_key_file, warn),
        hosts=_hosts(settings.allowed_host, address),
        origins=tuple(_origin(value) for value in settings.cors_origin),
        public_metrics=settings.public_metrics,
        playground=settings.playground,
        root_path=read_root_path(settings.root_path),
        forwarded_allow_ips=read_proxies(settings.forwarded_allow_ips),
        max_body_bytes=max_body_bytes,
        max_inflight_bytes=max(max_inflight_bytes, max_body_bytes) if stated is None else stated,
    )


def engine_options(settings: Settings) -> Options:
    """Return the options that all models of a server share."""
    stated: Any = {key: getattr(settings, key) for key in _OF_ENGINE}
    return Options(**stated)


def _keys(stated: Sequence[str], file: Path | None, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Return the keys that are stated and those of a file, without repetitions."""
    keys = [key.strip() for key in (*stated, *(_read_keys(file, warn) if file else ()))]
    if file is not None and not keys:
        raise SetupError(f"{file}: holds no API key.", hint="one key per line; lines that start with # are comments")
    if not all(keys):
        raise SetupError("the API key is empty.", hint="leave --api-key and WHIMBREL_API_KEY unset to serve without one")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise SetupError("an API key holds characters that no HTTP header can carry.", hint="use printable ASCII")
    return tuple(dict.fromkeys(keys))


def _read_keys(file: Path, warn: Callable[[str], None]) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if file.stat().st_mode & 0o004:
            warn(f"everybody on this machine can read the API keys in {file}; chmod 600 it")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise SetupError(f"cannot read the API keys in {file}: {reason}.") from None
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def _hosts(values: Sequence[str], address: str | None) -> tuple[str, ...] | None:
    """Return the allowed hosts, None for any. By default a server on a loopback address allows only loopback names."""
    if "*" in values or (not values and (address is None or not ip_address(address).is_loopback)):
        return None
    return tuple(_host(value) for value in values)


def _host(value: str) -> str:
    if (name := host_name(value)) is None:
        raise SetupError(f"allowed_host takes a host's name, not {value!r}.", hint="e.g. vectors.example.com")
    return name


def _origin(value: str) -> str:
    if (origin := "*" if value == "*" else origin_name(value)) is None:
        raise SetupError(f"cors_origin takes an origin, not {value!r}.", hint="e.g. https://app.example.com")
    return origin


def _redact_argv(secrets: Sequence[str]) -> None:
    """Overwrite these arguments in the process' title, which the kernel shows to everybody (`ps`). Linux only."""
    keys = [re.escape(secret.encode()) for secret in secrets if secret]
    stat = Path("/proc/self/stat")
    if not keys or not stat.exists():
        return
    fields_after_name = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    start, end = map(int, fields_after_name[45:47])  # arg_start and arg_end, see proc(5)
    if not 0 < start < end:
        return
    memory = (ctypes.c_char * (end - start)).from_address(start)
    argument = rb"(?<=\0)([^\0]*=)?(%b)(?=\0|\Z)" % b"|".join(keys)  # KEY, --option=KEY or api_key=KEY
    memory.raw = re.sub(argument, lambda match: (match[1] or b"") + b"x" * len(match[2]), memory.raw)
