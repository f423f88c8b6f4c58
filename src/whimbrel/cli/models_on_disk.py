"""Commands on the models in the hub's cache: pull, list and rm."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from whimbrel.cli import console
from whimbrel.cli.shared_options import OUTPUT_PANEL, AsJson, flag, need
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from whimbrel.checkpoint.cached_models import CachedModel, CachedRevision, Removal
    from whimbrel.checkpoint.hub_download import Download

_ID_HELP: Final = "Hub id: owner/name, or owner/name@revision with a branch, a tag or a commit."
_HEAD: Final = ("REVISION", "SIZE", "USED", "LICENCE", "SERVED")
_UNITS: Final = (("day", 86_400), ("hour", 3_600), ("minute", 60))
_COMMIT_DIGITS: Final = 7

IdArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_ID_HELP, show_default=False)]


def pull(
    model: IdArgument,
    *,
    pickles: Annotated[bool, flag("--pickles", "Also weights in pickle format, for `whimbrel convert`.")] = False,
    as_json: AsJson = False,
) -> None:
    need("huggingface_hub")
    from whimbrel.checkpoint import hub_download, packaged
    from whimbrel.checkpoint.locate import read_hub_id
    from whimbrel.cli.progress import DownloadProgress

    stderr = console.stderr_console()
    if model == packaged.NAME and (folder := packaged.find_packaged()) is not None:
        stderr.print(f"{model} is packaged with this installation: nothing is fetched.", markup=False)
        _print_pulled({"model": model, "folder": str(folder), "bytes": 0, "fetched_bytes": 0}, as_json=as_json)
        return
    if model.strip() and Path(model).expanduser().is_dir():
        raise SetupError(f"{model} is a folder here, which needs no download.", hint=f"serve it: whimbrel serve {model}")
    download = hub_download.plan_download(*read_hub_id(model), pickles=pickles)
    free = hub_download.check_space(download)
    here = sum(map(download.bytes_here, download.files))
    stderr.print(_announcement(download, here, free), markup=False)
    progress = DownloadProgress(stderr, {file.name: (download.bytes_here(file), file.size) for file in download.missing})
    try:
        with console.signals_exit(), progress.shown():
            folder = hub_download.fetch(download, progress.tell, progress.wait)
    except (KeyboardInterrupt, SystemExit):
        stay = sum(map(download.bytes_here, download.files))
        of = f"{size(stay)} of {size(download.num_bytes)}"
        stderr.print(f"stopped: {of} are on the disk; the same command goes on from there.", markup=False)
        raise
    if not as_json:
        stderr.print(f"serve it: whimbrel serve {model}{' (after whimbrel convert)' if pickles else ''}", markup=False)
    _print_pulled(
        {
            "model": download.model, "revision": download.revision, "commit": folder.name, "licence": download.licence,
            "folder": str(folder), "bytes": download.num_bytes, "fetched_bytes": download.num_bytes - here,
            "files": {file.name: file.size for file in download.files},
        },
        as_json=as_json,
    )  # fmt: skip


def _print_pulled(about: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(about)
    else:
        typer.echo(about["folder"])


def _announcement(download: "Download", here: int, free: int) -> str:
    named = f"{download.model}@{download.revision}" if download.revision else download.model
    number = console.count(len(download.files), "file")
    done = "all of it here" if here == download.num_bytes else f"{size(here)} of it here" if here else ""
    parts = [f"{size(download.num_bytes)} in {number}", done, f"licence {download.licence or 'not stated'}"]
    return f"{named} ({download.commit[:_COMMIT_DIGITS]}): {', '.join(filter(None, parts))}; {size(free)} free on the disk"


def list_models(*, as_json: AsJson = False) -> None:
    need("huggingface_hub")
    from whimbrel.checkpoint.cached_models import read_cache
    from whimbrel.checkpoint.locate import hub_cache

    models = read_cache()
    if as_json:
        console.print_json([_as_json(each) for each in models])
        return
    if models:
        _print_table(models)
    total = f"{console.count(len(models), 'model')}, {size(sum(each.num_bytes for each in models))}, in {hub_cache()}"
    legend = (
        "SERVED goes by the family in config.json; `whimbrel show MODEL` reads all. USED is when the weights were last read."
    )
    others = (
        "To fetch one: whimbrel pull MODEL. To remove one: whimbrel rm MODEL. Models that tests have verified: whimbrel models"
    )
    for text in (f"{total}.", *([legend] if models else []), others):
        _echo(text)


def _echo(text: str, indent: int = 0) -> None:
    """Print a text in lines that break no name, so that a command in it can be copied."""
    further = " " * (indent + 2 if indent else 0)
    wrapper = TextWrapper(console.screen_width(), " " * indent, further, break_on_hyphens=False, break_long_words=False)
    typer.echo(wrapper.fill(text))


def _as_json(found: "CachedModel") -> dict[str, Any]:
    revisions = [
        asdict(each) | {"folder": str(each.folder), "last_used": datetime.fromtimestamp(each.last_used, UTC).isoformat()}
        for each in found.revisions
    ]
    return asdict(found) | {"folder": str(found.folder), "revisions": revisions}


def _print_table(models: Sequence["CachedModel"]) -> None:
    now = time.time()
    rows = [(each.model, [_cells(revision, now) for revision in each.revisions] or [_incomplete(each)]) for each in models]
    write = console.row_writer(_HEAD, [name for name, _ in rows], [cells for _, own in rows for cells in own])
    write("MODEL", _HEAD)
    for found, (name, own) in zip(models, rows, strict=True):
        for index, cells in enumerate(own):
            write(name if index == 0 else "", cells)
        for note in _notes(found):
            _echo(note, indent=6)


def _cells(revision: "CachedRevision", now: float) -> tuple[str, ...]:
    named = " ".join((*revision.refs, revision.commit[:_COMMIT_DIGITS]))
    licence = revision.licence or "-"
    return named, size(revision.num_bytes), ago(now - revision.last_used), licence, revision.verdict


def _incomplete(found: "CachedModel") -> tuple[str, ...]:
    return "-", size(found.num_bytes), "-", "-", "no"


def _notes(found: "CachedModel") -> list[str]:
    """Return what stands below the rows of a model."""
    name = found.model
    notes = [f"incomplete: {found.incomplete}; whimbrel pull {name} completes it, whimbrel rm {name} removes it"]
    if not found.incomplete:
        unfinished = f"{size(found.unfinished_bytes)} of an unfinished download; whimbrel pull {name} goes on with it"
        notes = [unfinished] if found.unfinished_bytes else []
    fixes = {"convert": f": whimbrel convert {name} --out DIR", "transformers": ", which transformers may run"}
    fixes["no"] = (
        f"; whimbrel pull {name} fetches what is missing" if any("not here" in each.reason for each in found.revisions) else ""
    )
    reasons = dict.fromkeys((each.reason, fixes.get(each.verdict, "")) for each in found.revisions if each.reason)
    return [f"{reason}{fix}" for reason, fix in reasons] + notes


def remove(
    model: IdArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", rich_help_panel=OUTPUT_PANEL)] = False,
) -> None:
    need("huggingface_hub")
    from whimbrel.checkpoint import cached_models

    name, at, revision = model.partition("@")
    if at and not revision:
        raise SetupError(f"{model!r} is no hub id with a revision.", hint="it looks like owner/name@revision")
    found = cached_models.find_model(name, cached_models.read_cache())
    removal = cached_models.plan_removal(found, revision)
    stderr = console.stderr_console()
    stderr.print(_describe(removal, found), markup=False)
    if not yes:
        if not sys.stdin.isatty():
            raise SetupError("nothing was removed: there is no terminal to ask on.", hint="whimbrel rm MODEL --yes")
        typer.confirm("Remove?", abort=True, err=True)
    cached_models.remove(removal)
    stderr.print(f"removed; {size(removal.freed_bytes)} freed.", markup=False)


def _describe(removal: "Removal", found: "CachedModel") -> str:
    going = [each for each in found.revisions if not removal.commits or each.commit in removal.commits]
    named = ", ".join(" ".join((*each.refs, each.commit[:_COMMIT_DIGITS])) for each in going) or "an incomplete download"
    stay = "; ".join(" ".join((*each.refs, each.commit[:_COMMIT_DIGITS])) for each in removal.kept)
    kept = f" What {stay} needs stays." if stay else ""
    use = " A server that has it loaded keeps answering, but cannot start another engine of it." if going else ""
    return f"{removal.model} ({named}): frees {size(removal.freed_bytes)}.{kept}{use}"


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, in at most four characters and the unit."""
    for unit, digits in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= digits:
            return f"{num_bytes / digits:,.{0 if num_bytes >= 1e2 * digits else 1}f} {unit}"
    return f"{num_bytes / 1e3:,.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} B"


def ago(seconds: float) -> str:
    """Return how long ago something was, in its largest unit."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{console.count(int(seconds // length), unit)} ago"
    return "just now"
