"""jina-embeddings-v5, small and random, in the layouts of jinaai/jina-embeddings-v5-text-small and -nano; and the reference.

The reference is transformers' base model with an adapter merged into its weights, weight + alpha / rank * B A, and the formula
of the model's own code: prompt, tokens, the last hidden state, its norm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

from checkpoints.files import write_json
from checkpoints.tokenizer_files import lfm2, qwen
from checkpoints.weights import randomise

JSON: TypeAlias = dict[str, Any]
Size: TypeAlias = Literal["small", "nano"]

SIZES: tuple[Size, ...] = ("small", "nano")
TASKS = ["retrieval", "text-matching", "clustering", "classification"]
PROMPTS = {"query": "Query: ", "document": "Document: "}
RANK, WIDTH, LENGTH = 8, 48, 130
CODE = {
    "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
    "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
}
COMMON: JSON = {
    "architectures": ["JinaEmbeddingsV5Model"], "task_names": TASKS, "auto_map": CODE, "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": WIDTH, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": LENGTH, "model_type": "jina_embeddings_v5", "num_attention_heads": 4, "num_hidden_layers": 3,
    "rope_scaling": None, "vocab_size": 900,
}  # fmt: skip
CONFIGS: Mapping[Size, JSON] = {
    "small": COMMON | {
        "bos_token_id": 3, "eos_token_id": 3, "head_dim": 16, "max_window_layers": 28, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 3500000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    },
    "nano": COMMON | {
        "bos_token": "<|begin_of_text|>", "bos_token_id": 2, "eos_token": "<|end_of_text|>", "eos_token_id": 3,
        "pad_token": "<|end_of_text|>", "pad_token_id": 3, "mask_token": "<|mask|>", "mask_token_id": 4, "hidden_dropout": 0.0,
        "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.40.0.dev0", "is_decoder": False,
    },
}  # fmt: skip
"""config.json as on the hub, except for sizes and ids."""
PEFT: JSON = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "jinaai/jina-embeddings-v5-text-nano", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": "gaussian", "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": RANK, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "r": RANK, "rank_pattern": {}, "revision": None,
    "target_modules": ["gate_proj", "v_proj", "q_proj", "down_proj", "o_proj", "k_proj", "up_proj"],
    "task_type": "FEATURE_EXTRACTION", "trainable_token_indices": None, "use_dora": False, "use_rslora": False,
}  # fmt: skip
MODULES = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task", "truncate_dim"]}]
SENTENCE = {
    "__version__": {"sentence_transformers": "5.1.2", "transformers": "4.57.0", "pytorch": "2.8.0"},
    "prompts": PROMPTS, "default_prompt_name": "document", "similarity_fn_name": "cosine",
}  # fmt: skip


def _eurobert() -> tuple[JSON, JSON]:
    """Byte pairs between a token that begins a text and one that ends it."""
    content, stated = lfm2()
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|begin_of_text|>", "<|end_of_text|>")]
    single = f"{ends[0][0]} $A {ends[1][0]}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ends)
    content = json.loads(tokenizer.to_str())
    added = {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in content["added_tokens"]}
    roles = {"bos_token": ends[0][0], "eos_token": ends[1][0], "mask_token": "<|mask|>", "pad_token": "<|pad|>"}
    inputs = ["input_ids", "attention_mask"]
    return content, {
        "added_tokens_decoder": added, **roles, "clean_up_tokenization_spaces": True, "extra_special_tokens": {},
        "model_input_names": inputs, "model_max_length": stated["model_max_length"], "tokenizer_class": "PreTrainedTokenizer",
    }  # fmt: skip


TOKENIZERS = {"small": qwen(suffix=False), "nano": _eurobert()}


@cache
def base(size: Size) -> Any:
    """The base model of transformers, without adapters."""
    config = {
        key: value
        for key, value in CONFIGS[size].items()
        if key not in ("architectures", "auto_map", "task_names", "model_type")
    }
    if size == "small":
        model = transformers.Qwen3Model(transformers.Qwen3Config(**config)).eval()
    else:
        model = transformers.EuroBertModel(transformers.EuroBertConfig(**config)).eval()
    randomise(model)
    return model


@cache
def adapter(size: Size, task: str) -> Mapping[str, tuple[Tensor, Tensor]]:
    """A and B by the name of the layer."""
    generator = torch.Generator().manual_seed(TASKS.index(task) + 10)
    layers = {name: each for name, each in base(size).named_modules() if isinstance(each, torch.nn.Linear)}

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    return {name: (draw(RANK, each.in_features), draw(each.out_features, RANK)) for name, each in layers.items()}


@cache
def merged(size: Size, task: str) -> Any:
    """The base model with an adapter in its weights."""
    state = dict(base(size).state_dict())
    for name, (a, b) in adapter(size, task).items():
        state[f"{name}.weight"] = state[f"{name}.weight"] + b @ a  # alpha is the rank
    model = type(base(size))(base(size).config).eval()
    model.load_state_dict(state)
    return model


def tokenize(folder: Path, size: Size, text: str) -> NDArray[np.int32]:
    """The ids of a text with its prompt, by the class that tokenizer_config.json names."""
    kind = transformers.Qwen2Tokenizer if size == "small" else transformers.PreTrainedTokenizerFast
    tokenizer: Any = kind.from_pretrained(folder)
    return np.array(tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"], np.int32)


def encode(folder: Path, size: Size, task: str, prompt: str, texts: Sequence[str], width: int | None = None) -> Any:
    """Return the vectors of `encode` in the model's own code."""
    vectors: list[Any] = []
    for text in texts:
        ids = torch.from_numpy(tokenize(folder, size, prompt + text))[None].long()
        with torch.inference_mode():
            last = merged(size, task)(input_ids=ids).last_hidden_state[0, -1, :width]
        vectors.append(torch.nn.functional.normalize(last, dim=-1).numpy())
    return np.stack(vectors)


def write(folder: Path, size: Size, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIGS[size] | config)
    write_json(folder / "modules.json", MODULES)
    write_json(folder / "config_sentence_transformers.json", SENTENCE)
    content, stated = TOKENIZERS[size]
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", stated)
    save_file({name: tensor.clone() for name, tensor in base(size).state_dict().items()}, folder / "model.safetensors")
    for task in TASKS:
        write_adapter(folder / "adapters" / task, size, task)


def write_adapter(folder: Path, size: Size, task: str) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "adapter_config.json", PEFT)
    tensors: dict[str, Tensor] = {}
    for name, pair in adapter(size, task).items():
        tensors |= {f"base_model.model.{name}.lora_{kind}.weight": each for kind, each in zip("AB", pair, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
