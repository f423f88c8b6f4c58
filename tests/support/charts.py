"""The chart of deploy/helm, linted and rendered by helm's own library.

`python charts.py` reads a list of values and of Kubernetes' versions from stdin. The library is Go's, with signal handlers of its
own, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy/helm/whimbrel"
NAME, NAMESPACE = "search", "shop"


def _run(command: str, *arguments: Any) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, command],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def lint() -> list[str]:
    """Return the warnings and errors of the chart."""
    return _run("lint")


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that the chart makes of some values. Raises AssertionError with helm's words if it refuses them."""
    answer = _run("render", values)
    assert "error" not in answer, answer["error"]
    files = (text for name, text in sorted(answer["files"].items()) if name.endswith(".yaml"))
    return [each for text in files for each in yaml.safe_load_all(text) if each]


def refusal(values: dict[str, Any]) -> str:
    """Return helm's words about values that the schema refuses, or nothing."""
    return _run("render", values).get("error", "")


def only(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the object of a kind, and of the end of a name if there are several."""
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name or ""))
    return found


def _main() -> None:
    import helm_python

    arguments = json.load(sys.stdin)
    if sys.argv[1] == "lint":
        report = helm_python.lint(CHART, strict=True)
        found = [f"{each['path']}: {each['error']}" for each in report["messages"] if each["severity"] > 1]
        answer: Any = [*report["errors"], *found]
    else:
        try:
            with helm_python.Chart.load(CHART) as chart:
                chart.validate_schema(arguments[0])
                answer = {"files": chart.render(arguments[0], name=NAME, namespace=NAMESPACE)}
        except helm_python.HelmError as error:
            answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
