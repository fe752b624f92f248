"""docs/howto/kubernetes.md is done as it says, in a cluster of one node that is two hosts of this machine.

There is no cluster: a stand-in for `kubectl` takes the commands of the page, has the real one build manifests and
Secrets, and runs what is executed in a pod there. The containers of the manifests are processes with their commands,
variables, users, capabilities and a root file system as read-only as theirs. The daemon's pod is one host; the other is
the node, in whose network and process ids the worker is.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cabled_hosts import Host, connect
from tests.daemon import eventually
from tests.docs.pages import blocks
from tests.kubernetes import PAGE, ROOT, Object, command_of, only, pod_of, rights_of, variables

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root makes hosts"),
]
POD, NODE = "10.99.8.1", "10.99.8.2"
NAME = "gpubox2"
UP_S = 120.0
USER = 10001
"""The user of the page's example pod."""
JOIN, STATE = "/run/gpulease/join", "/var/lib/gpulease/worker"

KUBECTL = """#!/bin/bash
echo "$*" >>"$CLUSTER/calls"
in_pod() { host=$1 && shift; while [ "$1" != -- ]; do shift; done; shift; exec "$CLUSTER/in-$host" "$@"; }
case "$*" in
    *" --dry-run=client "*) exec "$KUBECTL" --kubeconfig=/dev/null "$@" ;;
    "apply -k "*) "$KUBECTL" kustomize "$3" >"$CLUSTER/applied.yaml" ;;
    "apply --server-side -f -") cat >"$CLUSTER/secret-$(date +%N).yaml" ;;
    "get nodes -l gpulease=worker -o name") echo node/gpubox2 ;;
    "-n gpulease exec statefulset/gpulease -- "*) in_pod daemon "$@" ;;
    "label node gpubox2 "* | "taint node gpubox2 "* | "-n gpulease rollout status statefulset/gpulease") ;;
    *) echo "not of this cluster: kubectl $*" >&2; exit 64 ;;
esac
"""


class Cluster:
    """One node, and the pod of the daemon."""

    def __init__(self, place: Path, pod: Host, node: Host) -> None:
        self.place, self.pod, self.node = place, pod, node
        self.worker: subprocess.Popen[bytes] | None = None
        programs = place / "bin"
        programs.mkdir()
        # Of the image, where everyone may read them; here they may be root's.
        self.readable = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
        self.write(programs / "kubectl", KUBECTL)
        self.write(programs / "gpulease", f'#!/bin/sh\nexec {sys.executable} -P -m gpulease_cli "$@"\n')
        self.path = f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.home = place / "home"
        (self.home / "cluster").mkdir(parents=True)
        (self.home / "gpulease").symlink_to(ROOT)
        self.printed: dict[str, str] = {}
        """By block of the page."""

    def do_page(self) -> None:
        """Do what the page says from the beginning, with simulated GPUs."""
        for block in blocks(PAGE):
            if block.note("not run") is not None:
                continue
            if (name := block.note("saved as")) is not None:
                (self.home / name).write_text(block.text.replace("kubernetes/base", "kubernetes/simulated"))
                continue
            if block.note("the nodes have joined") is not None:
                self.start_worker()
                self.await_node()
            self.printed[block.text] = self.type(block.text)
            if "apply -k" in block.text:
                self.start_daemon()

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def type(self, command: str) -> str:
        """What commands of the page print; each must succeed."""
        own = {"PATH": self.path, "CLUSTER": str(self.place), "KUBECTL": str(shutil.which("kubectl")), "HOME": "/root"}
        ran = subprocess.run(
            ["bash", "-c", f"set -eo pipefail\n{command}"],
            cwd=self.home, env=os.environ | own, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}\n{self.story()}"
        return ran.stdout

    @property
    def applied(self) -> list[Object]:
        """The objects that were applied."""
        return list(yaml.safe_load_all((self.place / "applied.yaml").read_text()))

    def secret(self, name: str) -> dict[str, bytes]:
        """The Secret of this name that was applied last."""
        found: dict[str, bytes] = {}
        for path in sorted(self.place.glob("secret-*.yaml"), key=lambda one: one.stat().st_mtime_ns):
            document = yaml.safe_load(path.read_text())
            if document["metadata"]["name"] == name:
                found = {key: base64.b64decode(value) for key, value in document["data"].items()}
        return found

    def story(self) -> str:
        """What the containers printed."""
        logs = sorted(self.place.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def start_daemon(self) -> None:
        """What the kubelet does with the pod of the daemon."""
        pod = pod_of(only(self.applied, "StatefulSet", "gpulease"))
        (container,) = pod["containers"]
        group = pod["securityContext"]["fsGroup"]
        prepare = f"""
            mkdir -p /var/lib/gpulease /srv/tmp && chown 0:{group} /var/lib/gpulease && chmod 2775 /var/lib/gpulease
            chmod 1777 /srv/tmp && mount -o remount,bind,ro /
        """
        assert self.pod.run("sh", "-ec", prepare).returncode == 0
        rights = self.with_readable_programs(rights_of(pod, container))
        own = {"PATH": self.path, "TMPDIR": "/srv/tmp", "HOME": "/", **variables(container, {}, {})}
        inside = self.pod.inside(*rights, "env", "--chdir=/", *(f"{name}={value}" for name, value in own.items()))
        words = " ".join(f"'{word}'" for word in inside)
        self.write(self.place / "in-daemon", f'#!/bin/sh\nunset PYTHONPATH\nexec {words} "$@"\n')
        self.pod.launch(self.place / "daemon.log", *rights, *command_of(container), **own)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            eventually(lambda kind=kind: self.probe(container[kind]) == 200, UP_S, self.story)

    def with_readable_programs(self, rights: list[str]) -> list[str]:
        """These rights, and that of reading programs that are root's."""
        at = rights.index("--inh-caps")
        kept = rights[rights.index("--bounding-set") + 1]
        return [*rights[:at], *self.readable, "--bounding-set", f"{kept},+dac_read_search", "--"]

    def probe(self, probe: Object) -> int:
        """What a probe is answered, from the node, as the kubelet asks."""
        http = probe["httpGet"]
        url = f"{http['scheme'].lower()}://{POD}:8750{http['path']}"
        answer = self.node.run("curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "5", url)
        return int(answer.stdout or 0)

    def join(self, *, offered: bool = True) -> subprocess.CompletedProcess[str]:
        """What the container does that prepares the worker's pod, with the Secret as it is now, or without one."""
        pod = self.worker_pod()
        (container,) = pod["initContainers"]
        self.node.run("sh", "-ec", f"rm -rf {JOIN} && mkdir -p {JOIN} /var/lib/gpulease")
        for node, token in self.secret("gpulease-join").items() if offered else ():
            written = self.node.run("sh", "-ec", f"umask 377 && cat >{JOIN}/{node}", text=token.decode())
            assert written.returncode == 0
        return self.node.run(*rights_of(pod, container), *command_of(container), **self.variables(container))

    def start_worker(self) -> None:
        """What the kubelet does with the pod of the worker."""
        joined = self.join()
        assert joined.returncode == 0, f"{joined.stdout}{joined.stderr}\n{self.story()}"
        pod = self.worker_pod()
        (container,) = pod["containers"]
        words = [*rights_of(pod, container), *command_of(container)]
        self.worker = self.node.launch(self.place / "worker.log", *words, **self.variables(container))

    def worker_pod(self) -> Object:
        return pod_of(only(self.applied, "DaemonSet", "gpulease-worker"))

    def variables(self, container: Object) -> dict[str, str]:
        said = variables(container, {"spec.nodeName": NAME, "status.hostIP": NODE}, {})
        return {"PATH": self.path, "HOME": "/", **said}

    def delete_worker(self) -> None:
        """End the pod of the worker, with the time that it has."""
        assert self.worker is not None
        (pid,) = self.node.run("pgrep", "-f", "gpulease_cli worker").stdout.split()[:1]
        self.node.run("kill", "-TERM", pid)
        self.worker.wait(self.worker_pod()["terminationGracePeriodSeconds"])
        self.node.run("pkill", "-KILL", "-u", "1000")

    def nodes(self) -> dict[str, Object]:
        listed = self.type("kubectl -n gpulease exec statefulset/gpulease -- gpulease node list --json")
        return {one["name"]: one for one in json.loads(listed)["items"]}

    def await_node(self) -> None:
        eventually(lambda: self.nodes().get(NAME, {}).get("state") == "ready", UP_S, self.story)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster in which everything was done that the page says."""
    with Host("gpulease-0") as pod, Host(NAME) as node:
        connect(pod, node, (POD, NODE))
        for host in (pod, node):  # as in the image
            user = "gpulease:x:1000:1000::/home/gpulease:/bin/sh"
            users = (
                f"{{ grep -v :1000: /etc/passwd; echo {user}; }} >/srv/passwd && mount --bind /srv/passwd /etc/passwd"
            )
            assert host.run("sh", "-ec", users).returncode == 0
        names = f"127.0.0.1 localhost\n{POD} gpulease.gpulease.svc\n{NODE} {NAME}\n"
        node.run("sh", "-ec", "cat >/srv/hosts && mount --bind /srv/hosts /etc/hosts", text=names)
        node.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        made = Cluster(tmp_path_factory.mktemp("cluster"), pod, node)
        made.do_page()
        yield made


def test_the_page_leads_to_a_grant_and_a_job(cluster: Cluster) -> None:
    images = {one["image"] for kind in ("initContainers", "containers") for one in cluster.worker_pod()[kind]}
    assert images == {"registry.example/gpulease:0.1.0"}
    (granted,) = (text for command, text in cluster.printed.items() if "gpulease acquire" in command)
    state, first, *logged = granted.split()
    assert (state, logged[-2]) == ("active", "gpulease"), granted
    assert re.fullmatch(r"GPU-[0-9a-f-]{36}", first)
    assert re.fullmatch(r"GPU-[0-9a-f-]{36}", logged[-1])
    shown = cluster.nodes()[NAME]
    assert (shown["address"], shown["interface"], shown["gpu_count"]) == (NODE, "wire0", 4)
    assert set(cluster.secret("gpulease-database")) == {"url"}
    assert set(cluster.secret("gpulease-join")) == {NAME}


def test_the_example_pod_gets_gpus_of_its_node_and_its_processes_are_its_own(cluster: Cluster) -> None:
    user = cluster.secret("gpulease-user")
    assert user["token"].startswith(b"token-")
    pod = yaml.safe_load((cluster.home / "pod.yaml").read_text())["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    for name, value in user.items():
        path = f"{mount['mountPath']}/{name}"
        written = cluster.node.run("sh", "-ec", f"mkdir -p {mount['mountPath']} && cat >{path}", text=value.decode())
        assert written.returncode == 0
        cluster.node.run("sh", "-ec", f"chown 0:{USER} {path} && chmod 440 {path}")
    assert pod["securityContext"]["runAsUser"] == USER
    script = "echo $CUDA_VISIBLE_DEVICES >/srv/granted; exec sleep 600"
    command = [*container["command"][: container["command"].index("--")], "--", "sh", "-c", script]
    cluster.node.run("chmod", "1777", "/srv")
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *cluster.readable, "--"]
    own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    own = {"PATH": cluster.path, "HOME": "/", **variables(container, {}, {})}
    running = cluster.node.launch(cluster.place / "pod.log", *own_processes, *as_user, *command, **own)
    eventually(lambda: cluster.node.run("test", "-s", "/srv/granted").returncode == 0, UP_S, cluster.story)
    mine = set(cluster.node.run("cat", "/srv/granted").stdout.strip().split(","))

    def activity() -> list[tuple[str, str | None]]:
        listed = cluster.type("kubectl -n gpulease exec statefulset/gpulease -- gpulease gpu list --json")
        return [(one["state"], one.get("activity")) for one in json.loads(listed)["items"] if one["uuid"] in mine]

    eventually(lambda: activity() == [("leased", "active")] * 2, UP_S, lambda: f"{activity()}\n{cluster.story()}")
    running.kill()


def test_over_tcp_only_a_token_counts_and_in_the_pod_the_socket_does(cluster: Cluster) -> None:
    forwarded = cluster.pod.run("curl", "-sk", "https://127.0.0.1:8750/v1/me")
    assert json.loads(forwarded.stdout)["code"] == "not_authenticated", "root, as `kubectl port-forward` connects"
    inside = cluster.type("kubectl -n gpulease exec statefulset/gpulease -- gpulease token list --json")
    assert {one["role"] for one in json.loads(inside)["items"]} == {"worker", "user"}, "and no join token is left"


def test_a_node_without_a_token_says_what_to_do_and_a_spent_one_is_not_sent_again(cluster: Cluster) -> None:
    again = cluster.join()
    assert (again.returncode, again.stdout) == (0, ""), again.stderr
    cluster.node.run("mv", f"{STATE}/joined-with", "/srv/joined-with")
    again = cluster.join()
    assert again.returncode == 0
    assert "used already" in again.stderr
    assert "goes on with the token that it has" in again.stderr
    cluster.node.run("mv", f"{STATE}/token", "/srv/token")
    assert cluster.join().returncode == 1
    without = cluster.join(offered=False)
    assert without.returncode == 1
    assert "Secret gpulease-join has no join token for node gpubox2; see docs/howto/kubernetes.md" in without.stderr
    for name in ("token", "joined-with"):
        cluster.node.run("mv", f"/srv/{name}", f"{STATE}/{name}")


def test_a_worker_that_is_deleted_leaves_and_the_next_pod_is_the_node_again(cluster: Cluster) -> None:
    execute = "kubectl -n gpulease exec statefulset/gpulease --"
    job = cluster.type(f"{execute} gpulease submit -n 1 -- sh -c 'echo begun; exec sleep 600'").strip()
    shown = f"{execute} gpulease jobs --json --all"

    def state() -> str:
        return next(one["state"] for one in json.loads(cluster.type(shown))["items"] if one["id"] == job)

    eventually(lambda: state() == "running", UP_S, cluster.story)
    began = time.monotonic()
    cluster.delete_worker()
    print(f"the node left within {time.monotonic() - began:.1f} s")
    assert cluster.nodes() == {}
    assert state() == "queued"
    cluster.start_worker()
    cluster.await_node()
    eventually(lambda: state() == "running", UP_S, cluster.story)
