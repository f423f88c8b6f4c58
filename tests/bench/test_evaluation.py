"""Parts of the evaluation without a model: measures against trec_eval, ties, intervals, forms of vectors, files and their faults."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whimbrel.errors import SetupError
from whimbrel.outputs.muvera import encode_muvera
from whimbrel.types.late_interaction import MuveraParameters
from whimbrel.types.result import Ragged, Sparse
from whimbrel.wire.dtypes import to_bits, to_int8
from whimbrel_bench.evaluation import forms
from whimbrel_bench.evaluation.collection import Collection, Texts, find_files, make_collection, read_collection, read_run
from whimbrel_bench.evaluation.drawing import intervals_part
from whimbrel_bench.evaluation.intervals import Interval, draw_means, interval_of
from whimbrel_bench.evaluation.measures import Measure, read_measures
from whimbrel_bench.evaluation.ranking import Best, trec_order
from whimbrel_bench.evaluation.report import System, facts, make_report, to_json, to_page, to_text, verdict
from whimbrel_bench.evaluation.run import display_names
from whimbrel_bench.evaluation.variants import Variant, read_variants

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/evaluation/trec_eval.json").read_text(encoding="utf-8"))
"""Judgements, a run with many equal scores, and the measures that trec_eval gives (pytrec_eval-terrier 0.5)."""
NAMES = {"ndcg": "ndcg_cut_", "recall": "recall_", "map": "map_cut_", "precision": "P_"}


def best_of(run: dict[str, dict[str, float]], block: int) -> dict[str, list[str]]:
    """Rank a run as the search does, in blocks of documents."""
    order = trec_order({document for scores in run.values() for document in scores})
    missing = -1e9
    scores_QN = np.array([[run[query].get(each, missing) for each in order] for query in run], np.float32)
    best = Best(len(run), len(order))
    for first in range(0, len(order), block):
        best.add(scores_QN[:, first : first + block], first)
    numbers_QK, found_QK = best.ranked(len(order))
    return {
        query: [order[i] for i, score in zip(numbers, scores, strict=True) if score > missing]
        for query, numbers, scores in zip(run, numbers_QK, found_QK, strict=True)
    }


@pytest.mark.parametrize("block", [1, 3, 100])
def test_measures_are_those_of_trec_eval(block: int) -> None:
    """Equal scores, negative grades, missing documents and ids beyond ASCII included."""
    ranked = best_of(GOLDEN["run"], block)
    for query, grades in GOLDEN["qrels"].items():
        expected = GOLDEN["values"][query]
        for kind, name in NAMES.items():
            for depth in (3, 10):
                assert Measure(kind, depth).value(ranked[query], grades) == pytest.approx(expected[f"{name}{depth}"], abs=1e-9)
        assert Measure("mrr", 100).value(ranked[query], grades) == pytest.approx(expected["recip_rank"], abs=1e-9)


def test_measures_are_those_of_pytrec_eval_here() -> None:
    """The same with many random rankings, where pytrec_eval is installed: `make recipes` brings it with mteb."""
    if importlib.util.find_spec("pytrec_eval") is None:
        pytest.skip("pytrec_eval is not installed; `make recipes` installs it")
    import pytrec_eval

    rng = np.random.default_rng(5)
    documents = [f"d{i}" for i in range(40)]
    grades: dict[str, dict[str, int]] = {
        f"q{q}": {each: int(rng.integers(-1, 4)) for each in documents[::2]} | {"d0": 1} for q in range(50)
    }
    run: dict[str, dict[str, float]] = {q: {each: float(rng.integers(-4, 4)) / 3 for each in documents} for q in grades}
    found = pytrec_eval.RelevanceEvaluator(grades, {"ndcg_cut.10", "recall.10", "map_cut.10"}).evaluate(run)
    ranked = best_of(run, 7)
    for query, own in grades.items():
        for kind in ("ndcg", "recall", "map"):
            value = Measure(kind, 10).value(ranked[query], own)
            assert value == pytest.approx(found[query][f"{NAMES[kind]}10"], abs=1e-9)


def test_final_scores_rank_the_best_by_first_scores() -> None:
    """Rescoring: only documents among the best by the first scores are ranked by the final ones."""
    best = Best(1, 2)
    best.add(np.array([[3.0, 1.0]], np.float32), 0, np.array([[0.1, 9.0]], np.float32))
    best.add(np.array([[2.0, -0.0]], np.float32), 2, np.array([[0.2, 8.0]], np.float32))
    numbers_QK, scores_QK = best.ranked(10)
    assert numbers_QK.tolist() == [[2, 0]]
    assert scores_QK.tolist() == [[pytest.approx(0.2), pytest.approx(0.1)]]


def test_intervals_are_the_same_each_time_and_hold_the_mean() -> None:
    rng = np.random.default_rng(3)
    values_QC = rng.random((300, 2))
    means_DC = draw_means(values_QC)
    np.testing.assert_array_equal(means_DC, draw_means(values_QC))
    found = interval_of(values_QC[:, 0], means_DC[:, 0])
    assert found.low < found.value < found.high
    spread = values_QC[:, 0].std() / np.sqrt(300)  # of a mean, by the central limit theorem
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.05)
    same = interval_of(values_QC[:, 0] - values_QC[:, 0], means_DC[:, 0] - means_DC[:, 0])
    assert (same.value, same.low, same.high) == (0, 0, 0)


def ragged(rng: np.random.Generator, lengths: list[int], width: int = 16) -> Ragged:
    """Random token vectors of norm 1."""
    rows = rng.normal(size=(sum(lengths), width)).astype(np.float32)
    return Ragged(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.cumsum([0, *lengths]))


def test_dense_forms_are_their_formulas() -> None:
    rng = np.random.default_rng(1)
    queries, block = (rng.normal(size=(n, 13)).astype(np.float32) for n in (4, 9))
    unit, others = forms.normalized(queries), forms.normalized(block)
    expected: dict[str, Any] = {
        "cosine": unit @ others.T,
        "dot": queries @ block.T,
        "euclidean": -np.linalg.norm(queries[:, None] - block[None], axis=2),
        "manhattan": -np.abs(queries[:, None] - block[None]).sum(axis=2),
    }
    for similarity, scores in expected.items():
        form = forms.dense_form(queries, similarity)
        np.testing.assert_allclose(form.score(form.store(block)), scores, atol=1e-5)
    codes = forms.dense_form(queries, "cosine", "int8")
    assert codes.store(block).dtype == np.int8
    np.testing.assert_allclose(
        codes.score(codes.store(block)), unit @ forms.normalized(to_int8(block).astype(np.float32)).T, atol=1e-6
    )
    bits = forms.dense_form(queries, "cosine", "binary")
    assert bits.store(block).nbytes == 9 * 2
    hamming = np.bitwise_count(to_bits(queries)[:, None] ^ to_bits(block)[None]).sum(axis=2)
    np.testing.assert_array_equal(bits.score(bits.store(block)), 13 - 2 * hamming.astype(np.float32))


@pytest.mark.parametrize(
    ("similarity", "words"), [("dot", "dot product of vectors of any length"), ("euclidean", "euclidean distance")]
)
def test_fewer_bits_are_refused_where_lengths_matter(similarity: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        forms.dense_form(np.full((2, 8), 3, np.float32), similarity, "binary")


def test_late_and_sparse_forms_are_their_formulas() -> None:
    """A document or query without tokens has the score 0."""
    rng = np.random.default_rng(2)
    queries, block = ragged(rng, [3, 0, 5]), ragged(rng, [2, 7, 0, 1])
    for similarity in ("maxsim", "meanmaxsim"):
        form = forms.late_form(queries, similarity)
        found = form.score(form.store(block))
        for q in range(3):
            for d in range(4):
                maxima = (queries[q] @ block[d].T).max(axis=1, initial=-np.inf) if len(block[d]) else np.zeros(len(queries[q]))
                score = (maxima.mean() if similarity == "meanmaxsim" else maxima.sum()) if len(queries[q]) else 0
                assert found[q, d] == pytest.approx(score, abs=1e-5)
    muvera = forms.muvera_form(ragged(rng, [3, 5]))
    filled = ragged(rng, [4, 6])
    encoded = encode_muvera(filled, MuveraParameters(), "document")
    assert muvera.store(filled).tobytes() == encoded.tobytes()
    found = muvera.store(Ragged(filled.rows_XD, np.array([0, 4, 4, 10])))
    assert found[[0, 2]].tobytes() == encoded.tobytes()
    assert not found[1].any()
    few = Sparse(np.array([0, 3, 1], np.int32), np.array([1, 2, 4], np.float32), np.array([0, 2, 2, 3]))
    many = Sparse(np.array([3, 9, 0, 1], np.int32), np.array([0.5, 7, 1, 1], np.float32), np.array([0, 2, 2, 4]))
    form = forms.sparse_form(few)
    assert form.score(form.store(many)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 4]]


def test_variants_are_read_and_written() -> None:
    text = "float32,int8,bfloat16+dim:64+binary+rescore:50,pooled:2,muvera+rescore:100,int8-vectors"
    assert ",".join(map(str, read_variants(text))) == text
    assert read_variants(None) == (Variant(),)
    assert read_variants("binary,int8", "bfloat16") == (Variant("bfloat16", "binary"), Variant("int8"))
    assert [each.label for each in read_measures("nDCG@10, recall@5,ndcg@10")] == ["nDCG@10", "recall@5"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("float33", "'float33' in 'float33' is not known"),
        ("dim:0", "'dim:0' has no number from 1 on"),
        ("dim", "'dim' has no number"),
        ("pooled:nan", "'pooled:nan' has no number"),
        ("float32,,int8", "has an empty variant"),
        ("int8+float32", "says the dtype twice"),
        ("rescore:10", "ranks by vectors in full already"),
        ("muvera+binary", "encodings of MUVERA have lengths"),
    ],
)
def test_variants_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        read_variants(text)


@pytest.mark.parametrize("text", ["ndcg", "ndcg@0", "ndcg@10001", "bpref@10", "ndcg@-1", ""])
def test_measures_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"no measure|names none"):
        read_measures(text)


FILES = {
    "q.jsonl": '{"_id": "q1", "text": "Which bird?"}\n\n{"_id": "q2", "text": "What to eat?"}\n{"_id": "q3", "text": "?"}\n',
    "q.tsv": "q1\tWhich bird?\nq2\tWhat to eat?\nq3\t?\n",
    "q.csv": 'qid,query\nq1,"Which bird?"\nq2,What to eat?\nq3,?\n',
    "d.jsonl": '{"_id": "a", "title": "Food", "text": "A sandwich."}\n{"_id": "b", "title": "", "text": "A wader."}\n',
    "d.tsv": "id\ttitle\ttext\na\tFood\tA sandwich.\nb\t\tA wader.\n",
    "d.csv": 'docid,contents,title\na,A sandwich.,Food\nb,"A wader.",\n',
    "r.tsv": "query-id\tcorpus-id\tscore\nq1\tb\t2\nq2\ta\t1\nq3\ta\t0\n",
    "r.qrels": "q1 0 b 2\nq2 0 a 1\nq3 0 a 0\n",
    "r.csv": "q1,b,2\nq2,a,1\nq3,a,0\n",
    "r.jsonl": '{"query-id": "q1", "corpus-id": "b", "score": 2}\n{"query-id": "q2", "corpus-id": "a", "score": 1}\n',
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("queries", ["q.jsonl", "q.tsv", "q.csv"])
@pytest.mark.parametrize("documents", ["d.jsonl", "d.tsv", "d.csv"])
@pytest.mark.parametrize("judgements", ["r.tsv", "r.qrels", "r.csv", "r.jsonl"])
def test_every_format_gives_the_same_collection(queries: str, documents: str, judgements: str, files: Path) -> None:
    found = read_collection(files / queries, files / documents, files / judgements)
    assert found.queries.ids == ("q1", "q2")
    assert found.documents.ids == ("b", "a")
    assert found.documents.texts == ("A wader.", "Food A sandwich.")
    assert found.judgements["q1"] == {"b": 2}
    assert found.notes == ("queries without a relevant document, which are left out: 1 of 3",)


@pytest.mark.parametrize(
    ("documents", "judgements"),
    [
        ('{"_id": 0, "text": "A"}\n', '{"query-id": "q1", "corpus-id": 0, "score": 1.0}\n'),
        (
            '{"id": 5, "_id": "0", "query": "B", "text": "A"}\n',
            '{"corpus-id": 0, "query": "B", "query-id": "q1", "score": 1}\n',
        ),
    ],
)
def test_ids_and_grades_may_be_numbers_and_other_columns_are_passed_over(documents: str, judgements: str, files: Path) -> None:
    (files / "d.jsonl").write_text(documents)
    (files / "r.jsonl").write_text(judgements)
    found = read_collection(files / "q.jsonl", files / "d.jsonl", files / "r.jsonl")
    assert found.documents == Texts(("0",), ("A",))
    assert found.judgements == {"q1": {"0": 1}}


def test_ids_of_tables_may_have_spaces(files: Path) -> None:
    """Three columns between tabs are no judgements of TREC, though they have four words."""
    (files / "d.tsv").write_text("docno\ttext\na b\tA\n")
    (files / "r.tsv").write_text("q1\ta b\t1\n")
    assert read_collection(files / "q.jsonl", files / "d.tsv", files / "r.tsv").judgements == {"q1": {"a b": 1}}


def test_a_folder_in_beirs_layout(files: Path) -> None:
    """The files of a folder are found by their names; they may be compressed."""
    folder = files / "data"
    (folder / "qrels").mkdir(parents=True)
    (folder / "queries.jsonl").write_text(FILES["q.jsonl"])
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(FILES["d.jsonl"].encode()))
    (folder / "qrels/dev.tsv").write_text(FILES["r.tsv"])
    assert read_collection(*find_files(folder, "dev")).queries.ids == ("q1", "q2")
    with pytest.raises(SetupError, match=r"has no qrels/test\.tsv"):
        find_files(folder, "test")
    with pytest.raises(SetupError, match="is no folder"):
        find_files(files / "none", "test")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("q.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q1", "text": "b"}\n', r"q\.jsonl, line 2: the id 'q1' is that of line 1 too"),
        ("q.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q2"', r"q\.jsonl, line 2: no JSON object"),
        ("q.jsonl", "[1]\n", "line 1: no JSON object"),
        ("q.jsonl", '{"text": "a"}\n', "line 1: no id"),
        ("q.jsonl", '{"_id": "q1", "text": 3}\n', "line 1: 'q1' has no text"),
        ("q.jsonl", "\n \n", r"q\.jsonl has no texts"),
        ("q.jsonl", b'{"_id": "q1", "text": "a\xff"}\n', "no valid UTF-8"),
        ("d.tsv", "id\ttitle\ttext\na\tFood\n", r"d\.tsv, line 2: columns: 2; there should be 3"),
        ("d.csv", 'docid,contents\na,"A sand\n', "line 2: no row of a table"),
        ("r.tsv", "q1\tb\tgood\n", "the grade 'good' is no whole number"),
        ("r.tsv", "q1\tb\t1\nq1\tb\t2\n", "line 2: query 'q1' and document 'b' have the grade 1 above, here 2"),
        ("r.tsv", "q1\tz\t1\nq2\ty\t1\n", r"calls document 'z' relevant for query 'q1', but there is no such document \(2 such"),
        ("r.tsv", "x\ta\t1\n", "has a relevant document for none of the 3 queries."),
        ("r.tsv", "q1\ta\t0\n", "has a relevant document for none of the 3 queries"),
        ("r.tsv", "q1\ta\t1_0\n", "the grade '1_0' is no whole number"),
        ("q.tsv", "number\tquery\nq1\ta\n", "line 1: names of columns, but of none that is the id: number, query"),
        ("r.tsv", "", r"r\.tsv has no judgements"),
        ("r.tsv", "\ta\t1\n", "no id of a query"),
        ("r.qrels", "q1 0 b 2\nq2 0 a\n", "line 2: columns: 3; judgements of TREC have 4"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused_with_their_line(name: str, text: str | bytes, words: str, files: Path) -> None:
    (files / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    chosen = {"q": "q.jsonl", "d": "d.jsonl", "r": "r.tsv", name[0]: name}
    with pytest.raises(SetupError, match=words):
        read_collection(files / chosen["q"], files / chosen["d"], files / chosen["r"])


def test_missing_files_and_folders_are_refused(files: Path) -> None:
    for place, words in ((files / "none", "cannot read"), (files, "is a folder")):
        with pytest.raises(SetupError, match=words):
            read_collection(place, files / "d.jsonl", files / "r.tsv")


def test_missing_documents_may_count_as_never_found(files: Path) -> None:
    (files / "r.tsv").write_text("q1\tb\t1\nq1\tgone\t1\nother\ta\t1\n")
    found = read_collection(files / "q.jsonl", files / "d.jsonl", files / "r.tsv", incomplete=True)
    assert Measure("recall", 10).value(["b", "a"], found.judgements["q1"]) == 0.5
    assert found.notes[0] == "judgements of documents that are missing, which count as never found: 1"
    assert found.notes[1] == "judged queries that are not among the queries: 1, for example 'other'"


def test_runs_of_trec(files: Path) -> None:
    """Scores order a run, ranks do not. Queries without judgements are passed over."""
    collection = read_collection(files / "q.jsonl", files / "d.jsonl", files / "r.tsv")
    run = files / "a.run"
    run.write_text("q1 Q0 a 1 0.5 x\nq1 Q0 b 2 0.5 x\nq3 Q0 zzz 1 1 x\n")
    ranks, notes = read_run(run, collection, 10)
    assert ranks == {"q1": ["b", "a"], "q2": []}
    assert notes == ("queries without documents in a.run, which count as 0: 1",)
    for text, words in (
        ("q1 Q0 a 1 0.5\n", "line 1: columns: 5; a run of TREC has 6"),
        ("q1 Q0 z 1 0.5 x\n", "line 1: there is no document 'z'"),
        ("q1 Q0 a 1 nan x\n", "the score 'nan' is no number"),
        ("q1 Q0 a 1 1 x\nq1 Q0 a 2 1 x\n", "line 2: query 'q1' has document 'a' above too"),
        ("q9 Q0 a 1 1 x\n", "for none of the judged queries"),
    ):
        run.write_text(text)
        with pytest.raises(SetupError, match=words):
            read_run(run, collection, 10)


def collection_of(count: int) -> Collection:
    """Queries of which each has one relevant document."""
    texts = {f"{i}": f"text {i} <b>" for i in range(count)}
    return make_collection(texts, texts, {each: {each: 1} for each in texts}, source="made")


def test_reports_tell_which_queries_got_worse() -> None:
    """The second system loses a query of four, the third all: the interval of that difference does not hold 0."""
    collection = collection_of(20)
    ids = collection.queries.ids
    right = {each: [each] for each in ids}
    wrong = {each: ["none", each] for each in ids}
    systems = [
        System("one", "m", right, 8),
        System("two", "m", {**right, "3": wrong["3"]}, 4.0),
        System("three", "m", wrong, None),
    ]
    report = make_report(collection, read_measures("ndcg@10,mrr@10"), systems)
    assert [own[1].value for own in report.intervals] == [1, pytest.approx(1 - 0.5 / 20), 0.5]
    two, three = report.differences
    assert (two.better, two.worse, two.same) == (0, 1, 19)
    assert [ids[query] for query in two.worst] == ["3"]
    assert not two.interval.excludes_zero
    assert three.interval.excludes_zero
    assert three.interval.value == pytest.approx(1 / np.log2(3) - 1)
    text, record, page = to_text(report), to_json(report), to_page(report)
    assert "two and one: queries that differ by nDCG@10: 1, too few to show which is better." in text
    assert "three is worse than one by nDCG@10." in text
    assert record["differences"][0]["worst_query_ids"] == ["3"]
    assert record["systems"][1]["values"]["MRR@10"][3] == 0.5
    assert "text 3 &lt;b&gt;" in page
    assert "<svg" in page
    for fetched in ("<script", "<link", "src=", 'href="http', "@import"):
        assert fetched not in page


def test_few_queries_show_no_difference() -> None:
    """An interval over five queries is not believed, even where all of them agree."""
    for count, words in (
        (5, "queries that differ by MRR@10: 5, too few to show which is better"),
        (6, "b is worse than a by MRR@10"),
    ):
        collection = collection_of(count)
        ids = collection.queries.ids
        systems = [System("a", "m", {each: [each] for each in ids}, 8), System("b", "m", {each: [] for each in ids}, 8)]
        report = make_report(collection, read_measures("mrr@10"), systems)
        assert words in verdict(report)[0]
        assert facts(report)["a, b"] == "m"


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.42, 0.61, ["0.40", "0.45", "0.50", "0.55", "0.60", "0.65"]),
        (-0.031, 0.022, ["-0.04", "-0.02", "0.00", "+0.02", "+0.04"]),
        (0.5, 0.5, ["0.500", "0.502"]),
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_pictures_have_round_scales(low: float, high: float, labels: list[str]) -> None:
    picture = intervals_part("<b>", [("<i>", Interval((low + high) / 2, low, high))], "+" if low < 0 else "")
    assert re.findall(r">([-+]?[0-9.]+)</text>", picture) == labels
    assert "<b>" not in picture
    assert "<i>" not in picture
    assert all(0 <= float(each) <= 100 for each in re.findall(r'="([-0-9.]+)%"', picture))


def test_models_are_told_apart() -> None:
    assert display_names(["a/x", "b/y", None]) == ["x", "y", "all-MiniLM-L6-v2"]
    assert display_names(["a/x", "b/x"]) == ["a/x", "b/x"]
    with pytest.raises(SetupError, match="a model is named twice"):
        display_names(["a/x", "a/x"])
