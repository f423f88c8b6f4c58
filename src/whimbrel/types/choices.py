"""Values that a user may give to an option of a model. Kept apart, so that the command line reads them without numpy."""

from typing import Final, Literal, TypeAlias, get_args

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)
PoolingOption: TypeAlias = Literal[PoolingMode, "splade", "math-shepherd"]
"""Pooling of a checkpoint that states none. "splade" makes sparse vectors, "math-shepherd" the rewards of steps."""

RerankerName: TypeAlias = Literal["qwen3", "mxbai-v2", "bge-gemma", "nemotron", "zerank"]
"""Conventions of rerankers whose files do not state them; see `checkpoint/scores/conventions.py`."""

TokenizerReading: TypeAlias = Literal["transformers", "transformers-4", "file"]
"""Way to read the tokenizer's files: as transformers 5, as transformers 4, or tokenizer.json as it is (ADR 26)."""
TOKENIZER_READINGS: Final[tuple[TokenizerReading, ...]] = get_args(TokenizerReading)

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)

MAX_BATCH_TOKENS: Final = 2**20
