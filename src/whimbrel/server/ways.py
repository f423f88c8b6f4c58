"""Which dialect a request is in: by its path and, where several share one, by the fields of its body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from whimbrel.dialects import PAGES, ROUTES, Page, Route, openai
from whimbrel.dialects.read import is_packed
from whimbrel.errors import WhimbrelError

_Fields = dict[str, msgspec.Raw]
_JSON: Final = msgspec.json.Decoder(_Fields)
_MESSAGE_PACK: Final = msgspec.msgpack.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class Ways:
    """The routes of one path, that without marks last."""

    routes: tuple[Route, ...]
    marks: tuple[bytes, ...] = ()
    """Those of all routes."""

    @property
    def default(self) -> Route:
        """Whose errors are those over bodies that cannot be read, and over what comes before the body."""
        return self.routes[-1]

    @property
    def media_types(self) -> tuple[str, ...]:
        """What a body may be declared as; none: anything."""
        each = [route.media_types for route in self.routes]
        return () if () in each else tuple(dict.fromkeys(kind for kinds in each for kind in kinds))

    def choose(self, body: bytes) -> Route:
        """The route that a body is for."""
        if not any(mark in body for mark in self.marks):
            return self.default
        try:
            fields: dict[str, Any] = (_MESSAGE_PACK if is_packed(body) else _JSON).decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self.default
        return next((route for route in self.routes if not route.marks.isdisjoint(fields)), self.default)


def _by_path(routes: Iterable[Route]) -> dict[str, Ways]:
    found: dict[str, tuple[Route, ...]] = {}
    for route in routes:
        found[route.path] = (*found.get(route.path, ()), route)
    return {path: _ways(each) for path, each in found.items()}


def _ways(routes: Sequence[Route]) -> Ways:
    marks = tuple(mark.encode() for route in routes for mark in sorted(route.marks))
    return Ways(tuple(sorted(routes, key=lambda route: not route.marks)), marks)


WAYS: Final = _by_path(ROUTES)
_PAGES: Final[dict[str, Page]] = {page.path: page for page in PAGES}


def render_error(path: str, error: WhimbrelError, sent: bytes = b"") -> tuple[int, bytes]:
    """The status and the body of an error over a request of which the path is known, and perhaps what was sent there."""
    if path in WAYS:
        route = WAYS[path].choose(sent)
        return route.status(error), route.write_error(error)
    if path in _PAGES:
        return error.status, _PAGES[path].write_error(error)
    return error.status, openai.write_error(error)
