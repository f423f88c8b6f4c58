"""Reload: the models of a server become those of new options, and only what differs is done."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from whimbrel.errors import SetupError
from whimbrel.server.processes.messages import ModelOptions
from whimbrel.server.processes.models import LEAST_AGREEMENT, Models
from whimbrel.server.processes.running_model import RunningModel

_log = logging.getLogger("whimbrel")


async def apply_models(models: Models, wanted: Sequence[ModelOptions]) -> None:
    """Load, replace and unload models until they are those of `wanted`. A model is known by its first name.

    All plans are made before anything is loaded. Raises SetupError if one cannot be made, or if a name stands twice; all is as
    before then. A model that fails later leaves the one that it should replace, and a new one is tried again. If both have one
    source, a model has to agree with the one that it replaces.
    """
    names = Counter(name for each in wanted for name in {*each.names})
    if twice := [name for name, number in names.items() if number > 1]:
        raise SetupError(f"two models are named {twice[0]}.", hint="give every model names of its own")
    await models.wait_free()
    current = {model.options.names[0]: model for model in models.served}
    changed = [each for each in wanted if each.names[0] not in current or current[each.names[0]].options != each]
    with models.reserving({*names, *current}):
        new = await _plan_all(models, changed)
        loaded = {name: await _load(models, model, current.get(name)) for name, model in new.items()}
        kept = [loaded.get(each.names[0]) or current[each.names[0]] for each in wanted]
        await asyncio.gather(*(models.wait_until_there(model) for model in kept if model.state in ("ready", "unloaded")))
        models.switch_all(kept)


async def _plan_all(models: Models, changed: Sequence[ModelOptions]) -> dict[str, RunningModel]:
    """Return new models with their plans, by first name. Raises SetupError if one has none; then none is left."""
    new: dict[str, RunningModel] = {}
    try:
        for options in changed:
            model = new[options.names[0]] = models.add(options)
            await models.loading.plan(model)
    except BaseException:
        await asyncio.shield(asyncio.gather(*(models.retire(model) for model in new.values())))
        raise
    return new


async def _load(models: Models, new: RunningModel, old: RunningModel | None) -> RunningModel | None:
    """Return the model if it may serve now. One that fails and replaces none is returned too: its requests are refused."""
    same_source = old is not None and _source(old.options) == _source(new.options)
    try:
        await models.prepare(new, old, LEAST_AGREEMENT if same_source else None)
    except SetupError as error:
        _log.error("%s: %s", new.names[0], error.message)
        if old is not None:
            await models.retire(new)
            return None
        new.failure = error
        await models.loading.end(new)
        models.note_failure(new)
    return new


def _source(options: ModelOptions) -> str:
    return (options.model or "").partition("@")[0]
