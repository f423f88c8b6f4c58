from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from whimbrel.types.batch import equal_length_groups, pack
from whimbrel.types.seq import Seq

IDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=1, max_size=12)


def seqs(ids: list[list[int]]) -> list[Seq]:
    return [Seq(np.array(row, np.int32), index, prompt_tokens=index, type_id=index % 2) for index, row in enumerate(ids)]


@given(IDS)
def test_pack_lays_every_seq_down_once_longest_first(ids: list[list[int]]) -> None:
    batch = pack(seqs(ids))
    rows = np.split(batch.ids_T, batch.cu_seqlens[1:-1])
    assert sorted(batch.order_B.tolist()) == list(range(len(ids)))
    for row, place in zip(rows, batch.order_B.tolist(), strict=True):
        assert row.tolist() == ids[place]
    lengths = np.diff(batch.cu_seqlens)
    assert (np.diff(lengths) <= 0).all()
    assert batch.num_tokens == sum(map(len, ids))
    assert batch.prompt_tokens_B.tolist() == batch.order_B.tolist()
    assert batch.type_ids_T[batch.cu_seqlens[:-1]].tolist() == [place % 2 for place in batch.order_B.tolist()]
    assert np.array_equal(batch.positions_T, np.concatenate([np.arange(length) for length in lengths]))


@given(IDS, st.integers(0, 5))
def test_roberta_positions_are_those_of_transformers(ids: list[list[int]], pad_id: int) -> None:
    batch = pack(seqs(ids), position_offset=pad_id + 1, pad_id=pad_id)
    rows = np.split(batch.positions_T, batch.cu_seqlens[1:-1])
    for row, place in zip(rows, batch.order_B.tolist(), strict=True):
        expected = RobertaEmbeddings.create_position_ids_from_input_ids(torch.tensor([ids[place]]), pad_id)[0]
        assert row.tolist() == expected.tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_runs_cover_the_batch(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    found = [run[:3] for run in equal_length_groups(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))]
    assert [length for _, count, length in found for _ in range(count)] == lengths
    assert [start for start, _, _ in found] == [0, *np.cumsum([count * length for _, count, length in found])[:-1]]
    assert len({length for _, _, length in found}) == len(found)
