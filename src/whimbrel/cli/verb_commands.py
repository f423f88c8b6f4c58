"""The commands that run a model without a server: embed, score, rerank and classify.

Texts are arguments, or the lines of stdin. They run in chunks, and the answers of a chunk are written before the next one runs:
what was done is on disk when a run ends early.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from msgspec.structs import replace as replace_fields
from rich.markup import escape

from whimbrel.cli import console
from whimbrel.cli.flags import engine_arguments, with_flags
from whimbrel.cli.shared_options import OUTPUT_PANEL, ModelOption, flag, need, option
from whimbrel.errors import Location, SetupError, relocating

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine
    from whimbrel.outputs.scoring import Operation
    from whimbrel.types.result import Classes, Result

    Answers: TypeAlias = Iterator[tuple[list[Any], Any, Result]]
    """Chunks of texts or pairs, each with its answer and the result that this is read from."""

_JSON_LINES: Final = (".jsonl", ".ndjson", "")
_option, _flag = partial(option, panel=OUTPUT_PANEL), partial(flag, panel=OUTPUT_PANEL)

TextsArgument = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help=escape("Texts. [default: the lines of stdin]"))]
DocumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="DOCUMENT", help=escape("Documents. [default: the lines of stdin]"))
]
Out = Annotated[Path | None, _option("PATH", "Output file. [default: JSONL to stdout]", "--out", "-o")]
Prompt = Annotated[str | None, _option("PROMPT", "Name of one of the model's prompts, or a text to put before each input.")]
Logits = Annotated[bool, _flag("--logits", "Give the classifier's logits, without the activation of the checkpoint.")]
Pairs = Annotated[bool, _flag("--pairs", "Read pairs: two texts with a tab between them in each line of stdin.")]


@with_flags("device", "dtype", "max_length", "pooling", "matryoshka", "tokenizer", "accept_config")
def embed(
    texts: TextsArgument = None,
    *,
    model: ModelOption = None,
    out: Annotated[
        Path | None,
        _option("PATH", "Output file: an array if it ends in .npy, else JSONL. [default: JSONL to stdout]", "--out", "-o"),
    ] = None,
    prompt: Prompt = None,
    dimensions: Annotated[int | None, _option("N", "Keep the first N columns of each vector. [default: all]", min=1)] = None,
    **given: Any,
) -> None:
    _check(out, (".npy", *_JSON_LINES), texts, 'whimbrel embed "some text", or whimbrel embed < lines.txt')
    with loaded(model, given) as engine:
        from whimbrel.engine import encode_verbs

        def operation(chunk: list[Any]) -> Operation[Any]:
            return encode_verbs.embed(engine.card, chunk, prompt=prompt, dimensions=dimensions)

        def row(text: str, vector_D: Any) -> dict[str, Any]:
            return {"text": text, "embedding": vector_D}

        dense = engine.card.dense
        with _running(engine, texts, out, operation, may_be_none=True) as answers:
            if out is not None and out.suffix.lower() == ".npy":
                arrays = (vectors_ND for _, vectors_ND, _ in answers)
                console.write_npy(out, arrays, dimensions or dense.default_width or dense.width)
            else:
                console.write_json_lines(out, (map(row, chunk, vectors_ND) for chunk, vectors_ND, _ in answers))


@with_flags("device", "dtype", "max_length", "pooling", "reranker", "tokenizer", "accept_config")
def score(
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="The query.", show_default=False)] = None,
    documents: DocumentsArgument = None,
    *,
    pairs: Pairs = False,
    model: ModelOption = None,
    out: Out = None,
    prompt: Prompt = None,
    logits: Logits = False,
    **given: Any,
) -> None:
    hint = 'whimbrel score "a query" "a document", or whimbrel score --pairs < lines.tsv'
    _check(out, _JSON_LINES, documents, hint, needed=query is None and not pairs)
    if pairs and query is not None:
        raise SetupError("--pairs reads queries from stdin too.", hint=hint)
    with loaded(model, given) as engine:
        from whimbrel.outputs import scoring

        def operation(chunk: list[Any]) -> Operation[Any]:
            queries: Any = [first for first, _ in chunk] if pairs else query
            others = [second for _, second in chunk] if pairs else chunk
            return scoring.score(engine.card, queries, others, prompt=prompt, activate=False if logits else None)

        def row(item: Any, value: Any) -> dict[str, Any]:
            first, second = item if pairs else (query, item)
            return {"query": first, "document": second, "score": value}

        with _running(engine, documents, out, operation, pairs=pairs) as answers:
            console.write_json_lines(out, (map(row, chunk, scores_N) for chunk, scores_N, _ in answers))


@with_flags("device", "dtype", "max_length", "pooling", "reranker", "tokenizer", "accept_config")
def rerank(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query.", show_default=False)],
    documents: DocumentsArgument = None,
    *,
    top_n: Annotated[int | None, _option("N", "Give only the N best documents. [default: all]", min=1)] = None,
    model: ModelOption = None,
    out: Out = None,
    prompt: Prompt = None,
    logits: Logits = False,
    **given: Any,
) -> None:
    _check(out, _JSON_LINES, documents, 'whimbrel rerank "a query" "a document", or whimbrel rerank "a query" < lines.txt')
    with loaded(model, given) as engine:
        import numpy as np

        from whimbrel.outputs import scoring

        scoring.rerank(engine.card, query, [], top_n=top_n)  # raises for a model that cannot rank

        def operation(chunk: list[Any]) -> Operation[Any]:
            return scoring.score(engine.card, query, chunk, prompt=prompt, activate=False if logits else None)

        with _running(engine, documents, out, operation, at_end=True) as answers:
            chunks = list(answers)  # the best of all are known at the end
        texts = [text for chunk, _, _ in chunks for text in chunk]
        scores_N = np.concatenate([scores_N for _, scores_N, _ in chunks])
        order_N = np.concatenate([result.outputs.order[:, 0] for _, _, result in chunks])
        best = scoring.descending(order_N, top_n)
        console.write_json_lines(out, [({"index": i, "score": scores_N[i], "document": texts[i]} for i in best)])


@with_flags("device", "dtype", "max_length", "tokenizer", "accept_config")
def classify(
    texts: TextsArgument = None,
    *,
    labels: Annotated[
        list[str] | None,
        _option(
            "LABEL,LABEL",
            "Judge by these labels instead of the model's classes (zero-shot, by a model for natural language inference). "
            "May be repeated.",
            "--labels",
        ),
    ] = None,
    hypothesis_template: Annotated[
        str | None, _option("TEXT", 'Statement with the place {} of a label. [default: "This example is {}."]')
    ] = None,
    multi_label: Annotated[bool, _flag("--multi-label", "Judge each label alone: several may be true, or none.")] = False,
    pairs: Pairs = False,
    model: ModelOption = None,
    out: Out = None,
    prompt: Prompt = None,
    logits: Logits = False,
    **given: Any,
) -> None:
    hint = 'whimbrel classify -m MODEL "some text", or whimbrel classify -m MODEL < lines.txt'
    _check(out, _JSON_LINES, texts, hint)
    if pairs and texts:
        raise SetupError("--pairs reads texts from stdin.", hint=hint)
    zero_shot = _read_labels(labels, hypothesis_template, multi_label=multi_label)
    if zero_shot and (pairs or logits):
        raise SetupError("--labels goes with neither --pairs nor --logits.")
    with loaded(model, given) as engine:
        from whimbrel.outputs import scoring

        def operation(chunk: list[Any]) -> Operation[Any]:
            activate = False if logits else None
            return scoring.classify(engine.card, chunk, prompt=prompt, activate=activate, **zero_shot)

        def rows(chunk: list[Any], classes: Classes) -> Iterator[dict[str, Any]]:
            orders = classes.order_NC if zero_shot else [range(len(classes.labels))] * len(chunk)
            for item, best, order, scores_C in zip(chunk, classes.best, orders, classes.scores_NC, strict=True):
                yield {"text": item, "label": best, "scores": {classes.labels[i]: scores_C[i] for i in order}}

        operation([])  # raises for a model that cannot classify, or not by these labels
        with _running(engine, texts, out, operation, pairs=pairs, times=len(zero_shot.get("labels", "1"))) as answers:
            console.write_json_lines(out, (rows(chunk, classes) for chunk, classes, _ in answers))


def _check(out: Path | None, suffixes: Sequence[str], texts: list[str] | None, hint: str, *, needed: bool = False) -> None:
    """Raise SetupError for what can be known to fail before a model is loaded."""
    need("torch")
    if out is not None and out.suffix.lower() not in suffixes:
        kinds = " or ".join(each for each in suffixes if each)
        raise SetupError(f"cannot write {out.suffix} files.", hint=f"--out takes paths that end in {kinds}")
    if out is not None and not out.parent.is_dir():
        raise SetupError(f"cannot write {out}: no folder {out.parent}.")
    if needed or (not texts and sys.stdin.isatty()):
        raise SetupError("there are no texts.", hint=hint)


@contextmanager
def loaded(model: str | None, given: Mapping[str, Any]) -> Generator[Engine]:
    """Load a model and show the progress."""
    from whimbrel.cli.progress import LoadProgress

    arguments = engine_arguments(given)
    with console.signals_exit():
        with closing(LoadProgress(console.stderr_console(), [model or ""])) as progress:
            progress.start()  # before PyTorch is imported
            from whimbrel.checkpoint.load_progress import counting_bytes
            from whimbrel.engine.engine import Engine

            with counting_bytes(lambda done, total: progress.read(0, done, total)):
                engine = Engine(model, progress=lambda phase: progress.start_phase(0, phase), **arguments)
            progress.finish()
        with engine:
            yield engine


@contextmanager
def _running(
    engine: Engine,
    texts: list[str] | None,
    out: Path | None,
    operation: Callable[[list[Any]], Operation[Any]],
    *,
    pairs: bool = False,
    may_be_none: bool = False,
    at_end: bool = False,
    times: int = 1,
) -> Generator[Answers]:
    """Run an operation over the texts, or the pairs of stdin. At the end stderr says how many texts were cut, and after an
    early end what `out`, or stdout, has: a chunk is taken as written when the next is asked for, and none if all are written
    `at_end`. The model reads each text `times` times. Raises SetupError if there are none, unless there `may_be_none`."""
    from whimbrel.cli.progress import show_progress

    def answers(chunks: Iterator[list[Any]]) -> Answers:
        for chunk in chunks:

            def locate(place: Location, start: int = progress.done) -> Location:
                return place if place.item is None else replace_fields(place, item=place.item + start)

            with relocating(locate):
                asked = operation(chunk)
                result = engine.run(asked.request)
                answer = asked.postprocess(result)
            progress.advance(len(chunk), num_tokens=result.num_tokens, num_truncated=result.num_truncated)
            yield chunk, answer, result
            if not at_end:
                progress.written = progress.done

    unit = "pairs" if pairs else "texts"
    with show_progress(out, unit, texts, sys.stdin.buffer) as progress:
        items: Iterable[Any] = texts or console.read_lines(sys.stdin.buffer)
        if pairs:
            items = _split_pairs(items)
        try:
            whole = engine.card.list_template is not None and not pairs  # each score depends on all documents
            chunks = (each for each in [list(items)] if each) if whole else console.chunked(items, times)
            yield answers(chunks)
        except BrokenPipeError:  # the reader has what it wants
            raise
        except BaseException as error:
            progress.say_stopped(out, asked=not isinstance(error, Exception))
            raise
    if not progress.done and not may_be_none:
        raise SetupError("there are no texts.", hint="give them as arguments, or one to a line of stdin")
    if progress.truncated:
        limit = f"{engine.plan.max_length:,} tokens" if not engine.card.text_formats else "the model's limits"
        cut, read = console.count(progress.truncated, "text"), console.count(progress.done, unit.removesuffix("s"))
        progress.say(f"{cut} cut to {limit}; {read} in all.")


def _split_pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        first, tab, second = line.partition("\t")
        if not tab or "\t" in second:
            raise SetupError(f"line {number} of stdin has {line.count(chr(9))} tabs; a pair has one.")
        yield first, second


def _read_labels(labels: list[str] | None, hypothesis_template: str | None, *, multi_label: bool) -> dict[str, Any]:
    """Return the options of zero-shot classification, none without labels, which commas separate. Raises InvalidRequest."""
    from whimbrel.outputs.zero_shot import read_zero_shot

    names = None if labels is None else [name.strip() for each in labels for name in each.split(",")]
    zero_shot = read_zero_shot(names, hypothesis_template, multi_label=multi_label)
    return {} if zero_shot is None else asdict(zero_shot)
