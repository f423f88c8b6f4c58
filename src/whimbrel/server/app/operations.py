"""Operations of routes that clients and operators share: a model is kept as Ollama's clients say, or fetched from the hub.

They are handed on as commands. A download is answered while it goes on.
"""

import asyncio
from math import isinf

import msgspec
from starlette.types import Send

from whimbrel.dialects.common.operations import Keep, Pull
from whimbrel.errors import DeadlineExceeded
from whimbrel.server.app.admin import AdminCommand, Tell
from whimbrel.server.app.request_context import RequestContext


def keep_body(model: str, keep: Keep) -> bytes:
    """Return the body of the action "keep"."""
    seconds = None if isinf(keep.seconds) else keep.seconds
    return msgspec.json.encode({"model": model, "seconds": seconds, "loads": keep.loads})


async def answer_pull(command: AdminCommand, pull: Pull, context: RequestContext, send: Send, *, seconds: float | None) -> None:
    """Have a model fetched and served, and answer with what goes on.

    Cancelling it, as when the client leaves, ends the download. So does the end of its `seconds`.
    """
    pieces = asyncio.Queue[bytes]()

    def tell(digest: str, total: int, here: int) -> None:
        pieces.put_nowait(pull.progress(digest, total, here))

    async def start(status: int) -> None:
        headers = [(b"content-type", pull.media_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    running = asyncio.ensure_future(_pull(command, pull.model, tell, seconds))
    running.add_done_callback(lambda _: pieces.put_nowait(b""))
    try:
        if pull.opening:
            await start(200)
            await send({"type": "http.response.body", "body": pull.opening, "more_body": True})
        while piece := await pieces.get():
            if pull.opening:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        status, reason = running.result()
        if reason:
            context.error, context.error_outcome = "pull_failed", "error" if status >= 500 else "invalid"
        if not pull.opening:
            await start(status)
        await send({"type": "http.response.body", "body": pull.failure(reason) if reason else pull.closing})
    finally:
        running.cancel()


async def _pull(command: AdminCommand, model: str, tell: Tell, seconds: float | None) -> tuple[int, str]:
    """Return the status, and the reason of a failure."""
    try:
        async with asyncio.timeout(seconds):
            status, body = await command("pull", model.encode(), tell)
    except TimeoutError:
        return DeadlineExceeded.status, "the time that the request gave is over; what was fetched stays."
    return status, "" if status == 200 else msgspec.json.decode(body)["error"]["message"]
