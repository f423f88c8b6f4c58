"""Card of a GLiNER model, which finds entities of labels that a request gives.

Its folder has gliner_config.json, with the encoder's config within, the tokenizer and the weights. Only models of one encoder
that score spans are read. Source: gliner/config.py, gliner/model.py (0.2.29).
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

from whimbrel.checkpoint.config import bert, reader
from whimbrel.checkpoint.json_file import Fixed, JsonFile
from whimbrel.checkpoint.sentence_transformers.modules import read_max_length
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.types.card import Card, Output, SpanPrompt
from whimbrel.types.choices import TokenizerReading
from whimbrel.types.heads import SpanHead
from whimbrel.types.request import OutputName

GLINER: Final = "gliner_config.json"
GLINER_PREFIX: Final = "token_rep_layer.bert_layer.model."
_FAMILIES: Final = (*bert.DEBERTA, "modernbert")
_FIXED: Final[Fixed] = {
    "span_mode": ("markerV0",), "subtoken_pooling": ("first", None), "words_splitter_type": ("whitespace", None),
    "embed_ent_token": (True, None), "fuse_layers": (False, None), "post_fusion_schema": ("", None),
    **dict.fromkeys(("labels_encoder", "labels_encoder_config", "labels_decoder", "labels_decoder_config"), (None,)),
    **dict.fromkeys(("relations_layer", "triples_layer", "span_encoder_config"), (None,)),
    "precomputed_prompts_mode": (False, None),
}  # fmt: skip
_INERT: Final = """
    augment_data_prob blank_entity_prob decoder_mode dropout dtype fine_tune full_decoder_context has_rnn id_to_classes
    max_neg_type_ratio max_types model_type name neg_spans_ratio num_post_fusion_layers represent_spans root_dir span_loss_coef
    token_loss_coef vocab_size
""".split()
_TOKENS_PER_WORD: Final = 8
"""Positions that a text without position embeddings may have, for each word; the labels need some too."""


def read_gliner(folder: Path, name: str, reading: TokenizerReading | None) -> Card:
    """Return the card. Raises CheckpointError."""
    config = JsonFile.read(folder, GLINER)
    config.require_values(_FIXED)
    stated = config.data.get("encoder_config")
    if stated is None:
        message = "is missing: this folder names the model inside, and does not hold its config."
        hint = "load it with the package gliner, and save it with save_pretrained(DIR, safe_serialization=True)"
        raise config.error(message, "encoder_config", hint)
    config.ignore("encoder_config")
    encoder_config = reader.with_architecture(JsonFile(f"{GLINER} (encoder_config)", stated))
    encoder = reader.read_encoder(encoder_config)
    if encoder.family not in _FAMILIES:
        raise config.error(f"{encoder.family!r} is not supported; supported: DeBERTa v2 and v3, ModernBERT.", "encoder_config")
    width, max_words = config.positive("hidden_size", encoder.hidden_size), config.positive("max_len", 384)
    num_lstms = config.get("num_rnn_layers", int, 1)
    if num_lstms < 0 or width % 2:
        raise config.error("must not be negative, and hidden_size even.", "num_rnn_layers")
    head = SpanHead(encoder.hidden_size, width, config.positive("max_width", 12), num_lstms)
    label, end = config.get("ent_token", str, "<<ENT>>"), config.get("sep_token", str, "<<SEP>>")
    prompt = SpanPrompt(label, config.positive("class_token_index"), end, max_words)
    config.reject_unread_keys(_INERT)
    if encoder.family == bert.DEBERTA[0]:  # distances alone limit no text
        encoder = replace(encoder, max_positions=max(encoder.max_positions, _TOKENS_PER_WORD * max_words))
    files = JsonFile.read(folder, "tokenizer_config.json")
    outputs: dict[OutputName, Output] = {"token_scores": Output(1, rows="span", spans=head, activation="sigmoid")}
    max_length = read_max_length(encoder, JsonFile("", {}), files)
    tokenizer = read_tokenizer(folder, "", encoder_config, files, reading=reading, lowercase=False)
    return Card(name, "", encoder, outputs, max_length, tokenizer, span_prompt=prompt)
