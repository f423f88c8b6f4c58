"""Sparse vectors against Sentence Transformers: SPLADE in all families that have it, and sparse autoencoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import AutoModelForMaskedLM, AutoTokenizer

from checkpoints.encoders import write_bert
from checkpoints.files import edit_json, write_json
from checkpoints.published.blocks import draw_weights
from checkpoints.published.cases import save_tokenizer
from checkpoints.published.lfm2 import LFM2, LFM2_ENCODER, lfm2, lfm2_names
from checkpoints.sentence_layout import sentence_layout
from checkpoints.sparse import OLD_SPARSE, as_matrix, splade_layout, write_code, write_splade
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.model import head_functions
from whimbrel.types.request import Request

TEXTS = [
    "",
    "a",
    "The whimbrel flies.",
    "Vogel " * 7,
    "far far away in a year " * 20,
    "query: birds",
    "1, 2; 3!",
    "[SEP] a [CLS]",
]


def assert_same(
    folder: Path, parity: Parity | None = None, models: tuple[str, ...] = (), **options: Any
) -> NDArray[np.float32]:
    """Assert that vectors are those of Sentence Transformers, with the same bits alone and together."""
    model = SparseEncoder(str(folder), device="cpu")
    names = {"prompt_name": options["prompt"]} if "prompt" in options else {}
    limit = {"max_active_dims": options["max_active_dims"]} if "max_active_dims" in options else {}
    expected = model.encode(TEXTS, convert_to_sparse_tensor=False, **names, **limit).numpy()
    with Engine(str(folder), dtype="float32") as engine:
        sparse = engine.sparse(TEXTS, **options)
        alone = [engine.sparse(text, **options)[0] for text in TEXTS]
        family = engine.card.encoder.family
    found = as_matrix(sparse, expected.shape[1])
    (parity or Parity(""))(found, expected, *models, family=family, tasks=["sparse"])
    for (ids, weights), (ids_alone, weights_alone) in zip(sparse, alone, strict=True):
        assert np.array_equal(ids, ids_alone)
        assert np.array_equal(weights, weights_alone)
    return found


HEADS = [
    "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "electra of one width", "mpnet", "gte", "modernbert",
    "modernbert with biases",
]  # fmt: skip
"""Families whose masked-language-model heads are known."""
MODELS = {
    "bert": ("naver/splade-cocondenser-ensembledistil", "naver/splade-v3", "prithivida/Splade_PP_en_v1"),
    "distilbert": ("naver/splade-v3-distilbert", "opensearch-project/opensearch-neural-sparse-encoding-v2-distill"),
}
"""In the older layout."""


@pytest.mark.parametrize(
    ("case", "new"), [("bert", True), *((case, case not in MODELS and number % 2 == 1) for number, case in enumerate(HEADS))]
)
@pytest.mark.sample(4)
def test_splade(case: str, new: bool, parity: Parity, tmp_path: Path) -> None:
    write_splade(tmp_path, case)
    splade_layout(tmp_path, new=new)
    found = assert_same(tmp_path, parity, () if new else MODELS.get(case, ()))
    assert 0.02 < (found > 0).mean() < 0.98


@pytest.mark.parametrize("tied", [False, True])
def test_splade_over_lfm2(tied: bool, tmp_path: Path, parity: Parity) -> None:
    """The head of LFM2.5's encoders is one layer over the hidden states, by its formula."""
    config = LFM2 | LFM2_ENCODER
    weights = draw_weights(lfm2_names(config))
    named = {f"lfm2.{name}": tensor for name, tensor in weights.items()}
    head = (
        weights["embed_tokens.weight"]
        if tied
        else draw_weights({"lm_head.weight": (config["vocab_size"], 48)})["lm_head.weight"]
    )
    save_file(named | ({} if tied else {"lm_head.weight": head}), tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "config.json", config | {"tie_word_embeddings": tied, "tie_embedding": tied})
    save_tokenizer(tmp_path)
    splade_layout(tmp_path, new=True)
    with Engine(str(tmp_path), dtype="float32") as engine, torch.inference_mode():
        found = as_matrix(engine.sparse(TEXTS), config["vocab_size"])
        ids = [seq.ids for seq in engine.preprocessor.preprocess(Request(TEXTS)).seqs]
        states = [lfm2(weights, config, torch.from_numpy(row).long()) for row in ids]
        expected = torch.stack([(state @ head.T).relu().log1p().amax(0) for state in states]).numpy()
        parity(found, expected, family="lfm2", tasks=["sparse"])
    edit_json(
        tmp_path / "config.json", architectures=["Lfm2ForCausalLM"], auto_map=None, is_causal=None, disable_flash_attention=None
    )
    with pytest.raises(CheckpointError, match="language-modelling head of this architecture is not supported"):
        read_card(tmp_path, "m")


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", HEADS)
def test_a_gpu_gives_the_same(case: str, dtype: str, strategy: str, tmp_path: Path) -> None:
    write_splade(tmp_path, case)
    splade_layout(tmp_path, pooling_strategy=strategy)
    with (
        Engine(str(tmp_path), device="cpu", dtype="float32") as exact,
        Engine(str(tmp_path), device="cuda", dtype=dtype) as engine,
    ):
        one, other = (as_matrix(each.sparse(TEXTS), 400) for each in (exact, engine))
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert cosines.min() > (0.9999 if dtype == "float32" else 0.99)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_poolings(strategy: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of fewer entries than there are, the last of which is a short one."""
    monkeypatch.setattr(head_functions, "_BLOCK", 48)
    write_splade(tmp_path, vocab_size=395)
    splade_layout(tmp_path, pooling_strategy=strategy, activation_function=activation, word_embedding_dimension=395)
    assert_same(tmp_path)


@pytest.mark.bfloat16
def test_half_precision_is_near(tmp_path: Path) -> None:
    write_splade(tmp_path)
    splade_layout(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as exact, Engine(str(tmp_path), dtype="bfloat16") as engine:
        one, other = (as_matrix(each.sparse(TEXTS), 400) for each in (exact, engine))
        alone = engine.sparse(TEXTS[4])
        assert np.array_equal(as_matrix(alone, 400)[0], other[4])
    assert ((one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)).min() > 0.99


def test_without_modules_it_is_said_with_pooling(tmp_path: Path) -> None:
    """The formula is that of naver's code: log(1 + relu(scores)) times the attention mask, the largest of all tokens."""
    model = write_splade(tmp_path, "distilbert")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=40)
    inputs = AutoTokenizer.from_pretrained(tmp_path)(TEXTS, padding=True, truncation=True, max_length=40, return_tensors="pt")
    with torch.inference_mode():
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        expected, _ = torch.max(torch.log(1 + torch.relu(scores)) * inputs["attention_mask"].unsqueeze(-1), dim=1)
    with Engine(str(tmp_path), dtype="float32", pooling="splade") as engine:
        found = as_matrix(engine.sparse(TEXTS), 400)
        assert list(engine.card.outputs) == ["sparse"]
        with pytest.raises(InvalidRequest, match="sparse"):
            engine.embed("a")
    assert np.abs(found - expected.numpy()).max() <= 1e-5 * float(expected.max())
    with pytest.raises(CheckpointError, match="splade"):
        read_card(tmp_path, "m")
    assert list(read_card(tmp_path, "m", pooling="mean").outputs) == ["dense"]


def test_a_decoder_of_its_own(tmp_path: Path) -> None:
    write_splade(tmp_path, tie_word_embeddings=False)
    splade_layout(tmp_path)
    untied = assert_same(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["cls.predictions.decoder.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.decoder\.weight"):
        Engine(str(tmp_path), dtype="float32")
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    assert not np.array_equal(assert_same(tmp_path), untied)


def test_prompts_and_limits(tmp_path: Path) -> None:
    write_splade(tmp_path)
    splade_layout(tmp_path)
    edit_json(tmp_path / "config_sentence_transformers.json", prompts={"query": "query: ", "document": ""}, max_active_dims=9)
    prompted = assert_same(tmp_path, prompt="query")
    assert (prompted > 0).sum(1).max() == 9
    assert (assert_same(tmp_path, max_active_dims=5) > 0).sum(1).max() == 5
    with Engine(str(tmp_path), dtype="float32") as engine:
        named = engine.sparse("birds", input_type="query")
        assert np.array_equal(as_matrix(named, 400), as_matrix(engine.sparse("query: birds"), 400))
        for wrong in (0, -1, True, "many"):
            with pytest.raises(InvalidRequest, match="max_active_dims"):
                engine.sparse("a", max_active_dims=wrong)  # pyright: ignore[reportArgumentType]


def test_only_texts_that_asked_are_decoded(tmp_path: Path) -> None:
    """Beside others, and with other limits, a text gives the same."""
    write_splade(tmp_path)
    splade_layout(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as engine:
        futures = [engine.submit(Request([text], max_active_dims=limit)) for text in TEXTS for limit in (None, 3, 400)]
        found = [future.result().outputs.sparse for future in futures]
        for text, (free, few, many) in zip(TEXTS, zip(*[iter(found)] * 3, strict=True), strict=True):
            assert free is not None
            assert few is not None
            assert many is not None
            assert np.array_equal(as_matrix(free, 400), as_matrix(many, 400))
            assert np.array_equal(as_matrix(few, 400), as_matrix(engine.sparse(text, max_active_dims=3), 400))
            kept = as_matrix(free, 400)[0]
            assert np.array_equal(np.flatnonzero(as_matrix(few, 400)[0]), np.sort(np.argsort(-kept, kind="stable")[:3]))


@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_sparse_autoencoder(normalize: bool, new: bool, tmp_path: Path) -> None:
    write_code(tmp_path, new=new, normalize=normalize)
    assert (assert_same(tmp_path) > 0).sum(1).max() == 16
    assert (assert_same(tmp_path, max_active_dims=5) > 0).sum(1).max() == 5
    with Engine(str(tmp_path), dtype="float32") as engine, pytest.raises(InvalidRequest, match="16"):
        engine.sparse("a", max_active_dims=17)


def test_a_sparse_autoencoder_after_other_heads(tmp_path: Path) -> None:
    """Its weights pickled, with the decoder's beside them."""
    write_code(tmp_path, heads=("LayerNorm", "Normalize"), safe=False)
    assert_same(tmp_path)


def test_what_a_checkpoint_says_of_k_in_its_place(tmp_path: Path) -> None:
    write_code(tmp_path)
    edit_json(tmp_path / "config_sentence_transformers.json", max_active_dims=24)
    assert (assert_same(tmp_path) > 0).sum(1).max() > 16


def test_the_same_latents(tmp_path: Path) -> None:
    """More latents of the same value than are kept."""
    write_code(tmp_path, k=3)
    file = tmp_path / "2_SparseAutoEncoder/model.safetensors"
    weights = load_file(file)
    weights["decoder.linear.weight"] = weights["decoder.linear.weight"][:1].repeat(192, 1)
    weights["latent_bias"] = torch.full((192,), 100.0)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    assert (assert_same(tmp_path) > 0).sum(1).tolist() == [3] * len(TEXTS)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "strategy": ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy"),
    "activation": ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function"),
    "width": ("1_SpladePooling/config.json", {"word_embedding_dimension": 30522}, "word_embedding_dimension"),
    "key": ("1_SpladePooling/config.json", {"temperature": 2}, "temperature"),
    "task": ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "transformer_task"),
    "kind of model": ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "model_type"),
    "limit": ("config_sentence_transformers.json", {"max_active_dims": 0}, "max_active_dims"),
    "head": ("config.json", {"architectures": ["NomicBertForMaskedLM"], "model_type": "nomic_bert"}, "architectures"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_supported_is_refused(case: str, tmp_path: Path) -> None:
    file, change, key = WRONG[case]
    write_splade(tmp_path)
    splade_layout(tmp_path)
    edit_json(tmp_path / file, **change)
    with pytest.raises(CheckpointError) as raised:
        read_card(tmp_path, "m")
    assert (raised.value.file, raised.value.key) == (file, key)


def test_the_task_of_the_transformer_must_be_said(tmp_path: Path) -> None:
    write_splade(tmp_path)
    splade_layout(tmp_path, new=True)
    edit_json(tmp_path / "sentence_bert_config.json", transformer_task=None)
    with pytest.raises(CheckpointError, match="transformer_task"):
        read_card(tmp_path, "m")


def test_a_sparse_model_that_pools_hidden_states_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    edit_json(tmp_path / "config_sentence_transformers.json", max_active_dims=9)
    with pytest.raises(CheckpointError, match="max_active_dims"):
        read_card(tmp_path, "m")


@pytest.mark.parametrize(
    ("change", "key"), [({"k": 193}, "k"), ({"input_dim": 47}, "input_dim"), ({"top": 1}, "top"), ({"k": 0}, "k")]
)
def test_wrong_autoencoders_are_refused(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    write_code(tmp_path)
    edit_json(tmp_path / "2_SparseAutoEncoder/config.json", **change)
    with pytest.raises(CheckpointError) as raised:
        read_card(tmp_path, "m")
    assert raised.value.key == key


def write_table(folder: Path, *, old: bool = False) -> SparseStaticEmbedding:
    """A weight for each token and nothing else, as Sentence Transformers saves it; some weigh nothing."""
    write_bert(folder / "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert", model_max_length=30)
    weight = torch.rand(len(tokenizer.get_vocab()), generator=torch.Generator().manual_seed(2))
    weight[::7] = 0
    module = SparseStaticEmbedding(tokenizer, weight, frozen=True)
    SparseEncoder(modules=[module], device="cpu", prompts={"query": "query: "}).save_pretrained(str(folder))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    if old:
        write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"{OLD_SPARSE}SparseStaticEmbedding"}])
    return module


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_table_of_weights(old: bool, tmp_path: Path) -> None:
    write_table(tmp_path, old=old)
    found = assert_same(tmp_path)
    assert not found[0].any()
    assert found[1:].any(axis=1).all()
    assert_same(tmp_path, prompt="query")
    weights = np.unique(found[found > 0])
    assert weights.size > 20


def test_a_table_in_json(tmp_path: Path) -> None:
    """The file that opensearch's models have too. Sentence Transformers looks for it where it runs."""
    module = write_table(tmp_path)
    expected = assert_same(tmp_path)
    tokens = module.tokenizer.convert_ids_to_tokens(range(module.weight.numel()))
    weights = {token: float(weight) for token, weight in zip(tokens, module.weight.tolist(), strict=True) if weight}
    write_json(tmp_path / "idf.json", weights)
    (tmp_path / "model.safetensors").unlink()
    edit_json(tmp_path / "config.json", path="idf.json")
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert np.array_equal(as_matrix(engine.sparse(TEXTS), expected.shape[1]), expected)
    write_json(tmp_path / "idf.json", weights | {"surely no token": 1.0})
    with pytest.raises(CheckpointError, match="surely no token"):
        Engine(str(tmp_path), dtype="float32")


@pytest.mark.parametrize(
    ("file", "change", "key"),
    [("config.json", {"path": "other.json"}, "path"), ("config.json", {"path": "../idf.json"}, "path"), ("config.json", {"scale": 2}, "scale"),
     ("tokenizer_config.json", {"model_max_length": 0}, "model_max_length")],
)  # fmt: skip
def test_wrong_tables_are_refused(file: str, change: dict[str, Any], key: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    edit_json(tmp_path / file, **change)
    with pytest.raises(CheckpointError) as raised:
        read_card(tmp_path, "m")
    assert (raised.value.file, raised.value.key) == (file, key)


def test_a_router_of_a_table_and_splade(parity: Parity, tmp_path: Path) -> None:
    """OpenSearch's models for documents are such: queries need no transformer."""
    write_splade(tmp_path / "mlm", "distilbert")
    edit_json(tmp_path / "mlm/tokenizer_config.json", model_max_length=40, tokenizer_class="BertTokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mlm", model_max_length=40)
    weight = torch.rand(len(tokenizer.get_vocab()), generator=torch.Generator().manual_seed(2))
    document = [
        Transformer(str(tmp_path / "mlm"), transformer_task="fill-mask"),
        SpladePooling(activation_function="log1p_relu"),
    ]
    routes = {"query": [SparseStaticEmbedding(tokenizer, weight, frozen=True)], "document": document}
    folder = tmp_path / "router"
    SparseEncoder(modules=[Router.for_query_document(routes["query"], routes["document"])], device="cpu").save_pretrained(
        str(folder)
    )
    for path in folder.glob("*/tokenizer_config.json"):
        edit_json(path, tokenizer_class="BertTokenizer")
    model = SparseEncoder(str(folder), device="cpu")
    names = ("opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill",)
    with Engine(str(folder), dtype="float32") as engine:
        for kind, encode, family in (
            ("query", model.encode_query, "static"),
            ("document", model.encode_document, "distilbert"),
        ):
            expected = encode(TEXTS, convert_to_sparse_tensor=False).numpy()
            found = engine.sparse(TEXTS, input_type=kind)
            wide = np.zeros_like(expected)
            for row, (ids, weights) in zip(wide, found, strict=True):
                row[ids] = weights
            parity(wide, expected, *(names if kind == "document" else ()), family=family, tasks=["sparse"])
            for text, (ids, weights) in zip(TEXTS, found, strict=True):
                alone = engine.sparse(text, input_type=kind)[0]
                assert np.array_equal(alone[0], ids)
                assert np.array_equal(alone[1], weights)
