"""Cards of models with a Transformer.

Reads the Transformer's folder: config.json, sentence_bert_config.json, the tokenizer's files, and the extra files of BGE-M3 and
of adapters. Its outputs come from the modules after it, the pooling that the user states, or classes. The readers in `config`,
`sentence_transformers` and `scores` name the sources of the formats.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.config.adapters import read_adapter_folders, read_default_adapter, read_instructions
from whimbrel.checkpoint.config.common import read_matryoshka
from whimbrel.checkpoint.config.decoders import is_gritlm
from whimbrel.checkpoint.config.reader import read_encoder
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.scores.classifiers import (
    FIXED_TRANSFORMER,
    OWN_KEYS,
    is_chain_of_scores,
    is_cross_encoder,
    note_keys,
    read_chained_classes,
    read_classes,
)
from whimbrel.checkpoint.scores.step_rewards import STEP_LABELS, read_step_rewards
from whimbrel.checkpoint.sentence_transformers.heads import cut_output, finish_output, tokens
from whimbrel.checkpoint.sentence_transformers.modules import (
    MODULES,
    WITH_TASKS,
    Rows,
    model_kind,
    read_max_entries,
    read_max_length,
    read_prompts,
    read_sentence,
    read_transformer,
)
from whimbrel.checkpoint.sentence_transformers.sparse import FILL_MASK, read_m3, read_splade
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Encoder, Instruction, Output, PoolingOption
from whimbrel.types.request import OutputName

_GRITLM: Final = Instruction("<|user|>\n", "<|embed|>\n")


def read_transformer_card(folder: Path, name: str, rows: Rows, pooling: PoolingOption | None) -> Card:
    """Read the card of `rows`, whose first is a Transformer.

    A Transformer alone and without `pooling` gives classes. In a CrossEncoder the modules after it give them.
    """
    kind, path = rows[0]
    root = folder / path
    is_chain, has_tasks = is_chain_of_scores(folder, rows), kind == WITH_TASKS
    has_classes = is_chain or (len(rows) == 1 and pooling is None)
    config = JsonFile.read(root, "config.json")
    if has_classes:
        note_keys(config)
    encoder = read_adapter_folders(root, read_encoder(config))
    if has_tasks and not encoder.adapters:
        message = f"{kind!r} is code of the checkpoint's own, which is not run; known is that of jina-embeddings-v3 only."
        raise CheckpointError(message, file=MODULES, key="type")
    transformer = _settings(root, rows, cross_encoder=has_classes and is_cross_encoder(root))
    files = JsonFile.read_optional(root, "tokenizer_config.json")
    sentence = read_sentence(folder, "CrossEncoder", OWN_KEYS) if has_classes else read_sentence(folder, model_kind(rows))
    tokenizer = read_tokenizer(root, config, files, lowercase=transformer.get("do_lower_case", bool, False))
    if is_chain:
        outputs, labels = read_chained_classes(folder, rows, config, encoder, sentence)
    elif has_classes:
        outputs, labels = read_classes(root, config, encoder, sentence)
    else:
        outputs = _read_outputs(folder, rows, config, encoder, pooling=pooling, max_entries=read_max_entries(sentence))
        labels = STEP_LABELS if "token_scores" in outputs else ()
        if (dense := outputs.get("dense")) is not None:
            outputs |= read_m3(root, encoder, tokenizer)
            if is_gritlm(config):  # its instruction gives no vectors, and its own code normalises
                dense = replace(dense, include_prompt=False, activated=dense.activated or pooling is not None)
            outputs["dense"] = cut_output(dense, sentence)
    widths = read_matryoshka(config, outputs["dense"].width) if "dense" in outputs else ()
    is_cut = sentence.data.get("truncate_dim") is not None
    prompts, default_prompt_name = read_prompts(sentence)
    return Card(
        name=name,
        path=path,
        encoder=encoder,
        outputs=outputs,
        labels=labels,
        max_length=read_max_length(encoder, transformer, files),
        tokenizer=tokenizer,
        prompts=read_instructions(config, encoder.adapters, sentence) if encoder.adapters else prompts,
        default_prompt_name=default_prompt_name,
        default_adapter=read_default_adapter(transformer, encoder.adapters) if has_tasks else None,
        matryoshka=config.get("is_matryoshka", bool, False) or bool(widths) or is_cut,
        matryoshka_dimensions=widths,
        similarity=sentence.data.get("similarity_fn_name"),
        instruction=_GRITLM if is_gritlm(config) else None,
    )


def _settings(root: Path, rows: Rows, *, cross_encoder: bool) -> JsonFile:
    """Read the Transformer's settings, which depend on the module after it."""
    fills_masks = rows[-1][0] == "SpladePooling"
    stated = FIXED_TRANSFORMER if cross_encoder else FILL_MASK if fills_masks else None
    settings = read_transformer(root, used=("model_args",) if rows[0][0] == WITH_TASKS else (), stated=stated)
    if fills_masks and rows[0][0] == "Transformer":
        settings.get("transformer_task", str)
    return settings


def _read_outputs(
    folder: Path, rows: Rows, config: JsonFile, encoder: Encoder, *, pooling: PoolingOption | None, max_entries: int
) -> dict[OutputName, Output]:
    """Read the outputs of the modules after the Transformer. `max_entries`: entries of a sparse vector, or 0 if not stated."""
    if pooling == "splade":
        return {"sparse": read_splade(config, encoder, JsonFile("", {}), max_entries)}
    if pooling == "math-shepherd":
        return {"token_scores": read_step_rewards(folder, config, encoder)}
    if pooling is not None:
        return {"dense": Output(encoder.hidden_size, modes=(pooling,), activation="normalize", activated=False)}
    if rows[1][0] == "SpladePooling":
        stated = JsonFile.read(folder, f"{rows[1][1]}/config.json")
        return {"sparse": read_splade(config, encoder, stated, max_entries)}
    return finish_output(folder, tokens(encoder.hidden_size), rows[1:], max_entries)
