"""Server limits, and their reading from the command line, a file and the environment."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

import msgspec

from whimbrel.errors import SetupError
from whimbrel.server.http.limits import HttpLimits, PositiveInt
from whimbrel.wire.whole_numbers import as_whole

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
"""Variable that holds one key; commas and spaces belong to it. Options take precedence."""
LIMITS_VARIABLE: Final = "WHIMBREL_GUARDS"
"""Variable that holds a JSON object of limits, e.g. {"max_body_bytes": 1000000}."""


@dataclass(frozen=True, slots=True)
class ServerLimits(HttpLimits):
    """Limits and access rules of a server process."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys, each of which opens every route. Without keys every route is open."""
    hosts: tuple[str, ...] | None = ()
    """Names allowed in a Host header besides loopback names and the address that was called. None allows any."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call from a browser (CORS), as `https://host:port`. `*` allows any."""
    public_metrics: bool = False
    """True if /metrics needs no key."""
    playground: bool = True
    """True if / answers a browser with the playground."""
    root_path: str = ""
    """Prefix under which clients see the routes behind a proxy, without a slash at its end."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses and networks of proxies whose X-Forwarded headers are believed. `unix`: peers on a Unix socket; `*`: any."""
    max_body_bytes: PositiveInt = 32 * 2**20
    """Size of one body."""
    max_inflight_bytes: PositiveInt = 256 * 2**20
    """Size of the bodies and large answers of all requests in memory. Further bodies are read when there is room.

    The default is a share of the memory."""


DEFAULTS: Final = ServerLimits()
_HOST: Final = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::[0-9]{1,5})?")
_ORIGIN: Final = re.compile(r"(https?://)([^/?#@]+)/?")
_LIMITS: Final = tuple(item.name for item in fields(ServerLimits) if item.type in ("PositiveInt", "Seconds"))


def read_server_limits(
    *,
    address: str | None,
    api_keys: Sequence[str] = (),
    api_key_file: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    public_metrics: bool = False,
    playground: bool = True,
    root_path: str = "",
    forwarded_allow_ips: Sequence[str] = (),
    secrets: Sequence[str] = (),
    max_inflight_bytes: int = DEFAULTS.max_inflight_bytes,
    environ: Mapping[str, str] = os.environ,
    warn: Callable[[str], None] = lambda text: None,
) -> ServerLimits:
    """Return the limits that the command line, a file of keys and the environment set.

    `address` is the server's IP address, None for a Unix socket. `root_path` and `forwarded_allow_ips` are as proxies.py gives
    them; `max_inflight_bytes` is the default of that limit. Removes keys given as options, and other `secrets`, from the
    process' title. Raises SetupError.
    """
    _redact_argv([*api_keys, *secrets])
    return replace(
        _limits(environ.get(LIMITS_VARIABLE, ""), max_inflight_bytes),
        api_keys=_keys(api_keys, api_key_file, environ, warn),
        hosts=_hosts(allowed_hosts, address),
        origins=tuple(_origin(value) for value in cors_origins),
        public_metrics=public_metrics,
        playground=playground,
        root_path=root_path,
        forwarded_allow_ips=tuple(forwarded_allow_ips),
    )


def _keys(
    options: Sequence[str], file: Path | None, environ: Mapping[str, str], warn: Callable[[str], None]
) -> tuple[str, ...]:
    """Return the keys of options and file, without repetitions, or else that of the environment."""
    keys = [*options, *(_read_keys(file, warn) if file else ())]
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
        raise SetupError(f"--allowed-host takes a host's name, not {value!r}.", hint="e.g. --allowed-host vectors.example.com")
    return name


def _origin(value: str) -> str:
    if (origin := "*" if value == "*" else origin_name(value)) is None:
        raise SetupError(f"--cors-origin takes an origin, not {value!r}.", hint="e.g. --cors-origin https://app.example.com")
    return origin


def host_name(value: str) -> str | None:
    """Return the name or IP address in a Host header, in lower case and without the port; None if it is malformed."""
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    if match[2] is None:
        return match[1].lower().removesuffix(".")
    try:
        return str(IPv6Address(match[2]))
    except ValueError:
        return None


def origin_name(value: str) -> str | None:
    """Return an origin as browsers write it, without the default port of its scheme; None if it is malformed."""
    match = _ORIGIN.fullmatch(value.lower())
    if match is None or host_name(match[2]) is None:
        return None
    return match[1] + match[2].removesuffix(":443" if match[1] == "https://" else ":80")


def _limits(text: str, max_inflight_bytes: int) -> ServerLimits:
    """Return the defaults with the changes of a JSON object."""
    try:
        changes = msgspec.json.decode(text or "{}", type=dict[str, object])
        if unknown := sorted(set(changes) - set(_LIMITS)):
            raise ValueError(f"{unknown[0]} is not one of {', '.join(_LIMITS)}")
        limits = msgspec.convert(asdict(DEFAULTS) | {name: as_whole(value) for name, value in changes.items()}, ServerLimits)
        if "max_inflight_bytes" not in changes:
            limits = replace(limits, max_inflight_bytes=max(max_inflight_bytes, limits.max_body_bytes))
        if limits.max_inflight_bytes < limits.max_body_bytes:
            raise ValueError("max_inflight_bytes is less than max_body_bytes")
    except ValueError as error:
        raise SetupError(
            f"{LIMITS_VARIABLE}: {error}.", hint="e.g. " + LIMITS_VARIABLE + """='{"max_body_bytes": 1000000}'"""
        ) from None
    return limits


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
    argument = rb"(?<=\0)(--[^=\0]*=)?(%b)(?=\0|\Z)" % b"|".join(keys)  # KEY or --option=KEY
    memory.raw = re.sub(argument, lambda match: (match[1] or b"") + b"x" * len(match[2]), memory.raw)
