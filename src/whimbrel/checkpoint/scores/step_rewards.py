"""Step rewards of math-shepherd.

This language model scores each step of a solution, but its files do not state that.

The reward of a step is the probability of '+' against '-' as what comes after the tag ' ки': the sigmoid of the difference of
their logits. Source: the card of peiyi9979/math-shepherd-mistral-7b-prm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.scores.llm_rerankers import read_token_logits, token_id
from whimbrel.types.card import Encoder, Output

MATH_SHEPHERD_IDS: Final = ("peiyi9979/math-shepherd-mistral-7b-prm",)
"""Hub ids of the models."""
_GOOD, _BAD, _TAG = "\u2581+", "\u2581-", "\u2581ки"
"""Tokens that the model's card takes from encode("+ -")[1:] and encode("ки")[-1]."""
STEP_LABELS: Final = ("+",)


def read_step_rewards(root: Path, config: JsonFile, encoder: Encoder) -> Output:
    """Return the output with a reward at each tag. Raises CheckpointError if the vocabulary in `root` has no such tag."""
    good, bad, tag = (token_id(root, token) for token in (_GOOD, _BAD, _TAG))
    logits = read_token_logits(config, encoder, good, bad)
    return Output(1, rows="token", head=(logits,), activation="sigmoid", keep_ids=(tag,))
