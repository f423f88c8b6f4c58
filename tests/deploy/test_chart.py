"""The chart of deploy/helm: helm lints and renders it, and Kubernetes' own schemas accept each object."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import CHART, NAMESPACE, lint, only, refusal, render
from dashboards import DEPLOY, dashboard

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("helm_python", "kubernetes_validate")),
    reason="no helm: requirements/environment .venv deploy",
)

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.30", "1.33", "1.37")
"""Versions of Kubernetes whose schemas the objects are compared with: the oldest that the chart admits, and newer ones."""
OTHERS = {"HTTPRoute", "ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself does not have."""
EVERYTHING: dict[str, Any] = {
    "args": ["--replicas", "2"],
    "env": [{"name": "WHIMBREL_LOG_LEVEL", "value": "debug"}],
    "imagePullSecrets": [{"name": "registry"}],
    "apiKeys": {"existingSecret": "keys"},
    "hubToken": {"existingSecret": "hub"},
    "cache": {"existingClaim": "models"},
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "search",
    "podAnnotations": {"note": "one"},
    "podLabels": {"team": "search"},
    "podSecurityContext": {"runAsUser": 1000700000},
    "ingress": {"enabled": True, "tlsSecret": "certificate"},
    "route": {"gateways": [{"name": "public"}]},
    "networkPolicy": {"egress": [{"ports": [{"port": 4318, "protocol": "TCP"}]}]},
    "serviceMonitor": {"enabled": True, "keySecret": "prometheus-key", "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": EVERYTHING,
    "hpa": {"autoscaling": {"kind": "hpa"}},
    "keda": {"autoscaling": {"kind": "keda"}},
    "bare": {
        "serviceAccount": {"create": False},
        "disruption": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "topologySpreadConstraints": [],
        "fsGroup": None,
    },
}


@cache
def objects(case: str) -> list[dict[str, Any]]:
    """Return the objects of a case."""
    return render(CASES[case])


def pod(case: str) -> dict[str, Any]:
    """Return the pod's specification."""
    return only(objects(case), "Deployment")["spec"]["template"]["spec"]


def container(case: str) -> dict[str, Any]:
    """Return the only container of the pod."""
    (found,) = pod(case)["containers"]
    return found


def variables(case: str) -> dict[str, str]:
    """Return the variables of the container."""
    return {each["name"]: each["value"] for each in container(case)["env"]}


def test_helm_has_nothing_to_say_about_the_chart() -> None:
    assert lint() == []


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_every_object(case: str) -> None:
    import kubernetes_validate

    for each in objects(case):
        assert each["metadata"]["namespace"] == NAMESPACE
        if each["kind"] not in OTHERS:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": "two"}, "replicas"),
        ({"replica": 2}, "replica"),
        ({"config": ""}, "config"),
        ({"autoscaling": {"kind": "vpa"}}, "kind"),
        ({"autoscaling": {"queueTokens": 0}}, "queueTokens"),
        ({"apiKeys": {"existingSecret": "keys", "key": "../x"}}, "key"),
        ({"drainSeconds": -1}, "drainSeconds"),
        ({"preStopSeconds": 0}, "preStopSeconds"),
        ({"startupSeconds": "long"}, "startupSeconds"),
        ({"cache": {"sizeLimit": "much"}}, "sizeLimit"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    assert words in refusal(values)


def test_the_pod_has_time_to_finish_what_it_accepted() -> None:
    seconds = container("default")["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(variables("default")["WHIMBREL_DRAIN_TIMEOUT"])
    assert pod("default")["terminationGracePeriodSeconds"] >= seconds + drain + 10


def test_a_pod_is_replaced_only_by_one_that_is_ready() -> None:
    assert only(objects("default"), "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    probes = container("default")
    assert [probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")] == [
        "/health/ready",
        "/health/ready",
        "/health/live",
    ]
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800


def test_no_service_sets_our_variables() -> None:
    """A Service named whimbrel would set WHIMBREL_PORT to a URL, which is no port."""
    assert pod("default")["enableServiceLinks"] is False


@pytest.mark.parametrize("case", CASES)
def test_the_container_has_no_rights(case: str) -> None:
    context = container(case)["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context["allowPrivilegeEscalation"]
    assert pod(case)["securityContext"]["runAsNonRoot"]
    assert pod(case)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("case", CASES)
def test_the_container_can_write_where_the_image_says(case: str) -> None:
    mounts = {each["mountPath"]: each for each in container(case)["volumeMounts"]}
    names = {each["name"] for each in pod(case)["volumes"]}
    assert {each["name"] for each in mounts.values()} == names
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {"/models", "/tmp"}


def test_secrets_are_files() -> None:
    assert "secretKeyRef" not in str(objects("everything"))
    assert variables("everything")["WHIMBREL_API_KEY_FILE"] == "/run/secrets/whimbrel/keys"
    assert variables("everything")["HF_TOKEN_PATH"] == "/run/secrets/hub/token"
    secrets = {each["secret"]["secretName"] for each in pod("everything")["volumes"] if "secret" in each}
    assert secrets == {"keys", "hub"}
    assert "WHIMBREL_API_KEY_FILE" not in variables("default")


def test_the_configuration_is_the_values_own() -> None:
    (values,) = yaml.safe_load_all((CHART / "values.yaml").read_text(encoding="utf-8"))
    written = only(objects("default"), "ConfigMap")["data"]["whimbrel.toml"]
    assert tomllib.loads(written) == tomllib.loads(values["config"])
    assert variables("default")["WHIMBREL_CONFIG"] == "/etc/whimbrel/whimbrel.toml"
    own = '[models.e5]\nsource = "intfloat/multilingual-e5-small"\nprompts = { query = "{{ query }}: " }\n'
    changed = render({"config": own})
    assert only(changed, "ConfigMap")["data"]["whimbrel.toml"].strip() == own.strip()
    sums = {
        only(each, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for each in (changed, objects("default"))
    }
    assert len(sums) == 2


def test_the_server_takes_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "whimbrel.toml"
    file.write_text(only(objects("default"), "ConfigMap")["data"]["whimbrel.toml"])
    command = [sys.executable, "-m", "whimbrel", "config", "check", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_dashboard_and_the_rules_are_those_of_deploy() -> None:
    found = only(objects("everything"), "ConfigMap", "-dashboard")
    assert json.loads(found["data"]["whimbrel.json"]) == dashboard()
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))
    assert only(objects("everything"), "PrometheusRule")["spec"] == rules
    (endpoint,) = only(objects("everything"), "ServiceMonitor")["spec"]["endpoints"]
    assert {"targetLabel": "job", "replacement": "whimbrel", "action": "replace"} in endpoint["relabelings"]


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_pods_are_added_for_tokens_that_wait(kind: str) -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    scaler = only(objects(kind), "HorizontalPodAutoscaler" if kind == "hpa" else "ScaledObject")
    (metric,) = set(re.findall(r"whimbrel_\w+", str(scaler["spec"])))
    assert f"| `{metric}` |" in page
    assert scaler["spec"]["scaleTargetRef"]["name"] == only(objects(kind), "Deployment")["metadata"]["name"]
    assert "replicas" not in only(objects(kind), "Deployment")["spec"]
    assert "20000" in str(scaler["spec"])


def test_the_policy_lets_only_named_peers_in() -> None:
    spec = only(objects("default"), "NetworkPolicy")["spec"]
    (rule,) = spec["ingress"]
    assert len(rule["from"]) == 2
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert {port["port"] for each in spec["egress"] for port in each["ports"]} == {53, 443}
