"""Token ids of every family against transformers' AutoTokenizer, where a checkpoint's files agree and where they do not."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, XLMRobertaTokenizer
from transformers.models.auto import tokenization_auto as auto

from checkpoints import tokenizer_files
from checkpoints.files import write_json
from checkpoints.tokenizer_files import FAMILIES, GTE_QWEN2, charsmap, deberta, gemma, llama, qwen, roberta, write, xlm_roberta
from encoding import encode_request
from whimbrel.checkpoint.config import reader
from whimbrel.checkpoint.reader import read_card
from whimbrel.checkpoint.tokenizer import config
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.tokenizer.tokenizer import Tokenizer
from whimbrel.types.request import Request

JSON = dict[str, Any]

PIECES = [
    "", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\x00", "\u00a0", "\u3000", "\u2028", "\ufeff", "\u2581", "\u2581\u2581", "a", "A", "Straße",
    "İstanbul", "\u00e9", "e\u0301", "\u1e9b\u0323", "\ufb01", "\uff21\u2460", "naïve café", "l'été", "I'll", "DON'T", "we'Re", "雪飛", "日本語の",
    "한국어", "ру́сский", "עִבְרִית", "مرحبا", "🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "𝔘𝔫𝔦", "\U0010fffd", "1234567", "3.14", "a1b2", "...", "!?", "#$%", "def f(x):\n    ",
    "        ", "|||EMAIL|||", "whimbrel", "The whimbrel", "bill.", "<s>", "</s>", "<pad>", "<unk>", "<mask>", "<s>NOTUSED", "[UNK]", "[CLS]",
    "[SEP]", "[MASK]", "[mask]", "<MASK>", "[PAD]", "<bos>", "<eos>", "<0x41>", "<|endoftext|>", "<|im_start|>", "<tool_call>", "</S>",
    "<start_of_turn>", "<new>", "<more>", "the", "ab", "Ġ", "##ing", "https://a.b/c?d=e",
]  # fmt: skip
_RNG = random.Random(5)
TEXTS = [
    *PIECES,
    *(f" {piece} " for piece in PIECES),
    *(f"a{piece}b" for piece in PIECES),
    *("".join(_RNG.choices(PIECES, k=_RNG.randint(2, 6))) for _ in range(150)),
    *(" ".join(_RNG.choices(PIECES, k=_RNG.randint(2, 9))) for _ in range(100)),
    "far far away in a year " * 50,
    "x" * 3000,
    "日本" * 500,
    "<mask> " * 100,
]


load = partial(tokenizer_files.load, pooling="mean", tokenizer="transformers")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """An empty seq is refused, where transformers has one."""
    try:
        return encode_request(tokenizer, Request([text]))[0].ids.tolist()
    except InvalidRequest:
        return []


def assert_same_ids(folder: Path) -> dict[str, list[int]]:
    reference = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = load(folder)
    limit = tokenizer.card.max_length
    expected = dict(zip(TEXTS, reference(TEXTS, truncation=True, max_length=limit)["input_ids"], strict=True))
    found = {text: encode(tokenizer, text) for text in TEXTS}
    wrong = {text: (found[text], expected[text]) for text in TEXTS if found[text] != expected[text]}
    assert not wrong, (type(reference).__name__, len(wrong), list(wrong.items())[:3])
    rows = [ids for text, ids in expected.items() if "<new>" not in text]  # tokens are stored twice there, by two spellings
    texts = [reference.decode(ids, clean_up_tokenization_spaces=False) for ids in rows]
    assert tokenizer.backend.texts([np.array(ids, np.int32) for ids in rows]) == texts
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(8)
def test_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    found = assert_same_ids(tmp_path)
    assert max(map(len, found.values())) == read_card(tmp_path, "m", pooling="mean").max_length


OLDEST: dict[str, JSON | None] = {
    "as dslim/bert-base-NER": {"do_lower_case": False, "max_len": 512, "init_inputs": []},
    "as distilbert's of sst-2": {"model_max_length": 512, "do_lower_case": True},
    "without a file": None,
}
"""tokenizer_config.json of checkpoints that have no tokenizer.json, beside those of today."""


def write_vocabulary(folder: Path, family: str, config: JSON | None) -> None:
    """A checkpoint without tokenizer.json: vocab.txt, or vocab.json and merges.txt."""
    write(folder, family)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    made: JSON = FAMILIES[family][1][0]["model"]
    if made["type"] == "WordPiece":
        (folder / "vocab.txt").write_text("\n".join(sorted(made["vocab"], key=made["vocab"].get)) + "\n", encoding="utf-8")
    else:
        write_json(folder / "vocab.json", made["vocab"])
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in made["merges"])
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)


@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta", "gpt2", "qwen2"])
@pytest.mark.sample(4)
def test_files_of_the_vocabulary_alone(family: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path, family, FAMILIES[family][1][1])
    assert_same_ids(tmp_path)


@pytest.mark.parametrize("name", OLDEST)
def test_the_oldest_checkpoints_of_bert(name: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path, "bert", OLDEST[name])
    assert_same_ids(tmp_path)


def test_what_no_class_can_be_built_of_is_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, "bert", {"tokenizer_class": "PreTrainedTokenizerFast"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found; load and save the tokenizer once"):
        load(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        load(tmp_path)


@pytest.mark.parametrize("limit", [60, 9])
def test_code_of_gte_qwen2_ends_a_text(limit: int, tmp_path: Path) -> None:
    """Its tokenizer.json does not; its code has this method from transformers."""
    write(tmp_path, "qwen2", {"model_max_length": limit})
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    reference.add_eos_token = True
    write(tmp_path, "qwen2", {"model_max_length": limit, **GTE_QWEN2})
    tokenizer = load(tmp_path)
    expected = reference(TEXTS, truncation=True, max_length=limit)["input_ids"]
    assert [encode(tokenizer, text) for text in TEXTS] == expected
    assert all(ids[-1] == reference.eos_token_id for ids in expected)


@pytest.mark.parametrize(
    "code",
    [
        ["tokenization_mine.Tokenizer", None],
        ["tokenization_qwen.QWenTokenizer", None],
        None,
        "tokenization_qwen.Qwen2Tokenizer",
    ],
)
def test_other_code_for_a_tokenizer_is_not_run(code: Any, tmp_path: Path) -> None:
    write(tmp_path, "qwen2", {"auto_map": {"AutoTokenizer": code}})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: auto_map: .*custom code is not run"):
        load(tmp_path)


def content(family: str) -> JSON:
    return FAMILIES[family][1][0]


def model(family: str, **fields: Any) -> JSON:
    """A change of tokenizer.json's model."""
    return {"model": content(family)["model"] | fields}


def added(family: str, *gone: str, **flags: Any) -> list[JSON]:
    """A change of tokenizer.json's added tokens: some gone, all with other flags."""
    return [token | flags for token in content(family)["added_tokens"] if token["content"] not in gone]


def decoder(family: str, *gone: str, **flags: Any) -> JSON:
    """The same of tokenizer_config.json."""
    return by_id(added(family, *gone, **flags))


def by_id(tokens: list[JSON]) -> JSON:
    return {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in tokens}


def full(name: str, **flags: Any) -> JSON:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False, "__type": "AddedToken"} | flags
    return {"content": name, **flags}


GONE = "ABSENT"
BARE: JSON = {key: GONE for _, config in (files for _, files in FAMILIES.values()) for key in config}
"""A tokenizer_config.json that says nothing."""
NFKC = {"type": "NFKC"}
LOWER = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BARE_TEMPLATE = {
    "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {},
}  # fmt: skip
PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<new>",
}  # fmt: skip
LEFT = {"truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}}

WORDPIECES = ("bert", "mpnet")
TIE = (("\u2581", -5.691311340812741), ("0", -3.6159406061461867), ("00", -4.035922836261352))
"""Pieces of which two splits of 000 are equally good except for rounding, which the last bit of the scores decides."""


def test_the_scores_of_pieces_are_read_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path, "xlm-roberta")
    special = ((token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>"))
    XLMRobertaTokenizer(vocab=[*special, *TIE, ("<mask>", 0.0)]).save_pretrained(tmp_path)
    for text in ("000", "0000", "00000"):
        expected = AutoTokenizer.from_pretrained(str(tmp_path))(text)["input_ids"]
        assert encode(load(tmp_path), text) == expected


UNIGRAMS = ("xlm-roberta", "camembert")
QWENS = ("qwen2", "qwen3")
PIECE_PAIRS = ("llama", "mistral", "gemma3_text")
BYTE_PAIRS = ("roberta", "modernbert", *QWENS)
CLASSES = (*WORDPIECES, *UNIGRAMS, *PIECE_PAIRS, *BYTE_PAIRS)
"""A family of each class; the others' classes are theirs."""
FALLBACKS = ("albert", "gpt2")
"""Families of classes that only the fallback's models have."""

ANY: list[tuple[JSON, JSON]] = [
    ({"tokenizer_class": GONE}, {}),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ({"tokenizer_class": "TokenizersBackend"}, {}),
    ({"add_bos_token": True, "add_eos_token": True}, {}),
    ({"add_bos_token": False, "add_eos_token": False}, {}),
    ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ({"add_eos_token": True}, {"post_processor": None}),
    ({}, {"post_processor": BARE_TEMPLATE}),
    ({}, {"normalizer": None}),
    ({}, {"normalizer": LOWER}),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"normalizer": LOWER}),
    ({}, LEFT),
    ({"truncation_side": "left"}, {}),
    ({"model_max_length": 17, "padding_side": "left"}, {}),
    ({"model_max_length": GONE, "max_len": 13}, {}),
    ({"extra_special_tokens": ["<new>", "the", "<more>"]}, {}),
    ({"additional_special_tokens": ["<new>", "ab"]}, {}),
    ({"additional_special_tokens": ["<new>"], "extra_special_tokens": ["<more>"]}, {}),
    ({"extra_special_tokens": {"image_token": "<new>", "end_token": "the"}}, {}),
    ({"image_token": "<new>", "extra_special_tokens": ["<more>"]}, {}),
    ({"model_specific_special_tokens": {"image_token": "<new>"}}, {}),
    ({"extra_special_tokens": [full("<new>", lstrip=True)]}, {}),
    ({"pad_token": full("<new>", normalized=False, rstrip=True)}, {}),
    ({"mask_token": "<new>"}, {}),
    ({"eos_token": "<new>"}, {}),
    ({"mask_token": full("<new>", single_word=True), "extra_special_tokens": ["<new>"]}, {}),
    ({"mask_token": "<new>", "extra_special_tokens": ["<new>", full("<new>", lstrip=True, rstrip=True)]}, {}),
    ({"bos_token": "<new>", "pad_token": full("<new>", single_word=True), "mask_token": "<new>"}, {}),
    ({"bos_token": None, "pad_token": GONE, "mask_token": GONE}, {"padding": PADDING}),
    ({"added_tokens_decoder": GONE}, {}),
    ({"added_tokens_decoder": {}}, {}),
    (BARE, {}),
    (BARE | {"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
]
DISAGREEMENTS: list[tuple[str, JSON, JSON]] = [
    *((family, config, tokenizer) for family in CLASSES for config, tokenizer in ANY if config.get("bos_token", "") is not None or family not in UNIGRAMS),
    *((family, {"added_tokens_decoder": decoder(family, lstrip=True, rstrip=True)}, {}) for family in CLASSES),
    *((family, {"added_tokens_decoder": decoder(family, normalized=True)}, {}) for family in CLASSES),
    *((family, {"added_tokens_decoder": GONE}, {"added_tokens": added(family, single_word=True)}) for family in CLASSES),
    *((family, {"added_tokens_decoder": decoder(family, "<mask>", "[MASK]", "<s>NOTUSED", "<|im_end|>")}, {}) for family in CLASSES),
    *((family, BARE, {"added_tokens": added(family, "<mask>", "[MASK]")}) for family in CLASSES),
    *((family, {"do_lower_case": False}, {}) for family in WORDPIECES),
    *((family, {"strip_accents": False}, {}) for family in WORDPIECES),
    *((family, {"do_lower_case": False, "strip_accents": True}, {}) for family in WORDPIECES),
    *((family, {"tokenize_chinese_chars": False}, {}) for family in WORDPIECES),
    *((family, {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, {}) for family in WORDPIECES),
    *((family, {}, {"pre_tokenizer": {"type": "Whitespace"}}) for family in WORDPIECES),
    *((family, {}, model(family, max_input_chars_per_word=3, unk_token="the")) for family in WORDPIECES),
    *((family, {"cls_token": "whimbrel", "sep_token": "bill"}, {}) for family in WORDPIECES),
    *((family, {"unk_token": "the"}, {}) for family in WORDPIECES),
    ("camembert", {"additional_special_tokens": GONE, "added_tokens_decoder": decoder("camembert", "<s>NOTUSED")}, {}),
    *((family, {"add_prefix_space": False}, {}) for family in UNIGRAMS),
    *((family, {}, {"pre_tokenizer": METASPACE}) for family in UNIGRAMS),
    *((family, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"pre_tokenizer": METASPACE}) for family in UNIGRAMS),
    *((family, {}, {"normalizer": {"type": "Sequence", "normalizers": [NFKC, charsmap()]}}) for family in UNIGRAMS),
    *((family, {}, model(family, unk_id=0)) for family in UNIGRAMS),
    *((family, {"unk_token": "</s>"}, {}) for family in UNIGRAMS),
    *((family, {"bos_token": "<pad>", "eos_token": "<unk>"}, {}) for family in UNIGRAMS),
    *((family, {"add_prefix_space": True}, {}) for family in (*BYTE_PAIRS, *PIECE_PAIRS)),
    *((family, {"add_prefix_space": False}, {}) for family in (*BYTE_PAIRS, *PIECE_PAIRS)),
    *((family, {"add_prefix_space": None}, {}) for family in (*QWENS, *PIECE_PAIRS)),
    *((family, {}, {"pre_tokenizer": BYTES}) for family in BYTE_PAIRS),
    *((family, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"pre_tokenizer": BYTES}) for family in BYTE_PAIRS),
    *((family, {}, model(family, ignore_merges=True)) for family in (*BYTE_PAIRS, *PIECE_PAIRS)),
    *((family, {}, model(family, byte_fallback=False, fuse_unk=False, unk_token=None)) for family in PIECE_PAIRS),
    *((family, {"legacy": legacy}, {}) for family in PIECE_PAIRS for legacy in (True, False, None, GONE)),
    *((family, {"unk_token": "</s>" if family in ("llama", "mistral") else "<eos>"}, {}) for family in PIECE_PAIRS),
    *((family, {}, {"pre_tokenizer": METASPACE}) for family in PIECE_PAIRS),
    *((family, config, tokenizer) for family in FALLBACKS for config, tokenizer in (({"tokenizer_class": GONE}, {}), ({}, {"normalizer": LOWER}), ({}, LEFT))),
    *((family, {}, {"post_processor": processor}) for family in FALLBACKS for processor in (None, BARE_TEMPLATE)),
    *((family, {"add_prefix_space": add}, {}) for family in FALLBACKS for add in (True, False)),
    *((family, {"bos_token": None, "pad_token": GONE}, {"padding": PADDING}) for family in FALLBACKS),
    *((family, BARE | {"mask_token": "<new>"}, {"pre_tokenizer": METASPACE}) for family in FALLBACKS),
    ("albert", {"do_lower_case": False}, model("albert", unk_id=0)),
    ("albert", {"cls_token": "n", "sep_token": "<unk>"}, {"post_processor": None}),
    ("gpt2", {}, model("gpt2", ignore_merges=True)),
    ("phi3", {"tokenizer_class": "GPT2Tokenizer"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "tokenizer"), DISAGREEMENTS, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.sample(40)
def test_where_the_files_disagree(family: str, config: JSON, tokenizer: JSON, tmp_path: Path) -> None:
    write(tmp_path, family, config, tokenizer)
    assert_same_ids(tmp_path)


CROSSED = [
    (family, name, files)
    for name, files in {
        "XLMRobertaTokenizer": xlm_roberta(),
        "RobertaTokenizerFast": roberta(),
        "LlamaTokenizer": llama(old=False),
        "LlamaTokenizerFast": qwen(suffix=True),
        "Qwen2TokenizerFast": qwen(suffix=True),
        "GemmaTokenizer": gemma(),
        "DistilBertTokenizerFast": FAMILIES["bert"][1],
        "ElectraTokenizer": FAMILIES["bert"][1],
        "MPNetTokenizerFast": FAMILIES["mpnet"][1],
        "CamembertTokenizerFast": FAMILIES["camembert"][1],
        "DebertaV2TokenizerFast": deberta(lower=True),
    }.items()
    for family in ("bert", "modernbert", "llama", "mistral", "qwen3", "gemma3_text")
]


@pytest.mark.parametrize(("family", "name", "files"), CROSSED, ids=[f"{family}-{name}" for family, name, _ in CROSSED])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.sample(20)
def test_the_class_that_is_stated(where: str, family: str, name: str, files: tuple[JSON, JSON], tmp_path: Path) -> None:
    """The class is the one that AutoTokenizer chooses: mostly the stated one, for any model."""
    tokenizer, config = files
    stated = name if where == "tokenizer_config.json" else GONE
    write(tmp_path, family, config | {"tokenizer_class": stated}, tokenizer, tokenizer_class=GONE if stated == name else name)
    assert_same_ids(tmp_path)


def test_the_name_in_a_config_does_not_choose_the_class(tmp_path: Path) -> None:
    """AutoTokenizer goes by the name of the model that it is asked for."""
    write(tmp_path, "llama", {"legacy": False}, _name_or_path="deepseek-ai/deepseek-coder-1.3b-base")
    assert_same_ids(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [["<new>"], [full("<new>")], []])
@pytest.mark.sample(11)
def test_special_tokens_of_the_map_file(tokens: list[Any], family: str, tmp_path: Path) -> None:
    """It counts where tokenizer_config.json does not list the added tokens."""
    write(tmp_path, family, {"added_tokens_decoder": GONE, "additional_special_tokens": GONE})
    token = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
    names = {"additional_special_tokens": tokens, "pad_token": token | {"content": "the"}, "eos_token": "<more>"}
    write_json(tmp_path / "special_tokens_map.json", names)
    assert_same_ids(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(6)
def test_an_added_token_without_a_row_is_no_token(family: str, tmp_path: Path) -> None:
    """Gemma's token for images in models that know only text is read as text; transformers' model fails at it."""
    write(tmp_path, family)
    number = 1 + max(*vocabulary(family).values(), *(token["id"] for token in content(family)["added_tokens"]))
    listed = [*added(family), full("<image>", id=number, special=True)]
    config = {"added_tokens_decoder": by_id(listed)}
    write(tmp_path, family, config, {"added_tokens": listed}, vocab_size=number)
    assert max(max(row) for row in assert_same_ids(tmp_path).values() if row) < number
    assert max(encode(load(tmp_path), "an <image>")) < number


def vocabulary(family: str) -> dict[str, int]:
    vocab = content(family)["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text", "modernbert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_what_stands_around_a_text(side: str, family: str, tmp_path: Path) -> None:
    write(tmp_path, family, {"truncation_side": side})
    tokenizer = load(tmp_path)
    short, long = (encode_request(tokenizer, Request([text]))[0].ids for text in ("bird", "bird " * 100))
    assert long.size == 60
    assert long[-1] == short[-1]
    assert family == "qwen3" or long[0] == short[0]
    assert_same_ids(tmp_path)


def test_every_family_has_the_class_that_transformers_implies() -> None:
    others = config._IMPLIED.keys() | config._FORCED
    for model_type in {model_type for model_type, _, _ in reader._FORMS.values()} | others:
        name = auto.TOKENIZER_MAPPING_NAMES.get(model_type, "TokenizersBackend")
        kinds = config._IMPLIED | config._FORCED
        # transformers does not know them: their class must be stated
        if model_type in ("new", "llama_bidirec", "qwen3_bidirec", "deepseek_v3_bidirec", "jina_embeddings_v5"):
            assert model_type not in kinds
            continue
        assert kinds[model_type] == config._TOKENIZER_CLASSES[name], model_type
        alone = auto.TOKENIZER_MAPPING_NAMES.get(model_type) == "TokenizersBackend"
        forced = model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS or alone
        assert (model_type in config._FORCED) == forced


@pytest.mark.parametrize("name", sorted(config._TOKENIZER_CLASSES))
def test_names_of_classes_are_those_of_transformers(name: str) -> None:
    found = auto.tokenizer_class_from_name(name)
    names = [base.__name__ for base in found.__mro__]
    kind = config._TOKENIZER_CLASSES[name]
    assert ("TokenizersBackend" if kind == "tokenizer.json" else kind) in names or found.__name__ == "PythonBackend"


REFUSED: list[tuple[str, JSON, JSON, JSON, str]] = [
    ("albert", {"keep_accents": True}, {}, {}, "tokenizer_config.json: keep_accents: "),
    ("albert", {"add_prefix_space": None}, {}, {}, "tokenizer_config.json: add_prefix_space: "),
    ("gpt2", {"add_prefix_space": None}, {}, {}, "tokenizer_config.json: add_prefix_space: "),
    ("bert", {"tokenizer_class": "XLNetTokenizer"}, {}, {}, "tokenizer_config.json: tokenizer_class: "),
    ("qwen3", {"tokenizer_class": GONE}, {}, {"tokenizer_class": "CohereTokenizer"}, "config.json: tokenizer_class: "),
    ("qwen2", {"auto_map": {"AutoTokenizer": ["a.B", None]}}, {}, {}, "tokenizer_config.json: auto_map: "),
    ("mistral", {"fix_mistral_regex": True}, {}, {}, "tokenizer_config.json: fix_mistral_regex: "),
    ("llama", {"init_inputs": ["x"]}, {}, {}, "tokenizer_config.json: init_inputs: "),
    ("llama", {"image_token": full("<new>")}, {}, {}, "tokenizer_config.json: image_token: "),
    ("llama", {"extra_special_tokens": {"pad_token": "<new>"}}, {}, {}, "tokenizer_config.json: extra_special_tokens: "),
    ("bert", {"cls_token": None}, {}, {}, "tokenizer_config.json: cls_token: "),
    ("deberta-v2", {"vocab_type": "gpt2"}, {}, {}, "tokenizer_config.json: vocab_type: 'gpt2' is not supported"),
    ("deberta-v2", {"unk_token": "[NONE]"}, {}, {}, "tokenizer.json: model: holds no '[NONE]' with the score 0"),
    ("deberta-v2", {"add_prefix_space": None}, {}, {}, "tokenizer_config.json: add_prefix_space: null is not supported"),
    ("mpnet", {"sep_token": None}, {}, {}, "tokenizer_config.json: sep_token: "),
    ("camembert", {"bos_token": None}, {}, {}, "tokenizer_config.json: bos_token: "),
    ("gemma2", {"unk_token": None}, {}, {}, "tokenizer_config.json: unk_token: "),
    ("roberta", {"add_prefix_space": None}, {}, {}, "tokenizer_config.json: add_prefix_space: "),
    ("camembert", {"add_prefix_space": None}, {}, {}, "tokenizer_config.json: add_prefix_space: "),
    ("bert", {"cls_token": "<nowhere>"}, {}, {"vocab_size": len(vocabulary("bert"))}, "tokenizer.json: model: "),
    ("bert", {"tokenizer_class": "LlamaTokenizer"}, {}, {}, "tokenizer.json: model: "),
    ("qwen3", {"tokenizer_class": "BertTokenizer", "unk_token": "a"}, {}, {}, "tokenizer.json: model: "),
    ("camembert", {"tokenizer_class": "XLMRobertaTokenizer"}, qwen(suffix=True)[0], {}, "tokenizer.json: model: "),
]


@pytest.mark.parametrize(("family", "config", "tokenizer", "model", "says"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_is_not_read_is_refused(
    family: str, config: JSON, tokenizer: JSON, model: JSON, says: str, tmp_path: Path
) -> None:
    write(tmp_path, family, config, tokenizer, **model)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(says)


def test_mistral_s_own_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mistral")
    write_json(tmp_path / "tekken.json", {})
    with pytest.raises(CheckpointError, match=r"^tekken\.json: "):
        load(tmp_path)


def test_files_at_which_tokenizers_panics_are_refused(tmp_path: Path) -> None:
    """An added token of which the normalizer leaves nothing matches within characters."""
    write(tmp_path, "modernbert", {}, {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read by .* bad split"):
        load(tmp_path)


@pytest.mark.parametrize(("family", "unknown"), [("bert", "<nowhere>"), ("mpnet", "<bos>")])
def test_a_vocabulary_must_have_a_token_for_what_it_does_not_know(family: str, unknown: str, tmp_path: Path) -> None:
    write(tmp_path, family, {"unk_token": unknown})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read by "):
        load(tmp_path)


class PanicException(BaseException):
    """The exception by which the binding reports a panic."""


@pytest.mark.parametrize("error", [PanicException("split"), Exception("split"), KeyboardInterrupt(), MemoryError()])
def test_a_panic_over_a_text_is_the_text_s_fault(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panics:
        def encode_batch_fast(self, texts: list[str], **_: Any) -> None:
            raise error

    write(tmp_path, "bert")
    tokenizer = load(tmp_path)
    monkeypatch.setattr(tokenizer.backend, "raw", Panics())
    expected = InvalidRequest if "split" in str(error) else type(error)
    with pytest.raises(expected):
        encode_request(tokenizer, Request(["bird"]))


@pytest.mark.parametrize("family", ["bert", "qwen3", "llama"])
def test_the_map_file_does_not_count_where_added_tokens_are_listed(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    write_json(
        tmp_path / "special_tokens_map.json", {"mask_token": "the", "cls_token": "<new>", "extra_special_tokens": ["bill"]}
    )
    assert_same_ids(tmp_path)
