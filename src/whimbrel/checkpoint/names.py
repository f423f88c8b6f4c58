"""Names of folders that hold checkpoints.

A folder is called by the last part of its path as the user reaches it. `.`, `..` and a slash at the end change nothing. A
symbolic link has its own name, so that `current -> release-7` is the same model after the next release. A snapshot in a cache
of the hub is called by its hub id, wherever the cache lies. Reads no file.
"""

import os
import re
from pathlib import Path
from typing import Final

_SNAPSHOTS: Final = "snapshots"
_REPOSITORY: Final = re.compile(r"models--(?P<id>.+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def name_of_folder(folder: Path) -> str:
    """Return the name of the model in `folder` for clients."""
    place = _place(folder)
    return _hub_id(place) or (None if place.is_symlink() else _hub_id(place.resolve())) or place.name or str(place)


def commit_of_folder(folder: Path) -> str:
    """Return the commit of a snapshot in a cache of the hub. Empty for other folders."""
    places = (_place(folder), folder.resolve())
    return next((each.name for each in places if _hub_id(each) and _COMMIT.fullmatch(each.name)), "")


def without_links(folder: Path) -> Path:
    """Return the folder itself in place of a link to it, so that all files come from it when the link is moved meanwhile."""
    real = folder.resolve()
    return folder if real == folder.absolute() else real


def _place(folder: Path) -> Path:
    """Return the absolute path, without `..`. What `..` leads to is the parent of a link's target, as for the system."""
    place = _working_directory()
    for part in folder.expanduser().parts:
        place = place / part if part != ".." else (place.resolve() if place.is_symlink() else place).parent
    return place


def _working_directory() -> Path:
    """Return the working directory by the links through which the shell came here, as `pwd` does."""
    stated = os.environ.get("PWD", "")
    try:
        is_here = os.path.isabs(stated) and os.path.samefile(stated, ".")
    except OSError:
        is_here = False
    return Path(stated) if is_here and ".." not in Path(stated).parts else Path.cwd()


def _hub_id(place: Path) -> str | None:
    repository = _REPOSITORY.fullmatch(place.parent.parent.name)
    return repository["id"].replace("--", "/", 1) if repository and place.parent.name == _SNAPSHOTS else None
