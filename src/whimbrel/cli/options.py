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
LIMITS_PANEL: Final = "Limits"
SECURITY_PANEL: Final = "Security"
LOGS_PANEL: Final = "Logs and metrics"
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
Device = Annotated[str, option("DEVICE", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.")]
Dtype = Annotated[
    str,
    option(
        "DTYPE",
        "auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs with VNNI). auto: bfloat16 where it is fast, else float32.",
    ),
]
MaxLength = Annotated[
    int | None,
    option("N", "Maximum tokens per text, at most the model's number of positions. [default: from the checkpoint]"),
]
MaxBatchTokens = Annotated[
    int | None,
    option("N", "Maximum tokens in one batch, 1 to 1048576. A longer text runs alone. [default: 512 on a CPU, 16384 on a GPU]"),
]
PoolingArgument = Annotated[
    str | None,
    option(
        "NAME",
        "Pooling of a checkpoint that has no modules.json: mean, cls, max, mean_sqrt_len_tokens, weightedmean, "
        "lasttoken, splade or math-shepherd.",
    ),
]
RerankerOption = Annotated[
    str | None,
    option("NAME", "Prompt format of a reranker whose files do not name it: qwen3, mxbai-v2, bge-gemma, nemotron or zerank."),
]
AcceptConfig = Annotated[
    list[str] | None,
    option(
        "KEY",
        "Accept this key of the checkpoint's JSON files, which Whimbrel does not know and would refuse. May be repeated.",
        "--accept-config",
    ),
]
TokenizerOption = Annotated[
    str,
    option(
        "NAME",
        "Reading of the tokenizer's files: transformers (version 5), transformers-4, or file (tokenizer.json as it is). "
        "auto: transformers, but transformers-4 where its special tokens are others and the model was made with it.",
    ),
]
AsJson = Annotated[bool, flag("--json", "Print JSON instead of text.", panel=OUTPUT_PANEL)]
Matryoshka = Annotated[
    bool, flag("--matryoshka", "Allow truncated vectors (`dimensions`) for a model whose files do not declare it.")
]


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
