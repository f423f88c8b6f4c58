"""Numbers and text of results: against numpy, against vLLM's lines and keys, and pictures that fetch nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from whimbrel.errors import SetupError
from whimbrel_bench import picture
from whimbrel_bench.backends import Sample
from whimbrel_bench.cli.output import command_line
from whimbrel_bench.compare import ratio_of_medians
from whimbrel_bench.load import Outcome, Report
from whimbrel_bench.offline import cosines
from whimbrel_bench.options import Load, read_rate, read_rates
from whimbrel_bench.results import Result, Setting, block, judge_client, make_result, markdown, remarks, to_json
from whimbrel_bench.target import arrival_times

SAMPLES = [Sample(("a", "b"), num_tokens=10), Sample(("c",), num_tokens=5)]


def setting(*, server: str = "ours", **changes: object) -> Setting:
    """Return a setting of a run."""
    load = Load(**{"rate": 20.0, "concurrency": 8, "percentiles": (50.0, 99.0, 99.9), **changes})  # pyright: ignore[reportArgumentType]
    return Setting(server, "openai-embeddings", "m/x", "m/x", 3, load)


def report(
    latencies: list[float], *, errors: Mapping[int, str] | None = None, tokens: Sequence[int] = (), **changes: object
) -> Report:
    """Return a report of requests that were due every 10 ms."""
    outcomes = [
        Outcome(
            i % 2,
            0.01 * i,
            0.01 * i + 0.001,
            0.01 * i + latency,
            200,
            100,
            tokens[i] if tokens else 7,
            (errors or {}).get(i, ""),
        )
        for i, latency in enumerate(latencies)
    ]
    return Report(outcomes, **{"lag": [0.001, 0.002], **changes})  # pyright: ignore[reportArgumentType]


def example() -> Result:
    """Return a result of 1,001 latencies in two reports, one of which failed."""
    rng = np.random.default_rng(1)
    values = rng.gamma(2.0, 0.05, 1001).tolist()
    return make_result(setting(), SAMPLES, [report(values[:500]), report(values[500:], errors={3: "HTTP 500: no"})])


def test_statistics_are_numpys() -> None:
    result = example()
    values = np.random.default_rng(1).gamma(2.0, 0.05, 1001)
    values = np.delete(values, 503)
    ms = result.milliseconds()
    assert np.allclose(np.sort(result.latencies), np.sort(values))
    assert ms["mean_e2el_ms"] == pytest.approx(1000 * values.mean())
    assert ms["std_e2el_ms"] == pytest.approx(1000 * values.std())
    assert ms["median_e2el_ms"] == ms["p50_e2el_ms"] == pytest.approx(1000 * np.median(values))
    assert ms["p99.9_e2el_ms"] == pytest.approx(1000 * np.percentile(values, 99.9))
    assert (result.completed, result.failed, result.total_input) == (1000, 1, 7000)
    assert result.duration >= 5.0  # the last was due then


GOLDEN = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         1         
Maximum request concurrency:             8         
Request rate configured (RPS):           20.00     
Benchmark duration (s):                  0.50      
Total input tokens:                      14        
Request throughput (req/s):              4.00      
Input throughput (inputs/s):             6.00      
Total token throughput (tok/s):          28.00     
----------------End-to-end Latency----------------
Mean E2EL (ms):                          300.00    
Median E2EL (ms):                        300.00    
P50 E2EL (ms):                           300.00    
P99 E2EL (ms):                           398.00    
P99.9 E2EL (ms):                         399.80    
=================================================="""  # noqa: W291


def three() -> Report:
    """Return three requests of 200 and 400 ms, and one that failed."""
    outcomes = [
        Outcome(0, 0.0, 0.0, 0.2, 200, 1, 7), Outcome(1, 0.1, 0.1, 0.5, 200, 1, 7),
        Outcome(0, 0.2, 0.2, 0.3, 500, 1, -1, "HTTP 500: no"),
    ]  # fmt: skip
    return Report(outcomes, lag=[0.0])


def test_the_block_is_vllms_to_the_letter() -> None:
    assert block(make_result(setting(), SAMPLES, [three()])) == GOLDEN
    plain = block(make_result(setting(concurrency=None, rate=float("inf"), percentiles=(99.0,)), SAMPLES, [three()]))
    lines = GOLDEN.splitlines()
    assert plain.splitlines() == [line for line in lines if not re.match(r"Maximum|Request rate|P50|P99\.9", line)]


def test_the_json_has_vllms_keys() -> None:
    result = make_result(setting(percentiles=(99.0,)), SAMPLES, [three()])
    keys = """
        date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed
        total_input_tokens total_input_sequences request_throughput input_sequence_throughput total_token_throughput mean_e2el_ms
        median_e2el_ms std_e2el_ms p99_e2el_ms
    """.split()
    record = to_json(result, date="20260101-000000")
    assert set(record) == {*keys, "whimbrel"}
    detailed = to_json(result, date="20260101-000000", detailed=True, metadata={"version": "1"})
    assert set(detailed) == {*keys, "whimbrel", "input_lens", "latencies", "queue_times", "errors", "version"}
    assert detailed["errors"] == ["", "", "HTTP 500: no"]
    assert detailed["latencies"] == pytest.approx([0.2, 0.4, 0.1])
    assert to_json(make_result(setting(rate=float("inf")), SAMPLES, [three()]), date="")["request_rate"] == "inf"
    json.dumps(detailed)


def test_remarks_say_what_the_block_does_not() -> None:
    good = make_result(setting(), SAMPLES, [report([0.1, 0.1])])
    assert remarks(good) == []
    busy = make_result(setting(), SAMPLES, [report([0.1, 0.1], cpu_share=0.97)])
    assert "Use --client-processes 2." in remarks(busy)[0]
    late = make_result(setting(), SAMPLES, [report([0.1, 0.1], lag=[0.0] * 50 + [0.5] * 50)])
    assert "500 ms late" in remarks(late)[0]
    assert "other cores" in remarks(late)[0]
    counted = make_result(setting(), SAMPLES, [report([0.1, 0.1], tokens=[-1, 7])])
    assert counted.total_input == 10 + 7
    assert "server and client" in remarks(counted)[0]
    stopped = make_result(setting(), SAMPLES, [report([0.1], interrupted=True, unfinished=4)])
    assert "4 requests" in remarks(stopped)[0]
    assert remarks(make_result(setting(), SAMPLES, [three()]))[-2:] == [
        "Failed, 1 of 1: HTTP 500: no",
        "To do: see the server's log.",
    ]
    many = report([0.1] * 30, errors={place: f"reason {'abcdefghijklmno'[place % 15]}" for place in range(30)})
    assert "Failed, 10 of 30: 5 other reasons" in remarks(make_result(setting(), SAMPLES * 30, [many]))[-1]


def test_failures_are_grouped_by_their_code() -> None:
    full = 'HTTP 429: {"error":{"message":"%s tokens wait already","type":"overloaded","code":"overloaded"}}'
    gone = 'HTTP 429: {"error":"%s requests of this connection wait","error_type":"too_many"}'
    reasons = [full % "1,234", full % "5", gone % "9", "no answer within 600 s", "no answer within 601.5 s", full % "77"]
    failed = report([0.1] * 6, errors=dict(enumerate(reasons)))
    lines = remarks(make_result(setting(), SAMPLES * 6, [failed]))
    assert [line for line in lines if line.startswith("Failed")] == [
        f"Failed, 3 of 6: {full % '1,234'}",
        "Failed, 2 of 6: no answer within 600 s",
        f"Failed, 1 of 6: {gone % '9'}",
    ]


def test_a_client_is_judged_by_its_own_clock_and_processor() -> None:
    assert not judge_client([Report(lag=[0.009], cpu_share=0.5)], 0.001).was_limit
    assert judge_client([Report(lag=[0.02], cpu_share=0.5)], 0.05).was_limit
    assert not judge_client([Report(lag=[0.02], cpu_share=0.5)], 0.5).was_limit, "a tenth of the latency is no matter"
    assert judge_client([Report(lag=[0.0]), Report(cpu_share=0.95)], 1.0).was_limit


def test_nothing_that_was_answered_is_a_result_too() -> None:
    empty = make_result(setting(), SAMPLES, [Report()])
    assert empty.completed == 0
    assert empty.milliseconds()["p99_e2el_ms"] == 0.0
    assert "Successful requests:                     0" in block(empty)


# Arrivals


def test_arrivals_are_poisson_at_exactly_the_rate() -> None:
    times = arrival_times(20_000, 50.0, seed=3)
    assert times is not None
    assert times[-1] == pytest.approx(20_000 / 50.0)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # of an exponential distribution
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 50, rel=0.05)
    assert times == arrival_times(20_000, 50.0, seed=3)
    assert times != arrival_times(20_000, 50.0, seed=4)


def test_burstiness_and_the_infinite_rate() -> None:
    even, bursty = (np.diff(arrival_times(5000, 10.0, burstiness=each) or []) for each in (100.0, 0.2))
    assert even.std() < 0.2 * even.mean()
    assert bursty.std() > 1.5 * bursty.mean()
    assert arrival_times(4, 2.0, burstiness=float("inf")) == [0.5, 1.0, 1.5, 2.0]
    assert arrival_times(4, float("inf")) is None
    assert read_rate("inf") == float("inf")
    for bad in ("0", "-1", "nan", "fast"):
        with pytest.raises(SetupError, match="sends nothing"):
            read_rate(bad)


# Comparison


def test_the_interval_of_a_ratio_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        a, b = rng.normal(1.2, 0.05, 30), rng.normal(1.0, 0.05, 30)
        ratio = ratio_of_medians(a.tolist(), b.tolist())
        assert ratio.low <= ratio.value <= ratio.high
        covered += ratio.low <= 1.2 <= ratio.high
    assert covered >= 51  # of 60, at 95 %
    assert not ratio_of_medians([1.0, 1.1, 0.9] * 5, [1.0, 0.9, 1.1] * 5).shows_difference
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        ratio_of_medians([1.0, 2.0], [1.0])


def test_a_load_on_both_sides_does_not_widen_the_interval() -> None:
    drift = np.linspace(1, 3, 20)
    ratio = ratio_of_medians((1.5 * drift).tolist(), drift.tolist())
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_cosines_of_vectors_token_vectors_and_scores() -> None:
    a, b = np.array([1.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32)
    assert cosines([a, a], [a, b]) == pytest.approx([1.0, 0.5**0.5])
    assert cosines([np.stack([a, a])], [np.stack([a, b])]) == pytest.approx([0.5**0.5])
    assert cosines([np.zeros(2, np.float32)], [np.zeros(2, np.float32)]) == pytest.approx([1.0])
    scores = [np.array(each, np.float32) for each in (1.0, 2.0, 3.0)]
    assert cosines(scores, scores).size == 1
    with pytest.raises(SetupError, match=r"text 0 has shape \[2\] on one side, \[3\]"):
        cosines([a], [np.zeros(3, np.float32)])
    with pytest.raises(SetupError, match="1 results, the other 2"):
        cosines([a], [a, a])


# Pictures


def sweep_results() -> list[Result]:
    """Return results of two servers at three rates."""
    found = []
    for server, slow in (("ours", 1.0), ("a <b> & c", 3.0)):
        for rate in (5.0, 50.0, float("inf")):
            change = setting(rate=rate, server=server, percentiles=(50.0, 99.0))
            found.append(make_result(change, SAMPLES, [report([0.01 * slow * each for each in range(1, 50)])]))
    return found


class Fetches(HTMLParser):
    """Attributes and elements by which a page fetches something."""

    found: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.found.append(tag)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    picture.draw(path, sweep_results(), {"model": "m", "machine": "two <cores>"})
    page = path.read_text(encoding="utf-8")
    parser = Fetches()
    parser.found = []
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"url\(|@import|https?://", re.sub(r"http://www\.w3\.org/\d+/\w+|url\(#", "", page))
    assert "a &lt;b&gt; &amp; c" in page
    assert "two &lt;cores&gt;" in page
    assert page.count("<tr>") == 7
    assert page.count('id="line2d_') >= 4, "a line for the median and one for the percentile of each server"


def test_png(tmp_path: Path) -> None:
    picture.draw(tmp_path / "sweep.png", sweep_results(), {"model": "m"})
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_that_cannot_be_drawn_are_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("a.gif", r"cannot draw \.gif"), ("a", "cannot draw a")):
        with pytest.raises(SetupError, match=words):
            picture.check_path(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(SetupError, match="needs matplotlib"):
        picture.check_path(tmp_path / "a.png")
    with pytest.raises(SetupError, match="no request was answered"):
        picture.draw(tmp_path / "a.svg", [make_result(setting(), SAMPLES, [Report()])], {})


def test_markdown_has_a_row_per_run() -> None:
    lines = markdown(sweep_results()).splitlines()
    assert len(lines) == 8
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[1].strip() == "ours"


def test_rates_of_a_sweep() -> None:
    assert read_rates("20, 5,inf,5") == [5.0, 20.0, float("inf")]
    with pytest.raises(SetupError):
        read_rates(" , ")
    with pytest.raises(SetupError):
        read_rates("1,0")


def test_keys_are_not_written_into_results() -> None:
    shown = command_line(["bench", "serve", "--api-key", "secret", "--header=a=secret", "--label", "two words"])
    assert "secret" not in shown
    assert shown == "whimbrel bench serve --api-key ... --header=... --label 'two words'"
