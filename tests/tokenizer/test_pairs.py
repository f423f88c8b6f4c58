"""Pairs of texts: ids, token types and truncation against transformers and tokenizers, and every bad pair."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from checkpoints.tokenizer_files import FAMILIES, load, write
from encoding import encode_request
from whimbrel.checkpoint.config.reader import _ARCHITECTURES
from whimbrel.errors import InvalidRequest, TooLarge, TooLong
from whimbrel.tokenizer.pairs import cut_pair, find_template
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.tokenizer.validation import MAX_CHARACTERS
from whimbrel.types.request import Pair, Request
from whimbrel.types.seq import Seq

PIECES = [
    "",
    " ",
    "\n",
    "a",
    "The whimbrel",
    "Straße",
    "雪飛",
    "🙂",
    "1234567",
    "don't",
    "[SEP]",
    "</s>",
    "<unk>",
    "far away " * 9,
]
_RNG = random.Random(3)
TEXTS = [
    *PIECES,
    *("".join(_RNG.choices(PIECES, k=3)) for _ in range(20)),
    *(" ".join(_RNG.choices(PIECES, k=4)) for _ in range(20)),
]
PAIRS: list[Pair] = [(text, other) for text in TEXTS[:14] for other in TEXTS[:14]] + list(
    zip(TEXTS[14:34], TEXTS[34:54], strict=True)
)


def classifier(folder: Path, family: str, **changes: Any) -> Tokenizer:
    name, _ = FAMILIES[family]
    write(folder, family, architectures=[f"{name}ForSequenceClassification"], **changes)
    return load(folder)


def types_of(seq: Seq) -> list[int]:
    second = seq.second_text_start or seq.ids.size
    return [seq.type_id] * second + [seq.type_id + 1] * (seq.ids.size - second)


NATIVE = [family for family, (name, _) in FAMILIES.items() if f"{name}ForSequenceClassification" in _ARCHITECTURES]


@pytest.mark.parametrize("family", NATIVE)
def test_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    tokenizer = classifier(tmp_path, family)
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    pairs = [pair for pair in PAIRS if any(pair)]
    for side, limit in (("right", 58), ("right", 20), ("left", 9)):
        reference.truncation_side = side
        options: dict[str, Any] = {"truncation": "longest_first", "max_length": limit}
        expected = reference([pair[0] for pair in pairs], [pair[1] for pair in pairs], **options)
        seqs = encode_request(tokenizer, Request(pairs, truncate=side, max_tokens=limit))  # pyright: ignore[reportArgumentType]
        assert [seq.ids.tolist() for seq in seqs] == expected["input_ids"]
        assert [seq.index for seq in seqs] == list(range(len(pairs)))
        if family in ("bert", "electra", "nomic_bert"):
            assert [types_of(seq) for seq in seqs] == expected["token_type_ids"]
            assert any(seq.second_text_start for seq in seqs)
        else:
            assert not any(seq.second_text_start for seq in seqs)


def test_a_tokenizer_that_gives_no_types_gives_a_pair_none(tmp_path: Path) -> None:
    tokenizer = classifier(tmp_path, "bert", config={"model_input_names": ["input_ids", "attention_mask"]})
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(str(tmp_path))("a", "b")
    assert encode_request(tokenizer, Request([("a", "b")]))[0].second_text_start == 0


def test_a_class_that_says_nothing_of_types_gives_a_pair_none(tmp_path: Path) -> None:
    """Only BERT's class of transformers gives types unasked, for any post-processor."""
    tokenizer = classifier(tmp_path, "bert", config={"tokenizer_class": "PreTrainedTokenizerFast"})
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(str(tmp_path))("a", "b")
    assert encode_request(tokenizer, Request([("a", "b")]))[0].second_text_start == 0


@cache
def words() -> tokenizers.Tokenizer:
    vocabulary = {"x": 0, "y": 1, "[": 2, "]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 40), st.sampled_from(["left", "right"]))
def test_a_pair_is_cut_as_tokenizers_cuts_it(first: int, second: int, room: int, side: str) -> None:
    tokenizer = words()
    tokenizer.enable_truncation(room, strategy="longest_first", direction=side)
    ids = tokenizer.encode("x " * first, "y " * second).ids
    assert cut_pair(first, second, room) == (ids.count(0), ids.count(1))


@pytest.mark.parametrize("pair", ["$B:1 $A:0", "[:0 $A:0 $B:1 $A:0", "$A:0 ]:3 $B:5", "$A:1 $B:0", "$A:0 [:1 ]:0 $B:1"])
def test_pairs_that_are_put_together_otherwise_are_not_taken(pair: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(words().to_str())
    tokenizer.no_truncation()
    special = [("[", 2), ("]", 3)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair=pair, special_tokens=special)
    assert find_template(tokenizer, 2) is None


def test_pairs_of_types_that_the_model_does_not_have_are_not_taken() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(words().to_str())
    tokenizer.no_truncation()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A:1 $B:2", special_tokens=[])
    template = find_template(tokenizer, 1)
    assert template is not None
    assert (template.type_id, template.shift) == (0, None)
    assert find_template(tokenizer, 2) is None
    assert find_template(tokenizer, 3) is not None


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return classifier(tmp_path_factory.mktemp("bert"), "bert")


@pytest.mark.parametrize(
    ("texts", "param", "words"),
    [
        ([("a", "b"), "a"], "input[1]", "cannot be mixed"),
        (["a", ("a", "b")], "input[1]", "must be a string"),
        ([("a", "b"), np.array([5])], "input[1]", "cannot be mixed"),
        ([np.array([5]), ("a", "b")], "input[1]", "cannot be mixed"),
        ([("a", "b"), ("a", "b", "c")], "input[1]", "has 3 parts"),
        ([("a", "b"), ("a",)], "input[1]", "has 1 parts"),
        ([("a", None)], "input[0][1]", "NoneType"),
        ([("a", "b"), ("a", np.array([5, 6]))], "input[1][1]", "an array"),
        ([("a", "b"), ("a", "c"), ("a", "\ud800")], "input[2][1]", "surrogate"),
        ([("a", "b"), ("\ud800", "b")], "input[1][0]", "surrogate"),
    ],
)
def test_bad_pairs_say_where(texts: Any, param: str, words: str, bert: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        encode_request(bert, Request(texts))
    assert caught.value.param == param


def test_a_pair_that_is_too_long_may_be_refused(bert: Tokenizer) -> None:
    pairs = [("a", "b"), ("a b c", "a " * 54)]
    assert encode_request(bert, Request(pairs, truncate="never", max_tokens=60))[1].ids.size == 60
    with pytest.raises(TooLong, match=r"the pair has 60 tokens; the limit is 59") as caught:
        encode_request(bert, Request(pairs, truncate="never", max_tokens=59))
    assert caught.value.param == "input[1]"
    with pytest.raises(InvalidRequest, match="takes 5 to 60"):
        encode_request(bert, Request(pairs, max_tokens=4))
    with pytest.raises(TooLarge) as too_large:
        encode_request(bert, Request([("a", "b"), ("a", "b"), ("a", "x" * (MAX_CHARACTERS + 1))]))
    assert too_large.value.param == "input[2][1]"


def test_a_text_in_many_pairs_is_tokenised_once(bert: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encodings = bert.backend.encode_batches

    def spy(texts: Any, *rest: Any, **options: Any) -> Any:
        seen.extend(texts)
        return encodings(texts, *rest, **options)

    monkeypatch.setattr(bert.backend, "encode_batches", spy)
    encode_request(bert, Request([("a query", f"document {i % 7}") for i in range(100)]))
    assert len(seen) == 8


def test_a_prompt_goes_before_the_first_text(bert: Tokenizer) -> None:
    prompted, plain = (
        encode_request(bert, Request([("a", "b")], prompt="c "))[0],
        encode_request(bert, Request([("c a", "b")]))[0],
    )
    assert prompted.ids.tolist() == plain.ids.tolist()
    assert prompted.second_text_start == plain.second_text_start


def test_a_model_without_scores_takes_no_pairs(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    with pytest.raises(InvalidRequest, match="not pairs"):
        encode_request(load(tmp_path), Request([("a", "b")]))


def test_an_empty_pair_needs_special_tokens(tmp_path: Path, bert: Tokenizer) -> None:
    assert encode_request(bert, Request([("", "")]))[0].ids.size == 3
    write(tmp_path, "modernbert", tokenizer={"post_processor": None}, architectures=["ModernBertForSequenceClassification"])
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        encode_request(load(tmp_path), Request([("a", "b"), ("", "")]))
    assert caught.value.param == "input[1]"
