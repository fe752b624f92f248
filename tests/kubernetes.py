"""The manifests of deploy/kubernetes as kubectl builds them, and what their containers are as processes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
MANIFESTS = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml"))
PAGE = ROOT / "docs" / "howto" / "kubernetes.md"

Object = dict[str, Any]


def kubectl(*words: str) -> str:
    """What kubectl prints. It is asked only for what needs no cluster."""
    program = shutil.which("kubectl")
    assert program is not None, "no kubectl: run make packages"
    command = [program, "--kubeconfig=/dev/null", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@cache
def _built(name: str) -> str:
    return kubectl("kustomize", str(MANIFESTS / name))


def built(name: str) -> list[Object]:
    """The objects of a kustomization."""
    return list(yaml.safe_load_all(_built(name)))


def only(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of this kind and name."""
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_of(workload: Object) -> Object:
    """The spec of the pods of a workload."""
    return dict(workload["spec"]["template"]["spec"])


def workloads(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each workload, and the spec of its pods."""
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one, pod_of(one)


def containers(pod: Object) -> list[Object]:
    """All containers of a pod, those that only prepare included."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def variables(container: Object, fields: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment that a manifest gives to a container.

    Args:
        container: The container.
        fields: What the downward API says, by path of the field.
        secrets: Values of Secrets, by `NAME/KEY`.
    """
    found = {}
    for one in container.get("env", []):
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            found[one["name"]] = secrets[f"{reference['name']}/{reference['key']}"]
        else:
            found[one["name"]] = one["value"]
    return found


def command_of(container: Object) -> list[str]:
    """The command line of a container of our image, whose entry point is `gpulease`."""
    return list(container["command"]) if "command" in container else ["gpulease", *container["args"]]


def rights_of(pod: Object, container: Object) -> list[str]:
    """The beginning of a command line that has the user, group and capabilities of a container only."""
    context = pod.get("securityContext", {}) | container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["allowPrivilegeEscalation"] is False
    user, group = context["runAsUser"], context.get("runAsGroup", 0)
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in context["capabilities"].get("add", []))])
    who = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    return ["setpriv", *who, "--no-new-privs", "--inh-caps", "-all", "--bounding-set", kept, "--"]


def secrets_made_on_the_page() -> set[str]:
    """`NAMESPACE/NAME` of each Secret that the page has made."""
    made = re.findall(r"-n (\S+) create secret generic (\S+)", PAGE.read_text().replace("\\\n", " "))
    return {f"{namespace}/{name}" for namespace, name in made}
