"""Models in the hub's cache on disk: their revisions, sizes and last use, and their removal.

The hub's client library scans the cache and removes revisions. An entry that it calls corrupted is listed as incomplete, and
can be removed as a whole. No weights are read: a model's configuration alone tells if Whimbrel serves it.
"""

import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.locate import cached_ids, check_endpoint, folder_in_cache, hub_cache, nearest_models
from whimbrel.errors import SetupError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

Verdict: TypeAlias = Literal["yes", "transformers", "convert", "no"]
"""Forms of an answer. yes: by Whimbrel's own code; transformers: may run it; convert: after `whimbrel convert`."""
_MIN_PREFIX: Final = 7
"""Fewest digits that name a commit."""
_LOCK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class CachedRevision:
    commit: str
    refs: tuple[str, ...]
    """Branches and tags that led here when they were fetched."""
    num_bytes: int
    last_used: float
    """Time at which the weights were last read, as the file system knows it; else that of the whole."""
    licence: str
    verdict: Verdict
    reason: str
    """Empty for `yes`."""
    folder: Path


@dataclass(frozen=True, slots=True)
class CachedModel:
    model: str
    folder: Path
    num_bytes: int
    """Size on the disk, with that of `unfinished_bytes`."""
    unfinished_bytes: int
    """Size of files that were not fetched to their end."""
    revisions: tuple[CachedRevision, ...]
    """Empty if the entry is incomplete."""
    incomplete: str
    """The reason why no revision can be used, or empty."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The revisions of one model that are to be removed."""

    model: str
    folder: Path
    commits: tuple[str, ...]
    """Empty: the whole folder."""
    freed_bytes: int
    kept: tuple[CachedRevision, ...]


def read_cache() -> list[CachedModel]:
    """Return the models in the hub's cache by their names. Raises SetupError if it cannot be read."""
    info = _scan()
    repos = {} if info is None else {repo.repo_path.name: repo for repo in info.repos}
    faults = [] if info is None else [str(each) for each in info.warnings]
    folders = sorted(each for each in hub_cache().resolve().glob("models--*") if each.is_dir())
    return [_read_model(folder, repos.get(folder.name), faults) for folder in folders]


def find_model(model: str, models: Collection[CachedModel]) -> CachedModel:
    """Return a model of the cache. Raises SetupError with the nearest name."""
    found = next((each for each in models if each.folder.name == folder_in_cache(model).name), None)
    if found is not None:
        return found
    kinds = {"datasets": "dataset", "spaces": "space", "kernels": "kernel"}
    for prefix, kind in kinds.items():
        if (hub_cache() / f"{prefix}--{model.replace('/', '--')}").is_dir():
            hint = f"the hub's own command removes it: hf cache rm {kind}/{model}"
            raise SetupError(f"{model} is a {kind}, and no model.", hint=hint)
    near = nearest_models(model, cached_ids())
    hint = f"did you mean {' or '.join(near)}?" if near else "`whimbrel list` lists the models in the cache"
    raise SetupError(f"{model} is not in the hub's cache {hub_cache()}.", hint=hint)


def plan_removal(found: CachedModel, revision: str) -> Removal:
    """Return the plan to remove a model, or its `revision` if that is not empty. Raises SetupError if there is none."""
    if not revision:
        return Removal(found.model, found.folder, (), found.num_bytes, ())
    if found.incomplete:
        hint = f"remove it wholly: whimbrel rm {found.model}; or complete it: whimbrel pull {found.model}"
        raise SetupError(f"{found.model} is incomplete: {found.incomplete}.", hint=hint)
    named = [each for each in found.revisions if revision in each.refs or revision == each.commit]
    if not named and len(revision) >= _MIN_PREFIX:
        named = [each for each in found.revisions if each.commit.startswith(revision)]
    if len(named) != 1:
        names = ", ".join(chain.from_iterable(each.refs or (each.commit[:12],) for each in found.revisions))
        raise SetupError(f"{found.model} has no revision {revision!r} in the cache.", hint=f"it has {names}")
    kept = tuple(each for each in found.revisions if each is not named[0])
    if not kept:
        return Removal(found.model, found.folder, (), found.num_bytes, ())
    strategy = _only(found.folder).delete_revisions(named[0].commit)
    return Removal(found.model, found.folder, (named[0].commit,), strategy.expected_freed_size, kept)


def remove(removal: Removal) -> None:
    """Remove what was planned. Raises SetupError if a part of it is being fetched, or cannot be removed."""
    _refuse_while_fetched(removal)
    if removal.commits:
        _only(removal.folder).delete_revisions(*removal.commits).execute()
        left = [place for commit in removal.commits if (place := removal.folder / "snapshots" / commit).exists()]
    else:
        shutil.rmtree(removal.folder, ignore_errors=True)
        left = [removal.folder] if removal.folder.exists() else []
    if left:
        raise SetupError(f"{left[0]} cannot be removed, or not wholly.", hint="check whose files they are")


def _scan() -> "HFCacheInfo | None":
    check_endpoint()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(hub_cache())
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the hub's cache {hub_cache()} cannot be read: {error}.", hint="check HF_HOME and HF_HUB_CACHE"
        ) from None


def _only(folder: Path) -> "HFCacheInfo":
    """Return the cache as if it had this model alone: two models may have a commit in common, as copies have."""
    info = _scan()
    assert info is not None
    return replace(info, repos=frozenset(repo for repo in info.repos if repo.repo_path == folder))


def _refuse_while_fetched(removal: Removal) -> None:
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    for partial in removal.folder.glob("blobs/*.incomplete"):
        lock = hub_cache() / ".locks" / removal.folder.name / f"{partial.name.partition('.')[0]}.lock"
        if lock.exists():
            try:
                with WeakFileLock(lock, timeout=_LOCK_SECONDS):
                    pass
            except Timeout:
                hint = "stop the other process, or wait for it"
                raise SetupError(f"{removal.model} is being fetched.", hint=hint) from None


def _read_model(folder: Path, repo: "CachedRepoInfo | None", faults: list[str]) -> CachedModel:
    unfinished = sum(each.lstat().st_size for each in folder.glob("blobs/*.incomplete"))
    files = [each.lstat() for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    revisions = sorted(repo.revisions, key=lambda each: (not each.refs, each.commit_hash)) if repo else []
    return CachedModel(
        folder.name.removeprefix("models--").replace("--", "/", 1), folder, sum(each.st_size for each in files), unfinished,
        tuple(map(_read_revision, revisions)), "" if revisions else _fault(folder, faults),
    )  # fmt: skip


def _fault(folder: Path, faults: list[str]) -> str:
    """Return the reason why the client library finds no revision in a folder of the cache."""
    own = next((each for each in faults if re.search(re.escape(str(folder)) + r"(?![\w.-])", each)), "")
    if "broken symlink" in own:
        return "a file is missing"
    return "the download is unfinished" if "Snapshots dir" in own or "missing commit" in own or not own else own


def _read_revision(revision: "CachedRevisionInfo") -> CachedRevision:
    from whimbrel.checkpoint.summary import licence

    weights = [each for each in revision.files if each.file_name.endswith(".safetensors")]
    read = max((each.blob_last_accessed for each in weights or revision.files), default=revision.last_modified)
    verdict, reason = judge_by_config(revision.snapshot_path)
    stated, refs = licence(revision.snapshot_path), tuple(sorted(revision.refs))
    return CachedRevision(
        revision.commit_hash, refs, revision.size_on_disk, read, stated, verdict, reason, revision.snapshot_path
    )


def judge_by_config(folder: Path) -> tuple[Verdict, str]:
    """Return whether Whimbrel serves a checkpoint, by the family in its config.json and the form of its weights, and why not.

    `whimbrel show` reads all of its files.
    """
    from whimbrel.checkpoint.config import fallback
    from whimbrel.checkpoint.config.reader import is_native
    from whimbrel.checkpoint.gliner import GLINER
    from whimbrel.checkpoint.json_file import JsonFile
    from whimbrel.checkpoint.sentence_transformers.modules import stated_classes
    from whimbrel.errors import CheckpointError

    try:
        weights = [each for each in folder.rglob("*.safetensors") if not each.name.startswith("adapter_")]
        if not weights:
            pickled = next(folder.rglob("pytorch_model*.bin"), None)
            return ("convert", "its weights are pickles") if pickled else ("no", "its weights are not here")
        if (folder / GLINER).exists() or any("StaticEmbedding" in each for each in stated_classes(folder)):
            return "yes", ""
        root = next((each for each in (folder, folder / "0_Transformer") if (each / "config.json").exists()), None)
        root = root or next((each.parent for each in sorted(folder.glob("*/config.json")) if _is_model(each.parent)), folder)
        config = JsonFile.read(root, "config.json").data
    except CheckpointError as error:
        return "no", str(error)
    model_type, names = str(config.get("model_type") or ""), config.get("architectures")
    listed = cast(list[object], names) if isinstance(names, list) else []
    if model_type == "model2vec" or is_native(model_type, listed) or listed == ["HF_ColBERT"]:
        return "yes", ""
    if reason := fallback.reason_to_refuse(model_type):
        return "no", f"{model_type}: {reason}"
    return "transformers", f"{model_type or 'a model of no type'} is none of Whimbrel's own families"


def _is_model(folder: Path) -> bool:
    from whimbrel.checkpoint.json_file import JsonFile

    return "model_type" in JsonFile.read(folder, "config.json").data
