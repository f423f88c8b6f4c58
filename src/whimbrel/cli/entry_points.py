"""Commands of other distributions: `whimbrel --help` lists them, and their entry points are looked up when one of them runs.

A command's code is imported only if its distribution is of this version, since it uses what other versions may not have.
"""

from collections.abc import Mapping
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from whimbrel import __version__
from whimbrel.errors import SetupError

GROUP: Final = "whimbrel.commands"
COMMANDS: Final[Mapping[str, str]] = {
    "top": "Watch servers in the terminal: requests, tokens, queue, times of stages, engines and caches.",
    "bench": "Measure servers and the engine: load, throughput, latency, comparisons.",
    "eval": "Evaluate models on judged queries: nDCG@10, recall and intervals, models and precisions side by side.",
}
"""Commands with their summaries. The extra `bench` of whimbrel installs them."""


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or of another distribution's what the help shows of it."""
        summary = COMMANDS.get(cmd_name)
        return super().get_command(ctx, cmd_name) if summary is None else TyperCommand(cmd_name, help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            return args[0], load_command(args[0]), args[1:]
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Return the command of another distribution. Raises SetupError if that is missing or of another version."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise SetupError(
            f"`whimbrel {name}` is not installed: pip install 'whimbrel[bench]', or ./packages/whimbrel-bench in a checkout"
        )
    assert found.dist is not None
    if found.dist.version != __version__:
        raise SetupError(
            f"{found.dist.name} is of version {found.dist.version} and whimbrel of {__version__}: "
            f"pip install 'whimbrel[bench]=={__version__}'"
        )
    return get_command(found.load())
