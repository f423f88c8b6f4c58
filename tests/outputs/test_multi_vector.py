"""Late interaction: vectors of tokens, how many, and the order of scores, against Sentence Transformers in every layout.

Of jina-colbert-v2, whose code cannot be run, the formula is written out.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints.files import edit_json, write_json
from checkpoints.late_interaction import JINA_V1, write_jina, write_jina_v1, write_lfm2, write_lfm2_both_ways
from checkpoints.late_references import CASES, DOCUMENTS, FIXED, QUERIES, checkpoints_of, jina_vectors, late_reference
from checkpoints.published.jina import jina_bert
from checkpoints.published.lfm2 import LFM2, lfm2
from comparisons import assert_close_vectors
from parity import Parity
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.banner import _summary
from whimbrel.engine.prepare import Preprocessor
from whimbrel.errors import CheckpointError, InvalidRequest, TooLong
from whimbrel.server.processes.channel import Channel, pair
from whimbrel.server.processes.child_process import CONTROL_FD
from whimbrel.server.processes.codec import encode_request, write_arrays
from whimbrel.server.processes.messages import (
    Attach,
    EngineAnswer,
    FromEngine,
    Load,
    ModelOptions,
    Notice,
    Ready,
    ReportEngine,
    Submit,
)
from whimbrel.telemetry.logs import LogOptions
from whimbrel.types.hardware import Hardware
from whimbrel.types.plan import Options, make_plan
from whimbrel.types.request import InputType, Request

MODELS = {
    "stanford": ("colbert-ir/colbertv2.0", "answerdotai/answerai-colbert-small-v1"),
    "mxbai large": ("mixedbread-ai/mxbai-colbert-large-v1",),
    "pylate": ("lightonai/GTE-ModernColBERT-v1", "lightonai/LateOn", "lightonai/Reason-ModernColBERT"),
    "mxbai edge": ("mixedbread-ai/mxbai-edge-colbert-v0-17m", "mixedbread-ai/mxbai-edge-colbert-v0-32m"),
}
"""Models that have these layouts."""
KINDS: tuple[InputType, ...] = ("query", "document")
OPEN: list[Engine] = []


@cache
def engine(folder: Path, **options: Any) -> Engine:
    OPEN.append(Engine(str(folder), **{"dtype": "float32", "matryoshka": True} | options))
    return OPEN[-1]


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for each in OPEN:
        each.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints_of(tmp_path_factory)


@cache
def expected(folder: Path, kind: InputType) -> list[Any]:
    model = late_reference(folder)
    encode, texts = (model.encode_query, QUERIES) if kind == "query" else (model.encode_document, DOCUMENTS)
    return encode(texts, convert_to_numpy=True)


def texts_of(kind: InputType) -> list[str]:
    return QUERIES if kind == "query" else DOCUMENTS


@pytest.mark.parametrize("case", CASES)
def test_vectors(case: str, checkpoint: Callable[[str], Path], parity: Parity) -> None:
    """Vectors and their number are those of Sentence Transformers, with the same bits together and alone."""
    model, models = engine(checkpoint(case)), MODELS.get(case, ())
    for kind in KINDS:
        together = model.multi_vector(texts_of(kind), input_type=kind)
        wanted = expected(checkpoint(case), kind)
        parity(list(together), wanted, *models, family=model.card.encoder.family, tasks=["multi_vector"])
        for text, one in zip(texts_of(kind), together, strict=True):
            assert np.array_equal(model.multi_vector(text, input_type=kind)[0], one)


@pytest.mark.parametrize("case", ["stanford", "stanford, attended"])
def test_a_padding_token_in_a_text(case: str, checkpoint: Callable[[str], Path]) -> None:
    """Stanford's code takes it for padding: `ids[ids == pad] = mask` in queries, no vector in documents."""
    model = engine(checkpoint(case))
    padded, masked = (model.multi_vector(f"a {token} bird", input_type="query")[0] for token in ("[PAD]", "[MASK]"))
    assert np.array_equal(padded, masked)
    padded, masked = (model.multi_vector(f"a {token} bird", input_type="document")[0] for token in ("[PAD]", "[MASK]"))
    assert len(padded) == len(masked) - 1


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_scores(case: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(case)
    queries = engine(folder).multi_vector(QUERIES, input_type="query")
    documents = engine(folder).multi_vector(DOCUMENTS, input_type="document")
    scores = np.array([[(query @ document.T).max(1).sum() for document in documents] for query in queries])
    wanted = late_reference(folder).similarity(expected(folder, "query"), expected(folder, "document")).numpy()
    np.testing.assert_allclose(scores, wanted, rtol=1e-4)
    assert np.array_equal(scores.argsort(1), wanted.argsort(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same(case: str, kind: InputType, dtype: str, checkpoint: Callable[[str], Path]) -> None:
    with Engine(str(checkpoint(case)), device="cuda", dtype=dtype) as gpu:
        found = gpu.multi_vector(texts_of(kind), input_type=kind)
    wanted = expected(checkpoint(case), kind)
    assert [len(rows) for rows in found] == [len(rows) for rows in wanted]
    rows = np.concatenate(wanted)
    assert np.sqrt(np.square(found.rows_XD - rows).mean()) < 2e-2 * np.abs(rows).max()
    assert (found.rows_XD * rows).sum(1).min() > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", ["stanford", "mxbai edge"])
def test_a_gpu_scores_the_same(case: str, dtype: str, checkpoint: Callable[[str], Path]) -> None:
    """Token vectors stay on the GPU: those of a batch, of queries that wait for documents, and of the document cache."""
    folder, documents = checkpoint(case), [*DOCUMENTS, *(f"{text} {i}" for i in range(40) for text in DOCUMENTS)]
    with Engine(str(folder), device="cpu", dtype="float32") as exact:
        expected = [exact.score(query, documents, truncate=True) for query in QUERIES]
    with Engine(str(folder), device="cuda", dtype=dtype, max_batch_tokens=512, document_cache_bytes=2**20) as gpu:
        for _ in range(2):
            found = [gpu.score(query, documents, truncate=True) for query in QUERIES]
            np.testing.assert_allclose(found, expected, rtol=1e-4 if dtype == "float32" else 0.05, atol=0.05)


@pytest.mark.parametrize("case", ["stanford", "mxbai edge", "min"])
def test_queries_and_documents_of_many_widths_at_once(case: str, checkpoint: Callable[[str], Path]) -> None:
    """In one batch, cut and then normalised, and bit for bit as alone."""
    model = engine(checkpoint(case), max_batch_tokens=4096)
    asked = [
        Request(texts_of(kind), ("multi_vector",), input_type=kind, dimensions=width, normalize=normalize)
        for kind in KINDS
        for width in (12, 7, 4)
        for normalize in (None, False)
    ]
    for request, future in [(request, model.submit(request)) for request in asked]:
        got = future.result().outputs.multi_vector
        assert got is not None
        alone = model.multi_vector(
            request.texts, input_type=request.input_type, dimensions=request.dimensions, normalize=request.normalize
        )  # pyright: ignore[reportArgumentType]
        assert np.array_equal(got.rows_XD, alone.rows_XD)
        assert np.array_equal(got.offsets_N1, alone.offsets_N1)
        if request.normalize is None:
            cut = [rows[:, : request.dimensions] for rows in expected(checkpoint(case), request.input_type or "query")]
            if case != "min":  # its vectors come normalised, and a cut one is shorter by what was cut off
                assert_close_vectors(got, [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in cut])


# jina-colbert-v2


def test_jina_colbert(tmp_path: Path, parity: Parity) -> None:
    weights = write_jina(tmp_path, "HF_ColBERT")
    with Engine(str(tmp_path), dtype="float32", matryoshka=True) as model:
        assert len(model.card.outputs["multi_vector"].skip_ids) == 3  # two signs, and the padding
        for kind in KINDS:
            for width in (16, 12, 8):
                got = model.multi_vector(texts_of(kind), input_type=kind, dimensions=width)
                wanted = [jina_vectors(weights, tmp_path, text, kind, width) for text in texts_of(kind)]
                parity(list(got), wanted, "jinaai/jina-colbert-v2", family="jina_colbert", tasks=["multi_vector"])
                for text, one in zip(texts_of(kind), got, strict=True):
                    assert np.array_equal(model.multi_vector(text, input_type=kind, dimensions=width)[0], one)


def test_jina_colbert_by_its_own_name(tmp_path: Path) -> None:
    """Its config may name the class of its transformer."""
    write_jina(tmp_path, "HF_ColBERT")
    card = read_card(tmp_path, "m")
    edit_json(tmp_path / "config.json", architectures=["ColBERTJinaRobertaModel"])
    assert read_card(tmp_path, "m") == card


def test_jina_colbert_v1(tmp_path: Path, parity: Parity) -> None:
    """BERT with ALiBi, in Stanford's layout."""
    weights = write_jina_v1(tmp_path)
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "bare")
    shutil.copy(tmp_path / "tokenizer_config.json", tmp_path / "bare")
    write_json(tmp_path / "bare/config.json", {"model_type": "bert"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bare")
    skipped = {*tokenizer.convert_tokens_to_ids(list(string.punctuation))} - {tokenizer.unk_token_id}

    def vectors(text: str, kind: InputType) -> np.ndarray:
        length, marker = (12, "[unused0]") if kind == "query" else (30, "[unused1]")
        ids = tokenizer(text, truncation=True, max_length=length - 1)["input_ids"]
        ids = [ids[0], tokenizer.convert_tokens_to_ids(marker), *ids[1:]]
        ids += [tokenizer.mask_token_id] * (length - len(ids) if kind == "query" else 0)
        with torch.inference_mode():
            found = jina_bert(weights, JINA_V1, torch.tensor(ids)) @ weights["linear.weight"].T
            found = torch.nn.functional.normalize(found, dim=-1).numpy()
        return found if kind == "query" else found[[token not in skipped for token in ids]]

    with Engine(str(tmp_path), dtype="float32") as model:
        for kind in KINDS:
            got = model.multi_vector(texts_of(kind), input_type=kind)
            wanted = [vectors(text, kind) for text in texts_of(kind)]
            parity(list(got), wanted, "jinaai/jina-colbert-v1-en", family="jina_bert", tasks=["multi_vector"])
            for text, one in zip(texts_of(kind), got, strict=True):
                assert np.array_equal(model.multi_vector(text, input_type=kind)[0], one)


# LFM2


def test_lfm2(tmp_path: Path, parity: Parity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention leaves out the tokens that fill up a query, as in the transformers 4 that the model was trained with."""
    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.create_recurrent_attention_mask", lambda **_: None)
    write_lfm2(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as model:
        for kind in KINDS:
            got = model.multi_vector(texts_of(kind), input_type=kind)
            wanted = expected(tmp_path, kind)
            parity(list(got), wanted, "LiquidAI/LFM2-ColBERT-350M", family="lfm2", tasks=["multi_vector"])
            for text, one in zip(texts_of(kind), got, strict=True):
                assert np.array_equal(model.multi_vector(text, input_type=kind)[0], one)


def test_lfm2_both_ways(tmp_path: Path, parity: Parity) -> None:
    weights = write_lfm2_both_ways(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    skipped = {*tokenizer.convert_tokens_to_ids(list(string.punctuation))} - {tokenizer.unk_token_id}

    def vectors(text: str, kind: InputType) -> np.ndarray:
        length, marker = (14, "[Q] ") if kind == "query" else (30, "[D] ")
        ids = tokenizer(text, truncation=True, max_length=length - 1)["input_ids"]
        ids = [ids[0], tokenizer.convert_tokens_to_ids(marker), *ids[1:]]
        own = len(ids)
        ids += [tokenizer.eos_token_id] * (length - own if kind == "query" else 0)
        with torch.inference_mode():
            found = lfm2(weights, LFM2, torch.tensor(ids), own) @ weights["linear.weight"].T
            found = torch.nn.functional.normalize(found, dim=-1).numpy()
        return found if kind == "query" else found[[token not in skipped for token in ids]]

    with Engine(str(tmp_path), dtype="float32") as model:
        for kind in KINDS:
            got = model.multi_vector(texts_of(kind), input_type=kind)
            wanted = [vectors(text, kind) for text in texts_of(kind)]
            parity(list(got), wanted, "LiquidAI/LFM2.5-ColBERT-350M", family="lfm2", tasks=["multi_vector"])
            for text, one in zip(texts_of(kind), got, strict=True):
                assert np.array_equal(model.multi_vector(text, input_type=kind)[0], one)


# Stated options matter, so the comparisons above can fail

STATED: list[tuple[str, str, dict[str, Any], InputType]] = [
    ("stanford", "artifact.metadata", {"attend_to_mask_tokens": True}, "query"),
    ("stanford", "artifact.metadata", {"query_token_id": "[unused1]"}, "query"),
    ("stanford", "artifact.metadata", {"query_maxlen": 13}, "query"),
    ("stanford", "artifact.metadata", {"doc_token_id": "[unused0]"}, "document"),
    ("stanford", "artifact.metadata", {"doc_maxlen": 29}, "document"),
    ("stanford", "artifact.metadata", {"mask_punctuation": False}, "document"),
    ("pylate", "config_sentence_transformers.json", {"query_prefix": "[D] "}, "query"),
    ("pylate", "config_sentence_transformers.json", {"query_prefix": ""}, "query"),
    ("pylate", "config_sentence_transformers.json", {"skiplist_words": ["!"]}, "document"),
    ("pylate", "config_sentence_transformers.json", {"prompts": {"document": "passage: "}}, "document"),
    ("pylate, attended", "config_sentence_transformers.json", {"do_query_expansion": False}, "query"),
    ("mxbai edge", "sentence_bert_config.json", {"do_lower_case": False}, "query"),
    ("mxbai edge", "2_Dense/config.json", {"use_residual": False}, "query"),
    ("min", "sentence_bert_config.json", {"query_expansion": FIXED}, "query"),
    ("min", "2_MultiVectorMask/config.json", {"skiplist_tasks": ["document"]}, "query"),
]


@pytest.mark.parametrize(("case", "file", "change", "kind"), STATED)
def test_what_is_stated_matters(
    case: str, file: str, change: dict[str, Any], kind: InputType, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(case), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / file, **change)
    with Engine(str(tmp_path), dtype="float32") as model, pytest.raises(AssertionError):
        assert_close_vectors(
            model.multi_vector(texts_of(kind), input_type=kind), expected(checkpoint(case), kind), tolerance=1e-3
        )


# What a request may say


def test_a_request_says_what_its_texts_are(checkpoint: Callable[[str], Path]) -> None:
    model = engine(checkpoint("stanford"))
    with pytest.raises(InvalidRequest, match='say input_type="query" or "document"'):
        model.multi_vector(["a"])
    with pytest.raises(InvalidRequest, match="gives no 'dense'"):
        model.embed(["a"], input_type="query")


def test_a_request_may_set_another_length(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("pylate")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config_sentence_transformers.json", document_length=60, query_length=7)
    for kind, limit in (("document", 60), ("query", 7)):
        assert_close_vectors(
            engine(folder).multi_vector(texts_of(kind), input_type=kind, max_tokens=limit), expected(tmp_path, kind)
        )
    with pytest.raises(InvalidRequest, match="takes 4 to 80"):
        engine(folder).multi_vector(["a"], input_type="query", max_tokens=81)
    with pytest.raises(InvalidRequest, match="takes 12 to 12"):
        engine(checkpoint("stanford")).multi_vector(["a"], input_type="query", max_tokens=20)
    with pytest.raises(InvalidRequest, match="takes 16 to 80"):
        engine(checkpoint("min")).multi_vector(["a"], input_type="query", max_tokens=15)
    with pytest.raises(TooLong, match="the limit is 30"):
        engine(folder).multi_vector(DOCUMENTS, input_type="document", truncate="never")


def test_banner_and_errors_name_the_same_limits(checkpoint: Callable[[str], Path]) -> None:
    """The limits of the banner are those above which a text is refused, markers included."""
    model = engine(checkpoint("pylate"))
    assert (
        _summary(model.card, model.plan)["max length"] == "14 of a query, 30 of a document; a request may set up to 80 tokens"
    )
    limits: dict[InputType, int] = {"query": 14, "document": 30}
    for kind, limit in limits.items():
        for text in ("fly " * count for count in (1, limit // 2, limit, 2 * limit)):
            size = model.preprocessor.preprocess(Request([text], input_type=kind, max_tokens=80)).seqs[0].ids.size
            request = Request([text], input_type=kind, truncate="never")
            if size <= limit:
                assert model.preprocessor.preprocess(request).seqs[0].ids.size == size
            else:
                with pytest.raises(TooLong, match=f"has {size} tokens; the limit is {limit}"):
                    model.preprocessor.preprocess(request)


def test_a_smaller_limit_for_all(checkpoint: Callable[[str], Path]) -> None:
    short = engine(checkpoint("pylate"), max_length=10)
    assert [len(rows) for rows in short.multi_vector(QUERIES, input_type="query")] == [10, 3, 10, 10, 4, 10]
    with pytest.raises(CheckpointError, match="max length 10 leaves no room"):
        Engine(str(checkpoint("stanford")), max_length=10)


def test_C13_multi_vectors_of_nothing_but_punctuation(checkpoint: Callable[[str], Path]) -> None:
    """Special tokens around a text keep their vectors; token ids that are all skipped have none."""
    model = engine(checkpoint("stanford"))
    assert len(model.multi_vector(["...!?"], input_type="document")[0]) == 3
    ids = np.array(model.card.outputs["multi_vector"].skip_ids[:3], np.int64)
    found = model.run(Request([ids, ids[:1]], input_type="document")).outputs.multi_vector
    assert found is not None
    assert [rows.shape for rows in found] == [(0, 16), (0, 16)]


def test_token_ids_are_taken_as_they_are(checkpoint: Callable[[str], Path]) -> None:
    """Neither marked nor filled up; but some are skipped in documents."""
    folder = checkpoint("stanford")
    model = engine(folder)
    seqs = model.preprocessor.preprocess(Request(DOCUMENTS, input_type="document")).seqs
    ids = [seq.ids.astype(np.int64) for seq in seqs]
    found = [model.run(Request(ids, input_type=kind)).outputs.multi_vector for kind in KINDS]
    assert found[0] is not None
    assert found[1] is not None
    assert_close_vectors(found[1], expected(folder, "document"))
    assert [min(len(row), 12) for row in ids] == [len(rows) for rows in found[0]]


def test_a_prompt_comes_after_the_marker(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Newer files of PyLate say the marker in the prompts too."""
    shutil.copytree(checkpoint("pylate"), tmp_path, dirs_exist_ok=True)
    prompts = {"query": "[Q] search: ", "document": "passage: "}
    edit_json(tmp_path / "config_sentence_transformers.json", prompts=prompts)
    for kind in KINDS:
        assert_close_vectors(engine(tmp_path).multi_vector(texts_of(kind), input_type=kind), expected(tmp_path, kind))


def test_across_a_process_boundary(checkpoint: Callable[[str], Path]) -> None:
    """Which tokens are attended to, and whether a text is a query, go along."""
    folder = checkpoint("stanford")
    options = Options(dtype="float32")
    card = read_card(folder, "m")
    prepared = Preprocessor(folder, card, make_plan(options, card, Hardware(1))).preprocess(
        Request(QUERIES, input_type="query")
    )
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "whimbrel.server.processes.bootstrap", "engine", str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {CONTROL_FD: str(theirs.fileno())},
        )
    control = Channel[ReportEngine](ours, ReportEngine)
    control.send(Load(ModelOptions(str(folder), None, options), "engine-0-0", LogOptions()))
    control.send(Notice("proceed"))
    next(message for message in control if isinstance(message, Ready))
    near, far = pair()
    control.send(Attach(0), [far.detach()])
    channel = Channel[FromEngine](near, FromEngine)
    header, arrays, num_bytes = encode_request(prepared, prepared.scheduling)
    memory = np.empty(num_bytes, np.uint8)
    write_arrays(arrays, memory)
    submit = Submit(uid=1, segment=0, segment_bytes=0, arrays=memory.data, response_start=0, header=header, admitted=True)
    channel.send(submit)
    answer = next(iter(channel))
    process.kill()
    process.wait()
    control.close()
    channel.close()
    assert isinstance(answer, EngineAnswer)
    rows = prepared.layout.arrays(np.frombuffer(answer.memory, np.uint8))["multi_vector"]
    assert_close_vectors(np.split(rows, len(QUERIES)), expected(folder, "query"))


def test_vectors_are_given_as_they_are_without_a_module_that_normalises(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("min"), tmp_path, dirs_exist_ok=True)
    rows = [row for row in json.loads((tmp_path / "modules.json").read_text()) if "Normalize" not in row["path"]]
    write_json(tmp_path / "modules.json", rows)
    assert_close_vectors(engine(tmp_path).multi_vector(QUERIES, input_type="query"), expected(tmp_path, "query"))
