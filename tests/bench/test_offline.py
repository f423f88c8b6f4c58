"""The engine's own benchmark: its counts, the peak that it compares with, and dtypes side by side."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.encoders import SIZES, write_bert
from checkpoints.sentence_layout import sentence_layout
from whimbrel import Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import SetupError, WhimbrelError
from whimbrel.model.ops.peak import measure_peak
from whimbrel_bench.cli.offline import report
from whimbrel_bench.compare import Contender, check_same, compare, engine_contenders
from whimbrel_bench.datasets import DatasetOptions, make_samples
from whimbrel_bench.offline import OfflineOptions, compared, flops_per_token, measure, run_offline, to_json
from whimbrel_bench.words import local_words


def options(model: str | None = None, **changes: int) -> OfflineOptions:
    """Return a short run."""
    return OfflineOptions(model, DatasetOptions(num_prompts=8, input_len=16, batch_size=4), **{"rounds": 2, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.bfloat16
def test_dtypes_side_by_side() -> None:
    results = [result for dtype in ("float32", "bfloat16") if (result := run_offline(options(), dtype))]
    assert [each.dtype for each in results] == ["float32", "bfloat16"]
    for each in results:
        assert each.tokens == 8 * 16
        assert each.requests == 4
        assert len(each.round_seconds) == 2
        assert each.stage_seconds["compute"] > 0
        assert each.stage_seconds["tokenize"] > 0
        assert each.peak_rss_bytes >= each.loaded_rss_bytes > 50e6
        assert each.share_of_peak is not None
        assert 0 < each.share_of_peak < 1.5
    ((one, other, lowest, mean),) = compared(results)
    assert (one, other) == ("float32", "bfloat16")
    texts = [
        text for sample in make_samples(DatasetOptions(num_prompts=8, input_len=16), local_words(None)) for text in sample.texts
    ]
    vectors = []
    for dtype in ("float32", "bfloat16"):
        with Engine(dtype=dtype) as engine:
            vectors.append(engine.embed(texts).astype(np.float64))
    expected = (vectors[0] * vectors[1]).sum(1) / np.linalg.norm(vectors[0], axis=1) / np.linalg.norm(vectors[1], axis=1)
    assert lowest == pytest.approx(expected.min(), abs=1e-6)
    assert mean == pytest.approx(expected.mean(), abs=1e-6)
    text = report(results)
    assert "float32" in text
    assert f"lowest {lowest:.6f}" in text
    assert to_json(results)["cosines"][0]["dtype"] == "float32"


def test_arithmetic_is_counted_from_the_layers(tmp_path: Path) -> None:
    """A layer of BERT has four square products and two with the inner width. Tables and the pooler are not products of tokens."""
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    hidden, inner, layers = (SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    card = read_card(tmp_path, "m")
    assert flops_per_token(tmp_path, card) == 2 * layers * (4 * hidden * hidden + 2 * hidden * inner)


def test_the_peak_is_a_rate_of_arithmetic() -> None:
    """Two lanes are not slower than half of one, and a plain product of this size is not much faster than the peak."""
    one = measure_peak("float32", "cpu", 1, seconds=0.1)
    assert one > 1e9
    size = 512
    x = torch.randn(size, size)
    assert measure_peak("float32", "cpu", 2, seconds=0.1) > 0.4 * one
    assert torch.isfinite(x @ x).all()


def test_ctrl_c_leaves_the_rounds_before() -> None:
    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    result = run_offline(options(rounds=10_000), "float32", on_round=stop)
    assert result is not None
    assert (result.interrupted, len(result.round_seconds), result.requests) == (True, 2, 4)


def test_a_reranker_runs_pairs_and_a_failure_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        run_offline(options(str(tmp_path)), "float32")


def test_engines_are_compared_in_turns() -> None:
    samples = make_samples(DatasetOptions(num_prompts=6, input_len=12), local_words(None))
    with engine_contenders([(None, "float32")] * 2, "cpu", samples, num_checked=4) as (one, other):
        assert check_same(one, other, 0.9999) == (pytest.approx(1.0), 4)
        order: list[int] = []
        first = one._replace(round=lambda: order.append(0) or 1.0)
        second = other._replace(round=lambda: order.append(1) or 2.0)
        found = compare(first, second, rounds=4, threshold=0.9999)
    assert order == [0, 1, 0, 1, 1, 0, 0, 1, 1, 0], "warm-up, then who begins alternates"
    assert found.rounds == ([1.0] * 4, [2.0] * 4)
    assert tuple(found.ratio) == (0.5, 0.5, 0.5)


def test_an_engine_measures_in_this_process_too() -> None:
    *each, result = measure(options(rounds=2), "float32")
    assert result.output == "dense"
    assert len(result.vectors) == 8
    assert not result.interrupted
    assert [(one.interrupted, one.requests, one.peak_flops_per_second) for one in each] == [(True, 2, None), (True, 4, None)]
    assert "2 rounds (2 of float32: stopped early)" in report([each[-1]])
    assert "not measured" in report([each[-1]])
    assert to_json([each[-1]])["runs"][0]["share_of_peak"] is None


def side(name: str, failure: BaseException | None = None) -> Contender:
    """Return a contender whose third round fails."""
    number = count(1)

    def run() -> float:
        if failure is not None and next(number) == 3:
            raise failure
        return 1.0

    return Contender(name, lambda: [np.ones(2, np.float32)], run)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), WhimbrelError("it broke.")], ids=["Ctrl-C", "failure"])
def test_a_comparison_that_ends_early_keeps_its_rounds(failure: BaseException) -> None:
    found = compare(side("a"), side("b", failure), rounds=9, threshold=0.9)
    assert found.rounds == ([1.0], [1.0])
    assert (found.interrupted, found.failure) == (isinstance(failure, KeyboardInterrupt), getattr(failure, "message", ""))
    failing = side("b", failure)
    failing.round()
    with pytest.raises(type(failure)):
        compare(side("a"), failing, rounds=9, threshold=0.9)
