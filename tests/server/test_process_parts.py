"""Channels, shared memory, the board and the backoff, each alone."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel import errors
from whimbrel.engine.engine_request import EngineRequest
from whimbrel.outputs.layout import ArraySlot, ResultLayout
from whimbrel.outputs.pair_scoring import PairScoring
from whimbrel.outputs.requested import OutputSpec
from whimbrel.outputs.stored_vectors import StoredVectors
from whimbrel.server.processes.channel import MAX_MESSAGE, AsyncChannel, Channel, ProtocolError, pair
from whimbrel.server.processes.child_process import CHANNEL_BROKEN, CONTROL_FD
from whimbrel.server.processes.children import Backoff
from whimbrel.server.processes.codec import decode_request, encode_request, pack_entries, unpack_entries, write_arrays
from whimbrel.server.processes.messages import (
    Attach,
    Cancel,
    Failed,
    FromEngine,
    Load,
    ModelOptions,
    Notice,
    Ready,
    ReportEngine,
    Submit,
    ToEngine,
    error_of,
    failed,
)
from whimbrel.server.processes.quarantine import QuarantineList
from whimbrel.server.processes.shared_memory import SegmentPool, StatusBoard, align, allocate, map_memory
from whimbrel.telemetry.logs import LogOptions
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.plan import Options
from whimbrel.types.result import Sparse
from whimbrel.types.scheduling import Scheduling
from whimbrel.types.seq import Seq


def packed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


# Channels


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.data())
def test_messages_survive_any_cut(numbers: list[int], data: st.DataObject) -> None:
    stream = b"".join(packed(Cancel(number)) for number in numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    near, far = pair()
    channel = Channel[ToEngine](far, ToEngine)
    with near:
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            near.sendall(stream[start:end])
    assert list(channel) == [Cancel(number) for number in numbers]
    channel.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", (5).to_bytes(4, "little") + b"hello", packed(Attach(1)), (MAX_MESSAGE + 1).to_bytes(4, "little"), packed(Cancel(1))[:-1] + b"\xc1"],
)  # fmt: skip
def test_what_is_no_message_breaks_the_channel(garbage: bytes) -> None:
    near, far = pair()
    channel = Channel[ToEngine](far, ToEngine)
    with near:
        near.sendall(packed(Cancel(1)) + garbage)
    with pytest.raises(ProtocolError):
        list(channel)
    channel.close()


def test_descriptors_arrive_with_their_messages() -> None:
    near, far = pair()
    sender, receiver = Channel[ToEngine](near, ToEngine), Channel[ToEngine](far, ToEngine)
    for number in range(50):
        fd, _ = allocate(4)
        os.pwrite(fd, number.to_bytes(4, "little"), 0)
        sender.send(Cancel(number), [fd])
        sender.send(Submit(number, 0, 0, memoryview(b""), 0, b"", admitted=False))
    sender.close()
    got: list[int] = []
    for message in receiver:
        if isinstance(message, Cancel):
            fd = receiver.take_fd()
            got.append(int.from_bytes(os.pread(fd, 4, 0), "little"))
            os.close(fd)
    assert got == list(range(50))
    with pytest.raises(ProtocolError, match="descriptor is missing"):
        receiver.take_fd()
    receiver.close()


def test_an_async_channel_sends_what_does_not_fit_at_once() -> None:
    async def main() -> None:
        near, far = pair()
        got: list[FromEngine] = []
        ended: asyncio.Future[ProtocolError | None] = asyncio.get_running_loop().create_future()
        sender = AsyncChannel[ToEngine](near, ToEngine, on_message=lambda _: None, on_end=lambda _: None)
        receiver = AsyncChannel[FromEngine](far, FromEngine, on_message=got.append, on_end=ended.set_result)
        messages = [Failed(i, "c", "x" * 300_000, None, 0.0) for i in range(20)]
        for message in messages:
            sender.send(message)
        while len(got) < 20:
            await asyncio.sleep(0.01)
        assert got == messages
        sender.close()
        assert await ended is None
        receiver.close()

    asyncio.run(main())


def test_errors_travel() -> None:
    for error in (
        errors.TooLong("long.", item=3, part=1, hint=errors.Hint.TRUNCATE),
        errors.Overloaded("full.", retry_after=3.5),
        errors.NonFinite("NaN.", item=0),
        errors.DeadlineExceeded("late."),
        errors.Unavailable("gone.", retry_after=2.0),
    ):
        same = error_of(msgspec.msgpack.decode(msgspec.msgpack.encode(failed(1, error)), type=Failed))
        assert (type(same), str(same), same.param, vars(same)) == (type(error), str(error), error.param, vars(error))
    assert type(error_of(Failed(1, "new_code", "?", None, 0.0))) is errors.WhimbrelError


# Shared memory


def test_a_segment_comes_back_when_the_last_view_is_gone() -> None:
    pool = SegmentPool(64)
    segment = pool.take(10_000)
    assert segment is not None
    vectors = pool.borrow(segment, 64, 3 * 5 * 4).view(np.float32).reshape(3, 5)
    vectors[:] = 7
    row = vectors[1]
    del vectors
    gc.collect()
    other = pool.take(10_000)
    assert other is not segment
    assert row.tolist() == [7] * 5
    del row
    gc.collect()
    assert pool.take(10_000) is segment
    assert pool.dropped() == []


def test_a_pool_makes_no_more_segments_than_it_may() -> None:
    pool = SegmentPool(3)
    held = [pool.take(size) for size in (1, 2**20, 1)]
    assert all(held)
    assert pool.take(1) is None
    assert held[0] is not None
    assert held[1] is not None
    pool.give_back(held[0])
    assert pool.take(1) is held[0]
    pool.drop(held[1])
    assert pool.take(1) is not None
    assert pool.take(1) is None


def test_a_dropped_segment_is_never_lent_again() -> None:
    pool = SegmentPool(64)
    segment = pool.take(100)
    assert segment is not None
    fd = segment.take_fd()
    assert fd is not None
    os.close(fd)
    pool.drop(segment)
    assert pool.dropped() == [segment.number]
    assert pool.take(100) is not segment


def test_two_processes_see_the_same_memory() -> None:
    fd, _ = allocate(4096)
    ours, theirs = map_memory(os.dup(fd), 4096), map_memory(fd, 4096)
    np.frombuffer(ours, np.float32)[:3] = 1, 2, 3
    assert np.frombuffer(theirs, np.float32)[:3].tolist() == [1, 2, 3]
    assert align(1) == align(64) == 64
    assert align(65) == 128


def test_the_board_tells_what_is_on_the_device() -> None:
    board, fd = StatusBoard.create(4, 10)
    reader = StatusBoard(map_memory(fd))
    assert reader.in_flight() == []
    board.beat(5.0, queued=100, small=10, rate=1e4)
    assert (reader.last_beat, reader.queued_tokens, reader.small_tokens, reader.rate) == (5.0, 100, 10, 1e4)
    board.start(2, 6.0, [(0, 1, 77), (1, 0, 78)], 30)
    board.start(0, 7.0, [(0, 0, 79)], 3)
    board.end(0)
    (flight,) = reader.in_flight()
    assert (flight.started, flight.num_tokens) == (6.0, 30)
    assert flight.entries.tolist() == [(0, 1, 77), (1, 0, 78)]
    board.start(2, 8.0, [], 16)  # a warm-up's
    assert len(reader.in_flight()[0].entries) == 0


# Engine processes


@pytest.fixture
def engine_process() -> Iterator[tuple[subprocess.Popen[bytes], Channel[ReportEngine]]]:
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "whimbrel.server.processes.bootstrap", "engine", str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {CONTROL_FD: str(theirs.fileno())},
        )
    control = Channel[ReportEngine](ours, ReportEngine)
    control.send(Load(ModelOptions(None, None, Options()), "engine-0-0", LogOptions()))
    control.send(Notice("proceed"))
    next(message for message in control if isinstance(message, Ready))
    yield process, control
    process.kill()
    process.wait()
    control.close()


def test_F8_an_engine_that_is_sent_nonsense_ends(engine_process: tuple[subprocess.Popen[bytes], Channel[ReportEngine]]) -> None:
    process, control = engine_process
    near, far = pair()
    control.send(Attach(0), [far.detach()])
    with near:
        near.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert process.wait(30) == CHANNEL_BROKEN


def test_an_engine_survives_a_worker_that_is_cut_off(
    engine_process: tuple[subprocess.Popen[bytes], Channel[ReportEngine]],
) -> None:
    process, control = engine_process
    for _ in range(3):
        near, far = pair()
        control.send(Attach(0), [far.detach()])
        with near:
            near.sendall((100).to_bytes(4, "little") + b"half")
    near, far = pair()
    control.send(Attach(1), [far.detach()])
    near.sendall(packed(Cancel(5)))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    near.close()


@pytest.mark.parametrize("kind", ["engine", "worker"])
def test_a_part_that_is_started_by_hand_says_so(kind: str) -> None:
    for arguments in ([kind], [kind, str(os.getpid())], [kind, "1"]):
        command = [sys.executable, "-m", "whimbrel.server.processes.bootstrap", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert ("whimbrel serve" in done.stderr) == (arguments[-1] != "1")


# Suspicion


def text(*ids: int) -> Seq:
    return Seq(np.array(ids, np.int32), 3)


def test_two_crashes_alone_condemn_a_text_and_kills_from_outside_count_less() -> None:
    suspicion = QuarantineList()
    assert suspicion.check([text(1)], 0.0) == (None, [])
    assert suspicion.record_crash(text(1), 1.0, 0.0) is None
    assert suspicion.check([text(1), text(2)], 1.0) == (None, [3])
    assert suspicion.record_crash(text(1), 1.0, 1.0) is not None
    assert suspicion.check([text(1)], 2.0) == (3, [])
    assert suspicion.check([text(2)], 2.0) == (None, [])
    assert [suspicion.record_crash(text(2), 0.25, 0.0) is None for _ in range(8)] == [True] * 7 + [False]


def test_suspicion_ends_with_success_and_with_time() -> None:
    suspicion = QuarantineList()
    suspicion.record_crash(text(1), 1.0, 0.0)
    suspicion.clear(text(1))
    assert suspicion.check([text(1)], 0.0) == (None, [])
    assert suspicion.record_crash(text(1), 1.0, 0.0) is None
    assert suspicion.record_crash(text(1), 1.0, 601.0) is None
    other = QuarantineList()
    other.add(suspicion.record_crash(text(1), 1.0, 602.0) or b"", 602.0)
    assert other.check([text(1)], 700.0)[0] == 3
    assert other.check([text(1)], 1300.0) == (None, [])


def test_what_is_over_is_forgotten() -> None:
    suspicion = QuarantineList()
    text = Seq(np.arange(5, dtype=np.int32), 0)
    suspicion.add(suspicion.record_crash(text, 2.0, 0.0) or b"", 0.0)
    suspicion.record_crash(Seq(np.arange(6, dtype=np.int32), 0), 1.0, 0.0)
    assert suspicion.check([text], 10.0) == (0, [])
    assert suspicion.check([text], 601.0) == (None, [])
    assert not suspicion.entries


def test_what_is_remembered_is_bounded() -> None:
    suspicion = QuarantineList()
    for number in range(3000):
        suspicion.record_crash(text(number), 1.0, 0.0)
        suspicion.add(number.to_bytes(16, "little"), 0.0)
    assert len(suspicion.check([text(number) for number in range(3000)], 1.0)[1]) == 1024


# Backoff


def test_a_process_that_never_comes_up_is_waited_for_longer_each_time() -> None:
    backoff = Backoff()
    delays = [backoff.died(lived=None) for _ in range(5000)]  # two days of them
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[9] == delays[-1] == 30
    assert backoff.failing
    backoff.ready()
    assert not backoff.failing
    assert backoff.died(lived=None) == 0


def test_a_few_deaths_in_quick_succession_cost_no_delay() -> None:
    backoff = Backoff()
    assert [backoff.died(lived=0.1) for _ in range(10)] == [0] * 10
    assert not backoff.failing
    assert backoff.died(lived=0.1) > 0
    for _ in range(4):
        backoff.died(lived=1.0)
    assert backoff.failing
    assert backoff.died(lived=100.0) == 0
    assert not backoff.failing


def test_deaths_that_are_explained_do_not_count() -> None:
    backoff = Backoff()
    for _ in range(12):
        backoff.died(lived=0.1)
    backoff.explained()
    assert [backoff.died(lived=0.1) for _ in range(10)] == [0] * 10
    assert not backoff.failing


def test_listening_is_exclusive() -> None:
    from whimbrel.cli.serve import listen

    with listen("127.0.0.1", 0) as listener, pytest.raises(errors.SetupError, match="cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(errors.SetupError):
        listen("no.such.host.invalid", 0)


# Seqs on their way


def through_the_codec(request: EngineRequest) -> EngineRequest:
    header, arrays, num_bytes = encode_request(request, request.scheduling)
    memory = np.zeros(num_bytes, np.uint8)
    write_arrays(arrays, memory)
    with pytest.raises(msgspec.ValidationError, match=r"buffer|offset"):
        decode_request(header, memory[:-64].data)
    return decode_request(header, memory.data)


def test_seqs_arrive_as_they_were_sent() -> None:
    seqs = [
        Seq(np.array([1, 2, 3], np.int32), 0, prompt_tokens=2, type_id=1, tower=1, prefix_tokens=2),
        Seq(np.array([4], np.int32), 1, num_attended=1, is_query=True, spans_S2=np.array([[0, 1]], np.int32)),
        Seq(np.array([5, 6, 7, 8], np.int32), 2, second_text_start=2, spans_S2=np.empty((0, 2), np.int32)),
        Seq(np.array([9, 9], np.int32), 3, spans_S2=np.array([[0, 1], [1, 2]], np.int32)),
    ]
    slots = {
        "dense": ArraySlot(OutputSpec("dense", 8, True), 0, np.arange(5), None),
        "sparse": ArraySlot(OutputSpec("sparse", 1, False, 3), 128, np.array([0, 2, 2, 3, 5]), np.arange(5, dtype=np.int32)),
    }
    layout = ResultLayout(slots, 148, OutputSpec("token_dense", 8, False, 0, True))  # pyright: ignore
    scheduling = Scheduling(priority=3, deadline=7.5, tenant="key1", suspects={1: 2})
    request = EngineRequest(seqs, layout, 1.5, 0.25, scheduling=scheduling, num_truncated=2)
    received = through_the_codec(request)
    for sent, got in zip(seqs, received.seqs, strict=True):
        for name in Seq.__slots__:
            assert np.array_equal(getattr(sent, name), getattr(got, name)), name
    for sent, got in zip(layout.by_name.values(), received.layout.by_name.values(), strict=True):
        assert (astuple(sent.spec), sent.start) == (astuple(got.spec), got.start)
        assert np.array_equal(sent.offsets_N1, got.offsets_N1)
        assert (sent.ids_P is None) == (got.ids_P is None)
    assert received.layout.num_bytes == layout.num_bytes
    assert astuple(received.layout.dynamic_output) == astuple(layout.dynamic_output)  # pyright: ignore
    assert received.scheduling == scheduling
    for name in ("received", "tokenize", "num_tokens", "num_truncated"):
        assert getattr(received, name) == getattr(request, name), name


def test_pairs_arrive_as_they_were_sent() -> None:
    stored = (
        StoredVectors(np.arange(12, dtype=np.int8).reshape(3, 4), np.array([0, 1, 3])),
        StoredVectors(np.ones((2, 1), np.float32), np.array([0, 2]), np.array([4, 9], np.int32)),
    )
    finish = PairScoring("multi_vector", "maxsim", np.array([0, 0], np.int32), np.array([1, 2], np.int32), stored, True)
    finish = replace(finish, poolings=(TokenPooling(2), TokenPooling(1.5, 0)), query_poolings=(TokenPooling(3),))
    slots = {"multi_vector": ArraySlot(OutputSpec("multi_vector", 4, True), 0, np.array([0, 3]), None)}
    request = EngineRequest([Seq(np.array([1, 2, 3], np.int32), 0)], ResultLayout(slots, 48), 0.0, finish=finish)
    received = through_the_codec(request)
    assert isinstance(received.finish, PairScoring)
    for name in ("output", "similarity", "explain", "poolings", "query_poolings"):
        assert getattr(received.finish, name) == getattr(finish, name)
    assert np.array_equal(received.finish.queries_P, finish.queries_P)
    assert np.array_equal(received.finish.documents_P, finish.documents_P)
    for sent, got in zip(stored, received.finish.stored, strict=True):
        assert all(np.array_equal(*arrays) for arrays in zip(sent.arrays, got.arrays, strict=True))
        assert sent.rows_XD.dtype == got.rows_XD.dtype
    assert received.response.num_bytes == request.response.num_bytes


def test_entries_arrive_as_they_were_sent() -> None:
    sparse = Sparse(np.array([3, 9, 4], np.int32), np.array([0.5, 2, 1], np.float32), np.array([0, 2, 2, 3]))
    got = unpack_entries(memoryview(pack_entries(sparse)), 3)
    for text in range(3):
        assert all(np.array_equal(*columns) for columns in zip(got[text], sparse[text], strict=True))
