"""Memory of requests in one process: waiting, passing, and the order of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from whimbrel.errors import Unavailable
from whimbrel.server.app.request_memory import SMALL_BODY, RequestMemory

LARGE = SMALL_BODY + 1


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Requests that ask for memory, and the order in which they got it."""

    def __init__(self, limit: int) -> None:
        self.memory = RequestMemory(limit)
        self.let_in: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, size: int, tenant: str = "") -> None:
        async def take() -> None:
            await self.memory.take(size, tenant)
            self.let_in.append(name)

        self.tasks[name] = asyncio.create_task(take())
        await settle()


def test_requests_wait_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        line = Line(2 * LARGE)
        for name in "abcd":
            await line.ask(name, LARGE)
        assert line.let_in == ["a", "b"]
        line.memory.give(LARGE)
        await settle()
        assert line.let_in == ["a", "b", "c"]
        line.memory.give(2 * LARGE)
        await settle()
        assert line.let_in == ["a", "b", "c", "d"]
        assert line.memory.used == LARGE

    run(main())


def test_a_small_body_passes_those_that_wait_until_its_own_share_is_full() -> None:
    async def main() -> None:
        line = Line(16 * LARGE)
        await line.ask("all", 16 * LARGE)
        await line.ask("bulk", LARGE)
        await line.ask("query", SMALL_BODY)
        await line.ask("another", SMALL_BODY)
        assert line.let_in == ["all", "query", "another"]
        await line.ask("too many", SMALL_BODY)
        assert "too many" not in line.let_in

    run(main())


def test_small_bodies_that_never_end_hold_up_no_large_one() -> None:
    """Nor one that takes the whole limit, as a body without a length does where the operator's limit is that of a body."""

    async def main() -> None:
        line = Line(16 * LARGE)
        await line.ask("first", SMALL_BODY)
        await line.ask("whole", 16 * LARGE)
        assert await line.memory.take(SMALL_BODY, "") is True
        line.memory.give(SMALL_BODY)  # the first
        await settle()
        assert line.let_in == ["first", "whole"]
        await line.ask("next", 16 * LARGE)
        assert await line.memory.take(SMALL_BODY, "") is True
        line.memory.give(16 * LARGE)
        await settle()
        assert line.let_in[-1] == "next"
        for _ in range(2):
            line.memory.give(SMALL_BODY, passed=True)
        line.memory.give(16 * LARGE)
        assert (line.memory.used, line.memory.passed) == (0, 0)

    run(main())


def test_what_is_above_the_limit_is_let_in_alone() -> None:
    async def main() -> None:
        line = Line(LARGE)
        await line.ask("a", LARGE)
        await line.ask("huge", 10 * LARGE)
        await line.ask("b", LARGE)
        assert line.let_in == ["a"]
        line.memory.give(LARGE)
        await settle()
        assert line.let_in == ["a", "huge"]
        line.memory.give(10 * LARGE)
        await settle()
        assert line.let_in == ["a", "huge", "b"]

    run(main())


def test_the_lines_of_tenants_take_turns() -> None:
    async def main() -> None:
        line = Line(LARGE)
        await line.ask("running", LARGE)
        for number in range(3):
            await line.ask(f"greedy {number}", LARGE, "greedy")
        await line.ask("polite", LARGE, "polite")
        for _ in range(4):
            line.memory.give(LARGE)
            await settle()
        assert line.let_in == ["running", "greedy 0", "polite", "greedy 1", "greedy 2"]

    run(main())


def test_who_leaves_the_line_holds_up_nobody() -> None:
    async def main() -> None:
        line = Line(4 * LARGE)
        await line.ask("a", 2 * LARGE)
        await line.ask("too large for now", 3 * LARGE)
        await line.ask("b", LARGE)
        line.tasks["too large for now"].cancel()
        await settle()
        assert line.let_in == ["a", "b"]
        assert line.memory.used == 3 * LARGE

    run(main())


def test_who_leaves_in_the_moment_of_being_let_in_gives_its_memory_back() -> None:
    async def main() -> None:
        line = Line(LARGE)
        await line.ask("a", LARGE)
        await line.ask("b", LARGE)
        await line.ask("c", LARGE)
        line.memory.give(LARGE)
        line.tasks["b"].cancel()  # its future is done, and its task has not run yet
        await settle()
        assert line.let_in == ["a", "c"]
        assert line.memory.used == LARGE

    run(main())


def test_a_line_that_is_refused_gives_nothing_back_that_it_did_not_hold() -> None:
    async def main() -> None:
        line = Line(LARGE)
        for name in "abc":
            await line.ask(name, LARGE)
        line.memory.refuse_line(Unavailable("the server has stopped."))
        line.tasks["c"].cancel()  # in the moment of the refusal
        await settle()
        with pytest.raises(Unavailable):
            await line.tasks["b"]
        assert line.tasks["c"].cancelled()
        assert line.memory.used == LARGE
        line.memory.give(LARGE)
        assert line.memory.used == 0

    run(main())
