"""Ids against transformers' own tokenizer, truncation, prompts, and every bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import load
from encoding import encode_request
from texts import TEXTS
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest, TooLarge, TooLong
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import MAX_CHARACTERS
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import Request


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return load(minilm)


def ids(*rows: list[int]) -> list[Any]:
    return [np.array(row, np.int64) for row in rows]


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, minilm: Path) -> None:
    expected = AutoTokenizer.from_pretrained(str(minilm))(TEXTS, truncation=True, max_length=256)["input_ids"]
    seqs = encode_request(tokenizer, Request(TEXTS))
    assert [seq.ids.tolist() for seq in seqs] == expected
    assert [seq.index for seq in seqs] == list(range(len(TEXTS)))
    assert {seq.truncated for seq in seqs} == {True, False}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [3, 4, 17, 256])
def test_truncation_keeps_the_special_tokens(side: Any, limit: int, tokenizer: Tokenizer, minilm: Path) -> None:
    reference = AutoTokenizer.from_pretrained(str(minilm), truncation_side=side)
    texts = ["", "one two three four", "word " * 300, "b " * 254]
    expected = reference(texts, truncation=True, max_length=limit)["input_ids"]
    seqs = encode_request(tokenizer, Request(texts, truncate=side, max_tokens=limit))
    assert [seq.ids.tolist() for seq in seqs] == expected


def test_too_long_without_truncation_names_text_and_limit(tokenizer: Tokenizer) -> None:
    with pytest.raises(TooLong, match=r"1,002 tokens; the limit is 256") as caught:
        encode_request(tokenizer, Request(["short", "word " * 1000], truncate="never"))
    assert caught.value.param == "input[1]"


def test_token_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert [seq.ids.tolist() for seq in encode_request(tokenizer, Request(ids([5, 6], [101, 7, 102], [0])))] == [
        [5, 6],
        [101, 7, 102],
        [0],
    ]


def test_long_token_ids_are_cut_between_special_tokens_if_they_have_them(tokenizer: Tokenizer) -> None:
    body = [1000 + i for i in range(300)]
    bare, whole = encode_request(tokenizer, Request(ids(body, [101, *body, 102])))
    assert bare.ids.tolist() == body[:256]
    assert whole.ids.tolist() == [101, *body[:254], 102]


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        (["a", 3], "input[1]"), ([None], "input[0]"), (["a", b"b"], "input[1]"), ([["a"]], "input[0]"), (["ok", "\ud800"], "input[1]"),
        ([("a", "b")], "input[0]"), ([np.array(["a", "b"])], "input[0]"), ([np.array([1.5])], "input[0]"), ([np.ones((2, 2), int)], "input[0]"),
        ([np.array([5]), "a"], "input[1]"), (ids([1], []), "input[1]"), (ids([5, 30522]), "input[0][1]"), (ids([-1]), "input[0][0]"), (ids([2**62]), "input[0][0]"),
    ],
)  # fmt: skip
def test_bad_inputs_say_where(texts: Any, param: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_request(tokenizer, Request(texts))
    assert caught.value.param == param


def test_a_text_has_a_limit_of_characters(tokenizer: Tokenizer) -> None:
    assert encode_request(tokenizer, Request(["a " * (MAX_CHARACTERS // 2)]))[0].ids.size == 256
    for request in (Request(["ok", "a" * (MAX_CHARACTERS + 1)]), Request(["ok", "a" * MAX_CHARACTERS], prompt="x ")):
        with pytest.raises(TooLarge, match=r"input\[1\]: the text has"):
            encode_request(tokenizer, request)


def test_a_request_has_a_limit_of_characters(minilm: Path) -> None:
    card = read_card(minilm, "m")
    plan = make_plan(Options(max_request_tokens=10), card, Hardware(num_cores=1))
    tokenizer = Tokenizer(minilm, card, plan)
    assert len(encode_request(tokenizer, Request(["a" * 160] * 2))) == 2
    for request in (Request(["a" * 161] * 2), Request(["a"] * 2, prompt="p" * 160)):
        with pytest.raises(TooLarge, match="characters, prompts included; the limit is 320"):
            encode_request(tokenizer, request)


def test_many_long_texts_are_the_same_as_each_alone(tokenizer: Tokenizer) -> None:
    texts = [f"{i} " * 200_000 for i in range(7)]
    together = encode_request(tokenizer, Request(texts))
    assert [seq.ids.tolist() for seq in together] == [
        encode_request(tokenizer, Request([text]))[0].ids.tolist() for text in texts
    ]
    assert [seq.index for seq in together] == list(range(7))


@pytest.mark.parametrize("limit", [-1, 0, 2, 257])
def test_the_limit_per_text_has_bounds(limit: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: .* 3 to 256"):
        encode_request(tokenizer, Request(["a"], max_tokens=limit))


def test_prompts(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, include_prompt=False, prompts={"query": "query: ", "document": "the "})
    tokenizer = load(tmp_path)
    plain, prompted = (encode_request(tokenizer, Request([text]))[0] for text in ("bird", "query: bird"))
    assert plain.prompt_tokens == 0
    named = encode_request(tokenizer, Request(["bird"], prompt_name="query"))[0]
    literal = encode_request(tokenizer, Request(["bird"], prompt="query: "))[0]
    assert named.ids.tolist() == literal.ids.tolist() == prompted.ids.tolist()
    assert named.prompt_tokens == literal.prompt_tokens == prompted.ids.size - plain.ids.size + 1  # [CLS] is left out too
    with pytest.raises(InvalidRequest, match="document, query"):
        encode_request(tokenizer, Request(["bird"], prompt_name="qurey"))
    with pytest.raises(InvalidRequest, match="token ids"):
        encode_request(tokenizer, Request(ids([2, 5, 3]), prompt_name="query"))


@pytest.mark.parametrize(
    "post_processor",
    [
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}},
        None,
    ],
)
def test_a_tokenizer_without_special_tokens(post_processor: Any, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit_json(tmp_path / "tokenizer.json", post_processor=post_processor)
    seq = encode_request(load(tmp_path), Request(["the whimbrel"]))[0]
    assert not {2, 3} & set(seq.ids.tolist())


def test_an_empty_seq_is_refused(tmp_path: Path) -> None:
    """An empty text has no tokens if no special tokens are put around it."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit_json(tmp_path / "tokenizer.json", post_processor=None)
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        encode_request(load(tmp_path), Request(["bird", ""]))
    assert caught.value.param == "input[1]"


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    write_json(tmp_path / "tokenizer.json", {"version": "1.0"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_tokens_around_a_text_must_not_depend_on_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from whimbrel.tokenizer import tokenizer as module

    answers = iter([((1,), (), frozenset({0})), ((2, 3), (), frozenset({0}))])
    monkeypatch.setattr(module, "_split_text", lambda *_: next(answers))
    with pytest.raises(CheckpointError, match="same tokens around every text"):
        module.find_special_tokens(tokenizer.backend.raw, tokenizer.card)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path, vocab_size=5)
    sentence_layout(tmp_path)
    with pytest.raises(CheckpointError, match="embeds 5"):
        load(tmp_path)
