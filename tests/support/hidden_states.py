"""Hidden states of a checkpoint: by Whimbrel, in one ragged batch, and by transformers, text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoints.families import VOCABULARY
from whimbrel.checkpoint.reader import read_card
from whimbrel.model.load import load_model
from whimbrel.model.ops.attention import AttentionLayout
from whimbrel.model.ops.linear import round_up_rows, takes_any_rows
from whimbrel.model.transformer import Transformer
from whimbrel.types.batch import equal_length_groups, pack
from whimbrel.types.seq import Seq

LENGTHS = (1, 2, 3, 7, 7, 7, 16, 17, 33, 70, 70, 100)


def random_ids(seed: int = 0) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


Added: TypeAlias = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1)
def loaded(folder: Path, dtype: torch.dtype, device: str, pooling: Any, written: tuple[int, ...], added: Added = ()) -> Any:
    """Return a card and its model, loaded again only if the files have changed."""
    card = read_card(folder, "m", pooling=pooling, adapters=dict(added))
    model, _ = load_model(folder, card, device=torch.device(device), dtype=dtype)
    return card, model


def hidden_states(
    folder: Path,
    ids: list[NDArray[np.int32]],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    pooling: Any = "mean",
    adapters: Sequence[int] = (),
    added: Added = (),
    between_layers: Callable[[], None] | None = None,
) -> list[Any]:
    """Return the hidden states of each seq, from one ragged batch. `added`: names and folders of LoRA adapters."""
    written = tuple(file.stat().st_mtime_ns for file in sorted(folder.iterdir()))
    card, model = loaded(folder, dtype, device, pooling, written, added)
    batch = pack(
        [Seq(row, i, adapter=adapters[i] if adapters else -1) for i, row in enumerate(ids)],
        position_offset=card.encoder.position_offset,
        pad_id=card.encoder.pad_id,
    )
    lengths = np.diff(batch.cu_seqlens)
    layout = AttentionLayout(
        torch.from_numpy(batch.cu_seqlens).to(device),
        equal_length_groups(batch.cu_seqlens),
        batch.num_tokens,
        int(lengths.max()),
    )
    any_rows = takes_any_rows(dtype, torch.device(device)) and isinstance(model, Transformer)
    num_rows = batch.num_tokens if any_rows else round_up_rows(batch.num_tokens)

    def filled(values: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, (0, num_rows - values.size))).to(device)

    if adapters:
        layout = replace(layout, adapters_R=filled(np.repeat(batch.adapters_B, lengths)))
    with torch.inference_mode():
        out = model(
            filled(batch.ids_T),
            filled(batch.positions_T),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            layout,
            *([] if between_layers is None else [between_layers]),
        )
    parts = np.split(out[: batch.num_tokens].float().cpu().numpy(), batch.cu_seqlens[1:-1])
    return [parts[i] for i in np.argsort(batch.order_B)]


def reference_states(model: Any, ids: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    base = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        inputs = [torch.from_numpy(row)[None].long() for row in ids]
        return [base(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state[0].numpy() for x in inputs]


def least_cosine(case: str) -> float:
    """Return the least cosine in half precision. A rounded router chooses other experts at times, in transformers too."""
    return 0.85 if case.startswith("deepseek") or "experts" in case else 0.995
