"""Options that several commands of the command line share."""

from importlib.util import find_spec
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from whimbrel.errors import SetupError

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


def need(*packages: str, extra: str = "serve") -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SetupError(f"this command needs {' and '.join(missing)}.", hint=f"pip install 'whimbrel[{extra}]'")
