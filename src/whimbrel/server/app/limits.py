"""Server limits: plain values, and their reading from the command line, a file and the environment."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.app.access import host_name, origin_name
from whimbrel.server.http.limits import HttpLimits

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
"""Holds one key, as it is: commas and spaces belong to it. Options go before it."""
LIMITS_VARIABLE: Final = "WHIMBREL_GUARDS"
"""Holds a JSON object of limits that few need to change, e.g. {"max_body_bytes": 1000000}."""


@dataclass(frozen=True, slots=True)
class ServerLimits(HttpLimits):
    """Limits and access rules of a server process. Those of a connection come from HttpLimits."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys, each of which opens every route. Without any, no route needs a key."""
    hosts: tuple[str, ...] | None = ()
    """Names allowed in a Host header besides loopback names and the address that was called. None allows any."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call from a browser (CORS), as `https://host:port`. `*` allows any."""
    public_metrics: bool = False
    """True if /metrics needs no key."""

    max_headers: int = 100
    """Number of headers of a request."""
    max_body_bytes: int = 32 * 2**20
    """Size of one body."""
    max_inflight_bytes: int = 256 * 2**20
    """Size of the bodies and large answers of all requests in memory. Above it, requests get status 429."""


DEFAULTS: Final = ServerLimits()
_TIMES: Final = frozenset(item.name for item in fields(ServerLimits) if item.type == "float")
_MAX_SECONDS: Final = 86_400.0
_MAX_NUMBER: Final = 2**40
_LIMITS: Final = tuple(item.name for item in fields(ServerLimits) if item.type in ("int", "float"))


def read_server_limits(
    *,
    address: str,
    api_keys: Sequence[str] = (),
    api_key_file: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    public_metrics: bool = False,
    environ: Mapping[str, str] = os.environ,
    warn: Callable[[str], None] = lambda text: None,
) -> ServerLimits:
    """Return the limits that the command line, a file of keys and the environment give. `address` is the IP address that is
    listened on.

    Raises SetupError. Keys given as options are removed from the process' title.
    """
    redact_argv(api_keys)
    return replace(
        _limits(environ.get(LIMITS_VARIABLE, "")),
        api_keys=_keys(api_keys, api_key_file, environ, warn),
        hosts=_hosts(allowed_hosts, address),
        origins=_origins(cors_origins),
        public_metrics=public_metrics,
    )


def _keys(given: Sequence[str], file: Path | None, environ: Mapping[str, str], warn: Callable[[str], None]) -> tuple[str, ...]:
    """Each key once; those of options and file, or that of the environment."""
    keys = [*given, *(_keys_of(file, warn) if file else ())]
    if not keys and file is None and environ.get(KEY_VARIABLE) is not None:
        keys = [environ[KEY_VARIABLE]]
    keys = [key.strip() for key in keys]
    if file is not None and not keys:
        raise SetupError(f"{file}: holds no API key.", hint="one key per line; lines that start with # are comments")
    if not all(keys):
        raise SetupError("the API key is empty.", hint=f"leave --api-key and {KEY_VARIABLE} unset to serve without one")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise SetupError("an API key holds characters that no HTTP header can carry.", hint="use printable ASCII")
    return tuple(dict.fromkeys(keys))


def _keys_of(file: Path, warn: Callable[[str], None]) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        if file.stat().st_mode & 0o004:
            warn(f"everybody on this machine can read the API keys in {file}; chmod 600 it")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise SetupError(f"cannot read the API keys in {file}: {reason}.") from None
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def _hosts(given: Sequence[str], address: str) -> tuple[str, ...] | None:
    """On loopback only its own names and those given; elsewhere any name, unless some are given."""
    if "*" in given or (not given and not ip_address(address).is_loopback):
        return None
    names = [host_name(name) for name in given]
    for name, text in zip(names, given, strict=True):
        if name is None:
            raise SetupError(
                f"--allowed-host takes a host's name, not {text!r}.", hint="e.g. --allowed-host vectors.example.com"
            )
    return tuple(name for name in names if name is not None)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    origins = ["*" if text == "*" else origin_name(text) for text in given]
    for origin, text in zip(origins, given, strict=True):
        if origin is None:
            raise SetupError(f"--cors-origin takes an origin, not {text!r}.", hint="e.g. --cors-origin https://app.example.com")
    return tuple(origin for origin in origins if origin is not None)


def _limits(text: str) -> ServerLimits:
    """The defaults, but for the limits in a JSON object. Each must be positive."""
    if not text:
        return DEFAULTS
    try:
        given = msgspec.json.decode(text, type=dict[str, object])
        unknown = sorted(set(given) - set(_LIMITS))
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(_LIMITS)}")
        limits = msgspec.convert(asdict(DEFAULTS) | given, ServerLimits)
        wrong = [name for name in given if not getattr(limits, name) > 0]
        if wrong:
            raise ValueError(f"{wrong[0]} must be positive")
        large = [name for name in given if getattr(limits, name) > (_MAX_SECONDS if name in _TIMES else _MAX_NUMBER)]
        if large:
            raise ValueError(f"{large[0]} is too large")
        if limits.max_inflight_bytes < limits.max_body_bytes:
            raise ValueError("max_inflight_bytes is less than max_body_bytes")
    except ValueError as error:
        raise SetupError(
            f"{LIMITS_VARIABLE}: {error}.", hint="e.g. " + LIMITS_VARIABLE + """='{"max_body_bytes": 1000000}'"""
        ) from None
    return limits


def redact_argv(secrets: Sequence[str]) -> None:
    """Overwrite these arguments of the command line where the kernel shows them to everybody (`ps`). Linux only."""
    wanted = {secret.encode() for secret in secrets} - {b""}
    try:
        status = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace") if wanted else ""
    except OSError:
        return
    if not status:
        return
    start, end = map(int, status.rpartition(")")[2].split()[45:47])  # arg_start and arg_end, see proc(5)
    if not 0 < start < end:
        return
    memory = (ctypes.c_char * (end - start)).from_address(start)
    memory.raw = b"\0".join(_hidden(argument, wanted) for argument in memory.raw.split(b"\0"))


def _hidden(argument: bytes, secrets: set[bytes]) -> bytes:
    """`KEY` or `--option=KEY`, with x for each character of the key."""
    option, equals, value = argument.partition(b"=")
    if argument in secrets:
        return b"x" * len(argument)
    if option.startswith(b"--") and value in secrets:
        return option + equals + b"x" * len(value)
    return argument
