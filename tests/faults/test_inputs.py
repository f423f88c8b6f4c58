"""C of the catalogue: every input, however odd, is answered with the vector it has alone, or refused with a reason."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest

from load import PATH, ask, vectors_of
from serving import Server
from texts import AWKWARD, TEXTS
from whimbrel import Engine
from whimbrel.tokenizer.validation import MAX_CHARACTERS
from whimbrel.types.arrays import Float32Array
from whimbrel.types.request import Request

GOLDEN = "A whimbrel is a wader."
MAX_LENGTH = 256
"""MiniLM's limit, special tokens included."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=100) as client:
        yield client


@pytest.fixture(autouse=True)
def still_answers(server: Server, client: httpx2.Client, engine: Engine) -> Iterator[None]:
    """Whatever a test did: the server is ready, says nothing of a bug, and a text has the same bits as in-process."""
    yield
    assert client.get("/health/ready").status_code == 200
    assert np.array_equal(vectors_of(ask(client, [GOLDEN]))[0], engine.embed(GOLDEN))
    assert "Traceback" not in server.log


def post(client: httpx2.Client, **fields: Any) -> httpx2.Response:
    return client.post(PATH, content=orjson.dumps(fields), headers={"content-type": "application/json"})


def refused(answer: httpx2.Response, param: str | None, status: int = 400) -> str:
    """Its message."""
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert len(answer.content) < 1000
    return error["message"]


def same(answer: httpx2.Response, expected: Float32Array) -> None:
    assert answer.status_code == 200, answer.text[:500]
    vectors = vectors_of(answer)
    assert np.isfinite(vectors).all()
    assert np.array_equal(vectors, np.atleast_2d(expected))


def by_ids(engine: Engine, *rows: list[int]) -> Float32Array:
    return engine.run(Request([np.array(row, np.int64) for row in rows])).dense


# Nothing, little, much


def test_C1_no_texts_are_refused(client: httpx2.Client) -> None:
    assert "empty list" in refused(post(client, input=[]), "input")
    refused(post(client, input=[[]]), "input[0]")
    refused(post(client), "input")


@pytest.mark.parametrize("text", ["", " ", "\n\t\r", "\u00a0\u2003\u3000", "\u200b", "\x00", "\ufeff"])
def test_C1_empty_texts_have_a_vector(text: str, client: httpx2.Client, engine: Engine) -> None:
    """That of the special tokens alone, as in Sentence Transformers."""
    same(ask(client, [text]), engine.embed(""))
    same(ask(client, ["a", text, "b"]), engine.embed(["a", "", "b"]))


@pytest.mark.parametrize("words", [1, MAX_LENGTH - 2, MAX_LENGTH - 1, 100 * MAX_LENGTH])
@pytest.mark.parametrize("truncate", [None, True, False, "right", "left", "never"])
def test_C2_texts_around_the_limit(words: int, truncate: Any, client: httpx2.Client, engine: Engine) -> None:
    """The limit counts the special tokens. A cut text has the vector of its remaining part."""
    said = [f"{number % 10}" for number in range(words)]
    answer = ask(client, [" ".join(said)], **({} if truncate is None else {"truncate": truncate}))
    too_long = words + 2 > MAX_LENGTH
    if too_long and truncate in (False, "never"):
        message = refused(answer, "input[0]")
        assert f"{words + 2:,} tokens; the limit is 256" in message
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        return
    kept = said[-MAX_LENGTH + 2 :] if truncate == "left" else said[: MAX_LENGTH - 2]
    same(answer, engine.embed(" ".join(kept)))
    assert answer.headers["x-whimbrel-truncated"] == str(int(too_long))
    assert answer.json()["usage"]["prompt_tokens"] == min(words + 2, MAX_LENGTH)


def test_C2_one_character_and_one_token(client: httpx2.Client, engine: Engine) -> None:
    for text in ("a", "é", "中", "🙂", "whimbrel"):
        same(ask(client, [text]), engine.embed(text))
    same(ask(client, [[7592]]), by_ids(engine, [7592]))


def test_C3_2048_texts_are_fine_and_2049_too_many(client: httpx2.Client, engine: Engine) -> None:
    answer = ask(client, ["a", "b"] * 1024)
    same(answer, np.tile(engine.embed(["a", "b"]), (1024, 1)))
    assert answer.json()["usage"]["prompt_tokens"] == 3 * 2048
    for many in (["a"] * 2049, [[200]] * 2049, [[200] * 256] * 2048 + [[200]]):
        assert "2,049 inputs; the limit is 2,048" in refused(post(client, input=many), "input", 413)


def test_C3_tokens_and_characters_of_a_request_are_limited_and_counted(engine: Engine) -> None:
    with Server("--max-request-tokens", "20") as server, httpx2.Client(base_url=server.url, timeout=100) as client:
        same(ask(client, ["a b c"] * 4), np.tile(engine.embed("a b c"), (4, 1)))
        message = refused(ask(client, ["a b c"] * 5), "input", 413)
        assert "25 tokens; the limit is 20" in message
        assert "max_request_tokens" in message
        assert "21 tokens; the limit is 20" in refused(ask(client, [[200] * 21]), "input", 413)
        assert "641 characters, prompts included; the limit is 640" in refused(ask(client, ["a" * 641]), "input", 413)


def test_C3_characters_of_a_text_are_limited_and_counted(client: httpx2.Client) -> None:
    message = refused(ask(client, ["ok", "a" * (MAX_CHARACTERS + 1)]), "input[1]", 413)
    assert "1,048,577 characters" in message
    assert "1,048,576" in message


# What texts are made of

ODD = [
    *AWKWARD[:19], "👨‍👩‍👧‍👦", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "e\u0301\u0323\u0308" * 50, "\u0301", "\u200d", "\u2028", "\u2029", "\u0085", "\u200f\u202e\u2066abc\u2069",
    "\x00a\x00", "\x01\x02\x1b[31mred\x7f", "\ufdd0\uffff\U0010ffff", "\ue000\uf8ff", "ﷺ" * 30, "Ａ\uff21", "ǅ", "ß", "ſ", "İ", "ı", "Ω\u2126",
    "ก็็็็็็็็็็", "नमस्ते", "한국어", "a\u00adb", "１２３", "½", "‰", "\\u0000", "%00", "{{7*7}}", "<script>alert(1)</script>", "'; DROP TABLE texts; --",
]  # fmt: skip


def test_C4_odd_texts_have_the_same_bits_alone_together_and_in_process(client: httpx2.Client, engine: Engine) -> None:
    expected = engine.embed(ODD)
    same(ask(client, ODD), expected)
    for text, vector in zip(ODD, expected, strict=True):
        same(ask(client, [text]), vector)


def test_C4_odd_texts_have_sentence_transformers_vectors(engine32: Engine, minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(minilm), device="cpu").encode(ODD)
    assert np.abs(engine32.embed(ODD) - reference).max() <= 1e-5


INJECTED = [
    "[SEP]", "[CLS]", "[PAD]", "[MASK]", "[UNK]", "[SEP]</s><|endoftext|>", "a [SEP] b", "[CLS] a [SEP] [CLS] b [SEP]", "[PAD]" * 20,
    "[SEP] " * 400, "[sep]", "[ SEP ]", "x[SEP]x", "</s><s><pad><unk><mask>", "<|im_start|>system", "[unused0]", "##a", "▁a", "Ġa",
]  # fmt: skip


def test_C5_special_tokens_in_texts_are_read_as_the_model_s_tokenizer_reads_them(
    client: httpx2.Client, engine: Engine, minilm: Path
) -> None:
    """Special tokens in a text are read as such, as transformers does; they count like others."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(minilm))
    expected = engine.embed(INJECTED)
    for text, vector in zip(INJECTED, expected, strict=True):
        ids = tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        answer = ask(client, [text])
        same(answer, vector)
        same(answer, by_ids(engine, ids))
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def repeated(text: str) -> str:
    return (text * (MAX_CHARACTERS // len(text) + 1))[:MAX_CHARACTERS]


_RNG = random.Random(5)
PATHOLOGICAL = {
    "one letter": repeated("a"),
    "no space": "".join(_RNG.choices("abcdefghijklmnop", k=MAX_CHARACTERS)),
    "two-letter words": repeated("ab "),
    "punctuation": repeated(".,"),
    "brackets": repeated("["),
    "Chinese": repeated("中"),
    "Korean": repeated("가"),
    "combining marks": "e" + repeated("\u0301")[1:],
    "joiners": repeated("👩\u200d"),
    "NUL": repeated("\0"),
    "spaces": repeated(" "),
    "special tokens": repeated("[SEP]"),
    "almost special tokens": repeated("[SEP"),
    "spaces and one letter": repeated(" " * 999 + "a"),
    "any characters": "".join(map(chr, _RNG.choices([*range(32, 0xD800), *range(0xE000, 0x20000)], k=MAX_CHARACTERS))),
}


@pytest.mark.parametrize("what", PATHOLOGICAL)
@pytest.mark.sample(2)
def test_C6_a_text_as_long_as_may_be_takes_seconds_at_most(what: str, client: httpx2.Client, engine: Engine) -> None:
    text = PATHOLOGICAL[what]
    began = time.monotonic()
    answer = ask(client, [text])
    assert time.monotonic() - began < 30
    same(answer, engine.embed(text))


@pytest.mark.extended
def test_C6_others_are_answered_while_long_texts_are_tokenised(server: Server, client: httpx2.Client, engine: Engine) -> None:
    """Tokenising is off the event loop: small requests and the health check are answered meanwhile.

    Nor does a queue seem full because of texts that will be cut.
    """
    counts = {"one letter": 14, "no space": 14, "Chinese": 3, "any characters": 3}
    bodies = [[PATHOLOGICAL[what]] * count for what, count in counts.items()]
    golden = engine.embed(GOLDEN)
    done = threading.Event()
    small: list[float] = []

    def ask_small() -> None:
        with httpx2.Client(base_url=server.url, timeout=100) as other:
            while not done.is_set():
                began = time.monotonic()
                same(ask(other, [GOLDEN]), golden)
                assert other.get("/health/live").status_code == 200
                small.append(time.monotonic() - began)

    with ThreadPoolExecutor(5) as threads:
        other = threads.submit(ask_small)
        began = time.monotonic()
        try:
            answers = list(threads.map(lambda texts: ask(client, texts), bodies))
        finally:
            took = time.monotonic() - began
            done.set()
        other.result(100)
    assert [answer.status_code for answer in answers] == [200] * len(bodies)
    assert len(small) > 5, f"{len(small)} in {took:.1f} s"
    assert max(small) < max(took / 2, 3)


# Token ids

LANGCHAIN = [9906, 1917, 100_257]
"""Ids that LangChain sends by default: tiktoken's, of another model's vocabulary."""


def test_C7_token_ids_are_taken_as_they_are(client: httpx2.Client, engine: Engine) -> None:
    same(ask(client, [[101, 7592, 102]]), engine.embed("hello"))
    same(ask(client, [[101, 7592, 102], [101, 102]]), engine.embed(["hello", ""]))
    same(post(client, input=[101, 7592, 102], encoding_format="base64"), engine.embed("hello"))
    same(ask(client, [[0], [30521], [7592] * MAX_LENGTH]), by_ids(engine, [0], [30521], [7592] * MAX_LENGTH))


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ([30522], "input[0][0]"), ([[5], [7, 30522]], "input[1][1]"), ([[-1]], "input[0][0]"), ([[1], [2**40]], "input[1][0]"),
        ([2**63], "input[0]"), ([[2**63 - 1]], "input[0][0]"), ([[1, 2**63]], "input[0][1]"), ([-(2**63)], "input[0][0]"),
        ([[]], "input[0]"), ([[1], []], "input[1]"), ([[1.5]], "input[0][0]"), ([[True]], "input[0][0]"), ([[1], "a"], "input[1]"),
        ([99999] * 200_000, "input[0][0]"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_C7_wrong_token_ids_say_where(texts: Any, param: str, client: httpx2.Client) -> None:
    refused(post(client, input=texts), param)


def test_C7_ids_of_another_tokenizer_are_refused_with_a_hint(client: httpx2.Client) -> None:
    message = refused(post(client, input=[LANGCHAIN]), "input[0][2]")
    assert "Token id 100257 is out of vocabulary, which has 30,522 entries" in message
    assert "check_embedding_ctx_length=False" in message


# Order


@pytest.mark.extended
def test_C8_answers_keep_their_places_under_concurrency(server: Server, engine: Engine) -> None:
    """Texts that name their place, long and short, many of them twice, in requests from 12 clients at once."""
    texts = [f"number {number} {'of many ' * (number % 9)}" for number in range(150)]
    expected = engine.embed(texts)
    assert len(np.unique(expected, axis=0)) == len(texts)

    def many(seed: int) -> int:
        rng = random.Random(seed)
        with httpx2.Client(base_url=server.url, timeout=100) as client:
            for _ in range(25):
                places = rng.choices(range(len(texts)), k=rng.choice((1, 1, 2, 7, 40)))
                places += rng.choices(places, k=len(places) // 3)
                same(ask(client, [texts[place] for place in places]), expected[places])
        return 25

    with ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(many, range(12))) == 300


@pytest.mark.parametrize("long", [1000, 250, 40])
def test_C9_short_and_long_in_either_order(long: int, client: httpx2.Client, engine: Engine) -> None:
    """vLLM #55427: one order hung."""
    short, text = engine.embed("short"), engine.embed("long " * long)
    same(ask(client, ["short", "long " * long]), np.stack([short, text]))
    same(ask(client, ["long " * long, "short"]), np.stack([text, short]))
    same(ask(client, ["short"]), short)
    same(ask(client, ["long " * long]), text)


@pytest.mark.parametrize("length", [31, 32, 33, 64, 127, 128, 129, 255, 256])
@pytest.mark.sample(3)
def test_C10_a_text_has_the_same_bits_beside_texts_of_any_length(length: int, client: httpx2.Client, engine: Engine) -> None:
    """omlx#3507: rows were not finite where the longest text had a multiple of 32 tokens."""
    texts = [GOLDEN, "word " * (length - 2), "bird", "", "word " * (length // 2)]
    alone = np.stack([engine.embed(text) for text in texts])
    same(ask(client, texts), alone)
    same(ask(client, texts[::-1] * 5), np.tile(alone[::-1], (5, 1)))


def test_C14_base64_and_floats_are_the_same_bits(client: httpx2.Client, engine: Engine) -> None:
    texts = [*ODD, *TEXTS[20:60]]
    floats, coded = (post(client, input=texts, encoding_format=form).json()["data"] for form in ("float", "base64"))
    expected = engine.embed(texts)
    for by_default, one, other, vector in zip(post(client, input=texts).json()["data"], floats, coded, expected, strict=True):
        bits = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert np.array_equal(bits.view(np.uint32), vector.view(np.uint32))
        assert np.array_equal(np.array(one["embedding"], np.float32).view(np.uint32), bits.view(np.uint32))
        assert by_default == one
