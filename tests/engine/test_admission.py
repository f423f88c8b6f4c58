from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.admission import QueueState, ThroughputEstimate, admit
from whimbrel.errors import Overloaded
from whimbrel.server.processes.remote_engine import RemoteEngine, num_characters
from whimbrel.server.processes.replica import Replica
from whimbrel.server.processes.shared_memory import StatusBoard
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, Plan, make_plan
from whimbrel.types.request import Request
from whimbrel.types.scheduling import ORDINARY, Scheduling

EMPTY = QueueState(tokens=0, ahead=10**9, num_bytes=10**9, rate=1.0)
SOME = QueueState(tokens=600, ahead=500, num_bytes=5000, rate=100.0)


@pytest.fixture(scope="module")
def plan(minilm: Path) -> Plan:
    options = Options(max_queue_tokens=1000, max_queue_seconds=30.0, max_queue_bytes=10_000)
    return make_plan(options, read_card(minilm, "all-MiniLM-L6-v2"), Hardware(num_cores=1))


def refused(
    plan: Plan,
    queue: QueueState,
    *,
    tokens: int = 10,
    num_bytes: int = 10,
    small: bool = False,
    returns: bool = False,
    jitter: float = 0.0,
) -> str:
    try:
        admit(plan, queue, tokens=tokens, num_bytes=num_bytes, small=small, returns=returns, jitter=jitter)
    except Overloaded as error:
        return str(error)
    return ""


def test_every_bound_is_kept(plan: Plan) -> None:
    assert not refused(plan, SOME)
    assert not refused(plan, replace(SOME, ahead=1000))
    assert "the queue takes 1,000" in refused(plan, replace(SOME, ahead=1001))
    assert not refused(plan, replace(SOME, tokens=1990))
    assert "the queue takes 1,000" in refused(plan, replace(SOME, tokens=1991))
    assert "wait for about 49 s, the limit is 30 s" in refused(plan, replace(SOME, rate=10.0))
    assert not refused(plan, replace(SOME, rate=0.0))
    assert "5,000 bytes, the limit is 10,000" in refused(plan, SOME, num_bytes=5001)
    assert not refused(plan, SOME, num_bytes=15_000, small=True)
    assert refused(plan, SOME, num_bytes=15_001, small=True)


def test_a_request_that_comes_back_finds_room_that_others_do_not(plan: Plan) -> None:
    full = QueueState(tokens=990, ahead=1001, num_bytes=9_991, rate=20.0)
    for wrong in ({"ahead": 2001}, {"tokens": 1991}, {"num_bytes": 19_991}, {"rate": 10.0}):
        assert not refused(plan, full, returns=True)
        assert refused(plan, full)
        assert refused(plan, replace(full, **wrong), returns=True)


def test_what_a_request_takes_itself_is_no_wait(plan: Plan) -> None:
    few = QueueState(tokens=5, ahead=990, num_bytes=0, rate=10.0)
    assert not refused(plan, few, tokens=985)
    assert "wait for about 34 s" in refused(plan, replace(few, ahead=990), tokens=650)


def test_where_nothing_waits_everything_is_admitted(plan: Plan) -> None:
    assert not refused(plan, EMPTY, tokens=10**9, num_bytes=10**9)


@given(st.integers(1, 10**9), st.floats(0, 1e6), st.floats(0, 1))
def test_retry_after_is_the_expected_wait_within_reason(ahead: int, rate: float, jitter: float) -> None:
    plan = Plan("m", (), "cpu", "float32", 1, 512, 256, 1, 1.0, 1, 1, matryoshka=False, document_cache_bytes=0)
    with pytest.raises(Overloaded) as caught:
        admit(plan, replace(SOME, ahead=ahead + 1, rate=rate), tokens=1, num_bytes=0, small=False, jitter=jitter)
    wait = min(40.0, max(1.0, (ahead + 1) / (rate or 10_000)))
    assert caught.value.retry_after == pytest.approx(wait * (1 + jitter / 2))
    assert 1 <= caught.value.retry_after <= 60


def test_the_rate_is_that_of_the_whole_engine_while_it_is_busy() -> None:
    rate = ThroughputEstimate()
    assert rate.value == 0
    rate.begin(10.0)
    rate.begin(10.5)  # two lanes
    rate.end(11.0, 100)
    rate.end(12.0, 100)
    assert rate.value == pytest.approx(100, rel=0.01)
    rate.begin(1000.0)  # it was idle in between
    rate.end(1001.0, 100)
    assert rate.value == pytest.approx(100, rel=0.01)
    rate.begin(1001.0)
    rate.end(1002.0, 0)  # a batch that failed
    assert rate.value == pytest.approx(75, rel=0.02)
    rate.reset()
    assert rate.value == 0


def test_half_of_the_rate_is_from_the_last_64_batches() -> None:
    rate, now = ThroughputEstimate(), 0.0
    for tokens in [100] * 1000 + [300] * 64:
        rate.begin(now)
        now += 1.0
        rate.end(now, tokens)
    assert rate.value == pytest.approx(200, rel=0.01)


@pytest.fixture
def remote(minilm: Path) -> RemoteEngine:
    card = read_card(minilm, "all-MiniLM-L6-v2")
    plan = make_plan(Options(max_queue_tokens=10_000), card, Hardware(num_cores=1))
    return RemoteEngine(0, card, plan, minilm, replicas=[Replica(8, lambda _: None)], on_crash=lambda _: None)


def up(remote: RemoteEngine, *, queued: int, small: int) -> None:
    """Give the model an engine whose board says this."""
    board, _ = StatusBoard.create(1, 1)
    board.beat(0.0, queued=queued, small=small, rate=0.0)
    remote._replicas = [SimpleNamespace(up=True, down=None, board=board)]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_worker_refuses_before_it_tokenises(remote: RemoteEngine) -> None:
    bulk = Request(["word " * 500] * 10)
    remote._check_admission(bulk, ORDINARY)
    up(remote, queued=11_000, small=0)
    remote._check_admission(Request(["a"]), ORDINARY)
    remote._check_admission(bulk, Scheduling(priority=-1))
    remote._check_admission(bulk, Scheduling(tenant="key1"))
    with pytest.raises(Overloaded):
        remote._check_admission(bulk, ORDINARY)
    up(remote, queued=11_000, small=11_000)
    with pytest.raises(Overloaded):
        remote._check_admission(Request(["a"]), ORDINARY)
    up(remote, queued=21_000, small=0)
    with pytest.raises(Overloaded):
        remote._check_admission(bulk, Scheduling(tenant="key1"))


def test_a_query_that_stands_in_many_pairs_is_estimated_once() -> None:
    query = "query " * 50
    assert num_characters(Request([(query, "a")])) == 301
    assert num_characters(Request([(query, f"document {i}") for i in range(10)])) == 400
    assert num_characters(Request([(query, np.ones(384, np.float32))])) == 300


def test_hypotheses_and_labels_are_read_with_every_text() -> None:
    assert num_characters(Request(["ab", "c"])) == 3
    assert num_characters(Request(["ab", "c"], hypotheses=("one", "three"))) == 2 * 3 + 2 * 8
    assert num_characters(Request(["ab", "c"], labels=("bird", "place"))) == 3 + 2 * 9
