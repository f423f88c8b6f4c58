"""What the arguments of a verb stand for: the same for every kind of engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whimbrel.errors import InvalidRequest
from whimbrel.types.late_interaction import MuveraParameters, TokenPooling

if TYPE_CHECKING:
    from whimbrel.types.card import Card
from collections.abc import Iterable
from typing import Final, TypedDict, TypeVar, Unpack, cast

from whimbrel.types.card import Card
from whimbrel.types.late_interaction import read_muvera, read_token_pooling
from whimbrel.types.request import InputType, OutputName, Request, Truncate


def read_truncate(given: object) -> Truncate | None:
    """What a caller may say of truncation: an end, "never" or False, and True or None for the model's own way."""
    for word in ("right", "left", "never"):
        if given == word:
            return word
    if given is None or isinstance(given, bool):
        return "never" if given is False else None
    raise InvalidRequest(f"{given!r} is not known; it takes right, left, never, true or false.", param="truncate")


def read_prompt(given: object) -> tuple[str | None, str | None]:
    """(name, text): a word is the name of a prompt; with a space or a colon in it, or empty, it is the text itself."""
    if given is None:
        return None, None
    if not isinstance(given, str):
        raise InvalidRequest(f"must be a string, is {type(given).__name__}.", param="prompt")
    is_text = given == "" or any(character.isspace() or character == ":" for character in given)
    return (None, given) if is_text else (given, None)


T = TypeVar("T")

_NO_LISTS: Final = (bytes, bytearray, memoryview, Mapping, set, frozenset)
"""Texts could be read from them, but not those that are meant, or not in an order."""


class TextOptions(TypedDict, total=False):
    """How texts are encoded."""

    prompt: str | None
    """The name of one of the card's prompts, or a text with a space or a colon to put before each input. A word that is no
    prompt's name is refused, as it is more likely a misspelt name. None: that of `input_type`, or the card's default."""
    input_type: InputType | None
    """Whether the texts are queries or documents: the card's prompt for these is put before each, if it has one, and models
    that treat the two differently do so."""
    dimensions: int | None
    """Keep the first so many columns (Matryoshka models)."""
    normalize: bool | None
    """Divide by the Euclidean norm; None: as the checkpoint does."""
    max_active_dims: int | None
    """Keep so many entries of a sparse vector, the largest; None: as many as the checkpoint says, or all."""
    token_pooling: float | Mapping[str, Any] | TokenPooling | None
    """Documents' token vectors become fewer, about 1 / factor of them, or by the parameters of TokenPooling; 1: not even if the
    checkpoint says so. None: as the checkpoint says."""
    muvera: bool | Mapping[str, Any] | MuveraParameters | None
    """One vector for each text in place of its token vectors; True, or parameters of MUVERA. It takes `input_type`."""
    truncate: Truncate | bool | None
    """The end to cut from a text that is too long, "right" or "left", or "never" (also False) to raise TooLong; None (also
    True): as the checkpoint's tokenizer does."""
    max_tokens: int | None
    """A limit per text. Below that of the model; or, of late-interaction models, in place of the usual one of such texts."""
    late_chunking: bool
    """The texts are consecutive parts of one document, run in one pass; each part's vector is the mean of its own tokens."""
    split_long: bool
    """A text that is too long is run in parts; its vector is their mean, weighted by their tokens."""


class ScoreOptions(TypedDict, total=False):
    """How texts and pairs are scored."""

    prompt: str | None
    """As of TextOptions; put before each text, before the query of a pair."""
    activate: bool | None
    """Whether the checkpoint's activation is applied; False: logits. None: as the checkpoint does."""
    score_by: OutputName | None
    """Of models without scores of their own: by which of their outputs pairs are compared. None: what they are made for."""
    dimensions: int | None
    """Of vectors that are compared: only their first so many columns are (Matryoshka models)."""
    token_pooling: float | Mapping[str, Any] | TokenPooling | None
    """Of late interaction, as of TextOptions: the vectors of documents' texts are pooled before they are compared."""
    truncate: Truncate | bool | None
    """As of TextOptions. Of a pair that is too long, the longer text is cut first."""
    max_query_tokens: int | None
    """Of pairs: a query is cut to so many tokens of its own, before anything is put around it. None: it is not."""
    max_document_tokens: int | None
    """And a document to so many."""


def text_request(
    card: Card, texts: str | Iterable[str], outputs: OutputName | Sequence[OutputName], **options: Unpack[TextOptions]
) -> Request:
    """The Request that a list of texts and its options stand for. Raises InvalidRequest."""
    check_options(options, TextOptions)
    name, text = resolve_prompt(card, options.get("prompt"))
    return Request(
        as_list(texts),
        _names(outputs),
        prompt=text,
        prompt_name=name,
        input_type=options.get("input_type"),
        dimensions=options.get("dimensions"),
        normalize=options.get("normalize"),
        max_active_dims=options.get("max_active_dims"),
        token_pooling=read_token_pooling(options.get("token_pooling")),
        muvera=read_muvera(options.get("muvera")),
        truncate=read_truncate(options.get("truncate")),
        max_tokens=options.get("max_tokens"),
        late_chunking=options.get("late_chunking", False),
        split_long=options.get("split_long", False),
    )


def reject_muvera(options: TextOptions) -> None:
    """Of the verb that gives token vectors. Raises InvalidRequest."""
    if read_muvera(options.get("muvera")) is not None:
        raise InvalidRequest("gives no token vectors; call the verb muvera, or encode.", param="muvera")


def require_muvera(options: TextOptions) -> TextOptions:
    """The options of the verb that gives encodings. Raises InvalidRequest."""
    given = options.get("muvera")
    if given is False:
        raise InvalidRequest("is what this verb is for; leave it out, or give parameters.", param="muvera")
    return {**options, "muvera": True if given is None else given}


def resolve_prompt(card: Card, prompt: str | None) -> tuple[str | None, str | None]:
    """(name, text) of a prompt that is given by either. Raises InvalidRequest."""
    return (prompt, None) if isinstance(prompt, str) and prompt in card.prompts else read_prompt(prompt)


def check_options(options: Mapping[str, object], known: type[TextOptions | ScoreOptions]) -> None:
    """Refuse options that no verb has: a misspelt one would not count. Raises InvalidRequest."""
    for name in options:
        if name not in known.__annotations__:
            raise InvalidRequest(f"is no option of this verb; it takes {', '.join(known.__annotations__)}.", param=name)


def _names(outputs: OutputName | Iterable[OutputName]) -> tuple[OutputName, ...]:
    if isinstance(outputs, str):
        return (outputs,)
    if not _is_iterable(outputs):
        raise InvalidRequest(f"must be the names of outputs, is {outputs!r}.", param="outputs")
    return tuple(outputs)


def as_list(texts: str | Iterable[T], param: str = "input") -> list[str] | list[T]:
    """A list of texts. What has other things in it than texts, or none in order, is refused. Raises InvalidRequest."""
    if isinstance(texts, str):
        return [texts]
    given: object = texts
    if isinstance(given, _NO_LISTS) or not _is_iterable(given):
        raise InvalidRequest(f"must be a string or strings, is {type(cast(object, given)).__name__}.", param=param)
    return list(texts)


def as_strings(texts: str | Iterable[str], param: str) -> list[str]:
    """As `listed`, of strings alone. Raises InvalidRequest."""
    found = as_list(texts, param)
    for index, text in enumerate(found):
        if not isinstance(cast(object, text), str):
            raise InvalidRequest(f"must be a string, is {type(text).__name__}.", param=param, item=index)
    return found


def _is_iterable(texts: object) -> bool:
    try:
        iter(cast(Any, texts))
    except TypeError:
        return False
    return True


def require(output: T | None) -> T:
    """An output that was asked for, and so is there."""
    assert output is not None
    return output
