"""Probe of a model: the results of ten fixed texts, by which a new model is compared with the one that it replaces.

Each engine process computes them once its model is loaded. The main output counts. Dense vectors are compared as they are,
token vectors by their mean, sparse vectors in a table into which their entries are folded: the agreement of two models on a
text is their cosine. Scores are compared by their distance: the agreement is 1 less the greatest difference, as a part of the
greatest score if that is above 1.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from whimbrel.errors import InvalidRequest, WhimbrelError
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import OutputName, Request
from whimbrel.types.result import Outputs, Ragged, Sparse

if TYPE_CHECKING:
    from whimbrel.engine.engine import Engine

TEXTS: Final = (
    "a small brown bird with a long curved bill stands on the shore",
    "The train to the coast leaves at half past seven from platform two.",
    "How do I replace a file on a server without stopping it?",
    "def area(width: float, height: float) -> float:\n    return width * height",
    "Die Wellen schlagen an den Strand, und der Wind kommt aus dem Westen.",
    "La bibliothèque est fermée le lundi, mais le café d'en face est ouvert.",
    "Prices rose by 3.5 % in the second quarter, less than in the first.",
    "鳥は夜に海を渡る。",
    "no",
    "Water boils at a lower temperature in the mountains because the pressure of the air is lower there, as every cook knows.",
)
_NAMES: Final[tuple[OutputName, ...]] = ("dense", "multi_vector", "sparse", "scores", "token_scores")
"""Outputs that may be compared, the first that a model has."""
_SCORES: Final = ("scores", "token_scores")
_FOLDED: Final = 4093


class Probe(msgspec.Struct, array_like=True, frozen=True):
    output: str
    """Name of the output; empty for a model that takes no plain texts, which is then not compared."""
    width: int
    rows: bytes
    """A row of float32 per text."""
    problem: str = ""
    """Reason why the texts had no result."""
    promised_width: int = 0
    """The width that the card states; 0: that of `rows` is not the model's own."""

    def table(self) -> Float32Array:
        """Return the rows as one array."""
        return np.frombuffer(self.rows, np.float32).reshape(len(TEXTS), -1)

    def fault(self) -> str | None:
        """Return the reason why a model that gives this must not serve, or None."""
        if self.problem:
            return self.problem
        if not self.output:
            return None
        if self.promised_width and self.width != self.promised_width:
            return f"its vectors have {self.width:,} numbers, and its files promise {self.promised_width:,}"
        bad = np.flatnonzero(~np.isfinite(self.table()).all(axis=1))
        return f"its result for the text {_quote(int(bad[0]))} is not finite" if bad.size else None


class Agreement(NamedTuple):
    value: float
    text: int


def compare(new: Probe, old: Probe) -> Agreement | str:
    """Return the least agreement of two models that both have results, or the reason why they cannot be compared."""
    if new.output != old.output:
        return f"it gives {new.output or 'nothing'} for texts, the old one {old.output or 'nothing'}"
    if new.width != old.width:
        return f"it gives {new.width:,} numbers for a text, the old one {old.width:,}"
    ours, theirs = new.table().astype(np.float64), old.table().astype(np.float64)
    if new.output in _SCORES:
        scale = max(1.0, float(np.abs(theirs).max(initial=0.0)))
        values = 1.0 - np.abs(ours - theirs).max(axis=1, initial=0.0) / scale
    else:
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        same = (ours == theirs).all(axis=1)  # rows of zeros too
        values = np.where(same, 1.0, (ours * theirs).sum(axis=1) / np.where(norms > 0, norms, 1.0))
    text = int(values.argmin())
    return Agreement(float(values[text]), text)


def refusal(new: Iterable[Probe], old: Probe | None, least: float | None) -> str | None:
    """Return the reason why a model must not serve in place of another, or None. With `least` None any may."""
    for probe in new:
        if fault := probe.fault():
            return fault
        if old is None or least is None or (not probe.output and not old.output):
            continue
        found = compare(probe, old)
        if isinstance(found, str):
            return found
        if found.value < least:
            kind = "agreement" if probe.output in _SCORES else "cosine"
            return f"its {kind} with the old one is {found.value:.4f} for the text {_quote(found.text)}, less than {least:g}"
    return None


def run_probe(engine: "Engine") -> Probe:
    """Return the probe of a loaded engine."""
    for texts in (TEXTS, [(TEXTS[0], text) for text in TEXTS]):
        try:
            result = engine.run(Request(texts, truncate="right"))
        except InvalidRequest:  # it takes pairs, or labels
            continue
        except WhimbrelError as error:
            return Probe("", 0, b"", f"its results for the texts of the probe: {error}")
        return _probe_of(result.outputs, engine)
    return Probe("", 0, b"")


def _probe_of(outputs: Outputs, engine: "Engine") -> Probe:
    for name in _NAMES:
        output = getattr(outputs, name)
        if output is None:
            continue
        own, promised = output, 0
        if isinstance(output, Sparse):
            own = np.zeros((len(TEXTS), _FOLDED), np.float32)
            owners = np.repeat(np.arange(len(TEXTS)), np.diff(output.offsets_N1))
            np.add.at(own, (owners, output.ids_X % _FOLDED), output.weights_X)
        elif isinstance(output, Ragged):
            bounds = zip(output.offsets_N1[:-1], output.offsets_N1[1:], strict=True)
            width = output.rows_XD.shape[1]
            own = np.array([output.rows_XD[start:end].sum(axis=0) / max(1, end - start) for start, end in bounds], np.float32)
            own = own.reshape(len(TEXTS), width)
        if name in engine.card.outputs and not isinstance(output, Sparse):
            promised = engine.card.outputs[name].default_width or engine.card.outputs[name].width
        return Probe(name, own.shape[1], np.ascontiguousarray(own, np.float32).tobytes(), promised_width=promised)
    return Probe("", 0, b"")


def _quote(text: int) -> str:
    return f"{TEXTS[text][:40]!r}..."
