"""jina-embeddings-v3's adapters, in the layouts of the hub's own code, of the converted checkpoint and of what PEFT saves.

The reference is transformers' model with an adapter merged into its weights: weight + alpha / rank * B A.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from checkpoints.encoders import xlmr_tokenizer
from checkpoints.files import edit_json, write_json
from checkpoints.jina_v3 import INSTRUCTIONS, LAYOUTS, TASKS, WIDTH, merged, write
from comparisons import assert_close
from hidden_states import hidden_states
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.model.load import load_model
from whimbrel.model.runner import probe
from whimbrel.server.processes.codec import pack_seqs, unpack_seqs
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import Request


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def folder(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jina") / "jina-embeddings-v3"
    write(path, layout)
    return path


@pytest.fixture
def stacked(tmp_path: Path) -> Path:
    write(tmp_path / "m", "stacked")
    return tmp_path / "m"


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    write(tmp_path / "m", "converted")
    return tmp_path / "m"


def rows() -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    return [
        generator.integers(5, len(xlmr_tokenizer()), length).astype(np.int32) for length in (1, 7, 7, 7, 16, 33, 33, 100, 40)
    ]


def states(task: str | None, layout: str, row: NDArray[np.int32]) -> Any:
    with torch.inference_mode():
        return merged(task, layout)(torch.from_numpy(row)[None].long()).last_hidden_state[0].numpy()


def test_hidden_states_of_every_adapter(folder: Path, layout: str) -> None:
    """A batch of all tasks and none equals merged weights, and has the same bits as each text alone."""
    ids = rows()
    for shift in range(len(TASKS) + 1):
        numbers = [(i + shift) % (len(TASKS) + 1) - 1 for i in range(len(ids))]
        together = hidden_states(folder, ids, pooling=None, adapters=numbers)
        tasks = [None if number < 0 else TASKS[number] for number in numbers]
        assert_close(together, [states(task, layout, row) for task, row in zip(tasks, ids, strict=True)])
        for row, number, expected in zip(ids, numbers, together, strict=True):
            assert np.array_equal(
                hidden_states(folder, [row], pooling=None, adapters=[number] if number >= 0 else ())[0], expected
            )


def test_adapters_matter(layout: str) -> None:
    """Guard: the comparison would notice each of these."""
    row = rows()[-1]
    found = [states(task, layout, row) for task in (None, *TASKS)]
    assert all(np.abs(one - other).max() > 0.1 for i, one in enumerate(found) for other in found[:i])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_same(dtype: torch.dtype, folder: Path, layout: str) -> None:
    ids, numbers = rows(), [i % (len(TASKS) + 1) - 1 for i in range(len(rows()))]
    near = 0.9999 if dtype == torch.float32 else 0.99
    for row, number, found in zip(
        ids, numbers, hidden_states(folder, ids, dtype, "cuda", pooling=None, adapters=numbers), strict=True
    ):
        one, other = found.mean(0), states(None if number < 0 else TASKS[number], layout, row).mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > near


@pytest.mark.bfloat16
def test_half_precision_is_near(folder: Path, layout: str) -> None:
    ids, numbers = rows(), [i % (len(TASKS) + 1) - 1 for i in range(len(rows()))]
    for row, number, found in zip(
        ids, numbers, hidden_states(folder, ids, torch.bfloat16, pooling=None, adapters=numbers), strict=True
    ):
        one, other = found.mean(0), states(None if number < 0 else TASKS[number], layout, row).mean(0)
        assert one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) > 0.99


TEXTS = ["The whimbrel is a wader with a long curved bill.", "ein großer Vogel!", "query: how far do birds fly?"]


def expected_vectors(task: str | None, layout: str, instruction: str) -> Any:
    """Return the vectors of `encode`: instruction, tokens, mean, norm."""
    found = [states(task, layout, np.array(xlmr_tokenizer()(instruction + text)["input_ids"])).mean(0) for text in TEXTS]
    return np.stack([vector / np.linalg.norm(vector) for vector in found])


def test_a_prompt_called_after_an_adapter_chooses_it_and_its_instruction(folder: Path, layout: str) -> None:
    """Vectors equal those of encode(task=...) of the code on the Hub, also beside other tasks."""
    with Engine(str(folder), dtype="float32") as engine:
        assert engine.card.encoder.adapters == tuple(TASKS)
        alone = {task: engine.embed(TEXTS, prompt=task) for task in (None, *TASKS)}
        for task, vectors in alone.items():
            instruction = INSTRUCTIONS[task] if task else ""
            np.testing.assert_allclose(vectors, expected_vectors(task, layout, instruction), atol=1e-5)
        futures = [(task, engine.submit(Request(TEXTS, prompt_name=task))) for task in (None, *TASKS) for _ in range(4)]
        assert all(np.array_equal(future.result(30).outputs.dense, alone[task]) for task, future in futures)
        literal = engine.embed(TEXTS, prompt=INSTRUCTIONS["retrieval.query"])
        np.testing.assert_allclose(literal, expected_vectors(None, layout, INSTRUCTIONS["retrieval.query"]), atol=1e-5)
        with pytest.raises(InvalidRequest, match=r"no prompt 'retrieval'.*retrieval\.passage"):
            engine.embed(TEXTS, prompt="retrieval")


def test_the_default_task_is_that_of_texts_without_one(stacked: Path) -> None:
    """The default task selects the adapter without its instruction, as in custom_st.py."""
    write_json(
        stacked / "sentence_bert_config.json", {"max_seq_length": 100, "model_args": {"default_task": "retrieval.query"}}
    )
    edit_json(stacked / "config_sentence_transformers.json", prompts=INSTRUCTIONS | {"other": "other: "})
    with Engine(str(stacked), dtype="float32") as engine:
        for prompt, task, text in [(None, "retrieval.query", ""), ("other", "retrieval.query", "other: "),
                                   ("separation", "separation", "")]:  # fmt: skip
            np.testing.assert_allclose(engine.embed(TEXTS, prompt=prompt), expected_vectors(task, "stacked", text), atol=1e-5)


def test_instructions_are_those_of_config_json(converted: Path) -> None:
    """Instructions come from config.json if Sentence Transformers' file has no prompts; they may be missing too."""
    edit_json(converted / "config_sentence_transformers.json", prompts=None)
    assert read_card(converted, "m").prompts == INSTRUCTIONS
    edit_json(converted / "config.json", task_instructions=None)
    assert read_card(converted, "m").prompts == dict.fromkeys(TASKS, "")


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", {"load_trained_adapters": False}, r"config\.json: load_trained_adapters"),
        ("config.json", {"lora_adaptations": ["a", "a"]}, r"config\.json: lora_adaptations: 'a' .*twice"),
        ("config.json", {"lora_adaptations": ["../a"]}, r"config\.json: lora_adaptations"),
        ("config.json", {"lora_adaptations": TASKS[:4]}, r"config\.json: task_instructions"),
        ("config.json", {"task_instructions": INSTRUCTIONS | {"separation": 1}}, r"config\.json: task_instructions"),
        ("config.json", {"lora_rank": 0}, r"config\.json: lora_rank"),
        ("config.json", {"lora_alpha": 0}, r"config\.json: lora_alpha"),
        ("config.json", {"truncate_dim": 16}, r"config\.json: truncate_dim"),
        ("config.json", {"architectures": ["ColBERTJinaRobertaModel"]}, r"config\.json: lora_adaptations"),
        ("config.json", {"lora_adaptations": [], "load_trained_adapters": False, "task_instructions": {}}, r"modules\.json: type: .*not run"),
        ("config_sentence_transformers.json", {"prompts": {"separation": "x: "}}, r"prompts: 'separation' is 'x: '; config\.json"),
        ("sentence_bert_config.json", {"model_args": {"default_task": "retrieval"}}, r"sentence_bert_config\.json: model_args: default_task"),
        ("sentence_bert_config.json", {"model_args": {"revision": "main"}}, r"sentence_bert_config\.json: model_args: revision"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(file: str, change: dict[str, Any], says: str, stacked: Path) -> None:
    edit_json(stacked / file, **change)
    with pytest.raises(CheckpointError, match=says):
        read_card(stacked, "m")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, "separation/adapter_config.json: r, lora_alpha: differs"),
        ({"use_dora": True}, "separation/adapter_config.json: use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"rank_pattern": {"fc1": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"something": 1}, "something: this key"),
    ],
)
def test_adapters_of_other_kinds_are_refused(change: dict[str, Any], says: str, converted: Path) -> None:
    edit_json(converted / "separation/adapter_config.json", **change)
    with pytest.raises(CheckpointError, match=says):
        read_card(converted, "m")


@pytest.mark.parametrize("key", ["position_embedding_type", "rotary_emb_base", "truncate_dim"])
def test_what_transformers_would_not_do_is_refused(key: str, converted: Path) -> None:
    edit_json(converted / "config.json", **{key: 10_000.0})
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}"):
        read_card(converted, "m")


def test_folders_and_tensors_must_be_complete(converted: Path) -> None:
    file = converted / "separation/adapter_model.safetensors"
    tensors = load_file(file)
    for changed, says in [
        ({"roberta.encoder.layers.0.mlp.fc1.lora_A.weight": None}, "is missing"),
        ({"roberta.encoder.layers.0.mlp.fc1.lora_A.weight": torch.zeros(8, WIDTH)}, "has shape"),
        ({"roberta.encoder.layers.0.mlp.fc3.lora_A.weight": torch.zeros(4, WIDTH)}, "not known"),
    ]:
        save_file({name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}, file)
        with pytest.raises(CheckpointError, match=rf"separation/adapter_model\.safetensors: .*{says}"):
            load_model(converted, read_card(converted, "m"), device=torch.device("cpu"), dtype=torch.float32)
    (converted / "separation/adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"separation/adapter_config\.json"):
        read_card(converted, "m")


def test_a_fine_tuned_checkpoint_names_the_class_of_the_code(stacked: Path) -> None:
    edit_json(stacked / "config.json", architectures=["XLMRobertaLoRA"])
    assert read_card(stacked, "m").encoder.adapters == tuple(TASKS)


def test_requests_take_their_adapter_to_another_process(converted: Path) -> None:
    card = read_card(converted, "m")
    prepared = Preprocessor(converted, card, make_plan(Options(), card, probe())).preprocess(
        Request(TEXTS, prompt_name="separation")
    )
    received = unpack_seqs(pack_seqs(prepared.seqs), len(TEXTS))
    assert [seq.adapter for seq in received] == [TASKS.index("separation")] * len(TEXTS)
