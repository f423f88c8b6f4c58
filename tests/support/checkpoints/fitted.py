"""Checkpoints with sensible outputs, made from the packaged MiniLM with heads that are fitted by least squares.

Pages show what these models answer, so their numbers should mean something to a reader. Each checkpoint takes a second to make.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints.files import edit_json, write_json
from checkpoints.late_interaction import BASE, MASK
from checkpoints.sparse import splade_layout
from whimbrel.checkpoint.locate import resolve_checkpoint

CLASSES: dict[str, list[str]] = {
    "birds": [
        "The whimbrel is a wader with a long curved bill.",
        "Geese fly south in autumn.",
        "A robin sings in the garden at dawn.",
        "The nest holds four spotted eggs.",
        "Sandpipers probe wet sand for worms.",
        "What a bird!",
    ],
    "food": [
        "A sandwich has two slices of bread.",
        "Boil the pasta in salted water.",
        "The soup needs more pepper.",
        "We had cheese and wine for dinner.",
        "Bake the cake for forty minutes.",
        "This curry tastes wonderful.",
    ],
    "travel": [
        "The train to Vienna leaves at nine.",
        "Our hotel was close to the beach.",
        "They booked a flight to Lisbon.",
        "You need a passport at the border.",
        "We hiked across the island for a week.",
        "The ferry was late again.",
    ],
    "computing": [
        "The server answers requests over HTTP.",
        "Restart the process after the crash.",
        "A model turns text into vectors.",
        "The compiler found an error.",
        "Install the package with pip.",
        "Memory is full of cached pages.",
    ],
}
"""Texts that teach the classifier its labels."""
NAMES: dict[str, str] = {
    "PER": "Darwin Linnaeus Mary Anna Carl Charles Rachel Carson Maria John Peter Audubon Humboldt Alice Bob Emma Clara Newton Ada",
    "LOC": "Iceland Africa Europe Lisbon Vienna London Canada Spain Ghana Alaska Norway Paris Uppsala Reykjavik Senegal France",
    "ORG": "Google Microsoft BirdLife Unesco Nasa Oxford Cambridge IBM Reuters Toyota Siemens Greenpeace Harvard",
}
"""Names that teach the tagger."""
FRAMES = [
    "{PER} saw whimbrels in {LOC}.",
    "{PER} and {PER} work for {ORG} in {LOC}.",
    "In May {PER} of {ORG} flew from {LOC} to {LOC}.",
    "{ORG} says that the birds leave {LOC} before winter.",
    "Whimbrels live in {LOC}, and {PER} counts them for {ORG}.",
    "The letter from {PER} reached {LOC} in spring.",
    "{PER} founded {ORG}.",
    "{PER} wrote about the sea, the coast and the wind; in {LOC}, {PER} counts birds for {ORG}.",
    "In 1831 {PER} left {LOC} in December and reached the shore of {LOC} in spring.",
]
WORDS = [text for texts in CLASSES.values() for text in texts] + [
    "Whimbrels winter on the coasts of Africa.",
    "Where do whimbrels spend the winter?",
    "It breeds across much of subarctic North America, Asia and Europe.",
    "Waders eat crabs, worms and insects that they find in mud.",
    "The weather is cold in the north and warm on the southern coast.",
    "Ships, cars, trains and planes carry people and goods between countries.",
    "A doctor treats patients in a hospital, a teacher works in a school.",
    "The river flows from the mountains through the forest to the sea.",
]
"""Texts that teach the sparse model to name its own words."""
RELEVANT: list[tuple[str, str]] = [
    ("Where do whimbrels spend the winter?", "Whimbrels winter on the coasts of Africa and South America."),
    ("Where do geese fly in winter?", "Geese winter in the south of Spain."),
    ("What do waders eat?", "Waders eat crabs and worms from the mud."),
    ("How long is the whimbrel's bill?", "The bill of the whimbrel is eight centimetres long."),
    ("How do I cook pasta?", "Boil the pasta in salted water for nine minutes."),
    ("What is a sandwich?", "A sandwich has two slices of bread."),
    ("When does the train leave?", "The train to Vienna leaves at nine."),
    ("Is the hotel open in winter?", "The hotel is closed in winter."),
    ("Where can I buy a coat?", "Winter coats are on sale until the end of the month."),
    ("Why did the server crash?", "The server crashed since its memory was full."),
    ("How do I install the package?", "Install the package with pip."),
    ("Which birds fly south?", "Many birds of the north fly south in autumn."),
]
"""Queries and the documents that answer them, which teach the reranker."""
_STOP = (
    "the a an and or of to in on at is are was were for from with that this it its they we you by as be been am do does did has have had "
    "who where what which when how not no isn can could will would may many so than then there these those into onto very too still"
).split()


@cache
def _minilm() -> tuple[Path, Any, Any]:
    folder = resolve_checkpoint(None).folder
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    return folder, model, transformers.AutoTokenizer.from_pretrained(folder)


def _hidden(texts: list[str] | list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states (T, H) of all tokens of texts or pairs, and their ids (T)."""
    _, model, tokenizer = _minilm()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden_NLH = model(**batch).last_hidden_state
    kept_NL = batch["attention_mask"].bool()
    return hidden_NLH[kept_NL], batch["input_ids"][kept_NL]


@cache
def _word_table() -> torch.Tensor:
    """Return MiniLM's table of embeddings (V, H), centred and of norm 1."""
    table_VH = _minilm()[1].embeddings.word_embeddings.weight.detach()
    return torch.nn.functional.normalize(table_VH - table_VH.mean(0), dim=-1)


def _word_vectors(ids_T: torch.Tensor) -> torch.Tensor:
    """Return the embeddings (T, H) of tokens, 0 for special ones."""
    special_T = torch.isin(ids_T, torch.tensor(_minilm()[2].all_special_ids))
    return _word_table()[ids_T] * ~special_T[:, None]


def _fit(features_TH: torch.Tensor, targets_TC: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (C, H) and bias (C) of the ridge regression from features to targets."""
    mean_H, mean_C = features_TH.mean(0), targets_TC.mean(0)
    x_TH = features_TH - mean_H
    gram_HH = x_TH.T @ x_TH + ridge * len(x_TH) * torch.eye(x_TH.shape[1])
    weight_CH = torch.linalg.solve(gram_HH, x_TH.T @ (targets_TC - mean_C)).T
    return weight_CH.contiguous(), mean_C - weight_CH @ mean_H


def _write(folder: Path, architecture: str, prefix: str, weights: dict[str, torch.Tensor], **config: Any) -> None:
    """Write MiniLM's transformer and tokenizer, with the weights of a head beside it."""
    source, _, _ = _minilm()
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "config.json"):
        shutil.copy(source / name, folder)
    edit_json(folder / "config.json", architectures=[architecture], **config)
    own = {prefix + key: tensor for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(own | weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_late(folder: Path) -> None:
    """Write a late-interaction model, as Sentence Transformers saves it: MiniLM's states, shifted to the embeddings of words."""
    states_TH, ids_T = _hidden(WORDS)
    weight_HH, _ = _fit(states_TH, _word_vectors(ids_T), 0.002)
    _write(folder, "BertModel", "", {})
    token_level = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": 384, "out_features": 384, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    rows: list[tuple[str, str, dict[str, Any] | None]] = [
        ("", f"{BASE}transformer.Transformer", None),
        ("1_Dense", f"{BASE}dense.Dense", dense | token_level),
        ("2_MultiVectorMask", MASK, {"skiplist_words": [".", ",", "[SEP]"], "keep_only_token_ids": None}),
        ("3_Normalize", f"{BASE}normalize.Normalize", token_level),
    ]
    for path, _, config in rows:
        if config is not None:
            write_json(folder / path / "config.json", config)
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind, _) in enumerate(rows)]
    write_json(folder / "modules.json", modules)
    save_file({"linear.weight": 0.1 * torch.eye(384) + weight_HH}, folder / "1_Dense/model.safetensors")
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    write_json(folder / "sentence_bert_config.json", transformer)
    sentence = {"model_type": "MultiVectorEncoder", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": None}
    write_json(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "6.2.0"}} | sentence)


def write_sparse(folder: Path) -> None:
    """Write a SPLADE model. A word's weight grows with how near its embedding is to those of the text's words."""
    _, _, tokenizer = _minilm()
    table_VH = _word_table()
    states_TH, ids_T = _hidden(WORDS)
    inner_TH = torch.nn.functional.layer_norm(states_TH + 20, (384,))  # as the head below computes it
    weight_HH, bias_H = _fit(inner_TH, _word_vectors(ids_T), 0.02)
    vocabulary = tokenizer.get_vocab()
    plain = [number for word, number in vocabulary.items() if word.isalpha() and word.isascii() and word not in _STOP]
    bias_V = torch.full((len(table_VH),), -1000.0)
    bias_V[plain] = 6 * (table_VH @ bias_H - 0.3)[plain]
    head = "cls.predictions."
    weights = {
        f"{head}transform.dense.weight": torch.eye(384),
        f"{head}transform.dense.bias": torch.full((384,), 20.0),  # where GELU is the identity
        f"{head}transform.LayerNorm.weight": torch.ones(384),
        f"{head}transform.LayerNorm.bias": torch.zeros(384),
        f"{head}decoder.weight": (6 * table_VH @ weight_HH).contiguous(),
        f"{head}decoder.bias": bias_V,
        f"{head}bias": bias_V.clone(),
    }
    _write(folder, "BertForMaskedLM", "bert.", weights, tie_word_embeddings=False)
    splade_layout(folder, new=True, embedding_dimension=30522)
    edit_json(folder / "tokenizer_config.json", model_max_length=512)


def write_classes(folder: Path) -> None:
    """Write a classifier with the labels of CLASSES. The pooler is the identity, and tanh."""
    texts = [text for group in CLASSES.values() for text in group]
    states_TH, ids_T = _hidden(texts)
    features_NH = torch.tanh(states_TH[ids_T == 101])
    targets_NC = torch.zeros(len(texts), len(CLASSES))
    for number, row in enumerate(range(0, len(texts), 6)):
        targets_NC[row : row + 6, number] = 6.0
    weight_CH, bias_C = _fit(features_NH, targets_NC, 0.003)
    _write_classifier(folder, weight_CH, bias_C, dict(enumerate(CLASSES)))


def write_entities(folder: Path) -> None:
    """Write a tagger of people, places and organisations."""
    _, _, tokenizer = _minilm()
    texts, wanted = _tagged()
    labels = ["O", *NAMES]
    states_TH, ids_T = _hidden(texts)
    targets_TC = torch.zeros(len(ids_T), len(labels))
    ids_of = {
        name: {each for word in names.split() for each in tokenizer(word)["input_ids"][1:-1]} for name, names in NAMES.items()
    }
    row = 0
    for text, names in zip(texts, wanted, strict=True):
        for token in tokenizer(text)["input_ids"]:
            found = next((name for name in names if token in ids_of[name]), "O")
            targets_TC[row, labels.index(found)] = 8.0
            row += 1
    weight_CH, bias_C = _fit(states_TH, targets_TC, 0.001)
    weights = {"classifier.weight": weight_CH, "classifier.bias": bias_C}
    _write(folder, "BertForTokenClassification", "bert.", weights, **_labels(dict(enumerate(labels))))


def write_ranker(folder: Path) -> None:
    """Write a cross-encoder of one score per pair, which high scores for RELEVANT have taught. The pooler is the identity, and tanh."""
    pairs = [(query, document) for query, _ in RELEVANT for _, document in RELEVANT]
    states_TH, ids_T = _hidden(pairs)
    features_PH = torch.tanh(states_TH[ids_T == 101])
    targets_P = torch.eye(len(RELEVANT)).reshape(-1, 1) * 8 - 4
    weight_CH, bias_C = _fit(features_PH, targets_P, 0.0005)
    _write_classifier(folder, weight_CH, bias_C, {0: "LABEL_0"})


def _write_classifier(folder: Path, weight_CH: torch.Tensor, bias_C: torch.Tensor, labels: dict[int, str]) -> None:
    pooler = {"bert.pooler.dense.weight": torch.eye(384), "bert.pooler.dense.bias": torch.zeros(384)}
    weights = {"classifier.weight": weight_CH, "classifier.bias": bias_C} | pooler
    _write(folder, "BertForSequenceClassification", "bert.", weights, **_labels(labels))


def _labels(labels: dict[int, str]) -> dict[str, Any]:
    return {
        "id2label": {str(number): label for number, label in labels.items()},
        "label2id": {label: number for number, label in labels.items()},
    }


def _tagged() -> tuple[list[str], list[set[str]]]:
    """Return sentences with names in turn, and which kinds of names each has."""
    turns = dict.fromkeys(NAMES, 0)
    texts: list[str] = []
    wanted: list[set[str]] = []
    for number in range(10 * len(FRAMES)):
        text, kinds = FRAMES[number % len(FRAMES)], set[str]()
        for kind, names in NAMES.items():
            while f"{{{kind}}}" in text:
                text = text.replace(f"{{{kind}}}", names.split()[turns[kind] % len(names.split())], 1)
                turns[kind] += 1
                kinds.add(kind)
        texts.append(text)
        wanted.append(kinds)
    return texts, wanted


KINDS: dict[str, Callable[[Path], None]] = {
    "late": write_late,
    "sparse": write_sparse,
    "ranker": write_ranker,
    "classes": write_classes,
    "entities": write_entities,
}
"""Writers of a model of each kind."""
