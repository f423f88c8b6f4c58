"""Access checks: hosts, origins and keys. Pure functions of what a request's head says."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from typing import Final, TypeAlias

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

_HOST: Final = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,253})|\[([0-9A-Fa-f:.]{2,45})\])(?::[0-9]{1,5})?")
_ORIGIN: Final = re.compile(r"(https?://)([^/?#@]+)/?")
_KEY_HEADERS: Final = (b"authorization", b"api-key", b"x-api-key")


def host_name(value: str) -> str | None:
    """The name or IP address in a Host header, lower-case and without its port; None if it is malformed."""
    match = _HOST.fullmatch(value)
    if match is None:
        return None
    if match[2] is None:
        return match[1].lower().removesuffix(".")
    try:
        return str(IPv6Address(match[2]))
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """True if a host's name, as `host_name` gives it, stands for this machine and nothing else."""
    if name in ("localhost", "127.0.0.1", "::1"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def origin_name(value: str) -> str | None:
    """An origin as browsers write it: scheme, host and, if it is not the scheme's own, port. None if it is none."""
    match = _ORIGIN.fullmatch(value.lower())
    if match is None or host_name(match[2]) is None:
        return None
    return match[1] + match[2].removesuffix(":443" if match[1] == "https://" else ":80")


def is_same_origin(origin: str, host: str) -> bool:
    """True if a page of `origin` was served by the `host` that it now calls. A proxy may have taken TLS off."""
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and place == host.lower()


class Keys:
    """API keys, compared in a time that tells nothing of them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Headers) -> str | None:
        """Return the tenant of a request: "" where no key is asked for, else a word for the key, which tells nothing of it.

        None: the key is missing or wrong. `Authorization: Bearer KEY` is what OpenAI's clients send, `api-key` what Azure's do.
        """
        if not self._digests:
            return ""
        tenant = None
        for given in _given_keys(headers):
            digest = sha256(given).digest()
            for number, known in enumerate(self._digests, start=1):  # all of them: time does not tell which one was close
                if hmac.compare_digest(digest, known):
                    tenant = f"key{number}"
        return tenant


def _given_keys(headers: Headers) -> list[bytes]:
    """The keys that a request brings: at most one in each header that may hold one."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _KEY_HEADERS:
            first.setdefault(name, value)
    bearer = first.pop(b"authorization", b"")
    given = [value.strip() for value in first.values()]
    return [*given, bearer[7:].strip()] if bearer[:7].lower() == b"bearer " else given
