"""Errors in the terms of an API: its names of fields, and its spelling of the options that hints name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from whimbrel.errors import InvalidRequest, Locate, Location, WhimbrelError


@dataclass(frozen=True, slots=True)
class ErrorTerms:
    """The terms of an API."""

    fields: Mapping[str, str | Locate] = field(default_factory=dict[str, "str | Locate"])
    """Its name for a field of a Request, where that differs; or the map from locations in the field to its own."""
    options: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Its spelling of `whimbrel.errors.OPTIONS`, where that differs."""

    def extended(self, fields: Mapping[str, str | Locate], options: Mapping[str, str | None] | None = None) -> Self:
        """Return the terms with more fields and options."""
        return replace(self, fields={**self.fields, **fields}, options={**self.options, **(options or {})})

    def locate(self, location: Location) -> Location:
        """Return what the API calls a place in a Request."""
        name = self.fields.get(location.field, location.field)
        return Location(name, location.item, location.part, location.path) if isinstance(name, str) else name(location)

    def describe(self, error: WhimbrelError) -> tuple[str, str | None]:
        """Return the whole text of an error, and its location."""
        message = error.message
        if isinstance(error, InvalidRequest) and error.hint is not None:
            message = error.statement + error.hint.sentence(self.options)
        if error.location is None:
            return message, None
        location = str(self.locate(error.location))
        return f"{location}: {message}", location


PYTHON_TERMS: Final = ErrorTerms()
"""The terms of the Python API, which are those of Whimbrel's own routes."""
