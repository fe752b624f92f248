"""The manifests of deploy/kubernetes: what Kubernetes takes, and what the programs, the image and the page say."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpulease_protocol.host.variables import unknown_variables
from gpulease_server.api.auth.access_rules import ACCESS_RULES, AccessRule
from gpulease_server.settings import ServeSettings
from tests.architecture.test_deployment import COMPOSE, DOCKERFILE, parses
from tests.kubernetes import (
    KUSTOMIZATIONS,
    ROOT,
    Object,
    built,
    command_of,
    containers,
    only,
    pod_of,
    secrets_made_on_the_page,
    workloads,
)

VERSIONS = ["1.31", "1.34", "1.37"]
"""Of Kubernetes; docs/howto/kubernetes.md names the first and the last."""
each_kustomization = pytest.mark.parametrize("name", KUSTOMIZATIONS)


def daemon(name: str = "base") -> Object:
    return only(built(name), "StatefulSet", "gpulease")


def worker(name: str = "base") -> Object:
    return only(built(name), "DaemonSet", "gpulease-worker")


def problems(document: Object, version: str) -> str:
    """What the schema of a release of Kubernetes says against an object; fields that it does not know included."""
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{document['kind']} {document['metadata']['name']}: {error}"
    return ""


@pytest.mark.parametrize("version", VERSIONS)
@each_kustomization
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    assert [said for one in built(name) if (said := problems(one, version))] == []


def test_a_field_that_kubernetes_does_not_know_would_be_seen() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(daemon()))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    assert "readinessprobe" in problems(wrong, VERSIONS[-1])


def test_the_page_names_the_versions() -> None:
    page = (ROOT / "docs/howto/kubernetes.md").read_text()
    assert f"schemas of Kubernetes {VERSIONS[0]} to {VERSIONS[-1]}," in page
    assert f"Kubernetes {VERSIONS[0]} or newer" in page


@each_kustomization
def test_a_container_runs_a_command_and_has_variables_that_exist(name: str) -> None:
    for container in (one for _, pod in workloads(built(name)) for one in containers(pod)):
        program, *words = command_of(container)
        if container["name"] == "join":
            assert 'gpulease node join "$GPULEASE_URL" - --node "$GPULEASE_NODE" --data-dir "$state"' in words[-1]
            words = ["node", "join", "https://daemon:8750", "-", "--node", "n", "--data-dir", "/d"]
        else:
            assert program == "gpulease"
        parses(words)
        assert unknown_variables({one["name"]: "" for one in container.get("env", [])}) == []


@each_kustomization
def test_a_container_is_of_the_image_that_the_page_builds(name: str) -> None:
    (kept,) = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    for workload, pod in workloads(built(name)):
        for container in containers(pod):
            assert container["image"] == COMPOSE["services"]["daemon"]["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes(workload, pod)
            assert kept in {mount["mountPath"] for mount in container["volumeMounts"]}


def volumes(workload: Object, pod: Object) -> set[str]:
    claimed = workload["spec"].get("volumeClaimTemplates", [])
    return {one["name"] for one in pod["volumes"]} | {one["metadata"]["name"] for one in claimed}


@each_kustomization
def test_what_is_referred_to_exists(name: str) -> None:
    objects = built(name)
    there = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects}
    assert len(there) == len(objects)
    namespaces = {own for kind, _, own in there if kind == "Namespace"}
    assert {space for _, space, _ in there} - {None} == namespaces == {"gpulease", "gpulease-workers"}
    for workload, pod in workloads(objects):
        space = workload["metadata"]["namespace"]
        assert ("ServiceAccount", space, pod["serviceAccountName"]) in there
        assert ("PriorityClass", None, pod["priorityClassName"]) in there
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert {f"{space}/{secret}" for secret in secrets_of(pod)} <= secrets_made_on_the_page()
    service, policy = only(objects, "Service", "gpulease"), only(objects, "NetworkPolicy", "gpulease")
    labels = daemon(name)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert daemon(name)["spec"]["serviceName"] == service["metadata"]["name"]


def secrets_of(pod: Object) -> set[str]:
    of_volumes = {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    references = [item.get("valueFrom", {}) for one in containers(pod) for item in one.get("env", [])]
    return of_volumes | {one["secretKeyRef"]["name"] for one in references if "secretKeyRef" in one}


def test_workers_find_the_daemon_where_it_listens_and_its_certificate_is_for_that_name() -> None:
    (container,) = pod_of(daemon())["containers"]
    (port,) = container["ports"]
    (service_port,) = only(built("base"), "Service", "gpulease")["spec"]["ports"]
    (rule,) = only(built("base"), "NetworkPolicy", "gpulease")["spec"]["ingress"]
    assert port["containerPort"] == service_port["port"] == ServeSettings.__dataclass_fields__["port"].default
    assert port["name"] == service_port["targetPort"] == rule["ports"][0]["port"]
    name = f"{daemon()['metadata']['name']}.{daemon()['metadata']['namespace']}.svc"
    assert f"--tls-name={name}" in container["args"]
    urls = {
        item["value"] for one in containers(pod_of(worker())) for item in one["env"] if item["name"] == "GPULEASE_URL"
    }
    assert urls == {f"https://{name}:{port['containerPort']}"}


def test_probes_ask_what_everyone_may_ask() -> None:
    (container,) = pod_of(daemon())["containers"]
    probes = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}
    assert {kind: one["path"] for kind, one in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {ACCESS_RULES[f"GET {one['path']}"] for one in probes.values()} == {AccessRule.ANYONE}
    assert {(one["port"], one["scheme"]) for one in probes.values()} == {("https", "HTTPS")}


def test_holders_reach_a_daemon_that_is_not_ready() -> None:
    """It renews leases while its database is away."""
    assert only(built("base"), "Service", "gpulease")["spec"]["publishNotReadyAddresses"] is True


@each_kustomization
def test_no_pod_has_a_right_in_the_cluster(name: str) -> None:
    objects = built(name)
    assert not {one["kind"] for one in objects if one["kind"].endswith(("Role", "Binding"))}
    accounts = [one for one in objects if one["kind"] == "ServiceAccount"]
    pods = [pod for _, pod in workloads(objects)]
    assert [one["automountServiceAccountToken"] for one in [*accounts, *pods]] == [False] * 4
    assert [pod["enableServiceLinks"] for pod in pods] == [False] * 2, "it would set variables named GPULEASE_"


@each_kustomization
def test_the_daemon_is_as_its_namespace_demands(name: str) -> None:
    """The rules of the profile `restricted` of Pod Security."""
    objects = built(name)
    levels = {one["metadata"]["name"]: one["metadata"]["labels"] for one in objects if one["kind"] == "Namespace"}
    level = "pod-security.kubernetes.io/enforce"
    assert {own: labels[level] for own, labels in levels.items()} == {
        "gpulease": "restricted",
        "gpulease-workers": "privileged",
    }
    pod = pod_of(daemon(name))
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    assert all({"emptyDir", "secret", "configMap", "persistentVolumeClaim"} & one.keys() for one in pod["volumes"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [f"{pod['securityContext']['runAsUser']}"] == re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_kustomization
def test_the_worker_has_the_rights_to_run_jobs_as_their_users_and_no_others(name: str) -> None:
    pod = pod_of(worker(name))
    compose = COMPOSE["services"]["worker"]
    (join,), (container,) = pod["initContainers"], pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": compose["cap_drop"], "add": compose["cap_add"]}
    assert join["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {one["securityContext"]["allowPrivilegeEscalation"] for one in (join, container)} == {False}
    assert (pod["hostPID"], pod["hostNetwork"], pod["dnsPolicy"]) == (True, True, "ClusterFirstWithHostNet")
    assert "join" not in {mount["name"] for mount in container["volumeMounts"]}, "tokens of other nodes"


def test_no_gpu_is_requested_because_it_would_be_in_two_ledgers() -> None:
    for container in containers(pod_of(worker())):
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "limits" not in container["resources"], "all jobs would end with the one that goes beyond it"
    (container,) = pod_of(worker())["containers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]


def test_a_worker_has_time_to_leave_and_is_not_replaced_while_jobs_run() -> None:
    pod = pod_of(worker())
    (within,) = (word for word in pod["containers"][0]["args"] if word.startswith("--leave-s="))
    assert pod["terminationGracePeriodSeconds"] >= int(within.partition("=")[2]) + 20
    assert worker()["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert not [key for key in pod["containers"][0] if key.endswith("Probe")], "one that fails would end the jobs"
    unit = (ROOT / "deploy/systemd/gpulease.service").read_text()
    assert f"TimeoutStopSec={pod_of(daemon())['terminationGracePeriodSeconds']}\n" in unit


def test_only_one_daemon_ever_runs() -> None:
    assert (daemon()["kind"], daemon()["spec"]["replicas"]) == ("StatefulSet", 1)


def differences(first: Any, second: Any, path: str = "") -> set[str]:
    """Where two documents differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            place
            for key in first.keys() | second.keys()
            for place in differences(first.get(key), second.get(key), f"{path}/{key}")
        }
    return set() if first == second else {path}


def test_the_variants_change_what_they_are_for_and_nothing_else() -> None:
    pod, base, found = "/spec/template/spec", built("base"), {}
    for name in KUSTOMIZATIONS:
        objects = built(name)
        assert len(objects) == len(base)
        places = [(one["kind"], differences(one, only(objects, one["kind"], one["metadata"]["name"]))) for one in base]
        found[name] = {f"{kind}{place}" for kind, changed in places for place in changed}
    assert found == {
        "base": set(),
        "postgresql": {f"StatefulSet{pod}/containers", "NetworkPolicy/spec/egress"},
        "simulated": {f"DaemonSet{pod}/containers", f"DaemonSet{pod}/runtimeClassName"},
    }
    (simulating,), (plain,) = (pod_of(worker(name))["containers"] for name in ("simulated", "base"))
    assert simulating["args"] == [*plain["args"], "--simulate=4"]
    added = [one["name"] for one in pod_of(daemon("postgresql"))["containers"][0]["env"]]
    assert sorted(added) == ["GPULEASE_DATABASE_URL", "GPULEASE_URL"]
