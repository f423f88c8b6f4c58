"""The server as an ASGI app, for uvicorn, Hypercorn or as a part of another app. Its engines run in the same process.

    uvicorn --factory whimbrel.asgi:create_app

`whimbrel serve` is the better server where it can be used. Its engines have processes of their own, so no request is lost when
one dies. It also bounds connections, heads and rates, which this app leaves to the server around it.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.engine.engine import AsyncEngine, Engine
from whimbrel.errors import SetupError
from whimbrel.server.app import app as server_app
from whimbrel.server.app.batch_routes import BatchRoutes
from whimbrel.server.app.guards import OPEN_ROUTES
from whimbrel.server.app.limits import ServerLimits, read_server_limits
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.server.settings_table import read_settings
from whimbrel.telemetry import audit
from whimbrel.types.machine_limits import share_waiting_memory, usable_memory
from whimbrel.types.plan import Options


def create_app(
    *models: str | Engine,
    api_keys: Sequence[str] = (),
    api_key_file: str | Path | None = None,
    allowed_hosts: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    public_metrics: bool | None = None,
    playground: bool | None = None,
    root_path: str | None = None,
    forwarded_allow_ips: Sequence[str] = (),
    **options: Unpack[Options],
) -> ASGIApp:
    """Return an app that serves models: folders, Hub ids or loaded Engines; by default the packaged all-MiniLM-L6-v2.

    The arguments are settings of `whimbrel serve`, which variables state otherwise; by default any Host header is accepted.
    `options` are those of Engine. The models are loaded when the server around the app starts it, or with the first request
    where nothing starts it, as in an app that is mounted into another. They are closed when it stops. A server with several
    workers loads them in each. Raises SetupError for wrong arguments.
    """
    given = {
        "api_key": tuple(api_keys),
        "api_key_file": None if api_key_file is None else Path(api_key_file),
        "allowed_host": tuple(allowed_hosts),
        "cors_origin": tuple(cors_origins),
        "public_metrics": public_metrics,
        "playground": playground,
        "root_path": root_path,
        "forwarded_allow_ips": tuple(forwarded_allow_ips),
    }
    settings = read_settings(given, (), os.environ)
    limits = read_server_limits(settings, address=None, max_inflight_bytes=share_waiting_memory(usable_memory()).bodies)
    return _App(models, limits, options, settings.audit_log)


class _App:
    """An app whose models are loaded when it is started."""

    def __init__(self, models: Sequence[str | Engine], limits: ServerLimits, options: Options, audit_log: Path | None) -> None:
        self._models = models or (None,)
        self._limits = limits
        self._options = options
        self._audit_log = audit_log
        self._end_audit: Callable[[], None] | None = None
        self._starting: asyncio.Task[ASGIApp] | None = None
        self._engines: list[AsyncEngine] = []
        self._batches: BatchRoutes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            app = await self._start()
            await app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._batches is not None:
            await self._batches.stop()
        for engine in self._engines:
            await engine.close()
        if self._end_audit is not None:
            await asyncio.to_thread(self._end_audit)
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> ASGIApp:
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._starting)

    async def _load(self) -> ASGIApp:
        loaded = [
            each if isinstance(each, Engine) else await asyncio.to_thread(Engine, each, **self._options)
            for each in self._models
        ]
        self._engines = [AsyncEngine(engine) for engine in loaded]
        names = Counter(name for engine in loaded for name in {engine.plan.served_name, *engine.plan.aliases})
        if shared := [name for name, models in names.items() if models > 1]:
            raise SetupError(f"two models are named {shared[0]}.", hint="load Engines with a served_name of their own")
        if self._audit_log is not None and self._end_audit is None:
            self._end_audit = audit.start(self._audit_log.expanduser().resolve(), unlogged=OPEN_ROUTES)
        app = server_app.create_app(ModelRegistry(*self._engines), guards=self._limits)
        self._batches = app.batches
        if app.batches is not None:
            app.batches.store.prepare()
            app.batches.start()
        return app
