"""Flags of `whimbrel serve`, made from the table of settings.

--help shows those that most people need. Flags of the other settings are read too, for one more release.
"""

from collections.abc import Callable, Container, Mapping
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Final, Literal, get_origin

import typer
from rich.markup import escape

from whimbrel.server.settings_table import TABLE, flag_name

SERVE_FLAGS: Final = tuple(key for key, setting in TABLE.items() if setting.group != "HTTP")
"""Settings that have, or had, a flag of `whimbrel serve`."""
OLD_FLAGS: Final = frozenset(key for key in SERVE_FLAGS if not TABLE[key].has_flag)


def flag_of(key: str, *, hidden: bool = False) -> Any:
    """Return the typer option of a setting. A switch has only the form that changes its default."""
    setting, name = TABLE[key], flag_name(key)
    if setting.kind is bool and setting.default is not False:
        name = f"{name if setting.default is None else ' '}/--no-{name[2:]}"
    default = setting.shown_default
    return typer.Option(
        name,
        metavar=setting.metavar or None,
        help=escape(f"{setting.text} [default: {default}]" if default not in ("", "false") else setting.text),
        rich_help_panel=setting.group,
        hidden=hidden,
        show_default=False,
        min=setting.bounds.get("ge"),
        max=setting.bounds.get("le"),
    )


def with_flags(*keys: str, hidden: Container[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose last parameter is `**given` a flag for each of these settings. None is not given."""

    def give(function: Callable[..., None]) -> Callable[..., None]:
        own = signature(function, eval_str=True)
        parameters = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        for key in keys:
            kind = list[str] if TABLE[key].is_list else TABLE[key].kind
            kind = str if get_origin(kind) is Literal else kind  # the table tells what it takes
            hint = Annotated[kind | None, flag_of(key, hidden=key in hidden)]
            parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=hint))
        parameters.sort(key=lambda each: each.name == "as_json")  # its panel comes last in the help
        command: Any = function
        command.__signature__ = Signature(parameters)
        return function

    return give


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Engine that flags state. Raises SetupError for a pooling or a reranker that does not exist."""
    return {key: value for key, value in given.items() if value is not None} | {
        "pooling": TABLE["pooling"].check(given.get("pooling"), flag_name("pooling")),
        "reranker": TABLE["reranker"].check(given.get("reranker"), flag_name("reranker")),
        "accept_config": tuple(given.get("accept_config") or ()),
    }


Device = Annotated[str, flag_of("device")]
MaxLength = Annotated[int | None, flag_of("max_length")]
MaxBatchTokens = Annotated[int | None, flag_of("max_batch_tokens")]
