"""Rows of every output: which tokens they are made of and where they lie, against loops over texts and tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.engine.engine_request import EngineRequest
from whimbrel.outputs.finishers import RowsFinisher
from whimbrel.outputs.layout import ResultLayout, concat_sparse, plan_layout, top_k_entries
from whimbrel.outputs.merge import ReturnRows
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.rows import BatchOutput, finite_seqs, select_rows, to_host
from whimbrel.types.batch import pack
from whimbrel.types.card import Output
from whimbrel.types.result import Sparse
from whimbrel.types.seq import Seq

OUTPUTS = {
    "dense": Output(6, modes=("mean",), include_prompt=False, activation="normalize"),
    "multi_vector": Output(4, rows="token", skip_ids=(3, 4), query_skip_ids=(), skip_first=1, activation="normalize"),
    "sparse": Output(1, rows="entry", skip_ids=(0, 2)),
    "scores": Output(3, modes=("lasttoken",), padding_id=3),
    "token_scores": Output(2, rows="token", keep_ids=(2, 5)),
    "hidden": Output(5, rows="token", keep_ids=(1, 2, 6), keep_in_queries=False),
}
CARD: Any = SimpleNamespace(all_outputs=OUTPUTS)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Seq], list[OutputSpec]]:
    names = draw(st.lists(st.sampled_from(list(OUTPUTS)), min_size=1, unique=True))
    asks = [OutputSpec(name, draw(st.integers(1, OUTPUTS[name].width)), draw(st.booleans())) for name in names]  # pyright: ignore[reportArgumentType]
    seqs: list[Seq] = []
    for index, ids in enumerate(draw(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), min_size=1, max_size=4))):
        ends = sorted(draw(st.lists(st.integers(1, len(ids)), min_size=1, max_size=3, unique=True)))
        spans = np.array(list(zip([0, *ends[:-1]], ends, strict=True)), np.int32) if draw(st.booleans()) else None
        prompt_tokens = draw(st.integers(0, min(3, len(ids) - 1)))
        seqs.append(Seq(np.array(ids, np.int32), index, prompt_tokens, is_query=draw(st.booleans()), spans_S2=spans))
    return seqs, asks


def value(name: str, ids: list[int]) -> float:
    """Return the number that stands for the row of an output made of these tokens."""
    return float(sum((at + 1) * (token + 1) for at, token in enumerate(ids)) + 1000 * list(OUTPUTS).index(name))


def expected_rows(name: str, seq: Seq) -> list[float]:
    """The rows of a seq, by a loop."""
    ids: list[int] = seq.ids.tolist()
    output = OUTPUTS[name]
    if name == "scores":
        while len(ids) > 1 and ids[-1] == output.padding_id and seq.spans_S2 is None:
            ids.pop()
        spans = [[0, len(ids)]] if seq.spans_S2 is None else seq.spans_S2.tolist()
        return [value(name, ids[start:end]) for start, end in spans]
    if output.rows == "text":
        skipped = seq.prompt_tokens
        spans = [[skipped, len(ids)]] if seq.spans_S2 is None else seq.spans_S2.tolist()
        return [value(name, ids[start:end]) for start, end in spans]
    skip = output.query_skip_ids if seq.is_query and output.query_skip_ids is not None else output.skip_ids
    keep = output.keep_ids if output.keep_in_queries or not seq.is_query else ()
    tokens = [token for at, token in enumerate(ids) if token not in skip and at >= output.skip_first]
    tokens = [token for token in tokens if not keep or token in keep]
    return [value(name, [token]) for token in (sorted(set(tokens)) if output.rows == "entry" else tokens)]


@given(st.lists(requests(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_row_of_a_mixed_batch_lands_where_it_belongs(
    asked: list[tuple[list[Seq], list[OutputSpec]]], random: Any
) -> None:
    jobs = [job(seqs, plan_layout(CARD, seqs, asks)) for seqs, asks in asked]
    work = [(one, seq) for one in jobs for seq in one.request.seqs]
    random.shuffle(work)
    batch = pack([seq for _, seq in work])
    order: list[int] = batch.order_B.tolist()
    wants = select_rows(CARD, batch, [work[i][0].request.layout for i in order])
    given_rows: dict[Any, Any] = {}
    for name, each in wants.items():
        rows = np.array(
            [value(name, batch.ids_T[start:end].tolist()) for start, end in zip(each.starts_P, each.ends_P, strict=True)]
        )
        full = np.repeat(rows.reshape(-1, 1), OUTPUTS[name].width, axis=1).astype(np.float32)
        given_rows[name] = to_host(OUTPUTS[name], each, full)
    collection = BatchOutput(wants, given_rows)
    for one in jobs:
        rows = np.array([row for row, i in enumerate(order) if work[i][0] is one])
        one.finisher.add(collection, rows, np.array([work[order[row]][1].index for row in rows]))
    for one, (seqs, asks) in zip(jobs, asked, strict=True):
        for ask in asks:
            found = one.request.layout.by_name[ask.name].rows(one.memory)
            assert found.shape[1] == ask.width
            assert found[:, 0].tolist() == [row for seq in seqs for row in expected_rows(ask.name, seq)]
            offsets = one.request.layout.by_name[ask.name].offsets_N1
            assert np.diff(offsets).tolist() == [len(expected_rows(ask.name, seq)) for seq in seqs]


class Made:
    """A request and the finisher of its rows."""

    def __init__(self, seqs: list[Seq], layout: ResultLayout) -> None:
        self.request = EngineRequest(seqs, layout, 0.0)
        self.memory = np.full(layout.num_bytes, 255, np.uint8)
        self.finisher = RowsFinisher(layout, self.memory, ReturnRows(), num_seqs=len(seqs))


job = Made


def test_each_row_knows_how_it_is_finished_and_cut() -> None:
    seqs = [Seq(np.array([1, 5, 5, 6], np.int32), 0), Seq(np.array([1, 5], np.int32), 1)]
    one, other = (
        plan_layout(CARD, seqs, [OutputSpec("multi_vector", 4, True)]),
        plan_layout(CARD, seqs, [OutputSpec("multi_vector", 2, False)]),
    )
    each = select_rows(CARD, pack(seqs), [one, other])["multi_vector"]
    assert each.activated_P.tolist() == [True] * 3 + [False]
    assert each.widths_P is not None
    assert each.widths_P.tolist() == [4, 4, 4, 2]
    assert select_rows(CARD, pack(seqs), [one, one])["multi_vector"].widths_P is None
    nothing = select_rows(CARD, pack(seqs), [plan_layout(CARD, seqs, [OutputSpec("dense", 6, True)])] * 2)
    assert list(nothing) == ["dense"]


def test_weights_over_the_vocabulary_become_entries() -> None:
    output = Output(5, rows="vocabulary", modes=("max",))
    card: Any = SimpleNamespace(all_outputs={"sparse": output})
    seqs = [Seq(np.array([1, 2], np.int32), 0), Seq(np.array([3], np.int32), 1), Seq(np.array([4], np.int32), 2)]
    places = plan_layout(card, seqs, [OutputSpec("sparse", 5, True)])
    assert places.num_bytes == 0
    one = job(seqs, places)
    wants = select_rows(card, pack(seqs), [places] * 3)
    rows = np.array([[0, 1, 0, 0.5, 0], [0, 0, 0, 0, 0], [0, 0, np.inf, 0, 3]], np.float32)
    given_rows = to_host(output, wants["sparse"], rows)
    assert finite_seqs(given_rows, wants["sparse"].offsets_B1).tolist() == [True, True, False]
    one.finisher.add(BatchOutput(wants, {"sparse": given_rows}), np.array([0, 1, 2]), np.array([0, 1, 2]))
    sparse = one.finisher.result().sparse
    assert isinstance(sparse, Sparse)
    assert len(sparse) == 3
    assert [(ids.tolist(), weights.tolist()) for ids, weights in sparse] == [
        ([1, 3], [1, 0.5]),
        ([], []),
        ([2, 4], [np.inf, 3]),
    ]


@given(st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.5, 1.0, 2.0]), max_size=6), max_size=5), st.integers(1, 7))
def test_the_largest_entries(texts: list[list[float]], max_entries: int) -> None:
    pieces = {i: (np.arange(len(text), dtype=np.int32) * 3, np.array(text, np.float32)) for i, text in enumerate(texts)}
    found = top_k_entries(concat_sparse(pieces), max_entries)
    assert len(found) == len(texts)
    for text, (ids, weights) in zip(texts, found, strict=True):
        kept = sorted(sorted(range(len(text)), key=lambda i: -abs(text[i]))[:max_entries])
        assert ids.tolist() == [3 * i for i in kept]
        assert weights.tolist() == [text[i] for i in kept]


def test_entries_without_weight_are_left_out() -> None:
    seqs = [Seq(np.array([5, 1, 5], np.int32), 0), Seq(np.array([0, 2], np.int32), 1), Seq(np.array([6], np.int32), 2)]
    places = plan_layout(CARD, seqs, [OutputSpec("sparse", 1, True)])
    one = job(seqs, places)
    places.arrays(one.memory)["sparse"][:, 0] = [0, 2, 3]
    sparse = one.finisher.result().sparse
    assert sparse is not None
    assert [(ids.tolist(), weights.tolist()) for ids, weights in sparse] == [([5], [2]), ([], []), ([6], [3])]
