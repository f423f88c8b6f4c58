"""LLM rerankers and step rewards.

Reads the template and the score of a language model that scores pairs. A checkpoint states both in the layout of Sentence
Transformers (since 5.4: a Transformer with the modality "message", maybe a LogitScore). Otherwise it follows one of the
CONVENTIONS, which the user names or the hub id implies. Architecture and folder imply nothing.

jina-reranker-v3 judges a query and all its documents in one prompt. A causal Qwen3 reads the documents, then the query. Two
linear layers turn the hidden state of each marker into a vector. The prompt, its limits and the width stand in the model's
code, not in its files. jina-reranker-v3.5 has sliding windows and other limits, and is refused.

math-shepherd scores each step of a solution. Its reward at the tag ' ки' is the sigmoid of the logit of '+' less that of '-'.

Sources: sentence_transformers/cross_encoder/{model,modules/logit_score}.py and base/modules/transformer.py (6.2),
llama_bidirectional_model.py of nvidia/llama-nemotron-rerank-1b-v2, modeling.py of jinaai/jina-reranker-v3, and the card of
peiyi9979/math-shepherd-mistral-7b-prm.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from whimbrel.checkpoint.chat_template import read_chat_template
from whimbrel.checkpoint.config import common, decoders, reader
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.scores import classifiers
from whimbrel.checkpoint.scores.conventions import CONVENTIONS
from whimbrel.checkpoint.sentence_transformers import chained, modules
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, Rows, has_modules, kinds_of
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Encoder, Output
from whimbrel.types.choices import RerankerName, TokenizerReading
from whimbrel.types.heads import Dense, DivideBy, Head, LogitScore, OutputActivation
from whimbrel.types.request import OutputName
from whimbrel.types.template import ListTemplate, fill

_FILE: Final = "sentence_bert_config.json"
_KINDS: Final[Mapping[str, str]] = {
    **kinds_of("base.modules", "transformer.Transformer dense.Dense normalize.Normalize"),
    **kinds_of("sentence_transformer.modules", "pooling.Pooling layer_norm.LayerNorm dropout.Dropout"),
    **kinds_of("cross_encoder.modules", "logit_score.LogitScore"),
}
_SCORE_ACTIVATIONS: Final[Mapping[str, OutputActivation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_UNCAPPED: Final = ("gemma", "gemma3", "llama", "qwen3")
"""Families whose logits are products of hidden states and output embeddings, with no cap."""
_TIED: Final = ("gemma", "gemma3_text")
"""Model types that tie the output embeddings to the input by default."""
_TASKS: Final = {
    "text-generation": ("logits", "causal_logits"),
    "sequence-classification": ("logits", "scores"),
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
}
"""Task -> (the model's output, its name as a feature)."""

MATH_SHEPHERD_IDS: Final = ("peiyi9979/math-shepherd-mistral-7b-prm",)
STEP_LABELS: Final = ("+",)
_STEP_TOKENS: Final = ("\u2581+", "\u2581-", "\u2581ки")
"""Good, bad and tag: encode("+ -")[1:] and encode("ки")[-1] on the model's card."""


def read_reranker(folder: Path, name: str, stated: RerankerName | None, reading: TokenizerReading | None) -> Card | None:
    """Read the card of a checkpoint that scores pairs by a template. None if no file, hub id or user says that it does."""
    implied: list[RerankerName] = [kind for kind, convention in CONVENTIONS.items() if name in convention.ids]
    kind = None if has_modules(folder) else stated or next(iter(implied), None)
    if has_modules(folder):
        if stated is not None:
            raise CheckpointError("says what the model does; leave out --reranker.", file=MODULES)
        transformer = JsonFile.read_optional(folder, _FILE)
        modalities, task = transformer.get("modality_config", dict, {}), transformer.data.get("transformer_task")
        is_cross_encoder = JsonFile.read_optional(folder, SENTENCE).data.get("model_type") == "CrossEncoder"
        is_scoring = is_cross_encoder or task == "sequence-classification"
        if task != "text-generation" and not (is_scoring and "message" in modalities):
            return None
    elif kind is None:
        return None
    config = reader.read_config(folder)
    tokenizer = JsonFile.read_optional(folder, "tokenizer_config.json")
    tokenizer.require_values({"truncation_side": ("right", None)})
    if not has_modules(folder):
        common.allow_auto_map(config)
    config.ignore(*classifiers.ACTIVATION_KEYS)
    encoder = reader.read_encoder(config)
    max_length = modules.read_max_length(encoder, JsonFile.read_optional(folder, _FILE), tokenizer)
    tokenizer_card = read_tokenizer(folder, "", config, tokenizer, reading=reading, lowercase=False)
    card = Card(name, "", encoder, {}, max_length, tokenizer_card)
    return _add_modules(card, folder, config, tokenizer) if kind is None else _add_convention(card, folder, config, kind)


def _add_convention(card: Card, folder: Path, config: JsonFile, kind: RerankerName) -> Card:
    convention, encoder = CONVENTIONS[kind], card.encoder
    stem, is_causal = _architecture(config)
    if stem not in convention.stems or (is_causal and convention.tokens is None):
        raise config.error(f"{stem!r} is not what rerankers of the kind {kind!r} are made of.", "architectures")
    if is_causal:
        true, false = cast(tuple[str, str | None], convention.tokens)
        head = _read_token_logits(config, encoder, _token_id(folder, true), None if false is None else _token_id(folder, false))
        heads = (head,) if convention.divisor == 1.0 else (head, DivideBy(convention.divisor))
    else:
        heads = _score(config, encoder)
    activation = classifiers.stated_activation(config, JsonFile("", {}), _SCORE_ACTIVATIONS)
    activated = convention.activated if activation is None else activation == "sigmoid"
    mode, template = decoders.read_stated_pooling(config) or "lasttoken", convention.template
    limit = convention.max_length
    if template.body_length is not None:  # a token has at least one byte
        limit = template.body_length + sum(len(fill(text).encode()) for text in template.texts)
    return replace(
        card,
        outputs={"scores": Output(1, modes=(mode,), head=heads, activation="sigmoid", activated=activated)},
        max_length=min(card.max_length, limit or card.max_length),
        template=template,
    )


def _architecture(config: JsonFile) -> tuple[str, bool]:
    """Return the architecture's name before ForCausalLM or ForSequenceClassification, and whether it is causal."""
    name = cast(list[str], config.get("architectures", list))[0]
    for ending in ("ForCausalLM", "ForSequenceClassification"):
        if name.endswith(ending):
            return name.removesuffix(ending), ending == "ForCausalLM"
    message = f"{name!r} has neither logits nor scores; must be one ForCausalLM or ForSequenceClassification."
    raise config.error(message, "architectures")


def _token_id(folder: Path, token: str) -> int:
    file = JsonFile.read(folder, "tokenizer.json")
    number: object = cast(dict[str, Any], file.get("model", dict)).get("vocab", {}).get(token)
    if type(number) is not int:
        raise file.error(f"has no token {token!r}, without which there is no score.", "model")
    return number


def _read_token_logits(config: JsonFile, encoder: Encoder, true_id: int, false_id: int | None) -> LogitScore:
    """Return the head of one next-token logit less another. Raises CheckpointError for models that change logits further."""
    if encoder.family not in _UNCAPPED or config.data.get("final_logit_softcapping") is not None:
        raise config.error("logits of this model are not supported.", "architectures")
    tied = config.get("tie_word_embeddings", bool, config.data.get("model_type") in _TIED)
    name = "embed_tokens" if tied else "lm_head"
    return LogitScore(name, encoder.vocab_size, encoder.hidden_size, true_id, false_id)


def _score(config: JsonFile, encoder: Encoder) -> tuple[Head, ...]:
    """Return the one-class head of transformers' decoders. Only in llama_bidirec does `temperature` divide the score."""
    labels = cast(dict[str, object], config.get("id2label", dict, {}))
    num_labels = len(labels) or config.get("num_labels", int, 2)
    if num_labels != 1:
        raise config.error(f"{num_labels} labels; the score of a pair is one number.", "id2label")
    dense = Dense(None, "score", encoder.hidden_size, 1, bias=False, activation="identity")
    temperature = config.get("temperature", float, 1.0) if config.data.get("model_type") == "llama_bidirec" else 1.0
    if temperature <= 0:
        raise config.error(f"must be positive, is {temperature}.", "temperature")
    return (dense,) if temperature == 1.0 else (dense, DivideBy(temperature))


def _add_modules(card: Card, folder: Path, config: JsonFile, tokenizer: JsonFile) -> Card:
    rows = [row for row in modules.read_modules(folder, _KINDS) if row[0] != "Dropout"]
    if rows[:1] != [("Transformer", "")] or any(kind == "Transformer" for kind, _ in rows[1:]):
        raise CheckpointError(f"must begin with one Transformer, in this folder; is {rows}.", file=MODULES)
    task, variables, structured = _read_transformer(folder)
    sentence = modules.read_sentence(folder, "CrossEncoder", {"activation_fn"})
    activation = classifiers.stated_activation(config, sentence, _SCORE_ACTIVATIONS)
    template = read_chat_template(folder, tokenizer, structured=structured, variables=variables)
    prompts, default = modules.read_prompts(sentence)
    if template.texts_with_instruction is None and any(prompts.values()):
        raise sentence.error("has prompts, for which the chat template has no place.", "prompts")
    output = replace(_read_output(folder, rows, task, config, card.encoder), activation=activation or "sigmoid")
    return replace(card, outputs={"scores": output}, template=template, prompts=prompts, default_prompt_name=default)


def _read_output(folder: Path, rows: Rows, task: str, config: JsonFile, encoder: Encoder) -> Output:
    """Return the score of token logits, of transformers' classifier, or of modules after a model with neither."""
    kinds = [kind for kind, _ in rows[1:]]
    if task == "feature-extraction" and "LogitScore" not in kinds:
        output = chained.resolve_features(folder, rows[1:], chained.tokens(encoder.hidden_size), "scores")
        if output.width != 1 or not output.include_prompt:
            message = f"{output.width} scores, or a prompt that is not pooled; the score of a pair is one number of all tokens."
            raise CheckpointError(message, file=MODULES)
        return output
    _, is_causal = _architecture(config)
    if kinds != (["LogitScore"] if is_causal else []) or is_causal != (task == "text-generation"):
        raise CheckpointError("must have a LogitScore if and only if the model is causal.", file=MODULES)
    head = (_read_logit_score(folder, rows[1][1], config, encoder),) if is_causal else _score(config, encoder)
    return Output(1, modes=(decoders.read_stated_pooling(config) or "lasttoken",), head=head)


def _read_logit_score(folder: Path, path: str, config: JsonFile, encoder: Encoder) -> LogitScore:
    file = JsonFile.read(folder, f"{path}/config.json")
    file.reject_unknown_keys({"true_token_id", "false_token_id", "module_input_name"})
    file.require_values({"module_input_name": ("causal_logits", None)})
    true = file.get("true_token_id", int)
    false = file.get("false_token_id", int, None)
    for key, number in (("true_token_id", true), ("false_token_id", false)):
        if number is not None and not 0 <= number < encoder.vocab_size:
            raise file.error(f"{number} is outside the vocabulary of {encoder.vocab_size}.", key)
    return _read_token_logits(config, encoder, true, false)


def _read_transformer(folder: Path) -> tuple[str, Mapping[str, Any], bool]:
    """Return (task, other variables of the chat template, whether messages hold lists of parts)."""
    settings = JsonFile.read(folder, _FILE)
    task = settings.get("transformer_task", str)
    model_output, feature = settings.lookup("transformer_task", task, _TASKS)
    method = {"method": "forward", "method_output_name": model_output}
    flat, structured = ({**method, "format": kind} for kind in ("flat", "structured"))
    stated: dict[str, tuple[object, ...]] = {
        "transformer_task": (task,),
        "modality_config": tuple({**more, "message": form} for form in (flat, structured) for more in ({"text": method}, {})),
        "module_output_name": (feature,),
        "do_lower_case": (False, None),
    }
    file = modules.read_transformer(folder, used=("processing_kwargs",), stated=stated)
    file.get("modality_config", dict)
    structured, variables = modules.read_chat_format(file) or (False, {})
    return task, variables, structured


def read_step_rewards(root: Path, config: JsonFile, encoder: Encoder) -> Output:
    """Return math-shepherd's output with a reward at each tag. Raises CheckpointError if the vocabulary has no such tag."""
    good, bad, tag = (_token_id(root, token) for token in _STEP_TOKENS)
    logits = _read_token_logits(config, encoder, good, bad)
    return Output(1, rows="token", head=(logits,), activation="sigmoid", keep_ids=(tag,))


_LIST_WIDTH: Final = 512
_DOCUMENT, _QUERY = "<|embed_token|>", "<|rerank_token|>"
_LIST_TEMPLATE: Final = ListTemplate(
    opening=(
        "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
        "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it answers "
        "the question. If not, try to analyze the intent of the query and assess how well each passage satisfies the intent. "
        "If an instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
        "<|im_start|>user\nI will provide you with {count} passages, each indicated by a numerical identifier. Rank the "
        "passages based on their relevance to query: {query}\n"
    ),
    instruction="<instruct>\n{instruction}\n</instruct>\n",
    document='<passage id="{index}">\n{document}' + _DOCUMENT + "\n</passage>\n",
    closing=("<query>\n{query}" + _QUERY + "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    document_marker=_DOCUMENT,
    query_marker=_QUERY,
    max_query_tokens=512,
    max_document_tokens=2048,
    max_documents=125,
)


def is_listwise(folder: Path) -> bool:
    names: object = JsonFile.read_optional(folder, "config.json").data.get("architectures")
    return not has_modules(folder) and names == ["JinaForRanking"]


def read_listwise(folder: Path, name: str, reading: TokenizerReading | None) -> Card:
    """Read the card of a checkpoint for which `is_listwise` is true. Raises CheckpointError."""
    config = JsonFile.read(folder, "config.json")
    files = JsonFile.read_optional(folder, "tokenizer_config.json")
    common.allow_auto_map(config)
    encoder = reader.read_encoder(config)
    if not encoder.causal or any(layer.window is not None for layer in encoder.layers):
        raise config.error("is not jina-reranker-v3's, whose layers all see what came before.", "layer_types")
    tokenizer = read_tokenizer(folder, "", config, files, reading=reading, lowercase=False)
    ids, _ = read_vocabulary(folder, tokenizer, encoder.vocab_size)
    for marker in (_DOCUMENT, _QUERY):
        if marker not in ids:
            message = f"has no token {marker!r}, without which there is no score."
            raise CheckpointError(message, file="tokenizer.json", key="model")
    inner = encoder.hidden_size // 2
    projector = (
        Dense(None, "projector.0", encoder.hidden_size, inner, bias=False, activation="relu"),
        Dense(None, "projector.2", inner, _LIST_WIDTH, bias=False, activation="identity"),
    )
    keep_ids = (ids[_DOCUMENT], ids[_QUERY])
    vectors = Output(
        _LIST_WIDTH, rows="token", token_head=projector, activation="normalize", activated=False, keep_ids=keep_ids
    )
    outputs: dict[OutputName, Output] = {"scores": Output(1, rows="none"), "multi_vector": vectors}
    max_length = modules.read_max_length(encoder, JsonFile.read_optional(folder, "sentence_bert_config.json"), files)
    return Card(name, "", encoder, outputs, max_length, tokenizer, list_template=_LIST_TEMPLATE)
