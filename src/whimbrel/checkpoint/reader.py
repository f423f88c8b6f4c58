"""Card of a checkpoint.

Chooses the reader of a checkpoint's layout, which makes the `Card`, and reads models with a Transformer itself. Every key of
the files must be used, be known not to change a vector, or have its one supported value. Anything else raises
`CheckpointError` with file and key (ADR 4). Knows nothing of devices, options or weights.

The layouts are those of Sentence Transformers (up to 5.3, and since 5.4), transformers alone, late interaction and rerankers.
The reader of each names its source code.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.chat_template import read_text_template
from whimbrel.checkpoint.config import adapters as lora
from whimbrel.checkpoint.config import common, decoders
from whimbrel.checkpoint.config.reader import read_config, read_encoder
from whimbrel.checkpoint.foreign import explain_foreign, require_config
from whimbrel.checkpoint.gliner import GLINER, read_gliner
from whimbrel.checkpoint.json_file import JsonFile, accepting, check_accepted
from whimbrel.checkpoint.late_interaction.colbert import find_layout, read_multi_vector
from whimbrel.checkpoint.scores import classifiers, llm_rerankers
from whimbrel.checkpoint.sentence_transformers import chained, modules, sparse, static_card
from whimbrel.checkpoint.sentence_transformers.modules import MODULES, SENTENCE, WITH_TASKS, Rows, has_modules
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.checkpoint.tokenizer.reading import find_reading
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.types.card import Card, Encoder, Instruction, Output
from whimbrel.types.choices import PoolingOption, RerankerName, TokenizerReading
from whimbrel.types.request import OutputName

_TABLES: Final = ("StaticEmbedding", "SparseStaticEmbedding")
_SPARSE_PIPELINES: Final = (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"], ["SparseStaticEmbedding"])
_FIRST: Final = (["Transformer"], ["StaticEmbedding"])
_GRITLM: Final = Instruction("<|user|>\n", "<|embed|>\n")


def read_card(
    folder: Path,
    name: str,
    *,
    pooling: PoolingOption | None = None,
    reranker: RerankerName | None = None,
    accept_config: Collection[str] = (),
    adapters: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> Card:
    """Read the card of the checkpoint in `folder`. `name` is the model's name.

    `pooling` is the user's choice for a checkpoint without modules.json, whose files do not state it. `reranker` is the
    convention by which it scores pairs. `accept_config` names unknown keys that are accepted, or one, also of adapters;
    `adapters` the folders of adapters to add, by name. `tokenizer` is the reading of the tokenizer's files; None or "auto": by
    the files. `prompts` replace or join those of the files. Raises CheckpointError for anything missing, malformed or not
    supported, and SetupError for an accepted key that is in no file, or whose value matters, and for prompts without effect.
    """
    accepted = (accept_config,) if isinstance(accept_config, str) else accept_config
    reading = find_reading(tokenizer)
    with accepting(accepted):
        if (folder / GLINER).exists():
            if pooling is not None or reranker is not None:
                raise CheckpointError("says what is computed; leave out --pooling and --reranker.", file=GLINER)
            card = read_gliner(folder, name, reading)
        else:
            card = _read_card(folder, name, reading, pooling, reranker)
        if adapters and card.towers:
            raise SetupError("adapters cannot be added to a model with several towers.", hint="serve it without --adapter")
        card = replace(card, encoder=lora.add_adapters(card.encoder, name, adapters or {}))
        check_accepted()
    return _add_prompts(card, prompts) if prompts else card


def _add_prompts(card: Card, prompts: Mapping[str, str]) -> Card:
    """Return the card, and the cards of its towers, with further prompts. Raises SetupError if they would have no effect."""
    if card.span_prompt is not None:
        raise SetupError("prompts cannot be set: this model's prompt is made of the labels.", hint="leave out prompts")
    chat, pair = card.text_template, card.template
    has_place = (chat is None or chat.prompted is not None) and (pair is None or pair.texts_with_instruction is not None)
    if not has_place and any(prompts.values()):
        raise SetupError("prompts cannot be set: the model's template has no place for them.", hint="leave out prompts")
    if tasks := sorted(prompts.keys() & set(card.tasks)):
        raise SetupError(f"prompts cannot be set: {tasks[0]!r} is a task of the model.", hint="name the prompt otherwise")
    towers = tuple(_add_prompts(tower, prompts) for tower in card.towers)
    return replace(card, prompts={**card.prompts, **prompts}, towers=towers)


def _read_card(
    folder: Path, name: str, reading: TokenizerReading | None, pooling: PoolingOption | None, reranker: RerankerName | None
) -> Card:
    if not has_modules(folder):
        require_config(folder)
    if llm_rerankers.is_listwise(folder):
        if pooling is not None or reranker is not None:
            raise CheckpointError("says how documents are judged; leave out --pooling or --reranker.", file="config.json")
        return llm_rerankers.read_listwise(folder, name, reading)
    if pooling is None and (card := llm_rerankers.read_reranker(folder, name, reranker, reading)) is not None:
        return card
    if reranker is not None:
        raise CheckpointError("is for models that judge pairs; leave out --pooling or --reranker.", file=MODULES)
    if (layout := find_layout(folder)) is not None:
        return read_multi_vector(folder, name, layout, reading, pooling=pooling)
    if has_modules(folder):
        if pooling is not None:
            raise CheckpointError("says how tokens are pooled; leave out --pooling.", file=MODULES)
        return _read_modules(folder, name, reading)
    pooling = _pooling(folder, "math-shepherd" if pooling is None and name in llm_rerankers.MATH_SHEPHERD_IDS else pooling)
    if static_card.is_model2vec(folder):
        return static_card.read_static_card(folder, name, [("StaticEmbedding", "")], reading)
    rows = [("Transformer", "")]
    return _read_jina_v5(folder, name, rows, reading) or _read_transformer_card(folder, name, rows, reading, pooling)


def _pooling(folder: Path, pooling: PoolingOption | None) -> PoolingOption | None:
    """Return the pooling of config.json, else the user's. None if the model needs none."""
    config = read_config(folder)
    stated = "lasttoken" if lora.is_jina_v5(config) else decoders.read_stated_pooling(config)
    if stated is not None and pooling is not None:
        raise config.error("says how tokens are pooled; leave out --pooling.", "pooling")
    pooling = stated or pooling
    if pooling is None and not static_card.is_model2vec(folder) and not classifiers.class_kind(config):
        raise explain_foreign(folder) or _without_pooling(config, JsonFile.read(folder, "config.json"))
    return pooling


def _without_pooling(config: JsonFile, stated: JsonFile) -> CheckpointError:
    """Return the error over a checkpoint that may give vectors, for which nothing says how tokens are pooled."""
    say = "say it with --pooling (e.g. --pooling mean, as Sentence Transformers pools then, or splade)."
    if classifiers.class_kind(stated):
        names = stated.data["architectures"]
        return stated.error(f"classes of {names!r:.80} are not supported. If you want its vectors, {say}", "architectures")
    classifiers.ignore_activation(config)
    read_encoder(config)  # an architecture that is refused is refused at once, whatever the pooling
    if not stated.data.get("architectures"):
        (name,) = config.data.get("architectures") or ["...Model"]
        classes = f"{name.removesuffix('Model')}ForSequenceClassification"
        message = "is missing, so this may be a model of vectors or of classes, such as a reranker."
        hint = f'for vectors {say[:-1]}; for classes write into config.json: "architectures": ["{classes}"]'
        return config.error(message, "architectures", hint)
    return CheckpointError(f"not found, so nothing says how tokens are pooled; {say}", file=MODULES)


def _read_modules(folder: Path, name: str, reading: TokenizerReading | None) -> Card:
    rows = modules.read_modules(folder, modules.KINDS)
    router = next((i for i, (kind, _) in enumerate(rows) if kind == "Router"), None)
    if router is None:
        return _read_jina_v5(folder, name, rows, reading) or _read_tower(folder, name, rows, reading)
    if classifiers.is_chain_of_scores(folder, rows):
        raise CheckpointError("a Router in a CrossEncoder is not supported.", file=MODULES, key="type")
    routes, route_of = modules.read_router(folder, rows[router][1])
    chains = [[*rows[:router], *route, *rows[router + 1 :]] for route in routes.values()]
    towers = [_read_tower(folder, name, chain, reading) for chain in chains]
    tower_of = {input_type: list(routes).index(route) for input_type, route in route_of.items()}
    return replace(towers[tower_of.get(None, 0)], towers=tuple(towers), tower_of=tower_of)


def _read_tower(folder: Path, name: str, rows: Rows, reading: TokenizerReading | None) -> Card:
    rows = [row for row in rows if row[0] != "Dropout"]
    kinds = ["Transformer" if kind == WITH_TASKS else kind for kind, _ in rows]
    others = kinds[1:-1] if kinds[-1:] == ["SparseAutoEncoder"] else kinds[1:]
    is_chain = kinds[:1] in _FIRST and kinds != ["Transformer"] and all(kind in chained.CHAINED for kind in others)
    is_alone = kinds == ["Transformer"] and classifiers.is_cross_encoder(folder / rows[0][1])
    if not is_chain and not is_alone and kinds not in _SPARSE_PIPELINES:
        known = ", ".join(chained.CHAINED)
        message = f"must begin with one Transformer or StaticEmbedding, and go on with {known}; is {kinds}."
        raise CheckpointError(message, file=MODULES)
    if kinds[0] in _TABLES:
        return static_card.read_static_card(folder, name, rows, reading)
    return _read_transformer_card(folder, name, rows, reading, None)


def _read_jina_v5(folder: Path, name: str, rows: Rows, reading: TokenizerReading | None) -> Card | None:
    """Return the card of jina-embeddings-v5, whose only module also pools and normalises. None for other models."""
    root = folder / rows[0][1] if rows else folder
    if not (root / "config.json").exists() or not lora.is_jina_v5(read_config(root)):
        return None
    has_files = has_modules(folder)
    if has_files and [kind for kind, _ in rows] != [WITH_TASKS]:
        raise CheckpointError(f"jina-embeddings-v5 has one module, {WITH_TASKS}, which pools by itself.", file=MODULES)
    card = _read_transformer_card(folder, name, rows, reading, "lasttoken")
    if clashes := card.prompts.keys() & set(card.encoder.adapters):
        raise CheckpointError(f"{min(clashes)!r} is a task, and no prompt.", file=SENTENCE, key="prompts")
    return replace(
        card,
        outputs={name: replace(output, activated=True) for name, output in card.outputs.items()},
        default_adapter=card.default_adapter or lora.DEFAULT_TASK,
        matryoshka=True,  # its code takes any truncate_dim
        max_length=modules.read_max_length(card.encoder, modules.read_transformer(root, used=["model_args"]), JsonFile("", {})),
        **({} if has_files else {"prompts": lora.PROMPTS, "default_prompt_name": lora.DEFAULT_PROMPT}),
    )


def _read_transformer_card(
    folder: Path, name: str, rows: Rows, reading: TokenizerReading | None, pooling: PoolingOption | None
) -> Card:
    """Return the card of a Transformer and the modules after it. A Transformer alone and without `pooling` gives classes."""
    kind, path = rows[0]
    root = folder / path
    require_config(root)
    is_chain, has_tasks = classifiers.is_chain_of_scores(folder, rows), kind == WITH_TASKS
    has_classes = is_chain or (len(rows) == 1 and pooling is None)
    config = read_config(root)
    note_keys = classifiers.note_keys if has_classes else classifiers.ignore_activation
    note_keys(config)
    encoder = lora.read_adapter_folders(root, read_encoder(config))
    if has_tasks and not encoder.adapters:
        message = f"{kind!r} is code of the checkpoint's own, which is not run; only jina-embeddings-v3's and v5's is known."
        raise CheckpointError(message, file=MODULES, key="type")
    transformer = _settings(root, rows, cross_encoder=has_classes and classifiers.is_cross_encoder(root))
    files = JsonFile.read_optional(root, "tokenizer_config.json")
    model, own_keys = ("CrossEncoder", classifiers.OWN_KEYS) if has_classes else (modules.model_kind(rows), ())
    sentence = modules.read_sentence(folder, model, own_keys)
    lowercase = transformer.get("do_lower_case", bool, False)
    tokenizer = read_tokenizer(folder, path, config, files, reading=reading, lowercase=lowercase, pairs=has_classes)
    chat = None
    if not has_classes and (stated := modules.read_chat_format(transformer)) is not None:
        chat = read_text_template(root, files, structured=stated[0], variables=stated[1])
    is_grit = chat is None and decoders.is_gritlm(config)
    if is_chain:
        outputs, labels = classifiers.read_chained_classes(folder, rows, config, encoder, sentence)
    elif has_classes:
        outputs, labels = classifiers.read_classes(root, config, encoder, sentence)
    else:
        max_entries = sentence.positive("max_active_dims", 0)
        outputs = _read_outputs(folder, rows, config, encoder, pooling=pooling, max_entries=max_entries)
        labels = llm_rerankers.STEP_LABELS if "token_scores" in outputs else ()
        if (dense := outputs.get("dense")) is not None:
            outputs |= sparse.read_m3(root, encoder, tokenizer)
            if is_grit:  # its instruction gives no vectors, and its own code normalises
                dense = replace(dense, include_prompt=False, activated=dense.activated or pooling is not None)
            outputs["dense"] = chained.cut_output(dense, sentence)
            if modules.is_instructor(folder, name, rows, encoder):
                outputs["dense"] = replace(outputs["dense"], include_prompt=False)
                tokenizer = replace(tokenizer, pools_one_token=True)
    width, is_cut = outputs["dense"].width if "dense" in outputs else None, sentence.data.get("truncate_dim") is not None
    prompts, default_prompt_name = modules.read_prompts(sentence)
    if chat is not None and chat.prompted is None and any(prompts.values()):
        raise sentence.error("has prompts, for which the chat template has no place.", "prompts")
    limit = modules.OWN_LENGTH if modules.has_own_classes(folder) else modules.read_max_length(encoder, transformer, files)
    if encoder.adapters and not lora.is_jina_v5(config):
        prompts = lora.read_instructions(config, encoder.adapters, sentence)
    return replace(
        Card(name, path, encoder, outputs, limit, tokenizer, prompts, default_prompt_name),
        labels=labels,
        entailment=classifiers.find_entailment(config, labels) if "scores" in outputs else None,
        default_adapter=lora.read_default_adapter(transformer, encoder.adapters) if has_tasks else None,
        **common.read_matryoshka(config, width, is_cut=is_cut),
        similarity=sentence.data.get("similarity_fn_name"),
        instruction=_GRITLM if is_grit else None,
        text_template=chat,
    )


def _settings(root: Path, rows: Rows, *, cross_encoder: bool) -> JsonFile:
    """Return the settings of the Transformer, which must be those of the module after it."""
    used = ["model_args"] if rows[0][0] == WITH_TASKS else []
    if cross_encoder:
        return modules.read_transformer(root, used=used, stated=classifiers.FIXED_TRANSFORMER)
    if rows[-1][0] != "SpladePooling":
        return modules.read_transformer(root, used=[*used, "processing_kwargs"], stated=modules.WITH_CHAT)
    settings = modules.read_transformer(root, used=used, stated=sparse.FILL_MASK)
    if rows[0][0] == "Transformer":
        settings.get("transformer_task", str)
    return settings


def _read_outputs(
    folder: Path, rows: Rows, config: JsonFile, encoder: Encoder, *, pooling: PoolingOption | None, max_entries: int
) -> dict[OutputName, Output]:
    """Return the outputs of the modules after the Transformer. `max_entries`: entries of a sparse vector, or 0."""
    states = chained.tokens(encoder.hidden_size, decoders.read_token_head(config, encoder))
    if pooling == "splade":
        return {"sparse": sparse.read_splade(config, encoder, JsonFile("", {}), max_entries)}
    if pooling == "math-shepherd":
        return {"token_scores": llm_rerankers.read_step_rewards(folder, config, encoder)}
    if pooling is not None:
        return {"dense": replace(states["token_embeddings"], rows="text", modes=(pooling,), activated=False)}
    if rows[1][0] == "SpladePooling":
        settings = JsonFile.read(folder, f"{rows[1][1]}/config.json")
        return {"sparse": sparse.read_splade(config, encoder, settings, max_entries)}
    return chained.finish_output(folder, states, rows[1:], max_entries)
