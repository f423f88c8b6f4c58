"""`whimbrel config`: the settings of a server, their values and where these come from."""

import os
from itertools import groupby
from typing import Annotated, Any, Final, cast

import typer

from whimbrel.cli.shared_options import AsJson, help_text, option
from whimbrel.server.settings_table import TABLE, stated

app = typer.Typer(name="config", help="Show the settings of `whimbrel serve`.", no_args_is_help=True, rich_markup_mode="rich")

_SECRETS: Final = ("api_key", "ssl_keyfile_password")


@app.callback()
def _group() -> None: ...  # pyright: ignore[reportUnusedFunction]  # typer calls it, and keeps `show` a command of its own


@app.command(
    help=help_text(
        "Show all settings of `whimbrel serve`: values, sources and meanings.",
        ("whimbrel config show", "with the variables of this shell"),
        ("whimbrel config show --json", "as JSON"),
    )
)
def show(
    *,
    assignments: Annotated[list[str] | None, option("KEY=VALUE", "A setting, as `whimbrel serve` takes it.", "--set")] = None,
    as_json: AsJson = False,
) -> None:
    from whimbrel.cli import console

    found = {key: (_shown(key, value), source) for key, (value, source) in stated({}, assignments or (), os.environ).items()}
    if as_json:
        console.print_json([
            {"key": key, "value": found.get(key, (row.default, ""))[0], "source": found.get(key, ("", "default"))[1]}
            | {"variable": row.variable, "group": row.group, "meaning": row.text, "computed": row.computed}
            for key, row in TABLE.items()
        ])  # fmt: skip
        return
    for group, rows in groupby(TABLE.values(), key=lambda row: row.group):
        typer.echo(f"{group}\n")
        for row in rows:
            value, source = found.get(row.key, (row.shown_default or "none", ""))
            typer.echo(f"  {row.key} = {value}{f'  ({source})' if source else ''}")
            typer.echo(f"      {row.text}")
        typer.echo()
    typer.echo("A setting KEY is the variable WHIMBREL_KEY, in capitals, or `whimbrel serve --set KEY=VALUE`.")


def _shown(key: str, value: Any) -> Any:
    if key in _SECRETS:
        return "***"
    if isinstance(value, tuple):
        return ", ".join(cast(tuple[str, ...], value))
    return value if isinstance(value, bool | int | float) else str(value)
