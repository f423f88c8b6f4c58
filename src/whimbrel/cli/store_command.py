"""The command `whimbrel store`: the output of `whimbrel run` into a store.

The exit code is 0, 3 if rows were refused, 1 for an error that ended the command, and 130 after Ctrl-C. After each of the last
two the same command writes all rows again, each in its own place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.markup import escape

from whimbrel.cli import console
from whimbrel.cli.run_progress import RunProgress
from whimbrel.cli.shared_options import OUTPUT_PANEL, flag, need, option
from whimbrel.errors import SetupError
from whimbrel.server.secret_file import read_secret

if TYPE_CHECKING:
    from whimbrel.stores.transfer import RefusedRow

PASSWORD_VARIABLE: Final = "WHIMBREL_STORE_PASSWORD"  # noqa: S105  # a name
_SOME_REFUSED: Final = 3
_MOST_SHOWN: Final = 10
_WAIT_SECONDS: Final = 600.0
_STORE_PANEL: Final = "Store"


def store(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that `whimbrel run --out DIR` wrote.", show_default=False)
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="URL",
            help=escape(
                "lancedb:PATH, qdrant:PATH, qdrant+https://HOST:6333, postgresql://USER@HOST/DATABASE, or "
                "opensearch+https://USER@HOST:9200."
            ),
            show_default=False,
            rich_help_panel=_STORE_PANEL,
        ),
    ],
    table: Annotated[
        str,
        typer.Option(
            "--table", "-t", metavar="NAME", help="Table, collection or index. Made if there is none.", show_default=False,
            rich_help_panel=_STORE_PANEL,
        ),
    ],
    password_file: Annotated[
        Path | None,
        option(
            "FILE",
            f"File with the password or API key in its first line. [default: {PASSWORD_VARIABLE}, or that of the URL]",
            panel=_STORE_PANEL,
        ),
    ] = None,
    distance: Annotated[
        Literal["cosine", "dot"] | None,
        option(
            "cosine|dot", "Measure for search. [default: dot for vectors of length 1, else cosine]", panel=_STORE_PANEL
        ),
    ] = None,
    index: Annotated[
        bool, flag("--index", "Make an index of dense vectors at the end: LanceDB and PostgreSQL.", panel=_STORE_PANEL)
    ] = False,
    wait_seconds: Annotated[
        float,
        option(
            "SECONDS", "Time to wait for a store that does not answer. [default: 600]", panel=_STORE_PANEL, min=0,
            show_default=False,
        ),
    ] = _WAIT_SECONDS,
    outputs: Annotated[
        list[str] | None, option("NAME,NAME", "Outputs to store. [default: all that the run has]", panel=OUTPUT_PANEL)
    ] = None,
    refused: Annotated[
        Path | None, option("FILE", "File for refused rows, as JSON lines. [default: ten are shown]", panel=OUTPUT_PANEL)
    ] = None,
    last_of_doubled: Annotated[
        bool, flag("--last-of-doubled", "Of rows with one id keep the last. Otherwise they are refused.", panel=OUTPUT_PANEL)
    ] = False,
    first_part: Annotated[
        int, option("N", "Go on with part N, as an earlier command said. [default: 0]", "--from", panel=OUTPUT_PANEL, min=0,
                    show_default=False)
    ] = 0,
    unfinished: Annotated[
        bool, flag("--unfinished", "Store the finished parts of a run that is not.", panel=OUTPUT_PANEL)
    ] = False,
    verify: Annotated[bool, flag("--verify", "Hash the parts before anything is written.", panel=OUTPUT_PANEL)] = False,
) -> None:  # fmt: skip
    need("pyarrow", "fsspec", extra="bulk")
    from whimbrel.bulk.job import Totals
    from whimbrel.stores import store as store_run

    if unfinished and first_part:
        raise SetupError("--from is for a finished run, and does not go with --unfinished.")
    totals = Totals()
    names = [name.strip() for value in outputs or () for name in value.split(",") if name.strip()]
    with (
        RunProgress(console.stderr_console(), totals) as progress,
        console.signals_exit(),
        _refusals(refused, progress.tell) as refuse,
    ):
        try:
            store_run(
                folder, to, table, password=_password(password_file, progress.tell), outputs=names, distance=distance,
                index=index, unfinished=unfinished, verify=verify, last_of_doubled=last_of_doubled, first_part=first_part,
                wait_seconds=wait_seconds, watch=progress, totals=totals, refuse=refuse,
            )  # fmt: skip
        except BaseException as error:
            if totals.shards_done or isinstance(error, KeyboardInterrupt | SystemExit):
                on = f"; --from {totals.shards_done} goes on there" if totals.shards_done and not unfinished else ""
                progress.stop(f"stopped: {totals.shards_done:,} of {totals.shards:,} parts were written{on}.")
            raise
        progress.finish_with(f"{totals.done - totals.refused:,} rows written, {totals.refused:,} refused", table)
    raise typer.Exit(_SOME_REFUSED if totals.refused else 0)


def _password(file: Path | None, warn: Callable[[str], None]) -> str | None:
    if file is not None:
        return read_secret(file, "the password", warn)
    return os.environ.get(PASSWORD_VARIABLE) or None


@contextmanager
def _refusals(path: Path | None, tell: Callable[[str], None]) -> Generator[Callable[[RefusedRow], None]]:
    """Write refused rows into a file as they come, or tell the first of them."""
    from whimbrel.wire.json_base64 import to_json

    shown = 0

    def show(row: RefusedRow) -> None:
        nonlocal shown
        shown += 1
        if shown <= _MOST_SHOWN:
            tell(f"refused {row.key} of {row.part}: {row.reason}")

    if path is None:
        yield show
        return
    try:
        with path.open("wb", buffering=0) as file:
            yield lambda row: _ignore(file.write(to_json(row._asdict()) + b"\n"))
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}.") from None


def _ignore(_: object) -> None: ...
