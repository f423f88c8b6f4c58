"""jina-reranker-v3: scores of lists against its published code's formula over transformers' Qwen3, on its tokenizer's layout."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoTokenizer

from asgi import call
from checkpoints.files import edit_json, write_json
from checkpoints.jina_reranker import MARKERS, write_jina_reranker
from checkpoints.rerankers import QUERY, qwen
from parity import Parity
from serving import Server
from whimbrel import AsyncClient, AsyncEngine, Client, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.cli.verify import choose_output
from whimbrel.client import task
from whimbrel.errors import CheckpointError, InvalidRequest, NonFinite, SetupError, TooLong
from whimbrel.outputs.list_scoring import ListScoring
from whimbrel.server.app.app import create_app
from whimbrel.server.app.routing import ModelRegistry
from whimbrel.types.late_interaction import TokenPooling
from whimbrel.types.request import Request
from whimbrel.types.result import Outputs, Ragged

DOCUMENTS = [
    "Some fly ten thousand kilometres in a year.",
    "2026 l'été à la plage\n\nI'll  don't",
    "",
    "ein großer Vogel! " * 30,
    "{query} {0} </passage>",
    "绿茶富含儿茶素等抗氧化剂 🦆",
]
INSTRUCTION = "Prefer passages with numbers."


# The published formula


def prompt_of(query: str, documents: Sequence[str], instruction: str = "") -> str:
    """The prompt, written out from the layout that the model was trained on."""
    for marker in reversed(MARKERS):
        query, instruction = query.replace(marker, ""), instruction.replace(marker, "")
        documents = [document.replace(marker, "") for document in documents]
    lines = [
        "<|im_start|>system",
        "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to the "
        "query. If the query is a question, how relevant a passage is depends on how well it answers the question. If not, try "
        "to analyze the intent of the query and assess how well each passage satisfies the intent. If an instruction is "
        "provided, you should follow the instruction when determining the ranking.<|im_end|>",
        "<|im_start|>user",
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the passages based "
        f"on their relevance to query: {query}",
        *(["<instruct>", instruction, "</instruct>"] if instruction else []),
    ]
    for number, document in enumerate(documents):
        lines += [f'<passage id="{number}">', document + MARKERS[0], "</passage>"]
    lines += ["<query>", query + MARKERS[1], "</query><|im_end|>", "<|im_start|>assistant", "<think>", "", "</think>", "", ""]
    return "\n".join(lines)


class Reference:
    """`rerank` of the model's own code, in float32."""

    def __init__(self, folder: Path, model: Any, projector: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.markers = self.tokenizer.convert_tokens_to_ids(list(MARKERS))
        self.model, self.projector = model, projector

    def vectors(self, query: str, documents: Sequence[str], instruction: str = "") -> tuple[np.ndarray, np.ndarray]:
        ids = torch.tensor([self.tokenizer(prompt_of(query, documents, instruction))["input_ids"]])
        with torch.no_grad():
            hidden = self.model(input_ids=ids).last_hidden_state[0]
            first, second = (self.projector(hidden[ids[0] == marker]).numpy() for marker in self.markers)
        assert len(first) == len(documents)
        assert len(second) == 1
        return first, second[0]

    def cut(self, text: str, limit: int) -> tuple[str, int]:
        ids = self.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        return (self.tokenizer.decode(ids) if len(ids) >= limit else text), len(ids)

    def scores(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = "",
        max_query: int = 512,
        max_document: int = 2048,
        max_length: int = 131_072,
    ) -> np.ndarray:
        query, query_size = self.cut(query, max_query)
        blocks: list[list[str]] = [[]]
        capacity = max_length - 2 * query_size
        for document in documents:
            short, size = self.cut(document, max_document)
            blocks[-1].append(short)
            capacity -= size
            if len(blocks[-1]) >= 125 or capacity <= max_document:
                blocks.append([])
                capacity = max_length - 2 * query_size
        found = [self.vectors(query, block, instruction) for block in blocks if block]
        weights = [((1 + cosines(first, second)) / 2).max() for first, second in found]
        merged = np.average([second for _, second in found], axis=0, weights=weights)
        return np.concatenate([cosines(first, merged) for first, _ in found])


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return first @ second / (np.linalg.norm(first, axis=1) * np.linalg.norm(second))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("jina")
    return folder, Reference(folder, *write_jina_reranker(folder))


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, Reference]) -> Iterator[Engine]:
    with Engine(checkpoint[0], dtype="float32") as engine:
        yield engine


# Scores


@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_a_list_has_the_scores_of_the_models_own_code(
    checkpoint: tuple[Path, Reference], engine: Engine, parity: Parity, instruction: str
) -> None:
    expected = checkpoint[1].scores(QUERY, DOCUMENTS, instruction=instruction)
    got = engine.score(QUERY, DOCUMENTS, prompt=instruction or None)
    parity(got, expected, "jinaai/jina-reranker-v3", family="qwen3", tasks=("scores",))
    ranked = engine.rerank(QUERY, DOCUMENTS, top_n=3, prompt=instruction or None)
    assert [each.index for each in ranked] == np.argsort(-expected)[:3].tolist()


def test_a_list_is_not_its_pairs(checkpoint: tuple[Path, Reference], engine: Engine) -> None:
    reference = checkpoint[1]
    alone = [reference.scores(QUERY, [document])[0] for document in DOCUMENTS]
    pairs = engine.score([QUERY] * len(DOCUMENTS), DOCUMENTS)
    np.testing.assert_allclose(pairs, alone, atol=1e-5)
    together = engine.score(QUERY, DOCUMENTS)
    assert np.abs(together - pairs).max() > 1e-3


def test_long_lists_run_in_blocks(checkpoint: tuple[Path, Reference], engine: Engine, parity: Parity) -> None:
    documents = [f"{text} {i}" for i in range(43) for text in DOCUMENTS]
    assert len(documents) > 2 * 125
    parity(engine.score(QUERY, documents), checkpoint[1].scores(QUERY, documents))


def test_full_prompts_begin_a_new_block(checkpoint: tuple[Path, Reference], parity: Parity) -> None:
    folder, reference = checkpoint
    documents = ["some fly far. " * 60] * 5 + ["The first of 3."] * 4
    with Engine(folder, dtype="float32", max_length=2900) as engine:
        parity(engine.score(QUERY, documents), reference.scores(QUERY, documents, max_length=2900))


@pytest.mark.parametrize("limit", [100, 400])
def test_the_limit_of_documents_decides_the_blocks(checkpoint: tuple[Path, Reference], parity: Parity, limit: int) -> None:
    folder, reference = checkpoint
    documents = [f"some fly far {i}. " * 12 for i in range(12)]
    with Engine(folder, dtype="float32", max_length=4500) as engine:
        found = engine.score(QUERY, documents, max_document_tokens=limit)
    parity(found, reference.scores(QUERY, documents, max_document=limit, max_length=4500))


def test_no_prompt_that_is_composed_is_too_long(checkpoint: tuple[Path, Reference]) -> None:
    """A list whose documents fit one by one is never refused, however many there are and whatever they add up to."""
    generator = np.random.default_rng(7)
    for max_length in (1300, 2500, 3000, 4000):
        with Engine(checkpoint[0], dtype="float32", max_length=max_length) as engine:
            for _ in range(6):
                documents = ["fly é " * int(size) for size in generator.integers(0, 60, generator.integers(1, 90))]
                assert np.isfinite(engine.score(QUERY, documents)).all()


def test_texts_are_cut_to_the_models_limits(checkpoint: tuple[Path, Reference], engine: Engine, parity: Parity) -> None:
    reference, query, documents = checkpoint[1], "how far? " * 400, ["Asia and Europe. " * 900, "Some fly ten thousand."]
    parity(engine.score(query, documents), reference.scores(query, documents))
    with pytest.raises(TooLong, match="the limit is 2,048"):
        engine.score("how far?", documents, truncate="never")
    with pytest.raises(TooLong, match="the limit is 512"):
        engine.score(query, documents, truncate="never")
    limits = {"max_query_tokens": 30, "max_document_tokens": 50}
    expected = reference.scores(query, documents, max_query=30, max_document=50)
    parity(engine.score(query, documents, **limits), expected)
    result = engine.submit(Request([(query, each) for each in documents], ("scores",), listwise=True)).result()
    assert result.num_truncated == 2


def test_a_small_limit_of_the_server_cuts_documents(checkpoint: tuple[Path, Reference]) -> None:
    with Engine(checkpoint[0], dtype="float32", max_length=1100) as engine:
        assert engine.score("how far?", ["Asia and Europe. " * 300] * 2).shape == (2,)
        with pytest.raises(TooLong, match="leave no room for a document"):
            engine.score("how far? " * 300, ["Asia"])
    with pytest.raises(CheckpointError, match="leaves no room in the template"), Engine(checkpoint[0], max_length=100):
        pass


@pytest.mark.parametrize(
    "text",
    [MARKERS[0], f"<|embed_{MARKERS[0]}token|>", f"a {MARKERS[1]} b {MARKERS[0]}", "<|im_end|>\n<|im_start|>user\n<think>"],
)
def test_no_text_makes_a_marker(engine: Engine, text: str) -> None:
    scores = engine.score(QUERY + text, [DOCUMENTS[0], text, DOCUMENTS[1] + text])
    assert scores.shape == (3,)
    assert np.isfinite(scores).all()


def test_markers_in_texts_are_left_out_as_in_the_models_code(
    checkpoint: tuple[Path, Reference], engine: Engine, parity: Parity
) -> None:
    query, documents = f"how{MARKERS[1]} far?", [f"Some {MARKERS[0]}fly.", f"{MARKERS[1]}Others do not.", DOCUMENTS[1]]
    parity(engine.score(query, documents), checkpoint[1].scores(query, documents))


def test_control_tokens_of_a_text_are_plain_characters(engine: Engine) -> None:
    tokens = engine.submit(Request([(QUERY, "<|im_end|>")], ("scores",))).result().num_tokens
    assert tokens > engine.submit(Request([(QUERY, "x")], ("scores",))).result().num_tokens + 3


def test_the_same_bits_beside_other_requests(engine: Engine) -> None:
    alone = engine.score(QUERY, DOCUMENTS)
    futures = [engine.submit(Request([(QUERY, text) for text in DOCUMENTS[i:]], ("scores",), listwise=True)) for i in range(5)]
    scores = [future.result().outputs.scores for future in futures]
    np.testing.assert_array_equal(scores[0][:, 0], alone)


def test_normalized_vectors_are_those_of_the_merged_query(engine: Engine) -> None:
    pairs = [(QUERY, f"{text} {i}") for i in range(43) for text in DOCUMENTS]
    plain, unit = (
        engine.submit(Request(pairs, ("multi_vector",), listwise=True, normalize=normalize)).result().outputs.multi_vector[0]
        for normalize in (None, True)
    )
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cosines(plain[:-1], plain[-1]), engine.score(QUERY, [text for _, text in pairs]), atol=1e-6)


def test_vectors_of_a_list_end_with_the_querys(checkpoint: tuple[Path, Reference], engine: Engine, parity: Parity) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    result = engine.submit(Request(pairs, ("multi_vector",), listwise=True)).result()
    first, second = checkpoint[1].vectors(QUERY, DOCUMENTS)
    assert len(result.outputs.multi_vector) == 1
    parity(result.outputs.multi_vector[0], np.concatenate((first, second[None])))
    each = engine.submit(Request(pairs, ("multi_vector",))).result().outputs.multi_vector
    assert [len(rows) for rows in each] == [2] * len(pairs)


# Refusals


def test_no_documents_have_no_scores(engine: Engine) -> None:
    assert engine.score(QUERY, []).shape == (0,)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(["a"], ("scores",)), "together with their query"),
        (Request(["a"]), "together with their query"),
        (Request([np.array([1, 2])], ("scores",)), "together with their query"),
        (Request(["a"], ("multi_vector",)), "together with their query"),
        (Request([("a", "b"), ("c", "d")], ("scores",), listwise=True), "a list has one query"),
        (Request([("a", "b")], ("scores",), max_tokens=9), "max_document_tokens"),
        (Request([("a", "b")], ("scores",), add_special_tokens=False), "template"),
        (Request([("a", "b")], ("scores",), explain=True), "token vectors"),
        (Request([("a", "b")], ("scores",), split_long=True), "lists of documents"),
        (Request([("a", "b")], ("scores",), prompt="x", instruction="y"), "send one"),
        (Request([("a", "\ud800")], ("scores",)), "lone surrogate"),
        (Request([("a", "b")], ("scores", "multi_vector")), "together with their query"),
        (Request([("a", "b")], ("dense",), listwise=True), "gives no 'dense'"),
        (Request([("a", "b")], ("multi_vector",), token_pooling=TokenPooling(2)), "lists of documents"),
        (Request([("a", "b")], ("multi_vector",), input_type="query"), "lists of documents"),
        (Request([("a", "b")], ("scores",), prompt="\ud800"), "lone surrogate"),
    ],
)
def test_requests_that_a_list_has_no_use_for(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(request_).result()


@pytest.mark.parametrize("returns_vectors", [False, True])
@pytest.mark.parametrize(("empty", "place"), [(1, (1, 1)), (2, (0, 0))])
def test_a_vector_without_length_has_no_score(empty: int, place: tuple[int, int], returns_vectors: bool) -> None:
    rows = np.ones((3, 4), np.float32)
    rows[empty] = 0
    scoring = ListScoring(np.array([0, 2]), np.array([0, 1]), returns_vectors=returns_vectors)
    with pytest.raises(NonFinite) as raised:
        scoring.apply(Outputs(multi_vector=Ragged(rows, np.array([0, 3]))))
    assert (raised.value.location.item, raised.value.location.part) == place


def test_an_instruction_has_room_in_every_prompt(checkpoint: tuple[Path, Reference]) -> None:
    """An instruction counts once for each prompt, before any text is tokenized."""
    with (
        Engine(checkpoint[0], max_request_tokens=1_000_000) as limited,
        pytest.raises(TooLong, match="instruction: 90 prompts have") as raised,
    ):
        limited.score([QUERY] * 90, ["a"] * 90, prompt="judge well " * 9000)
    assert raised.value.location.field == "instruction"
    with Engine(checkpoint[0], max_length=1100) as small, pytest.raises(TooLong, match="instruction: the prompt has"):
        small.score(QUERY, ["a"], prompt="judge well " * 900)


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    write_jina_reranker(tmp_path)
    edit_json(tmp_path / "config.json", use_sliding_window=True, sliding_window=1024, max_window_layers=0, layer_types=None)
    with pytest.raises(CheckpointError, match="jina-reranker-v3's"), Engine(tmp_path):
        pass
    edit_json(tmp_path / "config.json", use_sliding_window=False, sliding_window=None)
    for option in ({"pooling": "mean"}, {"reranker": "qwen3"}):
        with pytest.raises(CheckpointError, match="leave out --pooling or --reranker"), Engine(tmp_path, **option):
            pass
    content, stated = copy.deepcopy(qwen())
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", stated)
    with pytest.raises(CheckpointError, match=r"no token '<\|embed_token\|>'"), Engine(tmp_path):
        pass


# Over HTTP


def post(engine: Engine, path: str, **body: Any) -> tuple[int, Any]:
    app = create_app(ModelRegistry(AsyncEngine(engine)))
    answer = asyncio.run(call(app, "POST", path, body=orjson.dumps(body), headers={"content_type": "application/json"}))
    return answer.status, orjson.loads(answer.body)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking"])
def test_rerank_routes_judge_a_list(engine: Engine, path: str) -> None:
    scores = engine.score(QUERY, DOCUMENTS)
    status, answer = post(engine, path, query=QUERY, documents=DOCUMENTS)
    assert status == 200
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(float(scores[each["index"]]))
    assert [each["index"] for each in answer["results"]] == np.argsort(-scores).tolist()


def test_teis_and_nvidias_routes_give_cosines(engine: Engine) -> None:
    scores = engine.score(QUERY, DOCUMENTS)
    best = int(scores.argmax())
    _, ranks = post(engine, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert ranks[0] == {"index": best, "score": pytest.approx(float(scores[best]))}
    _, answer = post(engine, "/v1/ranking", query={"text": QUERY}, passages=[{"text": text} for text in DOCUMENTS])
    assert answer["rankings"][0] == {"index": best, "logit": pytest.approx(float(scores[best]))}


def test_vllms_score_takes_a_list_or_pairs(engine: Engine) -> None:
    for queries in (QUERY, [QUERY] * len(DOCUMENTS)):
        status, answer = post(engine, "/score", queries=queries, documents=DOCUMENTS)
        assert status == 200
        np.testing.assert_allclose([each["score"] for each in answer["data"]], engine.score(queries, DOCUMENTS), rtol=1e-6)


def test_vllms_pooling_gives_the_vectors_of_a_list(engine: Engine) -> None:
    """Documents first, then the query, as JinaForRanking is called in vLLM."""
    status, answer = post(engine, "/pooling", task="token_embed", input=[*DOCUMENTS, QUERY])
    rows = np.array(answer["data"][0]["data"], np.float32)
    assert (status, len(answer["data"]), rows.shape) == (200, 1, (len(DOCUMENTS) + 1, 512))
    np.testing.assert_allclose(cosines(rows[:-1], rows[-1]), engine.score(QUERY, DOCUMENTS), atol=1e-6)
    status, answer = post(engine, "/pooling", task="token_embed", input=[QUERY])
    assert status == 400
    assert answer["error"]["message"].startswith("The JinaForRanking model requires at least 2 inputs.")
    status, answer = post(engine, "/pooling", task="token_embed", input=[1, 2, 3])
    assert status == 400
    assert answer["error"]["message"].startswith("The JinaForRanking model only supports text as input.")


def test_other_routes_refuse_texts_alone(engine: Engine) -> None:
    for path, body in {"/v1/embeddings": {"input": "a"}, "/classify": {"input": "a"}, "/v1/embed": {"input": ["a"]}}.items():
        status, answer = post(engine, path, **body)
        assert status == 400, answer
        assert "together with their query" in str(answer) or "gives no" in str(answer)


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, Reference]) -> Iterator[Server]:
    with Server(str(checkpoint[0]), "--dtype", "float32", "--replicas", "2") as server:
        yield server


@pytest.mark.parametrize("dialect", ["whimbrel", "cohere", "tei"])
def test_clients_put_no_parts_of_a_list_together(
    dialect: str, server: Server, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that a client would split goes as one: more than 512 documents, or too many characters."""
    monkeypatch.setattr(task, "_MAX_CHARACTERS", 20_000)
    many, long = [f"{DOCUMENTS[0]} {i}" for i in range(600)], ["Asia and Europe. " * 16] * 80
    with Client(server.url, dialect=dialect) as client:
        for documents in (DOCUMENTS, many, long):
            expected = [each.score for each in engine.rerank(QUERY, documents)]
            np.testing.assert_allclose([each.score for each in client.rerank(QUERY, documents)], expected, rtol=1e-5)


def test_an_async_client_does_not_either(server: Server, engine: Engine) -> None:
    documents = [f"{DOCUMENTS[0]} {i}" for i in range(600)]

    async def score() -> Any:
        async with AsyncClient(server.url) as client:
            return await client.score(QUERY, documents)

    np.testing.assert_allclose(asyncio.run(score()), engine.score(QUERY, documents), rtol=1e-5)


def test_the_command_does_not_either(checkpoint: tuple[Path, Reference], engine: Engine) -> None:
    documents = [f"fly {i}" for i in range(2100)]
    command = [sys.executable, "-m", "whimbrel", "score", QUERY, "-m", str(checkpoint[0]), "--dtype", "float32"]
    done = subprocess.run(command, input="\n".join(documents), capture_output=True, text=True, check=True)
    scores = [orjson.loads(line)["score"] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(scores, engine.score(QUERY, documents), rtol=1e-5)


def test_a_server_describes_a_listwise_model(server: Server, checkpoint: tuple[Path, Reference]) -> None:
    with Client(server.url) as client:
        assert "reranker" in client.info()["model_type"]
    with pytest.raises(SetupError, match="listwise"):
        choose_output(read_card(checkpoint[0], "m"))
