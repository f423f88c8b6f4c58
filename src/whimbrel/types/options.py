"""Keyword arguments of the verbs and how they become a `Request`.

Shared by Engine, AsyncEngine and the clients, so that `embed`, `score` and the other verbs read their arguments in one way.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from inspect import Parameter, signature
from typing import Any, Final, TypedDict, TypeVar, Unpack, cast

from whimbrel.errors import InvalidRequest, TruncationWarning
from whimbrel.types.card import Card
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling, read_muvera, read_token_pooling
from whimbrel.types.request import InputType, OutputName, Request, ScoringOutput, read_prompt, read_truncate, splits
from whimbrel.types.seq import Truncate

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

MAX_LABELS: Final = 1000
"""Labels that a request may give. The model judges the labels of a text together, so a client cannot split the list."""
MAX_PAIRS: Final = 10_000
"""Pairs of texts in one HTTP request."""
_NOT_LISTS: Final = (bytes, bytearray, memoryview, Mapping, set, frozenset)
"""Iterables whose items are not the texts that the caller meant, or have no order."""


class SharedOptions(TypedDict, total=False):
    """Options of all verbs."""

    prompt: str | None
    """Name of one of the model's prompts, or a text with a space or a colon that is put before each text, or a pair's query.
    An unknown name is an error. None: the prompt of `input_type`, or the model's default."""
    adapter: str | None
    """Name of one of the adapters that the model was loaded with. None: the model itself."""
    dimensions: int | None
    """Leading columns of vectors to keep (Matryoshka models)."""
    token_pooling: float | Mapping[str, Any] | TokenPooling | None
    """Pooling of documents' token vectors: a factor, of which about 1 / factor remain, or the parameters of TokenPooling. 1
    turns it off. None: as the checkpoint says."""
    truncate: Truncate | bool | None
    """End to cut from a text above the limit, of a pair from the longer text first: "right" or "left", or "never" (also False)
    to raise TooLong. None (also True): as the checkpoint's tokenizer does."""


class TextOptions(SharedOptions, total=False):
    """Options of the verbs that encode texts."""

    input_type: InputType | None
    """Role of the texts: selects the model's prompt for it, and the encoding if that depends on the role."""
    normalize: bool | None
    """Divide vectors by their Euclidean norm. None: as the checkpoint does."""
    max_active_dims: int | None
    """Number of the largest entries of a sparse vector to keep. None: as the checkpoint says, or all."""
    muvera: bool | Mapping[str, Any] | MuveraParameters | None
    """Encode token vectors as one vector per text: True, or parameters of MUVERA. Requires `input_type`."""
    max_tokens: int | None
    """Limit in tokens per text, below that of the model. For late interaction it replaces the limit of the text's role."""
    late_chunking: bool
    """Treat the texts as consecutive chunks of one document, run in one pass. A chunk's vector is the mean of its tokens."""
    split_long: bool | None
    """Run a text above the limit in chunks. Its vector is the mean of theirs, weighted by tokens. None: as the model was loaded
    to do, unless `truncate` says how to cut it."""


class ScoreOptions(SharedOptions, total=False):
    """Options of the verbs that score texts and pairs."""

    activate: bool | None
    """Apply the checkpoint's activation; False returns logits. None: as the checkpoint does."""
    score_by: ScoringOutput | None
    """Output by which a model without scores of its own scores pairs. None: its main output."""
    max_query_tokens: int | None
    """Limit in tokens of the query of a pair, before anything is added to it. None: no limit of its own."""
    max_document_tokens: int | None
    """The same for its document."""


def text_request(
    card: Card, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName], **options: Unpack[TextOptions]
) -> Request:
    fields = read_options(card, options, TextOptions)
    fields["split_long"] = splits(options.get("split_long"), options.get("truncate"))
    return Request(as_list(texts), _names(outputs), **fields)


_READERS: Final = {"token_pooling": read_token_pooling, "muvera": read_muvera, "truncate": read_truncate}
"""Functions that read the options which a caller may write in several ways."""


def read_options(card: Card, options: Mapping[str, Any], kind: type[TextOptions | ScoreOptions]) -> dict[str, Any]:
    """Return the fields of a Request that the options of a verb give. Raises InvalidRequest."""
    check_options(options, kind)
    prompt = options.get("prompt")
    is_name = isinstance(prompt, str) and prompt in card.prompts
    name, text = (prompt, None) if is_name else read_prompt(prompt)
    fields = {**options, "prompt_name": name, "prompt": text}
    return fields | {name: read(fields[name]) for name, read in _READERS.items() if name in fields}


def reject_muvera(options: TextOptions) -> None:
    """Raise InvalidRequest if the options of `multi_vector` ask for MUVERA."""
    if read_muvera(options.get("muvera")) is not None:
        raise InvalidRequest("gives no token vectors; call the verb muvera, or encode.", param="muvera")


def require_muvera(options: TextOptions) -> TextOptions:
    """Return the options of `muvera` with MUVERA turned on. Raises InvalidRequest if it is turned off."""
    value = options.get("muvera")
    if value is False:
        raise InvalidRequest("is what this verb is for; leave it out, or give parameters.", param="muvera")
    return {**options, "muvera": True if value is None else value}


def check_options(options: Mapping[str, object], kind: type[TextOptions | ScoreOptions]) -> None:
    """Raise InvalidRequest for unknown options, which would have no effect."""
    for name in options:
        if name not in kind.__annotations__:
            raise InvalidRequest(f"is no option of this verb; it takes {', '.join(kind.__annotations__)}.", param=name)


def _names(outputs: OutputName | Iterable[OutputName]) -> tuple[OutputName, ...]:
    if isinstance(outputs, str):
        return (outputs,)
    if not _is_iterable(outputs):
        raise InvalidRequest(f"must be the names of outputs, is {outputs!r}.", param="outputs")
    return tuple(outputs)


def as_list(texts: str | Iterable[T], param: str = "input") -> list[str] | list[T]:
    """Return a list of texts. Raises InvalidRequest for values that are not an ordered iterable of texts."""
    if isinstance(texts, str):
        return [texts]
    value: object = texts
    if isinstance(value, _NOT_LISTS) or not _is_iterable(value):
        raise InvalidRequest(f"must be a string or strings, is {type(cast(object, value)).__name__}.", param=param)
    return list(texts)


def as_strings(texts: str | Iterable[str], param: str) -> list[str]:
    strings = as_list(texts, param)
    for index, text in enumerate(strings):
        if not isinstance(cast(object, text), str):
            raise InvalidRequest(f"must be a string, is {type(text).__name__}.", param=param, item=index)
    return strings


def read_labels(labels: object) -> tuple[str, ...]:
    """Return the labels that a caller gives in place of the classes of a model. Raises InvalidRequest."""
    if isinstance(labels, (str, *_NOT_LISTS)) or not _is_iterable(labels):
        kind = type(cast(object, labels)).__name__
        raise InvalidRequest(f'must be a list of strings, as ["one", "another"]; is {kind}.', param="labels")
    names = as_strings(cast("Iterable[str]", labels), "labels")
    if not names:
        raise InvalidRequest("is an empty list; give at least one label.", param="labels")
    if len(names) > MAX_LABELS:
        raise InvalidRequest(f"{len(names):,} labels; the limit is {MAX_LABELS:,}. Send the likely ones.", param="labels")
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if not name.strip():
            raise InvalidRequest("is empty; give a word or a phrase.", param="labels", item=index)
        if first.setdefault(name, index) != index:
            message = f"{name!r:.80} is labels[{first[name]}] too; give each label once."
            raise InvalidRequest(message, param="labels", item=index)
    return tuple(map(str, first))  # numpy has strings of its own


def _is_iterable(value: object) -> bool:
    try:
        iter(cast(Any, value))
    except TypeError:
        return False
    return True


def require(output: T | None) -> T:
    """Return an output that was requested and therefore exists."""
    assert output is not None
    return output


_CUTTING: Final = ("truncate", "max_tokens", "max_query_tokens", "max_document_tokens")
"""Options that say how texts are to be cut."""


def warn_of_truncation(num_truncated: int, options: Mapping[str, object]) -> None:
    """Warn the caller of a verb's method if texts were cut, unless the verb's options say how they are to be cut."""
    if num_truncated and all(options.get(name) is None for name in _CUTTING):
        texts = "1 text was" if num_truncated == 1 else f"{num_truncated:,} texts were"
        says = 'truncate=True to cut without this warning, truncate="never" to raise TooLong'
        warnings.warn(f"{texts} cut to the model's limit; pass {says}.", TruncationWarning, stacklevel=3)


def copy_signature(method: C, verb: Callable[..., Any]) -> C:
    """Return a method that `help` shows as its verb: with `self` for the first parameter, and T for a result `Wrapper[T]`."""
    update_wrapper(method, verb)
    verb_signature = signature(verb)
    first, *parameters = verb_signature.parameters.values()
    result = str(verb_signature.return_annotation).partition("[")[2].removesuffix("]")
    vars(method)["__signature__"] = verb_signature.replace(
        parameters=[first.replace(name="self", annotation=Parameter.empty), *parameters], return_annotation=result
    )
    return method
