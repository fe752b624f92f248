"""A marker is a claim: it counts only for processes of the lease's user, and reading it costs little."""

from __future__ import annotations

import asyncio
import mmap
import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_protocol.node_protocol import RunState
from gpulease_worker.jobs import job_records
from gpulease_worker.probe import process_attribution
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.probe.simulation import SimulatedReader
from gpulease_worker.processes import cgroup_directory, lease_cache, lease_claims, procfs
from gpulease_worker.processes.lease_cache import CachedLease, LeaseCache
from gpulease_worker.processes.leftover_cleanup import LeftoverCleanup
from gpulease_worker.processes.user_names import UserIdCache
from tests.worker.build import GPUS, kill, lease, order, spec, until
from tests.worker.play import Worker, play
from tests.worker.strangers import ANYONE, ROOT, STRANGER, passable, running_as

ANOTHER = ANYONE + 1
"""Not the user that the tests start processes as."""
LARGE = {f"A{number}": "x" * 100_000 for number in range(10)}
"""An environment of 1 MB."""
RESPAWN = """
again() { while :; do env GPULEASE_LEASE_ID=$LEASE sleep 1000; echo ended; done; }
for one in 1 2 3 4; do again & done; wait
"""
"""A program without a marker that starts processes with one again and again."""


def held(lease_id: str, uid: int | None, *, ended: bool = False, **what: object) -> CachedLease:
    state = LeaseState.ENDED if ended else LeaseState.ACTIVE
    return CachedLease(id=lease_id, state=state, gpus=(GPUS[0],), uid=uid, **what)  # type: ignore[arg-type]


def gpu(*pids: int) -> GpuReading:
    return GpuReading(uuid=GPUS[0], node="n", index=0, processes=tuple(Process(pid=pid) for pid in pids))


@contextmanager
def claiming(lease_id: str, *command: str, uid: int = ANYONE, **environment: str) -> Iterator[int]:
    """Pid of a process with a marker that is ready."""
    variables = {lease_claims.MARKER: lease_id} | environment
    with running_as(uid, *(command or ("sh", "-c", "echo up; exec sleep 600")), **variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid


USERS = pytest.mark.parametrize(
    ("uid", "counts"),
    [(ANYONE, True), (ANOTHER, False), (lease_claims.NO_USER, False), (None, True)],
    ids=["its own", "another", "not known yet", "not told by the daemon"],
)


@USERS
def test_on_a_gpu_the_claim_of_the_leases_user_alone_makes_no_conflict(uid: int | None, counts: bool) -> None:
    with claiming("mine") as pid:
        found = process_attribution.attribute(Reading(gpus=(gpu(pid),)), [held("mine", uid)])
        assert [process.lease_id for process in found.gpus[0].processes] == ["mine" if counts else None]


@USERS
def test_an_opener_of_a_draining_gpu_is_the_leases_by_the_claim_of_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int | None, counts: bool
) -> None:
    with passable() as place:
        monkeypatch.setenv(process_attribution.DEVICE_FILES, str(place / "nvidia"))
        device = place / "nvidia0"
        device.write_bytes(b"\0" * mmap.PAGESIZE)
        device.chmod(0o666)
        with claiming("mine", "sh", "-c", f"exec 3<{device}; echo up; exec sleep 600") as pid:
            reading = Reading(gpus=(replace(gpu(), minor_number=0),))
            (shown,) = process_attribution.attribute(reading, [held("mine", uid, ended=True)]).gpus
            assert {one.pid: one.lease_id for one in shown.opened_by or ()} == {pid: "mine" if counts else None}


@USERS
def test_a_simulated_gpu_is_used_by_the_processes_of_its_leases_user(uid: int | None, counts: bool) -> None:
    name = f"lease-{os.urandom(4).hex()}"
    with claiming(name) as pid:
        simulation = SimulatedReader("1", "n")
        on = simulation.read(()).gpus[0].uuid
        (shown,) = simulation.read([replace(lease(name, on), uid=uid)]).gpus
        assert [(process.pid, process.lease_id) for process in shown.processes] == ([(pid, name)] if counts else [])


@USERS
def test_of_what_a_lease_left_the_processes_of_its_user_alone_are_ended(uid: int | None, counts: bool) -> None:
    name = f"lease-{os.urandom(4).hex()}"

    async def look(pid: int) -> None:
        cleanup = LeftoverCleanup(False, 0.0)
        for _ in range(400 if counts else 10):
            cleanup.clean_up([held(name, uid, ended=True, job_id="j")], [gpu(pid)])
            await cleanup.close()
            if not lives(pid):
                return
            await asyncio.sleep(0.05)

    with claiming(name) as pid:
        asyncio.run(look(pid))
        assert lives(pid) is not counts


def test_a_claim_that_does_not_count_does_not_hide_that_of_an_ancestor() -> None:
    script = "GPULEASE_LEASE_ID=theirs sh -c 'echo up; echo $$; exec sleep 600'; :"
    variables = {lease_claims.MARKER: "mine"}
    with running_as(ANYONE, "sh", "-c", script, **variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        child = int(process.stdout.readline())
        for uids, expected in (
            ({"mine": ANYONE, "theirs": ANOTHER}, {child: "mine"}),
            ({"mine": ANYONE, "theirs": ANYONE}, {child: "theirs"}),
            ({"mine": ANOTHER, "theirs": ANOTHER}, {}),
        ):
            assert lease_claims.nearest_claims({child}, uids) == expected


def test_a_program_that_gains_rights_is_still_of_the_user_who_started_it() -> None:
    if not ROOT:
        return  # only root starts processes with two users
    environ = os.environ | {lease_claims.MARKER: "mine"}
    with subprocess.Popen(
        ["sleep", "600"],
        env=environ,
        preexec_fn=lambda: os.setresuid(0, STRANGER, STRANGER),  # noqa: PLW1509
    ) as process:
        try:
            effective = Path(f"/proc/{process.pid}/status").read_text().partition("Uid:")[2].split()[1]
            assert int(effective) == STRANGER
            assert lease_claims.claim_of(process.pid, {"mine": 0}) == "mine"
            assert lease_claims.claim_of(process.pid, {"mine": STRANGER}) is None
        finally:
            process.kill()


def test_of_large_environments_little_is_read_once_and_those_of_others_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """62 generations with 1 MB each took 2.3 s, and a reading has 0.9 s for everything."""
    sizes: list[int] = []
    environment = procfs.environment

    def read(pid: int, size_bytes: int = -1) -> bytes:
        found = environment(pid, size_bytes)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(procfs, "environment", read)
    script = 'if [ $1 -gt 0 ]; then sh -c "$0" "$0" $(($1 - 1)); else echo up; echo $$; sleep 600; fi; :'
    with running_as(ANYONE, "sh", "-c", script, script, "61", **LARGE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        last = int(first.stdout.readline())
        theirs = {"mine": ANOTHER}
        assert lease_claims.nearest_claims({last}, theirs) == {}
        assert not (set(lease_claims.claimants(theirs)))
        assert sizes == []
        begun_s = time.thread_time()
        assert lease_claims.nearest_claims({last}, {"mine": ANYONE}) == {}
        assert time.thread_time() - begun_s < 0.5
        assert len(sizes) >= 62
        assert max(sizes) == lease_claims.ENVIRONMENT_BYTES
        sizes.clear()
        assert lease_claims.nearest_claims({last}, {"mine": ANYONE}) == {}
        assert len(sizes) == 0, "they were read again"


def test_a_program_that_replaces_another_has_its_own_marker() -> None:
    script = "echo up; read line; GPULEASE_LEASE_ID=mine exec sleep 600"
    with running_as(ANYONE, "sh", "-c", script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        uids = {"mine": ANYONE}
        assert [lease_claims.claim_of(process.pid, uids) for _ in range(2)] == [None, None]
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: lease_claims.claim_of(process.pid, uids) == "mine", "it has its marker")


def test_what_one_user_starts_takes_a_bounded_part_of_a_reading_and_is_found_in_the_next() -> None:
    users = (ANYONE, ANYONE, ANYONE, *((ANOTHER,) if ROOT else ()))
    name = f"lease-{os.urandom(4).hex()}"
    with ExitStack() as stack:
        pids = [stack.enter_context(claiming(name, uid=uid)) for uid in users]
        found = []
        for _ in range(4):
            lease_claims.claims_of((), {name: None})
            found.append(len(lease_claims.claims_of(pids, {name: None}, lease_claims.Budget(1e-9))))
        first = 2 if ROOT else 1
        assert found == [first, first + 1, first + 2, first + 2]


def test_a_cgroup_of_the_leases_name_counts_unless_a_user_has_made_it(tmp_path: Path) -> None:
    mounts = f"20 41 0:38 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    trusted = tmp_path / "user.slice" / "gpulease-lease-7f3a.scope" / "rank0"
    theirs = tmp_path / "delegated" / "lease-7f3a" / "rank0"
    for made in (trusted, theirs, tmp_path / "lease-7f3a1", tmp_path / "lease-7f3a.d"):
        made.mkdir(parents=True)
    if ROOT:
        for made in (trusted, theirs.parent, theirs):
            os.chown(made, STRANGER, STRANGER)  # below its own cgroup a lease may have its user's
    for path, expected in [
        ("/user.slice/gpulease-lease-7f3a.scope", True),
        ("/user.slice/gpulease-lease-7f3a.scope/rank0", True),
        ("/delegated/lease-7f3a", not ROOT),
        ("/delegated/lease-7f3a/rank0", not ROOT),
        ("/lease-7f3a1", False),
        ("/user.slice", False),
        ("/gone/lease-7f3a", False),
    ]:
        assert (cgroup_directory.leases_in(path, ("lease-7f3a", "another"), mounts) != set()) is expected, path
    assert cgroup_directory.path_in("5:devices:/lease-7f3a\n0::/user.slice\n") == "/user.slice", "version 2 alone"


def test_the_uid_of_a_lease_is_its_jobs_or_its_users_on_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = {"ann": 4001}

    def getpwnam(name: str) -> SimpleNamespace:
        return SimpleNamespace(pw_uid=accounts[name])

    monkeypatch.setattr(pwd, "getpwnam", getpwnam)
    cache, told = LeaseCache(tmp_path), lease("mine", *GPUS)
    for user, uid, expected in (
        ("ann", None, 4001),
        ("ann", 7, 7),
        ("54321", None, 54321),
        ("no-such-name", None, lease_claims.NO_USER),
        (None, None, None),
    ):
        (known,) = cache.update([replace(told, user=user, uid=uid)])
        assert known.uid == expected, user
    (known,) = cache.update([replace(told, user="ann")])
    again = LeaseCache(tmp_path)
    again.load()
    accounts.clear()
    monkeypatch.setattr(lease_cache, "USER_IDS", UserIdCache())  # as in the next worker
    assert again.update([replace(told, user="ann", state=LeaseState.ENDED)])[0].uid == 4001, "it is kept"


@pytest.mark.parametrize("own", [False, True], ids=["of another user", "of its own user"])
@pytest.mark.parametrize("dead", [False, True], ids=["supervisor", "worker after a dead supervisor"])
def test_a_job_ends_whatever_claims_to_be_its(own: bool, dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something outside the job starts a process with its marker again and again: no one can end that for good."""
    if not own and not ROOT:
        return  # only root starts processes of other users
    job = order("j", spec("sh", "-c", "sleep 600; :"))

    with passable() as place, ExitStack() as outside:
        found: list[subprocess.Popen[str]] = []

        async def story(worker: Worker) -> None:
            await worker.until([job], RunState.RUNNING)
            start = job_records.read(place / "jobs" / "j", job_records.START, job_records.StartRecord)
            assert start is not None
            assert start.launcher is not None
            user = os.getuid() if own else STRANGER
            eve = outside.enter_context(running_as(user, "sh", "-c", RESPAWN, LEASE=job.lease_id))
            found.append(eve)
            claimed = lambda: [one for one in lease_claims.claimants({job.lease_id: None}) if descends(one, eve)]  # noqa: E731
            until(claimed, "it has started some")
            if dead:
                kill(start.supervisor.pid)
            report = await worker.end_of(replace(job, stop=True, grace_s=1000.0))
            assert report.unkillable == ()
            assert ("supervisor died" in str(report.reason)) is dead
            assert not start.launcher.alive()
            # One of eve's that dies while they are listed descends from no one any more.
            found_now = lease_claims.claimants({job.lease_id: os.getuid()})
            assert not [one for one in found_now if not descends(one, eve) and one.alive()]

        play(place, story)
        (eve,) = found
        os.killpg(eve.pid, 9)
        assert eve.stdout is not None
        assert ("ended" in eve.stdout.read()) is own


def descends(process: ProcessId, ancestor: subprocess.Popen[str]) -> bool:
    above = ProcessId.of(ancestor.pid)
    return above is not None and procfs.descends_from(process.pid, above)


def lives(pid: int) -> bool:
    return ProcessId.of(pid) is not None
