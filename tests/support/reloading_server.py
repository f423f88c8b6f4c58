"""A server whose options are changed by lines on its standard input, as a file of settings that is read again changes them.

    python tests/support/reloading_server.py '{"models": {"m": {"source": "folder"}}, "keys": []}'

Each line is such an object. The server prints its port once it is ready, and for each line "applied", or "refused: " and why.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

from whimbrel.cli.serve import listen
from whimbrel.errors import SetupError
from whimbrel.server.app.limits import ServerLimits
from whimbrel.server.processes.messages import ServeOptions
from whimbrel.server.processes.model_table import read_model
from whimbrel.server.processes.supervisor import Supervisor
from whimbrel.types.plan import Options


def options_of(text: str) -> ServeOptions:
    """Return the options of a line."""
    told = json.loads(text)
    defaults = Options(dtype="float32")
    models = tuple(read_model(name, table, defaults) for name, table in told["models"].items())
    limits = ServerLimits(api_keys=tuple(told.get("keys", ())), admin_keys=("an-operator-s-key",))
    return ServeOptions(models, limits, num_workers=2, defaults=defaults)


async def main() -> int:
    """Serve until a signal."""
    listener = listen("127.0.0.1", 0)
    loop = asyncio.get_running_loop()

    def print_port(_: Any) -> None:
        print(listener.getsockname()[1], flush=True)  # noqa: T201

    supervisor = Supervisor(options_of(sys.argv[1]), listener, on_load=lambda *_: None, on_ready=print_port)

    async def apply(line: str) -> None:
        try:
            await supervisor.apply(options_of(line))
        except SetupError as error:
            print(f"refused: {error.message}", flush=True)  # noqa: T201
        else:
            print("applied", flush=True)  # noqa: T201

    def read() -> None:
        for line in sys.stdin:
            asyncio.run_coroutine_threadsafe(apply(line), loop)

    threading.Thread(target=read, daemon=True).start()
    return await supervisor.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
