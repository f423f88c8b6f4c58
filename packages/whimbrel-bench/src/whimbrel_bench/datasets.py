"""Datasets of benchmarks: random prompts, random prompts for rerankers, JSONL with `prompt`, and lines of text.

Names and meaning are those of vLLM's benchmark. The same seed gives the same samples.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from whimbrel.errors import SetupError
from whimbrel_bench.backends import Sample
from whimbrel_bench.options import DatasetOptions
from whimbrel_bench.words import Words


def make_samples(options: DatasetOptions, words: Words | None) -> list[Sample]:
    """Return the samples. Random datasets need `words`. Raises SetupError."""
    if not options.is_random:
        if options.path is None:
            raise SetupError(f"--dataset-name {options.name} needs a file.", hint="pass it with --dataset-path")
        return _repeat(_READERS[options.name](options.path), options)
    assert words is not None
    if not 0.0 <= options.range_ratio < 1.0:
        raise SetupError(f"--random-range-ratio is {options.range_ratio}.", hint="it is at least 0 and less than 1")
    return _random(options, words, np.random.default_rng(options.seed))


def _lengths(options: DatasetOptions, words: Words, rng: np.random.Generator, *, mean: int, count: int) -> list[int]:
    """Draw lengths between (1 - ratio) and (1 + ratio) times the mean without special tokens, both ends included."""
    real = max(0, mean - words.num_special)
    low, high = floor(real * (1 - options.range_ratio)), ceil(real * (1 + options.range_ratio))
    if low < 1:
        raise SetupError(
            f"--random-input-len {options.input_len} is too short: a text would have {low} tokens.",
            hint=f"the tokenizer adds {words.num_special} special tokens, and --random-range-ratio takes its share",
        )
    return [int(each) for each in rng.integers(low, high + 1, size=count)]


def _text(words: Words, rng: np.random.Generator, length: int) -> str:
    return " ".join([words.words[int(i)] for i in rng.integers(0, len(words.words), size=length)])


def _random(options: DatasetOptions, words: Words, rng: np.random.Generator) -> list[Sample]:
    """Return random texts. For rerankers there is one query, with half of a pair's tokens except for a separator."""
    ranks, num_query, around = options.name == "random-rerank", 0, words.num_special
    mean = options.input_len
    if ranks:
        separator = 1
        (num_query,) = _lengths(options, words, rng, mean=options.input_len // 2 - separator, count=1)
        around = num_query + separator
        mean -= around
    lengths = _lengths(options, words, rng, mean=mean, count=options.num_prompts)
    query = _text(words, rng, num_query) if ranks else None
    texts = [_text(words, rng, length) for length in lengths]
    step = options.batch_size
    return [
        Sample(tuple(texts[i : i + step]), query, sum(length + around for length in lengths[i : i + step]))
        for i in range(0, options.num_prompts, step)
    ]


class _Line(msgspec.Struct):
    prompt: str | list[str]


def _custom(line: str) -> Sample:
    """Return the sample of a line of JSONL: its `prompt` is a text, or a list of a query and its documents."""
    prompt: str | list[str] = []
    try:
        prompt = msgspec.json.decode(line, type=_Line).prompt
    except msgspec.ValidationError:
        pass
    except msgspec.DecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if isinstance(prompt, str):
        return Sample((prompt,))
    if len(prompt) > 1:
        return Sample(tuple(prompt[1:]), prompt[0])
    raise ValueError("no `prompt` that is a text, or a list of a query and at least one document")


def _read_file(path: Path, read_line: Callable[[str], Sample], hint: str) -> list[Sample]:
    """Return the samples of the lines that are not blank. Raises SetupError with the number of lines that cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}.", hint="--dataset-path names a file") from None
    samples: list[Sample] = []
    errors: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            samples += [read_line(text)] if text.strip() else []
        except UnicodeDecodeError as error:
            errors.append(f"line {number}: no valid UTF-8 (byte {error.start})")
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f" {len(errors):,} of {len(lines):,} lines cannot be read." if len(errors) > 1 else ""
        raise SetupError(f"{path}, {errors[0]}.{more}", hint=hint)
    if not samples:
        raise SetupError(f"{path} has no prompts.", hint=hint)
    return samples


_READERS: Final[Mapping[str, Callable[[Path], list[Sample]]]] = {
    "custom": lambda path: _read_file(path, _custom, 'a line is for example {"prompt": "a text"}'),
    "texts": lambda path: _read_file(path, lambda line: Sample((line,)), "a line is a text in UTF-8"),
}


def _repeat(rows: Sequence[Sample], options: DatasetOptions) -> list[Sample]:
    """Return `num_prompts` samples in the order of the file, repeated if it has fewer, in requests of `batch_size`."""
    samples = [rows[i % len(rows)] for i in range(options.num_prompts)]
    if options.batch_size == 1:
        return samples
    if any(sample.query is not None for sample in samples):
        raise SetupError("prompts with documents are requests already.", hint="leave out --random-batch-size")
    return in_requests([text for sample in samples for text in sample.texts], options.batch_size)


def in_requests(texts: Sequence[str], size: int) -> list[Sample]:
    """Return texts in requests of `size`."""
    return [Sample(tuple(texts[i : i + size])) for i in range(0, len(texts), size)]
