"""The files of deploy/ fit one another and the metrics that a server has; test_prometheus.py runs their queries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import DEPLOY, dashboard, dashboard_queries, panels, rules

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs/deploy/runbook.md"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ((?:`\w+`(?:, `\w+`)*)?) ?\|", re.MULTILINE)
NOT_SHOWN = {"whimbrel_requests_received_total", "process_virtual_memory_bytes"}
"""Metrics that the dashboard leaves out: the sum of others, and a number that says little."""
OF_PROMETHEUS = {"job", "instance", "le"}
FUNCTIONS = set("avg by changes clamp_min histogram_quantile increase max on or rate sum vector and".split())


@cache
def documented() -> dict[str, set[str]]:
    """Return the labels of each metric of docs/metrics.md; histograms also have the names of their parts."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").partition("## Headers")[0]
    found = {"up": set[str]()}
    for names, labels in ROW.findall(page):
        for name in re.findall(r"\w+", names):
            for part in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count"):
                found[part] = set(re.findall(r"\w+", labels))
    return found


def names_in(expression: str) -> set[str]:
    """Return the names of metrics in a query."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(?:by|on) \([^)]*\)', " ", expression)
    return set(re.findall(r"[a-z_][\w:]*", bare)) - FUNCTIONS


def labels_in(expression: str) -> set[str]:
    """Return the names of labels in a query."""
    matched = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', expression)
    grouped = [name for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for name in re.findall(r"\w+", names)]
    return {*matched, *grouped}


def unknown(expression: str, *, recorded: frozenset[str] = frozenset()) -> set[str]:
    """Return the metrics of a query that no server has, and its labels that none of its metrics has."""
    names = names_in(expression)
    labels = set[str]().union(*(documented().get(name, set()) for name in names), OF_PROMETHEUS)
    if names & recorded:
        labels |= {"outcome", "model", "stage"}
    return (names - documented().keys() - recorded) | (labels_in(expression) - labels)


def boxes() -> Iterator[tuple[str, range, range]]:
    """Return the title, columns and rows of each panel."""
    for panel in dashboard()["panels"]:
        box = panel["gridPos"]
        yield panel["title"], range(box["x"], box["x"] + box["w"]), range(box["y"], box["y"] + box["h"])


def test_the_queries_of_the_dashboard_ask_for_what_there_is() -> None:
    offences = {name: unknown(query) for name, query in dashboard_queries("5m").items() if unknown(query)}
    assert offences == {}


def test_the_rules_ask_for_what_there_is() -> None:
    recorded = frozenset(rule["record"] for rule in rules("record"))
    every = [*rules("record"), *rules("alert")]
    assert {rule["expr"]: found for rule in every if (found := unknown(rule["expr"], recorded=recorded))} == {}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum(rate(whimbrel_request_total[5m]))", {"whimbrel_request_total"}),
        ('whimbrel_queue_tokens{route="x"}', {"route"}),
        ("sum by (key, model) (whimbrel_texts_total)", {"key"}),
        ('sum by (stage, le) (rate(whimbrel_stage_seconds_bucket{model=~".*"}[5m])) or vector(0)', set()),
    ],
)
def test_a_query_for_what_there_is_not_is_found(query: str, found: set[str]) -> None:
    assert unknown(query) == found


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for query in dashboard_queries("5m").values() for name in names_in(query)}
    whole = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in documented() if not re.search(r"_(bucket|sum|count)$", name)} - whole == NOT_SHOWN


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    assert all(columns.start >= 0 and columns.stop <= 24 for _, columns, _ in boxes())
    for (one, columns, rows), (other, other_columns, other_rows) in combinations(boxes(), 2):
        apart = not (set(columns) & set(other_columns) and set(rows) & set(other_rows))
        assert apart, f"{one!r} and {other!r}"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_has_a_description_a_unit_and_the_chosen_source(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    unit = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
    assert unit["unit"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} == {"${datasource}"}
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_variable_is_used_and_every_used_one_is_there() -> None:
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    queries = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    used = set(re.findall(r"\$(\w+)", queries)) - {"__rate_interval"}
    assert used | {"datasource"} == variables == {"datasource", "job", "instance", "model", "key"}


def test_panels_filter_by_every_variable_that_their_metrics_have() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for name, selector in re.findall(r"(\w+)\{([^}]*)\}", target["expr"]):
                wanted = {"job", "instance"} | ({"model", "key"} & documented()[name])
                assert wanted <= set(re.findall(r"(\w+)=~\"\$\1\"", selector)), f"{panel['title']}: {name}"


def test_every_alert_is_complete() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert all(rule["annotations"][name].endswith(".") for name in ("summary", "description")), rule["alert"]


def test_the_runbook_has_a_section_for_each_alert() -> None:
    page = RUNBOOK.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in rules("alert")]
    for rule in rules("alert"):
        place = rule["annotations"]["runbook_url"]
        assert place.endswith(f"/{RUNBOOK.relative_to(ROOT).as_posix()}#{rule['alert'].lower()}")
        words = ("**Means:**", "**Look at:**", "**Do:**")
        assert [sections[rule["alert"]].count(word) for word in words] == [1, 1, 1], rule["alert"]
    titles = {panel["title"] for panel in panels()}
    assert set(re.findall(r'"([A-Zp][^"]+)"', page)) <= titles


def test_every_alert_has_a_unit_test() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/rules_test.yml").read_text(encoding="utf-8"))["tests"]
    fired: dict[str, list[bool]] = {}
    for test in tests:
        for case in test["alert_rule_test"]:
            fired.setdefault(case["alertname"], []).append(bool(case["exp_alerts"]))
    assert list(fired) == [rule["alert"] for rule in rules("alert")]
    for name, states in fired.items():
        assert (states[0], any(states), states[-1]) == (False, True, False), name


def test_the_compose_file_is_safe_and_whole() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == {"whimbrel", "prometheus", "grafana"}
    names = set(re.findall(r"^(\w+)=", (DEPLOY / "env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert {secret["environment"] for secret in compose["secrets"].values()} <= names
    for name, service in compose["services"].items():
        assert "privileged" not in service, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert {secret["source"] for secret in service["secrets"]} <= compose["secrets"].keys(), name
        assert re.fullmatch(r"[\w/]+:(v?\d+\.\d+\.\d+|local)", service["image"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume


def test_what_grafana_provisions_is_what_compose_mounts() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/whimbrel.yml").read_text())["providers"]
    assert any(volume.split(":")[1].startswith(f"{provider['options']['path']}/") for volume in compose["grafana"]["volumes"])
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    (secret,) = compose["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret['source']}"
    assert job["static_configs"] == [{"targets": ["whimbrel:8000"]}]
