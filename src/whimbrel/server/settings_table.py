"""The table of all settings, and their values from flags, `--set` and variables.

A setting `max_length` is the variable WHIMBREL_MAX_LENGTH, and `--set max_length=512` on the command line. Some have a flag of
their own there (cli/flags.py). A flag or --set goes before a variable, and a variable before the default.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.inspect import UnionType as UnionInfo
from msgspec.inspect import type_info

from whimbrel.errors import SetupError
from whimbrel.server.settings import Group, Settings

KEY_VARIABLE: Final = "WHIMBREL_API_KEY"
PASSWORD_VARIABLE: Final = "WHIMBREL_SSL_KEYFILE_PASSWORD"  # noqa: S105
GUARDS_VARIABLE: Final = "WHIMBREL_GUARDS"
"""Variable that held sizes and times of HTTP as a JSON object. Read for one more release."""
_OF_KUBERNETES: Final = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes sets WHIMBREL_PORT to an address of this kind where a Service is named whimbrel."""


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
        info = type_info(self.type)
        kinds = info.types if isinstance(info, UnionInfo) else (info,)
        return {
            name: bound for name in ("ge", "gt", "le") for kind in kinds if (bound := getattr(kind, name, None)) is not None
        }

    @property
    def takes(self) -> str:
        """The values that fit, in words."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(get_args(self.kind))}"
        words = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.kind, "text")
        bounds = {"ge": "from {}", "gt": "above {}", "le": "up to {}"}
        return " ".join([words, *(bounds[name].format(f"{bound:.10g}") for name, bound in self.bounds.items())])

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
            raise SetupError(f"{source} is {value!r}; it takes {self.takes}.", hint=self.text) from None
        if isinstance(found, int) and found >= 2**63:
            raise SetupError(f"{source} is {value!r}; it takes {self.takes}, below 2**63.", hint=self.text)
        return found

    def _read_array(self, text: str, source: str) -> Any:
        try:
            return msgspec.json.decode(text)
        except ValueError:
            raise SetupError(f"{source} is no array in JSON.", hint='e.g. ["a", "b"], or a, b') from None


def _plain(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(each for each in get_args(hint) if each is not NoneType))
    return _plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


_hints: Final = get_type_hints(Settings, include_extras=True)
_rows: Final = [Setting(each.name, _hints[each.name], each.default, **each.metadata) for each in fields(Settings)]
TABLE: Final[Mapping[str, Setting]] = {row.key: row for row in sorted(_rows, key=lambda row: row.group == "HTTP")}
"""All settings by key, in the order of the reference."""


def read_settings(given: Mapping[str, Any], assignments: Iterable[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings of flags (None in `given`: not given), of --set (`KEY=VALUE`) and of variables. Raises SetupError."""
    return Settings(**{key: value for key, (value, _) in stated(given, assignments, environ).items()})


def stated(given: Mapping[str, Any], assignments: Iterable[str], environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the values that are stated, each with its source, by key. Raises SetupError for a wrong key or value."""
    found = _of_variables(environ)
    on_line: dict[str, tuple[Any, str]] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if key not in TABLE:
            raise SetupError(f"--set takes KEY=VALUE, and {key!r} is no key.", hint=_nearest(key))
        if not equals:
            raise SetupError(f"--set {key} has no value.", hint=f"--set {key}=VALUE")
        if key in on_line:
            raise SetupError(f"--set {key} is given twice.", hint="a list has commas: --set allowed_host=a,b")
        on_line[key] = TABLE[key].read_text(value, f"--set {key}"), f"--set {key}"
    for key, value in given.items():
        if value is not None and value not in ((), []):
            if key in on_line:
                raise SetupError(f"{key} is given twice, by its flag and by --set.", hint="leave one out")
            on_line[key] = TABLE[key].check(value, flag_name(key)), flag_name(key)
    if "api_key_file" in found | on_line:
        found.pop("api_key", None)  # the variable is the clients' too
    return found | on_line


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
    near = get_close_matches(key.replace("-", "_").lower(), TABLE, n=1)
    return f"did you mean {near[0]}?" if near else "whimbrel config show lists all keys"
