"""Options that several commands of the command line share, and how their values are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.markup import escape

from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.types.card import PoolingOption, RerankerName

Choice = TypeVar("Choice", bound=str)

_MODEL_HELP: Final = "Checkpoint folder or Hub id (owner/name or owner/name@revision). [default: the packaged all-MiniLM-L6-v2]"

MODEL_PANEL: Final = "Model"
SERVER_PANEL: Final = "Server"
OUTPUT_PANEL: Final = "Input and output"
REFERENCE_PANEL: Final = "Reference"


def option(metavar: str, text: str, *names: str, panel: str = MODEL_PANEL, **rest: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=escape(text), rich_help_panel=panel, **rest)


def flag(name: str, text: str, *, panel: str = MODEL_PANEL) -> Any:
    return typer.Option(name, help=escape(text), rich_help_panel=panel)


def model_argument(text: str) -> Any:
    return typer.Argument(metavar="MODEL", help=escape(text))


def help_text(summary: str, *examples: tuple[str, str]) -> str:
    """Return the help text of a command: its examples with what they do, then the summary."""
    width = max(len(command) for command, _ in examples)
    lines = "\n".join(f"  {command:<{width}}  {meaning}".rstrip() for command, meaning in examples)
    return f"{summary}\n\n\b\nExamples:\n{escape(lines)}"


ModelArgument = Annotated[str | None, model_argument(_MODEL_HELP)]
ModelOption = Annotated[str | None, option("MODEL", _MODEL_HELP, "--model", "-m")]
AsJson = Annotated[bool, flag("--json", "Print JSON instead of text.", panel=OUTPUT_PANEL)]


def is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def need(*packages: str) -> None:
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise SetupError(f"this command needs {' and '.join(missing)}.", hint="pip install 'whimbrel[serve]'")


def read_pooling(name: str | None) -> PoolingOption | None:
    from whimbrel.types.card import POOLING_OPTIONS

    return _one_of("pooling", name, POOLING_OPTIONS)


def read_reranker(name: str | None) -> RerankerName | None:
    from whimbrel.types.card import RERANKERS

    return _one_of("reranker", name, RERANKERS)


def _one_of(option: str, name: str | None, choices: Collection[Choice]) -> Choice | None:
    match = next((choice for choice in choices if choice == name), None)
    if name is not None and match is None:
        raise SetupError(f"no {option} {name!r}.", hint=f"--{option} takes one of: {', '.join(choices)}")
    return match
