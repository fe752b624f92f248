"""Gangs from the command line and Python, with a daemon, its worker, and a second worker on the same host."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client, GpuleaseError, GpuState
from tests.cli.programs import Program, environ, wait_until
from tests.daemon import PATIENT
from tests.imported_program import ForkedProgram


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place: Path = tmp_path_factory.mktemp("gangs")
    address = f"unix://{place / 'gpulease.sock'}"
    serve = ["serve", "--simulate", "2", "--node", "n1", "--port", "0", "--data-dir", str(place)]
    worker = ["worker", "--simulate", "2", "--node", "n2", "--url", address, "--data-dir", str(place / "n2")]
    programs = [ForkedProgram(serve, environ(**PATIENT), place / "serve.log")]

    def reachable(nodes: int) -> bool:
        """So many nodes report, with an address."""
        assert all(program.poll() is None for program in programs), (place / "serve.log").read_text()
        try:
            with Client(address) as client:
                return sum(node.address is not None for node in client.nodes()) == nodes
        except GpuleaseError:
            return False

    try:
        wait_until(lambda: reachable(1), 60)
        programs.append(ForkedProgram(worker, environ(**PATIENT), place / "worker.log"))
        wait_until(lambda: reachable(2), 60)
        yield address
    finally:
        for program in reversed(programs):
            program.send_signal(signal.SIGTERM)
            try:
                program.wait(60)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def test_a_gang_is_acquired_shown_explained_and_released(client: Client, gpulease: Program) -> None:
    made = gpulease("acquire", "--nodes", "2", "-n", "2", "--wait", "60s", "--detach", "--json")
    assert made.returncode == 0, made.stderr
    lease = json.loads(made.stdout)
    assert [(one["rank"], one["node"], len(one["gpus"])) for one in lease["members"]] == [(0, "n1", 2), (1, "n2", 2)]
    try:
        shown = gpulease("show", lease["id"]).stdout
        assert "node 0     n1 (127.0.0.1)" in shown
        assert "node 1     n2 (127.0.0.1)" in shown
        assert "2 GPUs on each of 2 nodes" in shown
        assert "n1:0-1, n2:0-1" in gpulease("leases").stdout
        assert "Granted: GPUs 0, 1 of n1; GPUs 0, 1 of n2." in gpulease("explain", lease["id"]).stdout

        refused = gpulease("acquire", "--nodes", "2", "-n", "1")
        assert refused.returncode == 1, refused.stderr
        assert "1 GPU on each of 2 nodes" in refused.stderr
    finally:
        assert gpulease("release", lease["id"]).returncode == 0
    wait_until(lambda: {gpu.state for gpu in client.gpus()} == {GpuState.FREE})


def test_a_shell_is_bound_to_the_first_node_of_its_gang(client: Client, gpulease: Program) -> None:
    made = gpulease("acquire", "--nodes", "2", "--wait", "60s", "--detach", NCCL_SOCKET_IFNAME="ib0")
    assert made.returncode == 0, made.stderr
    exported = dict(line.removeprefix("export ").split("=", 1) for line in made.stdout.splitlines())
    assert (exported["NNODES"], exported["NODE_RANK"]) == ("2", "0")
    assert exported["GPULEASE_NODES"] == "127.0.0.1,127.0.0.1"
    assert exported["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in exported, "that of the shell's own stays"
    assert "GPU 0 of n1; GPU 0 of n2" in made.stderr
    assert gpulease("release", exported["GPULEASE_LEASE_ID"]).returncode == 0


def test_python_holds_a_gang(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with client.lease(2, nodes=2, wait_s=60) as lease:
        assert [member.node for member in lease.members] == ["n1", "n2"]
        environment = lease.environ()
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in lease.members[0].gpus)
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


def test_what_no_gang_can_be_is_a_usage_error(gpulease: Program) -> None:
    for arguments in (("--nodes", "2", "--node", "n1"), ("--nodes", "2", "--devices", "auto"), ("--nodes", "0")):
        refused = gpulease("acquire", *arguments)
        assert refused.returncode == 2, refused.stderr
        assert "nodes" in refused.stderr
