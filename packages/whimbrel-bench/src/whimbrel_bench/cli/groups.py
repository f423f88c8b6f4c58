"""Commands whose parameters are options: their flags are those of the options' fields."""

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from whimbrel_bench.options import Read


class _Flag(NamedTuple):
    name: str
    """Name of the command's parameter, by that of the flag."""
    hint: Any
    default: Any
    read: Callable[[Any], Any] | None


def flags_of(options: type[Any]) -> dict[str, _Flag]:
    """Return the flags of a dataclass by field."""
    found: dict[str, _Flag] = {}
    defaults = {each.name: each.default for each in fields(options)}
    for key, hint in get_type_hints(options, include_extras=True).items():
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        info = next((each for each in extras if isinstance(each, OptionInfo)), None)
        if info is not None:
            reading = next((each for each in extras if isinstance(each, Read)), None)
            kind, default, read = reading or (kind, defaults[key], None)
            name = info.default if isinstance(info.default, str) else key  # typer has the first name there
            found[key] = _Flag(name.lstrip("-").replace("-", "_"), Annotated[kind, info], default, read)
    return found


def spread(*, without: Collection[str] = (), **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in place of each parameter that is a dataclass, the flags of its fields.

    Fields of `without` have no flags, and `defaults` are other defaults by the names of the fields.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, tuple[type[Any], dict[str, _Flag]]] = {}
        parameters: list[Parameter] = []
        for each in signature(function, eval_str=True).parameters.values():
            if not is_dataclass(each.annotation):
                parameters.append(each)
                continue
            kind: Any = each.annotation
            flags = {key: flag for key, flag in flags_of(kind).items() if key not in without}
            groups[each.name] = kind, flags
            for key, flag in flags.items():
                default = defaults.get(key, flag.default)
                parameters.append(Parameter(flag.name, Parameter.KEYWORD_ONLY, default=default, annotation=flag.hint))

        def command(**given: Any) -> None:
            for name, (kind, flags) in groups.items():
                values = {key: (given.pop(flag.name), flag.read) for key, flag in flags.items()}
                given[name] = kind(**{key: value if read is None else read(value) for key, (value, read) in values.items()})
            function(**given)

        result: Any = command
        result.__signature__, result.__doc__ = Signature(parameters), function.__doc__
        return result

    return decorate
