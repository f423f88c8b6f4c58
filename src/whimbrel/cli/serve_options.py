"""Options of `whimbrel serve`: what a configuration states, with its models named and its files read, also while it serves."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Final

from whimbrel.checkpoint import packaged
from whimbrel.checkpoint.locate import default_names
from whimbrel.errors import SetupError
from whimbrel.server.app.limits import ServerLimits, engine_options, read_server_limits
from whimbrel.server.config_file import Config
from whimbrel.server.http.tls import TlsFiles, read_tls_files
from whimbrel.server.keys import check_keys
from whimbrel.server.processes.messages import ModelOptions, ServeOptions
from whimbrel.server.processes.model_table import with_values
from whimbrel.server.secret_file import read_secret
from whimbrel.server.settings import ModelSettings, ModelTable, Settings
from whimbrel.server.settings_table import OF_MODELS
from whimbrel.telemetry import logs
from whimbrel.types.machine_limits import expects_gpu, share_waiting_memory, usable_memory, usable_processors
from whimbrel.types.plan import Options

_log = logging.getLogger("whimbrel")

_CHANGEABLE: Final = frozenset(
    {
        "api_key", "api_key_file", "allowed_host", "public_metrics", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password",
        "ssl_keyfile_password_file", "hf_token_file", "served_name", "adapter", "max_request_tokens", "max_queue_tokens",
        "max_queue_seconds", "memory", "drain_timeout", "max_header_bytes", "max_headers", "body_idle_timeout", "min_body_rate",
        "body_timeout", "min_write_rate", "lingering_bytes", *OF_MODELS,
    }
)  # fmt: skip
_AT_START: Final = tuple(sorted({each.name for each in fields(Settings)} - _CHANGEABLE))
"""Settings that a server keeps from its start to its end."""


@dataclass(frozen=True, slots=True)
class OptionsReader:
    """The options of a server, as its configuration states them at the start and later."""

    models: Sequence[str]
    """Models of the command line."""
    first: Config
    """The configuration at the start."""
    num_workers: int
    bounds: Options
    """Bounds of each engine's queue. They stay when models are added, so that the others need not be loaded again."""
    max_inflight_bytes: int
    """Default of this limit."""

    def options(self, config: Config, address: str | None, warn: Callable[[str], None]) -> ServeOptions:
        """Return the options that a configuration states. Raises SetupError.

        `address` is the IP address on which the server listens, None for a Unix socket.
        """
        settings = config.settings
        audit_log = settings.audit_log and settings.audit_log.expanduser().resolve()
        use_hub_token(settings, warn)
        return ServeOptions(
            models=models_to_serve(self.models, config, self.bounds),
            limits=read_limits(config, address, self.max_inflight_bytes, warn),
            num_workers=self.num_workers,
            drain_seconds=settings.drain_timeout,
            step_seconds=settings.step_timeout,
            logs=logs.LogOptions(settings.log_format, settings.log_level, settings.access_log),
            otel=settings.otel,
            audit_log="" if audit_log is None else str(audit_log),
            tls=read_tls(settings, warn),
            memory=settings.memory,
            defaults=defaults_of_models(settings, self.bounds),
        )

    def read_again(self, read: Callable[[], Config], address: str | None) -> ServeOptions:
        """Return the options as they are stated now. Raises SetupError."""
        config, first = read(), self.first.settings
        kept = {key: getattr(first, key) for key in _AT_START}
        if (config.settings.ssl_certfile is None) != (first.ssl_certfile is None):
            raise SetupError("ssl_certfile: TLS begins and ends with a start of the server.", hint="restart it")
        if self.first.models and not config.models:
            raise SetupError(f"{config.file}: no model is stated any more.", hint="restart the server for the packaged one")
        options = self.options(replace(config, settings=replace(config.settings, **kept)), address, _log.warning)
        if changed := [key for key in _AT_START if getattr(config.settings, key) != kept[key]]:
            _log.warning("SIGHUP: %s: what has changed there needs a restart", ", ".join(changed))
        return options


def first_reader(models: Sequence[str], config: Config) -> OptionsReader:
    """Return the reader of a server's options, which knows the number of its workers and their memory. Raises SetupError."""
    served, settings = models_to_serve(models, config), config.settings
    num_workers = settings.workers or max(choose_workers(model.options.get("device")) for model in served)
    num_engines = sum(model.num_replicas for model in served)
    waiting = share_waiting_memory(usable_memory(), num_workers=num_workers, num_engines=num_engines)
    bounds = Options(max_queue_tokens=waiting.tokens, max_queue_bytes=waiting.results)
    return OptionsReader(models, config, num_workers, bounds, waiting.bodies)


def check_config(config: Config, warn: Callable[[str], None]) -> None:
    """Raise SetupError if `serve` would refuse the configuration before it listens or loads a model."""
    models_to_serve((), config)
    read_tls(config.settings, warn)
    use_hub_token(config.settings, warn)
    read_limits(config, None, config.settings.max_body_bytes, warn)


def read_limits(config: Config, address: str | None, max_inflight_bytes: int, warn: Callable[[str], None]) -> ServerLimits:
    """Return limits and access rules. Raises SetupError, with the place of the setting that its message begins with."""
    try:
        return read_server_limits(
            config.settings, address=address, max_inflight_bytes=max_inflight_bytes, keys=config.keys, warn=warn
        )
    except SetupError as error:
        place = config.sources.get((error.message.partition(" ")[0],))
        raise (error if place is None else SetupError(f"{place}: {error.message}", hint=error.hint)) from None


def models_to_serve(model_ids: Sequence[str], config: Config, bounds: Options | None = None) -> tuple[ModelOptions, ...]:
    """Return the models of the command line or of the file, with their names and adapters. Raises SetupError.

    `bounds` are those of engines' queues where no setting states them.
    """
    named = _models_of_file(model_ids, config) if config.models else _models_of_line(model_ids or [None], config.settings)
    known = [(table.model or packaged.NAME, *default_names(table.model), *names) for names, table in named]
    of_line = names_of_adapters(config.settings.adapter, known)
    base = defaults_of_models(config.settings, bounds or Options())
    served = tuple(
        with_values(base, names, vars(table) | {"adapters": {**(table.adapters or {}), **adapters}})
        for (names, table), adapters in zip(named, of_line, strict=True)
    )
    _check_keys(config, served)
    return served


def defaults_of_models(settings: Settings, bounds: Options) -> ModelOptions:
    """Return the options of a model of which nothing more is stated."""
    stated = engine_options(settings)
    shared = stated | bounds | Options(max_queue_tokens=stated.get("max_queue_tokens") or bounds.get("max_queue_tokens"))
    values = {item.name: getattr(settings, item.name) for item in fields(ModelSettings)}
    return with_values(ModelOptions(None, None, shared), ("",), values)


def _models_of_line(model_ids: Sequence[str | None], settings: Settings) -> list[tuple[tuple[str, ...], ModelTable]]:
    """Return the names and settings of the models that the command line names. None is the packaged one."""
    if len(set(model_ids)) < len(model_ids) and not settings.served_name:
        raise SetupError(
            "a model is named twice.",
            hint="pass --replicas for several engines of one model, or --served-name to tell them apart",
        )
    shared = {key: getattr(settings, key) for key in OF_MODELS}
    names = name_models(model_ids, settings.served_name)
    return [(own, ModelTable(source=each, **shared)) for own, each in zip(names, model_ids, strict=True)]


def _models_of_file(model_ids: Sequence[str], config: Config) -> list[tuple[tuple[str, ...], ModelTable]]:
    """Return the names and settings of a file's models. Raises SetupError if the command line names models too."""
    if model_ids or config.settings.served_name:
        what = model_ids[0] if model_ids else config.source("served_name")
        hint = "models and their names stand in one place: add a table [models.NAME], or take those of the file away"
        raise SetupError(f"{what} is given, and {config.file} has models of its own.", hint=hint)
    return [((name, *table.names), table) for name, table in config.models.items()]


def read_tls(settings: Settings, warn: Callable[[str], None]) -> TlsFiles | None:
    """Return the files of TLS, after a try to load them. Raises SetupError."""
    password, file = settings.ssl_keyfile_password, settings.ssl_keyfile_password_file
    if file is not None:
        password = read_secret(file, "the password of the TLS key", warn)
    return read_tls_files(settings.ssl_certfile, settings.ssl_keyfile, password)


def use_hub_token(settings: Settings, warn: Callable[[str], None]) -> None:
    """Let engines find the hub's token, by the variable of huggingface_hub that names its file. Raises SetupError."""
    if settings.hf_token_file is not None:
        read_secret(settings.hf_token_file, "the hub's token", warn)
        os.environ["HF_TOKEN_PATH"] = str(settings.hf_token_file.absolute())


def _check_keys(config: Config, served: Sequence[ModelOptions]) -> None:
    """Raise SetupError if a key names a model or a route that is not served."""
    if not config.keys:
        return
    from whimbrel.server.app.openapi import key_routes

    names = [(model.options.get("served_name"), *model.options.get("aliases", ())) for model in served]
    check_keys(config.keys, models=[name for each in names for name in each if name], routes=key_routes())


def choose_workers(device: str | None = None) -> int:
    """Return the default number of HTTP processes for the processors that this process may use.

    A CPU's engine wants most of them: one for each 8, 1 to 4. A GPU's engine leaves them to those who tokenize and encode: one
    for each 2, 1 to 16.
    """
    per_worker, most = (2, 16) if expects_gpu(device) else (8, 4)
    return max(1, min(most, usable_processors() // per_worker))


def name_models(models: Sequence[str | None], served_names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names of each model: those of --served-name, or the model's own. Raises SetupError if two share a name."""
    given = [tuple(name.strip() for name in value.split(",")) for value in served_names]
    if len(models) == 1:
        given = [tuple(chain(*given))]
    if len(given) > len(models):
        raise SetupError(f"--served-name is given {len(given)} times, for {len(models)} models.", hint="give it once per MODEL")
    stated = [*chain(*given)]
    if not all(stated) or len(set(stated)) < len(stated):
        raise SetupError("--served-name is empty or names two models alike.", hint="give every model names of its own")
    given += [()] * (len(models) - len(given))
    names = [own or default_names(model) for model, own in zip(models, given, strict=True)]
    counts = Counter(chain(*names))
    if shared := [name for name, count in counts.items() if count > 1]:
        raise SetupError(
            f"two models are named {shared[0]}.", hint="give each MODEL a name, in their order: --served-name A --served-name B"
        )
    return names


def names_of_adapters(values: Sequence[str], models: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return, for each model, the folders of its adapters by name, from the values of --adapter. Raises SetupError.

    `models` has the names by which a value may choose each model. A server of one model needs none.
    """
    adapters: list[dict[str, str]] = [{} for _ in models]
    for value in values:
        named, equals, folder = value.partition("=")
        model, colon, name = named.rpartition(":")
        if not equals or not name or not folder or (colon and not model):
            raise SetupError(f"--adapter takes NAME=FOLDER, not {value!r}.", hint="e.g. --adapter law=adapters/law")
        chosen = [own for own, names in zip(adapters, models, strict=True) if not model or model in names]
        if len(chosen) != 1:
            several = "no model" if not chosen else "one of several models" if not model else "several models"
            known = ", ".join(dict.fromkeys(each for names in models for each in names))
            raise SetupError(
                f"--adapter {value!r} is for {several}.", hint=f"name a model: --adapter MODEL:NAME=FOLDER, of {known}"
            )
        if name in chosen[0]:
            raise SetupError(f"two adapters have the name {name!r}.", hint="give each a name of its own")
        chosen[0][name] = str(Path(folder).expanduser().resolve())  # an engine that starts again has the same adapters
    return adapters
