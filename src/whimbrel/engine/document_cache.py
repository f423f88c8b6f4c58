"""Document cache: token vectors of documents that were scored before, so that they need not be computed again.

The key of a document is a hash of everything that its vectors depend on: its token ids and the fields of its seq. A name or an
id that a client chose is no part of it.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from whimbrel.outputs.requested import OutputSpec
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.seq import Seq

ENTRY_BYTES: Final = 400
"""Estimated bytes of an entry besides its vectors."""
_FIELDS: Final = "prompt_tokens prefix_tokens type_id second_text_start num_attended is_query adapter tower".split()
"""Fields of a seq that its vectors depend on, besides its ids."""


def cache_key(seq: Seq, spec: OutputSpec, poolings: Sequence[TokenPooling] = ()) -> bytes:
    """Return the hash of everything that a document's vectors depend on, besides model and device."""
    kind = [*(getattr(seq, name) for name in _FIELDS), spec.width, spec.activated]
    digest = blake2b(np.array(kind, np.int64).tobytes(), digest_size=32)
    digest.update(repr(tuple(poolings)).encode())
    digest.update(seq.ids.tobytes())
    return digest.digest()
