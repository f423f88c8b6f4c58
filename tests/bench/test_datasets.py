"""Datasets: lengths in tokens, requests, and files with mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench_servers import always, answer, fake_server
from serving import Server
from whimbrel.errors import SetupError
from whimbrel_bench.backends import Sample, find_backend, make_body, read_url
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.target import Target, TargetOptions
from whimbrel_bench.words import APPROXIMATE, Words, local_words, select_words, server_words


@pytest.fixture(scope="module")
def words() -> Words:
    return local_words(None)


def test_random_prompts_have_the_length_that_was_asked_for(words: Words, minilm: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    samples = make_samples(DatasetOptions(num_prompts=20, input_len=50), words)
    assert [len(tokenizer.encode(each).ids) for sample in samples for each in sample.texts] == [50] * 20
    assert [sample.num_tokens for sample in samples] == [50] * 20
    ranged = make_samples(DatasetOptions(num_prompts=300, input_len=52, range_ratio=0.5), words)
    lengths = [len(tokenizer.encode(sample.texts[0]).ids) - 2 for sample in ranged]
    assert (min(lengths), max(lengths)) == (25, 75)


def test_the_same_seed_gives_the_same_prompts(words: Words) -> None:
    options = DatasetOptions(num_prompts=5, input_len=20)
    assert make_samples(options, words) == make_samples(options, words)
    assert make_samples(options, words) != make_samples(DatasetOptions(num_prompts=5, input_len=20, seed=1), words)


def test_batches(words: Words) -> None:
    samples = make_samples(DatasetOptions(num_prompts=10, input_len=8, batch_size=4), words)
    assert [len(sample.texts) for sample in samples] == [4, 4, 2]
    assert [sample.num_tokens for sample in samples] == [32, 32, 16]


def test_random_rerank_is_one_query_and_documents(words: Words) -> None:
    samples = make_samples(DatasetOptions("random-rerank", num_prompts=6, input_len=64, batch_size=3), words)
    assert [len(sample.texts) for sample in samples] == [3, 3]
    assert len({sample.query for sample in samples}) == 1
    query = samples[0].query
    assert query is not None
    assert len(query.split()) == 64 // 2 - 1 - words.num_special
    assert all(len(text.split()) == 64 - len(query.split()) - 1 - words.num_special for text in samples[0].texts)


def test_the_servers_own_tokenizer_counts(server: Server, words: Words) -> None:
    target = Target(server.url, TargetOptions())
    target.connect()
    with target.client() as client:
        found = server_words(client, server.url, target.model)
    assert found is not None
    assert (found.words, found.num_special, found.exact) == (words.words, 2, True)
    with fake_server(always(answer())) as fake, Target(fake.url, TargetOptions()).client() as client:
        assert server_words(client, fake.url, "m") is None
    assert not APPROXIMATE.exact


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    with pytest.raises(SetupError, match="joins words"):
        select_words(lambda texts, special: [2 if len(text) < 30 else 5 for text in texts], "x")
    with pytest.raises(SetupError, match="no token for any common word"):
        select_words(lambda texts, special: [9 for _ in texts], "x")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_files(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "one"}\n\n{"prompt": ["q", "d1", "d2"], "other": 1}\n')
    samples = make_samples(DatasetOptions("custom", path, num_prompts=3), None)
    assert samples == [Sample(("one",)), Sample(("d1", "d2"), "q"), Sample(("one",))], "a file with fewer prompts is repeated"
    path = write(tmp_path / "t.txt", "\ufeffone\ntwo\n  \nthree")
    samples = make_samples(DatasetOptions("texts", path, num_prompts=3, batch_size=2), None)
    assert samples == [Sample(("one", "two")), Sample(("three",))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"prom": 1}', "line 2: no `prompt`"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: no JSON"),
        ('{"prompt": ["only a query"]}', "line 1: no `prompt`"),
        ('{"prompt": 3}', "line 1: no `prompt`"),
        ("[1]", "line 1: no `prompt`"),
        ('1\n{"prompt": "a"}\n\n2\n{', "line 1: no `prompt`.* 3 of 5 lines cannot be read"),
        (b'{"prompt": "a"}\n\xff', "line 2: no valid UTF-8"),
        ("\n\n", "has no prompts"),
    ],
)
def test_a_line_with_a_mistake_is_named(content: str | bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", content)
    with pytest.raises(SetupError, match=words):
        make_samples(DatasetOptions("custom", path), None)


def test_options_that_cannot_be_met(words: Words, tmp_path: Path) -> None:
    for options, message in (
        (DatasetOptions(input_len=2), "too short"),
        (DatasetOptions("custom"), "needs a file"),
        (DatasetOptions("texts", tmp_path / "none"), "cannot read"),
        (DatasetOptions(range_ratio=1.0), "range-ratio"),
    ):
        with pytest.raises(SetupError, match=message):
            make_samples(options, words)
    path = write(tmp_path / "p.jsonl", '{"prompt": ["q", "d"]}')
    with pytest.raises(SetupError, match="requests already"):
        make_samples(DatasetOptions("custom", path, batch_size=2), None)


def test_bodies_and_urls() -> None:
    with pytest.raises(SetupError, match="no queries"):
        make_body(find_backend("rerank"), "m", Sample(("a",)), {})
    assert b'"input":["q","a"]' in make_body(find_backend("openai-embeddings"), "m", Sample(("a",), "q"), {})
    assert find_backend("vllm-rerank") is find_backend("rerank")
    with pytest.raises(SetupError, match="no backend"):
        find_backend("vllm-chat")
    assert read_url("https://h/prefix/")[:3] == ("h", 443, True)
    assert read_url("127.0.0.1:9").url == "http://127.0.0.1:9"
    for bad in ("ftp://x", "http://", "http://a:b"):
        with pytest.raises(SetupError, match="no URL"):
            read_url(bad)
