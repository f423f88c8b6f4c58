"""GritLM: both layouts in which it is found, against the formula of its own code: every token sees every other, the tokens of the
instruction are left out of the mean, and the mean is normalised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import MistralConfig, MistralForCausalLM, MistralModel, PreTrainedTokenizerFast

from checkpoints.encoders import CORPUS
from checkpoints.files import edit_json
from checkpoints.sentence_layout import sentence_layout
from encoding import encode_request
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.tokenizer.text_rules import InstructionFinder
from whimbrel.types.request import Request

TASK = "<|user|>\nGiven a scientific paper title, retrieve the paper's abstract\n<|embed|>\n"
TITLES = [
    "Bitcoin: A Peer-to-Peer Electronic Cash System",
    "Generative Representational Instruction Tuning",
    "Attention Is All You Need",
]
TEXTS = [f"{TASK}{title} ({i})" for i, title in enumerate(TITLES * 2)]
CODE = {
    name: f"modeling_gritlm7b.Mistral{end}" for name, end in (("AutoModel", "Model"), ("AutoModelForCausalLM", "ForCausalLM"))
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Pieces as Llama's: "▁<" begins a word, a new line is a byte."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *every_byte], show_progress=False)
    texts = [*CORPUS, *TITLES, *TEXTS, "user embed", "<", "|", ">"] * 2
    made.train_from_iterator([text.replace("\n", " ").replace(" ", "\u2581") for text in texts], trainer)
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<s>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of GritLM/GritLM-7B on the hub, except for sizes."""
    folder = tmp_path_factory.mktemp("gritlm")
    words = tokenizer()
    config = MistralConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, sliding_window=16, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    edit_json(folder / "config.json", auto_map=CODE)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return shutil.copytree(saved, tmp_path / "model")


def encode(folder: Path, texts: list[str], instruction: str = "") -> np.ndarray:
    """GritLM.encode, one text at a time."""
    config = MistralConfig.from_pretrained(folder)
    config.sliding_window = None
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    weights = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    model = MistralModel._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights, strict=False)
    rows = list[torch.Tensor]()
    for text in texts:
        ids = torch.tensor([words(instruction + text)["input_ids"]])
        everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        with torch.inference_mode():
            hidden = model(ids, attention_mask=everything).last_hidden_state[0]
        left_out = len(words(instruction)["input_ids"]) if instruction else 0
        rows.append(torch.nn.functional.normalize(hidden[left_out:].float().mean(0), dim=-1))
    return torch.stack(rows).numpy()


def assert_parity(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_instruction_is_found_in_the_text(parity: Parity, saved: Path) -> None:
    titles = [text.removeprefix(TASK) for text in TEXTS]
    expected = encode(saved, titles, TASK)
    with Engine(str(saved), dtype="float32") as engine:
        found = engine.embed(TEXTS)
        parity(found, expected, "GritLM/GritLM-7B", family="llama", tasks=["dense"])
        assert np.array_equal(found, [engine.embed(text) for text in TEXTS])  # ragged equals alone
        assert np.array_equal(found, engine.embed(titles, prompt=TASK))
        ids = [
            np.array(row.ids, np.int64) for row in encode_request(engine.preprocessor._encoder.tokenizers[0], Request(TEXTS))
        ]
        assert np.array_equal(found, engine.run(Request(ids, ("dense",))).dense)


@pytest.mark.parametrize("text", ["", TASK])
def test_a_text_that_is_nothing_but_its_instruction_is_refused(text: str, saved: Path) -> None:
    """The mean of no tokens is no vector, and that of the instruction would be another text's."""
    with Engine(str(saved), dtype="float32") as engine, pytest.raises(InvalidRequest, match=r"input\[1\]: .*no tokens but"):
        engine.embed(["bird", text], prompt=None if text else TASK)


@pytest.mark.parametrize("mark", ["<|embed|>\n", "<|user|>\n\n<|embed|>\n"])
def test_documents_have_a_mark_alone(mark: str, saved: Path) -> None:
    with Engine(str(saved), dtype="float32") as engine:
        assert_parity(engine.embed([mark + title for title in TITLES]), encode(saved, TITLES, mark))


def test_only_a_mark_before_the_text_counts(saved: Path) -> None:
    """The first one, and none without special tokens before it."""
    texts = ["no mark at all", "one <|user|>\n later", "a line\n<|embed|>\nmore"]
    with Engine(str(saved), dtype="float32") as engine:
        assert_parity(engine.embed(texts), encode(saved, texts))
        twice = TASK + "again <|embed|>\n twice\n<|embed|>\n."
        assert_parity(engine.embed([twice]), encode(saved, [twice.removeprefix(TASK)], TASK))
        bare = engine.preprocessor._encoder.tokenizers[0].backend.raw.encode(TASK + "bird", add_special_tokens=False).ids
        (seq,) = encode_request(engine.preprocessor._encoder.tokenizers[0], Request([np.array(bare)]))
        assert seq.prompt_tokens == 0


def test_marks_are_not_found_across_ids(saved: Path) -> None:
    """In the bytes of the ids a mark may seem to begin in the midst of one."""
    words = tokenizer()
    card = read_card(saved, "m")
    assert card.instruction is not None
    finder = InstructionFinder(card.instruction, words._tokenizer, np.array([1], np.int32))
    mark = finder._first
    shifted = np.frombuffer(b"\0" + mark.tobytes() + b"\0\0\0", np.int32)
    assert finder.count(np.concatenate(([1], shifted, [7])).astype(np.int32)) == 0
    assert finder.count(np.concatenate(([1], shifted, mark, [7])).astype(np.int32)) == 1 + shifted.size + mark.size


@pytest.mark.parametrize("layout", ["vllm", "saved again", "sentence transformers"])
def test_other_layouts(layout: str, parity: Parity, folder: Path) -> None:
    expected = encode(folder, TITLES, TASK)
    models = ["parasail-ai/GritLM-7B-vllm"] if layout == "vllm" else []
    if layout == "vllm":
        edit_json(folder / "config.json", architectures=["GritLM"], auto_map=None)
    elif layout == "saved again":  # by transformers, as a model whose code is on the hub
        code = {part: f"GritLM/GritLM-7B--{name}" for part, name in CODE.items()}
        edit_json(folder / "config.json", architectures=["MistralModel"], auto_map=code)
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix("model."): value for name, value in weights.items() if name != "lm_head.weight"}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        sentence_layout(folder, include_prompt=False, max_seq_length=512)
    with Engine(str(folder), dtype="float32") as engine:
        parity(engine.embed([TASK + title for title in TITLES]), expected, *models, family="llama", tasks=["dense"])


def test_late_chunking_leaves_the_instruction_out_too(saved: Path) -> None:
    """One part is as the text is; a part of an instruction alone has nothing to be pooled."""
    text = "<|user|>\nfind birds\n<|embed|>\nthe whimbrel flies"
    with Engine(str(saved), dtype="float32") as engine:
        whole = engine.embed([text])
        assert np.array_equal(engine.embed([text], late_chunking=True), whole)
        with pytest.raises(InvalidRequest, match=r"input\[0\]: this part"):
            engine.embed(["<|user|>\nfind birds\n<|embed|>\n", "the whimbrel flies"], late_chunking=True)


def test_it_can_be_left_unnormalised(saved: Path) -> None:
    with Engine(str(saved), dtype="float32") as engine:
        raw = engine.embed(TEXTS, normalize=False)
        assert np.allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), engine.embed(TEXTS), atol=1e-6)


def test_mistral_is_no_gritlm(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map=None)
    card = read_card(folder, "m", pooling="mean")
    assert (card.instruction, card.encoder.causal, card.encoder.layers[0].window) == (None, True, 15)
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_other.MistralModel"})
    with pytest.raises(CheckpointError, match=r"^config\.json: auto_map: "):
        read_card(folder, "m", pooling="mean")


def test_its_pooling_is_known(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: pooling: "):
        read_card(folder, "m", pooling="cls")
