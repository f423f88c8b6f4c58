"""The commands `whimbrel config`: check a file of settings, show all settings with their sources, print the file's schema."""

import os
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from whimbrel.cli import console
from whimbrel.cli import shared_options as shared
from whimbrel.cli.shared_options import AsJson, help_text, need, option
from whimbrel.errors import SetupError
from whimbrel.server.config_file import FILE_VARIABLE, Config, find_file, read_config
from whimbrel.server.settings_table import MODEL_TABLE, TABLE, Setting

app = typer.Typer(
    name="config",
    help="Check, show and describe the settings of `whimbrel serve`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
ConfigOption = Annotated[
    Path | None,
    option("PATH", "File of settings and models (TOML). [default: WHIMBREL_CONFIG]", "--config", panel=shared.SERVER_PANEL),
]
Assignments = Annotated[list[str] | None, option("KEY=VALUE", "A setting, as `whimbrel serve` takes it.", "--set")]


@app.command(
    "check",
    help=help_text(
        "Check a file of settings, and the files that it names, without loading a model. The exit code is 1 for a fault.",
        ("whimbrel config check whimbrel.toml", "before a server reads it"),
        ("whimbrel config check", "the file that WHIMBREL_CONFIG names"),
    ),
)
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file. [default: WHIMBREL_CONFIG]", show_default=False)
    ] = None,
) -> None:
    need("httptools")
    from whimbrel.cli.serve_options import check_config

    if find_file(file, os.environ) is None:
        raise SetupError("no file of settings is named.", hint=f"whimbrel config check FILE, or set {FILE_VARIABLE}")
    config = read_config(file, {}, (), os.environ)
    check_config(config, lambda text: console.stderr_console().print(f"warning: {text}", style="yellow", markup=False))
    models = ", ".join(config.models) or "the packaged one, or those of the command line"
    typer.echo(f"{config.file} is right. Models: {models}.")


@app.command(
    "show",
    help=help_text(
        "Show all settings of `whimbrel serve`: values, sources and meanings.",
        ("whimbrel config show", "with the variables of this shell"),
        ("whimbrel config show --config whimbrel.toml", "and a file"),
        ("whimbrel config show --json", "as JSON"),
    ),
)
def show(*, file: ConfigOption = None, assignments: Assignments = None, as_json: AsJson = False) -> None:
    config = read_config(file, {}, assignments or (), os.environ)
    if as_json:
        console.print_json(
            [
                *(_entry(config, row, config.settings) for row in TABLE.values()),
                *(
                    _entry(config, row, table, "models", name)
                    for name, table in config.models.items()
                    for row in MODEL_TABLE.values()
                ),
                *({"key": f"keys.{key.name}", "value": key.limits, "source": str(config.file)} for key in config.keys),
            ]
        )
        return
    for group, rows in groupby(TABLE.values(), key=lambda row: row.group):
        typer.echo(f"{group}\n")
        for row in rows:
            typer.echo(f"  {_line(config, row, config.settings)}")
            typer.echo(f"      {row.text}")
        typer.echo()
    for name, table in config.models.items():
        typer.echo(f"Model {name}\n")
        for row in MODEL_TABLE.values():
            typer.echo(f"  {_line(config, row, table, 'models', name)}")
        typer.echo()
    for key in config.keys:
        typer.echo(f"Key {key.name}\n")
        for name, value in key.limits.items() or [("limits", "none")]:
            typer.echo(f"  {name} = {value}")
        typer.echo()
    typer.echo("A setting KEY is the variable WHIMBREL_KEY, in capitals, or `whimbrel serve --set KEY=VALUE`.")


@app.command(
    "schema",
    help=help_text(
        "Print the JSON Schema of the file of settings, with which editors complete and check it.",
        ("whimbrel config schema > whimbrel.schema.json", "and in the file's first line: #:schema whimbrel.schema.json"),
    ),
)
def schema() -> None:
    from whimbrel.server.config_schema import config_schema

    console.print_json(config_schema())


def _entry(config: Config, row: Setting, of: Any, *above: str) -> dict[str, Any]:
    source = config.sources.get((*above, row.key))
    return {
        "key": row.key,
        **({"model": above[1]} if above else {}),
        "value": row.default if source is None else _shown(row, getattr(of, row.key)),
        "source": source or "default",
        "variable": row.variable if row.key in TABLE else None,
        "group": row.group,
        "meaning": row.text,
        "computed": row.computed,
    }


def _line(config: Config, row: Setting, of: Any, *above: str) -> str:
    source = config.sources.get((*above, row.key))
    if source is None:
        return f"{row.key} = {row.shown_default or 'none'}"
    return f"{row.key} = {_shown(row, getattr(of, row.key))}  ({source})"


def _shown(row: Setting, value: Any) -> Any:
    if row.is_secret:
        return "***"
    if row.is_list:
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={str(each)!r}" for name, each in cast(dict[str, Any], value).items())
    return value if isinstance(value, bool | int | float) else str(value)
