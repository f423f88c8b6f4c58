"""Comparison of a model's real weights with a reference: Sentence Transformers, or another server.

The texts include those of which programs are known to make different ids. One output of the model is compared; the others are
named as not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations, groupby
from operator import itemgetter
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import typer

from whimbrel.checkpoint.locate import Checkpoint, resolve_checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli import console
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.types.arrays import Float32Array, Int32Array

if TYPE_CHECKING:
    from whimbrel.client import Client
    from whimbrel.client.client_verbs import DialectName
    from whimbrel.engine.engine import Engine
    from whimbrel.types.card import Card

COMPARED: Final = ("dense", "sparse", "multi_vector", "scores")
MAX_DIFFERENCE: Final = 1e-5
"""Promise in float32: difference relative to the largest number of the reference."""
MIN_COSINE: Final = 0.999
"""Promise in half precision."""
NUM_PAIRS: Final = 200

SHORT: Final = (
    "Where do whimbrels winter?",
    "A wader with a long, curved bill.",
    "Der Regenbrachvogel brütet in der Tundra.",
    "Le courlis corlieu niche dans le Grand Nord.",
    "El zarapito trinador pasa el invierno en la costa.",
    "チュウシャクシギは長い嘴を持つ。",
    "中杓鹬是一种涉禽。",
    "كروان الماء طائر مهاجر",
    "Средний кроншнеп гнездится на болотах.",
    "중부리도요는 봄과 가을에 지나간다.",
    "def area(radius): return 3.14159 * radius ** 2",
    "E = mc², ∑ xᵢ ≤ 42 € — naïve “quotes” …",
    "🐦🌍🚀",
    "a",
    "12345 67890",
    "UPPER CASE and lower case",
    "tabs\tand\nnew lines",
    "https://example.org/birds?id=7&page=2",
    "The price of wheat rose by three percent in March.",
)
ODD: Final = ("", "The bird flew over the bay and landed on the mud. " * 200)
"""An empty text and one that most models cut."""

_OTHER_IDS: Final = (
    "If only texts with spaces, new lines or capitals differ, or all of them, the server may read the tokenizer's files in "
    "another way: compare with --tokenizer file and --tokenizer transformers-4."
)
_OTHER_READING: Final = (
    "The reference reads the tokenizer's files as transformers 5, this model is read as --tokenizer {} says: compare with "
    "--tokenizer transformers, so that both have the same ids."
)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    dialect: DialectName
    model: str | None
    """Name of the model there; None: the same as here."""


@dataclass(frozen=True, slots=True)
class Comparison:
    dtype: str
    difference: float
    """Largest difference, relative to the largest number of the reference."""
    cosine: float
    """Lowest cosine of a row with that of the reference; of scores, the cosine of all scores."""
    same_order: bool
    """The pairs have the same order by similarity or by score, except for pairs that the reference does not tell apart."""
    within: bool
    worst: int = 0
    """Number of the text, or pair, with the largest difference."""


def run(model: str | None, against: Server | None, arguments: Mapping[str, Any], *, as_json: bool) -> int:
    """Compare and print. `arguments` are those of Engine, without a dtype. Returns the exit code. Raises WhimbrelError."""
    from whimbrel.engine.engine import Engine
    from whimbrel.tokenizer.probes import TEXTS

    checkpoint = resolve_checkpoint(model)
    reading = arguments.get("tokenizer")
    card = read_card(checkpoint.folder, checkpoint.name, accept_config=arguments["accept_config"], tokenizer=reading)
    output = choose_output(card)
    if against is None:
        check_reference(checkpoint, output)
    texts = [*SHORT, *(ODD if against is None else ["birds " * 30]), *TEXTS]
    pairs = [(query, text) for query in texts[:5] for text in texts[1:]][:NUM_PAIRS]
    results: list[Comparison] = []
    logits = against is None and output == "scores" and len(card.labels) > 1  # the libraries have other defaults here
    with console.signals_exit(), console.stderr_console().status("running the reference") as status:
        expected = _local(output, checkpoint, texts, pairs) if against is None else _remote(against, output, card, texts, pairs)
        for dtype in dtypes(arguments.get("device", "auto")):

            def show(phase: str, dtype: str = dtype) -> None:
                status.update(f"{dtype}: {phase}")

            chosen: dict[str, Any] = {**arguments, "dtype": dtype}
            with Engine(model, progress=show, **chosen) as engine:
                show("comparing")
                results.append(compare(output, dtype, _results(engine, card, output, texts, pairs, logits=logits), expected))
    not_compared = [
        *(["the activation"] if logits else []),
        *(name for name in card.outputs if name != output),
        *(["queries"] if output == "multi_vector" else []),
        *(["empty and long texts"] if against else []),
    ]
    compared = pairs if output == "scores" else texts
    reference = "Sentence Transformers, float32, CPU" if against is None else f"{against.url} ({against.dialect})"
    about = {"model": card.name, "reference": reference}
    if as_json:
        worst = [compared[each.worst] for each in results]
        console.print_json({**about, "output": output, "results": results, "worst": worst, "not_compared": not_compared})
    else:
        kind = "pairs of texts" if output == "scores" else "texts"
        about["compared"] = f"{output} of {len(compared)} {kind}"
        console.write_fields(about | {"not compared": ", ".join(not_compared) or "nothing left out"})
        reading = card.tokenizer.reading
        advice = _OTHER_IDS if against else _OTHER_READING.format(reading) if reading != "transformers" else ""
        _print_table(results, compared, advice)
    return 0 if all(each.within for each in results) else 1


def _print_table(results: Sequence[Comparison], compared: Sequence[object], advice: str) -> None:
    """Print a row per dtype; then the texts that differ most where a promise is broken, and the advice for that case."""
    typer.echo(f"\n  {'DTYPE':<10}{'DIFFERENCE':<12}{'COSINE':<12}{'ORDER':<11}PROMISE")
    for each in results:
        promise = f"{MAX_DIFFERENCE:.0e} difference" if each.dtype == "float32" else f"{MIN_COSINE} cosine"
        order = "the same" if each.same_order else "differs"
        end = f"{promise}: {'kept' if each.within else 'BROKEN'}"
        typer.echo(f"  {each.dtype:<10}{each.difference:<12.1e}{each.cosine:<12.7f}{order:<11}{end}")
    broken = [each for each in results if not each.within]
    for each in broken:
        typer.echo(f"\n  {each.dtype} differs most of {shorten(repr(compared[each.worst]), 200)}")
    if broken and advice:
        typer.echo("\n" + fill(advice, console.screen_width(), initial_indent="  ", subsequent_indent="  "))


def choose_output(card: Card) -> str:
    """Return the output that is compared. Raises SetupError if there is none."""
    if card.towers:
        raise SetupError("a model with two encoders (Router) cannot be compared.")
    if card.list_template is not None:
        raise SetupError("a listwise reranker cannot be compared: its reference is code of its own, which is not run.")
    name = next((name for name in COMPARED if name in card.outputs), None)
    if name is None:
        raise SetupError(f"{', '.join(card.outputs)} cannot be compared.", hint=f"these can: {', '.join(COMPARED)}")
    return name


def check_reference(checkpoint: Checkpoint, output: str) -> None:
    """Raise SetupError if Sentence Transformers is missing, or would guess what the checkpoint does not state."""
    other = "compare with a server: --against URL"
    if find_spec("sentence_transformers") is None:
        hint = f"pip install 'whimbrel[hf]' sentence-transformers, or {other}"
        raise SetupError("the reference, Sentence Transformers, is not installed.", hint=hint)
    if output in ("dense", "sparse") and not (checkpoint.folder / "modules.json").exists():
        raise SetupError("the checkpoint has no modules.json, so Sentence Transformers would guess its pooling.", hint=other)


def dtypes(device: str) -> list[Literal["float32", "bfloat16", "float16"]]:
    from whimbrel.model.runner import probe

    hardware = probe()
    if device == "cpu" or not hardware.gpus:
        return ["float32", "bfloat16"] if hardware.cpu.bfloat16 != "none" else ["float32"]
    of_device = [gpu.bfloat16 for gpu in hardware.gpus if gpu.name == device] or [hardware.gpus[0].bfloat16]
    return ["float32", "bfloat16", "float16"] if of_device[0] else ["float32", "float16"]


def compare(output: str, dtype: str, ours: Sequence[Float32Array], expected: Sequence[Float32Array]) -> Comparison:
    """Compare an array per text, or per pair for scores. Raises WhimbrelError if their shapes differ."""
    if len(ours) != len(expected):
        raise WhimbrelError(f"{len(ours)} results against {len(expected)} of the reference.")
    if output == "sparse":
        width = max(row.size for row in (*ours, *expected))
        ours, expected = ([np.pad(row, (0, width - row.size)) for row in rows] for rows in (ours, expected))
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if a.shape != b.shape:
            raise WhimbrelError(f"text {number}: the result has shape {list(a.shape)}, that of the reference {list(b.shape)}.")
    one, other = (np.concatenate([row.ravel() for row in rows]).astype(np.float64) for rows in (ours, expected))
    difference = float(np.abs(one - other).max() / (np.abs(other).max() or 1.0))
    if output == "scores":
        cosine = float(_cosines(one[None], other[None])[0])
        mine, theirs = (np.array([row.ravel()[0] for row in rows], np.float64) for rows in (ours, expected))
    else:
        cosine = min(float(_cosines(a, b).min(initial=1.0)) for a, b in zip(ours, expected, strict=True))
        mine, theirs = (_similarities(rows) for rows in (ours, expected))
    is_exact = dtype == "float32"
    within = difference <= MAX_DIFFERENCE if is_exact else cosine >= MIN_COSINE
    order = same_order(mine, theirs, tolerance=2 * MAX_DIFFERENCE if is_exact else 1 - MIN_COSINE)
    differences = [np.abs(a.astype(np.float64) - b).max(initial=0.0) for a, b in zip(ours, expected, strict=True)]
    return Comparison(dtype, difference, cosine, order, bool(within), int(np.argmax([*differences, 0.0])))


def same_order(ours: Any, theirs: Any, *, tolerance: float) -> bool:
    """Return whether pairs sorted by `ours` are sorted by `theirs` too. Rises of `tolerance` of its maximum do not count."""
    ordered = theirs[np.argsort(-ours, kind="stable")]
    rises = ordered - np.minimum.accumulate(ordered)
    return bool(rises.max(initial=0.0) <= tolerance * (np.abs(theirs).max(initial=0.0) or 1.0))


def _cosines(a_ND: Any, b_ND: Any) -> Any:
    """Return the cosine of each row of both, or of two vectors. It is 1 of two rows of zeros."""
    a_ND, b_ND = (np.atleast_2d(each).astype(np.float64) for each in (a_ND, b_ND))
    norms_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    both_zero_N = ~a_ND.any(axis=1) & ~b_ND.any(axis=1)
    return np.where(both_zero_N, 1.0, (a_ND * b_ND).sum(axis=1) / np.where(norms_N > 0, norms_N, 1.0))


def _similarities(rows: Sequence[Float32Array]) -> Any:
    """Return the similarity of the first 200 pairs of texts: the dot product, or of token vectors the sum of maxima."""
    wide = [np.atleast_2d(row).astype(np.float64) for row in rows]
    scores = [(wide[i] @ wide[j].T).max(axis=1, initial=-np.inf).sum() for i, j in combinations(range(len(wide)), 2)]
    return np.array(scores[:NUM_PAIRS])


def _results(
    engine: Engine | Client, card: Card, output: str, texts: list[str], pairs: list[tuple[str, str]], *, logits: bool = False
) -> list[Float32Array]:
    """Return what an Engine, or a Client, gives: an array per text or pair."""
    if output == "dense":
        return list(engine.embed(texts, truncate=True))
    if output == "sparse":
        sparse = engine.sparse(texts, truncate=True)
        return [_spread(*sparse[i]) for i in range(len(sparse))]
    if output == "multi_vector":
        ragged = engine.multi_vector(texts, input_type="document" if card.text_formats else None, truncate=True)
        return [ragged[i] for i in range(len(ragged))]
    activate = False if logits else None
    return list(engine.score([query for query, _ in pairs], [text for _, text in pairs], activate=activate, truncate=True))


def _spread(ids: Int32Array, weights: Float32Array) -> Float32Array:
    """Return a sparse vector as an array that ends with its last entry."""
    row = np.zeros(int(ids.max(initial=-1)) + 1, np.float32)
    row[ids] = weights
    return row


def _local(output: str, checkpoint: Checkpoint, texts: list[str], pairs: list[tuple[str, str]]) -> list[Float32Array]:
    from whimbrel.model import reference

    try:
        return reference.compute(output, str(checkpoint.folder), texts, pairs)
    except Exception as error:  # any, of code that is not ours
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise SetupError(f"Sentence Transformers cannot run this model: {lines[0]}") from error


def _remote(server: Server, output: str, card: Card, texts: list[str], pairs: list[tuple[str, str]]) -> list[Float32Array]:
    """Return what another server gives, in the same form. Raises InvalidRequest for an output that the dialect lacks."""
    from whimbrel.client import Client

    with Client(server.url, model=server.model or card.name, dialect=server.dialect, progress=False) as client:
        if output != "scores" or server.dialect == "whimbrel":
            return _results(client, card, output, texts, pairs)
        if len(card.labels) > 1:
            raise SetupError("this dialect has no classes.", hint="leave out --against, or compare with --dialect whimbrel")
        rows: list[Float32Array] = []
        for query, of_query in groupby(pairs, key=itemgetter(0)):
            ranked = sorted(client.rerank(query, [text for _, text in of_query]), key=lambda each: each.index)
            rows += [np.array(each.score, np.float32) for each in ranked]
        return rows
