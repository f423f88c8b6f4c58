"""Facts that a client reads from its servers: models, health and tokens; and one client for several models."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from exchanges import Small
from scripted_server import ScriptedServer, http
from whimbrel import AsyncClient, AsyncEngine, Client, errors
from whimbrel.types.request import TokenizeRequest

TEXTS = ["A whimbrel is a wader.", "a", "雪 and 🙂"]


def test_models_info_and_health(small: Small) -> None:
    """Models are listed by all their names, facts are those of /info, and a ready server says so."""
    with Client(small.url) as client:
        assert [each.name for each in client.models()] == list(small.engines)
        assert client.models()[0].max_length == small.engines["dense"].plan.max_length
        found = client.info()
        assert [each["plan"]["served_name"] for each in found["models"]] == list(small.engines)
        (health,) = client.health()
        assert (health.url, health.ready, health.status) == (small.url, True, "ok")
    with Client(f"{small.url}/v1", dialect="openai") as client:
        assert [each.name for each in client.models()] == list(small.engines)
        assert client.health()[0].ready
        with pytest.raises(errors.InvalidRequest, match="the dialect openai has no 'info'"):
            client.info()


@pytest.mark.parametrize("dialect", ["whimbrel", "tei"])
def test_tokens_are_those_of_the_engine(dialect: str, small: Small) -> None:
    """Tokens are those that the model runs, special tokens included."""
    expected = asyncio.run(AsyncEngine(small.engines["dense"]).tokenize(TokenizeRequest(TEXTS)))
    with Client(small.url, model="dense", dialect=dialect) as client:
        for found, tokens in zip(client.tokenize(TEXTS), expected, strict=True):
            np.testing.assert_array_equal(found.ids, tokens.ids_T)
            np.testing.assert_array_equal(found.special, tokens.special_T)
            assert len(found.texts) == len(found) == len(tokens.ids_T)
        (one,) = client.tokenize(TEXTS[0])
        assert one.ids.tolist() == expected[0].ids_T.tolist()
        assert len(client.tokenize(TEXTS * 40)) == 120
        assert client.tokenize([]) == []
        with pytest.raises(errors.InvalidRequest):
            client.tokenize([3])  # pyright: ignore[reportArgumentType]


def test_one_client_for_several_models(small: Small) -> None:
    """A client for another model shares the connections, which only the first client closes."""
    with Client(small.url, model="dense") as client:
        ranker, classes = client.for_model("ranker"), client.for_model("classes")
        np.testing.assert_array_equal(ranker.score("a", TEXTS), small.engines["ranker"].score("a", TEXTS))
        np.testing.assert_array_equal(classes.classify(TEXTS).scores_NC, small.engines["classes"].classify(TEXTS).scores_NC)
        with ranker:
            pass
        np.testing.assert_array_equal(client.embed(TEXTS), small.engines["dense"].embed(TEXTS))
        np.testing.assert_array_equal(classes.classify(TEXTS).scores_NC, small.engines["classes"].classify(TEXTS).scores_NC)
        with pytest.raises(errors.ModelNotFound):
            client.for_model("nobody").embed("a")
    with pytest.raises(errors.Unavailable):
        classes.classify("a")
    with pytest.raises(errors.Unavailable):
        client.health()


def test_the_async_client_has_them_too(small: Small) -> None:
    """The client for asyncio has the same verbs."""

    async def ask() -> None:
        async with AsyncClient(small.url, model="dense") as client:
            assert [each.name for each in await client.models()] == list(small.engines)
            assert (await client.info())["models"]
            assert [each.ready for each in await client.health()] == [True]
            assert len(await client.tokenize(TEXTS)) == 3
            async with client.for_model("ranker") as ranker:
                found = await ranker.score("a", TEXTS)
            np.testing.assert_array_equal(found, small.engines["ranker"].score("a", TEXTS))
            np.testing.assert_array_equal(await client.embed(TEXTS), small.engines["dense"].embed(TEXTS))

    asyncio.run(ask())


def test_health_of_servers_that_are_not_ready(small: Small) -> None:
    """A server that is starting, broken or away is told as such, without retries and without an error."""
    starting = http(503, b'{"error":{"message":"loading.","type":"overloaded_error","param":null,"code":"unavailable"}}')
    with ScriptedServer(lambda *_: starting) as loading, ScriptedServer(lambda *_: b"garbage\r\n\r\n") as broken:
        urls = [small.url, loading.url, broken.url, "http://127.0.0.1:9"]
        with Client(urls) as client:
            ready, first, second, third = client.health()
            assert [each.url for each in (ready, first, second, third)] == urls
            assert [each.ready for each in (ready, first, second, third)] == [True, False, False, False]
            assert "loading" in first.status
            assert second.status.startswith("not reached: ")
            assert third.status.startswith("not reached: ")
            assert loading.num_requests == 1

        async def ask() -> list[bool]:
            async with AsyncClient(urls) as client:
                return [each.ready for each in await client.health()]

        assert asyncio.run(ask()) == [True, False, False, False]


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"data": [{"id": 3}]}', b"null", b"\xff"])
def test_answers_that_cannot_be_read(answer: bytes) -> None:
    """An answer that is no list of models, or no object of facts, is an error that says so."""
    with ScriptedServer(lambda *_: http(200, answer)) as server, Client(server.url, max_retries=0) as client:
        with pytest.raises(errors.WhimbrelError, match="cannot be read"):
            client.models()
        if answer not in (b"{}", b'{"data": [{"id": 3}]}'):
            with pytest.raises(errors.WhimbrelError, match="cannot be read"):
                client.info()
        with pytest.raises(errors.WhimbrelError):
            client.tokenize("a")
