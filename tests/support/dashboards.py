"""The files of deploy/: the dashboard's panels and queries, and the rules, as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return json.loads((DEPLOY / "grafana/whimbrel.json").read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something, without the titles of rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_queries(interval: str) -> dict[str, str]:
    """Return the queries of all panels by a name, as Grafana sends them with all variables at "All".

    `interval` stands for Grafana's rate interval. Ranges in minutes become seconds, as the tests shorten those of the rules.
    """
    found: dict[str, str] = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", interval)
            expression = re.sub(r"\[(\d+)m\]", r"[\1s]", expression)
            found[f"{panel['title']} {target['refId']}"] = re.sub(r"\$\w+", ".*", expression)
    return found


def rules(kind: Literal["alert", "record"]) -> list[dict[str, Any]]:
    """Return the alerts or the recording rules."""
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]
