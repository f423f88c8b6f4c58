"""A proxy in front: what it says of the client, the scheme, the host and the path."""

from __future__ import annotations

from typing import Any

import pytest

from whimbrel.errors import SetupError
from whimbrel.server.app.limits import ServerLimits, read_proxies, read_root_path
from whimbrel.server.app.proxies import ProxyRules

FORWARDED = [
    (b"host", b"inner:8000"),
    (b"x-forwarded-for", b"198.51.100.7, 203.0.113.9"),
    (b"x-forwarded-for", b"10.0.0.3"),
    (b"x-forwarded-proto", b"https"),
    (b"x-forwarded-host", b"vectors.example.com"),
]


def applied(
    client: tuple[str, int] | None, *proxies: str, headers: Any = FORWARDED, path: str = "/", root: str = "", **scope: Any
) -> Any:
    limits = ServerLimits(root_path=read_root_path(root), forwarded_allow_ips=read_proxies(proxies))
    return ProxyRules(limits).apply({"client": client, "scheme": "http", "headers": headers, "path": path, **scope})


@pytest.mark.parametrize(
    ("client", "proxies", "expected"),
    [
        (("10.0.0.2", 1), ["10.0.0.0/8"], "203.0.113.9"),
        (("10.0.0.2", 1), ["10.0.0.2"], "10.0.0.3"),
        (("10.0.0.2", 1), ["10.0.0.0/8,203.0.113.9"], "198.51.100.7"),
        (("10.0.0.2", 1), ["*"], "198.51.100.7"),
        ((("::ffff:10.0.0.2"), 1), ["10.0.0.2"], "10.0.0.3"),
        (None, ["unix"], "10.0.0.3"),
        (None, ["*"], "198.51.100.7"),
    ],
)
def test_a_trusted_proxy_names_the_client(client: Any, proxies: list[str], expected: str) -> None:
    """The addresses are read from the last to the first that is no proxy."""
    scope = applied(client, *proxies)
    assert (scope["client"][0], scope["scheme"], dict(scope["headers"])[b"host"]) == (expected, "https", b"vectors.example.com")


@pytest.mark.parametrize(
    ("client", "proxies"),
    [(("192.0.2.1", 1), ["10.0.0.0/8"]), (None, ["127.0.0.1"]), (("10.0.0.2", 1), []), (("", 1), ["::/0"])],
)
def test_a_stranger_is_not_believed(client: Any, proxies: list[str]) -> None:
    scope = applied(client, *proxies)
    assert (scope["client"], scope["scheme"], scope["headers"]) == (client, "http", FORWARDED)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"203.0.113.9:1234", "203.0.113.9"),
        (b"[2001:db8::1]:443", "2001:db8::1"),
        (b"2001:db8::1", "2001:db8::1"),
        (b"::ffff:203.0.113.9", "203.0.113.9"),
        (b"unknown", "10.0.0.2"),
        (b"<script>, 10.0.0.9", "10.0.0.9"),
        (b"", "10.0.0.2"),
        (b"," * 1000, "10.0.0.2"),
    ],
)
def test_forms_of_x_forwarded_for(value: bytes, expected: str) -> None:
    """A value that is no address ends the chain."""
    assert applied(("10.0.0.2", 1), "10.0.0.0/8", headers=[(b"x-forwarded-for", value)])["client"][0] == expected


def test_a_scheme_that_is_none_is_ignored() -> None:
    for value in (b"wss", b"", b"https, ftp", b"\xff"):
        assert applied(("10.0.0.2", 1), "*", headers=[(b"x-forwarded-proto", value)])["scheme"] == "http"


@pytest.mark.parametrize(
    ("path", "inner"),
    [("/p/v1/embed", "/v1/embed"), ("/v1/embed", "/v1/embed"), ("/p", "/"), ("/p/", "/"), ("/pv1", "/pv1"), ("/p/p/x", "/p/x")],
)
def test_a_prefix_is_taken_off_if_the_proxy_has_not(path: str, inner: str) -> None:
    for scope in (applied(None, path=path, root="/p/"), applied(None, path=path, root_path="/p")):
        assert (scope["path"], scope["root_path"]) == (inner, "/p")


@pytest.mark.parametrize("value", ["10.0.0.0/33", "proxy", "10.0.0.1/8", "10.0.0", "1,,x"])
def test_what_is_no_network_is_refused(value: str) -> None:
    with pytest.raises(SetupError, match="forwarded_allow_ips takes addresses and networks"):
        read_proxies([value])


@pytest.mark.parametrize("value", ["p", "/p//q", "http://x/p", "/p?q", "/ä", "//", "/p q"])
def test_what_is_no_prefix_is_refused(value: str) -> None:
    if value == "//":
        assert read_root_path(value) == ""
        return
    with pytest.raises(SetupError, match="root_path takes a path"):
        read_root_path(value)
