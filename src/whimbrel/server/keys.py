"""API keys of a server: names, hashes, the models and routes that they open, and their budgets.

A table of keys is checked as a whole before the server starts. No message shows a key, nor a text that stands in the place of a
hash, since that may be the key itself. Budgets are counted in budgets.py, and keys of requests are found in app/guards.py.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from typing import Annotated, Any, Final, TypeAlias, cast, get_type_hints

import msgspec
from msgspec import Meta

from whimbrel.errors import SetupError
from whimbrel.telemetry.logs import KEY_PREFIX, redact_keys

ADMIN_PREFIX: Final = "/admin/"
"""The prefix of routes that only keys with `admin` open."""
ADMIN_ROUTES: Final = frozenset({"/models/load", "/models/unload"})
"""Other routes for them, llama-server's."""
MIXED_ROUTES: Final = frozenset({"/api/ps", "/api/pull", "/models"})
"""Routes of clients that keys with `admin` open too: Ollama's and llama-server's lists, and Ollama's download."""
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,63}")
_NAME_RULE: Final = "a name has up to 64 letters, digits and . _ @ : / + -, the first a letter or a digit"
_RESERVED: Final = frozenset({"none", "other"})
"""Labels of the metrics that stand for no key and for many."""
_PLAIN: Final = frozenset({"key", "api_key", "secret", "token", "value"})
"""Words under which a file may hold a key itself by mistake."""
_HASH_HINT: Final = "`whimbrel key --hash` reads a key and prints its hash"

Budget: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)] | None
Names: TypeAlias = Annotated[tuple[str, ...], Meta(min_length=1)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key by its hash, and what it may use. None is no limit."""

    name: str
    """The name in metrics and logs. Keys are tenants, which share an engine evenly."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    models: Names = None
    """Names of models; any name of a model allows it."""
    routes: Names = None
    """Paths, as `/v1/embeddings`. Without them a key opens all routes but those of the admin; an admin's opens only those."""
    requests_per_minute: Budget = None
    tokens_per_minute: Budget = None
    tokens_per_day: Budget = None
    requests_in_flight: Budget = None
    admin: bool = False
    """True if the key opens the routes below /admin/."""

    @property
    def has_budget(self) -> bool:
        budgets = self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.requests_in_flight
        return any(budget is not None for budget in budgets)

    @property
    def limits(self) -> dict[str, Any]:
        """Values that the key's table states beside its hash."""
        return {name: value for name in _FIELDS if (value := getattr(self, name))}

    def opens(self, route: str) -> bool:
        """Return whether the key opens a route, by the template of its path."""
        if is_admin_route(route):
            return self.admin
        if self.admin and route in MIXED_ROUTES:
            return True
        return not self.admin if self.routes is None else route in self.routes

    def may_use(self, names: Iterable[str]) -> bool:
        """Return whether the key may use the model of these names."""
        return self.models is None or not set(self.models).isdisjoint(names)


def is_admin_route(path: str) -> bool:
    """Return whether only keys with `admin` open a route."""
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_ROUTES


def plain_keys(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """Return keys that are stated as they are, without budgets. Their names are key1, key2 and so on."""
    return tuple(ApiKey(name=f"key{number}", digest=digest_of(key)) for number, key in enumerate(keys, start=1))


def digest_of(key: str | bytes) -> bytes:
    return sha256(key.encode() if isinstance(key, str) else key).digest()


def hash_of(key: str) -> str:
    """Return the hash of a key as files state it."""
    return f"sha256:{digest_of(key).hex()}"


def make_key() -> str:
    """Return a new key of 192 random bits."""
    return KEY_PREFIX + secrets.token_hex(24)


def read_keys(table: Mapping[str, Any], where: Callable[..., str]) -> tuple[ApiKey, ...]:
    """Return the keys of a table: tables by name, each with `hash` and fields of ApiKey.

    `where` gives the file, and the line if it is known, of `"keys"`, a name and a field.

    Raises SetupError. Whether the models and routes exist is checked by `check_keys`.
    """
    keys = tuple(_read_key(name, entry, where) for name, entry in table.items())
    by_digest: dict[bytes, str] = {}
    for key in keys:
        if (other := by_digest.setdefault(key.digest, key.name)) != key.name:
            raise SetupError(
                f"{where('keys', key.name)}: keys.{key.name} and keys.{other} have the same hash.",
                hint="make a key for each: `whimbrel key NAME`",
            )
    return keys


def check_keys(keys: Sequence[ApiKey], *, models: Collection[str], routes: Collection[str]) -> None:
    """Raise SetupError if a key names a model or a route that is not among these."""
    for key in keys:
        for noun, names, known in (("model", key.models, models), ("route", key.routes, routes)):
            for name in names or ():
                if name not in known and not (noun == "route" and is_admin_route(name)):
                    near = get_close_matches(name, known, n=1, cutoff=0.4)
                    hint = f"did you mean {near[0]}?" if near else f"{noun}s: {', '.join(sorted(known)[:8])}"
                    raise SetupError(f"the key {key.name} names the {noun} {_shown(name)}, which is not served.", hint=hint)


def check_distinct(keys: Sequence[ApiKey]) -> None:
    """Raise SetupError if keys of a file and others have a name or a hash in common."""
    names: dict[str, ApiKey] = {}
    digests: dict[bytes, ApiKey] = {}
    for key in keys:
        if names.setdefault(key.name, key) is not key:
            raise SetupError(
                f"two API keys are named {key.name}.", hint="keys of api_key and api_key_file are named key1, key2 and so on"
            )
        if (other := digests.setdefault(key.digest, key)) is not key:
            raise SetupError(f"the API keys {other.name} and {key.name} are the same.", hint="state each key once")


_hints: Final = get_type_hints(ApiKey, include_extras=True)
_FIELDS: Final = {each.name: _hints[each.name] for each in fields(ApiKey) if each.name not in ("name", "digest")}
_KEYS: Final = ("hash", *_FIELDS)
_MEANINGS: Final = {
    "hash": "SHA-256 of the key, of `whimbrel key`.",
    "models": "Names of models that the key may use. Default: all.",
    "routes": "Paths that the key opens, as /v1/embeddings. Default: all but those of the admin.",
    "requests_per_minute": "Requests a minute.",
    "tokens_per_minute": "Tokens a minute.",
    "tokens_per_day": "Tokens in 24 hours.",
    "requests_in_flight": "Requests at a time.",
    "admin": "Whether the key opens the routes below /admin/.",
}
_TAKES: Final = dict.fromkeys(("models", "routes"), "a list of at least one text") | {"admin": "true or false"}


def _read_key(name: str, entry: Any, where: Callable[..., str]) -> ApiKey:
    def place(*field: str) -> str:
        return f"{where('keys', name, *field)}: {'.'.join(('keys', *map(_shown, (name, *field))))}"

    if not _NAME.fullmatch(name) or redact_keys(name) != name or name in _RESERVED:
        reason = f"{name} is the metrics' own" if name in _RESERVED else _NAME_RULE
        raise SetupError(f"{place()}: this cannot be the name of a key: {reason}.", hint="e.g. [keys.search]")
    if not isinstance(entry, Mapping):
        raise SetupError(f"{place()} is no table.", hint=f'[keys.{name}] and below it hash = "sha256:..."; {_HASH_HINT}')
    stated = dict(cast("Mapping[str, Any]", entry))
    if unknown := next((key for key in stated if key not in _KEYS), None):
        raise SetupError(f"{place(unknown)} is not known.", hint=_hint_for(unknown))
    digest = _read_hash(stated.pop("hash", None), place)
    return ApiKey(name=name, digest=digest, **{key: _read_field(key, value, place(key)) for key, value in stated.items()})


def key_schema() -> dict[str, Any]:
    """Return the JSON Schema of the table of a key."""
    schemas: dict[str, Any] = {"hash": {"type": "string", "pattern": f"^{_HASH.pattern}$"}}
    for key, kind in _FIELDS.items():
        schema = msgspec.json.schema(kind)
        schemas[key] = next(each for each in schema.get("anyOf", [schema]) if each.get("type") != "null")
    properties = {key: {"description": _MEANINGS[key]} | schema for key, schema in schemas.items()}
    return {"type": "object", "additionalProperties": False, "required": ["hash"], "properties": properties}


def _hint_for(key: str) -> str:
    if key.lower() in _PLAIN:
        return f"a file holds no keys, only their hashes: {_HASH_HINT}"
    near = get_close_matches(key.replace("-", "_").lower(), _KEYS, n=1)
    return f"did you mean {near[0]}?" if near else f"one of: {', '.join(_KEYS)}"


def _read_hash(value: Any, place: Callable[..., str]) -> bytes:
    if value is None:
        raise SetupError(f"{place()} has no hash.", hint="`whimbrel key NAME` makes a key and prints its table")
    found = _HASH.fullmatch(value) if isinstance(value, str) else None
    if found is None:  # it may be the key itself, so it is not shown
        raise SetupError(f"{place('hash')} is no hash of a key: sha256: and 64 digits of a-f and 0-9.", hint=_HASH_HINT)
    return bytes.fromhex(found[1])


def _read_field(key: str, value: Any, place: str) -> Any:
    try:
        found = msgspec.convert(value, _FIELDS[key], strict=True)
    except ValueError:
        found = None
    if found is None:
        shown = f"{value!r}" if isinstance(value, int | float) else "of another type or empty"
        takes = _TAKES.get(key, "a whole number from 1, below 2**63")
        raise SetupError(f"{place} is {shown}; it takes {takes}.", hint=f"leave {key} out for no limit")
    if key == "routes" and (wrong := next((path for path in found if not path.startswith("/")), None)) is not None:
        raise SetupError(f"{place} takes paths, not {_shown(wrong)}.", hint='e.g. ["/v1/embeddings", "/v1/rerank"]')
    return found


def _shown(text: str) -> str:
    """Return a word of a file in a form fit for a message: without a key, short and on one line."""
    text = redact_keys(text)
    return text if len(text) <= 64 and text.isprintable() else ascii(text[:64])
