"""Modules one after another in the orders that Sentence Transformers saves, each checkpoint written by that library itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

from checkpoints.classifiers import PAIRS, SPLIT_PAIRS
from checkpoints.encoders import write_bert, write_roberta
from checkpoints.files import edit_json, write_json
from checkpoints.rerankers import PAIRS as LONG_PAIRS
from checkpoints.rerankers import qwen, write_reranker
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.types.request import Request

TEXTS = ["", "a", "The whimbrel flies.", "ein großer Vogel!", "far far away in a year " * 20, "query: birds"]
WIDTH = 48
CHAT = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
)


def transformer(folder: Path, write: Any = write_bert) -> Transformer:
    write(folder)
    return Transformer(str(folder), max_seq_length=40)


def decoder(folder: Path) -> Transformer:
    """A causal model whose tokenizer has a chat template, so that its inputs may be texts and messages."""
    content, stated = copy.deepcopy(qwen())
    write_reranker(folder, "Qwen3", (content, stated | {"chat_template": CHAT}), "Model", max_position_embeddings=300)
    return Transformer(str(folder), max_seq_length=300)


def scale(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Give every module weights that are large enough to matter."""
    generator = torch.Generator().manual_seed(7)
    for module in modules[1:]:
        for parameter in module.parameters():
            with torch.no_grad():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return list(modules)


def save(model: Any, folder: Path) -> Any:
    """The model as it is loaded again."""
    model.save_pretrained(str(folder))
    return type(model)(str(folder), device="cpu")


# Cross-encoders


def scores(width: int, **options: Any) -> Dense:
    return Dense(width, 1, activation_function=None, module_output_name="scores", **options)


CHAINS: dict[str, tuple[list[torch.nn.Module], Any]] = {
    "plain": ([Pooling(WIDTH, "cls"), scores(WIDTH)], None),
    "deep": (
        [
            Pooling(WIDTH, "mean"), LayerNorm(WIDTH), Dropout(0.3), Dense(WIDTH, 20, activation_function=torch.nn.GELU()),
            Normalize(), scores(20, bias=False),
        ],
        torch.nn.Identity(),
    ),
    "several labels": (
        [Pooling(WIDTH, ("cls", "max")), Dense(2 * WIDTH, 3, activation_function=torch.nn.Tanh(), module_output_name="scores")],
        None,
    ),
    "several labels, softmax": (
        [Pooling(WIDTH, "mean"), Dense(WIDTH, 3, activation_function=None, module_output_name="scores")],
        torch.nn.Softmax(dim=1),
    ),
    "scores of scores, and a vector that nobody reads": (
        [
            Dense(WIDTH, 20, module_input_name="token_embeddings"), Pooling(20, "mean"),
            Dense(20, 4, module_output_name="scores"), LayerNorm(20), Normalize(), scores(4, module_input_name="scores"),
        ],
        None,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", CHAINS)
def test_cross_encoders_of_several_modules(name: str, parity: Parity, tmp_path: Path) -> None:
    modules, activation = CHAINS[name]
    chain = scale([transformer(tmp_path / "plain", write_roberta if name == "deep" else write_bert), *modules])
    made = CrossEncoder(modules=chain, device="cpu", activation_fn=activation, prompts={"query": "birds: "})
    reference = save(made, tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        found = engine.score(*SPLIT_PAIRS)
        parity(found, reference.predict(PAIRS))
        parity(engine.score(*SPLIT_PAIRS, activate=False), reference.predict(PAIRS, activation_fn=torch.nn.Identity()))
        parity(engine.score(*SPLIT_PAIRS, prompt="query"), reference.predict(PAIRS, prompt_name="query"))
        for pair, together in zip(PAIRS, found, strict=True):
            assert np.array_equal(engine.score(*pair), together[None])
        if reference.num_labels == 1:
            ranked = engine.rerank(PAIRS[0][0], [document for _, document in PAIRS[:4]])
            expected = reference.rank(PAIRS[0][0], [document for _, document in PAIRS[:4]])
            assert [each.index for each in ranked] == [each["corpus_id"] for each in expected]


def test_labels_are_those_of_the_config_if_there_are_as_many(tmp_path: Path) -> None:
    modules, _ = CHAINS["several labels"]
    save(CrossEncoder(modules=scale([transformer(tmp_path / "plain"), *modules]), device="cpu"), tmp_path)
    assert read_card(tmp_path, "m").labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    edit_json(tmp_path / "config.json", id2label={"0": "no", "1": "yes"})
    assert read_card(tmp_path, "m").labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    edit_json(tmp_path / "config.json", id2label={"0": "no", "1": "yes", "2": "maybe"})
    assert read_card(tmp_path, "m").labels == ("no", "yes", "maybe")


@pytest.mark.parametrize("activation", [None, torch.nn.Identity()])
def test_a_cross_encoder_of_a_decoder_without_its_head(activation: Any, parity: Parity, tmp_path: Path) -> None:
    """Pairs go through the chat template, and the last token through a Dense, as Sentence Transformers' guide has it."""
    chain = scale([decoder(tmp_path / "plain"), Pooling(WIDTH, "lasttoken"), scores(WIDTH, bias=False)])
    made = CrossEncoder(modules=chain, device="cpu", activation_fn=activation, prompts={"web": "Judge."})
    reference = save(made, tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        for prompt in (None, "web"):
            for pair in LONG_PAIRS[:5]:
                features = reference.preprocess([pair], prompt=None if prompt is None else "Judge.")
                ids = engine.preprocessor.preprocess(Request([pair], prompt_name=prompt)).seqs[0].ids
                assert ids.tolist() == features["input_ids"][0].tolist()
            found = engine.score(*map(list, zip(*LONG_PAIRS[:5], strict=True)), prompt=prompt)
            parity(found, reference.predict(LONG_PAIRS[:5], prompt_name=prompt), tolerance=5e-5)


# Vectors


ORDERS: dict[str, list[torch.nn.Module]] = {
    "dense on tokens": [Dense(WIDTH, 20, module_input_name="token_embeddings"), Pooling(20, "mean"), Normalize()],
    "all on tokens": [
        Dense(WIDTH, 30, activation_function=torch.nn.GELU(), module_input_name="token_embeddings"),
        Normalize(module_input_name="token_embeddings"), Dense(30, 20, bias=False, module_input_name="token_embeddings"),
        Pooling(20, ("max", "weightedmean", "lasttoken")), Dense(60, 16),
    ],
    "after the pooling": [Pooling(WIDTH, "cls"), Dropout(0.1), LayerNorm(WIDTH), Dense(WIDTH, 20), Normalize(), Dense(20, 20, use_residual=True)],
    "two poolings": [Pooling(WIDTH, "mean"), Pooling(WIDTH, "cls"), Normalize()],
    "two poolings, heads between": [
        Pooling(WIDTH, "mean"), Dense(WIDTH, 20), Dense(WIDTH, 30, module_input_name="token_embeddings"),
        Pooling(30, ("max", "lasttoken")), LayerNorm(60),
    ],
    "tokens that nobody reads": [Pooling(WIDTH, "mean"), Dense(WIDTH, 20, module_input_name="token_embeddings"), Normalize()],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_vectors_of_any_order_of_modules(name: str, parity: Parity, tmp_path: Path) -> None:
    chain = scale([transformer(tmp_path / "plain"), *ORDERS[name]])
    reference = save(SentenceTransformer(modules=chain, device="cpu"), tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        found = engine.embed(TEXTS)
        parity(found, reference.encode(TEXTS))
        assert np.array_equal(found, np.stack([engine.embed(text) for text in TEXTS]))


# truncate_dim


@pytest.mark.parametrize("modules", [[Pooling(WIDTH, "mean"), Normalize()], [Pooling(WIDTH, "mean")]], ids=len)
def test_vectors_are_cut_as_the_checkpoint_says(modules: list[torch.nn.Module], parity: Parity, tmp_path: Path) -> None:
    """After all modules, and they are not normalised again unless that is asked."""
    chain = [transformer(tmp_path / "plain"), *modules]
    reference = save(SentenceTransformer(modules=chain, device="cpu", truncate_dim=12), tmp_path / "saved")
    assert reference.truncate_dim == 12
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        found = engine.embed(TEXTS)
        assert found.shape == (len(TEXTS), 12)
        parity(found, reference.encode(TEXTS))
        parity(engine.embed(TEXTS, normalize=True), reference.encode(TEXTS, normalize_embeddings=True))
        assert np.array_equal(engine.embed(TEXTS, normalize=False), found)
        for width in (5, 30, WIDTH):
            parity(engine.embed(TEXTS, dimensions=width), reference.encode(TEXTS, truncate_dim=width))
            parity(
                engine.embed(TEXTS, dimensions=width, normalize=True),
                reference.encode(TEXTS, truncate_dim=width, normalize_embeddings=True),
            )
        with pytest.raises(InvalidRequest, match="dimensions"):
            engine.embed(TEXTS, dimensions=WIDTH + 1)


def test_a_cut_wider_than_the_vectors_cuts_nothing(parity: Parity, tmp_path: Path) -> None:
    chain = [transformer(tmp_path / "plain"), Pooling(WIDTH, "mean"), Normalize()]
    reference = save(SentenceTransformer(modules=chain, device="cpu", truncate_dim=100), tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        parity(engine.embed(TEXTS), reference.encode(TEXTS))


# Refusals

REFUSED: dict[str, tuple[list[torch.nn.Module], str]] = {
    "pooled before there are tokens of that width": ([Pooling(20, "mean")], r"1_Pooling/config\.json: embedding_dimension"),
    "a dense of a vector before the pooling": ([Dense(WIDTH, 20), Pooling(WIDTH, "mean")], r"1_Dense/config\.json: module_input_name: '1_Dense' works on 'sentence_embedding'"),
    "a vector out of tokens": (
        [Dense(WIDTH, 20, module_input_name="token_embeddings", module_output_name="sentence_embedding")],
        r"1_Dense/config\.json: module_output_name: ",
    ),
    "a name of its own": ([Pooling(WIDTH, "mean"), Dense(WIDTH, 20, module_output_name="mine")], r"2_Dense/config\.json: module_output_name: 'mine'"),
    "no vector": ([Dense(WIDTH, 20, module_input_name="token_embeddings")], r"modules\.json: .*'sentence_embedding'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    modules, message = REFUSED[name]
    model = SentenceTransformer(modules=[transformer(tmp_path / "plain"), *modules], device="cpu")
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    with pytest.raises(CheckpointError, match=message):
        read_card(tmp_path / "saved", "m")


def test_a_cross_encoder_without_scores_is_refused(tmp_path: Path) -> None:
    chain = [transformer(tmp_path / "plain"), Pooling(WIDTH, "mean"), Dense(WIDTH, 1)]
    CrossEncoder(modules=chain, device="cpu").save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"modules\.json: .*'scores'"):
        read_card(tmp_path / "saved", "m")


MODULES = "sentence_transformers.sentence_transformer.modules."


@pytest.mark.parametrize(
    "prefix", ["sentence_transformers.models.{name}.", "sentence_transformers.models.", MODULES + "{file}."]
)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("WordWeights", "word_weights"), ("LSTM", "lstm"), ("CNN", "cnn"), ("BoW", "bow"), ("WordEmbeddings", "word_embeddings"),
        ("WeightedLayerPooling", "weighted_layer_pooling"), ("CLIPModel", "clip_model"),
    ],
)  # fmt: skip
def test_modules_that_are_not_supported_are_named(name: str, file: str, prefix: str, tmp_path: Path) -> None:
    chain = [transformer(tmp_path / "plain"), Pooling(WIDTH, "mean")]
    SentenceTransformer(modules=chain, device="cpu").save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    rows = json.loads((tmp_path / "saved/modules.json").read_text())
    middle = {"idx": 1, "name": "1", "path": "1_X", "type": prefix.format(name=name, file=file) + name}
    write_json(tmp_path / "saved/modules.json", [rows[0], middle, rows[1]])
    with pytest.raises(CheckpointError, match=rf"modules\.json: type: .*{name}' is not supported"):
        read_card(tmp_path / "saved", "m")
