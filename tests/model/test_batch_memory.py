"""The memory of a batch never exceeds the plan's prediction, and the prediction is not far above it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints.families import DEBERTA, DECODER, DEEPSEEK, LFM2, LLAMA3, ROBERTA, SIZES, T5, write_model
from checkpoints.files import edit_json
from whimbrel.checkpoint.reader import read_card
from whimbrel.types.batch_memory import BatchDevice, batch_bytes

POSITIONS = 6000
WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 1024, "max_position_embeddings": POSITIONS + 2}
WIDE_DECODER = DECODER | WIDE | {"head_dim": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("Bert", SIZES | WIDE, {}),
    "modernbert": ("ModernBert", SIZES | WIDE | {"local_attention": 128}, {}),
    "mpnet": ("MPNet", ROBERTA | WIDE, {}),
    "deberta": ("DebertaV2", DEBERTA | WIDE | {"position_buckets": 256}, {}),
    "deberta v2": ("DebertaV2", DEBERTA | WIDE | {"position_buckets": 256, "conv_kernel_size": 3}, {}),
    "t5": ("T5", T5 | {"d_model": 256, "num_layers": 2, "d_ff": 1024, "d_kv": 64}, {}),
    "qwen3 in pieces": ("Qwen3", WIDE_DECODER, {}),
    "qwen3 in pieces of 64": ("Qwen3", WIDE_DECODER, {"max_batch_tokens": 64}),
    "qwen3 whole": ("Qwen3", WIDE_DECODER, {"chunked_prefill": False}),
    "llama stretched": ("Llama", WIDE_DECODER | {"rope_scaling": LLAMA3}, {}),
    "mistral with a window": ("Mistral", WIDE_DECODER | {"sliding_window": 100}, {}),
    "gemma2": ("Gemma2", WIDE_DECODER | {"sliding_window": 100}, {}),
    "gemma2 whole": ("Gemma2", WIDE_DECODER | {"sliding_window": 100}, {"chunked_prefill": False}),
    "lfm2": ("Lfm2", LFM2 | WIDE | {"layer_types": ["conv", "full_attention"]}, {}),
    "deepseek": ("DeepseekV3", DEEPSEEK | WIDE, {}),
}

MEASURE = """
import ctypes, sys
from pathlib import Path
import numpy as np
from whimbrel import Engine
from whimbrel.types.request import Request

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

folder, dtype, tokens, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), eval(sys.argv[4])
with Engine(folder, dtype=dtype, pooling="mean", **options) as engine:
    run = lambda size: engine.run(Request([np.full(size, 20, np.int32)], ("dense",)))
    run(300)  # what stays: primitives, threads, the library's own buffers
    ctypes.CDLL(None).malloc_trim(0)
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    run(tokens)
    print(engine.plan.batch_bytes, (kib("VmHWM") - before) * 1024)
"""


def measure(folder: Path, dtype: str, tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Run one text of this length in a new process. Return the bytes by the plan, and the bytes taken."""
    command = [sys.executable, "-c", MEASURE, str(folder), dtype, str(tokens), repr(options)]
    predicted, taken = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(predicted), int(taken)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_a_batch_takes_what_the_plan_says(case: str, dtype: str, tmp_path: Path) -> None:
    """The longest text takes no more memory than the plan says, and not less than a fourth of it."""
    name, config, options = CASES[case]
    write_model(tmp_path, name, config)
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=POSITIONS)
    predicted, taken = measure(tmp_path, dtype, POSITIONS, options)
    assert predicted / 4 - 2**25 <= taken <= predicted


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", [{}, {"chunked_prefill": False}], ids=["in pieces", "whole"])
def test_a_text_of_32k_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    """The longest text of a model in the shape of Qwen3-Embedding-0.6B. Two of its 28 layers: others take nothing more."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    limits = {"max_position_embeddings": 32_768, "num_hidden_layers": 2, "head_dim": 128}
    write_model(tmp_path, "Qwen3", DECODER | shape | limits)
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=32_768)
    predicted, taken = measure(tmp_path, "bfloat16", 32_768, options)
    assert predicted / 4 <= taken <= predicted
    assert options or predicted < 2 * 2**30


MEASURE_SPANS = """
import ctypes, sys
from pathlib import Path
import torch
from whimbrel.model.spans import SpanScorer
from whimbrel.types.batch_memory import span_bytes
from whimbrel.types.heads import SpanHead

def kib(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

class Weights:
    def take(self, name, *shape):
        return torch.randn(shape) / 50

num_words, num_labels = int(sys.argv[1]), int(sys.argv[2])
head = SpanHead(in_features=512, width=512, max_words=12, num_lstms=1)
scorer = SpanScorer(head, Weights(), torch.device("cpu"))
torch.set_num_threads(1)

def run(words, labels):
    rows = words + labels
    return scorer(torch.randn(rows, 512), torch.ones(rows, dtype=torch.bool), [(labels, words)])

with torch.inference_mode():
    run(20, 4)
    ctypes.CDLL(None).malloc_trim(0)
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    assert run(num_words, num_labels).isfinite().all()
    print(span_bytes(head, 384, num_words + 2 * num_labels), (kib("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("words", "labels"), [(384, 5), (384, 500)])
def test_the_layers_over_spans_take_what_the_plan_says(words: int, labels: int) -> None:
    """The longest text of a model that finds the entities of labels: its spans take more memory than its tokens."""
    command = [sys.executable, "-c", MEASURE_SPANS, str(words), str(labels)]
    predicted, taken = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert predicted / 2 <= taken <= predicted


def test_more_layers_take_no_more(tmp_path: Path) -> None:
    """The number of layers changes nothing; more tokens and columns do."""
    device, limits = BatchDevice(2, True, False), {"max_batch_tokens": 512, "max_length": 4096, "in_pieces": True}
    cards = [sized(tmp_path / str(number), **config) for number, config in enumerate(
        ({}, {"num_hidden_layers": 5}, {"hidden_size": 512}))]  # fmt: skip
    few, more, wide = (batch_bytes(card, device, **limits) for card in cards)
    assert few == more < wide
    assert few < batch_bytes(cards[0], device, **limits | {"max_length": 8192})
    assert few < batch_bytes(cards[0], device, **limits | {"max_batch_tokens": 2048})


def sized(folder: Path, **config: Any) -> Any:
    write_model(folder, "Qwen3", WIDE_DECODER | config)
    return read_card(folder, "m", pooling="mean")
