"""Reload: the models of a server become those that are stated now, and only what differs is done."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whimbrel.errors import SetupError
from whimbrel.server.processes.messages import ModelOptions
from whimbrel.server.processes.models import LEAST_AGREEMENT, Models
from whimbrel.server.processes.running_model import RunningModel
from whimbrel.types.plan import Options


async def apply_models(models: Models, wanted: Sequence[ModelOptions]) -> None:
    """Load, replace and unload models until they are those of `wanted`. A model is known by its first name.

    Models that requests added stay, and so do those that requests have put in the place of one that is stated as before. All
    plans are made before anything is loaded, and all is loaded before a name leads to a new model. Two of one name and source
    have to agree. Raises SetupError if a model cannot be served, or if a name stands twice; then all is as before.
    """
    first = {each.names[0] for each in wanted}
    stated = {name for each in wanted for name in each.names}

    def others() -> list[RunningModel]:
        return [model for model in models.served if model.stated is None and model.names[0] not in first]

    await models.wait_until_free(lambda: stated.union(*(model.names for model in models.served)))
    current = {model.names[0]: model for model in models.served}
    _refuse_shared_names(wanted, others())
    changed = [each for each in wanted if each.names[0] not in current or _differ(current[each.names[0]].stated, each)]
    with models.reserving(stated.union(*(model.names for model in models.served))):
        new: dict[str, RunningModel] = {}
        try:
            for each in changed:
                model = new[each.names[0]] = models.add(each, stated=each)
                await models.loading.plan(model)
            for name, model in new.items():
                old = current.get(name)
                same_source = old is not None and _source(old.options) == _source(model.options)
                await models.prepare(model, old, LEAST_AGREEMENT if same_source else None)
            for model in new.values():
                await models.wait_until_there(model)  # a worker may have started meanwhile
        except BaseException:
            await models.give_up(new.values())
            raise
        for each in wanted:
            if each not in changed:
                current[each.names[0]].restate(each)
        models.switch_all([*((current | new)[each.names[0]] for each in wanted), *others()])


def _refuse_shared_names(wanted: Sequence[ModelOptions], added: Sequence[RunningModel]) -> None:
    names = Counter(name for each in wanted for name in {*each.names})
    names.update(name for model in added for name in {*model.names})
    if twice := [name for name, number in names.items() if number > 1]:
        raise SetupError(f"two models are named {twice[0]}.", hint="give every model names of its own")


def _differ(stated: ModelOptions | None, wanted: ModelOptions) -> bool:
    """Return whether a model has to be loaded anew: whether more is stated otherwise than `RunningModel.restate` can take."""
    return stated is None or _of_engines(stated) != _of_engines(wanted)


def _of_engines(options: ModelOptions) -> ModelOptions:
    """Return the options without further names, and with any time for that of `keep`."""
    keep = None if options.keep_seconds is None else 0.0
    return replace(options, options=options.options | Options(aliases=()), keep_seconds=keep)


def _source(options: ModelOptions) -> str:
    return (options.model or "").partition("@")[0]
