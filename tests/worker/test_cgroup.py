"""A job's cgroup: where it is made, and that nothing in it survives its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpulease_worker.jobs import cgroup, job_records
from gpulease_worker.processes import procfs
from tests.worker.build import order, spec, until
from tests.worker.play import Worker, play

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
    found = cgroup.own_directory(mounts, own)
    assert (None if found is None else str(found)) == expected


def test_cgroups_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_CGROUPS", "off")
    assert cgroup.create("lease-never-made") is None


def test_a_process_outside_tree_and_marker_is_ended_with_the_cgroup(tmp_path: Path) -> None:
    job = order("j", spec("sh", "-c", "exit 3"))
    own = cgroup.own_directory()

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
    group = cgroup.create("gpulease-test-group")
    if group is None:
        assert cgroup.own_directory() is None or not (cgroup.own_directory() / "cgroup.kill").exists()  # type: ignore[operator]
        return
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=group.enter)  # noqa: PLW1509
    try:
        assert {member.pid for member in group.members()} == {sleeper.pid}
        assert procfs.in_cgroup_of(sleeper.pid, "gpulease-test-group")
        group.kill()
        until(lambda: sleeper.poll() is not None, "it is dead")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert group.remove()
