"""Downloads from the hub that operators ask a server for, each in a process of its own.

The process alone imports the hub's client library and has its token. It ends with its client, with its worker or with the
server; what it has fetched stays, and the next download goes on from there.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Final

from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.hub_download import HubFile, check_space, fetch, plan_download
from whimbrel.checkpoint.locate import read_hub_id
from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.channel import Channel
from whimbrel.server.processes.child_process import control_socket, exit_process
from whimbrel.server.processes.children import Child, WorkerChild, describe_exit

_PROGRESS_SECONDS: Final = 0.25


@dataclass(slots=True, eq=False)
class DownloadChild(Child):
    kind: ClassVar[str] = "download"
    reports: ClassVar[Any] = messages.ReportDownload


class Downloads:
    """The downloads that go on, as the supervisor knows them. For one event loop."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], DownloadChild] = {}

    async def fetch(self, worker: WorkerChild, uid: int, model: str, *, metrics_folder: Path, secrets: Collection[str]) -> None:
        """Bring a model into the hub's cache, and tell the worker how far it is. Raises SetupError."""

        def handle(message: messages.ReportDownload) -> None:
            if isinstance(message, messages.CannotStart):
                child.error = SetupError(message.message, hint=message.hint)
            else:
                worker.send(message)

        key = worker.index, uid
        child = self._children[key] = DownloadChild(f"download-{uid}")
        try:
            await child.start(metrics_folder, handle, secrets=secrets)
            if key not in self._children:  # it was ended meanwhile
                child.kill("nobody waits for it")
            child.send(messages.Fetch(uid, model))
            code = await child.wait()
        except OSError as error:
            raise SetupError(f"the download cannot be started: {error.strerror or error}.") from None
        finally:
            child.kill()
            self._children.pop(key, None)
        if child.error is not None:
            raise child.error
        if code:
            raise SetupError(
                f"the download of {model} ended: {child.kill_reason or describe_exit(code)}; what was fetched stays."
            )

    def end(self, reason: str, *, worker: int | None = None, uid: int | None = None) -> None:
        """End the downloads for a worker, or one of them, or all."""
        for key in [key for key in self._children if worker in (None, key[0]) and uid in (None, key[1])]:
            self._children.pop(key).kill(reason)


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
    if Path(model).expanduser().is_dir():  # it would be served in place of what is fetched
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
