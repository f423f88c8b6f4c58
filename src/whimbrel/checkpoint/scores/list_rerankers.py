"""Card of jina-reranker-v3, which judges a query and all its documents in one prompt.

A causal Qwen3 reads the documents, then the query. Two linear layers turn the hidden state of each marker into a vector. The
prompt, its limits and the width stand in the model's code, not in its files. jina-reranker-v3.5 has sliding windows and other
limits, and is refused.

Source: modeling.py of jinaai/jina-reranker-v3.
"""

from pathlib import Path
from typing import Final

from whimbrel.checkpoint.config import common, reader
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.sentence_transformers import modules
from whimbrel.checkpoint.sentence_transformers.modules import has_modules
from whimbrel.checkpoint.tokenizer.config import read_tokenizer
from whimbrel.checkpoint.tokenizer.contents import read_vocabulary
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Card, Output, TokenizerReading
from whimbrel.types.heads import Dense
from whimbrel.types.request import OutputName
from whimbrel.types.template import ListTemplate

ARCHITECTURE: Final = "JinaForRanking"
_WIDTH: Final = 512
_DOCUMENT, _QUERY = "<|embed_token|>", "<|rerank_token|>"
_TEMPLATE: Final = ListTemplate(
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
    return not has_modules(folder) and JsonFile.read_optional(folder, "config.json").data.get("architectures") == [ARCHITECTURE]


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
        Dense(None, "projector.2", inner, _WIDTH, bias=False, activation="identity"),
    )
    keep_ids = (ids[_DOCUMENT], ids[_QUERY])
    vectors = Output(_WIDTH, rows="token", token_head=projector, activation="normalize", activated=False, keep_ids=keep_ids)
    outputs: dict[OutputName, Output] = {"scores": Output(1, rows="none"), "multi_vector": vectors}
    max_length = modules.read_max_length(encoder, JsonFile.read_optional(folder, "sentence_bert_config.json"), files)
    return Card(name, "", encoder, outputs, max_length, tokenizer, list_template=_TEMPLATE)
