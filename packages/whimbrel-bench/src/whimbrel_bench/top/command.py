"""The command `whimbrel top`."""

import os
from typing import Annotated, Final

import typer
from rich.markup import escape

from whimbrel.cli.shared_options import OUTPUT_PANEL, SERVER_PANEL, flag, option

_DEFAULT: Final = "http://127.0.0.1:8000"


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help=escape(f"Base URLs of servers. [default: {_DEFAULT}]"), show_default=False),
    ] = None,
    *,
    api_key: Annotated[
        str | None, option("KEY", "API key of the servers. [env var: WHIMBREL_API_KEY]", panel=SERVER_PANEL)
    ] = None,
    insecure: Annotated[bool, flag("--insecure", "Accept any TLS certificate.", panel=SERVER_PANEL)] = False,
    interval: Annotated[
        float, option("SECONDS", "Time between two looks at each server.", min=0.1, max=3600, panel=OUTPUT_PANEL)
    ] = 2.0,
    once: Annotated[
        bool,
        flag(
            "--once",
            "Print one view, of one interval, as text. The exit code is 1 if a server is not up. Default without a terminal.",
            panel=OUTPUT_PANEL,
        ),
    ] = False,
    as_json: Annotated[
        bool, flag("--json", "Print a JSON object for each interval, one to a line; with --once, one.", panel=OUTPUT_PANEL)
    ] = False,
) -> None:
    """Watch servers in the terminal."""
    import asyncio

    from whimbrel.cli.console import signals_exit
    from whimbrel_bench.backends import read_url
    from whimbrel_bench.top.course import run

    bases = list(dict.fromkeys(read_url(url.rstrip("/").removesuffix("/v1")).url for url in urls or [_DEFAULT]))
    key = api_key or os.environ.get("WHIMBREL_API_KEY")
    with signals_exit():
        code = asyncio.run(run(bases, key, verify=not insecure, interval=interval, once=once, as_json=as_json))
    raise typer.Exit(code)
