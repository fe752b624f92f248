"""Jobs on several hosts, each with a network, processes and disks of its own: they train, and they end together.

The name of each host resolves to 127.0.1.1, as on Debian.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_worker.processes import lease_claims
from tests.daemon import eventually
from tests.digits import LIGHT_DIGITS
from tests.host_fleet import Fleet, fleet
from tests.hosts import Host

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES = ("n1", "n2", "n3")
ENDS_S = 30.0
"""Within this time a failure on one node must have ended the job on all."""
RANK = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, dict[str, Host]]]:
    """A daemon and three hosts with two GPUs each."""
    with fleet(tmp_path_factory.mktemp("fleet")) as made:
        found = {name: boot(made, name) for name in NODES}
        yield made, found


def boot(made: Fleet, name: str) -> Host:
    host = made.host(name)
    host.sh(f"printf '127.0.0.1 localhost\\n127.0.1.1 {name}\\n' > /srv/hosts && mount --bind /srv/hosts /etc/hosts")
    made.start_worker(host, name)
    return host


def submit(made: Fleet, *command: str, **fields: Any) -> str:
    asked = {
        "launcher": "torchrun",
        "gpus": 2,
        "nodes": 2,
        "interpreter": sys.executable,
        "working_directory": str(EXAMPLES),
        "environment": LIGHT_DIGITS,
    }
    return made.daemon.submit(*command, **asked | fields)


def script(tmp_path: Path) -> str:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return str(path)


def running(made: Fleet, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """A job whose ranks run on the first two nodes that are free."""
    job = submit(made, script(tmp_path), **fields)
    found = made.daemon.wait_job(job, "running", "failed", "lost", within_s=240)
    assert found["state"] == "running", found
    return found


def logs(hosts: dict[str, Host], job: dict[str, Any], rank: int, name: str) -> str:
    member = job["members"][rank]
    return hosts[member["node"]].sh(f"cat {member['log_directory'].partition(':')[2]}/{name}")


def processes(job: dict[str, Any]) -> set[int]:
    """Processes of the job on all hosts, as this machine counts them."""
    return {process.pid for process in lease_claims.claimants({job["lease_id"]: None})}


def ends(made: Fleet, job: dict[str, Any], begun_s: float, *states: str) -> dict[str, Any]:
    """The job once it has ended, in time and on all hosts."""
    ended = made.daemon.wait_job(job["id"], *states, within_s=120)
    took_s = time.monotonic() - begun_s
    assert not processes(job), "processes of the job are left"
    assert took_s < ENDS_S, f"it took {took_s:.1f} s"
    return ended


@pytest.mark.budget(240)
@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("torchrun", ["ddp_digits.py", "--epochs", "10"]),
        ("accelerate", ["ddp_digits.py", "--epochs", "10"]),
        ("lightning", ["lightning_digits.py"]),
        pytest.param("deepspeed", ["ddp_digits.py", "--epochs", "10"], marks=pytest.mark.soak),
    ],
)
def test_four_ranks_on_two_hosts_train(hosts: tuple[Fleet, dict[str, Host]], launcher: str, command: list[str]) -> None:
    made, found = hosts
    job = made.daemon.wait_job(submit(made, *command, launcher=launcher), within_s=300)
    printed = "".join(logs(found, job, rank, "launcher.log") for rank in range(2))
    assert (job["state"], job["exit_code"]) == ("succeeded", 0), (job, printed)
    views = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '{"rank"' in line]
    assert sorted((view["rank"], view["world_size"]) for view in views) == [(rank, 4) for rank in range(4)]
    assert all(view["test_accuracy"] > 0.95 for view in views), views


@pytest.mark.budget(120)
@pytest.mark.parametrize(
    ("what", "words", "reason"),
    [
        (
            "rank",
            "pkill -KILL -o -f '^[^ ]*python[^ ]* -u .*rank.py'",
            "On node {}: Rank 2 failed first: it was ended by SIGKILL (by the kernel if memory was short: see dmesg).",
        ),
        (
            "launcher",
            "pkill -KILL -f '[-]m torch.distributed.run'",
            "On node {}: The command was ended by SIGKILL (by the kernel if memory was short: see dmesg).",
        ),
        ("supervisor", "kill -KILL {supervisor}", "On node {}: The job's supervisor died; its processes were killed."),
    ],
)
def test_what_is_killed_on_one_host_ends_the_job_on_both(
    hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path, what: str, words: str, reason: str
) -> None:
    made, found = hosts
    job = running(made, tmp_path)
    second = job["members"][1]
    place = second["log_directory"].partition(":")[2].removesuffix("/logs")
    supervisor = json.loads(found[second["node"]].sh(f"cat {place}/start.json"))["supervisor"]["pid"]
    found[second["node"]].sh("until pgrep -f '^[^ ]*python[^ ]* -u .*rank.py'; do sleep 0.1; done")
    begun_s = time.monotonic()
    found[second["node"]].sh(words.replace("{supervisor}", str(supervisor)))
    ended = ends(made, job, begun_s, "failed")
    assert ended["reason"] == reason.format(second["node"])
    assert ended["exit_code"] == (None if what == "supervisor" else 137)


@pytest.mark.budget(120)
def test_a_killed_worker_ends_nothing(hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path) -> None:
    made, found = hosts
    job = running(made, tmp_path)
    node = job["members"][1]["node"]
    made.workers[node].kill()
    made.workers[node].wait()
    found[node].sh("pkill -KILL -f 'gpulease_cli [w]orker'; true")
    eventually(lambda: made.states(node) == ["unknown"] * 2, 60, made.daemon.story)
    made.launch_worker(found[node], node)
    eventually(lambda: made.states(node) == ["leased"] * 2, 120, made.daemon.story)
    assert made.daemon.job(job["id"])["state"] == "running"
    made.daemon.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 2})
    ends(made, job, time.monotonic(), "cancelled")


@pytest.mark.budget(120)
def test_a_port_that_is_taken_is_named(hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path) -> None:
    made, found = hosts
    listen = (
        "import resource, socket, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "kept = [socket.create_server(('', port)) for port in range(21000, 23000)]\n"
        "open('/srv/listening', 'w').close()\n"
        "time.sleep(600)"
    )
    listeners = [found[node].popen(sys.executable, "-c", listen, log=tmp_path / f"{node}.log") for node in NODES]
    try:
        for node in NODES:
            found[node].sh("until test -e /srv/listening; do sleep 0.1; done")
        job = submit(made, script(tmp_path), retries=0)
        ended = made.daemon.wait_job(job, "failed", within_s=120)
        node, port = ended["members"][0]["node"], made.daemon.lease(ended["lease_id"])["env"]["MASTER_PORT"]
        said = f"Port {port} of node {node} cannot be used for the rendezvous: Address already in use."
        assert ended["reason"] == said
    finally:
        for node in NODES:
            found[node].sh("pkill -KILL -f '[c]reate_server'; true")
        for listener in listeners:
            listener.wait(timeout=60)


@pytest.mark.budget(180)
@pytest.mark.parametrize("fault", ["cut", "power_off"])
def test_a_host_that_is_gone_ends_the_job_on_the_other_and_it_is_tried_with_a_third(
    hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path, fault: str
) -> None:
    made, found = hosts
    eventually(lambda: all(made.states(node) == ["free"] * 2 for node in NODES), 120, made.daemon.story)
    job = running(made, tmp_path, retries=1)
    first, gone = (member["node"] for member in job["members"])
    here = processes(job)
    begun_s = time.monotonic()
    found[gone].cut()
    if fault == "power_off":  # without the cut, the kernel would still say good-bye for its processes
        found[gone].power_off()
    try:
        eventually(lambda: not here & processes(job), 60, made.daemon.story)
        took_s = time.monotonic() - begun_s
        assert took_s < ENDS_S, f"it took {took_s:.1f} s"
        eventually(lambda: made.daemon.job(job["id"])["attempt_history"], 120, made.daemon.story)
        again = made.daemon.wait_job(job["id"], "running", within_s=240)
        reason = again["attempt_history"][0]["reason"]
        address = found[gone].address
        assert reason == (
            f"Node {gone} is silent. Node {gone} ({address}) can no longer be reached from node {first}: no answer."
        )
        assert gone not in [member["node"] for member in again["members"]]
    finally:
        made.daemon.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 2})
        made.daemon.wait_job(job["id"], within_s=120)
        if fault == "cut":
            found[gone].repair()
            eventually(lambda: made.states(gone) == ["free"] * 2, 120, made.daemon.story)


@pytest.mark.budget(180)
def test_a_second_node_that_never_comes_is_named(hosts: tuple[Fleet, dict[str, Host]], tmp_path: Path) -> None:
    made, found = hosts
    # The test before has cut a host off, which is back before its GPUs are.
    eventually(lambda: sum(made.states(node) == ["free"] * 2 for node in NODES) >= 2, 120, made.daemon.story)
    job_id = submit(made, script(tmp_path))
    job = made.daemon.wait_job(job_id, "starting", within_s=60)
    gone = job["members"][1]["node"]
    begun_s = time.monotonic()
    found[gone].cut()
    try:
        eventually(lambda: made.daemon.job(job_id)["state"] == "stopping", 60, made.daemon.story)
        assert time.monotonic() - begun_s < ENDS_S
        assert gone in made.daemon.job(job_id)["reason"]
    finally:
        found[gone].repair()
    ended = made.daemon.wait_job(job_id, "failed", "lost", within_s=120)
    assert f"ode {gone}" in ended["reason"]
