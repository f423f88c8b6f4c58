"""Deployment of Ray Serve: the ASGI app in each replica, and their number by the tokens that wait.

Engines queue by tokens, and say no when the wait would be too long. So Serve passes requests on at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.asgi import create_app
from whimbrel.engine.engine import Engine
from whimbrel.errors import SetupError
from whimbrel.ray.modules import ray_module
from whimbrel.ray.scaling import WAITING, WaitingTokens
from whimbrel.ray.sources import share_of
from whimbrel.types.plan import Options

_WAITING_TOKENS: Final = 20_000
_ONGOING_REQUESTS: Final = 1024


class Replica:
    """A replica: engines, and the app over them. Ray Serve calls its methods."""

    def __init__(
        self, models: Sequence[str | None], app: Mapping[str, Any], options: Options, cores: float | None = None
    ) -> None:
        share: Any = share_of(cores)
        self._engines = [Engine(model, **(share | options)) for model in models]
        self._app = _Bytes(create_app(*self._engines, **app))

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Serve's name
        return self._app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {WAITING: float(sum(engine.queued_tokens for engine in self._engines))}

    async def check_health(self) -> None:
        """Raise an error if an engine has ended; Serve then starts another replica."""
        for engine in self._engines:
            if not engine.ready:
                raise RuntimeError(f"the engine of {engine.plan.served_name} has ended.")


class _Bytes:
    """An app whose answers are bytes: Serve pickles them, which it cannot do with views of memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_bytes(message: Message) -> None:
            if "body" in message:
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._app(scope, receive, send_bytes)


def deployment(
    *models: str,
    min_replicas: int = 1,
    max_replicas: int = 8,
    waiting_tokens: int = _WAITING_TOKENS,
    cpus: float = 1,
    gpus: float = 0,
    app: Mapping[str, Any] | None = None,
    scaling: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> Any:
    """Return a bound deployment of models, by default the packaged all-MiniLM-L6-v2, for `serve.run`.

    There are as many replicas as have `waiting_tokens` waiting each, within `min_replicas` and `max_replicas`: about the tokens
    that one computes in the time that a request may wait. `cpus` and `gpus` are those of a replica, `app` has arguments of
    `whimbrel.asgi.create_app`, `scaling` further keys of Serve's AutoscalingConfig, and `options` are those of Engine. Raises
    SetupError.
    """
    if not 0 < min_replicas <= max_replicas:
        raise SetupError(f"min_replicas {min_replicas} must be from 1 to max_replicas, {max_replicas}.")
    if waiting_tokens < 1:
        raise SetupError(f"waiting_tokens {waiting_tokens} must be 1 or more.")
    serve = ray_module("ray.serve")
    wrapped = serve.deployment(
        serve.ingress()(Replica),
        name="whimbrel",
        max_ongoing_requests=_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "policy": {"policy_function": WaitingTokens, "policy_kwargs": {"per_replica": waiting_tokens}},
            **(scaling or {}),
        },
    )
    return wrapped.bind(models or (None,), dict(app or {}), options, None if gpus else cpus)
