"""Flags of `whimbrel serve`, made from the table of settings.

--help shows those that most people need. Flags of the other settings are read too, for one more release.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from math import isfinite
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from whimbrel.server.settings_table import TABLE, flag_name

_WITHOUT_FLAGS: Final = "HTTP"
"""Group of settings that never had flags."""


def help_of(key: str) -> str:
    """Return the sentence of a setting with its default, as --help shows it."""
    setting = TABLE[key]
    default = setting.shown_default
    return escape(f"{setting.text} [default: {default}]" if default not in ("", "false") else setting.text)


def flag_of(key: str, *, hidden: bool = False) -> Any:
    """Return the typer option of a setting. A switch has only the form that changes its default."""
    setting = TABLE[key]
    if setting.kind is not bool:
        name = flag_name(key)
    elif setting.default is None:
        name = f"{flag_name(key)}/{_negated(key)}"
    else:
        name = f" /{_negated(key)}" if setting.default else flag_name(key)
    return typer.Option(
        name,
        metavar=setting.metavar or None,
        help=help_of(key),
        rich_help_panel=setting.group,
        hidden=hidden,
        show_default=False,
        callback=_check_finite if setting.kind is float else None,
        min=setting.bounds.get("ge"),
        max=setting.bounds.get("le"),
    )


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command whose last parameter is `**given` a flag for each setting. None is not given."""
    own = signature(function, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    for key, setting in TABLE.items():
        if setting.group != _WITHOUT_FLAGS:
            kind = list[str] if setting.is_list else setting.kind
            hint = Annotated[kind | None, flag_of(key, hidden=not setting.has_flag)]
            parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    command: Any = function
    command.__signature__ = Signature(parameters)
    return function


def _negated(key: str) -> str:
    return f"--no-{flag_name(key)[2:]}"


def _check_finite(seconds: float | None) -> float | None:
    if seconds is not None and not isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds.")
    return seconds


Device = Annotated[str, flag_of("device")]
Dtype = Annotated[str, flag_of("dtype")]
MaxLength = Annotated[int | None, flag_of("max_length")]
MaxBatchTokens = Annotated[int | None, flag_of("max_batch_tokens")]
PoolingArgument = Annotated[str | None, flag_of("pooling")]
RerankerOption = Annotated[str | None, flag_of("reranker")]
AcceptConfig = Annotated[list[str] | None, flag_of("accept_config")]
TokenizerOption = Annotated[str, flag_of("tokenizer")]
Matryoshka = Annotated[bool, flag_of("matryoshka")]
