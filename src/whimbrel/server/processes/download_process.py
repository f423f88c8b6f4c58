"""Process of a download: it fetches one model into the hub's cache, says how far it is, and ends."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.hub_download import HubFile, check_space, fetch, plan_download
from whimbrel.checkpoint.locate import read_hub_id
from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import Channel
from whimbrel.server.processes.child_process import control_socket, exit_process

_PROGRESS_SECONDS: Final = 0.25


def main() -> None:
    """Fetch one model, and say how far it is."""
    control = Channel[messages.Fetch](control_socket(), messages.Fetch)
    asked = next(iter(control), None)
    if asked is None:
        return
    try:
        fetch_model(asked.model, lambda digest, total, here: control.send(messages.Fetched(asked.uid, digest, total, here)))
        code = 0
    except Exception as error:
        told = error if isinstance(error, SetupError) else SetupError(f"fetching {asked.model} failed: {error!r}.")
        control.send(messages.CannotStart(told.message, told.hint))
        code = 1
    control.close()
    exit_process(code)


def fetch_model(model: str, tell: Callable[[str, int, int], None]) -> None:
    """Bring a model into the hub's cache. Raises SetupError."""
    if model == packaged.NAME and packaged.find_packaged() is not None:
        return
    if Path(model).expanduser().is_dir():  # it would be served in place of the model that is fetched
        raise SetupError(f"{model} is a folder of the server.", hint="POST /admin/models serves folders")
    download = plan_download(*read_hub_id(model))
    check_space(download)
    told: dict[str, tuple[int, float]] = {}
    files: dict[str, HubFile] = {file.name: file for file in download.files}

    def progress(name: str, here: int) -> None:
        file, now = files[name], perf_counter()
        last, at = told.get(name, (-1, 0.0))
        if here != last and (here == file.size or now - at >= _PROGRESS_SECONDS):
            told[name] = here, now
            tell(f"sha256:{file.blob}" if file.is_large else file.blob, file.size, here)

    fetch(download, progress, wait=lambda _: None)
