"""HTML of the API reference, of reference.html.jinja. It can be read without its script, which adds search and forms."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec
from markupsafe import Markup

from whimbrel.dialects.common.route import ModelKind

JSON: TypeAlias = dict[str, Any]

_JSON_TYPE: Final = "application/json"
_MADE_FOR: Final[dict[ModelKind, str]] = {
    "dense": "models with dense vectors",
    "sparse": "models with sparse vectors",
    "multi_vector": "models with a vector for each token (late interaction)",
    "ranking": "rerankers; models with vectors score by similarity",
    "classes": "classifiers",
    "entities": "models that label tokens",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A path, and the fields of a body that select one route among several there; none selects all other bodies."""

    path: str
    selectors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation in OpenAPI's terms, of one API alone, with the places where it is found."""

    method: str
    places: Sequence[Place]
    operation: JSON
    made_for: ModelKind = "any"

    @property
    def request(self) -> JSON:
        """The description of the JSON body, empty without one."""
        return self.operation.get("requestBody", {}).get("content", {}).get(_JSON_TYPE, {})

    @property
    def example_fields(self) -> list[str]:
        """The fields of the first example, which are shown first."""
        return list(msgspec.json.decode(_examples(self.request)[0]))

    @property
    def refusals(self) -> list[tuple[str, JSON]]:
        """The statuses but 200, with their answers."""
        return list(self.operation["responses"].items())[1:]


@dataclass(frozen=True, slots=True)
class Section:
    """The entries of an API."""

    name: str
    about: str
    entries: Sequence[Entry]

    @property
    def anchor(self) -> str:
        return _slug(self.name)

    def anchor_of(self, entry: Entry) -> str:
        """Return the id of an entry, which is the same in each release."""
        method = "" if entry.method == "POST" else f"{entry.method.lower()}-"
        return f"{self.anchor}-{method}{_slug(entry.places[0].path) or 'root'}"

    def summary(self, entry: Entry) -> str:
        """Return an entry's summary without the name of this section."""
        return re.sub(rf" \(({re.escape(self.name)}|Whimbrel's own)\)\.$", ".", entry.operation["summary"])

    def places(self) -> list[tuple[Entry, Place]]:
        return [(entry, place) for entry in self.entries for place in entry.places]

    def needs_selector(self, place: Place) -> bool:
        """Return whether the contents name a selector of this place, to tell it from others."""
        return bool(place.selectors) and [other.path for _, other in self.places()].count(place.path) > 1

    def errors(self) -> list[tuple[dict[str, None], list[tuple[str, JSON]]]]:
        """Return the errors of an API, for each set of paths that have the same ones."""
        groups: dict[tuple[tuple[str, str], ...], tuple[dict[str, None], list[tuple[str, JSON]]]] = {}
        for entry in self.entries:
            if entry.refusals:
                kind = tuple((status, error["description"]) for status, error in entry.refusals)
                paths, _ = groups.setdefault(kind, ({}, entry.refusals))
                paths[entry.places[0].path] = None
        return list(groups.values())


def reference_html(
    sections: Sequence[Section], schemas: JSON, *, version: str, base_url: str, needs_key: bool = False, playground: bool = True
) -> str:
    """Return the page for a server that the client calls by `base_url`."""
    api = Reference(sections, schemas, base_url)
    return _template().render(api=api, version=version, base_url=base_url, needs_key=needs_key, playground=playground)


@cache
def _template() -> Any:
    """Return the template. Its line breaks, and the spaces after them, are no part of the page."""
    import jinja2

    filters = {"inline": _inline, "attribute": _as_attribute, "json": _to_json, "examples": _examples}
    environment: Any = jinja2.Environment(autoescape=True, finalize=_as_html, undefined=jinja2.StrictUndefined)
    environment.filters |= filters
    environment.globals |= {"made_for": _MADE_FOR, "json_type": _JSON_TYPE, "br": Markup("<br>")}
    source = Path(__file__).with_name("reference.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(re.sub(r"\n\s*", "", source))


class Reference:
    """All that the page tells, for the template."""

    def __init__(self, sections: Sequence[Section], schemas: JSON, base_url: str) -> None:
        self.sections = sections
        self._schemas = schemas
        self._base_url = base_url
        self._nested_at: dict[int, str] = {}
        """The paths of the objects that an entry has shown, by identity."""
        self._at: dict[str, list[tuple[Place, Section, Entry]]] = {}
        """The bodies of POST at each path, those without selectors last."""
        for section in sections:
            for entry, place in section.places():
                if entry.method == "POST":
                    self._at.setdefault(place.path, []).append((place, section, entry))
        for found in self._at.values():
            found.sort(key=lambda each: not each[0].selectors)

    def begin_entry(self) -> str:
        """Forget the objects that the entry before has shown."""
        self._nested_at.clear()
        return ""

    def bodies(self, entry: Entry) -> Sequence[tuple[Place, Section, Entry]]:
        """Return the bodies that share the path of an entry, with its own."""
        return self._at.get(entry.places[0].path, ()) if entry.method == "POST" else ()

    def linked(self, text: str) -> Markup:
        """Return a text as HTML, in which paths are links to the bodies that need no selector there."""

        def link(match: re.Match[str]) -> str:
            _, section, entry = self._at[match[1]][-1]
            return f'<a href="#{section.anchor_of(entry)}">{match[0]}</a>'

        known = "|".join(re.escape(path) for path in self._at)
        return Markup(re.sub(f"<code>({known})</code>", link, _inline(text)))  # noqa: S704

    def curl(self, entry: Entry) -> str:
        command = f"curl {self._base_url}{entry.places[0].path}"
        if not entry.request:
            return command
        body = _examples(entry.request)[0].replace("'", "'\\''")
        return f"{command} -H 'Content-Type: application/json' \\\n  -d '{body}'"

    def struct(self, schema: JSON) -> JSON:
        """Return the schema of an object behind a reference and rules, or the schema itself."""
        if "allOf" in schema and "properties" not in schema:  # a type, and rules
            return self.struct(schema["allOf"][0])
        return self._schemas[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema

    def fields(self, struct: JSON, first: Sequence[str]) -> list[tuple[str, JSON]]:
        """Return the fields of an object, those that are named `first` before the others."""
        fields: JSON = struct["properties"]
        return [(name, fields[name]) for name in dict.fromkeys([*(name for name in first if name in fields), *fields])]

    def tells_default(self, field: JSON) -> bool:
        """Return whether a field has a default that its description does not tell."""
        return field.get("default") not in (None, [], {}) and "efault" not in field.get("description", "")

    def nested(self, name: str, schema: JSON) -> Iterator[tuple[str, JSON, str]]:
        """Yield the objects within a field: path, schema, and the path at which the entry has shown it first."""
        for path, struct in self._structs(name, schema):
            yield path, struct, self._nested_at.setdefault(id(struct), path)

    def _structs(self, path: str, schema: JSON) -> Iterator[tuple[str, JSON]]:
        if "$ref" in schema:
            struct = self.struct(schema)
            if "properties" in struct:
                yield path or "{}", struct
        for option in schema.get("anyOf", ()):
            yield from self._structs(path, option)
        if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
            yield from self._structs(f"{path}[]", schema["items"])
        if isinstance(values := schema.get("additionalProperties"), dict):
            yield from self._structs(f"{path}.*", cast(JSON, values))

    def type(self, schema: JSON) -> str:
        """Return a type in a few words; objects are shown apart."""
        if "$ref" in schema:
            struct = self.struct(schema)
            return "object" if "properties" in struct else self.type(struct)
        if "anyOf" in schema:
            options = (self.type(option) for option in schema["anyOf"] if option.get("type") != "null")
            return " | ".join(dict.fromkeys(options)) or "null"
        if "enum" in schema:
            return " | ".join(msgspec.json.encode(value).decode() for value in schema["enum"] if value is not None)
        if "prefixItems" in schema:
            return f"[{', '.join(self.type(each) for each in schema['prefixItems'])}]"
        if schema.get("type") == "array":
            return f"[{self.type(schema.get('items', {}))}]"
        return str(schema.get("type", "any"))


def _as_html(value: Any) -> Any:
    """Return a value as HTML outside of attributes, where quotes need no escapes."""
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=False))  # noqa: S704


def _as_attribute(text: str) -> Markup:
    return Markup(escape(text))  # noqa: S704


def _inline(text: str) -> Markup:
    """Return the text as HTML, with <code> in place of backquotes."""
    pieces = escape(text, quote=False).split("`")
    return Markup("".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces)))  # noqa: S704


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("_", "-")).strip("-")


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _examples(content: JSON) -> list[str]:
    """Return the examples of a body, or of an error in JSON, each once."""
    content = content.get("content", {}).get(_JSON_TYPE, content)
    return list(dict.fromkeys(_to_json(each["value"]) for each in content.get("examples", {}).values()))
