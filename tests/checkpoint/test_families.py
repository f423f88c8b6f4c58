"""Every pooling and head against Sentence Transformers, on random checkpoints in both layouts; the layouts of real models
are in test_layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from checkpoints.encoders import write_bert, write_roberta, write_xlmr
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel import Engine
from whimbrel.errors import CheckpointError

TEXTS = [
    "",
    "a",
    "The whimbrel flies.",
    "Vogel " * 7,
    "far far away in a year " * 20,
    "query: birds",
    "1, 2; 3!",
    "ten km " * 11,
]
WRITERS = {"bert": write_bert, "roberta": write_roberta, "xlm-roberta": write_xlmr}
TANH = "torch.nn.modules.activation.Tanh"


def assert_same_as_sentence_transformers(folder: Path, texts: list[str] = TEXTS, **prompt: Any) -> np.ndarray:
    model = SentenceTransformer(str(folder), device="cpu")
    names = {"prompt_name": prompt["prompt"]} if prompt.get("prompt") in model.prompts else prompt
    expected = model.encode(texts, **names)
    with Engine(str(folder), dtype="float32") as engine:
        vectors = engine.embed(texts, **prompt)
        alone = np.stack([engine.embed(text, **prompt) for text in texts])
    assert vectors.shape == expected.shape
    assert np.abs(vectors - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))
    assert np.array_equal(vectors, alone)
    return vectors


@pytest.mark.parametrize("family", WRITERS)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    WRITERS[family](tmp_path)
    sentence_layout(tmp_path, modes=("cls",), heads=())
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode(), Engine(str(tmp_path), dtype="float32") as engine:
        for text in TEXTS:
            inputs = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")
            expected = model(**inputs).last_hidden_state[0, 0].numpy()
            assert np.abs(engine.embed(text) - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh"])
def test_activations(activation: str, tmp_path: Path) -> None:
    write_bert(tmp_path, hidden_act=activation)
    sentence_layout(tmp_path, heads=())
    assert_same_as_sentence_transformers(tmp_path)


@pytest.mark.parametrize("text", ["a <pad> b <pad><pad> c", "<pad>", "</s> a <s>"])
def test_a_padding_token_inside_a_text_keeps_roberta_s_positions(text: str, tmp_path: Path) -> None:
    write_roberta(tmp_path)
    sentence_layout(tmp_path)
    assert_same_as_sentence_transformers(tmp_path, [text, "a"])


@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize(
    "modes",
    [("cls",), ("max",), ("mean",), ("mean_sqrt_len_tokens",), ("weightedmean",), ("lasttoken",), ("cls", "mean"),
     ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")],
    ids="+".join,
)  # fmt: skip
@pytest.mark.sample(5)
def test_poolings(modes: tuple[str, ...], include_prompt: bool, new: bool, tmp_path: Path) -> None:
    write_bert(tmp_path)
    prompts = {"query": "query: ", "document": "the "}
    sentence_layout(tmp_path, modes=modes, include_prompt=include_prompt, new=new, heads=(), prompts=prompts)
    plain = assert_same_as_sentence_transformers(tmp_path)
    named = assert_same_as_sentence_transformers(tmp_path, prompt="query")
    literal = assert_same_as_sentence_transformers(tmp_path, prompt="query: ")
    assert np.array_equal(named, literal)
    assert not np.array_equal(plain, named)


def test_concatenation_keeps_the_stated_order(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=("mean", "cls"), new=True, heads=())
    assert_same_as_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    "heads",
    [
        (("Dense", 20, TANH, {}), "Normalize"),
        (("Dense", 20, TANH, {"bias": False}),),
        (("Dense", 20, "torch.nn.modules.linear.Identity", {}), "LayerNorm"),
        (("Dense", 48, "torch.nn.modules.activation.GELU", {"use_residual": True}), "Normalize"),
        (("Dense", 70, "torch.nn.modules.activation.ReLU", {"use_residual": True}),),
        ("Normalize", ("Dense", 20, "torch.nn.modules.activation.SiLU", {}), ("Dense", 8, "torch.nn.modules.activation.Sigmoid", {})),
        ("LayerNorm", "Normalize"),
    ],
    ids=lambda heads: "-".join(head if isinstance(head, str) else head[0] for head in heads),
)  # fmt: skip
@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
@pytest.mark.sample(5)
def test_heads(heads: tuple[Any, ...], new: bool, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, heads=heads, new=new)
    assert_same_as_sentence_transformers(tmp_path)


def test_H11_a_dense_head_saved_as_a_pickle_is_read_safely(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, heads=(("Dense", 20, TANH, {}),))
    torch.save(load_file(tmp_path / "2_Dense/model.safetensors"), tmp_path / "2_Dense/pytorch_model.bin")
    (tmp_path / "2_Dense/model.safetensors").unlink()
    assert_same_as_sentence_transformers(tmp_path)


def test_a_checkpoint_saved_by_sentence_transformers_itself(tmp_path: Path, minilm: Path) -> None:
    write_xlmr(tmp_path / "first")
    sentence_layout(tmp_path / "first", modes=("cls", "mean"), heads=(("Dense", 20, TANH, {}), "LayerNorm", "Normalize"))
    model = SentenceTransformer(
        str(tmp_path / "first"), device="cpu", prompts={"query": "query: "}, default_prompt_name="query"
    )
    model.save(str(tmp_path / "second"))
    assert_same_as_sentence_transformers(tmp_path / "second")


def test_the_default_prompt_is_applied_and_can_be_left_out(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, prompts={"query": "query: ", "none": ""}, default_prompt_name="query")
    default = assert_same_as_sentence_transformers(tmp_path)
    assert np.array_equal(default, assert_same_as_sentence_transformers(tmp_path, prompt="query"))
    assert not np.array_equal(default, assert_same_as_sentence_transformers(tmp_path, prompt=""))
    assert_same_as_sentence_transformers(tmp_path, prompt="none")


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_side(side: str, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", truncation_side=side)
    texts = [f"bird {'far ' * count} year" for count in range(30, 50)]
    assert_same_as_sentence_transformers(tmp_path, texts)
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.array_equal(engine.embed(texts, truncate=side), engine.embed(texts))


def test_do_lower_case_of_the_sentence_config(tmp_path: Path) -> None:
    write_roberta(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    assert_same_as_sentence_transformers(tmp_path, ["The WHIMBREL", "the whimbrel"])


TRICKY = [
    "  leading and  double ",
    "tab\tnew\nline",
    "Der GROSSE Vogel \u00e9 fliegt",
    "a <mask> b",
    "a [MASK] b[SEP]",
    "<s>x</s>",
    "\uff21\u2460",
    " ",
    "\u96ea\u98de",
]
NFKC = {"type": "NFKC"}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
MASK = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DISAGREEMENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bert", {"do_lower_case": False}, {}),
    ("bert", {"do_lower_case": True, "strip_accents": False}, {}),
    ("bert", {"do_lower_case": False, "tokenizer_class": "BertTokenizerFast"}, {}),
    ("bert", {"do_lower_case": False, "tokenizer_class": None}, {}),
    ("bert", {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ("bert", {"tokenize_chinese_chars": False}, {}),
    ("bert", {"cls_token": "[MASK]", "sep_token": "[UNK]"}, {}),
    ("bert", {}, {"normalizer": None}),
    ("bert", {}, {"pre_tokenizer": {"type": "Whitespace"}}),
    ("bert", {"tokenizer_class": "PreTrainedTokenizerFast"}, {"normalizer": NFKC, "pre_tokenizer": {"type": "Whitespace"}}),
    ("roberta", {"add_prefix_space": True}, {}),
    ("roberta", {}, {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}),
    ("roberta", {"add_prefix_space": True, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ("roberta", {}, {"normalizer": NFKC}),
    ("roberta", {"tokenizer_class": None}, {"normalizer": NFKC}),
    ("roberta", {}, {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                                        "pair": [], "special_tokens": {}}}),
    ("roberta", {"added_tokens_decoder": {"4": MASK}}, {}),
    ("roberta", {"added_tokens_decoder": {"4": MASK}, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ("xlm-roberta", {}, {"pre_tokenizer": METASPACE}),
    ("xlm-roberta", {"tokenizer_class": "XLMRobertaTokenizerFast"}, {"normalizer": NFKC, "pre_tokenizer": METASPACE}),
    ("xlm-roberta", {"tokenizer_class": None}, {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
    ("xlm-roberta", {"tokenizer_class": "PreTrainedTokenizerFast"}, {"pre_tokenizer": METASPACE}),
    ("xlm-roberta", {"add_prefix_space": False}, {}),
    ("bert", {"truncation_side": None}, {"truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config", "tokenizer"), DISAGREEMENTS, ids=str)
@pytest.mark.sample(6)
def test_where_the_tokenizer_s_files_disagree(
    family: str, config: dict[str, Any], tokenizer: dict[str, Any], tmp_path: Path
) -> None:
    """transformers' own classes build all but the vocabulary themselves; other checkpoints go by tokenizer.json."""
    WRITERS[family](tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", **config)
    path = tmp_path / "tokenizer.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | tokenizer)
    assert_same_as_sentence_transformers(tmp_path, [*TRICKY, "far far away in a year " * 20])


def test_special_tokens_of_the_map_file(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "special_tokens_map.json", sep_token={"content": "[MASK]", "lstrip": False}, cls_token="[UNK]")
    assert_same_as_sentence_transformers(tmp_path, TRICKY)


EXTRA: list[dict[str, Any]] = [
    {"extra_special_tokens": ["the", "bird"]},
    {"additional_special_tokens": ["the", "<extra>"]},
    {"extra_special_tokens": ["<extra>", "<more>"]},
    {"extra_special_tokens": {"image_token": "<extra>"}},
    {"mask_token": "<extra>"},
]


@pytest.mark.parametrize("config", EXTRA, ids=str)
@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.sample(6)
def test_special_tokens_that_tokenizer_json_does_not_list(
    family: str, spare: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    """They get the next ids, if the model has rows for them."""
    WRITERS[family](tmp_path)
    if spare:
        WRITERS[family](tmp_path, vocab_size=json.loads((tmp_path / "config.json").read_text())["vocab_size"] + 4)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", **config)
    texts = ["the bird", "bird the", "a whimbrel"]
    assert_same_as_sentence_transformers(tmp_path, [*texts, "the<extra>bird <more> x"] if spare else ["a whimbrel"])


@pytest.mark.parametrize("known", [True, False])
def test_added_tokens_json(known: bool, tmp_path: Path) -> None:
    write_bert(tmp_path, vocab_size=500)
    sentence_layout(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"[MASK]": 4} if known else {"<new>": 450})
    if known:
        assert_same_as_sentence_transformers(tmp_path, TRICKY)
    else:
        with pytest.raises(CheckpointError, match=r"added_tokens\.json: <new>"):
            Engine(str(tmp_path))


@pytest.mark.parametrize("name", ["BertJapaneseTokenizer", "my.Tokenizer", 3])
def test_other_tokenizer_classes_are_refused(name: Any, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=name)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: tokenizer_class"):
        Engine(str(tmp_path))


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "weightedmean", "lasttoken"])
def test_a_prompt_longer_than_the_limit_that_is_left_out(mode: str, tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path, modes=(mode,), include_prompt=False, heads=(), prompts={"query": "far away " * 40})
    assert_same_as_sentence_transformers(tmp_path, prompt="query")


@pytest.mark.parametrize(("hidden", "heads"), [(20, 4), (12, 2), (14, 2), (30, 1), (48, 2)])
@pytest.mark.sample(2)
def test_odd_head_widths(hidden: int, heads: int, tmp_path: Path) -> None:
    write_bert(tmp_path, hidden_size=hidden, num_attention_heads=heads, intermediate_size=33, hidden_act="silu")
    sentence_layout(tmp_path, heads=(("Dense", 7, "torch.nn.modules.activation.SiLU", {}),))
    assert_same_as_sentence_transformers(tmp_path, [*TEXTS, *(f"text {i} of {i % 3}" for i in range(40))])


def test_the_old_layout_with_the_transformer_in_a_folder(tmp_path: Path) -> None:
    write_bert(tmp_path / "0_Transformer")
    sentence_layout(tmp_path / "0_Transformer")
    for name in ("modules.json", "1_Pooling", "config_sentence_transformers.json"):
        (tmp_path / "0_Transformer" / name).rename(tmp_path / name)
    rows = json.loads((tmp_path / "modules.json").read_text())
    rows[0]["path"] = "0_Transformer"
    write_json(tmp_path / "modules.json", rows)
    assert_same_as_sentence_transformers(tmp_path)


def test_matryoshka_cuts_then_normalises(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config.json", matryoshka_dimensions=[8, 24])
    full = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with Engine(str(tmp_path), dtype="float32") as engine:
        for width in (8, 24):
            cut = full[:, :width] / np.linalg.norm(full[:, :width], axis=1, keepdims=True)
            vectors = engine.embed(TEXTS, dimensions=width)
            assert vectors.shape == cut.shape
            assert np.abs(vectors - cut).max() <= 1e-5
            assert np.array_equal(vectors[2], engine.embed(TEXTS[2], dimensions=width))


def test_normalize_can_be_asked_for_or_left_out(tmp_path: Path) -> None:
    for name, heads in (("with", ("Normalize",)), ("without", ())):
        write_bert(tmp_path / name)
        sentence_layout(tmp_path / name, heads=heads)
    with Engine(str(tmp_path / "with"), dtype="float32") as a, Engine(str(tmp_path / "without"), dtype="float32") as b:
        assert np.array_equal(a.embed(TEXTS, normalize=False), b.embed(TEXTS))
        assert np.array_equal(b.embed(TEXTS, normalize=True), a.embed(TEXTS))
        assert not np.allclose(a.embed(TEXTS), b.embed(TEXTS))


def test_shards(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    whole = assert_same_as_sentence_transformers(tmp_path)
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert np.array_equal(assert_same_as_sentence_transformers(tmp_path), whole)


def test_pooling_for_a_checkpoint_without_modules(tmp_path: Path) -> None:
    write_bert(tmp_path / "bare")
    write_bert(tmp_path / "full")
    sentence_layout(tmp_path / "full", heads=(), max_seq_length=64)
    with (
        Engine(str(tmp_path / "bare"), dtype="float32", pooling="mean") as bare,
        Engine(str(tmp_path / "full"), dtype="float32") as full,
    ):
        assert np.array_equal(bare.embed(TEXTS), full.embed(TEXTS))
