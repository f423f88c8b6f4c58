"""Limits and access rules of a server process, as its settings and files of keys state them, and names as they are compared."""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, Final

from whimbrel.errors import SetupError
from whimbrel.server.http.limits import HttpLimits
from whimbrel.server.keys import ApiKey, check_distinct, plain_keys
from whimbrel.server.secret_file import read_secret_lines
from whimbrel.server.settings import Settings
from whimbrel.types.plan import Options

ANY_PEER: Final = "*"
UNIX_PEER: Final = "unix"
"""Peers on a Unix socket, which have no address."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HOST: Final = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::[0-9]{1,5})?")
_ORIGIN: Final = re.compile(r"(https?://)([^/?#@]+)/?")


@dataclass(frozen=True, slots=True)
class ServerLimits(HttpLimits):
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys as they are, each of which opens every route but the admin's. Logs replace them."""
    keys: tuple[ApiKey, ...] = ()
    """Keys of a file, by their hashes. Without keys of either kind every route is open."""
    hosts: tuple[str, ...] | None = ()
    """Names allowed in a Host header besides loopback names and the address that was called. None allows any."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call from a browser (CORS), as `https://host:port`. `*` allows any."""
    public_metrics: bool = False
    playground: bool = True
    root_path: str = ""
    """Prefix under which clients see the routes behind a proxy, without a slash at its end."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses and networks of proxies whose X-Forwarded headers are believed. `unix`: peers on a Unix socket; `*`: any."""
    max_body_bytes: int = 32 * 2**20
    max_inflight_bytes: int = 256 * 2**20
    """Size of the bodies and large answers of all requests in memory. Further bodies are read when there is room."""

    batch_dir: str = ""
    """Folder of files and batches, "" for none."""
    max_file_bytes: int = 200 * 2**20
    max_files: int = 1000
    max_files_bytes: int = 16 * 2**30

    @property
    def needs_key(self) -> bool:
        return bool(self.api_keys or self.keys)

    @property
    def all_keys(self) -> tuple[ApiKey, ...]:
        """The keys of both kinds."""
        return (*plain_keys(self.api_keys), *self.keys)


DEFAULTS: Final = ServerLimits()


def read_server_limits(
    settings: Settings,
    *,
    address: str | None,
    max_inflight_bytes: int,
    keys: tuple[ApiKey, ...] = (),
    warn: Callable[[str], None] = lambda text: None,
) -> ServerLimits:
    """Return the limits and access rules that the settings state, with the keys of their files.

    `address` is the server's IP address, None for a Unix socket; `max_inflight_bytes` is the default of that limit. `keys` are
    those of a configuration file. Removes secrets from the process' title. Raises SetupError.
    """
    _redact_argv([*settings.api_key, settings.ssl_keyfile_password or ""])
    stated, max_body_bytes = settings.max_inflight_bytes, settings.max_body_bytes
    if stated is not None and stated < max_body_bytes:
        raise SetupError(f"max_inflight_bytes is {stated:,}, less than max_body_bytes, {max_body_bytes:,}.")
    limits = ServerLimits(
        **{item.name: getattr(settings, item.name) for item in fields(HttpLimits)},
        api_keys=_keys(settings.api_key, settings.api_key_file, warn),
        keys=keys,
        hosts=_hosts(settings.allowed_host, address),
        origins=tuple(_origin(value) for value in settings.cors_origin),
        public_metrics=settings.public_metrics,
        playground=settings.playground,
        root_path=read_root_path(settings.root_path),
        forwarded_allow_ips=read_proxies(settings.forwarded_allow_ips),
        max_body_bytes=max_body_bytes,
        max_inflight_bytes=max(max_inflight_bytes, max_body_bytes) if stated is None else stated,
        batch_dir="" if settings.batch_dir is None else str(settings.batch_dir.expanduser().resolve()),
        max_file_bytes=settings.max_file_bytes,
        max_files=settings.max_files,
        max_files_bytes=settings.max_files_bytes,
    )
    check_distinct(limits.all_keys)
    if keys and all(key.admin and key.routes is None for key in limits.all_keys):
        warn("no key opens the routes of clients: one with admin opens those of operators, and others only by its routes")
    return limits


def engine_options(settings: Settings) -> Options:
    """Return the options of all engines: the settings that have the name of one, with those of models."""
    names = Options.__annotations__.keys() - {"served_name"}
    stated: Any = {item.name: getattr(settings, item.name) for item in fields(Settings) if item.name in names}
    return Options(**stated)


def read_root_path(value: str) -> str:
    """Return a prefix of paths without a slash at its end, "" for none. Raises SetupError."""
    path = value.rstrip("/")
    if not _PREFIX.fullmatch(path):
        raise SetupError(f"root_path takes a path, not {value!r}.", hint="e.g. /embeddings")
    return path


def read_proxies(values: Sequence[str]) -> tuple[str, ...]:
    """Return addresses and networks of proxies; each value may hold several with commas. Raises SetupError."""
    names = [name for value in values for name in map(str.strip, value.split(",")) if name]
    for name in names:
        if name not in (ANY_PEER, UNIX_PEER):
            try:
                ip_network(name)
            except ValueError as error:
                raise SetupError(
                    f"forwarded_allow_ips takes addresses and networks, not {name!r}: {error}.",
                    hint="e.g. 10.0.0.0/8,127.0.0.1; unix for a Unix socket, * for any peer",
                ) from None
    return tuple(names)


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
    lines = read_secret_lines(file, "the API keys", warn)
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
