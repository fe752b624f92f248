"""A job's cgroup: where it is made, and that nothing in it survives its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease_worker.jobs import cgroup, cgroup_fork, job_records, launch_plan, spawn
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.processes import cgroup_directory
from tests.worker.build import order, spec, until
from tests.worker.play import Worker, play
from tests.worker.strangers import in_a_process

V1 = "17 31 0:35 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
UNIFIED = "20 41 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "own", "expected"),
    [
        (V1 + UNIFIED, "8:pids:/\n0::/\n", "/sys/fs/cgroup/unified"),
        (V1 + UNIFIED, "0::/system.slice/gpulease.service\n", "/sys/fs/cgroup/unified/system.slice/gpulease.service"),
        ("9 1 0:3 /box /cg\\040two rw - cgroup2 none rw\n", "0::/box/inner\n", "/cg two/inner"),
        ("9 1 0:3 /box /cg rw - cgroup2 none rw\n", "0::/boxer\n", None),
        (UNIFIED, "0::/../outside\n", None),
        (V1, "8:pids:/\n0::/\n", None),
        (UNIFIED, "8:pids:/\n", None),
    ],
)
def test_the_cgroup_of_a_process_is_found_wherever_it_is_mounted(mounts: str, own: str, expected: str | None) -> None:
    found = cgroup_directory.own_directory(mounts, own)
    assert (None if found is None else str(found)) == expected


def test_cgroups_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_CGROUPS", "off")
    assert cgroup.create("lease-never-made") is None
    said = "pids.max of 5 is not set for jobs: this worker cannot have cgroups (version 2)"
    assert cgroup.prepare({"pids.max": 5}) == [said]


def test_a_process_outside_tree_and_marker_is_ended_with_the_cgroup(tmp_path: Path) -> None:
    job = order("j", spec("sh", "-c", "exit 3"))
    own = cgroup_directory.own_directory()

    async def story(worker: Worker) -> None:
        report = await worker.end_of(job)
        assert report.exit_code == 3
        start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        if start.cgroup is None:  # this machine allows no one to create one
            assert cgroup.create(f"{job.lease_id}-probe") is None
            return
        assert own is not None
        assert start.cgroup == str(own / job.lease_id)
        assert not os.path.exists(start.cgroup), "it is to be removed with the job"  # noqa: ASYNC240

    play(tmp_path, story)


def test_a_process_outside_tree_and_marker_is_a_member_of_the_cgroup() -> None:
    name = f"gpulease-test-group-{os.getpid()}"
    group = cgroup.create(name)
    if group is None:
        own = cgroup_directory.own_directory()
        assert own is None or not (own / "cgroup.kill").exists()
        return
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=group.enter)  # noqa: PLW1509
    try:
        assert {member.pid for member in group.members()} == {sleeper.pid}
        assert cgroup_directory.leases_of(sleeper.pid, (name,))
        group.kill()
        until(lambda: sleeper.poll() is not None, "it is dead")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert group.remove()


def limit_a_job(place: str, file: str) -> None:
    """As a worker whose only process is this one: move below `place`, and run a job with a limit."""
    (Path(place) / "cgroup.procs").write_text("0")
    limits = {file: 4096 * 2**21}
    print(cgroup.prepare(limits), cgroup_directory.own_directory() == Path(place) / cgroup.LEAF, cgroup.prepare(limits))
    group = cgroup.create("lease-of-a-test", limits)
    assert group is not None
    job = subprocess.run(["cat", "/proc/self/cgroup"], preexec_fn=group.enter, check=True, capture_output=True)
    print(group.limited, (group.path / file).read_text().strip(), b"/lease-of-a-test" in job.stdout, group.remove())


def limit_beside_others(place: str, file: str) -> None:
    """As a worker that is not alone in its cgroup."""
    (Path(place) / "cgroup.procs").write_text("0")
    beside = subprocess.Popen(["sleep", "60"])
    try:
        (problem,) = cgroup.prepare({file: 1})
        group = cgroup.create("lease-of-a-test", {file: 1})
        assert group is not None
        print(problem.partition(place)[0], group.limited, group.remove())
    finally:
        beside.kill()
        beside.wait()


@pytest.fixture
def limitable() -> Iterator[tuple[str, str] | None]:
    """A cgroup of the test's own whose children can be limited, with the file of a limit: that of processes where the
    kernel has this controller in version 2; None where root may not change cgroups, or there is no controller."""
    parent = cgroup_directory.own_directory()
    files = {"pids": "pids.max", "hugetlb": "hugetlb.2MB.max"}
    try:
        if parent is None:
            raise FileNotFoundError
        switch = parent / "cgroup.subtree_control"
        found = [name for name in files if name in (parent / "cgroup.controllers").read_text().split()]
        enabled = set(found) & {*switch.read_text().split()}
        switch.write_text(f"+{found[0]}")
        place = parent / f"gpulease-test-{os.getpid()}"
        place.mkdir()
    except (OSError, IndexError):
        yield None
        return
    try:
        yield str(place), files[found[0]]
    finally:
        assert cgroup.Cgroup(place).remove()
        if found[0] not in enabled:
            with suppress(OSError):
                switch.write_text(f"-{found[0]}")


def test_a_worker_that_is_alone_in_its_cgroup_limits_its_jobs_and_another_says_that_it_does_not(
    limitable: tuple[str, str] | None,
) -> None:
    if limitable is None:
        assert cgroup.prepare({"pids.max": 1}) != []
        return
    said = in_a_process(limit_beside_others, *limitable)
    assert said == f"{limitable[1]} of 1 is not set for jobs: there are other processes in  False True\n"
    prepared, limited = in_a_process(limit_a_job, *limitable).splitlines()
    assert prepared == "[] True []"
    assert limited == f"True {4096 * 2**21} True True"


def test_a_worker_that_systemd_has_started_in_its_units_cgroup_stays_there(tmp_path: Path) -> None:
    place = tmp_path / "gpulease-worker.service"
    place.mkdir()
    with pytest.raises(OSError, match="from version 254 on it does not"):
        cgroup._move_to_leaf(place)


def test_limits_are_of_the_controllers_that_are_asked_for() -> None:
    assert JobSettings().cgroup_limits == {"pids.max": 32768}
    assert JobSettings(max_processes=0, memory_bytes=2**40).cgroup_limits == {"memory.max": 2**40}


def fork_into(directory: str) -> None:
    """Print what the child is and where, and how it ended. In a process with one thread, as a supervisor has: elsewhere
    another thread may hold a lock of malloc, for which the child of a bare clone waits forever."""
    pid = cgroup_fork.fork_into(Path(directory))
    if pid == 0:
        print(os.getpid(), cgroup_directory.own_directory(), flush=True)
        os._exit(7)
    assert pid is not None, "a kernel since 5.7 can do this"
    print(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_process_is_forked_into_a_cgroup() -> None:
    group = cgroup.create(f"gpulease-test-fork-{os.getpid()}")
    if group is None:  # this machine allows no one to create one
        return
    try:
        pid, place, same, code = in_a_process(fork_into, str(group.path)).split()
        assert (place, same, code) == (str(group.path), pid, "7")
    finally:
        assert group.remove()


def test_where_that_is_not_possible_nothing_is_forked(tmp_path: Path) -> None:
    assert cgroup_fork.fork_into(tmp_path) is None
    assert cgroup_fork.fork_into(tmp_path / "missing") is None


def spawn_into(directory: str, place: str | None, can_fork: bool) -> None:
    """A job that shows its cgroup in a log of this directory. In a process with one thread, as `fork_into`."""
    if not can_fork:
        cgroup_fork.fork_into = lambda directory: None
    job, here = order("j", spec("cat", "/proc/self/cgroup")), Path(directory)
    plan = launch_plan.plan_launch(job, own=os.environ, url="", python=sys.executable, work=here, logs=here)
    group = None if place is None else cgroup.Cgroup(Path(place), limited=False)
    with (here / "log").open("wb") as log:
        child = spawn.spawn(plan, log.fileno(), group)
    os.waitpid(child.pid, 0)
    child.close()


@pytest.mark.parametrize("into", [True, False])
def test_a_job_runs_in_its_cgroup_from_the_beginning(tmp_path: Path, into: bool) -> None:
    """Whether it was made there, or had to move."""
    group = cgroup.create(f"gpulease-test-spawn-{os.getpid()}")
    in_a_process(spawn_into, str(tmp_path), None if group is None else str(group.path), into)
    if group is not None:
        assert group.remove()
        assert f"/{group.path.name}\n" in (tmp_path / "log").read_text()
