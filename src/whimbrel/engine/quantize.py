"""Quantisation of a loaded model to int8. The inputs of sample texts set the scales, and their results before and after it tell
the loss.

Shapes: N rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import CheckpointError, NonFinite, SetupError
from whimbrel.outputs.layout import plan_layout
from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.arrays import Float32Array
from whimbrel.types.card import Card
from whimbrel.types.plan import Int8Quality, Plan
from whimbrel.types.request import OutputName
from whimbrel.types.result import Outputs, Ragged, Result, Sparse
from whimbrel.types.seq import Seq

if TYPE_CHECKING:
    from whimbrel.model.runner import Runner

_LEAST: Final = 0.9
"""Mean cosine below which a model is refused."""

SAMPLE_TEXTS: Final = (
    "What is the capital of Australia?",
    "The harbour froze in January, and the ferries stayed at their piers for three weeks.",
    "How do I reset the password of my account?",
    "Our refund policy: return the item within 30 days, unused and in its box, and we pay back the full price.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The court found that the contract was void, since neither party had signed its second annex.",
    "cheap flights lisbon to oslo in may",
    "A whimbrel is a wader with a curved bill. It breeds in the far north and winters on warm coasts of three continents.",
    "SELECT name, price FROM products WHERE stock > 0 ORDER BY price DESC LIMIT 10;",
    "Patients with a fever above 39 degrees for more than two days should see a doctor.",
    "El tren de las ocho llega con veinte minutos de retraso.",
    "Die Sitzung beginnt um neun Uhr im großen Saal.",
    "Le fromage doit reposer au frais pendant au moins six semaines.",
    "Interest rates rose by a quarter of a point; shares of banks gained, those of builders fell.",
    "Error 503: the service is unavailable. Try again later.",
    "best way to learn the violin as an adult",
    "The second law of thermodynamics says that the entropy of a closed system does not fall.",
    "Mix the flour with the yeast and some salt, add warm water, knead for ten minutes, and let the dough rise for an hour.",
    "Mount Kilimanjaro, 5,895 metres high, is the highest mountain of Africa.",
    "I loved the first half of this film, but the ending made no sense at all.",
    "The battery lasts two days. The camera is poor in the dark. I would still buy this phone again.",
    "Who wrote the letters that were found in the attic?",
    "Mitochondria have DNA of their own, which a child has from its mother.",
)
"""Texts of several kinds, lengths and languages."""


def quantize(
    runner: Runner, run: Callable[[EngineRequest], Result], preprocessor: Preprocessor, card: Card, plan: Plan
) -> Plan:
    """Quantise the model and return the plan with its quality.

    Raises CheckpointError if the model gives NaN or infinity, SetupError if int8 changes its results too much.
    """
    requests = _requests(preprocessor, card)
    expected = [_rows(run, each) for each in requests]  # one text at a time, so that sums over all have the same bits
    runner.quantize()
    found = [_rows(run, each) for each in requests]
    if all(rows_ND.shape == (1, 1) for rows_ND in expected):  # one score a text: together they are a vector
        expected, found = [np.concatenate(expected).T], [np.concatenate(found).T]
    cosines = np.concatenate([_cosines(*pair) for pair in zip(expected, found, strict=True)])
    quality = Int8Quality(float(cosines.mean()), float(cosines.min()), len(SAMPLE_TEXTS))
    if not quality.mean >= _LEAST:
        raise SetupError(
            f"in int8 this model's results have a mean cosine of {quality.mean:.3f} to those in float32, and at least "
            f"{quality.least:.3f}; {_LEAST} is wanted.",
            hint="--dtype float32, or bfloat16 where the processor has it",
        )
    return replace(plan, int8=quality)


def _requests(preprocessor: Preprocessor, card: Card) -> list[EngineRequest]:
    """Return a request of each text and tower for the tower's first output that has rows."""
    requests: list[EngineRequest] = []
    for number, tower in enumerate(card.towers or (card,)):
        with_rows: list[OutputName] = [name for name, output in tower.outputs.items() if output.rows not in ("none", "entry")]
        name = with_rows[0]
        spec = OutputSpec(name, tower.outputs[name].width, name != "scores")
        for ids_T in preprocessor.sample(SAMPLE_TEXTS, number):
            seqs = [Seq(ids_T, 0, tower=number)]
            requests.append(EngineRequest(seqs, plan_layout(tower, seqs, [spec]), received=perf_counter()))
    return requests


def _rows(run: Callable[[EngineRequest], Result], request: EngineRequest) -> Float32Array:
    """Return the one output of a request as rows whose cosines tell how near two results are."""
    try:
        outputs = run(request).outputs
    except NonFinite:
        raise CheckpointError("gives NaN or infinity for the sample texts of int8.", file="config.json") from None
    found = next(each for each in (getattr(outputs, name) for name in Outputs.__dataclass_fields__) if each is not None)
    if isinstance(found, Sparse):
        rows_ND = np.zeros((len(found), int(found.ids_X.max(initial=0)) + 1), np.float32)
        rows_ND[np.repeat(np.arange(len(found)), np.diff(found.offsets_N1)), found.ids_X] = found.weights_X
        return rows_ND
    return found.rows_XD if isinstance(found, Ragged) else np.asarray(found, np.float32)


def _cosines(expected_ND: Float32Array, found_ND: Float32Array) -> Float32Array:
    width = max(expected_ND.shape[1], found_ND.shape[1])  # the last entries of sparse vectors may differ
    a_ND, b_ND = (np.pad(each, ((0, 0), (0, width - each.shape[1]))).astype(np.float64) for each in (expected_ND, found_ND))
    lengths_N = np.linalg.norm(a_ND, axis=1) * np.linalg.norm(b_ND, axis=1)
    same_N = (a_ND == b_ND).all(axis=1)
    return np.where(same_N, 1.0, (a_ND * b_ND).sum(1) / np.where(lengths_N > 0, lengths_N, 1)).astype(np.float32)
