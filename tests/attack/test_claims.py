"""A process may name a lease of another user, in its environment or its cgroup: that is a claim, and proves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from tests.attack.attacked import END_S, Attacked
from tests.attack.host import UIDS, Program, python
from tests.daemon import eventually

pytestmark = pytest.mark.slow

MARKER = "GPULEASE_LEASE_ID"
RESPAWN = """
import os, sys
def start():
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "1000"], {sys.argv[1]: sys.argv[2]})
for _ in range(4):
    start()
print("ready", flush=True)
while True:
    _, status = os.wait()
    start()
    print("ended by signal", -os.waitstatus_to_exitcode(status), flush=True)
"""
"""Processes that name a lease, each started again at once when it ends, by one that names none."""
CLAIM = """
import os, sys
claim, path, cgroup = sys.argv[1:]
os.set_inheritable(os.open(path, os.O_RDONLY), True)
if claim == "marker of its parent" and os.fork():
    os.wait()
if claim == "cgroup":
    os.mkdir(cgroup)
    open(cgroup + "/cgroup.procs", "w").write("0")
print(os.getpid(), "ready", flush=True)
os.execve("/bin/sleep", ["sleep", "1000"], os.environ if claim == "own marker" else {})
"""
"""A process that claims a lease, and has a file open."""


@pytest.mark.parametrize("what", ["job", "lease"])
def test_processes_of_eve_that_name_a_lease_of_ada_keep_neither_job_nor_gpu(attacked: Attacked, what: str) -> None:
    job = attacked.running_job("ada") if what == "job" else None
    lease = attacked.daemon.lease(job["lease_id"]) if job else attacked.lease("ada")
    (gpu,) = lease["gpus"]
    with attacked.host.running("eve", *python(RESPAWN, MARKER, attacked.public_lease(lease["id"]))) as eve:
        eve.wait_for("ready")
        if job:
            attacked.cancel("ada", job)
            assert attacked.wait_ended(job)["state"] == "cancelled"
        else:
            attacked.release("ada", lease)
        attacked.wait_free(gpu["uuid"])
        assert eve.output() == "ready\n", "processes of eve were ended, by root"


def test_root_ends_no_process_of_others_that_names_a_lease_of_eve(attacked: Attacked) -> None:
    """Such as a shell that has read the file in which another user has saved the variables of a lease."""
    job = attacked.running_job("eve")
    with ExitStack() as stack:
        victims = named(attacked, stack, job["lease_id"])
        attacked.cancel("eve", job)
        attacked.wait_ended(job)
        attacked.wait_free(job["gpus"][0]["uuid"])
        assert {user: process.alive() for user, process in victims.items()} == {"ada": True, "root": True}


def test_root_ends_no_process_of_others_that_is_left_on_a_gpu_of_eve(attacked: Attacked) -> None:
    """With --kill-leftovers, which ends what a lease without a job has left on its GPUs."""
    leases = [attacked.lease("eve") for _ in range(2)]
    first, second = (lease["gpus"][0]["uuid"] for lease in leases)
    with ExitStack() as stack:
        victims = named(attacked, stack, leases[0]["id"])
        own = stack.enter_context(attacked.host.running("eve", "sleep", "1000", **{MARKER: leases[1]["id"]}))
        pids = {first: [process.pid for process in victims.values()], second: [own.pid]}
        attacked.host.show_on_gpus(pids)
        for uuid, expected in pids.items():
            eventually(lambda: shown_pids(attacked, uuid) == sorted(expected), 60, attacked.daemon.story)  # noqa: B023
        for lease in leases:
            attacked.release("eve", lease)
        eventually(lambda: not own.alive(), 60, lambda: "nothing was ended that eve has left")
        # Both leases have ended before the first look at what is left, so the same round has looked at both.
        assert {user: process.alive() for user, process in victims.items()} == {"ada": True, "root": True}


@pytest.mark.parametrize("claim", ["none", "own marker", "marker of its parent", "cgroup"])
def test_a_process_of_eve_on_a_gpu_of_ada_is_a_conflict_whatever_it_claims(attacked: Attacked, claim: str) -> None:
    lease = attacked.lease("ada")
    (gpu,) = lease["gpus"]
    with claiming(attacked, claim, attacked.public_lease(lease["id"])) as pid:
        attacked.host.show_on_gpus({gpu["uuid"]: [pid]})
        eventually(lambda: shown_pids(attacked, gpu["uuid"]) == [pid], 60, attacked.daemon.story)

        def told() -> bool:
            return attacked.events("gpu.conflict", lease["id"]) != []

        eventually(told, END_S, lambda: f"no conflict was told of; the GPU: {attacked.gpu(gpu['uuid'])}")
        assert [process["lease_id"] for process in attacked.gpu(gpu["uuid"])["processes"]] == [None]
        problems = attacked.call("ada", "GET", f"/v1/leases/{lease['id']}").json["problems"]
        assert [problem for problem in problems if f"pid {pid} of eve" in problem] != [], problems
        attacked.release("ada", lease)
        # It is on the GPU, so the GPU is not free; but it is not what ada has left, so no one ends it for that.
        eventually(lambda: attacked.gpu(gpu["uuid"])["state"] in ("draining", "foreign"), 60)
        assert [process["lease_id"] for process in attacked.gpu(gpu["uuid"])["processes"]] == [None]
        assert lives(pid), "a process of eve was ended, by root"
        attacked.host.show_on_gpus({})
        attacked.wait_free(gpu["uuid"])


def test_nothing_that_eve_runs_is_counted_as_use_of_ada(attacked: Attacked) -> None:
    """What the driver shows of it is counted for the GPU, and not for the lease."""
    job = attacked.running_job("ada")
    uuid = job["gpus"][0]["uuid"]
    with attacked.host.running("eve", "sleep", "1000", **{MARKER: attacked.public_lease(job["lease_id"])}) as eve:
        begun = attacked.gpu(uuid)["observed_at"]
        readings: set[str] = set()

        def enough() -> bool:
            readings.add(attacked.gpu(uuid)["observed_at"])
            return len(readings - {begun}) >= 3

        eventually(enough, 60, attacked.daemon.story)
        shown = attacked.gpu(uuid)["processes"]
        assert {process["user"] for process in shown if process["lease_id"] == job["lease_id"]} <= {"ada"}
        assert eve.pid not in [process["pid"] for process in shown]
        (attempt,) = attacked.call("ada", "GET", f"/v1/jobs/{job['id']}/metrics").json["attempts"]
        (measured,) = attempt["gpus"]
        used = [value for value in measured["memory_used_bytes"]["max"] if value is not None]
        assert used
        assert max(used) <= len(shown) * 2**30, "the simulation counts 1 GiB for each process"


@pytest.mark.parametrize("claim", ["none", "own marker", "marker of its parent"])
def test_a_device_file_that_eve_keeps_open_delays_a_gpu_of_ada_and_does_not_keep_it(
    attacked: Attacked, claim: str
) -> None:
    lease = attacked.lease("ada")
    (gpu,) = lease["gpus"]
    device = attacked.host.directory / "device" / f"nvidia{gpu['index']}"
    with claiming(attacked, claim, attacked.public_lease(lease["id"]), opening=device) as pid:
        attacked.release("ada", lease)
        attacked.wait_free(gpu["uuid"])
        assert lives(pid), "a process of eve was ended, by root"


def lives(pid: int) -> bool:
    """True while it runs; false for one that has ended and that its parent has not asked for."""
    return ProcessId.of(pid) is not None


def shown_pids(attacked: Attacked, uuid: str) -> list[int]:
    """The processes that the daemon shows on a GPU."""
    return [process["pid"] for process in attacked.gpu(uuid)["processes"]]


def named(attacked: Attacked, stack: ExitStack, lease_id: str) -> dict[str, Program]:
    """A process of each other user that has the marker of this lease."""
    environment = {MARKER: lease_id}
    return {
        user: stack.enter_context(attacked.host.running(user, "sleep", "1000", **environment))
        for user in ("ada", "root")
    }


@contextmanager
def claiming(attacked: Attacked, claim: str, lease_id: str, opening: Path = Path(os.devnull)) -> Iterator[int]:
    """A process of eve that claims to work under this lease, and has a file open; its pid."""
    marker = {MARKER: lease_id} if "marker" in claim else {}
    with ExitStack() as stack:
        words, user, cgroup = [], "eve", ""
        if claim == "cgroup":
            directory = stack.enter_context(delegated_cgroup())
            user, cgroup = "root", str(directory / lease_id)
            words = ["sh", "-c", 'echo 0 > "$1/cgroup.procs"; shift; exec "$@"', "sh", str(directory)]
            words += ["setpriv", f"--reuid={UIDS['eve']}", f"--regid={UIDS['eve']}", "--clear-groups"]
        words += python(CLAIM, claim, str(opening), cgroup)
        eve = stack.enter_context(attacked.host.running(user, *words, **marker))
        eve.wait_for("ready")
        yield int(eve.output().split()[0])


@contextmanager
def delegated_cgroup() -> Iterator[Path]:
    """A cgroup in which eve may make others, as systemd gives each user one."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    if not places or not os.access(places[0], os.W_OK):
        pytest.skip("there is no cgroup2 in which root may make directories")
    directory = Path(places[0]) / f"gpulease-attack-{os.getpid()}"
    directory.mkdir()
    try:
        for name in (".", "cgroup.procs"):
            os.chown(directory / name, UIDS["eve"], UIDS["eve"])
        yield directory
    finally:
        for place in (*directory.glob("lease-*"), directory):
            eventually(lambda place=place: removed(place), 60)


def removed(directory: Path) -> bool:
    """True when a cgroup is gone: it can be removed once its last process is reaped."""
    try:
        directory.rmdir()
    except OSError:
        return not directory.exists()
    return True
