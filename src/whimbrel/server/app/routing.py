"""Which dialect a request is in: by its path and, where several share one, by the fields of its body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from whimbrel.dialects import GET_ROUTES, ROUTES, GetRoute, Route, openai
from whimbrel.dialects.common.bodies import is_packed
from whimbrel.errors import WhimbrelError

_JSON: Final = lru_cache(msgspec.json.Decoder)
_MESSAGE_PACK: Final = lru_cache(msgspec.msgpack.Decoder)


@dataclass(frozen=True, slots=True)
class PathRoutes:
    """The routes of one path, that without marks last."""

    routes: tuple[Route, ...]
    discriminators: tuple[bytes, ...]
    """Those of all routes."""
    fields: type[msgspec.Struct]
    """Has a field for each mark; others are not decoded."""

    @property
    def default(self) -> Route:
        """The route that renders errors over bodies that cannot be read, and over anything before the body."""
        return self.routes[-1]

    @property
    def media_types(self) -> tuple[str, ...]:
        """Media types that a body may be declared as; empty for any."""
        each = [route.media_types for route in self.routes]
        return () if () in each else tuple(dict.fromkeys(kind for kinds in each for kind in kinds))

    def choose(self, body: bytes) -> Route:
        """The route that a body is for. One that cannot be read is for the first that it seems to be for."""
        for mark in self.discriminators:
            if body.find(mark) >= 0:  # `in` first takes it for a number, which costs more than the search
                break
        else:
            return self.default
        try:
            sent = (_MESSAGE_PACK if is_packed(body) else _JSON)(self.fields).decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            found = {mark.decode() for mark in self.discriminators if b'"%b"' % mark in body}
        else:
            found = {name for name in self.fields.__struct_fields__ if getattr(sent, name) is not msgspec.UNSET}
        return next((route for route in self.routes if not route.discriminators.isdisjoint(found)), self.default)


def _by_path(routes: Iterable[Route]) -> dict[str, PathRoutes]:
    found: dict[str, tuple[Route, ...]] = {}
    for route in routes:
        found[route.path] = (*found.get(route.path, ()), route)
    return {path: _ways(each) for path, each in found.items()}


def _ways(routes: Sequence[Route]) -> PathRoutes:
    marks = tuple(sorted({mark for route in routes for mark in route.discriminators}))
    fields = msgspec.defstruct("Marks", [(mark, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for mark in marks])
    return PathRoutes(
        tuple(sorted(routes, key=lambda route: not route.discriminators)), tuple(mark.encode() for mark in marks), fields
    )


ROUTES_BY_PATH: Final = _by_path(ROUTES)
_GET_ROUTES: Final[dict[str, GetRoute]] = {page.path: page for page in GET_ROUTES}


def render_error(error: WhimbrelError, path: str = "", body: bytes = b"") -> tuple[int, bytes]:
    """The status and the body of an error over a request of which the path is known, and perhaps what was sent there."""
    if path in ROUTES_BY_PATH:
        route = ROUTES_BY_PATH[path].choose(body)
        return route.status(error), route.render_error(error)
    if path in _GET_ROUTES:
        return error.status, _GET_ROUTES[path].render_error(error)
    return error.status, openai.render_error(error)
