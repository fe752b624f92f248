"""The lease of a process, by cgroup, ancestry and marker; and the openers of a draining GPU's device file."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, program_stat, stat
from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_worker.probe import open_file_scanner, opener_classifier, process_attribution
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.processes import bounded_read, lease_claims, procfs
from gpulease_worker.processes.lease_cache import CachedLease, LeaseCache
from tests.worker.build import GPUS, lease, python, under, until

OPEN = "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); print('open', flush=True); time.sleep(600)"
MAPPED = (
    "import ctypes, os, sys, time; d = os.open(sys.argv[1], os.O_RDWR); c = ctypes.CDLL(None);"
    "c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long];"
    "c.mmap(None, 4096, 1, 1, d, 0); os.close(d); print('open', flush=True); time.sleep(600)"
)
"""Python's own mmap keeps a descriptor open as well."""
THREAD = (
    "import ctypes, sys, threading, time; f = open(sys.argv[1]);"
    "threading.Thread(target=time.sleep, args=(600,)).start(); print('open', flush=True);"
    "ctypes.CDLL(None).pthread_exit(None)"
)

OWN_ROOT = "import ctypes, mmap, os, sys, time; os.chroot(sys.argv[2]);"
"""Begins a program that finds the file below a root of its own."""
RING = (
    "import ctypes, os, sys, time; c = ctypes.CDLL(None); ring = c.syscall(425, 1, ctypes.create_string_buffer(120));"
    "d = os.open(sys.argv[1], os.O_RDWR); failed = ring < 0 or c.syscall(427, ring, 2, (ctypes.c_int * 1)(d), 1);"
    "os.close(d); print('failed' if failed else 'open', flush=True); time.sleep(600)"
)
"""io_uring_setup, and io_uring_register with IORING_REGISTER_FILES: the file is in the ring alone."""


@contextmanager
def opening(path: Path, code: str = OPEN, **environment: str) -> Iterator[int]:
    """A process that has a file open until the block ends."""
    environ = {name: value for name, value in os.environ.items() if name != lease_claims.MARKER} | environment
    command = python("-c", code, str(path))
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The device file of GPU 0 of a simulated node."""
    monkeypatch.setenv(process_attribution.DEVICE_FILES, str(tmp_path / "nvidia"))
    path = tmp_path / "nvidia0"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    (tmp_path / "nvidia01").touch()
    return path


def reading(*pids: int, **what: object) -> Reading:
    """A simulated node with 1 GPU and these processes."""
    listed = tuple(Process(pid=pid) for pid in pids)
    gpu = GpuReading(uuid=GPUS[0], node="n", index=0, processes=listed, **what)  # type: ignore[arg-type]
    return Reading(gpus=(gpu,), simulated=True)


def seen(lease_id: str, *, ended: bool = False, **what: object) -> CachedLease:
    """A lease on that GPU."""
    state = LeaseState.ENDED if ended else LeaseState.ACTIVE
    return CachedLease(id=lease_id, state=state, gpus=(GPUS[0],), **what)  # type: ignore[arg-type]


def leases_of(found: Reading) -> dict[int, str | None]:
    return {process.pid: process.lease_id for process in found.gpus[0].processes}


def test_the_owner_and_whatever_descends_from_it_belong_to_the_lease() -> None:
    here, parent = ProcessId.of(os.getpid()), ProcessId.of(os.getppid())
    assert here is not None
    assert parent is not None
    with under("", "sh", "-c", "sleep 60 & wait") as child:
        try:
            until(lambda: process_tree.descendants(child.pid), "there is a grandchild")
            (grandchild,) = process_tree.descendants(child.pid)
            pids = (os.getpid(), child.pid, grandchild.pid, 1)
            found = process_attribution.attribute(reading(*pids), [seen("mine", owner=here)])
            assert leases_of(found) == {os.getpid(): "mine", child.pid: "mine", grandchild.pid: "mine", 1: None}
            another = replace(here, start_ticks=here.start_ticks - 1)
            found = process_attribution.attribute(reading(*pids), [seen("mine", owner=another)])
            assert set(leases_of(found).values()) == {None}, "another process had the pid when the lease began"
            os.kill(grandchild.pid, 9)
        finally:
            child.kill()


def test_a_listed_process_whose_launcher_is_dead_is_no_stranger_on_its_own_gpu() -> None:
    """As with two launchers in a row, of which the second is killed while the lease of the first goes on."""
    launcher = ProcessId(2, 1)
    with under("") as rank:
        try:
            known = ProcessId.of(rank.pid)
            assert known is not None
            for descendants, expected in (((), None), ((known,), "mine")):
                held = seen("mine", owner=launcher, descendants=descendants)
                assert leases_of(process_attribution.attribute(reading(rank.pid), [held])) == {rank.pid: expected}
        finally:
            rank.kill()


def test_the_marker_of_another_lease_leaves_a_process_a_stranger_on_this_gpu() -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    with under("another") as process:
        try:
            until(lambda: lease_claims.claim_of(process.pid, {"another": None}), "it has begun")
            shown = reading(process.pid).gpus[0].processes[0]
            found = process_attribution.attribute(
                Reading(gpus=(replace(reading().gpus[0], processes=(replace(shown, lease_id="another"),)),)),
                [seen(mine)],
            )
            assert leases_of(found) == {process.pid: "another"}
        finally:
            process.kill()


def test_a_process_that_ends_stays_its_leases_until_the_driver_has_taken_it_off_its_lists() -> None:
    """It loses its environment before the driver has freed its memory; this is no conflict with its own lease."""
    known: opener_classifier.KnownProcesses = {}

    def whose(*pids: int, on: str = "mine") -> dict[int, str | None]:
        return leases_of(process_attribution.attribute(reading(*pids), [seen(on)], known))

    with subprocess.Popen(["sleep", "60"]) as stranger, under("mine") as ours:
        until(lambda: lease_claims.claim_of(ours.pid, {"mine": None}), "it has begun")
        listed = (ours.pid, stranger.pid)
        assert whose(*listed) == {ours.pid: "mine", stranger.pid: None}
        for process in (ours, stranger):
            process.kill()
        until(lambda: lease_claims.claim_of(ours.pid, {"mine": None}) is None, "it has no environment any more")
        assert whose(*listed) == {ours.pid: "mine", stranger.pid: None}
        ours.wait()
        assert whose(*listed) == {ours.pid: "mine", stranger.pid: None}, "a pid that is in no /proc any more"
        assert whose(*listed, on="next") == {ours.pid: "mine", stranger.pid: None}, "and not the next lease's"
        assert whose(stranger.pid) == {stranger.pid: None}
        assert whose(*listed) == {ours.pid: None, stranger.pid: None}, "the pid may be another's by now"
    here = ProcessId.of(os.getpid())
    assert here is not None
    known[here.pid] = (here.start_ticks - 1, "mine")
    assert whose(here.pid) == {here.pid: None}, "the pid was another's then"


@pytest.mark.parametrize("code", [OPEN, MAPPED, THREAD], ids=["descriptor", "mapping", "thread of a zombie"])
def test_who_has_a_file_open_is_found_in_every_way_of_having_it(device: Path, code: str) -> None:
    with opening(device, code) as pid:
        found = until(lambda: open_file_scanner.scan({str(device)}).by_path, "it is found")
        assert [one.pid for one in found[str(device)]] == [pid]
        assert not open_file_scanner.scan({str(device.with_name("nvidia01"))}).by_path


@pytest.mark.parametrize("code", [OPEN, MAPPED], ids=["descriptor", "mapping"])
def test_who_has_it_open_in_a_chroot_is_found_although_it_is_called_otherwise_there(device: Path, code: str) -> None:
    if os.getuid() != 0:
        return  # only root may change its root
    root = device.parent / "chroot"
    inside = root / device.relative_to("/")
    inside.parent.mkdir(parents=True)
    os.link(device, inside)
    command = python("-c", f"{OWN_ROOT}{code}", str(device), str(root))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            found = open_file_scanner.scan({str(device), str(device.with_name("nvidia01"))}).by_path
            assert {path: [one.pid for one in of] for path, of in found.items()} == {str(device): [process.pid]}
        finally:
            process.kill()


def test_a_file_that_only_an_io_uring_has_is_found(device: Path) -> None:
    with subprocess.Popen(python("-c", RING, str(device)), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() == b"open\n":  # else this kernel, or a filter, has no io_uring
                found = open_file_scanner.scan({str(device)}).by_path
                assert [one.pid for one in found[str(device)]] == [process.pid]
        finally:
            process.kill()


def test_who_was_forked_during_the_scan_by_one_that_has_ended_is_found(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is on the first list and ends before it is inspected; its child is on no list but a second one."""
    code = (
        OPEN.replace("time.sleep(600)", "") + "import os; sys.stdin.read(1); os.fork() and os._exit(0); time.sleep(600)"
    )
    command = python("-c", code, str(device))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"open\n"
        real = bounded_read.read_each

        def forks_first(*words: object) -> object:
            if parent.stdin is not None and not parent.stdin.closed:
                parent.stdin.close()
                parent.wait()
            return real(*words)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(bounded_read, "read_each", forks_first)
            found = open_file_scanner.scan({str(device)}).by_path
        (child,) = open_file_scanner.scan({str(device)}).by_path[str(device)]
        child.send_signal(signal.SIGKILL)
        assert found == {str(device): [child]}
        assert child.pid != parent.pid


def test_a_process_whose_first_thread_ends_while_it_is_inspected_is_found(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opening(device, THREAD) as pid:
        until(lambda: (now := stat(pid)) is not None and now.leader_ended, "its first thread has ended")
        before = program_stat(pid)
        assert before is not None
        monkeypatch.setattr(process_tree, "all_pids", lambda: iter([pid]))
        monkeypatch.setattr(open_file_scanner, "program_stat", lambda _: before._replace(leader_ended=False))
        found = open_file_scanner.scan({str(device)})
        assert [one.pid for one in found.by_path[str(device)]] == [pid]
        assert found.unreadable == 0


def test_processes_that_may_not_be_looked_into_are_counted(device: Path) -> None:
    if os.getuid() != 0:
        assert open_file_scanner.scan({str(device)}).unreadable > 0
        return
    code = """if True:
        import os
        from gpulease_worker.probe.open_file_scanner import scan
        os.setuid(65534)  # what is root's is closed to any other user
        found = scan({"/x"})
        print(found.unreadable, found.unreadable_process.pid, found.unreadable_process.user)
    """
    ran = subprocess.run(python("-c", code), capture_output=True, text=True, check=True, timeout=60)
    number, pid, user = ran.stdout.split()
    assert int(number) > 0
    assert (Path(f"/proc/{pid}").exists(), user) == (True, Path(f"/proc/{pid}").owner())


def test_only_a_draining_gpu_is_looked_at(device: Path) -> None:
    with opening(device) as pid:
        (active,) = process_attribution.attribute(reading(), [seen("mine")]).gpus
        assert (active.opened_by, active.unreadable_processes) == (None, None)
        (draining,) = process_attribution.attribute(reading(), [seen("mine", ended=True)]).gpus
        assert [one.pid for one in draining.opened_by or ()] == [pid]
        assert draining.opened_by is not None
        assert draining.opened_by[0].user is not None
        assert "time.sleep(600)" in (draining.opened_by[0].command or "")
        (free,) = process_attribution.attribute(reading(), []).gpus
        assert free.opened_by is None


def test_a_reading_does_not_wait_for_a_look_at_very_many_processes(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan that started before a lease had ended does not count for it."""
    done, looks, real = threading.Event(), [], open_file_scanner.scan

    def openers(paths: Collection[str]) -> open_file_scanner.ScanResult:
        looks.append(paths)
        assert done.wait(60)
        return real(paths)

    monkeypatch.setattr(open_file_scanner, "scan", openers)
    scanner = open_file_scanner.OpenFileScanner(wait_s=0.01)

    def opened_by(lease_id: str, *, ended: bool = True) -> tuple[Process, ...] | None:
        return process_attribution.attribute(reading(), [seen(lease_id, ended=ended)], {}, scanner).gpus[0].opened_by

    with opening(device, GPULEASE_LEASE_ID="next") as pid:
        assert [opened_by("mine") for _ in range(3)] == [None] * 3
        assert len(looks) == 1
        assert opened_by("next") is None
        done.set()
        found = until(lambda: opened_by("next"), "a look that was begun for this one ends")
        assert [one.pid for one in found] == [pid]
        assert len(looks) == 2
        assert [one.pid for one in opened_by("next") or ()] == [pid], "reported until the next scan"
        assert opened_by("next", ended=False) is None, "it is revived"
        done.clear()
        assert opened_by("next") is None, "it has ended again: earlier results do not count"
        done.set()
        until(lambda: opened_by("next"), "it was looked for again")


def test_a_request_waits_for_a_short_look_only(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that was released is free after one reading, and a host with many processes delays no grant."""
    begun, done = threading.Event(), threading.Event()
    waits: list[float | None] = []

    def scan(paths: Collection[str]) -> open_file_scanner.ScanResult:
        begun.set()
        assert done.wait(60)
        return open_file_scanner.ScanResult()

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        real_join(self, timeout)

    real_join = threading.Thread.join
    monkeypatch.setattr(open_file_scanner, "scan", scan)
    monkeypatch.setattr(open_file_scanner, "SHORT_WAIT_S", 60.0)
    monkeypatch.setattr(threading.Thread, "join", join)
    scanner = open_file_scanner.OpenFileScanner()
    target = (str(device), "mine")
    done.set()
    assert scanner.results({target}, wait=False) == {target: open_file_scanner.ScanResult()}
    assert waits == [60.0]
    monkeypatch.setattr(open_file_scanner, "SHORT_WAIT_S", 0.0)  # so that the last one took longer
    done.clear()
    begun.clear()
    following = (str(device), "next")
    assert scanner.results({following}, wait=False) == {}
    assert begun.wait(60)
    assert waits == [60.0, 0.0]
    done.set()
    until(lambda: scanner.results({following}, wait=False), "the look ends, and a later reading has its result")


def test_a_reading_of_some_gpus_forgets_no_process_of_the_others() -> None:
    """An exiting process on another GPU is remembered as its lease's, and that GPU is as it was."""
    known: opener_classifier.KnownProcesses = {}
    scanner = open_file_scanner.OpenFileScanner()
    with under("mine") as ours:
        until(lambda: lease_claims.claim_of(ours.pid, {"mine": None}), "it has begun")
        held = seen("mine")
        ended = CachedLease(id="over", state=LeaseState.ENDED, gpus=(GPUS[1],))
        drained = GpuReading(uuid=GPUS[1], node="n", index=1)
        first = reading(ours.pid)
        whole = process_attribution.attribute(replace(first, gpus=(*first.gpus, drained)), [held, ended], known)
        some = Reading(gpus=(replace(drained, memory_used_bytes=5),), simulated=True, whole=False)
        shown, merged = process_attribution.attribute_some(some, whole, [held, ended], known, scanner)
        assert [gpu.uuid for gpu in shown.gpus] == [GPUS[1]]
        assert shown.gpus[0].memory_used_bytes == 5
        assert merged.gpus[0] == whole.gpus[0]
        ours.kill()
        ours.wait()
        assert leases_of(process_attribution.attribute(reading(ours.pid), [held], known)) == {ours.pid: "mine"}


def test_a_look_that_failed_does_not_mean_that_no_process_has_the_device_open(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def pids() -> Iterator[int]:
        looks.append(1)
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    scanner = open_file_scanner.OpenFileScanner(wait_s=60)

    def opened_by() -> tuple[Process, ...] | None:
        return process_attribution.attribute(reading(), [seen("mine", ended=True)], {}, scanner).gpus[0].opened_by

    with opening(device, GPULEASE_LEASE_ID="mine") as pid:
        with monkeypatch.context() as patch:
            patch.setattr(process_tree, "all_pids", pids)
            assert [opened_by() for _ in range(3)] == [None] * 3
            assert looks
        found = until(opened_by, "a look that does not fail")
        assert [one.pid for one in found] == [pid]


def test_a_process_whose_files_cannot_be_read_for_want_of_descriptors_is_not_one_that_has_none_open(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(process: str, wanted: set[str], found: set[str]) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), process)

    monkeypatch.setattr(open_file_scanner, "_descriptors", full)
    with opening(device) as pid:
        monkeypatch.setattr(process_tree, "all_pids", lambda: iter([pid]))
        assert open_file_scanner.scan({str(device)}).unreadable == 1


def test_a_descriptor_counts_although_the_process_hangs_and_its_memory_map_cannot_be_read(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    asleep: list[int] = []

    def hangs(process: str, wanted: set[str], found: set[str]) -> None:
        asleep.append(threading.get_native_id())
        stuck.wait(60)

    monkeypatch.setattr(open_file_scanner, "_mapped", hangs)
    monkeypatch.setattr(bounded_read, "_sleeps_uninterruptibly", lambda thread: thread.native_id in asleep)
    with opening(device) as pid:
        monkeypatch.setattr(process_tree, "all_pids", lambda: iter([pid]))
        try:
            found = open_file_scanner.scan({str(device)})
            assert [one.pid for one in found.by_path[str(device)]] == [pid]
            assert found.unreadable == 1
        finally:
            stuck.set()
        until(lambda: not bounded_read.is_hung(pid), "the read has returned")


def test_an_opener_from_before_the_lease_keeps_no_gpu_unless_it_is_the_leases(device: Path) -> None:
    with opening(device) as stranger, opening(device, GPULEASE_LEASE_ID="mine") as ours:
        later = seen("mine", ended=True, since_ticks=procfs.ticks_now() + 1000)
        (gpu,) = process_attribution.attribute(reading(), [later]).gpus
        assert [(one.pid, one.lease_id) for one in gpu.opened_by or ()] == [(ours, "mine")]
        earlier = seen("mine", ended=True, since_ticks=0)
        (gpu,) = process_attribution.attribute(reading(), [earlier]).gpus
        assert {one.pid: one.lease_id for one in gpu.opened_by or ()} == {stranger: None, ours: "mine"}


def test_a_gpu_without_a_minor_number_is_not_said_to_be_closed(device: Path) -> None:
    with opening(device):
        found = replace(reading(), simulated=False)
        (gpu,) = process_attribution.attribute(found, [seen("mine", ended=True)]).gpus
        assert (gpu.opened_by, gpu.unreadable_processes) == ((), None)


def test_an_owner_is_learnt_once_and_survives_the_worker(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        holders = LeaseCache(tmp_path)
        told = replace(lease("mine", *GPUS), owner_pid=owner.pid)
        (first,) = holders.update([told])
        assert first.owner == ProcessId.of(owner.pid)
        owner.kill()
    again = LeaseCache(tmp_path)
    again.load()
    assert again.update([replace(told, state=LeaseState.ENDED)]) == (replace(first, state=LeaseState.ENDED),)
    again.update([])
    (second,) = again.update([told])
    assert second.owner is None, "the owner has ended, and its pid may be reused"


def test_the_start_time_that_the_daemon_knows_counts_and_not_who_has_the_pid_now(tmp_path: Path) -> None:
    here = ProcessId.of(os.getpid())
    assert here is not None
    told = replace(lease("mine", *GPUS), owner_pid=here.pid, owner_start_ticks=here.start_ticks - 1)
    (known,) = LeaseCache(tmp_path).update([told])
    assert known.owner == ProcessId(here.pid, here.start_ticks - 1)
    assert not process_attribution.belongs_to(os.getpid(), known, {}), "the pid is another's now"


def test_an_owner_that_the_daemon_could_not_confirm_must_run_as_the_holders_user(tmp_path: Path) -> None:
    here = ProcessId.this_process()
    told = replace(lease("mine", *GPUS), owner_pid=here.pid, owner_start_ticks=here.start_ticks)
    for user, owner in ((str(os.getuid()), here), ("nobody-of-that-name", None)):
        cache = LeaseCache(tmp_path)
        assert [one.owner for one in cache.update([replace(told, owner_user=user)])] == [owner]


def test_a_lease_that_is_first_seen_when_it_has_ended_has_no_beginning(tmp_path: Path) -> None:
    told = replace(lease("mine", *GPUS, state=LeaseState.ENDED), owner_pid=os.getpid())
    (known,) = LeaseCache(tmp_path).update([told])
    assert (known.owner, known.since_ticks) == (None, None)


@pytest.mark.parametrize("state", [LeaseState.ACTIVE, LeaseState.ENDED])
def test_a_lease_began_after_the_last_question_whose_answer_did_not_name_it(tmp_path: Path, state: LeaseState) -> None:
    holders = LeaseCache(tmp_path)
    holders.update((), 500)
    holders.update((), 1000)
    holders.update(())
    (known,) = holders.update([lease("mine", *GPUS, state=state)], 2000)
    assert known.since_ticks == 1000
    (known, _) = holders.update([lease("mine", *GPUS, state=state), lease("next", *GPUS, state=state)], 3000)
    assert known.since_ticks == 1000


def test_an_unknown_monitor_keeps_no_gpu_from_a_lease_that_had_ended_when_it_was_first_seen(
    device: Path, tmp_path: Path
) -> None:
    with opening(device) as monitor:
        holders = LeaseCache(tmp_path)
        until(lambda: procfs.ticks_now() > _start(monitor), "time has passed since it was started")
        holders.update([], procfs.ticks_now())
        with opening(device) as ours:
            short = lease("mine", *GPUS, state=LeaseState.ENDED)
            (gpu,) = process_attribution.attribute(reading(), holders.update([short], procfs.ticks_now())).gpus
            assert [one.pid for one in gpu.opened_by or ()] == [ours]


def _start(pid: int) -> int:
    found = ProcessId.of(pid)
    assert found is not None
    return found.start_ticks
