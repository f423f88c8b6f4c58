"""`whimbrel eval` with models: numbers of MiniLM, variants against the verbs, rerankers, servers, pages and bad input."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from checkpoints.bge_m3 import write_m3
from checkpoints.classifiers import write_classifier
from command import Here
from serving import Server
from whimbrel import Engine
from whimbrel.errors import ComputeError, SetupError
from whimbrel.wire.dtypes import to_bits, to_int8
from whimbrel_bench.evaluation import forms
from whimbrel_bench.evaluation.collection import Texts
from whimbrel_bench.evaluation.models import Model, similarities_of
from whimbrel_bench.evaluation.ranking import trec_order
from whimbrel_bench.evaluation.search import Found, rerank, search
from whimbrel_bench.evaluation.variants import read_variants

DOCUMENTS = {
    "d01": "The whimbrel winters on the coasts of Africa and South America.",
    "d02": "Whimbrels breed in the tundra of the far north.",
    "d03": "A curlew is a large wader with a long, curved bill.",
    "d04": "A sandwich has two slices of bread with cheese or ham between them.",
    "d05": "Cheese is made of milk, rennet and salt.",
    "d06": "Bread is baked of flour, water and yeast.",
    "d07": "Waders probe the mud for crabs and worms.",
    "d08": "The price of wheat rose by three percent in March.",
    "d09": "A tide table tells when mud flats fall dry.",
    "d10": "Rennet comes from the stomachs of calves.",
    "d11": "The tundra thaws for a few weeks each summer.",
    "d12": "Ham is the cured leg of a pig.",
}
QUERIES = {
    "q1": "Where do whimbrels spend the winter?",
    "q2": "How is cheese made?",
    "q3": "What do birds eat on mud flats?",
    "q4": "Which birds have curved bills?",
    "q5": "What does wheat cost?",
    "q6": "Who wrote this?",
}
GRADES = {
    "q1": {"d01": 2, "d02": 1},
    "q2": {"d05": 2, "d10": 1, "d04": 0},
    "q3": {"d07": 2, "d09": 1, "d03": 1},
    "q4": {"d03": 2, "d07": 1},
    "q5": {"d08": 2, "d06": 1},
}
IDS = trec_order(DOCUMENTS)
TEXTS = Texts(tuple(IDS), tuple(DOCUMENTS[each] for each in IDS))
ASKED = Texts(tuple(QUERIES), tuple(QUERIES.values()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "qrels").mkdir()
    for name, texts in (("queries", QUERIES), ("corpus", DOCUMENTS)):
        lines = (json.dumps({"_id": each, "text": text}) for each, text in texts.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = (f"{query}\t{document}\t{grade}" for query, own in GRADES.items() for document, grade in own.items())
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A small random model of dense, sparse and token vectors."""
    folder = tmp_path_factory.mktemp("m3")
    torch.manual_seed(3)
    write_m3(folder)
    with Engine(str(folder), dtype="float32", matryoshka=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    torch.manual_seed(3)
    write_classifier(folder, "bert", num_labels=1)
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(monkeypatch)


def ndcg(scores_QN: np.ndarray[Any, Any], ids: list[str]) -> list[float]:
    """The measure in plain numpy: gains are grades, documents of equal score come in descending order of their ids."""
    values: list[float] = []
    for scores_N, grades in zip(scores_QN, GRADES.values(), strict=False):
        order = sorted(range(len(ids)), key=lambda i: (scores_N[i], ids[i]), reverse=True)[:10]
        gains = np.array([grades.get(ids[i], 0) for i in order], np.float64)
        best = np.sort(np.array(list(grades.values()), np.float64))[::-1]
        values.append(
            float(gains @ (1 / np.log2(np.arange(len(gains)) + 2)) / (best @ (1 / np.log2(np.arange(len(best)) + 2))))
        )
    return values


def test_ndcg_of_minilm_is_that_of_its_vectors(data: Path, here: Here, engine32: Engine) -> None:
    """The command's values of each query are those that numpy computes of the engine's vectors, and pytrec_eval's if it is here."""
    out, _ = here.run("eval", "--data", str(data), "--dtype", "float32", "--json")
    record = json.loads(out)
    (system,) = record["systems"]
    queries, documents = (engine32.embed(list(texts.values())) for texts in (QUERIES, DOCUMENTS))
    scores_QN = queries @ documents.T
    expected = ndcg(scores_QN, list(DOCUMENTS))
    assert record["query_ids"] == list(GRADES)
    np.testing.assert_allclose(system["values"]["nDCG@10"], expected, atol=1e-9)
    assert system["means"]["nDCG@10"]["value"] == pytest.approx(np.mean(expected), abs=1e-9)
    assert system["bytes_per_document"] == 4 * 384
    assert record["facts"]["notes"] == "queries without a relevant document, which are left out: 1 of 6"
    if importlib.util.find_spec("pytrec_eval") is not None:
        import pytrec_eval

        rows = zip(QUERIES, scores_QN.tolist(), strict=True)
        run = {query: dict(zip(DOCUMENTS, scores, strict=True)) for query, scores in rows}
        found = pytrec_eval.RelevanceEvaluator(GRADES, {"ndcg_cut.10", "map_cut.100", "recip_rank"}).evaluate(run)
        for label, name in (("nDCG@10", "ndcg_cut_10"), ("MAP@100", "map_cut_100"), ("MRR@10", "recip_rank")):
            np.testing.assert_allclose(system["values"][label], [found[query][name] for query in GRADES], atol=1e-9)


def scores_of(found: Found) -> np.ndarray[Any, Any]:
    """The scores of all documents, in the order of TEXTS."""
    rows = [dict(zip(found.ranks[query], found.scores[query], strict=True)) for query in ASKED.ids]
    return np.array([[row[each] for each in IDS] for row in rows])


def searched(engine: Engine, output: str, *variants: str) -> list[np.ndarray[Any, Any]]:
    model = Model("m", engine, similarities_of(engine.card), False, "")
    read = read_variants(",".join(variants)) if variants else read_variants(None)
    found = search(model, output, ASKED, TEXTS, read, top_k=len(IDS))
    return [scores_of(found[each]) for each in read]


def scored(engine: Engine, documents: list[Any], by: Any) -> np.ndarray[Any, Any]:
    """Scores of all pairs by the engine's own verb."""
    return np.array([engine.score(query, documents, score_by=by) for query in ASKED.texts])


def test_dense_variants_score_as_the_verbs(m3: Engine) -> None:
    plain, dim, int8, bits = searched(m3, "dense", "float32", "dim:16", "int8-vectors", "binary")
    queries, documents = (m3.embed(list(each.texts), input_type=role) for each, role in ((ASKED, "query"), (TEXTS, "document")))
    np.testing.assert_allclose(plain, scored(m3, list(TEXTS.texts), "dense"), atol=1e-5)
    short = [m3.embed(list(each.texts), dimensions=16) for each in (ASKED, TEXTS)]
    np.testing.assert_allclose(dim, short[0] @ short[1].T, atol=1e-5)
    np.testing.assert_allclose(int8, queries @ forms.normalized(to_int8(documents).astype(np.float32)).T, atol=1e-5)
    hamming = np.bitwise_count(to_bits(queries)[:, None] ^ to_bits(documents)[None]).sum(axis=2)
    np.testing.assert_array_equal(bits, queries.shape[1] - 2.0 * hamming)


def test_late_interaction_scores_as_maxsim_of_the_engine(m3: Engine) -> None:
    """In float32, and in fewer bits as the engine compares stored vectors; pooled and MUVERA as the verbs give them."""
    plain, pooled, int8, bits, muvera = searched(
        m3, "multi_vector", "float32", "pooled:2", "int8-vectors", "binary", "muvera"
    )  # fmt: skip
    rows = list(m3.multi_vector(list(TEXTS.texts), input_type="document"))
    np.testing.assert_allclose(plain, scored(m3, rows, "multi_vector"), atol=1e-4)
    np.testing.assert_allclose(
        pooled, scored(m3, list(m3.multi_vector(list(TEXTS.texts), token_pooling=2)), "multi_vector"), atol=1e-4
    )
    np.testing.assert_allclose(
        int8, scored(m3, [np.rint(127 * each).astype(np.int8) for each in rows], "multi_vector"), atol=1e-4
    )
    np.testing.assert_allclose(bits, scored(m3, [to_bits(each) for each in rows], "multi_vector"), atol=1e-4)
    encoded = [m3.muvera(list(each.texts), input_type=role) for each, role in ((ASKED, "query"), (TEXTS, "document"))]
    np.testing.assert_allclose(muvera, encoded[0] @ encoded[1].T, rtol=1e-4, atol=1e-3)


def test_sparse_scores_as_the_engine(m3: Engine) -> None:
    (found,) = searched(m3, "sparse")
    np.testing.assert_allclose(found, scored(m3, list(TEXTS.texts), "sparse"), atol=1e-5)


def test_rescored_documents_are_the_best_by_few_bits_in_their_own_order(m3: Engine) -> None:
    model = Model("m", m3, {"dense": "cosine"}, False, "")
    variants = read_variants("binary,binary+rescore:4,float32")
    found = search(model, "dense", ASKED, TEXTS, variants, top_k=len(IDS))
    bits, again, full = (found[each] for each in variants)
    for query in ASKED.ids:
        assert again.ranks[query] == [each for each in full.ranks[query] if each in bits.ranks[query][:4]]


@pytest.mark.parametrize(
    ("output", "variant", "words"),
    [
        ("dense", "pooled:2", "pooled is for token vectors, and m is searched by dense"),
        ("dense", "muvera", "muvera is for token vectors"),
        ("multi_vector", "dim:8", "dim is for dense vectors"),
        ("sparse", "binary", "not for sparse ones"),
    ],
)
def test_variants_that_a_model_does_not_have_are_refused(output: str, variant: str, words: str, m3: Engine) -> None:
    with pytest.raises(SetupError, match=words):
        searched(m3, output, variant)


def test_a_refused_text_is_named_by_its_id() -> None:
    """The verbs know the place of a text within one call, not within the collection."""

    class Picky:
        def embed(self, texts: list[str], **_: Any) -> Any:
            raise ComputeError("its vector has numbers that are not finite", item=len(texts) - 1)

    with pytest.raises(SetupError, match=r"^query 'q6': its vector has numbers that are not finite$"):
        search(Model("m", cast(Any, Picky()), {"dense": "dot"}, False, ""), "dense", ASKED, TEXTS, read_variants(None), top_k=3)


def test_dimensions_that_are_not_stated_are_refused(engine32: Engine) -> None:
    with pytest.raises(Exception, match="this model does not say that its vectors of 384 may be cut"):
        searched(engine32, "dense", "dim:100")


def test_a_reranker_orders_the_best_of_a_first_stage(ranker: Path, engine32: Engine) -> None:
    """Candidates keep their set, and come in the order of the verb."""
    first = dict.fromkeys(ASKED.ids, IDS[:5])
    with Engine(str(ranker), dtype="float32") as engine:
        found = rerank(Model("m", engine, {}, True, ""), ASKED, TEXTS, first)
        for query, text in QUERIES.items():
            hits = engine.rerank(text, [DOCUMENTS[each] for each in IDS[:5]])
            assert found.ranks[query] == [IDS[hit.index] for hit in hits]
            assert found.scores[query] == [hit.score for hit in hits]


def test_rerankers_and_their_first_stages(data: Path, ranker: Path, here: Here, tmp_path: Path) -> None:
    """The first stage is a model, or a run in TREC's format, and the first system of the report."""
    run = tmp_path / "bm25.run"
    run.write_text("".join(f"{query} Q0 {each} 1 {-place} x\n" for query in QUERIES for place, each in enumerate(IDS)))
    out, _ = here.run("eval", str(ranker), "--data", str(data), "--first-stage", str(run), "--json")
    record = json.loads(out)
    assert [each["name"] for each in record["systems"]] == ["first stage (bm25.run)", ranker.name]
    expected = ndcg(np.array([[-IDS.index(each) for each in DOCUMENTS]] * len(QUERIES)), list(DOCUMENTS))
    np.testing.assert_allclose(record["systems"][0]["values"]["nDCG@10"], expected, atol=1e-9)
    error = here.error("eval", str(ranker), "--data", str(data))
    assert "scores pairs, and cannot search 12 documents" in error
    assert "--first-stage" in error
    error = here.error("eval", str(ranker), "--data", str(data), "--first-stage", str(run), "--compare", "binary")
    assert "a reranker stores no vectors" in error


def test_a_server_gives_the_numbers_of_the_engine(data: Path, here: Here, server32: Server, tmp_path: Path) -> None:
    """A server and a model side by side, as a table and a page; the two have no difference."""
    page = tmp_path / "report.html"
    out, err = here.run("eval", server32.url, "--data", str(data), "--page", str(page))
    text = out.decode()
    assert f"wrote {page}" in err.decode()
    assert "nDCG@10" in text
    with Engine(dtype="float32") as engine:
        scores_QN = engine.embed(list(QUERIES.values())) @ engine.embed(list(DOCUMENTS.values())).T
    assert f"{np.mean(ndcg(scores_QN, list(DOCUMENTS))):.4f}" in text
    html = page.read_text()
    assert "<svg" in html
    assert "<script" not in html
    first, _ = here.run("eval", server32.url, "--data", str(data), "--first-stage", server32.url, "--json")
    same = json.loads(first)["differences"][0]
    assert (same["value"], same["better"], same["worse"]) == (0, 0, 0)
    error = here.error("eval", server32.url, "--data", str(data), "--compare", "int8")
    assert "whose dtype is its own" in error
    error = here.error("eval", f"{server32.url}#other", "--data", str(data))
    assert "has no model 'other'; it has: " in error


def test_precisions_side_by_side(data: Path, here: Here) -> None:
    """The table has a row for each precision, and what changed against the first."""
    out, _ = here.run(
        "eval", "--data", str(data), "--compare", "float32,float32+int8-vectors,float32+binary,float32+binary+rescore:6"
    )
    lines = out.decode().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| float32")]
    assert rows[:4] == ["float32", "float32+int8-vectors", "float32+binary", "float32+binary+rescore:6"]
    stored = [line.split("|")[-2].strip() for line in lines if line.startswith("| float32")][:4]
    assert stored == ["1,536", "384", "48", "48"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--queries is missing"),
        (("--data", "{data}", "--qrels", "x"), "--data and --qrels are two ways to say the same"),
        (("--data", "{data}/none"), "is no folder"),
        (("--data", "{data}", "--split", "dev"), "has no qrels/dev.tsv"),
        (("--data", "{data}", "--top-k", "50"), "recall@100 needs 100 documents; --top-k is 50"),
        (("--data", "{data}", "--measures", "x@1"), "'x@1' is no measure"),
        (("--data", "{data}", "--page", "x.pdf"), "cannot write x.pdf as a page"),
        (("--data", "{data}", "--page", "none/x.html"), "cannot write none/x.html"),
        (("--data", "{data}", "--compare", "float9"), "'float9' in 'float9' is not known"),
        (("--data", "{data}", "--mteb", "X"), "--mteb brings its own data and measures"),
        (("http://127.0.0.1:9", "--data", "{data}"), "127.0.0.1:9"),
        (("a/x", "a/x", "--data", "{data}"), "a model is named twice"),
        (("--data", "{data}", "--output", "sparse"), "gives no 'sparse'; it gives: dense"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(arguments: tuple[str, ...], words: str, data: Path, here: Here) -> None:
    assert words in here.error("eval", *(each.format(data=data) for each in arguments))
