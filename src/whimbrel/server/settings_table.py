"""The table of all settings, and their values from flags, `--set` and variables.

A setting `max_length` is the variable WHIMBREL_MAX_LENGTH, `--set max_length=512` on the command line, and a key in the file of
settings (config_file.py). Some have a flag of their own (cli/flags.py). A flag or --set goes before a variable, a variable
before the file, and the file before the default.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec.inspect import Metadata, type_info
from msgspec.inspect import UnionType as UnionInfo

from whimbrel.errors import SetupError
from whimbrel.server.settings import Group, ModelSettings, ModelTable, Settings

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
PASSWORD_VARIABLE: Final = "WHIMBREL_SSL_KEYFILE_PASSWORD"  # noqa: S105
GUARDS_VARIABLE: Final = "WHIMBREL_GUARDS"
"""Variable that held sizes and times of HTTP as a JSON object. Read for one more release."""
_PASSWORDS: Final = ("ssl_keyfile_password", "ssl_keyfile_password_file")
_OF_KUBERNETES: Final = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes sets WHIMBREL_PORT to an address of this kind where a Service is named whimbrel."""
Section: TypeAlias = Literal["server", "limits", "defaults"]
_SECTION_OF: Final[Mapping[Group, Section]] = {
    "Server": "server", "Security": "server", "Logs and metrics": "server",
    "Limits": "limits", "HTTP": "limits",
    "Model": "defaults",
}  # fmt: skip
Stated: TypeAlias = Mapping[str, tuple[Any, str]]
"""Values that are stated, each with its source, by key."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings."""

    key: str
    type: Any
    """The annotated type, by which a value is checked."""
    default: Any
    text: str
    """Meaning, in a sentence."""
    group: Group = "HTTP"
    metavar: str = ""
    computed: str = ""
    """Way to the default, where it is no fixed value."""
    has_flag: bool = False
    """True if --help shows its flag."""
    splits: bool = True
    """True if a text of several values has commas."""
    is_secret: bool = False
    """True if it is neither shown nor written into a file of settings."""

    @property
    def section(self) -> Section | None:
        """The table of the file of settings that has this key. None: the file states it otherwise."""
        is_elsewhere = self.is_secret or (self.group == "Model" and self.key not in OF_MODELS)
        return None if is_elsewhere else _SECTION_OF[self.group]

    @property
    def variable(self) -> str:
        return f"WHIMBREL_{self.key.upper()}"

    @property
    def kind(self) -> Any:
        """The type of a value without None and annotations: a class, a Literal or a tuple."""
        return _plain(self.type)

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def bounds(self) -> dict[str, float]:
        """The least and the greatest value, as `ge`, `gt` and `le`."""
        return {
            name: bound
            for name in ("ge", "gt", "le")
            for kind in self._kinds()
            if (bound := getattr(kind, name, None)) is not None
        }

    @property
    def takes(self) -> str:
        """The values that fit, in words."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(get_args(self.kind))}"
        if self.examples:
            return f"text such as {', '.join(self.examples)}"
        words = {
            bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text",
            tuple: "a list of texts", Mapping: "a table of texts",
        }  # fmt: skip
        bounds = {"ge": "from {}", "gt": "above {}", "le": "up to {}"}
        stated = [bounds[name].format(f"{bound:.15g}") for name, bound in self.bounds.items()]
        return " ".join([words[get_origin(self.kind) or self.kind], *stated])

    @property
    def examples(self) -> Sequence[str]:
        """Texts that fit, if the setting takes texts of some form."""
        metadata = (cast(Any, each).extra_json_schema for each in self._kinds() if isinstance(each, Metadata))
        return next((each["examples"] for each in metadata if each), ())

    def _kinds(self) -> Iterable[Any]:
        info = type_info(self.type)
        return info.types if isinstance(info, UnionInfo) else (info,)

    @property
    def shown_default(self) -> str:
        """The default in words. Empty if there is none."""
        if self.computed or self.default in (None, (), ""):
            return self.computed
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default).removesuffix(".0")

    def read_text(self, text: str, source: str) -> Any:
        """Return the value that a text states. Raises SetupError, which names the `source` of the text."""
        if not text.strip():
            raise SetupError(f"{source} is empty.", hint="leave it unset for the default")
        value: Any = text
        if self.is_list:
            if text.lstrip().startswith("["):
                value = self._read_array(text, source)
            else:
                value = [each.strip() for each in text.split(",") if each.strip()] if self.splits else [text]
        return self.check(value, source)

    def check(self, value: Any, source: str, *, strict: bool = False) -> Any:
        """Return a value of the setting's type. Unless `strict`, a text may state a number. Raises SetupError."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            found = msgspec.convert(value, self.type, strict=strict, dec_hook=lambda kind, text: kind(text))
        except ValueError:
            raise SetupError(f"{source} is {value!r:.80}; it takes {self.takes}.", hint=self.text) from None
        if isinstance(found, int) and found >= 2**63:
            raise SetupError(f"{source} is {value!r:.80}; it takes {self.takes}, below 2**63.", hint=self.text)
        return found

    def read_toml(self, value: Any, source: str) -> Any:
        """Return the value that a file states. Raises SetupError, which names the `source` of the value."""
        found = self.check(value, source, strict=True)
        for text in self._names_in(value):
            if not text.strip():
                what = "is empty" if isinstance(value, str) else "holds an empty text"
                raise SetupError(f"{source} {what}.", hint="leave it out for the default")
            if not text.isprintable():
                raise SetupError(f"{source} holds a control character.", hint=self.text)
        return found

    def _names_in(self, value: Any) -> Iterable[str]:
        """Return the texts of a value that name something, so that they are not empty."""
        if isinstance(value, str):
            return [value] if self.default != "" else []
        if isinstance(value, dict):
            table = cast(dict[str, str], value)
            return [*table, *(table.values() if self.holds_paths else ())]
        return cast(list[str], value) if isinstance(value, list) else []

    @property
    def holds_paths(self) -> bool:
        """True of a table of paths."""
        return Path in get_args(self.kind)

    def _read_array(self, text: str, source: str) -> Any:
        try:
            return msgspec.json.decode(text)
        except ValueError:
            raise SetupError(f"{source} is no array in JSON.", hint='e.g. ["a", "b"], or a, b') from None


def _plain(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(each for each in get_args(hint) if each is not NoneType))
    return _plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _rows(each: type) -> dict[str, Setting]:
    hints, order = get_type_hints(each, include_extras=True), get_args(Group)
    rows = [Setting(item.name, hints[item.name], item.default, **item.metadata) for item in fields(each)]
    return {row.key: row for row in sorted(rows, key=lambda row: order.index(row.group))}


TABLE: Final[Mapping[str, Setting]] = _rows(Settings)
"""All settings by key, in the order of the reference."""
OF_MODELS: Final[Mapping[str, Setting]] = _rows(ModelSettings)
"""Settings that each model of a file may have of its own."""
MODEL_TABLE: Final[Mapping[str, Setting]] = _rows(ModelTable)
"""Keys of a model's table in the file of settings: those, and others that no flag and no variable states."""


def read_settings(given: Mapping[str, Any], assignments: Iterable[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings of flags (None in `given`: not given), of --set (`KEY=VALUE`) and of variables. Raises SetupError."""
    return Settings(**values_of(stated(given, assignments, environ)))


def values_of(found: Stated) -> dict[str, Any]:
    return {key: value for key, (value, _) in found.items()}


def stated(given: Mapping[str, Any], assignments: Iterable[str], environ: Mapping[str, str]) -> Stated:
    """Return the values that are stated beside a file. Raises SetupError for a wrong key or value."""
    return merged(_of_variables(environ), _of_command_line(given, assignments))


def merged(*sources: Stated) -> Stated:
    """Return the values of several sources, of which later ones go before earlier ones. Raises SetupError."""
    found: dict[str, tuple[Any, str]] = {}
    for source in sources:
        passwords = [source[key][1] for key in _PASSWORDS if key in source]
        if len(passwords) > 1:
            raise SetupError(f"{' and '.join(passwords)} state one password.", hint="leave one out")
        dropped = _PASSWORDS if passwords else ()
        found = {key: each for key, each in found.items() if key not in dropped} | dict(source)
    return without_clients_key(found) if "api_key_file" in found else found


def without_clients_key(found: Stated) -> Stated:
    """Return the values without a key of the variable, which is the clients' too: where a file has keys, it is none of them."""
    return {key: each for key, each in found.items() if key != "api_key" or each[1] != KEY_VARIABLE}


def _of_command_line(given: Mapping[str, Any], assignments: Iterable[str]) -> Stated:
    found: dict[str, tuple[Any, str]] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if key not in TABLE:
            raise SetupError(f"--set takes KEY=VALUE, and {key!r} is no key.", hint=_nearest(key))
        if not equals:
            raise SetupError(f"--set {key} has no value.", hint=f"--set {key}=VALUE")
        if key in found:
            raise SetupError(f"--set {key} is given twice.", hint="a list has commas: --set allowed_host=a,b")
        found[key] = TABLE[key].read_text(value, f"--set {key}"), f"--set {key}"
    for key, value in given.items():
        if value is not None and value not in ((), []):
            if key in found:
                raise SetupError(f"{key} is given twice, by its flag and by --set.", hint="leave one out")
            found[key] = TABLE[key].check(value, flag_name(key)), flag_name(key)
    return found


def flag_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _of_variables(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = _of_guards(environ.get(GUARDS_VARIABLE, ""))
    for key, setting in TABLE.items():
        text = environ.get(setting.variable)
        if text is None or (key == "port" and _OF_KUBERNETES.match(text)):
            continue
        found[key] = setting.read_text(text, setting.variable), setting.variable
    return found


def _of_guards(text: str) -> dict[str, tuple[Any, str]]:
    """Return the limits in the variable of earlier releases, each with its source."""
    try:
        changes = msgspec.json.decode(text or "{}", type=dict[str, object])
    except ValueError as error:
        raise SetupError(f"{GUARDS_VARIABLE}: {error}.", hint="WHIMBREL_MAX_BODY_BYTES=1000000 is simpler") from None
    limits = [key for key, row in TABLE.items() if row.group == "HTTP" or key in ("max_body_bytes", "max_inflight_bytes")]
    renamed = {"lingering_timeout" if key == "drain_timeout" else key: value for key, value in changes.items()}
    if unknown := sorted(renamed.keys() - set(limits)):
        raise SetupError(f"{GUARDS_VARIABLE}: {unknown[0]} is not one of {', '.join(limits)}.", hint=_nearest(unknown[0]))
    found = {key: TABLE[key].check(value, f"{GUARDS_VARIABLE}: {key}", strict=True) for key, value in renamed.items()}
    return {key: (value, GUARDS_VARIABLE) for key, value in found.items()}


def _nearest(key: str) -> str:
    near = nearest(key, TABLE)
    return f"did you mean {near}?" if near else "whimbrel config show lists all keys"


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that a wrong one may mean."""
    return next(iter(get_close_matches(key.replace("-", "_").lower(), known, n=1)), None)
