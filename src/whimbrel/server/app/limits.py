"""Limits and access rules of a server process, and names of hosts and origins as they are compared."""

import re
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Final

from whimbrel.server.http.limits import HttpLimits


@dataclass(frozen=True, slots=True)
class ServerLimits(HttpLimits):
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys, each of which opens every route. Without keys every route is open."""
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


DEFAULTS: Final = ServerLimits()
_HOST: Final = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::[0-9]{1,5})?")
_ORIGIN: Final = re.compile(r"(https?://)([^/?#@]+)/?")


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
