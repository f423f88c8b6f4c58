"""Downloads from the hub that operators ask a server for, each in a process of its own.

The process has the hub's client library and token, which workers do not have. It ends with its client, with its worker or with
the server; what it has fetched stays, and the next download goes on from there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from whimbrel.errors import SetupError
from whimbrel.server.processes import messages
from whimbrel.server.processes.children import Child, WorkerChild, describe_exit


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
