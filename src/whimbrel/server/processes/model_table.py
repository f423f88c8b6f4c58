"""Options of a model by the keys of its table, as a file of settings or an operator's request states them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whimbrel.checkpoint.locate import expand_home
from whimbrel.errors import SetupError
from whimbrel.server.processes.messages import ModelOptions
from whimbrel.server.settings import keep_seconds
from whimbrel.server.settings_table import MODEL_TABLE, OF_MODELS, nearest
from whimbrel.types.plan import Options

_OF_ENGINE: Final = Options.__annotations__.keys() & OF_MODELS.keys()


def with_values(base: ModelOptions, names: Sequence[str], values: Mapping[str, Any]) -> ModelOptions:
    """Return the options of a model with these names: those of `base`, except `values`, by keys of a model's table."""
    engine: Any = dict(base.options) | {key: values[key] for key in values.keys() & _OF_ENGINE}
    engine |= {"served_name": names[0], "aliases": tuple(names[1:])}
    if "prompts" in values:
        engine["prompts"] = values["prompts"] or {}
    if "adapters" in values:  # an engine that starts again has the same folders
        adapters: Mapping[str, Path | str] = values["adapters"] or {}
        engine["adapters"] = {name: str(expand_home(folder).resolve()) for name, folder in adapters.items()}
    source, revision = values.get("source"), values.get("revision")
    return ModelOptions(
        (f"{source}@{revision}" if revision else source) if "source" in values else base.model,
        values.get("pooling", base.pooling),
        Options(**engine),
        values.get("reranker", base.reranker),
        values.get("replicas", base.num_replicas),
        keep_seconds(values["keep"]) if "keep" in values else base.keep_seconds,
    )


def read_model(
    name: str, stated: Mapping[str, Any], *, defaults: ModelOptions, old: ModelOptions | None = None
) -> ModelOptions:
    """Return the options of the model that a request states by its first name and the keys of its table.

    Without a `source` it is the `old` model of that name, with its options where the request states no others. Else the others
    are `defaults`. Raises SetupError.
    """
    for key in stated:
        if key not in MODEL_TABLE:
            near = nearest(key, MODEL_TABLE)
            hint = f"did you mean {near}?" if near else f"a model has {', '.join(MODEL_TABLE)}"
            raise SetupError(f"{key!r:.80} is no key of a model.", hint=hint)
    values = {key: MODEL_TABLE[key].read_toml(value, key) for key, value in stated.items()}
    base = defaults if old is None or "source" in values else old
    if values.get("revision"):
        values["source"] = _source_of_revision(values.get("source", base.model))
    names = (name, *values["names"]) if "names" in values else (name, *(each for each in base.names if each and each != name))
    if (wrong := next((each for each in names if not _is_name(each)), None)) is not None:
        raise SetupError(f"{wrong!r:.80} is no name of a model.", hint="it stands in paths, such as /admin/models/owner/name")
    return with_values(base, tuple(dict.fromkeys(names)), values)


def _is_name(text: str) -> bool:
    """Return whether a text is fit for the name of a model: for one line, and as the end of a path."""
    return text == text.strip() and text.isprintable() and {"", ".", ".."}.isdisjoint(text.split("/"))


def _source_of_revision(source: str | None) -> str:
    """Return the hub id of which a revision is stated, without the revision that it may name. Raises SetupError."""
    if source is None or expand_home(source).is_dir():
        raise SetupError("revision is stated without a hub id.", hint='"source": "owner/name"')
    return source.partition("@")[0]
