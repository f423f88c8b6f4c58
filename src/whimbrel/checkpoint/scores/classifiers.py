"""Classification heads.

Reads the outputs of cross-encoders, text and token classifiers, and reward models. The heads of each family are rows of tables.
The final activation is that of Sentence Transformers' CrossEncoder if the checkpoint is one, else that of transformers'
pipelines (docs/adr/0012-activations.md).

Sources: transformers/models/*/modeling_*.py (ForSequenceClassification, ForTokenClassification) and configuration_utils.py
(5.23); sentence_transformers/cross_encoder/model.py (6.2); modeling_qwen2_rm.py of Qwen2.5-Math-RM-72B and -PRM-7B;
modeling_internlm2.py of internlm2-1_8b-reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from whimbrel.checkpoint.config import bert, common, fallback
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.checkpoint.sentence_transformers.chained import Features, resolve_features, tokens
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, Rows
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Encoder, Output
from whimbrel.types.choices import PoolingMode
from whimbrel.types.heads import Activation, Dense, Head, LayerNorm, OutputActivation
from whimbrel.types.request import OutputName

Classes: TypeAlias = tuple[dict[OutputName, Output], tuple[str, ...]]
"""Outputs, and the labels of their columns."""
_Kind: TypeAlias = Literal["text", "token", "reward", "step"]
_KINDS: Final[Mapping[str, _Kind]] = {
    "ForSequenceClassification": "text",
    "ForTokenClassification": "token",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "step",
}
_STEP_TAG: Final = "<extra_0>"
"""The token at the end of each step in Qwen's process reward models."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers between the hidden states and the classes."""

    last: str
    """Name of the layer that gives the classes."""
    before: tuple[tuple[str, Activation], ...] = ()
    """Names and activations of the layers before it, as wide as the model."""
    mode: PoolingMode = "cls"
    bias: bool = True


_POOLER: Final = _Layers("classifier", (("pooler.dense", "tanh"),))
_TWO: Final = _Layers("classifier.out_proj", (("classifier.dense", "tanh"),))
_SCORE: Final = _Layers("score", mode="lasttoken", bias=False)
_SCORE_OF_TWO: Final = _Layers("score.2", (("score.0", "relu"),), mode="lasttoken")

_DECODERS: Final = ("llama", "qwen3", "gemma", "gemma2", "gemma3", fallback.FALLBACK)
"""Families with the head that transformers gives to decoders. Of others that it runs, `config/fallback.py` takes only these."""
_OF_TEXTS: Final[Mapping[str, _Layers]] = {
    **dict.fromkeys(("bert", "nomic_bert", "gte", "jina_bert", "jina_bert_ungated"), _POOLER),
    **dict.fromkeys(("roberta", "mpnet", "jina_embeddings_v3", "jina_reranker"), _TWO),
    **dict.fromkeys(bert.DEBERTA, _POOLER),
    "electra": _Layers("classifier.out_proj", (("classifier.dense", "gelu"),)),
    "distilbert": _Layers("classifier", (("pre_classifier", "relu"),)),
    "modernbert": _Layers("classifier"),
    "eurobert": _Layers("classifier", (("dense", "gelu"),)),
    **dict.fromkeys((*_DECODERS, "internlm2"), _SCORE),
}
_PADDING: Final = {"gemma": 0, "gemma2": 0, "gemma3": 0}

_ACTIVATIONS: Final[Mapping[str, OutputActivation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_BY_PROBLEM: Final[Mapping[str, OutputActivation]] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
ACTIVATION_KEYS: Final = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Keys of config.json in which versions of CrossEncoder store the activation of scores."""

FIXED_TRANSFORMER: Final[Fixed] = {
    "transformer_task": ("sequence-classification",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}}, None),
    "module_output_name": ("scores", None),
}
"""Required values of sentence_bert_config.json in a CrossEncoder."""
OWN_KEYS: Final = ("activation_fn", "keep_in_fp32_modules")
"""Keys of config_sentence_transformers.json that only a CrossEncoder has."""


def is_cross_encoder(root: Path) -> bool:
    """Return whether the Transformer module in the folder `root` gives scores by itself."""
    task = JsonFile.read_optional(root, "sentence_bert_config.json").data.get("transformer_task")
    return task == FIXED_TRANSFORMER["transformer_task"][0]


def is_chain_of_scores(folder: Path, rows: Rows) -> bool:
    """Return whether modules after the Transformer give the scores of a CrossEncoder."""
    return len(rows) > 1 and JsonFile.read_optional(folder, SENTENCE).data.get("model_type") == "CrossEncoder"


def note_keys(config: JsonFile) -> None:
    """Accept the keys of config.json that `read_classes` reads. Raises CheckpointError if they are not enough."""
    if config.data.get("model_type") == "llama_bidirec":
        raise config.error("does not say how a pair is put to it; say --reranker nemotron.", "architectures")
    config.ignore(*ACTIVATION_KEYS, "token_classification_bias")


def ignore_activation(config: JsonFile) -> None:
    """Ignore the activation of scores, which CrossEncoder writes, in a model that gives vectors. Raises CheckpointError."""
    config.section("sentence_transformers").reject_unknown_keys({"activation_fn", "version"})
    config.ignore(*ACTIVATION_KEYS)


def read_classes(root: Path, config: JsonFile, encoder: Encoder, sentence: JsonFile) -> Classes:
    """Return the classes of the checkpoint in `root`. Raises CheckpointError."""
    kind = class_kind(config)
    if kind is None:
        raise config.error("names no architecture that gives scores.", "architectures")
    own = _own_layers(config)
    labels = _labels(config, 1 if kind == "reward" or encoder.family.startswith("jina_bert") else 2)
    if kind == "text" and encoder.family not in _OF_TEXTS:
        raise config.error(f"classes of {encoder.family} models are not supported.", "architectures")
    if encoder.family == "internlm2" and kind == "reward":  # its reward is that of a token that the caller puts last
        rewards = _output(config, encoder, _Layers("v_head", bias=False), len(labels))
        return {"token_scores": replace(rewards, rows="token", activation="sigmoid", activated=False)}, labels
    if kind in ("text", "reward"):
        layers = _SCORE_OF_TWO if kind == "reward" else own or _OF_TEXTS[encoder.family]
        output = _pooled(config, encoder, layers, _output(config, encoder, layers, len(labels)))
        if layers.mode == "lasttoken":
            padding = config.data.get("pad_token_id", _PADDING.get(encoder.family))
            output = replace(output, padding_id=None if padding is None else encoder.pad_id)
        activation, activated = _activation(config, sentence, encoder, len(labels))
        output = replace(output, activation=activation, activated=activated and kind == "text")
        if kind == "text":
            return {"scores": output}, labels
        return {"scores": output, "token_scores": replace(output, rows="token", modes=(), padding_id=None)}, labels
    layers = _SCORE_OF_TWO if kind == "step" else own or _Layers("classifier")
    if kind == "token" and encoder.family in _DECODERS and own is None:
        layers = replace(_SCORE, bias=config.get("token_classification_bias", bool, True))
    activation = "softmax" if len(labels) > 1 else "sigmoid"
    keep_ids = (_step_tag(root),) if kind == "step" else ()
    output = _output(config, encoder, layers, len(labels))
    return {"token_scores": replace(output, rows="token", activation=activation, keep_ids=keep_ids)}, labels


def _own_layers(config: JsonFile) -> _Layers | None:
    """Return the layers of a classifier with a head of its own that runs through transformers."""
    own = fallback.OWN_HEADS.get(cast(list[str], config.data["architectures"])[0])
    return None if own is None else _Layers(own[1], tuple((name, "tanh") for name in own[0]))


def read_chained_classes(folder: Path, rows: Rows, config: JsonFile, encoder: Encoder, sentence: JsonFile) -> Classes:
    """Return the classes of modules that give the scores. config.json names the labels if it has as many."""
    root = folder / rows[0][1]
    features: Features = tokens(encoder.hidden_size)
    if is_cross_encoder(root):
        features = {"scores": read_classes(root, config, encoder, sentence)[0]["scores"]}
    output = resolve_features(folder, rows[1:], features, "scores")
    if not output.include_prompt:
        raise CheckpointError("a pair whose prompt is not pooled is not supported.", file=MODULES)
    labels = _labels(config, 2)
    if len(labels) != output.width:
        labels = tuple(f"LABEL_{i}" for i in range(output.width))
    return {"scores": replace(output, activation=_activation(config, sentence, encoder, output.width)[0])}, labels


def class_kind(config: JsonFile) -> _Kind | None:
    """Return the kind of classes that the architecture gives. None: it gives no classes."""
    names = config.data.get("architectures")
    name = cast(list[object], names)[0] if isinstance(names, list) and names else None
    return next((_KINDS[end] for end in _KINDS if isinstance(name, str) and name.endswith(end)), None)


def _labels(config: JsonFile, default: int) -> tuple[str, ...]:
    """Return the labels by transformers' rule: id2label, else numbers up to num_labels, else up to `default`."""
    stated = cast(dict[str, Any], config.get("id2label", dict, {}))
    if not stated:
        return tuple(f"LABEL_{i}" for i in range(config.positive("num_labels", default)))
    labels = {int(key) if key.isdecimal() else -1: name for key, name in stated.items()}
    if sorted(labels) != list(range(len(stated))) or not all(isinstance(name, str) for name in labels.values()):
        raise config.error(f"must name the classes 0 to {len(stated) - 1}.", "id2label")
    if config.get("num_labels", int, len(labels)) != len(labels):
        raise config.error(f"is not the number of names in id2label, {len(labels)}.", "num_labels")
    return tuple(labels[i] for i in range(len(labels)))


def find_entailment(config: JsonFile, labels: Sequence[str]) -> int | None:
    """Return the index of the one label of several that begins with "entail", as label2id must have it too if it is there.

    Source: transformers/pipelines/zero_shot_classification.py (5.23), which goes by label2id alone.
    """
    places = [index for index, label in enumerate(labels) if label.lower().startswith("entail")]
    stated = config.get("label2id", dict, {})
    if len(labels) < 2 or len(places) != 1:
        return None
    named = [str(stated[label]) for label in stated if label.lower().startswith("entail")]
    return places[0] if not stated or named == [str(places[0])] else None


_POOLINGS: Final[Mapping[str, tuple[Mapping[str, PoolingMode], str]]] = {
    "modernbert": ({"cls": "cls", "mean": "mean"}, "cls"),
    "eurobert": ({"bos": "cls", "mean": "mean", "late": "mean"}, "late"),
}
"""Family -> values of `classifier_pooling` with their modes, and the default. "late": the mean of the classes of all tokens."""


def _pooled(config: JsonFile, encoder: Encoder, layers: _Layers, output: Output) -> Output:
    if encoder.family not in _POOLINGS:
        return replace(output, modes=(layers.mode,))
    modes, default = _POOLINGS[encoder.family]
    mode = config.choice("classifier_pooling", modes, default)
    if config.data.get("classifier_pooling", default) == "late":  # the last layer is linear: the mean may be taken before it
        output = replace(output, token_head=output.head[:-1], head=output.head[-1:])
    return replace(output, modes=(mode,))


def _output(config: JsonFile, encoder: Encoder, layers: _Layers, num_labels: int) -> Output:
    width = encoder.hidden_size
    stated = config.choice("pooler_hidden_act", common.ACTIVATIONS, "gelu") if encoder.family in bert.DEBERTA else None
    before: list[Head] = [Dense(None, name, width, width, bias=True, activation=stated or act) for name, act in layers.before]
    if encoder.family == "modernbert":
        bias = config.get("classifier_bias", bool, False)
        activation = config.choice("classifier_activation", common.ACTIVATIONS, "gelu")
        before.append(Dense(None, "head.dense", width, width, bias=bias, activation=activation))
        before.append(LayerNorm(None, "head.norm", width, eps=encoder.norm_eps, bias=encoder.norm_bias))
    last = Dense(None, layers.last, width, num_labels, bias=layers.bias, activation="identity")
    return Output(num_labels, head=(*before, last))


def stated_activation(config: JsonFile, sentence: JsonFile, table: Mapping[str, OutputActivation]) -> OutputActivation | None:
    """Return the activation of scores that a CrossEncoder states, one of `table`. Older versions store it in config.json."""
    new, old = ACTIVATION_KEYS
    for file, key in ((sentence, "activation_fn"), (config.section(new), "activation_fn"), (config, old)):
        if file.data.get(key) is not None:
            return file.choice(key, table)
    return None


def _activation(config: JsonFile, sentence: JsonFile, encoder: Encoder, num_labels: int) -> tuple[OutputActivation, bool]:
    """Return (activation of scores, whether it is applied by default)."""
    ignore_activation(config)
    if (stated := stated_activation(config, sentence, _ACTIVATIONS)) is not None:
        return stated, True
    new, old = ACTIVATION_KEYS
    if config.data.get(new) or old in config.data or sentence.data.get("model_type") is not None:
        return ("sigmoid" if num_labels == 1 else "identity"), True
    problem = config.choice("problem_type", _BY_PROBLEM) if config.data.get("problem_type") is not None else None
    if num_labels == 1 and problem != "identity":
        is_decoder = encoder.family in _DECODERS and _own_layers(config) is None
        return "sigmoid", problem is not None or not is_decoder
    return problem or "softmax", True


def _step_tag(root: Path) -> int:
    file = "tokenizer.json"
    tokens = JsonFile.read(root, file).get("added_tokens", list, [])
    for token in cast(list[object], tokens):
        if isinstance(token, dict) and cast(dict[str, object], token).get("content") == _STEP_TAG:
            return JsonFile(file, cast(object, token)).get("id", int)
    raise CheckpointError(f"has no token {_STEP_TAG!r}, which ends a step.", file=file, key="added_tokens")
