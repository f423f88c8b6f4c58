"""Modules of a MultiVectorEncoder after its Transformer.

Heads change each token's vector, masks choose the tokens that have one, and token poolings make one vector of several. Queries
and documents may have masks and poolings of their own; a text without an input type is a document. A pooling runs after the
model, on the host. Only a normalisation can follow it, as a Dense or LayerNorm would have to run between the two. A mask that
leaves tokens out cannot follow it: a pooled vector belongs to no one token, and Sentence Transformers fails there.

Sources: sentence_transformers/multi_vector_encoder/modules/{multi_vector_mask,token_pooling}.py (6.2).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias, cast, get_args

import msgspec

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers.chained import CHAINED, Feature, tokens, without_norm
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, Rows
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.types.card import Output
from whimbrel.types.heads import Head, Normalize
from whimbrel.types.late_interaction import StatedPooling, TokenPooling
from whimbrel.types.request import InputType

IdsOf: TypeAlias = Callable[[Iterable[str]], tuple[int, ...]]
"""Words -> the ids of those that are tokens."""
_SIDES: Final[tuple[InputType, ...]] = get_args(InputType)
_TOKENS: Final[Feature] = "token_embeddings"


@dataclass(slots=True)
class _Side:
    """The vectors of texts of one input type, up to the module that is read."""

    skip_ids: set[int] = field(default_factory=set[int])
    keep_ids: set[int] | None = None
    steps: list[TokenPooling] = field(default_factory=list[TokenPooling])
    normalized: bool = False
    """The vectors are normalised before the first step."""
    is_masked: bool = False


def token_output(width: int, head: tuple[Head, ...], skip_ids: Iterable[int]) -> Output:
    """Return the output with a vector of each token, in documents without those of `skip_ids`."""
    skips = tuple(sorted(skip_ids))
    return Output(
        width, rows="token", head=head, activation="normalize", skip_ids=skips, query_skip_ids=(), keep_in_queries=False
    )


def read_token_chain(folder: Path, rows: Rows, width: int, *, ids_of: IdsOf, fills_up: bool) -> Output:
    """Read the modules `rows` after a Transformer of `width` columns. `fills_up`: queries are filled up with tokens."""
    features = dict(tokens(width))
    sides: dict[InputType, _Side] = {side: _Side() for side in _SIDES}
    for kind, path in rows:
        before = features[_TOKENS]
        if kind == "MultiVectorMask":
            _read_mask(folder, path, sides, ids_of, fills_up=fills_up)
        elif kind == "HierarchicalTokenPooling":
            _read_pooling(folder, path, sides, before)
        elif kind != "Dropout":
            features |= CHAINED[kind](folder, path, features, _TOKENS)
        elif "sentence_embedding" not in features:
            message = f"{path!r} is a Dropout of 'sentence_embedding', but what comes before gives only 'token_embeddings'."
            raise CheckpointError(message, file=MODULES)
        _follow_poolings(path, sides, features[_TOKENS].token_head[len(before.token_head) :])
    if fills_up and not sides["query"].is_masked:
        message = "queries are filled up, but no MultiVectorMask keeps those tokens (query_expansion)."
        raise CheckpointError(message, file=MODULES)
    query, document = sides["query"], sides["document"]
    if document.keep_ids is not None and not document.keep_ids:
        raise CheckpointError("the keep_only_token_ids of all MultiVectorMasks have no token in common.", file=MODULES)
    head, activated = without_norm(features[_TOKENS].token_head)
    return replace(
        token_output(features[_TOKENS].width, head, document.skip_ids),
        activated=activated,
        query_skip_ids=tuple(sorted(query.skip_ids)),
        keep_ids=tuple(sorted(document.keep_ids or ())),
        token_pooling={name: StatedPooling(tuple(side.steps), side.normalized) for name, side in sides.items() if side.steps},
    )


def _follow_poolings(path: str, sides: Mapping[InputType, _Side], heads: tuple[Head, ...]) -> None:
    """Apply the heads of the module in `path` to pooled vectors: a normalisation becomes part of the last pooling."""
    for side in (side for side in sides.values() if side.steps and heads):
        if any(not isinstance(head, Normalize) for head in heads):
            reason = "after which only Normalize is supported: tokens are pooled after the model has run."
            message = f"{path!r} follows a HierarchicalTokenPooling, {reason}"
            raise CheckpointError(message, file=MODULES, hint="save the model with the pooling last")
        side.steps[-1] = msgspec.structs.replace(side.steps[-1], normalize_embeddings=True)


def _read_mask(folder: Path, path: str, sides: Mapping[InputType, _Side], ids_of: IdsOf, *, fills_up: bool) -> None:
    file = JsonFile.read(folder, f"{path}/config.json")
    file.reject_unknown_keys({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"})
    skip_ids = ids_of(read_words(file, default=[]))
    tasks, keep_ids = _read_tasks(file, "skiplist_tasks"), file.get("keep_only_token_ids", list, [])
    if not all(type(each) is int for each in keep_ids):
        raise file.error("must be a list of token ids.", "keep_only_token_ids")
    for name, side in sides.items():
        skipped, kept = skip_ids if name in tasks else (), set[int](keep_ids if name == "document" else ())
        is_clustered = any(step.pool_factor > 1 for step in side.steps)
        if is_clustered and (skipped or kept or (fills_up and name == "query")):
            reason = "after a HierarchicalTokenPooling, whose vectors are of no one token."
            hint = "save the model with the mask before the pooling"
            raise CheckpointError(f"{path!r} chooses tokens of a {name} {reason}", file=MODULES, hint=hint)
        side.skip_ids.update(skipped)
        if kept:
            side.keep_ids = kept if side.keep_ids is None else side.keep_ids & kept
        side.is_masked = True


def read_words(file: JsonFile, default: list[str]) -> list[str]:
    words = cast(list[object], file.get("skiplist_words", list, default))
    if not all(isinstance(word, str) for word in words):
        raise file.error("must be a list of strings.", "skiplist_words")
    return cast(list[str], words)


def _read_tasks(file: JsonFile, key: str) -> list[object]:
    """Return the input types that a module is for, which `key` lists; one may stand alone."""
    value: object = file.data.get(key)
    tasks: list[object] = [value] if isinstance(value, str) else cast(list[object], file.get(key, list, ["document"]))
    if any(task not in _SIDES for task in tasks):
        raise file.error(f"{value!r:.80} is not supported; must be of query and document.", key)
    return tasks


def _read_pooling(folder: Path, path: str, sides: Mapping[InputType, _Side], before: Output) -> None:
    """Read a HierarchicalTokenPooling. The first versions have no `normalize_embeddings`, and do not normalise."""
    file = JsonFile.read(folder, f"{path}/config.json")
    file.reject_unknown_keys({"pool_factor", "num_protected_tokens", "normalize_embeddings", "tasks"})
    normalizes = file.get("normalize_embeddings", bool, False)
    factor, num_protected = file.get("pool_factor", float, 1.0), file.get("num_protected_tokens", int, 1)
    try:
        pooling = TokenPooling(factor, num_protected, normalize_embeddings=normalizes)
    except InvalidRequest as error:
        raise file.error(error.message, error.param or "pool_factor") from None
    is_normalized = without_norm(before.token_head)[1]
    for name in _read_tasks(file, "tasks"):
        side = sides[cast(InputType, name)]
        if pooling.pool_factor == 1 and (not normalizes or (is_normalized and not side.steps)):
            continue  # without effect
        if not side.steps:
            side.normalized = is_normalized
        side.steps.append(pooling)
