"""Architectures that run through transformers: parity with transformers alone, and rejection of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from checkpoints import tokenizer_files
from checkpoints.encoders import bert_tokenizer
from checkpoints.fallback import CASES, MOBILE, Config
from checkpoints.families import DECODER, ROBERTA, SIZES, VOCABULARY, YARN, write_model
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from comparisons import assert_close
from hidden_states import hidden_states, random_ids, reference_states
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.config import fallback
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError
from whimbrel.model.fallback import trials
from whimbrel.model.load import load_model

FEW = ("albert", "phi3 with a window that the check cuts")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: models are so small that two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    """Hidden states are equal bit for bit in a batch and alone, and close to transformers'."""
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    together = hidden_states(tmp_path, ids)
    assert read_card(tmp_path, "m", pooling="mean").encoder.family == "hf"
    assert_close(together, reference_states(model, ids))
    for row, expected in zip(ids, together, strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row])[0], expected)


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", FEW)
def test_half_precision_is_near(case: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    together = hidden_states(tmp_path, ids, torch.bfloat16)
    for row, found in zip(ids[::3], together[::3], strict=True):
        assert np.array_equal(hidden_states(tmp_path, [row], torch.bfloat16)[0], found)
    for found, expected in zip(together, reference_states(model, ids), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES[case])
    ids = random_ids()
    for found, expected in zip(hidden_states(tmp_path, ids, dtype, "cuda"), reference_states(model, ids), strict=True):
        one, other = found.mean(0), expected.mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > (0.9999 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize(
    ("case", "form"),
    [("albert", "ForMaskedLM"), ("albert", "ForPreTraining"), ("ernie", "ForMaskedLM"), ("gpt2", "LMHeadModel"),
     ("olmo2", "ForCausalLM")],
)  # fmt: skip
def test_the_encoder_of_a_larger_model(case: str, form: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES[case], form=form)
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


@pytest.mark.parametrize("case", ["smollm3", "modernbert decoder", "phi3 both ways"])
@pytest.mark.sample(1)
def test_what_the_config_says_matters(case: str, tmp_path: Path) -> None:
    """Guard: the comparison with transformers would notice each of these."""
    write_model(tmp_path, *CASES[case])
    before = hidden_states(tmp_path, random_ids())[-1]
    changes = {"phi3 both ways": {"is_causal": True}, "modernbert decoder": {"local_attention": 100, "sliding_window": 50}}
    edit_json(tmp_path / "config.json", **changes.get(case, {"sliding_window": 50}))
    assert np.abs(hidden_states(tmp_path, random_ids())[-1] - before).max() > 1e-3


def test_work_between_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch may run on the same model at each boundary."""
    write_model(tmp_path, *CASES["albert"])
    ids = random_ids()
    expected = hidden_states(tmp_path, ids)
    card = read_card(tmp_path, "m", pooling="mean")
    model: Any = load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)[0]
    found = list[Any]()

    def outer(*args: Any) -> Any:
        monkeypatch.setattr("hidden_states.loaded", lambda *_: (card, model))
        return model(*args, lambda: found.append(hidden_states(tmp_path, ids[:4])))

    monkeypatch.setattr("hidden_states.loaded", lambda *_: (card, outer))
    assert all(np.array_equal(*pair) for pair in zip(hidden_states(tmp_path, ids), expected, strict=True))
    assert len(found) == SIZES["num_hidden_layers"] - 1
    assert all(np.array_equal(*pair) for inner in found for pair in zip(inner, expected[:4], strict=True))


def test_mixtures_of_experts_are_right_but_not_to_the_bit(tmp_path: Path) -> None:
    """The products of an expert have as many rows as the batch has tokens for it."""
    model = write_model(tmp_path, "Mixtral", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2})
    together = hidden_states(tmp_path, random_ids())
    assert_close(together, reference_states(model, random_ids()))
    assert_close(hidden_states(tmp_path, random_ids()[-1:]), together[-1:])
    with Engine(str(tmp_path), dtype="float32", pooling="mean") as engine:
        assert engine.plan.same_bits is False
        assert "transformers itself multiplies by layers.*.mlp.experts.down_proj" in engine.plan.same_bits_reason


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_other_models_promise_the_same_bits(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, *CASES[case])
    card = read_card(tmp_path, "m", pooling="mean")
    with trials.loading() as unstable:
        load_model(tmp_path, card, device=torch.device("cpu"), dtype=torch.float32)
    assert unstable == []


# Refusals

SMALL_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED: list[tuple[str, Config, str]] = [
    ("BigBird", SIZES, "big_bird cannot be run"),
    ("ConvBert", SIZES, "ConvBertModel: its attention does not pass"),
    ("Deberta", SIZES, "deberta cannot be run"),
    ("Esm", SIZES | {"mask_token_id": 4}, "esm cannot be run"),
    ("Funnel", {"vocab_size": VOCABULARY, "d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 96}, "funnel cannot be run"),
    ("GptOss", DECODER | SMALL_MOE | {"head_dim": 12, "rope_parameters": YARN | {"rope_theta": 1e4}}, "of its own: s_aux"),
    ("Longformer", SIZES | {"attention_window": 8}, "longformer cannot be run"),
    ("MobileBert", MOBILE | {"trigram_input": True}, "trigram_input"),
    ("Granite", DECODER | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic is not"),
    ("Granite", DECODER | {"attention_multiplier": -0.5}, "its attention multiplies scores by -0.5"),
    ("RemBert", SIZES | {"input_embedding_size": 24}, "rembert cannot be run"),
    ("RoFormer", SIZES, "RoFormerModel: its attention does not pass"),
    ("UMT5Encoder", {"vocab_size": VOCABULARY, "d_model": 48, "num_heads": 4, "d_kv": 12, "d_ff": 96}, "umt5 cannot be run"),
    ("XLNet", {"vocab_size": VOCABULARY, "d_model": 48, "n_head": 4, "d_inner": 96, "n_layer": 2}, "xlnet cannot be run"),
]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, read_card(folder, "m", pooling="mean"), device=torch.device("cpu"), dtype=torch.float32)
    return str(caught.value)


@pytest.mark.parametrize(("name", "config", "says"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_an_architecture_that_cannot_be_ragged_is_refused(name: str, config: Config, says: str, tmp_path: Path) -> None:
    kind = getattr(transformers, f"{name.removesuffix('Encoder')}Config")
    getattr(transformers, f"{name}Model")(kind(**config)).save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    assert says in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "table"),
    [("MobileBert", MOBILE | {"trigram_input": True}, "_FIXED"), ("Esm", SIZES | {"mask_token_id": 4}, "_UNPACKABLE"),
     ("Data2VecText", ROBERTA, "_AFTER_PADDING")],
)  # fmt: skip
def test_the_comparison_finds_what_no_table_knows(
    name: str, config: Config, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are rejected that use neighbors outside a text, another text's mask, or other positions."""
    write_model(tmp_path, name, config)
    monkeypatch.setattr(fallback, table, type(getattr(fallback, table))())
    says = refusal(tmp_path)
    assert says.startswith(f"config.json: architectures: {name}Model: cannot be run on ragged rows: the hidden states")


def test_frequencies_that_depend_on_the_batch(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["phi3"])
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 20}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_scaling={"type": "longrope", **factors})
    assert "rope_scaling: longrope is not supported" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"nobody_knows": 1}, "nobody_knows: this key (value 1) is not known"),
     ({"hidden_size": None}, "hidden_size: is missing"),
     ({"model_type": ["albert"]}, "model_type: must be str"),
     ({"model_type": None}, "model_type: is missing"),
     ({"architectures": [["AlbertModel"]]}, "architectures: ['AlbertModel'] is not supported"),
     ({"vocab_size": 500}, "has another shape than the config says"),
     ({"inner_group_num": "many"}, "model_type: transformers refuses this config"),
     ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
     ({"pad_token_id": -1}, "pad_token_id: -1 is outside"),
     ({"quantization_config": {"bits": 4}}, "quantization_config"),
     ({"is_decoder": True}, "is_decoder"),
     ({"attention_chunk_size": 4}, "attention_chunk_size"),
     ({"architectures": ["ErnieModel"]}, "model_type: ErnieModel goes with model_type 'ernie'"),
     ({"architectures": ["DebertaForSequenceClassification"]}, "architectures: DebertaForSequenceClassification has a head of its own"),
     ({"architectures": ["AlbertModel", "AlbertForMaskedLM"]}, "architectures: must name one architecture"),
     ({"architectures": ["NoSuchModel"]}, "architectures: 'NoSuchModel' is not supported"),
     ({"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "x.Y"}}, "auto_map: this checkpoint needs code of its own")],
)  # fmt: skip
@pytest.mark.sample(6)
def test_a_config_that_is_not_understood_is_refused(changes: Config, says: str, tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["albert"])
    edit_json(tmp_path / "config.json", **changes)
    assert says in refusal(tmp_path)


def test_code_of_its_own_is_not_run_where_transformers_has_the_class(tmp_path: Path) -> None:
    model = write_model(tmp_path, *CASES["olmo2"])
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "code.Olmo2Model", "AutoConfig": "code.Config"})
    (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    assert_close(hidden_states(tmp_path, random_ids()), reference_states(model, random_ids()))


def test_a_family_of_our_own_does_not_fall_back(tmp_path: Path) -> None:
    write_model(tmp_path, "Bert", SIZES)
    edit_json(tmp_path / "config.json", hidden_act="quick_gelu")
    assert "hidden_act: 'quick_gelu' is not supported" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", hidden_act="gelu", architectures=["BertForNextSentencePrediction"])
    assert read_card(tmp_path, "m", pooling="mean").encoder.family == "bert"


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["albert"])
    whole = load_file(tmp_path / "model.safetensors")
    whole["embeddings.LayerNorm.weight"][3] = torch.nan
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert refusal(tmp_path) == "model.safetensors: embeddings.LayerNorm.weight: holds NaN or infinity."


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, *CASES["albert"])
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    save_file({key: value for key, value in whole.items() if key != name}, file, metadata={"format": "pt"})
    assert refusal(tmp_path) == f"model.safetensors: {name}: this tensor is missing."
    save_file(whole | {"encoder.more": torch.zeros(2)}, file, metadata={"format": "pt"})
    assert refusal(tmp_path).startswith("model.safetensors: encoder.more: this tensor is not known")
    file.unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path).startswith("pytorch_model.bin: only pickled weights")
    save_file(whole, file, metadata={"format": "pt"})
    write_json(tmp_path / "adapter_config.json", {})
    assert refusal(tmp_path).startswith("adapter_config.json: ")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, *CASES["albert"])
    monkeypatch.setattr(fallback, "find_spec", lambda _: None)
    assert "architectures: ['AlbertModel'] is not among" in (says := refusal(tmp_path))
    assert "pip install 'whimbrel[hf]'" in says


# From texts to vectors


ALBERT_S_OWN = {
    "down_scale_factor": 1,
    "gap_size": 0,
    "net_structure_type": 0,
    "num_memory_blocks": 0,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("family", "pooling", "config", "models"),
    [("albert", "mean", ALBERT_S_OWN, ["sentence-transformers/paraphrase-albert-small-v2"]), ("olmo2", "lasttoken", {}, [])],
    ids=["albert", "olmo2"],
)  # fmt: skip
def test_vectors_are_those_of_sentence_transformers(
    family: str, pooling: str, config: Config, models: list[str], parity: Parity, tmp_path: Path
) -> None:
    """Run through an engine with lanes, and with the tokenizer of the architecture's class."""
    tokenizer_files.write(tmp_path, family)
    name = tokenizer_files.FAMILIES[family][0]
    write_model(tmp_path / "model", name, CASES[family][1] | {"vocab_size": 2000})
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "model" / "config.json").rename(tmp_path / "config.json")
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model").rmdir()
    edit_json(tmp_path / "config.json", **config)
    sentence_layout(tmp_path, modes=(pooling,), heads=(), max_seq_length=50)
    texts = ["", "a", "The whimbrel flies.", "Vögel " * 7, "far far away in a year " * 20, "``1, 2''; 3!"]
    texts = texts[family == "olmo2" :]  # which has no token for an empty text
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    with Engine(str(tmp_path), dtype="float32") as engine:
        vectors = engine.embed(texts)
        alone = np.stack([engine.embed(text) for text in texts])
        others = list[bool]()
        threads = [
            threading.Thread(target=lambda: others.append(np.array_equal(engine.embed(texts), vectors))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    parity(vectors, expected, *models, family="fallback", tasks=["dense"])
    assert np.array_equal(vectors, alone)
    assert others == [True] * 4
