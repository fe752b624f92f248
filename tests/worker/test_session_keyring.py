"""Session keyrings of jobs: none has a key of the worker's or of another job."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_worker.jobs import session_keyring
from tests.worker.build import order, spec
from tests.worker.play import Worker, play
from tests.worker.strangers import ROOT, STRANGER, end_of, in_a_process, log_of, passable

SESSION_KEYRING = -3
KEYCTL_READ = 11
FULL = STRANGER + 1
"""A user who has as many keys as one may have."""
USERS = (STRANGER, STRANGER, STRANGER + 2, 0, 0) if ROOT else (os.getuid(),) * 2
SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 2, 38, 22


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        yield directory


@pytest.fixture
def probe(public: Path) -> str:
    """The program of `keyring_probe.c`."""
    program = public / "keyring_probe"
    source = Path(__file__).with_name("keyring_probe.c")
    subprocess.run(["cc", "-Wall", "-Werror", "-o", program, source], check=True)
    program.chmod(0o755)
    return str(program)


def call(name: int, *arguments: object) -> int:
    """The result of a system call for keys. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    number = session_keyring.SYSTEM_CALLS[os.uname().machine][name]
    result = int(library.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def add_key(description: str, content: bytes) -> int:
    """Serial number of a new key in the session keyring of this process."""
    words = (b"user", description.encode(), content, ctypes.c_size_t(len(content)), ctypes.c_int(SESSION_KEYRING))
    return call(session_keyring.ADD_KEY, *words)


def look_for_a_key_of_the_worker(public: str, probe: str, uid: int) -> None:
    session_keyring.join_new()  # so that the keyring of the session that runs the tests stays as it is
    serial = add_key("gpulease-test", b"of the worker")
    print(log_of(end_of(Path(public), probe, "gpulease-test", str(serial), uid=uid)), end="")
    content = ctypes.create_string_buffer(64)
    length = call(session_keyring.KEYCTL, KEYCTL_READ, serial, content, ctypes.c_size_t(64))
    print(content.raw[:length].decode())


def test_a_job_neither_finds_nor_reads_nor_changes_a_key_of_its_workers_session(public: Path, probe: str) -> None:
    said, after = in_a_process(look_for_a_key_of_the_worker, str(public), probe, USERS[0]).splitlines()
    # The user of a key may read and change it by its number; a worker of the job's own user has no secret from it.
    by_number = "no" if ROOT else "yes"
    assert said.partition(" ")[2] == f"found no requested no read {by_number} changed {by_number}"
    assert after == ("of the worker" if ROOT else "changed")


def test_each_job_has_a_session_keyring_of_its_own(public: Path, probe: str) -> None:
    found = []

    async def story(worker: Worker) -> None:
        for number, uid in enumerate(USERS):
            job = order(f"j{number}", spec(probe), uid=uid, gid=uid)
            found.append(log_of(await worker.end_of(job)).strip())
            worker.jobs.reconcile([])

    play(public, story)
    keyrings = {int(serial) for serial in found}
    own = call(session_keyring.KEYCTL, 0, SESSION_KEYRING, 0)
    assert len(keyrings - {own}) == len(USERS)
    assert min(keyrings) > 0


def run_a_job_of_a_user_with_many_keys(public: str) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(FULL, FULL, FULL)
        session_keyring.join_new()
        try:
            for number in range(100_000):
                add_key(f"gpulease-test-{number}", b"x")
        except OSError as error:
            os.write(writing, os.strerror(error.errno or 0).encode())
        signal.pause()
    try:
        print(os.read(reading, 100).decode())
        print(end_of(Path(public), "true", uid=FULL).reason)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_job_that_can_have_no_keyring_of_its_own_does_not_start(public: Path) -> None:
    if not ROOT:  # a user's own worker can be kept from it no other way than root's
        return
    full, reason = in_a_process(run_a_job_of_a_user_with_many_keys, str(public)).splitlines()
    assert full == "Disk quota exceeded"
    assert reason == "It cannot be given a session keyring of its own: Disk quota exceeded."


def refuse(names: list[int]) -> None:
    """Have the kernel refuse system calls for keys to this process and its children, as Docker does."""
    numbers = [session_keyring.SYSTEM_CALLS[os.uname().machine][name] for name in names]
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)]
    for left, number in reversed([*enumerate(reversed(numbers))]):
        program.append((jump_if_equal, left + 1, 0, number))
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EPERM)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    content = ctypes.create_string_buffer(code)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(content)))
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) == 0, ctypes.get_errno()


def run_a_job_where_calls_are_refused(public: str, uid: int, names: list[int]) -> None:
    refuse(names)
    report = end_of(Path(public), "true", uid=uid)
    print(report.exit_code, report.reason)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([0, 1, 2], "0 None\n"),
        ([2], "None It cannot be given a session keyring of its own: Operation not permitted.\n"),
    ],
    ids=["all", "keyctl alone"],
)
def test_a_job_needs_no_keyring_where_no_key_can_be_reached(public: Path, names: list[int], expected: str) -> None:
    assert in_a_process(run_a_job_where_calls_are_refused, str(public), USERS[0], names) == expected
