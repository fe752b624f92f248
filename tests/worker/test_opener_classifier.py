"""Which processes with every device file of the node open count against a draining GPU: real processes, 2 GPUs.

Each process here opens the files of both GPUs, as CUDA without a mask and every NCCL rank do.
"""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_worker.probe import opener_classifier, process_attribution
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.processes import lease_claims, owner_descendants, procfs
from gpulease_worker.processes.lease_cache import CachedLease
from tests.worker.build import GPUS, kill, python, until

OPENS = """
import os, sys, time
mine = [open(path) for path in sys.argv[2:]]
print(os.getpid(), flush=True)
for step in sys.argv[1].split():
    assert sys.stdin.readline()
    if os.fork() == 0:
        if step == "setsid":
            os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(600)
time.sleep(600)
"""
"""Opens the files, then forks a child per line on stdin."""


class Program:
    """A user's process that has both device files open, and forks on request."""

    def __init__(self, stack: ExitStack, paths: Sequence[Path], *steps: str, **environment: str) -> None:
        environ = {name: value for name, value in os.environ.items() if name != lease_claims.MARKER} | environment
        self.process = stack.enter_context(
            subprocess.Popen(
                python("-c", OPENS, " ".join(steps), *map(str, paths)),
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        )
        stack.callback(self.process.kill)
        self._stack = stack
        self.pid = self._said()

    def fork(self) -> int:
        """Its child, which has inherited the open files."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        child = self._said()
        self._stack.callback(_end, child)
        return child

    def die(self) -> None:
        """End it, but not its children."""
        self.process.kill()
        self.process.wait()

    @property
    def identity(self) -> ProcessId:
        """The process, with its start time."""
        found = ProcessId.of(self.pid)
        assert found is not None
        return found

    def _said(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        kill(pid)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The device files of a simulated node with 2 GPUs."""
    monkeypatch.setenv(process_attribution.DEVICE_FILES, str(tmp_path / "nvidia"))
    paths = tmp_path / "nvidia0", tmp_path / "nvidia1"
    for path in paths:
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    return paths


def lease(gpu: int, lease_id: str, *, ended: bool = False, since_ticks: int = 0, **what: object) -> CachedLease:
    """A lease of one of the 2 GPUs."""
    state = LeaseState.ENDED if ended else LeaseState.ACTIVE
    return CachedLease(id=lease_id, state=state, gpus=(GPUS[gpu],), since_ticks=since_ticks, **what)  # type: ignore[arg-type]


def opened_by(
    *leases: CachedLease,
    gpu: int = 1,
    listed: Sequence[Sequence[int]] = ((), ()),
    known: opener_classifier.KnownProcesses | None = None,
    askers: Sequence[ProcessId] = (),
) -> dict[int, str | None]:
    """The openers of this GPU's device file that count, each with its lease."""
    gpus = [
        GpuReading(uuid=uuid, node="n", index=index, processes=tuple(Process(pid=pid) for pid in listed[index]))
        for index, uuid in enumerate(GPUS)
    ]
    reading = Reading(gpus=tuple(gpus), simulated=True)
    found = process_attribution.attribute(reading, leases, known, askers=askers).gpus[gpu].opened_by
    assert found is not None
    return {process.pid: process.lease_id for process in found}


ENDED = lease(1, "mine", ended=True)
THEIRS = lease(0, "another")


def test_a_training_under_another_lease_does_not_count_whether_it_began_later_or_forks_later(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    later = Program(stack, devices, "fork", GPULEASE_LEASE_ID="another")
    assert opened_by(ENDED, THEIRS) == {}, "it began after the lease that has ended"
    now = replace(ENDED, since_ticks=procfs.ticks_now() + 1)
    until(lambda: procfs.ticks_now() > (now.since_ticks or 0) + 1, "a moment has passed")
    later.fork()
    assert opened_by(now, THEIRS) == {}, "it began before, its forked worker after"
    assert opened_by(ENDED, replace(THEIRS, state=LeaseState.ENDED)) == {}, "its own lease drains as well"


def test_what_works_under_another_lease_by_its_owner_does_not_count(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    """As after `find_usable_cuda_devices()`, which sets no marker in the environment."""
    program = Program(stack, devices, "fork", "setsid")
    program.fork()
    program.fork()
    assert opened_by(ENDED, replace(THEIRS, owner=program.identity)) == {}


def test_a_program_outside_any_lease_that_the_driver_lists_elsewhere_does_not_count_nor_what_it_forks(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    notebook = Program(stack, devices, "fork")
    child = notebook.fork()
    assert opened_by(ENDED, listed=((notebook.pid,), ())) == {}
    assert opened_by(ENDED, listed=((notebook.pid,), (notebook.pid,))) == {notebook.pid: None, child: None}
    assert opened_by(ENDED) == {notebook.pid: None, child: None}, "listed nowhere, they are strangers"


def test_what_is_the_former_leases_counts_although_a_stranger_started_it(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    environment = dict.fromkeys((lease_claims.MARKER,), "mine")
    stranger = Program(stack, devices, "fork")
    ours = Program(stack, devices, "fork", "setsid", **environment)
    children = {ours.fork(), ours.fork()}
    everyone = ((stranger.pid, ours.pid), ())
    assert opened_by(ENDED, THEIRS, listed=everyone) == dict.fromkeys({ours.pid, *children}, "mine")
    ours.die()
    assert opened_by(ENDED, THEIRS, listed=everyone) == dict.fromkeys(children, "mine"), "orphans, one in a session"


def test_what_an_owner_leaves_without_a_marker_is_known_by_its_process_group_or_from_before(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    owner = Program(stack, devices, "fork", "setsid")
    ended = replace(ENDED, owner=owner.identity)
    child, away = owner.fork(), owner.fork()
    known: opener_classifier.KnownProcesses = {}
    assert opened_by(ended, known=known) == {child: "mine", away: "mine", owner.pid: None}
    owner.die()
    assert opened_by(ended, known=known) == {child: "mine", away: "mine"}
    assert opened_by(ended) == {child: "mine", away: None}, "to a new probe the second is a stranger"
    kill(away)
    until(lambda: away not in opened_by(ended, known=known), "it is gone")
    assert away not in known
    assert opened_by(replace(ENDED, id="next"), known=known) == {child: None}, "and not the next lease's"


def test_a_rank_that_was_started_before_the_lease_counts_when_its_launcher_is_dead(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    """torchrun's ranks: sessions of their own, older than the lease that they take, without its marker."""
    launcher = Program(stack, devices, "setsid")
    rank = launcher.fork()
    ended = replace(ENDED, owner=launcher.identity, since_ticks=procfs.ticks_now() + 1000)
    owner = launcher.identity
    below = tuple(owner_descendants.trace({owner}, {}))
    launcher.die()
    assert opened_by(ended) == {}, "it cannot be told from a stranger's, which began before the lease"
    assert opened_by(replace(ended, descendants=below)) == {rank: "mine"}
    assert opened_by(replace(ended, descendants=below), THEIRS) == {rank: "mine"}, "whatever else is leased"
    holders = replace(THEIRS, owner=owner, descendants=below)
    assert opened_by(replace(ended, owner=ProcessId(1, 1)), holders) == {}, "it is the other lease's"
    kill(rank)
    until(lambda: opened_by(replace(ended, descendants=below)) == {}, "it has ended")


def test_one_owner_of_several_leases_does_not_wait_behind_itself(stack: ExitStack, devices: tuple[Path, Path]) -> None:
    """A sweep: a program that leases one GPU after another, and starts a trial under each."""
    driver = Program(stack, devices, "fork")
    mine, other = replace(ENDED, owner=driver.identity), replace(THEIRS, owner=driver.identity)
    assert opened_by(mine) == {driver.pid: None}, "it lives on, and asks for the next: it only delays"
    assert opened_by(mine, other) == {}, "it works under the other now"
    child = driver.fork()
    drains = replace(other, state=LeaseState.ENDED)
    assert opened_by(mine, drains) == {driver.pid: None, child: "mine"}
    assert opened_by(mine, drains, gpu=0) == {driver.pid: None, child: "another"}, (
        "neither lease excuses it to the other"
    )


def test_who_waits_for_a_lease_does_not_count_nor_what_it_has_started(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    """The next trial of a sweep, which has opened NVML before it asks. Its driver has held the GPU before."""
    here, trial = ProcessId.of(os.getpid()), Program(stack, devices, "fork")
    assert here is not None
    child = trial.fork()
    assert opened_by(ENDED) == {trial.pid: None, child: None}
    assert opened_by(ENDED, askers=[trial.identity]) == {}
    assert opened_by(replace(ENDED, owner=here)) == {trial.pid: "mine", child: "mine"}
    found = opened_by(replace(ENDED, owner=here), askers=[trial.identity])
    assert found == {child: "mine"}, "it asks for itself, and its child may be what the owner left"
    reused = ProcessId(trial.pid, trial.identity.start_ticks + 1)
    assert opened_by(ENDED, askers=[reused]) == {trial.pid: None, child: None}, "the pid is another process's now"


def test_a_holder_that_asks_again_does_not_count_but_what_it_has_left_does(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    holder = Program(stack, devices, "fork")
    mine = replace(ENDED, owner=holder.identity)
    assert opened_by(mine) == {holder.pid: None}
    assert opened_by(mine, askers=[holder.identity]) == {}
    child = holder.fork()
    assert opened_by(mine, askers=[holder.identity]) == {child: "mine"}
    marked = Program(stack, devices, **{lease_claims.MARKER: "mine"})
    asks = [holder.identity, marked.identity]
    assert opened_by(mine, askers=asks) == {child: "mine", marked.pid: "mine"}, "it works under the ended lease"


def test_a_lease_within_a_lease_is_another(stack: ExitStack, devices: tuple[Path, Path]) -> None:
    here = ProcessId.of(os.getpid())
    trial = Program(stack, devices, "fork", GPULEASE_LEASE_ID="another")
    forked = trial.fork()
    mine = replace(ENDED, owner=here)
    assert opened_by(mine, THEIRS) == {}, "by its marker"
    own = Program(stack, devices)
    assert opened_by(mine, replace(THEIRS, owner=own.identity)) == {}, "by the nearer owner"
    everyone = dict.fromkeys((trial.pid, forked, own.pid), "mine")
    assert opened_by(mine) == everyone, "leases of other nodes are not known here"


def test_who_has_ended_since_the_look_has_nothing_open(stack: ExitStack, devices: tuple[Path, Path]) -> None:
    """Forked workers of a training end all the time; without their marker their lease cannot be told."""
    worker = Program(stack, devices, GPULEASE_LEASE_ID="another")
    found = {worker.identity}
    gpu = GpuReading(uuid=GPUS[1], node="n", index=1)
    worker.process.kill()
    until(lambda: ProcessId.of(worker.pid) is None, "it has ended")
    assert opener_classifier.OpenerClassifier([gpu], [ENDED, THEIRS], {}, found).classify(gpu, ENDED, found) == ()


def test_what_was_another_leases_is_so_still_when_it_ends_and_loses_its_marker(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    ending = Program(stack, devices)
    gpu, found = GpuReading(uuid=GPUS[1], node="n", index=1), {ending.identity}
    for lease_id, expected in ((THEIRS.id, []), (ENDED.id, [(ending.pid, ENDED.id)]), ("gone", [(ending.pid, None)])):
        known = {ending.pid: (ending.identity.start_ticks, lease_id)}
        counted = opener_classifier.OpenerClassifier([gpu], [ENDED, THEIRS], known, found).classify(gpu, ENDED, found)
        assert [(one.pid, one.lease_id) for one in counted] == expected


def test_a_stranger_counts_only_if_it_began_during_the_lease(stack: ExitStack, devices: tuple[Path, Path]) -> None:
    exporter = Program(stack, devices)
    assert opened_by(ENDED, THEIRS) == {exporter.pid: None}
    assert opened_by(replace(ENDED, since_ticks=procfs.ticks_now() + 1000), THEIRS) == {}
    gone = Program(stack, devices, GPULEASE_LEASE_ID="long-ended")
    assert opened_by(ENDED, THEIRS) == {exporter.pid: None, gone.pid: None}


def test_a_probe_does_not_count_in_whatever_lease_its_daemon_was_started(
    stack: ExitStack, devices: tuple[Path, Path]
) -> None:
    probe = stack.enter_context(
        subprocess.Popen(
            ["bash", "-c", 'exec 3<"$1" 4<"$2"; echo open; read', "-m gpulease_worker.probe.main", *map(str, devices)],
            env=os.environ | {lease_claims.MARKER: "mine"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    )
    stack.callback(probe.kill)
    assert probe.stdout is not None
    assert probe.stdout.readline() == b"open\n"
    assert opened_by(ENDED) == {}
