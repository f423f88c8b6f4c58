"""The finishes that need nothing but the response: from outputs of the seqs that ran to outputs of the texts of the request.

Most responses are the rows. A text that is longer than the model's limit runs in chunks. Its vector is the mean of theirs,
weighted by the text's own tokens in each, and normalized again where the vectors are. Equal pairs of a request run once. Errors
of a seq name the text or pair of the request. numpy only.

Source: vLLM's chunked processing of long embeddings, entrypoints/pooling/embed (0.33).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whimbrel.errors import Location
from whimbrel.types.arrays import Float32Array, Int64Array
from whimbrel.types.result import Outputs
from whimbrel.types.seq import TokenOffsets


@dataclass(frozen=True, slots=True, eq=False)
class ReturnRows:
    """The rows are the response. The base of all finishes that need nothing else."""

    def apply(self, outputs: Outputs) -> Outputs:
        return outputs

    def locate(self, seq: int, location: Location) -> Location:
        """Return the location of a seq, or of a part of it, as one in the texts of the request."""
        return location


@dataclass(frozen=True, slots=True, eq=False)
class ReturnRowsWithOffsets(ReturnRows):
    """The rows are the response, and with them the characters that each token covers."""

    token_offsets: Sequence[TokenOffsets]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMerge(ReturnRows):
    """Merging of the dense vectors of chunks to those of texts."""

    offsets_N1: Int64Array
    """Chunks offsets_N1[i] to offsets_N1[i + 1] belong to text i."""
    weights_S: Float32Array
    normalized: bool
    """True if the vectors have norm 1."""

    def apply(self, outputs: Outputs) -> Outputs:
        assert outputs.dense is not None
        starts, counts = self.offsets_N1[:-1], np.diff(self.offsets_N1)
        weights_S1 = self.weights_S[:, None].astype(np.float64)
        mean_ND = np.add.reduceat(outputs.dense * weights_S1, starts) / np.add.reduceat(weights_S1, starts)
        if self.normalized:
            norms_N1 = np.linalg.norm(mean_ND, axis=1, keepdims=True)
            mean_ND /= np.where(norms_N1 > 0, norms_N1, 1.0)
        dense = np.where((counts == 1)[:, None], outputs.dense[starts], mean_ND).astype(np.float32)
        return replace(outputs, dense=dense)

    def locate(self, seq: int, location: Location) -> Location:
        return Location("input", int(np.searchsorted(self.offsets_N1[1:], seq, side="right")))


@dataclass(frozen=True, slots=True, eq=False)
class Deduplication(ReturnRows):
    """Repetition of the scores of pairs that ran once and are asked for several times."""

    index_N: Int64Array
    """The seq of each pair of the request."""
    first_M: Int64Array
    """The first text of each seq."""

    def apply(self, outputs: Outputs) -> Outputs:
        assert outputs.scores is not None
        logits = None if outputs.logits is None else outputs.logits[self.index_N]
        return replace(outputs, scores=outputs.scores[self.index_N], logits=logits)

    def locate(self, seq: int, location: Location) -> Location:
        return Location("input", int(self.first_M[seq]), location.part)
