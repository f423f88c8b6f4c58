"""Conventions of LLM rerankers.

The files of these rerankers state neither the prompt template nor the logits of the score. This table does.

Sources, all of them the code of the models' cards: README.md of Qwen/Qwen3-Reranker-0.6B, BAAI/bge-reranker-v2-gemma and
nvidia/llama-nemotron-rerank-1b-v2; mxbai_rerank/mxbai_rerank_v2.py (0.1.6); modeling_zeranker.py of zeroentropy/zerank-1-small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from whimbrel.types.choices import RerankerName
from whimbrel.types.template import Template

_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_MXBAI_BEFORE: Final = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
)
_MXBAI_TASK: Final = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document pair, "
    "carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 for not "
    "relevant, 1 for relevant).\nRelevance:"
)
_MXBAI_AFTER: Final = ("\n", "document: {document}", "\n", _MXBAI_TASK, "<|im_end|>\n<|im_start|>assistant\n")
_BGE_TASK: Final = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a prediction "
    "of either 'Yes' or 'No'."
)
_ZERANK: Final = "<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n{document}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Convention:
    """The settings that a kind of checkpoint does not state."""

    template: Template
    stems: tuple[str, ...]
    """Architectures, without ForCausalLM or ForSequenceClassification."""
    tokens: tuple[str, str | None] | None = None
    """Tokens of a causal model's score: the next-token logit of the first, less that of the second."""
    divisor: float = 1.0
    activated: bool = True
    """True if the sigmoid is applied to scores by default."""
    max_length: int | None = None
    ids: tuple[str, ...] = ()


CONVENTIONS: Final[Mapping[RerankerName, Convention]] = {
    "qwen3": Convention(
        Template((_QWEN3.replace("{instruction}", _QWEN3_INSTRUCTION),), (_QWEN3,)),
        stems=("Qwen3",),
        tokens=("yes", "no"),
        max_length=8192,
        ids=(
            *(f"Qwen/Qwen3-Reranker-{size}" for size in ("0.6B", "4B", "8B")),
            *(f"tomaarsen/Qwen3-Reranker-{size}-seq-cls" for size in ("0.6B", "4B", "8B")),
        ),
    ),
    "mxbai-v2": Convention(
        Template(
            (_MXBAI_BEFORE, "query: {query}", *_MXBAI_AFTER),
            (_MXBAI_BEFORE, "instruction: {instruction}\nquery: {query}", *_MXBAI_AFTER),
            body_length=8192,
            query_share=0.75,
        ),
        stems=("Qwen2",),
        tokens=("1", "0"),
        activated=False,
        ids=("mixedbread-ai/mxbai-rerank-base-v2", "mixedbread-ai/mxbai-rerank-large-v2"),
    ),
    "bge-gemma": Convention(
        Template(
            ("A: {query}", "\n", "B: {document}", "\n", _BGE_TASK), add_special_tokens=True, body_length=1024, query_share=0.75
        ),
        stems=("Gemma",),
        tokens=("Yes", None),
        activated=False,
        ids=("BAAI/bge-reranker-v2-gemma",),
    ),
    "nemotron": Convention(
        Template(("question:{query} \n \n passage:{document}",), add_special_tokens=True),
        stems=("LlamaBidirectional",),
        activated=False,
        max_length=8192,
        ids=("nvidia/llama-nemotron-rerank-1b-v2",),
    ),
    "zerank": Convention(
        Template((_ZERANK,), strip_inputs=True, max_characters=(2000, 10_000)),
        stems=("Qwen3",),
        tokens=("Yes", None),
        divisor=5.0,
        ids=("zeroentropy/zerank-1-small",),
    ),
}
