"""Arguments of the verbs: accepted values, and errors with the name and the index that the caller knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from checkpoints.rerankers import qwen, write_reranker
from process_boundary import run_over_a_channel
from whimbrel import AsyncEngine, Engine
from whimbrel.errors import InvalidRequest, Location, NonFinite, TooLarge, TooLong
from whimbrel.tokenizer.validation import MAX_CHARACTERS
from whimbrel.types.request import Request
from whimbrel.types.scheduling import Scheduling


@dataclass(frozen=True)
class Models:
    m3: Engine
    ranker: Engine
    tagger: Engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    write_m3(folder / "m3")
    write_classifier(folder / "ranker", "bert", num_labels=1)
    write_classifier(folder / "tagger", "bert", "ForTokenClassification", num_labels=3)
    m3, ranker, tagger = (Engine(str(folder / name), dtype="float32") for name in ("m3", "ranker", "tagger"))
    with m3, ranker, tagger:
        yield Models(m3, ranker, tagger)


@dataclass(frozen=True)
class Verb:
    """Verb of one of the models; `name` is the argument for texts, as errors name it."""

    model: str
    ask: Callable[[Any, Any], Any]
    name: str = "input"


VERBS = {
    "embed": Verb("m3", lambda engine, texts: engine.embed(texts)),
    "sparse": Verb("m3", lambda engine, texts: engine.sparse(texts)),
    "multi_vector": Verb("m3", lambda engine, texts: engine.multi_vector(texts)),
    "encode": Verb("m3", lambda engine, texts: engine.encode(texts, ("dense", "sparse"))),
    "queries": Verb("ranker", lambda engine, texts: engine.score(texts, ["a", "b"]), "queries"),
    "documents": Verb("ranker", lambda engine, texts: engine.score("a", texts), "documents"),
    "rerank": Verb("ranker", lambda engine, texts: engine.rerank("a", texts), "documents"),
    "classify": Verb("ranker", lambda engine, texts: engine.classify(texts)),
    "token_classify": Verb("tagger", lambda engine, texts: engine.token_classify(texts)),
}

NO_LISTS = (None, 5, 1.5, b"ab", bytearray(b"ab"), {"a": "b"}, {"a", "b"}, frozenset({"a"}), np.array("a"), object())
BAD_ITEMS = (None, 3, np.nan, b"b", ["b"], np.array(["b"]), "\ud800")


def both(models: Models, verb: Verb, texts: Callable[[], Any], check: Callable[[Callable[[], Any]], None]) -> None:
    """Check a verb of Engine and of AsyncEngine."""
    engine = getattr(models, verb.model)

    async def ask() -> Any:
        return await verb.ask(AsyncEngine(engine), texts())

    check(lambda: verb.ask(engine, texts()))
    check(lambda: asyncio.run(ask()))


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_is_no_list_of_texts_is_refused(verb: Verb, models: Models) -> None:
    for wrong in NO_LISTS:

        def check(ask: Callable[[], Any], wrong: Any = wrong) -> None:
            with pytest.raises(InvalidRequest, match=f"must be a string or strings, is {type(wrong).__name__}") as caught:
                ask()
            assert caught.value.param == verb.name

        both(models, verb, lambda wrong=wrong: wrong, check)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_is_no_text_is_refused_by_its_place(verb: Verb, models: Models) -> None:
    for wrong in BAD_ITEMS:

        def check(ask: Callable[[], Any]) -> None:
            with pytest.raises(InvalidRequest) as caught:
                ask()
            assert caught.value.param == f"{verb.name}[1]"
            assert str(caught.value).startswith(f"{verb.name}[1]: ")

        both(models, verb, lambda wrong=wrong: ["a", wrong], check)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_whatever_holds_texts_is_taken(verb: Verb, models: Models) -> None:
    def same(found: Any) -> str:
        return repr(getattr(found, "scores_NC", getattr(found, "dense", getattr(found, "rows_XD", found))))

    texts = ["far away", "a\0bill\0"]
    engine = getattr(models, verb.model)
    if verb.name != "queries":
        verb.ask(engine, [])
    expected = verb.ask(engine, texts)
    for given in (lambda: tuple(texts), lambda: (text for text in texts), lambda: np.array(texts, object)):
        found = verb.ask(engine, given())
        if verb.ask is not VERBS["sparse"].ask:
            assert same(found) == same(expected)
    verb.ask(engine, np.array(["far away", "a bill"]))
    verb.ask(engine, np.str_("far away"))


def test_an_error_of_the_caller_s_own_generator_stays(models: Models) -> None:
    def texts() -> Iterator[str]:
        yield "a"
        raise TypeError("the caller's")

    with pytest.raises(TypeError, match="the caller's"):
        models.m3.embed(texts())


@pytest.mark.parametrize(
    "texts", [None, 5, "two words", b"ab", {"a": "b"}, (c for c in "ab"), np.array("a")], ids=lambda texts: type(texts).__name__
)
def test_a_request_has_a_list_of_texts(texts: Any) -> None:
    with pytest.raises(InvalidRequest, match="input: must be a list of texts"):
        Request(texts)


def test_one_output_may_be_a_string(models: Models) -> None:
    expected = models.m3.encode(["a"], ("dense",)).dense
    found = models.m3.encode(["a"], "dense")
    assert np.array_equal(found.dense, expected)  # pyright: ignore[reportArgumentType]
    assert found.sparse is None
    assert np.array_equal(asyncio.run(AsyncEngine(models.m3).encode(["a"], "dense")).dense, expected)  # pyright: ignore


@pytest.mark.parametrize("outputs", ["dence", "", None, 5, b"dense", ("dense", None), ("dense", "scores")], ids=repr)
def test_what_is_no_output_is_refused(outputs: Any, models: Models) -> None:
    with pytest.raises(InvalidRequest) as caught:
        models.m3.encode(["a"], outputs)
    assert caught.value.param == "outputs"
    with pytest.raises(InvalidRequest, match="outputs"):
        Request(["a"], "dense")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_misspelt_option_is_refused(verb: Verb, models: Models) -> None:
    """A misspelt option would have no effect, silently."""
    name = {"m3": "dimension", "ranker": "activation", "tagger": "prompts"}[verb.model]
    method = "score" if verb.name in ("queries", "documents") else next(key for key, each in VERBS.items() if each is verb)
    arguments = ("a", ["b"]) if verb.model == "ranker" and method != "classify" else (["b"],)
    with pytest.raises(InvalidRequest, match="is no option of this verb; it takes prompt") as caught:
        getattr(getattr(models, verb.model), method)(*arguments, **{name: 3})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"deadline": float("nan")}, "deadline"), ({"priority": 2**31}, "priority"), ({"priority": True}, "priority"),
        ({"tenant": ["me"]}, "tenant"), ({"tenant": None}, "tenant"), ({"priority": "high"}, "priority"),
        ({"deadline": "soon"}, "deadline"), ({"waited": -1.0}, "waited"),
    ],
)  # fmt: skip
def test_what_the_queue_cannot_compare_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Scheduling(**fields)
    assert caught.value.param == param


LONG = "a " * 100
HUGE = "x" * (MAX_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("queries", "documents", "param"),
    [
        ("\ud800", ["a", "b"], "queries"),
        (["\ud800"], ["a", "b"], "queries[0]"),
        (["a", "\ud800"], ["a", "b"], "queries[1]"),
        ("a", ["a", "\ud800"], "documents[1]"),
        ("a", "\ud800", "documents"),
        ("a", None, "documents"),
        ("a", ["b", None], "documents[1]"),
        (["a", 5], ["b", "c"], "queries[1]"),
        ("a", ["b", LONG], "documents[1]"),
        (["a", LONG], ["b", "c"], "documents[1]"),
        (HUGE, ["b", "c"], "queries"),
        ("a", ["b", HUGE], "documents[1]"),
        (["a", "b"], ["a"], "documents"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_score_names_what_it_was_given(queries: Any, documents: Any, param: str, models: Models) -> None:
    """Errors name the arguments, not the pairs made of them. For a pair above the limit, the document is named."""
    for ask in (
        models.ranker.score,
        lambda *given, **options: asyncio.run(AsyncEngine(models.ranker).score(*given, **options)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ask(queries, documents, truncate="never")
        assert caught.value.param == param
        assert str(caught.value).startswith(f"{param}: ")


def test_rerank_names_what_it_was_given(models: Models) -> None:
    for query, documents, param, kind in (
        ("\ud800", ["a"], "query", InvalidRequest),
        (HUGE, ["a"], "query", TooLarge),
        (None, ["a"], "query", InvalidRequest),
        ("a", ["b", "c", LONG], "documents[2]", TooLong),
        ("a", ["b", 5], "documents[1]", InvalidRequest),
        ("a", 5, "documents", InvalidRequest),
    ):
        with pytest.raises(kind) as caught:
            models.ranker.rerank(query, documents, truncate="never")  # pyright: ignore[reportArgumentType]
        assert caught.value.param == param
        assert caught.value.__cause__ is None


def test_rerankers_with_a_template_name_it_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("qwen")
    write_reranker(folder, "Qwen3", qwen(), tie_word_embeddings=True)
    with Engine(str(folder), reranker="qwen3", dtype="float32", max_length=300) as engine:
        for query, documents, param in (
            ("\ud800", ["a"], "query"),
            ("a", ["b", "\ud800"], "documents[1]"),
            ("a", ["b", "bird " * 400], "documents[1]"),
            ("a", ["b", None], "documents[1]"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                engine.rerank(query, documents, truncate="never")  # pyright: ignore[reportArgumentType]
            assert caught.value.param == param
        assert engine.score(np.str_("a"), np.array(["b"])).shape == (1,)


@pytest.mark.parametrize(
    ("location", "named"),
    [(Location("input", 1), "documents[1]"), (Location("input"), "documents"), (Location("prompt"), "prompt")],
)
def test_errors_of_the_computation_are_named_too(
    location: Location, named: str, monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    def broken(_: Request) -> Any:
        raise NonFinite("the model gives NaN.", location=location)

    monkeypatch.setattr(models.ranker, "run", broken)
    with pytest.raises(NonFinite) as caught:
        models.ranker.rerank("a", ["b", "c"])
    assert (caught.value.param, str(caught.value)) == (named, f"{named}: the model gives NaN.")


def test_more_entries_than_there_are_pass_between_processes(models: Models) -> None:
    request = Request(["far away"], ("sparse",), max_active_dims=10**30)
    (found,) = asyncio.run(run_over_a_channel(models.m3, [request]))
    assert found.sparse is not None
    assert np.array_equal(found.sparse.weights_X, models.m3.sparse("far away").weights_X)
