"""HTML of the API reference: contents, a section per API, and a table for each body.

The page can be read without its script, which adds the search and forms that send requests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, TypeAlias, cast

import msgspec

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


def reference_html(
    sections: Sequence[Section],
    schemas: JSON,
    *,
    version: str,
    base_url: str,
    needs_key: bool = False,
    playground: bool = True,
) -> str:
    """Return the page for a server that the client calls by `base_url`."""
    page = _Page(sections, schemas, base_url)
    link = '<a href="./">Playground</a>' if playground else ""
    key = (
        "It asks for an API key: send <code>Authorization: Bearer KEY</code>. This page can be read without one."
        if needs_key
        else "It asks for no API key."
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Whimbrel API reference</title>
<link rel="icon" href="assets/whimbrel.svg" type="image/svg+xml">
<link rel="stylesheet" href="assets/common.css">
<link rel="stylesheet" href="assets/docs.css">
<script type="module" src="assets/docs.js"></script>
</head>
<body>
<a class="skip" href="#routes">Skip to the routes</a>
<header class="top">
<p class="brand"><img src="assets/whimbrel.svg" alt="" width="26" height="26">Whimbrel</p>
<p class="small muted">version {_text(version)}</p>
<nav aria-label="Pages">{link}<a href="docs" aria-current="page">API reference</a><a href="openapi.json">openapi.json</a></nav>
</header>
<div class="columns">
<aside>
<div id="search"></div>
<details class="toc" open><summary>Contents</summary><nav aria-label="Routes">{page.contents()}</nav></details>
</aside>
<main id="routes" tabindex="-1">
<h1>API reference</h1>
<p class="lead">The routes of this server at <code>{_text(base_url)}</code>, by the API that they belong to. {key}</p>
<div id="tools"></div>
{page.sections()}
</main>
</div>
</body>
</html>
"""


class _Page:
    """The parts of the page, with all that they refer to."""

    def __init__(self, sections: Sequence[Section], schemas: JSON, base_url: str) -> None:
        self._sections = sections
        self._schemas = schemas
        self._base_url = base_url
        self._nested_at: dict[int, str] = {}
        """The paths of the objects that an entry has shown, by identity."""
        self._at: dict[str, list[tuple[Place, Section, Entry]]] = {}
        """The bodies of POST at each path, those without selectors last."""
        for section in sections:
            for entry in section.entries:
                for place in entry.places if entry.method == "POST" else ():
                    self._at.setdefault(place.path, []).append((place, section, entry))
        for found in self._at.values():
            found.sort(key=lambda each: not each[0].selectors)

    def contents(self) -> str:
        lists = (
            f'<h2><a href="#{section.anchor}">{_text(section.name)}</a></h2><ul>{"".join(self._links(section))}</ul>'
            for section in self._sections
        )
        return "".join(lists)

    def _links(self, section: Section) -> Iterator[str]:
        paths = Counter(place.path for entry in section.entries for place in entry.places)
        for entry in section.entries:
            for place in entry.places:
                method = "" if entry.method == "POST" else f"<b>{entry.method}</b> "
                field = f" <small>{_text(place.selectors[0])}</small>" if paths[place.path] > 1 and place.selectors else ""
                yield f'<li><a href="#{section.anchor_of(entry)}">{method}{_text(place.path)}{field}</a>'

    def sections(self) -> str:
        return "\n".join(map(self._section, self._sections))

    def _section(self, section: Section) -> str:
        entries = "\n".join(self._entry(section, entry) for entry in section.entries)
        return (
            f'<section aria-labelledby="{section.anchor}"><h2 id="{section.anchor}">{_text(section.name)}</h2>'
            f"<p>{self._linked(section.about)}</p>{entries}{self._errors(section)}</section>"
        )

    def _linked(self, text: str) -> str:
        """Return a text as HTML, in which paths are links to the bodies that need no selector there."""

        def link(match: re.Match[str]) -> str:
            _, section, entry = self._at[match[1]][-1]
            return f'<a href="#{section.anchor_of(entry)}">{match[0]}</a>'

        known = "|".join(re.escape(path) for path in self._at)
        return re.sub(f"<code>({known})</code>", link, inline(text))

    def _entry(self, section: Section, entry: Entry) -> str:
        self._nested_at.clear()
        anchor, operation, path = section.anchor_of(entry), entry.operation, entry.places[0].path
        request: JSON = operation.get("requestBody", {}).get("content", {})
        answers: JSON = operation["responses"]["200"]["content"]
        opened = " open" if (section, entry) == (self._sections[0], self._sections[0].entries[0]) else ""
        parts = [f"<p>{fact}</p>" for fact in self._facts(section, entry)]
        if request:
            shown = list(msgspec.json.decode(next(iter(_examples(request[_JSON_TYPE])))))
            parts.append(self._fields(f"Request, {section.name}", request[_JSON_TYPE]["schema"], prefix=anchor, first=shown))
        if _JSON_TYPE in answers:
            answer = self._fields(f"Answer, {section.name}", answers[_JSON_TYPE]["schema"])
            parts.append(f'<details class="answer"><summary>Answer</summary>{answer}</details>')
        if others := ", ".join(f"`{kind}`" for kind in answers if kind != _JSON_TYPE):
            parts.append(f"<p>{inline(f'With another `Accept`: {others}.' if _JSON_TYPE in answers else others)}</p>")
        parts.append(f'<pre class="curl"><code>{_text(self._curl(entry))}</code></pre>')
        return (
            f'<details class="route" id="{anchor}"{opened}><summary><h3><b class="{entry.method.lower()}">'
            f"{entry.method}</b> <code>{_text(path)}</code></h3> <span>{inline(_summary(section, operation))}</span></summary>"
            f'<div class="body">{"".join(parts)}</div></details>'
        )

    def _facts(self, section: Section, entry: Entry) -> Iterator[str]:
        """Yield what there is to know of an entry besides its fields, each as HTML."""
        if entry.made_for in _MADE_FOR:
            yield f"Made for {_MADE_FOR[entry.made_for]}."
        first, *others = entry.places
        if others:
            named = ", ".join(f"<code>{_text(place.path)}</code>{_with(place)}" for place in others)
            yield f"The same at {named}."
        sharing = self._at.get(first.path, []) if entry.method == "POST" else []
        if len(sharing) > 1:
            rows = "; ".join(self._choice(*each, here=(section, entry)) for each in sharing)
            yield f"On <code>{_text(first.path)}</code> the fields of the body decide: {rows}."

    def _choice(self, place: Place, section: Section, entry: Entry, *, here: tuple[Section, Entry]) -> str:
        name = _text(section.name)
        link = f"<b>{name}</b>" if (section, entry) == here else f'<a href="#{section.anchor_of(entry)}">{name}</a>'
        return f"{_selectors(place)}: {link}" if place.selectors else f"else {link}"

    def _curl(self, entry: Entry) -> str:
        command = f"curl {self._base_url}{entry.places[0].path}"
        if "requestBody" not in entry.operation:
            return command
        body = next(iter(_examples(entry.operation["requestBody"]["content"][_JSON_TYPE]))).replace("'", "'\\''")
        return f"{command} -H 'Content-Type: application/json' \\\n  -d '{body}'"

    def _errors(self, section: Section) -> str:
        """Return the errors of an API, a table for each set of routes that have the same ones."""
        sets: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
        for entry in section.entries:
            _, *refusals = entry.operation["responses"].items()
            if refusals:
                sets.setdefault(tuple((status, error["description"]) for status, error in refusals), []).append(entry)
        tables = [self._error_table(section, entries, of_all=len(sets) == 1) for entries in sets.values()]
        if not tables:
            return ""
        return (
            f'<details class="errors" id="{section.anchor}-errors"><summary><h3>Errors</h3> <span>Status codes and bodies of '
            f'{_text(section.name)}</span></summary><div class="body">{"".join(tables)}</div></details>'
        )

    def _error_table(self, section: Section, entries: Sequence[Entry], *, of_all: bool) -> str:
        names = dict.fromkeys(f"<code>{_text(entry.places[0].path)}</code>" for entry in entries)
        title = f"Errors, {_text(section.name)}" + ("" if of_all else f": {', '.join(names)}")
        _, *refusals = entries[0].operation["responses"].items()
        rows = "".join(
            f"<tr><th scope=row><code>{status}</code><td>{inline(error['description'])}<td>{_bodies(error)}"
            for status, error in refusals
        )
        return (
            f"<table><caption>{title}</caption><thead><tr><th scope=col>status<th scope=col>meaning"
            f"<th scope=col>body, e.g.</thead><tbody>{rows}</tbody></table>"
        )

    def _struct(self, schema: JSON) -> JSON:
        """Return the schema of an object behind a reference and rules, or the schema itself."""
        if "allOf" in schema and "properties" not in schema:  # a type, and rules
            return self._struct(schema["allOf"][0])
        return self._schemas[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema

    def _fields(self, title: str, schema: JSON, prefix: str = "", first: Sequence[str] = ()) -> str:
        """Return the table of a body, or its type where it is no object. The fields `first` begin, if there are any."""
        struct = self._struct(schema)
        if "properties" not in struct:
            return f"<p><b>{_text(title)}</b>: <code>{_text(self._type(schema))}</code></p>{self._nested('', schema)}"
        return self._table(title, struct, prefix, first)

    def _table(self, title: str, struct: JSON, prefix: str = "", first: Sequence[str] = ()) -> str:
        required = set(struct.get("required", ()))
        rows: list[str] = []
        fields: JSON = struct["properties"]
        for name in dict.fromkeys([*(name for name in first if name in fields), *fields]):
            field = fields[name]
            anchor = f' id="{prefix}.{escape(name)}"' if prefix else ""
            mark = " <i>required</i>" if prefix and name in required else ""
            kind = _text(self._type(field))
            about = inline(field.get("description", "")) + _default(field) + self._nested(name, field)
            rows.append(f"<tr{anchor}><th scope=row><code>{_text(name)}</code>{mark}<td><code>{kind}</code><td>{about}")
        return (
            f"<table><caption>{inline(title)}</caption><thead><tr><th scope=col>field<th scope=col>type<th scope=col>meaning"
            f"</thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def _nested(self, name: str, schema: JSON) -> str:
        """Return the tables of objects within a field, closed. One that the entry has shown before is named."""
        parts: list[str] = []
        for path, struct in self._structs(name, schema):
            before = self._nested_at.setdefault(id(struct), path)
            if before != path:
                parts.append(f"<p>{inline(f'`{path}` has the fields of `{before}`.')}</p>")
            else:
                table = self._table(f"`{path}`", struct)
                parts.append(f"<details><summary>{inline(f'fields of `{path}`')}</summary>{table}</details>")
        return "".join(parts)

    def _structs(self, path: str, schema: JSON) -> Iterator[tuple[str, JSON]]:
        if "$ref" in schema:
            struct = self._struct(schema)
            if "properties" in struct:
                yield path or "{}", struct
        for option in schema.get("anyOf", ()):
            yield from self._structs(path, option)
        if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
            yield from self._structs(f"{path}[]", schema["items"])
        if isinstance(values := schema.get("additionalProperties"), dict):
            yield from self._structs(f"{path}.*", cast(JSON, values))

    def _type(self, schema: JSON) -> str:
        """Return a type in a few words; objects are shown apart."""
        if "$ref" in schema:
            struct = self._struct(schema)
            return "object" if "properties" in struct else self._type(struct)
        if "anyOf" in schema:
            options = (self._type(option) for option in schema["anyOf"] if option.get("type") != "null")
            return " | ".join(dict.fromkeys(options)) or "null"
        if "enum" in schema:
            return " | ".join(msgspec.json.encode(value).decode() for value in schema["enum"] if value is not None)
        if "prefixItems" in schema:
            return f"[{', '.join(self._type(each) for each in schema['prefixItems'])}]"
        if schema.get("type") == "array":
            return f"[{self._type(schema.get('items', {}))}]"
        return str(schema.get("type", "any"))


def _text(text: str) -> str:
    """Return a text as HTML outside of attributes, where quotes need no escapes."""
    return escape(text, quote=False)


def inline(text: str) -> str:
    """Return the text as HTML, with <code> in place of backquotes."""
    pieces = _text(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _summary(section: Section, operation: JSON) -> str:
    """Return an operation's summary without the name of the section that it stands in."""
    text: str = operation["summary"]
    return re.sub(rf" \(({re.escape(section.name)}|Whimbrel's own)\)\.$", ".", text)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("_", "-")).strip("-")


def _selectors(place: Place) -> str:
    return " or ".join(f"<code>{_text(name)}</code>" for name in place.selectors)


def _with(place: Place) -> str:
    return f" with {_selectors(place)}" if place.selectors else ""


def _default(field: JSON) -> str:
    """Return a field's default as a sentence, where there is one and the description does not tell it."""
    value = field.get("default")
    if value in (None, [], {}) or "efault" in field.get("description", ""):
        return ""
    return f" Default: <code>{_text(msgspec.json.encode(value).decode())}</code>."


def _examples(content: JSON) -> list[str]:
    return [msgspec.json.encode(each["value"]).decode() for each in content.get("examples", {}).values()]


def _bodies(error: JSON) -> str:
    examples = _examples(error.get("content", {}).get(_JSON_TYPE, {}))
    return "<br>".join(f"<code>{_text(body)}</code>" for body in dict.fromkeys(examples))
