"""Claims on GPUs: one process of a host has each, and says so to all others."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpulease_protocol.model import GpuReading
from gpulease_worker import gpu_claims
from gpulease_worker.gpu_claims import CERTAIN_S, HANDOVER_S, GpuClaims, claim_name
from gpulease_worker.jobs import port_reservation
from gpulease_worker.jobs.port_reservation import BLOCK, MAX_BLOCKS, PortReservation
from gpulease_worker.processes import abstract_socket, procfs
from tests.worker.build import python, until

CLAIM = (
    "import os, sys, time; from gpulease_protocol.model import GpuReading; "
    "from gpulease_worker.gpu_claims import GpuClaims; os.setuid(int(sys.argv[1])); "
    "claims = GpuClaims(); gpus = [GpuReading(uuid=name, node='n', index=0) for name in sys.argv[2:]]; "
    "print(*[gpu.uuid for gpu in claims.claim(gpus)[0]], flush=True); time.sleep(600)"
)
"""A worker of another daemon, as far as its claims: it prints what it got."""


@pytest.fixture
def uuid() -> str:
    """A GPU of this test alone: names are valid on the whole host, on which other tests run too."""
    return f"GPU-{os.urandom(4).hex()}-0000-0000-0000-{time.monotonic_ns() % 10**12:012d}"


@pytest.fixture
def now() -> list[float]:
    """The time for claims, which only the test moves."""
    return [1000.0]


@pytest.fixture
def claims(now: list[float]) -> Iterator[GpuClaims]:
    found = GpuClaims(clock=lambda: now[0])
    yield found
    found.close()


def gpu(uuid: str, index: int = 0) -> GpuReading:
    return GpuReading(uuid=uuid, node="n", index=index, name="H100")


@contextmanager
def other_worker(*uuids: str, user: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed these GPUs."""
    command = python("-c", CLAIM, str(os.getuid() if user is None else user), *uuids)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline().split() == list(uuids)
            yield process
        finally:
            process.kill()


def test_a_gpu_is_claimed_by_one_process_and_the_other_names_it(uuid: str, claims: GpuClaims) -> None:
    second = f"{uuid[:-1]}x"
    with other_worker(uuid) as first:
        claimed, others = claims.claim([gpu(uuid), gpu(second, 1)])
    assert [one.uuid for one in claimed] == [second]
    (other,) = others
    assert (other.device.uuid, other.device.index, other.device.name) == (uuid, 0, "H100")
    user = procfs.user_of(os.getpid())
    said = f"it is in the ledger of another gpulease daemon, whose worker is pid {first.pid}, user {user}"
    assert other.reason == said


def test_the_user_who_has_claimed_a_gpu_is_named(uuid: str, claims: GpuClaims) -> None:
    other = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.getuid())
    with other_worker(uuid, user=other.pw_uid) as first:
        _, (seen,) = claims.claim([gpu(uuid)])
    assert seen.reason.endswith(f"pid {first.pid}, user {other.pw_name}")


def test_a_killed_worker_has_no_claim(uuid: str, claims: GpuClaims) -> None:
    with other_worker(uuid) as first:
        assert not claims.claim([gpu(uuid)])[0]
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert claims.claim([gpu(uuid)])[0], "it was there for less than CERTAIN_S: nothing suggests that it comes back"


def test_a_stopped_worker_keeps_its_claim_however_many_ask(uuid: str, claims: GpuClaims) -> None:
    with other_worker(uuid) as first:
        first.send_signal(signal.SIGSTOP)
        for _ in range(abstract_socket.BACKLOG + 5):
            claimed, others = claims.claim([gpu(uuid)])
            assert not claimed
        assert "another gpulease daemon" in others[0].reason


def test_a_worker_that_answers_tells_everyone_who_it_is(uuid: str, claims: GpuClaims) -> None:
    assert claims.claim([gpu(uuid)])[0]
    for _ in range(3 * abstract_socket.BACKLOG):
        holder = abstract_socket.holder_of(claim_name(uuid))
        assert holder is not None
        assert (holder.pid, holder.uid) == (os.getpid(), os.geteuid())
        claims.claim([gpu(uuid)])


def test_a_restarted_worker_has_its_gpus_again_before_one_that_waits(
    uuid: str, claims: GpuClaims, now: list[float]
) -> None:
    with other_worker(uuid):
        claims.claim([gpu(uuid)])
        now[0] += CERTAIN_S
        claims.claim([gpu(uuid)])
    now[0] += HANDOVER_S - 1
    claimed, (other,) = claims.claim([gpu(uuid)])
    assert not claimed
    assert "until recently" in other.reason
    assert "takes it over after 10 minutes, or when it is started again" in other.reason
    with other_worker(uuid) as again:
        now[0] += 2
        _, (other,) = claims.claim([gpu(uuid)])
        assert f"pid {again.pid}" in other.reason


def test_a_worker_that_does_not_come_back_loses_its_gpus(uuid: str, claims: GpuClaims, now: list[float]) -> None:
    with other_worker(uuid):
        claims.claim([gpu(uuid)])
        now[0] += CERTAIN_S
        claims.claim([gpu(uuid)])
    now[0] += HANDOVER_S
    assert [one.uuid for one in claims.claim([gpu(uuid)])[0]] == [uuid]


def test_a_new_worker_need_not_wait(uuid: str, claims: GpuClaims) -> None:
    with other_worker(uuid):
        pass
    assert claims.claim([gpu(uuid)])[0]


def test_of_many_workers_at_once_one_has_the_gpu(uuid: str) -> None:
    """Each asks who has it and then binds: between the two another may bind."""
    many = [GpuClaims() for _ in range(20)]
    try:
        assert sum(len(each.claim([gpu(uuid)])[0]) for each in many) == 1
        started = [
            subprocess.Popen(python("-c", CLAIM, str(os.getuid()), f"{uuid}-m"), stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        got = [process.stdout.readline().split() for process in started if process.stdout is not None]
        for process in started:
            with process:
                process.kill()
        assert sorted(map(len, got)) == [0, 0, 0, 1]
    finally:
        for each in many:
            each.close()


def test_claims_are_not_inherited(uuid: str, claims: GpuClaims) -> None:
    """A job that outlives its worker must not keep the GPUs from the next one."""
    claims.claim([gpu(uuid)])
    with subprocess.Popen(["sleep", "600"], close_fds=False) as child:
        try:
            claims.close()
            assert abstract_socket.holder_of(claim_name(uuid)) is None
        finally:
            child.kill()


def test_a_process_that_binds_the_name_and_does_not_listen_keeps_the_gpu(uuid: str, claims: GpuClaims) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{claim_name(uuid)}")
        claimed, (other,) = claims.claim([gpu(uuid)])
        assert not claimed
        assert "a process that cannot be seen from here" in other.reason


def test_without_descriptors_nothing_is_claimed(uuid: str, claims: GpuClaims, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(gpu_claims.abstract_socket, "bind", full)
    claimed, (other,) = claims.claim([gpu(uuid)])
    assert not claimed
    assert other.reason == "it could not be claimed for this worker: Too many open files"


def test_changes_are_logged_once(uuid: str, claims: GpuClaims, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with other_worker(uuid):
        for _ in range(3):
            claims.claim([gpu(uuid)])
    for _ in range(3):
        claims.claim([gpu(uuid)])
    said = [line for line in caplog.messages if uuid in line]
    assert [line.partition(": ")[0] for line in said] == [
        f"GPU {uuid} is not leased here",
        f"GPU {uuid} is claimed for this worker now",
    ]


def test_a_network_namespace_of_its_own_is_noticed() -> None:
    code = "from gpulease_worker.processes import abstract_socket; print(abstract_socket.names_are_of_the_host())"

    def printed(*within: str) -> str:
        return subprocess.run([*within, *python("-c", code)], capture_output=True, text=True, check=True).stdout.strip()

    if not procfs.sees_the_host():
        assert printed() == "None"
        return
    assert printed("unshare", "--user", "--net") == "False"
    assert printed() == str(os.stat("/proc/1/net/unix").st_ino == os.stat("/proc/self/net/unix").st_ino)


def reserving(place: str, made: list[PortReservation]) -> Callable[..., tuple[int, ...]]:
    made.append(PortReservation(Path(place)))
    return made[-1].reserve


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PortReservation]]:
    """Reservations under names of this test alone, since the host has one set of blocks for all."""
    prefix, bind = os.urandom(4).hex(), abstract_socket.bind
    monkeypatch.setattr(port_reservation.abstract_socket, "bind", lambda name: bind(f"{prefix}-{name}"))
    found: list[PortReservation] = []
    yield found
    for each in found:
        each.close()


def test_workers_of_one_host_reserve_different_ports(made: list[PortReservation]) -> None:
    """Also where they begin at the same block, as with one data directory in two containers."""
    first, second, third = (reserving(place, made) for place in ("/same", "/same", "/other"))
    ports = [first(8, ()), second(16, ()), third(17, ())]
    assert [len(each) for each in ports] == [BLOCK, BLOCK, 2 * BLOCK]
    assert len({port for each in ports for port in each}) == 4 * BLOCK


def test_a_restarted_worker_reserves_the_same_ports(made: list[PortReservation]) -> None:
    before = reserving("/mine", made)(8, ())
    made[0].close()
    assert reserving("/mine", made)(8, before[:8]) == before, "although its jobs listen there"


def test_ports_in_use_are_made_up_for(made: list[PortReservation]) -> None:
    reserve = reserving("/mine", made)
    first = reserve(16, ())
    more = reserve(16, first[:1])
    assert len(more) == 2 * BLOCK
    assert set(first) < set(more)
    assert reserve(10_000, ()) == reserve(10_000, ())
    assert len(reserve(10_000, ())) == MAX_BLOCKS * BLOCK


def test_where_all_blocks_are_taken_none_is_reserved(made: list[PortReservation]) -> None:
    taken: set[int] = set()
    while ports := reserving("/others", made)(10_000, ()):
        assert taken.isdisjoint(ports)
        taken |= set(ports)
    assert len(taken) == 2000


def test_a_reserved_port_is_given_back_when_its_process_dies() -> None:
    code = (
        "import sys; from pathlib import Path; from gpulease_worker.jobs.port_reservation import PortReservation; "
        "ports = PortReservation(Path(sys.argv[1])); print(*ports.reserve(1, ()), flush=True); sys.stdin.read()"
    )
    place = f"/{os.urandom(4).hex()}"
    with subprocess.Popen(
        python("-c", code, place), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        start = process.stdout.readline().split()[0]
        name = f"gpulease-ports-{start}"
        holder = abstract_socket.holder_of(name)
        assert holder is not None
        assert holder.pid == process.pid
        process.kill()
    with suppress(AssertionError):  # another test's worker may have taken it by now
        until(lambda: abstract_socket.holder_of(name) is None, "it is free", 1)
