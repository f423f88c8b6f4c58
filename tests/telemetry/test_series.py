"""Series in files, and their page, read by Prometheus' own client."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from whimbrel.telemetry.prometheus_text import Family, content_type, render
from whimbrel.telemetry.series import Key, Series, SeriesFile, add_up

KEYS: list[Key] = [(f"name_{i}", "route " * 20, str(i)) for i in range(5000)]
"""More than one segment has room for."""
FAMILIES = (
    Family("some_total", "counter", "Some.", ("route", "model")),
    Family("now", "gauge", "Now.", ("model",)),
    Family("seconds", "histogram", "Seconds.", ("model",), (0.5, 1, 2)),
)
MODELS = ("m", 'a "b"', "a\\b", "a\nb", "ä{}=,", "")
OBSERVED = (0.1, 0.5, 0.500001, 2, 3, 1e9)


def test_files_grow_and_are_continued(tmp_path: Path) -> None:
    for _ in range(2):
        file = SeriesFile(tmp_path / "one")
        for i, key in enumerate(KEYS):
            Series(file.values(key, 1)).add(i)
    other = SeriesFile(tmp_path / "other")
    Series(other.values(KEYS[7], 1)).add(0.5)
    sums = add_up([*tmp_path.iterdir(), tmp_path / "gone"])
    assert sums == {key: [2.0 * i + 0.5 * (i == 7)] for i, key in enumerate(KEYS)}
    assert (tmp_path / "one").stat().st_size > (tmp_path / "other").stat().st_size
    assert {key: list(values) for key, values in SeriesFile(tmp_path / "one").all().items()} == {
        key: [2.0 * i] for i, key in enumerate(KEYS)
    }


def test_a_segment_that_was_not_reserved_in_full_is_made_again(tmp_path: Path) -> None:
    Series(SeriesFile(tmp_path / "one").values(("a",), 1)).add(3)
    with (tmp_path / "one").open("ab") as stream:
        stream.write(bytes(5000))
    assert add_up(tmp_path.iterdir()) == {("a",): [3.0]}
    file = SeriesFile(tmp_path / "one")
    for key in KEYS:
        Series(file.values(key, 1)).add()
    assert add_up(tmp_path.iterdir()) == {("a",): [3.0]} | {key: [1.0] for key in KEYS}


def test_a_full_disk_loses_new_series_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SeriesFile(tmp_path / "one")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        for key in KEYS:
            Series(file.values(key, 1)).add()
    on_disk = add_up(tmp_path.iterdir())
    assert 1000 < len(on_disk) < len(KEYS)
    assert set(map(tuple, on_disk.values())) == {(2.0,)}
    with pytest.raises(OSError, match="No space"):
        SeriesFile(tmp_path / "other")


@pytest.mark.parametrize("name", ["one", ""])
def test_no_count_of_a_thread_is_lost(name: str, tmp_path: Path) -> None:
    file = SeriesFile(tmp_path / name if name else None)
    series = [Series(file.values(("seconds",), 4), (1.0, 2.0)) for _ in range(2)]

    def count(i: int) -> None:
        for _ in range(5000):
            series[i % 2].observe(i % 4)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    assert list(file.all()[("seconds",)]) == [10_000, 5000, 5000, 5000 * (0 + 1 + 2 + 3)]


def numbers() -> tuple[dict[Key, list[float]], CollectorRegistry]:
    """Return the same numbers twice: as series, and in a registry of Prometheus' client."""
    disable_created_metrics()
    registry = CollectorRegistry()
    counter = Counter("some_total", "Some.", ["route", "model"], registry=registry)
    gauge = Gauge("now", "Now.", ["model"], registry=registry)
    histogram = Histogram("seconds", "Seconds.", ["model"], buckets=FAMILIES[2].bounds, registry=registry)
    file = SeriesFile()
    for i, model in enumerate(MODELS):
        counter.labels("/x", model).inc(i * 1e6)
        Series(file.values(("some_total", "/x", model), 1)).add(i * 1e6)
        gauge.labels(model).set(math.inf if i == 1 else -i)
        Series(file.values(("now", model), 1)).set(math.inf if i == 1 else -i)
        for value in OBSERVED:
            histogram.labels(model).observe(value)
            Series(file.values(("seconds", model), FAMILIES[2].num_values), FAMILIES[2].bounds).observe(value)
    return {key: list(values) for key, values in file.all().items()}, registry


@pytest.mark.parametrize(("accept", "parse"), [("", parse_text), ("application/openmetrics-text", parse_openmetrics)])
def test_the_page_says_what_prometheus_own_client_says(accept: str, parse: Callable[[str], Any]) -> None:
    series, registry = numbers()
    content, kind = render(FAMILIES, series, accept)
    assert kind == content_type(accept)

    def read(text: str, parse: Callable[[str], Any]) -> dict[str, object]:
        return {
            family.name: (
                family.type,
                family.documentation,
                {(s.name, *sorted(s.labels.items())): s.value for s in family.samples},
            )
            for family in parse(text)
        }

    assert read(content.decode(), parse) == read(generate_latest(registry).decode(), parse_text)


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text; version=0.0.1; q=0.75, text/plain", False),
        ("application/openmetrics-text", True),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1",
            True,
        ),
    ],
)
def test_openmetrics_for_those_who_ask_for_it(accept: str, is_openmetrics: bool) -> None:
    assert content_type(accept).startswith("application/openmetrics-text; version=1.0.0") == is_openmetrics
