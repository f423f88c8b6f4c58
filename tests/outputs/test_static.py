"""Tables of vectors: Sentence Transformers' StaticEmbedding against itself, model2vec against its formula written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from tokenizers import Tokenizer

from checkpoints import tokenizer_files
from checkpoints.files import edit_json, write_json
from checkpoints.sentence_layout import OLD
from checkpoints.static import WIDTH, table, word_tokenizer, write_model2vec, write_static
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.types.request import Request

Floats = NDArray[np.float32]

TEXTS = ["", "a", "The whimbrel flies.", "Vogel 飛 unknown 🙂", "far far away in a year " * 400, "🙂", "1, 2; 3!"]


def assert_parity(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def embed(folder: Path, texts: list[str] = TEXTS, **options: Any) -> Floats:
    """All at once; each alone has the same bits."""
    with Engine(str(folder), dtype="float32") as engine:
        found = engine.embed(texts, **options)
        assert np.array_equal(found, [engine.embed(text, **options) for text in texts])
        return found


# Sentence Transformers


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("heads", [(), (Normalize(),)], ids=["plain", "normalised"])
def test_static_embedding(heads: tuple[Any, ...], old: bool, parity: Parity, tmp_path: Path) -> None:
    """A text without tokens is a vector of zeros there. Sums run in the same order, so that means agree to the bit."""
    write_static(tmp_path, old=old, heads=heads)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    assert not expected[0].any()
    models = ("static-retrieval-mrl-en-v1", "static-similarity-mrl-multilingual-v1") if old and not heads else ()
    names = [f"sentence-transformers/{model}" for model in models]
    parity(embed(tmp_path), expected, *names, family="static", tasks=["dense"])


def test_heads_and_prompts(tmp_path: Path) -> None:
    write_static(tmp_path, heads=(Dense(WIDTH, 24), Normalize()))
    edit_json(tmp_path / "config_sentence_transformers.json", prompts={"query": "query: "})
    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert_parity(embed(tmp_path, prompt="query"), model.encode(TEXTS, prompt_name="query"))


@pytest.mark.parametrize("family", ["xlm-roberta", "qwen3", "llama"])
def test_the_tokenizer_is_used_as_it_is(family: str, tmp_path: Path) -> None:
    """Without special tokens, and whatever class of transformers it may once have had."""
    content, config = tokenizer_files.FAMILIES[family][1]
    write_static(tmp_path, words=Tokenizer.from_str(json.dumps(content)))
    write_json(tmp_path / "tokenizer_config.json", config | {"do_lower_case": True})
    assert_parity(embed(tmp_path), SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS))


def test_truncation_saved_with_the_tokenizer_counts(tmp_path: Path) -> None:
    write_static(tmp_path)
    cut = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    edit_json(tmp_path / "tokenizer.json", truncation=cut)
    assert read_card(tmp_path, "m").max_length == 5
    assert_parity(embed(tmp_path), SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS))


@pytest.mark.bfloat16
def test_vectors_are_float32_whatever_the_dtype(tmp_path: Path) -> None:
    write_static(tmp_path)
    with Engine(str(tmp_path), dtype="bfloat16") as engine:
        assert np.array_equal(engine.embed(TEXTS), embed(tmp_path))


def test_matryoshka_cut_is_that_of_truncate_dim(tmp_path: Path) -> None:
    write_static(tmp_path, heads=(Normalize(),))
    expected = SentenceTransformer(str(tmp_path), device="cpu", truncate_dim=16).encode(TEXTS, normalize_embeddings=True)
    with Engine(str(tmp_path), matryoshka=True) as engine:
        assert_parity(engine.embed(TEXTS, dimensions=16), expected)


# model2vec


def encode(folder: Path, texts: list[str] = TEXTS, max_length: int | None = 512) -> Floats:
    """StaticModel.encode (model2vec 0.10)."""
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.no_padding()
    tensors = {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    model = json.loads(words.to_str())["model"]
    unknown = words.token_to_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")
    median = int(np.median([len(token) for token in words.get_vocab()]))
    if max_length is None:
        words.no_truncation()
    else:
        words.enable_truncation(max_length)
    rows = list[Floats]()
    for text in texts:
        ids = words.encode(text if max_length is None else text[: max_length * median], add_special_tokens=False).ids
        ids = np.array([each for each in ids if each != unknown], np.int64)
        vectors = tensors["embeddings"][tensors["mapping"][ids] if "mapping" in tensors else ids].astype(np.float32)
        if "weights" in tensors:
            vectors = vectors * tensors["weights"][ids][:, None]
        rows.append(vectors.mean(0) if len(ids) else np.zeros(WIDTH, np.float32))
    out = np.stack(rows)
    return out / (np.linalg.norm(out, axis=1, keepdims=True) + 1e-32) if config.get("normalize") else out


def test_model2vec(parity: Parity, tmp_path: Path) -> None:
    """Unknown tokens are dropped, long texts are cut: not as Sentence Transformers does with the same files."""
    write_model2vec(tmp_path, word_tokenizer(), {"embeddings": table(word_tokenizer().get_vocab_size())})
    texts = [*TEXTS, *(" ".join(TEXTS[2].split() * i) + f" {i}" for i in range(60))]  # few would agree to the bit by chance
    models = [f"minishlab/potion-{kind}" for kind in ("base-2M", "base-4M", "base-8M", "base-32M", "retrieval-32M")]
    parity(embed(tmp_path, texts), encode(tmp_path, texts), *models, family="static", tasks=["dense"])
    expected = encode(tmp_path)
    assert not np.allclose(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), expected, atol=1e-2)
    (tmp_path / "modules.json").unlink()  # older ones have none
    assert_parity(embed(tmp_path), expected)


@pytest.mark.parametrize("max_length", [1, 7, 40, None])
def test_limits_in_tokens_and_characters(max_length: int | None, tmp_path: Path) -> None:
    write_model2vec(
        tmp_path,
        word_tokenizer(),
        {"embeddings": table(word_tokenizer().get_vocab_size())},
        max_length=max_length,
        normalize=False,
    )
    texts = [*TEXTS, "whimbrel whimbrel " * 30, "a b c d e f g h i"]
    expected = encode(tmp_path, texts, max_length)
    assert_parity(embed(tmp_path, texts), expected)
    with Engine(str(tmp_path)) as engine:
        sizes = [len(word_tokenizer().encode(text, add_special_tokens=False).ids) for text in texts]
        limit = max_length or 10**9
        median = int(np.median([len(token) for token in word_tokenizer().get_vocab()]))
        cut = [size > limit or len(text) > limit * median for size, text in zip(sizes, texts, strict=True)]
        assert engine.run(Request(texts)).num_truncated == sum(cut)
        if max_length == 7:  # where nothing may be cut, tokens alone count
            assert engine.embed(["whimbrel whimbrel whimbrel"], truncate="never").any()
            with pytest.raises(TooLong, match=r"input\[0\]"):
                engine.embed(["a b c d e f g h"], truncate="never")
            assert np.array_equal(engine.run(Request(texts, max_tokens=1)).dense, encode(tmp_path, texts, 1))


@pytest.mark.parametrize("kind", ["float16", "int8", "weights", "mapping", "both"])
def test_quantised_tables(kind: str, tmp_path: Path) -> None:
    """Fewer bits, or fewer rows than tokens (vocabulary quantisation)."""
    size = word_tokenizer().get_vocab_size()
    tensors = {"embeddings": table(30 if kind in ("mapping", "both") else size)}
    if kind == "int8":
        tensors["embeddings"] = (tensors["embeddings"] * 40).to(torch.int8)
    if kind == "float16":
        tensors["embeddings"] = tensors["embeddings"].half()
    if kind in ("mapping", "both"):
        tensors["mapping"] = torch.randint(0, 30, (size,), generator=torch.Generator().manual_seed(1))
    if kind in ("weights", "both"):
        tensors["weights"] = torch.rand(size, generator=torch.Generator().manual_seed(2))
    write_model2vec(tmp_path, word_tokenizer(), tensors, embedding_dtype="x", vocabulary_quantization=30)
    assert_parity(embed(tmp_path), encode(tmp_path))


@pytest.mark.parametrize("family", ["xlm-roberta", "qwen3"])
def test_vocabularies_of_other_kinds(family: str, tmp_path: Path) -> None:
    """Unigram, whose unknown token is a number, and byte pairs, which know everything."""
    other = Tokenizer.from_str(json.dumps(tokenizer_files.FAMILIES[family][1][0]))
    write_model2vec(tmp_path, other, {"embeddings": table(other.get_vocab_size())}, normalize=False)
    assert_parity(embed(tmp_path), encode(tmp_path))


def test_ids_give_what_their_text_gives(tmp_path: Path) -> None:
    write_model2vec(tmp_path, word_tokenizer(), {"embeddings": table(word_tokenizer().get_vocab_size())})
    texts = [TEXTS[2], TEXTS[3], TEXTS[0]]
    rows = [np.array(word_tokenizer().encode(text, add_special_tokens=False).ids, np.int64) for text in texts]
    with Engine(str(tmp_path)) as engine:
        assert np.array_equal(engine.run(Request(rows)).dense, engine.embed(texts))
        with pytest.raises(InvalidRequest, match=r"input\[0\]\[0\].* out of vocabulary"):
            engine.run(Request([np.array([word_tokenizer().get_vocab_size()])]))


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("config.json", "rotary", {"config": {"rotary": 1}}),
    ("config.json", "max_length", {"config": {"max_length": 0}}),
    ("config.json", "normalize", {"config": {"normalize": "yes"}}),
    ("model.safetensors", "embedding.weight", {"tensors": {"x": torch.zeros(3)}}),
    ("model.safetensors", "embeddings", {"tensors": {"embeddings": torch.zeros(3)}}),
    ("model.safetensors", "mapping", {"tensors": {"embeddings": torch.zeros(3, 4), "mapping": torch.full((900,), 3)}}),
    ("model.safetensors", "weights", {"tensors": {"embeddings": torch.zeros(900, 4), "weights": torch.ones(3)}}),
    ("model.safetensors", "scales", {"tensors": {"embeddings": torch.zeros(900, 4), "scales": torch.ones(3)}}),
    ("tokenizer.json", "", {"tensors": {"embeddings": torch.zeros(3, 4)}}),
    ("modules.json", "", {"modules": ["StaticEmbedding", "Pooling"]}),
    ("modules.json", "", {"modules": ["Normalize", "StaticEmbedding"]}),
]


@pytest.mark.parametrize(("file", "key", "change"), REFUSED, ids=[f"{row[0]} {row[1]}" for row in REFUSED])
def test_what_is_not_supported_is_refused(file: str, key: str, change: dict[str, Any], tmp_path: Path) -> None:
    tensors = change.get("tensors", {"embeddings": table(word_tokenizer().get_vocab_size())})
    write_model2vec(tmp_path, word_tokenizer(), tensors, **change.get("config", {}))
    if "modules" in change:
        rows = [{"idx": i, "name": str(i), "path": ".", "type": OLD + kind} for i, kind in enumerate(change["modules"])]
        write_json(tmp_path / "modules.json", rows)
    with pytest.raises(CheckpointError) as caught:
        Engine(str(tmp_path))
    assert (caught.value.file, caught.value.key or "") == (file, key)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_static(tmp_path)
    for content in (b"", b"123", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"^model\.safetensors: cannot be read"):
            read_card(tmp_path, "m")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: not found"):
        read_card(tmp_path, "m")
