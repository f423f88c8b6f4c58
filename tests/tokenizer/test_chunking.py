"""Late chunking, and texts that are too long, against the formulas written out over hidden states of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from checkpoints import tokenizer_files
from checkpoints.encoders import write_bert, write_roberta, write_xlmr
from checkpoints.sentence_layout import sentence_layout
from checkpoints.static import table, word_tokenizer, write_model2vec
from whimbrel import AsyncEngine, Engine
from whimbrel.errors import ComputeError, InvalidRequest, TooLarge, TooLong
from whimbrel.outputs.finishers import locate_error
from whimbrel.outputs.merge import ChunkMerge
from whimbrel.tokenizer.chunking import spans, split
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs

Floats = NDArray[np.float32]

PARTS = ["The whimbrel is far. ", "It flies", " ten km,", " far away", "!", " Ein Vogel 🙂."]
LONG = "far far away in a year the whimbrel flies " * 9
TEXTS = ["a bird", LONG, "", LONG[:300], "Vogel " * 38]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Models of a family and a pooling, each saved once."""

    @cache
    def find(family: str, mode: str = "mean", *, include_prompt: bool = True, dense: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(family)
        {"bert": write_bert, "roberta": write_roberta, "xlm-roberta": write_xlmr}[family](folder)
        sentence_layout(
            folder,
            modes=(mode,),
            include_prompt=include_prompt,
            heads=HEADS if dense else ("Normalize",),
            max_seq_length=64,
            prompts={"query": "birds: "},
        )
        return folder

    return find


HEADS = (("Dense", 20, "torch.nn.modules.activation.Tanh", {}), "Normalize")


def hidden(folder: Path, ids: list[int]) -> Floats:
    """Hidden states of one text."""
    model = _model(folder)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


@cache
def _model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder).eval()


def finish(folder: Path, pooled: Floats) -> Floats:
    """The heads of HEADS, if they are there, and the norm."""
    if (folder / "2_Dense").exists():
        weights = load_file(folder / "2_Dense/model.safetensors")
        pooled = np.tanh(pooled @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy())
    return pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)


def assert_parity(found: Floats, expected: Any) -> None:
    assert found.shape == np.shape(expected)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


# Late chunking


def late(folder: Path, parts: list[str], prompt: str = "") -> Floats:
    """jina-ai/late-chunking: token vectors of the whole document, and the mean over those of each part."""
    words = AutoTokenizer.from_pretrained(folder)
    encoding = words(prompt + "".join(parts), return_offsets_mapping=True, return_special_tokens_mask=True)
    states = hidden(folder, encoding["input_ids"])
    rows = list[Floats]()
    begin = len(prompt)
    for part in parts:
        end = begin + len(part)
        own = [
            i
            for i, (first, last) in enumerate(encoding["offset_mapping"])
            if not encoding["special_tokens_mask"][i] and begin < last <= end
        ]
        rows.append(states[own].mean(0))
        begin = end
    return finish(folder, np.stack(rows))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_late_chunking(family: str, saved: Callable[..., Path]) -> None:
    folder = saved(family, dense=True)
    expected = late(folder, PARTS)
    with Engine(str(folder), dtype="float32") as engine:
        found = engine.embed(PARTS, late_chunking=True)
        assert_parity(found, expected)
        assert not np.allclose(found, engine.embed(PARTS), atol=1e-2)
        assert_parity(engine.embed(PARTS, late_chunking=True, prompt="query"), late(folder, PARTS, "birds: "))
        request = Request(PARTS, ("dense",), late_chunking=True)
        mixed = [engine.submit(Request([text])) for text in PARTS] + [engine.submit(request) for _ in range(3)]
        for future in mixed[-3:]:  # in a batch with other texts, the same bits
            assert np.array_equal(future.result().dense, found)
        result = engine.run(request)
        assert result.num_tokens == len(AutoTokenizer.from_pretrained(folder)("".join(PARTS))["input_ids"])
        raw = engine.embed(PARTS, late_chunking=True, normalize=False)
        assert np.allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), found, atol=1e-6)
        assert engine.run(Request([], late_chunking=True)).dense.shape == (0, 20)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("size", [1, 3, 64, 2**62])
def test_chunks_of_so_many_tokens(family: str, size: int, saved: Callable[..., Path]) -> None:
    """vLLM's late chunking: the mean of each `size` rows of a text, special tokens and prompt too, then the heads."""
    folder = saved(family, dense=True)
    words = AutoTokenizer.from_pretrained(folder)
    texts = ["The whimbrel is far. It flies ten km,", "", "a bird", "Ein Vogel 🙂."]
    with Engine(str(folder), dtype="float32") as engine:
        for prompt in ("", "birds: "):
            expected = list[Floats]()
            for text in texts:
                states = torch.from_numpy(hidden(folder, words(prompt + text)["input_ids"]))
                expected.append(finish(folder, torch.stack([rows.mean(0) for rows in states.split(min(size, 99))]).numpy()))
            result = engine.run(Request(texts, ("dense",), chunk_tokens=size, prompt=prompt or None))
            assert_parity(result.dense, np.concatenate(expected))
            assert result.token_offsets is not None
            assert [len(each.chars_T2) for each in result.token_offsets] == [
                len(words(prompt + text)["input_ids"]) for text in texts
            ]
        with pytest.raises(TooLong):
            engine.run(Request([LONG], ("dense",), chunk_tokens=size))


def test_what_chunks_of_tokens_cannot_do_is_refused(saved: Callable[..., Path]) -> None:
    with Engine(str(saved("bert")), dtype="float32") as engine:
        for more in ("late_chunking", "split_long"):
            with pytest.raises(InvalidRequest, match="cannot go with"):
                engine.run(Request(["a"], ("dense",), chunk_tokens=2, **{more: True}))
        with pytest.raises(InvalidRequest, match="token ids have no characters"):
            engine.run(Request([np.array([5])], ("dense",), chunk_tokens=2))
        with pytest.raises(InvalidRequest, match="dense vectors alone"):
            engine.run(Request(["a"], ("hidden",), chunk_tokens=2))
        with pytest.raises(InvalidRequest, match="is not cut"):
            engine.run(Request(["a"], chunk_tokens=2, truncate="left"))
        for wrong in (0, -1, 2.5, "8", True):
            with pytest.raises(InvalidRequest, match="chunk_tokens"):
                engine.run(Request(["a"], chunk_tokens=wrong))  # pyright: ignore[reportArgumentType]
    with Engine(str(saved("bert", "cls"))) as engine, pytest.raises(InvalidRequest, match="pool by the mean; this one by cls"):
        engine.run(Request(["a"], chunk_tokens=2))


def test_a_switch_of_the_engine_splits_what_no_request_asks_to_cut(saved: Callable[..., Path]) -> None:
    folder = saved("bert")
    with Engine(str(folder), dtype="float32") as usual, Engine(str(folder), dtype="float32", split_long=True) as engine:
        expected = usual.embed(TEXTS, split_long=True)
        assert np.array_equal(engine.embed(TEXTS), expected)
        assert np.array_equal(engine.embed(TEXTS, truncate="never"), expected)
        assert engine.run(Request(TEXTS)).num_truncated == 0
        for cut in ({"truncate": "left"}, {"truncate": "right"}, {"max_tokens": 9}):
            assert np.array_equal(engine.run(Request(TEXTS, **cut)).dense, usual.run(Request(TEXTS, **cut)).dense)
        late = Request(PARTS, late_chunking=True)
        assert np.array_equal(engine.run(late).dense, usual.run(late).dense)
        for outputs in (("hidden",), ("dense", "hidden")):
            assert engine.run(Request(TEXTS, outputs)).num_truncated == usual.run(Request(TEXTS, outputs)).num_truncated > 0
        scores = engine.score("a bird", TEXTS[:3])
        assert np.array_equal(scores, usual.score("a bird", TEXTS[:3])), "pairs are cut as before"


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_texts_without_special_tokens(family: str, saved: Callable[..., Path]) -> None:
    folder = saved(family, include_prompt=False)
    words = AutoTokenizer.from_pretrained(folder)
    texts = ["The whimbrel is far.", "a bird", LONG]
    with Engine(str(folder), dtype="float32") as engine:
        rows = [words(text, add_special_tokens=False, truncation=True, max_length=64)["input_ids"] for text in texts]
        bare = engine.run(Request(texts, ("dense",), add_special_tokens=False))
        assert bare.num_tokens == sum(map(len, rows))
        assert_parity(bare.dense, np.stack([finish(folder, hidden(folder, ids).mean(0)) for ids in rows]))
        prompted = engine.run(Request(texts[:2], ("dense",), add_special_tokens=False, prompt="birds: "))
        expected = list[Floats]()
        for text in texts[:2]:
            ids, prompt = (words(each, add_special_tokens=False)["input_ids"] for each in ("birds: " + text, "birds: "))
            expected.append(finish(folder, hidden(folder, ids)[len(prompt) :].mean(0)))
        assert_parity(prompted.dense, np.stack(expected))
        for more in ({"late_chunking": True}, {"split_long": True}, {"chunk_tokens": 2}):
            with pytest.raises(InvalidRequest, match="add_special_tokens: cannot go with"):
                engine.run(Request(texts[:1], add_special_tokens=False, **more))
        ids = np.array([5, 7])
        assert np.array_equal(engine.run(Request([ids], add_special_tokens=False)).dense, engine.run(Request([ids])).dense)
        with pytest.raises(InvalidRequest, match="has no tokens"):
            engine.run(Request(["a", ""], add_special_tokens=False))


def test_late_chunking_of_one_text_leaves_out_its_special_tokens(saved: Callable[..., Path]) -> None:
    folder = saved("bert")
    with Engine(str(folder), dtype="float32") as engine:
        assert_parity(engine.embed(["The whimbrel flies."], late_chunking=True), late(folder, ["The whimbrel flies."]))


def test_a_token_belongs_to_the_part_in_which_it_ends() -> None:
    """Tokens with a space before them, tokens across parts, and several for one character."""
    ends = np.array([2, 8, 12, 12, 20])
    offsets = np.array([(0, 1), (1, 2), (2, 5), (5, 8), (7, 10), (10, 13), (13, 14), (13, 14), (14, 20)])
    assert spans(ends, offsets).tolist() == [[2, 4], [4, 5], [5, 5], [5, 9]]
    assert spans(np.array([0, 3]), np.empty((0, 2), np.int64)).tolist() == [[0, 0]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "modernbert", "mpnet"])
def test_offsets_of_every_kind_of_tokenizer(family: str, tmp_path: Path) -> None:
    """Each part has the tokens that it has in the document; together they have all."""
    content, _ = tokenizer_files.FAMILIES[family][1]
    words = Tokenizer.from_str(json.dumps(content))
    encoding = words.encode("".join(PARTS), add_special_tokens=False)
    found = spans(np.cumsum([0, *map(len, PARTS)]), np.array(encoding.offsets))
    assert found[0, 0] == 0
    assert found[-1, 1] == len(encoding.ids)
    assert (found[1:, 0] == found[:-1, 1]).all()
    text = "".join(PARTS)
    for (first, last), part in zip(found.tolist(), PARTS, strict=True):
        own = text[encoding.offsets[first][0] : encoding.offsets[last - 1][1]]
        assert own.strip() == part.strip()


def test_what_late_chunking_cannot_do_is_refused(saved: Callable[..., Path]) -> None:
    with Engine(str(saved("bert")), dtype="float32") as engine:
        with pytest.raises(TooLong, match=r"input: the texts have .* tokens together; the limit is 64"):
            engine.embed([LONG, "more"], late_chunking=True, truncate="right")
        with pytest.raises(InvalidRequest, match=r"input\[1\]: .*no tokens"):
            engine.embed(["a bird", "", "flies"], late_chunking=True)
        with pytest.raises(InvalidRequest, match=r"input\[1\]: .*no tokens"):
            engine.embed(["a bird", " ", "flies"], late_chunking=True)
        with pytest.raises(InvalidRequest, match="late_chunking: cannot go with split_long"):
            engine.embed(["a"], late_chunking=True, split_long=True)
        with pytest.raises(InvalidRequest, match=r"input\[0\]: must be a string"):
            engine.run(Request([np.array([5])], late_chunking=True))
        with pytest.raises(InvalidRequest, match="surrogate"):
            engine.embed(["a", "\ud800"], late_chunking=True)
        with pytest.raises(TooLarge):
            engine.embed(["a" * 2**20, "a"], late_chunking=True)
    with Engine(str(saved("bert", "cls"))) as engine, pytest.raises(InvalidRequest, match="pool by the mean; this one by cls"):
        engine.embed(["a"], late_chunking=True)


# Long texts


def around(words: Any, ids: list[int]) -> list[int]:
    """With the special tokens of one text."""
    first, last = words("")["input_ids"]
    return [first, *ids, last]


def long(folder: Path, text: str, limit: int, *, mode: str = "mean", prompt: str = "", left_out: int = 0) -> Floats:
    """Each part with special tokens and prompt; the mean of the vectors, weighted by their own tokens; normalised."""
    words = AutoTokenizer.from_pretrained(folder)
    begin = words(prompt, add_special_tokens=False)["input_ids"]
    own = words(prompt + text, add_special_tokens=False)["input_ids"][len(begin) :]
    room = limit - 2 - len(begin)
    pieces = [own[i : i + room] for i in range(0, len(own), room)] or [[]]
    rows = list[Floats]()
    for piece in pieces:
        states = hidden(folder, around(words, [*begin, *piece]))[left_out:]
        rows.append(finish(folder, {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[mode]))
    total = np.average(rows, axis=0, weights=[max(1, len(piece)) for piece in pieces])
    return total / np.linalg.norm(total)


@pytest.mark.parametrize(("family", "mode"), [("bert", "mean"), ("roberta", "cls"), ("xlm-roberta", "lasttoken")])
def test_long_texts(family: str, mode: str, saved: Callable[..., Path]) -> None:
    folder = saved(family, mode, dense=True)
    expected = np.stack([long(folder, text, 64, mode=mode) for text in TEXTS])
    with Engine(str(folder), dtype="float32") as engine:
        found = engine.embed(TEXTS, split_long=True)
        assert_parity(found, expected)
        assert np.array_equal(found, [engine.embed(text, split_long=True) for text in TEXTS])  # ragged equals alone
        short = [0, 2]
        assert np.array_equal(found[short], engine.embed([TEXTS[i] for i in short]))  # short texts are as they were
        result = engine.run(Request(TEXTS, ("dense",), split_long=True))
        assert result.num_truncated == 0
        assert result.num_tokens > 3 * 64
        ids = [np.array(AutoTokenizer.from_pretrained(folder)(text)["input_ids"]) for text in TEXTS]
        assert np.array_equal(engine.run(Request(ids, ("dense",), split_long=True)).dense, found)
        assert engine.run(Request([], split_long=True)).dense.shape == (0, 20)


def test_the_mean_is_normalised_where_vectors_are(saved: Callable[..., Path]) -> None:
    folder = saved("bert")
    with Engine(str(folder), dtype="float32") as engine:
        raw = engine.embed(LONG, split_long=True, normalize=False)
        words = AutoTokenizer.from_pretrained(folder)
        own = words(LONG, add_special_tokens=False)["input_ids"]
        pieces = [own[i : i + 62] for i in range(0, len(own), 62)]
        rows = [hidden(folder, around(words, piece)).mean(0) for piece in pieces]
        assert_parity(raw, np.average(rows, axis=0, weights=list(map(len, pieces))))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_part_has_the_prompt(include_prompt: bool, saved: Callable[..., Path]) -> None:
    folder = saved("bert", include_prompt=include_prompt)
    words = AutoTokenizer.from_pretrained(folder)
    left_out = 0 if include_prompt else len(words("birds: ")["input_ids"]) - 1
    with Engine(str(folder), dtype="float32") as engine:
        found = engine.embed([LONG, "a bird"], split_long=True, prompt="query")
        expected = [long(folder, text, 64, prompt="birds: ", left_out=left_out) for text in (LONG, "a bird")]
        assert_parity(found, np.stack(expected))


def test_a_limit_of_the_request_is_that_of_its_parts(saved: Callable[..., Path]) -> None:
    folder = saved("bert")
    with Engine(str(folder), dtype="float32") as engine:
        found = engine.run(Request([LONG], ("dense",), split_long=True, max_tokens=20)).dense
        assert_parity(found, np.stack([long(folder, LONG, 20)]))
        with pytest.raises(TooLarge, match="parts; the limit is 16,384"):
            engine.run(Request(["a " * 20_000], split_long=True, max_tokens=3))
        with pytest.raises(InvalidRequest, match=r"prompt: .* leaves no room"):
            engine.run(Request([LONG], split_long=True, max_tokens=8, prompt="far far away in a year"))


def test_split_is_for_dense_vectors(saved: Callable[..., Path]) -> None:
    with Engine(str(saved("bert"))) as engine, pytest.raises(InvalidRequest, match="sparse"):
        engine.sparse(["a"], split_long=True)


def test_parts_of_a_text() -> None:
    ids = np.arange(11, dtype=np.int32)
    assert [(part.tolist(), size) for part, size in split(ids, 2, 1, 6)] == [
        ([0, 1, 2, 3, 4, 10], 3),
        ([0, 1, 5, 6, 7, 10], 3),
        ([0, 1, 8, 9, 10], 2),
    ]
    assert [(part.tolist(), size) for part, size in split(ids, 2, 1, 11)] == [(ids.tolist(), 8)]


def test_vectors_that_cancel_out_stay_zero() -> None:
    merge = ChunkMerge(np.array([0, 2, 3]), np.ones(3, np.float32), normalized=True)
    out = merge.apply(Outputs(np.array([[1, 0], [-1, 0], [0.6, 0.8]], np.float32))).dense
    assert out is not None
    assert out.tolist() == [[0.0, 0.0], [np.float32(0.6), np.float32(0.8)]]


def test_an_error_names_the_text_not_the_part() -> None:
    merge = ChunkMerge(np.array([0, 2, 3]), np.ones(3, np.float32), normalized=True)
    moved = locate_error(ComputeError("is broken.", item=2), merge)
    assert (type(moved), moved.param, str(moved)) == (ComputeError, "input[1]", "input[1]: is broken.")
    for error in (ComputeError("is broken."), ComputeError("is broken.", param="model")):
        assert locate_error(error, merge) is error
    assert locate_error(ComputeError("is broken.", param="input"), merge).param == "input"


def test_the_async_engine_does_the_same(saved: Callable[..., Path]) -> None:
    with Engine(str(saved("bert")), dtype="float32") as engine:

        async def main() -> None:
            model = AsyncEngine(engine)
            assert np.array_equal(await model.embed(TEXTS, split_long=True), engine.embed(TEXTS, split_long=True))
            assert np.array_equal(await model.embed(PARTS, late_chunking=True), engine.embed(PARTS, late_chunking=True))

        asyncio.run(main())


def test_a_table_of_vectors_in_parts(tmp_path: Path) -> None:
    """model2vec: unknown tokens are dropped before a text is split, and belong to no part."""
    write_model2vec(
        tmp_path, word_tokenizer(), {"embeddings": table(word_tokenizer().get_vocab_size())}, max_length=20, normalize=False
    )
    with Engine(str(tmp_path)) as engine:
        text = "🙂 " * 30 + LONG
        whole = Engine(str(tmp_path), max_length=10_000)
        assert np.allclose(engine.embed(text, split_long=True), whole.embed(text), atol=1e-5)
        whole.close()
        late = engine.embed(["The 🙂 whimbrel", " flies."], late_chunking=True)
        assert np.allclose(late, engine.embed(["The whimbrel", "flies."]), atol=1e-6)
        with pytest.raises(InvalidRequest, match=r"input\[1\]: .*no tokens"):
            engine.embed(["The", " 🙂"], late_chunking=True)
