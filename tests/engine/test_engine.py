"""The engine's promises: every request is answered once, whatever its batch-mates do. A scripted runner stands in for the model."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from scripted_runner import ScriptedRunner, block, ids, install
from texts import TEXTS
from whimbrel import AsyncEngine, Engine
from whimbrel.checkpoint.load_progress import counting_bytes
from whimbrel.checkpoint.locate import resolve_checkpoint
from whimbrel.errors import ComputeError, InvalidRequest, NonFinite, Overloaded, TooLarge, TooLong, Unavailable
from whimbrel.model.kernels import team
from whimbrel.types.request import Request


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedRunner]:
    return install(monkeypatch)


def test_many_threads_get_their_own_answers(engine: Engine) -> None:
    expected = engine.embed(TEXTS[20:60])

    def work(thread: int) -> bool:
        order = np.random.default_rng(thread).permutation(40)
        chosen = order[: 1 + thread * 2]
        return np.array_equal(engine.embed([TEXTS[20 + i] for i in chosen]), expected[chosen])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_a_failing_text_fails_alone(runner: type[ScriptedRunner]) -> None:
    with Engine() as engine:
        blocked = block(engine, runner)  # so that the rest is batched together
        others = [engine.submit(ids(word)) for word in range(1000, 1031)]
        bad = (runner.ERROR, runner.FATAL, runner.COLLECT_ERROR, runner.INFINITY)
        culprits = [engine.submit(ids(word)) for word in bad]
        mixed = engine.submit(ids(1000, runner.INFINITY, 1001))
        runner.gate.set()
        assert all(future.result(30).dense[0, 1] == 200 for future in blocked)
        assert [future.result(30).dense[0, 0] for future in others] == list(range(1000, 1031))
        kinds = [type(future.exception(30)) for future in culprits]
        assert kinds == [ComputeError, ComputeError, ComputeError, NonFinite]
        assert "scripted" not in str(culprits[0].exception())
        error = mixed.exception(30)
        assert isinstance(error, NonFinite)
        assert error.param == "input[1]"
        assert max(runner.launched) > 1
        assert engine.ready
        assert engine.run(ids(77)).dense[0, 0] == 77
        assert engine.queued_tokens == 0


def test_a_request_that_fails_in_two_lanes_at_once_is_answered_once(runner: type[ScriptedRunner]) -> None:
    runner.barrier = threading.Barrier(2)
    with Engine(max_batch_tokens=3) as engine:
        if engine.plan.num_lanes != 2:
            pytest.skip("written for two lanes")
        for _ in range(300):
            future = engine.submit(Request([np.full(200, runner.BOTH, np.int64)] * 2))
            assert isinstance(future.exception(30), ComputeError)
            assert engine.ready
        assert engine.run(ids(77)).dense[0, 0] == 77


@pytest.mark.parametrize("where", ["init_thread", "collector"])
def test_a_thread_that_dies_takes_the_engine_with_it(
    where: str, runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a thread leaves no caller waiting."""
    if where == "init_thread":
        monkeypatch.setattr(runner, "init_thread", lambda _: 1 / 0)
        with pytest.raises(Unavailable):
            Engine()
        return
    engine = Engine()
    waiting = block(engine, runner)
    later = engine.submit(ids(*range(1000, 1010)))
    monkeypatch.setattr("whimbrel.engine.lanes.finite_seqs", lambda *_: 1 / 0)
    runner.gate.set()
    assert all(isinstance(future.exception(30), Unavailable) for future in waiting)
    assert isinstance(later.exception(30), Unavailable)
    assert not engine.ready
    with pytest.raises(Unavailable):
        engine.submit(ids(1))
    engine.close()


def test_an_interrupted_call_drops_its_work(runner: type[ScriptedRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine() as engine:
        blocked = block(engine, runner)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.run(ids(*range(1000, 1100)))
        assert engine.queued_tokens == 0
        runner.gate.set()
        wait(blocked, 30)


def test_a_forked_child_is_told() -> None:
    program = """
import os, warnings
warnings.simplefilter("ignore")
from whimbrel import Engine
from whimbrel.errors import Unavailable
engine = Engine()
child = os.fork()
if child == 0:
    try:
        engine.embed("a")
    except Unavailable as error:
        os._exit(7 if "fork" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert engine.embed("a").shape == (384,)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_engine_that_is_not_closed_does_not_hold_up_the_interpreter() -> None:
    program = "from whimbrel import Engine; engine = Engine(); engine.embed(['word ' * 200] * 10); print('done')"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    assert done.stdout == b"done\n"


def test_comparing_goes_on_while_the_interpreter_ends() -> None:
    """Python ends its pools of threads before the engine's own end, and what was accepted is answered."""
    program = """
import atexit
from whimbrel import Engine
from whimbrel.types.request import Request

engine = Engine()
futures = [engine.submit(Request([("a", f"{i} " * 50)], ("scores",))) for i in range(50)]
atexit.unregister(engine.close)
atexit.register(lambda: print(sum(future.done() and future.exception() is None for future in futures)))
atexit.register(engine.close)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"50\n", b"")


def test_the_next_batch_is_launched_before_the_last_is_collected(runner: type[ScriptedRunner]) -> None:
    with Engine(max_batch_tokens=3) as engine:
        lanes = engine.plan.num_lanes
        runner.launched.clear()
        runner.collect_gate.clear()
        future = engine.submit(ids(*range(1000, 1000 + 4 * lanes)))
        for _ in range(3 * lanes):  # the warm-up's launches are counted too
            assert runner.seen.acquire(timeout=30)
        while len(runner.launched) < 2 * lanes:
            assert runner.seen.acquire(timeout=30)
        assert not future.done()
        runner.collect_gate.set()
        assert future.result(30).dense[:, 0].tolist() == list(range(1000, 1000 + 4 * lanes))


def test_cancelled_work_does_not_run(runner: type[ScriptedRunner]) -> None:
    with Engine() as engine:
        blocked = block(engine, runner)
        waiting = engine.submit(ids(*range(1000, 1100)))
        assert waiting.cancel()
        assert engine.queued_tokens == 0
        runner.gate.set()
        wait(blocked, 30)
        with pytest.raises(CancelledError):
            waiting.result(30)
        assert engine.run(ids(5)).num_tokens == 3
        assert sum(runner.launched) == engine.plan.num_lanes + 1


def test_overload_is_refused_at_the_door(runner: type[ScriptedRunner]) -> None:
    with Engine(max_queue_tokens=30) as engine:
        running = block(engine, runner)
        queued = [engine.submit(ids(*[1000] * 10))]
        with pytest.raises(Overloaded, match="30 tokens wait already; the queue takes 30") as caught:
            engine.submit(ids(*[1] * 10))
        assert caught.value.retry_after >= 1
        queued += [engine.submit(ids(1)) for _ in range(5)]  # each has its turn soon
        with pytest.raises(Overloaded):
            queued += [engine.submit(ids(1)) for _ in range(6)]  # but there is an end
        runner.gate.set()
        for future in (*running, *queued):
            future.result(30)


def test_a_closed_engine_frees_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the threads that help its lanes stay."""
    monkeypatch.setattr(team, "_started", set[int]())
    engine = Engine(dtype="float32")
    engine.embed("a")
    runner = weakref.ref(engine._lanes._runner)
    engine.close()
    del engine
    gc.collect()
    assert runner() is None


def test_closing_finishes_what_was_accepted(runner: type[ScriptedRunner]) -> None:
    engine = Engine()
    futures = [engine.submit(ids(runner.GATE, 1000 + i)) for i in range(20)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    while engine.ready:
        time.sleep(0.01)
    runner.gate.set()
    closing.join()
    engine.close()
    assert [future.result(0).dense[1, 0] for future in futures] == list(range(1000, 1020))
    assert not engine.ready
    with pytest.raises(Unavailable):
        engine.submit(ids(1))


def test_bad_arguments(engine: Engine) -> None:
    for dimensions in (0, -1, 10**9, 383):
        with pytest.raises(InvalidRequest, match="option matryoshka"):
            engine.embed("a", dimensions=dimensions)
    assert engine.embed("a", dimensions=384).shape == (384,)
    with pytest.raises(InvalidRequest, match="no prompt 'query'"):
        engine.embed("a", prompt="query")
    with pytest.raises(InvalidRequest, match="truncate"):
        engine.embed("a", truncate="middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TooLong):
        engine.embed("word " * 300, truncate=False)
    for dimensions in ("8", True, 3.5):
        with pytest.raises(InvalidRequest, match="must be an integer"):
            engine.embed("a", dimensions=dimensions)  # pyright: ignore[reportArgumentType]
    for wrong in (5, None):
        with pytest.raises(InvalidRequest, match="string or strings"):
            engine.embed(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="prompt: must be a string"):
        engine.embed("a", prompt=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="prompt: holds a lone surrogate"):
        engine.embed("a", prompt="\ud800 x")
    with pytest.raises(InvalidRequest):
        engine.embed(["a", 3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest):
        engine.embed(b"bytes")  # pyright: ignore[reportArgumentType]


def test_matryoshka_by_option_and_limits_of_a_request() -> None:
    with Engine(matryoshka=True, max_request_tokens=10) as engine:
        cut = engine.embed("a", dimensions=5)
        full = engine.embed("a")
        assert np.allclose(cut, full[:5] / np.linalg.norm(full[:5]), atol=1e-6)
        for dimensions in (0, 385):
            with pytest.raises(InvalidRequest, match="1 to 384"):
                engine.embed("a", dimensions=dimensions)
        with pytest.raises(TooLarge, match="12 tokens; the limit is 10"):
            engine.embed(["a"] * 4)


def test_one_batch_mixes_dimensions_and_normalisation() -> None:
    with Engine(matryoshka=True) as engine:
        texts = TEXTS[30:40]
        alone = [engine.embed(text, dimensions=10 * (i + 1), normalize=i % 2 == 0) for i, text in enumerate(texts)]
        requests = [Request([text], dimensions=10 * (i + 1), normalize=i % 2 == 0) for i, text in enumerate(texts)]
        futures = [engine.submit(request) for request in requests * 3]
        for i, future in enumerate(futures):
            assert np.array_equal(future.result().dense[0], alone[i % 10])


def test_async_engine(engine: Engine) -> None:
    async def main() -> None:
        model = AsyncEngine(engine)
        texts = TEXTS[20:60]
        vectors = await asyncio.gather(*(model.embed(text) for text in texts))
        assert np.array_equal(np.stack(vectors), engine.embed(texts))
        assert (await model.embed(["a", "b"])).shape == (2, 384)
        with pytest.raises(InvalidRequest):
            await model.embed(["a"], dimensions=3)

    asyncio.run(main())


def test_cancelling_an_awaited_request_drops_it(runner: type[ScriptedRunner]) -> None:
    async def main() -> None:
        engine = Engine()
        async with AsyncEngine(engine) as model:
            blocked = block(engine, runner)
            waiting = asyncio.ensure_future(model.run(ids(*range(1000, 1100))))
            while model.queued_tokens != 300:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while model.queued_tokens:
                await asyncio.sleep(0.01)
            runner.gate.set()
            await asyncio.gather(*map(asyncio.wrap_future, blocked))
        with pytest.raises(Unavailable):
            await model.run(ids(1))

    asyncio.run(main())


def test_what_is_awaited_is_checked_and_tokenised_alike(engine: Engine) -> None:
    """Small requests are tokenised in the event loop, others in threads; the answers are the same."""
    many = TEXTS[20:120]

    async def main() -> None:
        async with AsyncEngine() as model:
            assert np.array_equal(await model.embed(many), engine.embed(many))
            assert np.array_equal(await model.embed(many[:3]), engine.embed(many[:3]))
            for texts in (["a", 1], ["a"] * 100 + [None]):
                with pytest.raises(InvalidRequest, match="must be a string"):
                    await model.embed(texts)  # pyright: ignore[reportArgumentType]
        for texts in (many, many[:3]):
            with pytest.raises(Unavailable):
                await model.embed(texts)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_lanes_yield_to_what_somebody_waits_for(engine: Engine) -> None:
    """Without that, refusing a request took 7 ms on a machine whose cores are all busy, and with it 3."""
    nice = {thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threading.enumerate()}
    assert nice["whimbrel-lane-0"] == min(19, nice["whimbrel-collector"] + 5)
    assert nice["whimbrel-express"] == nice["whimbrel-collector"]


def test_the_result_says_what_it_took(engine: Engine) -> None:
    result = engine.run(Request(["a", "word " * 300]))
    assert (result.num_tokens, result.num_truncated) == (3 + 256, 1)
    assert 0 < result.timings.compute <= result.timings.total * 2
    assert result.timings.tokenize > 0


def test_progress_is_told_by_phase() -> None:
    phases: list[str] = []
    read: list[tuple[int, int]] = []
    with counting_bytes(lambda done, total: read.append((done, total))):
        Engine(progress=phases.append).close()
    if "trying products" in phases:  # kernels of our own need no trials
        phases.remove("trying products")
    assert phases == [
        "finding the checkpoint", "reading the card", "importing PyTorch", "loading the tokenizer", "loading the weights",
        "warming up",
    ]  # fmt: skip
    size = (resolve_checkpoint(None).folder / "model.safetensors").stat().st_size
    assert {total for _, total in read} == {size}
    assert read == sorted(read)
    assert len(read) <= 200
    assert 0.95 * size < read[-1][0] <= size  # the header is no tensor, and few tensors are left out
