"""The manifests of deploy/kubernetes: the published schemas, and that their parts fit together and fit the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from quire.config.flags import parse
from quire.env import VARIABLES
from quire.server.app import ROUTES
from quire.server.middleware import OPEN

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
HELM_VALUES = {"prometheus-adapter.yaml"}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def resources() -> list[str]:
    return read("kustomization.yaml")["resources"]


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [one for one in map(read, resources()) if one["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    return of_kind("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    [only] = pod()["containers"]
    return only


def test_every_file_is_listed():
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert files == {*resources(), "kustomization.yaml"} | HELM_VALUES


@pytest.mark.parametrize("name", resources())
@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_manifests_match_the_kubernetes_schema(name: str, version: str):
    kubernetes_validate.validate(read(name), version, strict=True)


def test_a_wrong_field_is_noticed():
    broken = of_kind("Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.30", strict=True)


def test_every_selector_selects_the_pods():
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert of_kind(kind)["spec"]["selector"]["matchLabels"].items() <= labels
    assert of_kind("Service")["spec"]["selector"].items() <= labels
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels


def test_ports_volumes_and_targets_exist():
    ports = {port["name"] for port in container()["ports"]}
    assert {port["targetPort"] for port in of_kind("Service")["spec"]["ports"]} <= ports
    [ingress] = of_kind("NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for port in ingress["ports"]} <= ports
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == of_kind("PersistentVolumeClaim")["metadata"]["name"]
    target = of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    deployment = of_kind("Deployment")
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}  # fmt: skip
    assert "replicas" not in deployment["spec"]


def test_probes_use_routes_without_a_key():
    routes = {path for methods, path, _ in ROUTES if "GET" in methods}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container()[name]["httpGet"]["path"] in OPEN & routes


def test_the_server_accepts_the_arguments_and_drains_within_the_grace_period():
    config = parse(container()["args"])
    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace >= pause + config.server.shutdown_timeout + 10


def test_variables_are_known():
    for variable in container()["env"]:
        name = variable["name"]
        assert name in ("HF_HOME", "HF_TOKEN") or name.removeprefix("QUIRE_") in VARIABLES


def test_the_pod_needs_no_privilege_and_writes_only_to_its_volumes():
    assert pod()["securityContext"]["runAsNonRoot"]
    limits = container()["securityContext"]
    assert limits["readOnlyRootFilesystem"]
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert not limits["allowPrivilegeEscalation"]
    assert not pod()["enableServiceLinks"]
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert {"/tmp", "/dev/shm", "/home/quire/.cache/quire", "/models"} == mounts


def test_the_autoscaler_reads_a_published_metric():
    [rule] = read("prometheus-adapter.yaml")["rules"]["custom"]
    [metric] = of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert "vllm:num_requests_waiting" in rule["seriesQuery"]
    assert "vllm:num_requests_waiting" in rule["metricsQuery"]
