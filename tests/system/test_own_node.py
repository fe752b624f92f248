"""Commands that run something here mean the GPUs of this host, whatever other hosts are called."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.host_fleet import Fleet, fleet
from tests.hosts import Host

pytestmark = [pytest.mark.slow, pytest.mark.budget(60)]

FIND = "import gpulease, os; gpulease.find_usable_cuda_devices(1); print(gpulease.reserved_leases()[0].gpus[0].node)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, dict[str, Host]]]:
    """Three hosts of which two are called `box`; the third, `desk`, has no node."""
    with fleet(tmp_path_factory.mktemp("fleet")) as made:
        hosts = {"n1": made.host("box"), "n2": made.host("box"), "desk": made.host("desk")}
        for node in ("n1", "n2"):
            made.start_worker(hosts[node], node)
        yield made, hosts


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_run_shell_acquire_and_devices_mean_the_host_on_which_they_are_typed(
    lab: tuple[Fleet, dict[str, Host]], node: str
) -> None:
    made, hosts = lab
    host, client = hosts[node], made.client()
    ran = host.gpulease("run", "--wait", "60s", "-n", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", **client)
    uuids = {gpu["uuid"] for gpu in made.daemon.gpus() if gpu["node"] == node}
    assert ran.stdout.strip() in uuids, ran.stderr
    shell = host.gpulease("shell", "--wait", "60s", "-n", "2", **client | {"SHELL": "/usr/bin/env"})
    mask = shell.stdout.partition("CUDA_VISIBLE_DEVICES=")[2].split("\n")[0]
    assert set(mask.split(",")) == uuids, shell.stderr
    acquired = host.gpulease("acquire", "--wait", "60s", "--detach", "--json", **client)
    lease = json.loads(acquired.stdout)
    assert [gpu["node"] for gpu in lease["gpus"]] == [node], acquired.stderr
    made.daemon.release(lease)
    found = host.run(sys.executable, "-c", FIND, **client | {"GPULEASE_WAIT_S": "60"})
    assert found.stdout.strip() == node, found.stderr


def test_another_node_is_had_by_its_name_or_with_any(lab: tuple[Fleet, dict[str, Host]]) -> None:
    made, hosts = lab
    client = made.client()
    acquired = hosts["n1"].gpulease("acquire", "--wait", "60s", "--detach", "--json", "--node", "n2", **client)
    lease = json.loads(acquired.stdout)
    assert [gpu["node"] for gpu in lease["gpus"]] == ["n2"], acquired.stderr
    second = hosts["n2"].gpulease("run", "--wait", "60s", "-n", "2", "--node", "any", "--", "true", **client)
    assert second.returncode == 0, second.stderr
    made.daemon.release(lease)


def test_a_host_without_a_node_runs_nothing_on_gpus_of_others_and_says_what_to_do(
    lab: tuple[Fleet, dict[str, Host]],
) -> None:
    made, hosts = lab
    client = made.client()
    for words in (("run", "-n", "1", "--", "true"), ("shell",)):
        refused = hosts["desk"].gpulease(*words, **client)
        assert refused.returncode == 125, refused.stderr
        assert "This host (desk) has no node of the daemon, which has n1, n2" in refused.stderr
        assert "gpulease submit" in refused.stderr
    acquired = hosts["desk"].gpulease("acquire", "--wait", "60s", "--detach", "--json", **client)
    made.daemon.release(json.loads(acquired.stdout))
    found = hosts["desk"].run(sys.executable, "-c", FIND, **client)
    assert "no visible CUDA devices on this machine" in found.stderr
    submitted = hosts["desk"].gpulease("submit", "--", "true", **client)
    assert submitted.returncode == 0, submitted.stderr
    made.daemon.wait_job(submitted.stdout.strip(), "succeeded")


def test_it_is_the_same_just_after_a_restart_of_the_daemon(lab: tuple[Fleet, dict[str, Host]]) -> None:
    made, hosts = lab
    made.daemon.kill()
    made.daemon.start(ready=False)
    nodes = {node["name"]: node["realm"].split("/")[0] for node in made.daemon.get("/v1/nodes").json["items"]}
    assert nodes == {name: hosts[name].sh("cat /proc/sys/kernel/random/boot_id").strip() for name in ("n1", "n2")}
