"""Models that many ask for and `whimbrel show` refuses: each by the reason that docs/reference/support.md gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints.encoders import write_bert, write_roberta
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import sentence_layout
from whimbrel.cli.main import app

PAGE = Path(__file__).parents[2] / "docs/reference/support.md"
OWN_CODE = "this checkpoint needs code of its own; custom code is not run"


def code(module: str, name: str) -> dict[str, Any]:
    return {"auto_map": {"AutoConfig": f"{module}.Config", "AutoModel": f"{module}.{name}"}}


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "openai/clip-vit-base-patch32": ({"architectures": ["CLIPModel"], "model_type": "clip"}, "clip is not supported: it embeds images"),
    "google/siglip-base-patch16-224": ({"architectures": ["SiglipModel"], "model_type": "siglip"}, "siglip is not supported: it embeds"),
    "facebook/bart-large-mnli": (
        {"architectures": ["BartForSequenceClassification"], "model_type": "bart"}, "bart is not supported: it is an encoder with a decoder"
    ),
    "facebook/esm2_t33_650M_UR50D": ({"architectures": ["EsmForMaskedLM"], "model_type": "esm"}, "it looks at the mask tokens of all texts"),
    "facebook/dpr-question_encoder-single-nq-base": (
        {"architectures": ["DPRQuestionEncoder"], "model_type": "dpr"}, "dpr is not supported: its encoders of questions"
    ),
    "Qwen/Qwen3-VL-Embedding-2B": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}, "'Qwen3VLForConditionalGeneration' is not supported"
    ),
    "jinaai/jina-embeddings-v4": (
        {"architectures": ["JinaEmbeddingsV4Model"], "model_type": "qwen2_5_vl"} | code("modeling_jina_embeddings_v4", "JinaEmbeddingsV4Model"),
        OWN_CODE,
    ),
    "jinaai/jina-reranker-m0": (
        {"architectures": ["JinaVLForRanking"], "model_type": "qwen2_vl"} | code("modeling", "JinaVLForRanking"), OWN_CODE
    ),
    "nvidia/NV-Embed-v2": (
        {"architectures": ["NVEmbedModel"], "model_type": "nvembed"} | code("modeling_nvembed", "NVEmbedModel"), OWN_CODE
    ),
    "BAAI/bge-reranker-v2-minicpm-layerwise": (
        {"architectures": ["LayerWiseMiniCPMForCausalLM"], "model_type": "minicpm"}
        | code("modeling_minicpm_reranker", "LayerWiseMiniCPMForCausalLM"),
        OWN_CODE,
    ),
}  # fmt: skip


def refusal(name: str, folder: Path) -> str:
    """Return the error of `show`, with the name by which the page calls the model."""
    assert name in PAGE.read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["show", str(folder)])
    assert result.exit_code == 1
    return str(result.exception)


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(name: str, tmp_path: Path) -> None:
    """config.json is enough to refuse it, before it is asked how tokens are pooled."""
    config, says = CONFIGS[name]
    write_json(tmp_path / "config.json", {"vocab_size": 9, "hidden_size": 8, **config})
    (tmp_path / "model.safetensors").touch()
    found = refusal(name, tmp_path)
    assert says in found
    assert found.startswith("config.json: ")


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("finiteautomata/bertweet-base-sentiment-analysis", "BertweetTokenizer"),
        ("sonoisa/sentence-bert-base-ja-mean-tokens-v2", "BertJapaneseTokenizer"),
    ],
)
def test_tokenizers(name: str, tokenizer: str, tmp_path: Path) -> None:
    """A tokenizer that only code in Python reads is refused by its class."""
    (write_roberta if tokenizer == "BertweetTokenizer" else write_bert)(tmp_path)
    sentence_layout(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a 1\nb 2\n")
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=tokenizer)
    assert f"tokenizer_class: '{tokenizer}' is not supported" in refusal(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("facebook/fasttext-language-identification", "model.bin", "model.bin: is a model of fastText"),
        ("flair/ner-english", "pytorch_model.bin", "pytorch_model.bin: only pickled weights are here"),
    ],
)
def test_files_of_other_libraries(name: str, file: str, says: str, tmp_path: Path) -> None:
    """A folder without config.json is told by the file that it has."""
    (tmp_path / file).write_bytes(b"\x00")
    assert refusal(name, tmp_path).startswith(says)


def test_a_module_for_images(tmp_path: Path) -> None:
    """A module of Sentence Transformers that reads images is refused by its class."""
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    write_json(tmp_path / "modules.json", [module])
    write_json(tmp_path / "0_CLIPModel/config.json", {"architectures": ["CLIPModel"], "model_type": "clip"})
    assert "CLIPModel' is not supported" in refusal("sentence-transformers/clip-ViT-B-32", tmp_path)
