"""Addresses of stores: the kind that a URL names, what its client is given, and the text to show, which has no password."""

import re
from typing import Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from whimbrel.errors import SetupError

Kind: TypeAlias = Literal["lancedb", "qdrant", "postgresql", "opensearch"]
FORMS: Final = (
    "lancedb:PATH, qdrant:PATH, qdrant+http(s)://HOST:PORT, postgresql://HOST/DATABASE, opensearch+http(s)://HOST:PORT"
)


class Location(NamedTuple):
    """Place of a store."""

    kind: Kind
    address: str
    """Path or URL for the client. Of a store over HTTP, without user and password."""
    user: str | None
    password: str | None
    shown: str
    """Address without user, password and parameters."""


def read_location(url: str, password: str | None = None) -> Location:
    """Return the place that a URL names. `password` counts in place of that in the URL. Raises SetupError."""
    scheme, _, rest = url.partition(":")
    if scheme == "lancedb" and not rest:
        raise SetupError("--to lancedb: names no folder.", hint=f"one of {FORMS}")
    if scheme in ("lancedb", "qdrant") and rest and not (scheme == "qdrant" and rest.startswith("//")):
        return Location("lancedb" if scheme == "lancedb" else "qdrant", rest, None, password, _show(url))
    kind: Kind
    if scheme in ("postgresql", "postgres"):
        kind, address = "postgresql", url
    elif found := re.fullmatch(r"(qdrant|opensearch)\+https?", scheme):
        kind, address = "qdrant" if found[1] == "qdrant" else "opensearch", url.partition("+")[2]
    else:
        raise SetupError(f"--to {_show(url)} names no kind of store.", hint=f"one of {FORMS}")
    try:
        parts = urlsplit(address)
        user, given, _ = parts.username, parts.password, parts.port
    except ValueError as error:
        raise SetupError(f"--to {_show(url)} is no URL: {error}.") from None
    if kind != "postgresql":
        if not parts.hostname:
            raise SetupError(f"--to {_show(url)} names no host.", hint=f"one of {FORMS}")
        if parts.query or parts.fragment:
            raise SetupError(f"--to {_show(url)} takes no parameters.")
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    secret = password if password is not None else None if given is None else unquote(given)
    return Location(kind, address, None if user is None else unquote(user), secret, _show(url))


def _show(url: str) -> str:
    return re.sub(r"(?<=//)[^/?#]*@", "", url).partition("?")[0]
