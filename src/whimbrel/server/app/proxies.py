"""Requests that come through a proxy: the path below a prefix, and the client, scheme and host that a trusted proxy names."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from starlette.types import Scope

from whimbrel.server.app.limits import ANY_PEER, UNIX_PEER, ServerLimits

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class ProxyRules:
    """Rewriting of ASGI scopes."""

    def __init__(self, limits: ServerLimits) -> None:
        self._root_path = limits.root_path
        self._any = ANY_PEER in limits.forwarded_allow_ips
        self._unix = UNIX_PEER in limits.forwarded_allow_ips
        self._networks: list[Network] = [
            ip_network(name) for name in limits.forwarded_allow_ips if name not in (ANY_PEER, UNIX_PEER)
        ]
        self._trusts = bool(limits.forwarded_allow_ips)

    def apply(self, scope: Scope) -> Scope:
        """Return the scope of a request as its client sent it, its path without the prefix."""
        if self._trusts and self._is_trusted(scope.get("client")):
            scope = self._named_by_proxy(scope)
        root_path = self._root_path or scope.get("root_path", "")
        if root_path:  # some proxies pass the prefix on, others take it away
            path: str = scope["path"]
            inner = path[len(root_path) :] or "/" if path == root_path or path.startswith(f"{root_path}/") else path
            scope = {**scope, "path": inner, "root_path": root_path}
        return scope

    def _is_trusted(self, client: tuple[str, int] | None) -> bool:
        if self._any:
            return True
        if client is None:
            return self._unix
        address = _address(client[0])
        return address is not None and self._is_proxy(address)

    def _is_proxy(self, address: Address) -> bool:
        return self._any or any(address in network for network in self._networks)

    def _named_by_proxy(self, scope: Scope) -> Scope:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        forwarded = {name: value for name, value in headers if name.startswith(b"x-forwarded-")}
        if not forwarded:
            return scope
        scope = dict(scope)
        chain = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        if (client := self._client(chain)) is not None:
            scope["client"] = (client, 0)
        scheme = _last(forwarded.get(b"x-forwarded-proto", b"")).decode("latin-1").lower()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme
        if host := _last(forwarded.get(b"x-forwarded-host", b"")):
            scope["headers"] = [(name, host if name == b"host" else value) for name, value in headers]
        return scope

    def _client(self, chain: str) -> str | None:
        """Return the address that the outermost trusted proxy names: each adds the one that called it at the end."""
        client: Address | None = None
        for text in reversed(chain.split(",")):
            if (address := _address(text.strip())) is None:
                break
            client = address
            if not self._is_proxy(client):
                break
        return None if client is None else str(client)


def _last(value: bytes) -> bytes:
    """Return the last of several values, which the nearest proxy has added."""
    return value.rpartition(b",")[2].strip()


def _address(text: str) -> Address | None:
    """Return an IP address, which may have a port; None if it is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
