"""T5 encoders as they lie on the hub: INSTRUCTOR's prompts, copies of tables, and what cannot be one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from checkpoints.files import edit_json, write_json
from checkpoints.layouts import LAYOUTS, TEXTS, write_layout
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.locate import Checkpoint
from whimbrel.checkpoint.reader import read_card
from whimbrel.checkpoint.summary import left_out
from whimbrel.cli.console import describe
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.model.load import check_weights
from whimbrel.types.hardware import Gpu, Hardware
from whimbrel.types.plan import Options, make_plan

JSON = dict[str, Any]

INSTRUCTIONS = ("Represent the bird for retrieval: ", "far away:", "a ", "far far away in a year " * 40)
"""One of them has one token, and the last is longer than a text may be."""
WEIGHTS = "model.safetensors"


def write_t5(folder: Path, layout: str = "gtr t5") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_layout(folder, LAYOUTS[layout])
    pooling = folder / "1_Pooling/config.json"
    edit_json(pooling, include_prompt=None, pooling_mode_weightedmean_tokens=False, pooling_mode_lasttoken=False)
    return folder


def own_classes(folder: Path, transformer: str, pooling: str) -> None:
    """Write modules.json as the package InstructorEmbedding saves it."""
    (folder / "1_Pooling").rename(folder / "1_INSTRUCTOR_Pooling")
    rows = [
        ("", transformer), ("1_INSTRUCTOR_Pooling", pooling), ("2_Dense", "sentence_transformers.models.Dense"),
        ("3_Normalize", "sentence_transformers.models.Normalize"),
    ]  # fmt: skip
    write_json(folder / "modules.json", [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(rows)])


def package(folder: Path, instruction: str, texts: list[str], limit: int) -> np.ndarray:
    """Embed as INSTRUCTOR's package does (InstructorEmbedding 1.0.1): the tokens of the instruction alone are not pooled."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.T5EncoderModel.from_pretrained(folder).eval()
    dense = load_file(folder / "2_Dense" / WEIGHTS)["linear.weight"]

    def ids(text: str) -> list[int]:
        return tokenizer(text, truncation=True, max_length=limit)["input_ids"]

    rows: list[torch.Tensor] = []
    for text in texts:
        left_out = len(ids(instruction)) - 1
        row = torch.tensor([ids(instruction + text)])
        with torch.inference_mode():
            states = model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0]
        rows.append(F.normalize(states[left_out if left_out > 1 else 0 :].mean(0) @ dense.T, dim=0))
    return torch.stack(rows).numpy()


def check_instructions(folder: Path, parity: Parity, *models: str, limit: int = 64) -> None:
    with Engine(str(folder), dtype="float32") as engine:
        assert engine.plan.max_length == limit
        for instruction in INSTRUCTIONS:
            got = engine.embed(TEXTS, prompt=instruction)
            parity(got, package(folder, instruction, TEXTS, limit), *models, family="t5", tasks=["dense"])
            assert np.array_equal(got, np.stack([engine.embed(text, prompt=instruction) for text in TEXTS]))
        parity(engine.embed(TEXTS), package(folder, "", TEXTS, limit))


def test_instructors_leave_their_instruction_out(parity: Parity, tmp_path: Path) -> None:
    """Their files do not say so; their names do. Sentence Transformers knows the ids."""
    folder = write_t5(tmp_path / "instructor-base")
    ids = [f"hkunlp/instructor-{size}" for size in ("base", "large", "xl")]
    check_instructions(folder, parity, *ids)
    assert not any(read_card(folder, name).dense.include_prompt for name in (*ids, "instructor-large"))
    shown = describe(read_card(folder, ids[0]), Checkpoint(folder, ids[0]))
    assert "dense: 32, mean pooling without the prompt, normalised" in shown.values()
    reference = SentenceTransformer(str(folder), device="cpu")
    reference.set_pooling_include_prompt(False)
    with Engine(str(folder), dtype="float32") as engine:
        for instruction in INSTRUCTIONS[:2]:
            parity(engine.embed(TEXTS, prompt=instruction), reference.encode(TEXTS, prompt=instruction))


OWN = "InstructorEmbedding.instructor"


@pytest.mark.parametrize(
    ("transformer", "pooling"), [(OWN, OWN), (f"{OWN}.INSTRUCTOR_Transformer", f"{OWN}.INSTRUCTOR_Pooling")]
)
def test_fine_tunes_of_instructor(transformer: str, pooling: str, parity: Parity, tmp_path: Path) -> None:
    """Whatever their limit says, the package cuts at 512 tokens. Old files name only the module of its classes."""
    own_classes(write_t5(tmp_path), transformer, pooling)
    check_instructions(tmp_path, parity, limit=512)


@pytest.mark.parametrize(("stated", "pooled"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", ["instructor-large", "my-instructor"])
def test_what_a_file_says_of_prompts_counts(name: str, stated: bool, pooled: bool, tmp_path: Path) -> None:
    folder = write_t5(tmp_path)
    edit_json(folder / "1_Pooling/config.json", include_prompt=stated)
    assert read_card(folder, name).dense.include_prompt == pooled


def test_other_instructors_must_say_what_they_pool(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: include_prompt: is missing\. a/my-INSTRUCTOR-t5 seems"):
        read_card(write_t5(tmp_path), "a/my-INSTRUCTOR-t5")
    assert read_card(tmp_path, "a/gtr").dense.include_prompt


@pytest.mark.parametrize("form", ["QuestionAnswering", "SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", ["T5", "MT5"])
def test_heads_for_other_tasks_are_left_out(family: str, form: str, parity: Parity, tmp_path: Path) -> None:
    """The model_type decides, as with Sentence Transformers, not the class that config.json names."""
    folder = write_t5(tmp_path, "gtr t5" if family == "T5" else "whole flan t5")
    config = getattr(transformers, f"{family}Config").from_pretrained(folder, num_decoder_layers=1)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}For{form}")(config)
    model.save_pretrained(folder)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    parity(embedded(folder), expected)
    head = {"QuestionAnswering": "qa_outputs", "SequenceClassification": "classification_head"}.get(form, "classifier")
    assert head in left_out(folder, read_card(folder, "m"))
    edit_json(folder / "config.json", architectures=None)
    parity(embedded(folder), expected)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def embedded(folder: Path, **options: Any) -> np.ndarray:
    with Engine(str(folder), dtype="float32", **options) as engine:
        return engine.embed(TEXTS)


@pytest.mark.parametrize(
    "names", [("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
)
def test_the_table_of_words_has_many_names(names: tuple[str, ...], tmp_path: Path) -> None:
    expected = embedded(write_t5(tmp_path))
    weights = weights_of(tmp_path)
    table = weights.pop("shared.weight")
    save_file(weights | {f"{name}.weight": table.clone() for name in names}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert np.array_equal(embedded(tmp_path), expected)
    check_weights(tmp_path, read_card(tmp_path, "m"))  # as `show` does, by the headers


def test_copies_of_the_table_must_be_equal(tmp_path: Path) -> None:
    weights = weights_of(write_t5(tmp_path))
    other = weights["shared.weight"] + 1
    save_file(weights | {"encoder.embed_tokens.weight": other}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: encoder\.embed_tokens\.weight: differs from shared\.weight"
    ):
        embedded(tmp_path)


def test_pickled_weights_are_converted(tmp_path: Path) -> None:
    """A whole T5, in which three tables share their memory, is converted."""
    folder, out = write_t5(tmp_path / "model", "whole flan t5"), tmp_path / "out"
    expected = embedded(folder)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    subprocess.run(
        [sys.executable, "-m", "whimbrel", "convert", str(folder), "--out", str(out)], check=True, capture_output=True
    )
    assert np.array_equal(embedded(out), expected)


BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({BIAS: None}, rf"{BIAS}: this tensor is missing"),
        ({BIAS: torch.full((32, 4), torch.nan)}, rf"{BIAS}: holds NaN"),
        ({BIAS: torch.zeros(16, 4)}, rf"{BIAS}: has shape \[16, 4\]; the config says \[32, 4\]"),
        ({"encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight": torch.zeros(32, 4)}, "not known to Whimbrel"),
        ({"encoder.block.2.layer.1.DenseReluDense.wi.weight": None}, r"wi\.weight: this tensor is missing"),
        ({"encoder.final_layer_norm.weight": torch.full((48,), torch.inf)}, "holds NaN or infinity"),
        ({"shared.weight": None}, r"shared\.weight: this tensor is missing"),
    ],
)
def test_weights_that_are_not_t5s(change: dict[str, torch.Tensor | None], says: str, tmp_path: Path) -> None:
    weights = weights_of(write_t5(tmp_path)) | change
    save_file({name: each for name, each in weights.items() if each is not None}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        embedded(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj: 'gated-mish' is not supported; supported: gelu"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj"),
        ({"is_decoder": True}, "is_decoder: True is not supported; must be False"),
        ({"is_gated_act": True}, "is_gated_act: contradicts feed_forward_proj"),
        ({"dense_act_fn": "silu"}, "dense_act_fn: 'silu' is not supported; supported: relu"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets: must be even and at least 4, is 3"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance: must be from 9 to 32,768 with 32 buckets"),
        ({"relative_attention_max_distance": 10**12}, "relative_attention_max_distance"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon: must be positive"),
        ({"num_layers": 10**6}, "num_layers"),
        ({"d_kv": None, "d_model": "48"}, "d_model: must be int"),
        ({"architectures": ["T5ForBirds"]}, "supported: T5EncoderModel, T5Model, T5ForConditionalGeneration"),
        ({"tie_encoder_decoder": True, "shared_bias": 1}, "shared_bias: this key"),
    ],
)  # fmt: skip
def test_configs_that_are_not_t5s(change: JSON, says: str, tmp_path: Path) -> None:
    edit_json(write_t5(tmp_path) / "config.json", **change)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{says}|config\.json: {says}"):
        read_card(tmp_path, "m")


@pytest.mark.parametrize("change", [{"extra_ids": 7}, {"extra_ids": 7, "additional_special_tokens": ["<extra_id_0>"]}])
def test_numbers_of_sentinels(change: JSON, tmp_path: Path) -> None:
    edit_json(write_t5(tmp_path) / "tokenizer_config.json", **change)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: extra_ids: 7 is not supported"):
        read_card(tmp_path, "m")


def test_a_text_may_be_long(tmp_path: Path) -> None:
    """T5 has no last position. Without a limit in its files, ours is far above its training's, and the option lowers it."""
    edit_json(write_t5(tmp_path) / "tokenizer_config.json", model_max_length=None)
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=None)
    text = " ".join(np.random.default_rng(5).choice("far away in a year the whimbrel".split(), 1200))
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    with Engine(str(tmp_path), dtype="float32") as engine:
        assert engine.plan.max_length == 32_768
        assert np.abs(engine.embed(text) - reference.encode(text)).max() < 1e-5


def test_float16_is_refused(tmp_path: Path) -> None:
    """Numbers between T5's layers are known to exceed it; `auto` never takes it."""
    card = read_card(write_t5(tmp_path), "m")
    gpu = Hardware(num_cores=4, gpus=(Gpu("cuda:0"),))
    with pytest.raises(SetupError, match="not supported for T5"):
        make_plan(Options(dtype="float16"), card, gpu)
    assert make_plan(Options(), card, gpu).dtype == "float32"
