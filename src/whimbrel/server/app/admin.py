"""Admin routes: an operator lists, loads, replaces and unloads models. They exist where there is a key for them.

Those of llama-server load and unload a model that is served, and leave its name. The app hands commands on, to the supervisor
in `whimbrel serve`, and their answers back. So are those operations that routes of Ollama have beside or in place of an answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, Protocol, TypeAlias

from whimbrel.errors import DeadlineExceeded, TooLarge
from whimbrel.server.keys import is_admin_route

AdminAction: TypeAlias = Literal["put", "delete", "list", "load", "unload", "keep", "pull"]
Tell: TypeAlias = Callable[[str, int, int], None]
"""Function that is told of a download's file: its digest, its size and the bytes that are on the disk."""


class AdminCommand(Protocol):
    def __call__(self, action: AdminAction, body: bytes, tell: Tell | None = None, /) -> Awaitable[tuple[int, bytes]]:
        """Carry out an action and return the status and the body of its answer. The body of "delete" and "pull" is a name.

        With `tell`, the action ends when the call is cancelled; without, it goes on.
        """
        ...


ADMIN_MODELS: Final = "/admin/models"
ADMIN_MODEL: Final = "/admin/models/{model}"
_OF_LLAMA_SERVER: Final[Mapping[str, AdminAction]] = {"/models/load": "load", "/models/unload": "unload"}
ADMIN_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    ADMIN_MODELS: ("GET", "POST"), ADMIN_MODEL: ("DELETE",), **dict.fromkeys(_OF_LLAMA_SERVER, ("POST",))
}  # fmt: skip
"""Methods of each path."""
_MAX_BODY: Final = 2**20
_ACTIONS: Final[Mapping[str, AdminAction]] = {"GET": "list", "POST": "put", "DELETE": "delete"}


def is_admin_path(path: str) -> bool:
    """Return whether a path, as the app has made it canonical, is for operators only."""
    return path == "/admin" or is_admin_route(path)


def admin_template(path: str) -> str:
    """Return the template of an admin route; empty if there is none."""
    return path if path in ADMIN_METHODS else ADMIN_MODEL if path.startswith(f"{ADMIN_MODELS}/") else ""


def check_body(size: int) -> None:
    """Raise TooLarge for a body that no command has."""
    if size > _MAX_BODY:
        raise TooLarge(f"the body has {size:,} bytes; a command has at most {_MAX_BODY:,}.")


async def run_admin(command: AdminCommand, method: str, path: str, body: bytes, seconds: float | None) -> tuple[int, bytes]:
    """Return the status and the body of the answer to an operator. Raises DeadlineExceeded; the command goes on then."""
    action = _OF_LLAMA_SERVER.get(path) or _ACTIONS[method]
    argument = path.removeprefix(f"{ADMIN_MODELS}/").encode() if action == "delete" else body
    try:
        async with asyncio.timeout(seconds):
            return await command(action, argument)
    except TimeoutError:
        raise DeadlineExceeded("the time that the request gave is over; the command goes on.") from None
