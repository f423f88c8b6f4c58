"""Verbs of engines and clients say that they cut texts, unless the call asked for it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import whimbrel
from serving import Server
from whimbrel import AsyncClient, AsyncEngine, Client, Engine
from whimbrel.errors import TooLong, TruncationWarning

pytestmark = pytest.mark.filterwarnings("error::whimbrel.TruncationWarning")

LONG = "far " * 400
TEXTS = [LONG, "short", LONG]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def caught(run: Callable[[], Any]) -> list[Any]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return found


def test_the_name_of_the_warning() -> None:
    assert whimbrel.TruncationWarning is TruncationWarning
    assert issubclass(TruncationWarning, UserWarning)


@pytest.mark.parametrize("kind", ["engine", "client", "openai"])
def test_a_call_that_cuts_texts_warns_once(kind: str, engine: Engine, server: Server) -> None:
    dialect: Any = "openai" if kind == "openai" else "whimbrel"
    with Client(server.url, dialect=dialect, max_items=2) as client:
        target = engine if kind == "engine" else client
        (warned,) = caught(lambda: target.embed(TEXTS))
        assert str(warned.message).startswith("2 texts were cut to the model's limit; pass truncate=True")
        assert warned.category is TruncationWarning
        assert warned.filename == __file__, "the line of the caller"
        (warned,) = caught(lambda: target.embed(LONG))
        assert str(warned.message).startswith("1 text was cut")
        assert [str(each.message)[:12] for each in caught(lambda: target.encode(TEXTS, "dense"))] == ["2 texts were"]
        if kind != "openai":
            assert len(caught(lambda: target.score("far", TEXTS))) == 1
        target.embed(["short"])
        expected = engine.embed(TEXTS, truncate=True)
        assert np.allclose(target.embed(TEXTS, truncate=True), expected, atol=1e-6)
        if kind == "openai":
            return
        assert np.allclose(target.embed(TEXTS, truncate="right"), expected, atol=1e-6)
        target.embed(TEXTS, max_tokens=9)
        target.embed(TEXTS, truncate="left")
        with pytest.raises(TooLong):
            target.embed(TEXTS, truncate="never")


def test_asyncio(engine: Engine, server: Server) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, max_items=2) as client:
            for target in (AsyncEngine(engine), client):
                with pytest.warns(TruncationWarning, match="2 texts were cut") as found:
                    await target.embed(TEXTS)
                assert [each.filename for each in found] == [__file__]
                await target.embed(TEXTS, truncate=True)

    asyncio.run(run())


def test_a_program_that_makes_it_an_error(engine: Engine) -> None:
    with pytest.raises(TruncationWarning):
        engine.embed(TEXTS)
    assert engine.embed("short").shape == (384,)
