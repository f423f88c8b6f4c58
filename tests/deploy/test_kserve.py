"""The runtime of deploy/kserve: Kubernetes accepts its container, its arguments start a server, and its probes are answered.

Its own fields were compared once with the models of KServe's package, which needs other versions than these tests do.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from checkpoints.encoders import write_bert
from checkpoints.sentence_layout import sentence_layout
from dashboards import DEPLOY
from serving import Server

VERSIONS = ("1.30", "1.37")
"""Versions of Kubernetes whose schemas the pod is compared with."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / f"kserve/{name}.yaml").read_text(encoding="utf-8"))


RUNTIME, SERVICE = read("runtime"), read("inference-service")
(CONTAINER,) = RUNTIME["spec"]["containers"]


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="no schemas: requirements/environment .venv deploy")
def test_kubernetes_accepts_the_container() -> None:
    import kubernetes_validate

    spec = {"containers": [CONTAINER], "volumes": RUNTIME["spec"]["volumes"]}
    for version in VERSIONS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "e5"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_service_asks_for_the_runtime() -> None:
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]


def test_the_container_has_no_rights_and_can_write_where_the_image_says() -> None:
    context = CONTAINER["securityContext"]
    assert (context["runAsNonRoot"], context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (
        True,
        True,
        False,
    )
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {each["mountPath"] for each in CONTAINER["volumeMounts"]} == {"/models", "/tmp"}
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == {each["name"] for each in RUNTIME["spec"]["volumes"]}


def test_its_arguments_serve_the_model_by_the_name_of_the_service(tmp_path: Path) -> None:
    name, (port,) = SERVICE["metadata"]["name"], CONTAINER["ports"]
    write_bert(tmp_path)
    sentence_layout(tmp_path)
    verb, *args, last = CONTAINER["args"]
    assert (verb, last) == ("serve", f"--port={port['containerPort']}")
    args = [each.replace("/mnt/models", str(tmp_path)).replace("{{.Name}}", name) for each in args]
    variables = {each["name"]: each["value"] for each in CONTAINER["env"]}
    with Server(*args, **variables) as server:
        for probe in ("startup", "readiness", "liveness"):
            asked = CONTAINER[f"{probe}Probe"]["httpGet"]
            assert asked["port"] == port["containerPort"]
            assert httpx2.get(server.url + asked["path"]).status_code == 200
        assert httpx2.get(f"{server.url}/v2/models/{name}").json()["outputs"][0]["name"] == "embedding"
        assert httpx2.get(server.url + RUNTIME["spec"]["annotations"]["prometheus.kserve.io/path"]).status_code == 200
