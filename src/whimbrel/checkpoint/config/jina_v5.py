"""Configs of EuroBERT and of jina-embeddings-v5, whose base is Qwen3 or EuroBERT.

jina-embeddings-v5 has one LoRA adapter per task, in folders. Its own code pools the last token, normalises, and puts a prompt
before every text. Which adapter a text takes is the caller's choice.

Sources: transformers/models/eurobert/*_eurobert.py (5.23); on the hub, custom_st.py, modeling_jina_embeddings_v5.py and
configuration_*.py of jinaai/jina-embeddings-v5-text-nano and -small; vllm/model_executor/models/jina.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from whimbrel.checkpoint.config.adapters import name_task_folders
from whimbrel.checkpoint.config.common import allow_auto_map
from whimbrel.checkpoint.config.decoders import read_llama, read_qwen3
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.types.card import Encoder

DEFAULT_TASK: Final = "retrieval"
"""Task of texts for which none is named, as in vLLM. The model's own code has no default."""
PROMPTS: Final[Mapping[str, str]] = {"query": "Query: ", "document": "Document: "}
"""Prompts in the model's own code, for checkpoints without files of Sentence Transformers."""
DEFAULT_PROMPT: Final = "document"
_EUROBERT_INERT: Final = """
    bos_token classifier_pooling clf_pooling eos_token hidden_dropout mask_token mask_token_id pad_token task_names
""".split()


def is_jina_v5(config: JsonFile) -> bool:
    return config.data.get("architectures") == ["JinaEmbeddingsV5Model"]


def read_jina_v5(config: JsonFile) -> Encoder:
    """Read jina-embeddings-v5. `is_decoder` tells its two bases apart, as in vLLM."""
    allow_auto_map(config)
    base = read_qwen3 if config.get("is_decoder", bool, True) else read_eurobert
    return replace(base(config), **name_task_folders(config, DEFAULT_TASK))


def read_eurobert(config: JsonFile) -> Encoder:
    """Read EuroBERT, a Llama that sees both ways. Its code on the hub and transformers differ in the default of rope_theta."""
    allow_auto_map(config)
    config.require_values({"is_causal": (False, None), "sliding_window": (None,)})
    rotary = config.data.get("rope_parameters")
    if config.data.get("rope_theta") is None and not (isinstance(rotary, dict) and "rope_theta" in rotary):
        raise config.error("is missing, and code of this name has different defaults.", "rope_theta")
    config.ignore(*_EUROBERT_INERT)
    return replace(read_llama(config, "eurobert"), causal=False, norm_eps=config.get("rms_norm_eps", float, 1e-5))
