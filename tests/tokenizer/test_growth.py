"""Tokenizers that make texts much longer are refused, and all others are read as before."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import tokenizers

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel import Engine
from whimbrel.checkpoint.tokenizer.growth import check_growth
from whimbrel.errors import CheckpointError


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(text: str) -> dict[str, Any]:
    return {
        "type": "Precompiled",
        "precompiled_charsmap": b64encode(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + text.encode() + b"\0").decode(),
    }


BYTES, CHINESE, NFKD = {"type": "ByteLevel"}, {"type": "BertNormalizer"}, {"type": "NFKD"}

GROWING = {
    "a replacement": replace("a", "b" * 1000),
    "a replacement that holds steps, as only a sequence does": replace("a", "b" * 1000) | {"normalizers": []},
    "a replacement of two": replace("ab", "b" * 100),
    "a pattern": replace(".", "b" * 1000, "Regex"),
    "nested": sequence(replace("x", "y"), sequence(sequence(replace("a", "b" * 1000)))),
    "a chain": sequence(replace("a", "bbbb"), replace("b", "cccc"), replace("c", "dddd")),
    "the same again": sequence(*[replace(".", "aa", "Regex")] * 5),
    "between characters": sequence(*[replace("(?=.)", "a", "Regex")] * 10),
    "nothing for something": sequence(*[replace("", "ab")] * 10),
    "what Unicode unfolds": sequence(*[replace(".", "\ufdfa", "Regex"), NFKD] * 2),
    "what comes before": {"type": "Prepend", "prepend": "a" * 100},
    "bytes of bytes": sequence(*[BYTES] * 3),
    "spaces around characters": sequence(*[CHINESE] * 20),
    "a map": charsmap("a" * 1000),
    "a map twice": sequence(*[charsmap("a" * 18)] * 2),
}


@pytest.mark.parametrize("how", GROWING)
def test_H12_a_normalizer_that_makes_texts_much_longer_is_refused(how: str) -> None:
    with pytest.raises(CheckpointError, match="makes of one character up to") as caught:
        check_growth({"normalizer": GROWING[how]})
    assert (caught.value.file, caught.value.key) == ("tokenizer.json", "normalizer")


USUAL = {
    "none": None,
    "BERT": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "XLM-R": charsmap("صلى الله عليه وسلم"),
    "T5": sequence(charsmap("1000 entries"), {"type": "Strip"}, replace(" {2,}", "\u2581", "Regex")),
    "ALBERT": sequence(replace("``", '"'), replace("''", '"'), NFKD, {"type": "Lowercase"}, charsmap("a" * 18)),
    "Llama": sequence({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
    "CLIP": sequence({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}),
    "bytes": sequence({"type": "NFC"}, BYTES),
    "digits": sequence(*[replace(str(digit), f" {digit} ") for digit in range(10)]),
    "spaces": sequence(
        *[replace(spaces, " ", "Regex") for spaces in (r"\s+", r"\p{Z}+", "[[:space:]]+", " {2,}", r"(?:\t|\n)+")]
    ),
    "a tab": replace("\t", " " * 8),
}


@pytest.mark.parametrize("how", USUAL)
def test_usual_normalizers_are_read(how: str) -> None:
    check_growth({"normalizer": USUAL[how]})


STEPS = [
    replace("a", "bb"), replace("b", "a c"), replace("ab", "cccc"), replace(" ", "\u2581"), replace("c", "\ufdfa"), replace("c", ""),
    replace("[ab]", "cc", "Regex"), replace(r"\s+", " ", "Regex"), replace("b*", "a", "Regex"), {"type": "Prepend", "prepend": "ab"},
    {"type": "NFKC"}, NFKD, {"type": "Lowercase"}, BYTES,
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sample(40)
def test_no_text_grows_by_more_than_is_computed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random steps and texts, with the library's own normalizers."""
    choose = random.Random(seed)
    steps = choose.choices(STEPS, k=choose.randint(1, 4))
    low, high = 1, 10**9
    while low < high:  # the growth that is computed, rounded up
        limit = (low + high) // 2
        monkeypatch.setattr("whimbrel.checkpoint.tokenizer.growth._MAX_GROWTH", limit)
        try:
            check_growth({"normalizer": sequence(*steps)})
            high = limit
        except CheckpointError:
            low = limit + 1
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    file = {"version": "1.0", "added_tokens": [], "normalizer": sequence(*steps), "model": model}
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(file)).normalizer
    for _ in range(20):
        text = "".join(choose.choices("aaabbbccc \t\u4e2d\u00e9\ufdfa", k=choose.randint(1, 30)))
        try:
            made = normalizer.normalize_str(text)
        except BaseException as error:  # the library has a bug where nothing is left of a text
            if type(error).__name__ != "PanicException":
                raise
        else:
            assert len(made) <= low * (len(normalize("NFKD", text)) + 1)


def test_H12_steps_that_lengthen_elsewhere_are_refused() -> None:
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    for part, content in {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [space] * 1000},
        "decoder": {"type": "Sequence", "decoders": [replace("a", "b" * 1000)]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"s": {"id": "s", "ids": [1] * 1000, "tokens": ["s"] * 1000}},
        },
    }.items():
        with pytest.raises(CheckpointError) as caught:
            check_growth({part: content})
        assert caught.value.key == part
    twice = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "special_tokens": {}}
    with pytest.raises(CheckpointError, match="single holds a text twice"):
        check_growth({"post_processor": {"type": "Sequence", "processors": [twice]}})


def test_H12_a_model_with_such_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit_json(tmp_path / "tokenizer.json", normalizer=GROWING["nested"])
    with pytest.raises(CheckpointError, match="normalizer: makes of one character up to 1,000;"), Engine(str(tmp_path)):
        pass
