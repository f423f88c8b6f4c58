"""Words of random prompts, and the tokenizers that count them.

A random prompt of N tokens is N words that the model's tokenizer knows as one token each. The tokenizer is the server's, by its
routes, or that of a checkpoint on this machine. Without one, a word is taken for a token, and the output says so.
"""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2

from whimbrel.errors import SetupError
from whimbrel_bench.options import DatasetOptions

CANDIDATES: Final = tuple(files("whimbrel_bench").joinpath("words.txt").read_text("utf-8").split())
"""Common English words, then single signs for vocabularies that have few words."""


class Words(NamedTuple):
    """Words that are one token each, wherever they stand between spaces."""

    words: tuple[str, ...]
    num_special: int
    """Special tokens that are put around a text."""
    source: str
    """The tokenizer in words, for the output."""
    exact: bool = True


APPROXIMATE: Final = Words(
    CANDIDATES[:-36], 0, "one token per word is assumed, as no tokenizer is at hand: pass --tokenizer", exact=False
)
"""The words without a tokenizer."""

Tokenize = Callable[[Sequence[str], bool], list[int]]
"""Return the numbers of tokens of texts, with or without special tokens."""


def select_words(tokenize: Tokenize, source: str) -> Words:
    """Return the candidates that are one token alone and in a row. Raises SetupError if there are none."""
    special = tokenize(["the"], True)[0] - tokenize(["the"], False)[0]
    counts = zip(CANDIDATES, tokenize([f"{word} {word}" for word in CANDIDATES], False), strict=True)
    words = tuple(word for word, count in counts if count == 2)
    if not words:
        raise SetupError("the tokenizer has no token for any common word.", hint="use --dataset-name custom")
    alone = words[:200]
    if tokenize([" ".join(alone)], False)[0] != len(alone):
        raise SetupError(
            "the tokenizer joins words, so prompts of a given length cannot be made.", hint="use --dataset-name custom"
        )
    return Words(words, special, source)


def local_words(model: str | None) -> Words:
    """Return the words by the tokenizer of a checkpoint: a folder, a hub id, or "packaged" or None for the packaged model."""
    from whimbrel.checkpoint.locate import resolve_checkpoint

    checkpoint = resolve_checkpoint(None if model == "packaged" else model, weights=False)
    return select_words(_file_tokenizer(checkpoint.folder), f"tokenizer of {checkpoint.name}")


def model_words(dataset: DatasetOptions, model: str | None) -> Words | None:
    """Return the words of random prompts for a model on this machine; None if the dataset is a file."""
    return local_words(dataset.tokenizer or model) if dataset.is_random else None


def _file_tokenizer(folder: Path) -> Tokenize:
    import tokenizers

    file = next((each for each in (folder / "tokenizer.json", *folder.glob("*/tokenizer.json")) if each.exists()), None)
    if file is None:
        raise SetupError(f"{folder} has no tokenizer.json.", hint="--tokenizer takes a checkpoint's folder or a Hub id")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(json.loads(file.read_text(encoding="utf-8"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def tokenize(texts: Sequence[str], special: bool) -> list[int]:
        found = tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [len(each.ids) for each in found]

    return tokenize


def server_words(client: httpx2.Client, url: str, model: str) -> Words | None:
    """Return the words by the server's own tokenizer; None if it has no route for that."""
    for name, make_body, count in _TOKENIZERS:

        def tokenize(texts: Sequence[str], special: bool, make_body: Any = make_body, count: Any = count) -> list[int]:
            bodies = [{**make_body(model, text), "add_special_tokens": special} for text in texts]
            answers = [client.post(f"{url}/tokenize", json=body).raise_for_status().json() for body in bodies]
            return [int(count(answer)) for answer in answers]

        try:
            return select_words(tokenize, f"the server's /tokenize ({name}'s API)")
        except (httpx2.HTTPError, KeyError, TypeError, ValueError):
            continue
    return None


_TOKENIZERS: Final[Sequence[tuple[str, Callable[[str, str], dict[str, Any]], Callable[[Any], Any]]]] = (
    ("vLLM", lambda model, text: {"model": model, "prompt": text}, lambda answer: answer["count"]),
    ("TEI", lambda _, text: {"inputs": [text]}, lambda answer: len(answer[0])),
)
"""APIs of /tokenize: the body for a text, and the number of its tokens in the answer."""
