"""What `gpulease run` does with the processes below it, against a daemon's stand-in that takes the lease away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpulease import Client
from gpulease_cli.surrounding_lease import BorrowedLease
from tests.cli.programs import environ, wait_until
from tests.client.fake_daemon import FakeDaemon

RUN = """
import importlib, sys
importlib.import_module("gpulease_cli.commands.run").GRACE_S = float(sys.argv[1])
from gpulease_cli import main
sys.exit(main(["run", "--ttl", "2s", "--", *sys.argv[2:]]))
"""

RANK = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    signal.pause()
"""
"""Like a rank of torchrun that saves a checkpoint at SIGTERM: a session of its own, which SIGTERM does not end."""

LAUNCHERS = {
    "ignores SIGTERM": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{start}\nsignal.pause()",
    "ends at SIGTERM": "import signal\n{start}\nsignal.pause()",
    "starts it through a shell that ends": "import signal, subprocess\n{orphan}\nsignal.pause()",
}


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    stand_in = FakeDaemon()
    yield stand_in
    stand_in.stop()


@contextmanager
def started(
    daemon: FakeDaemon, *command: str, grace_s: float = 1.0, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """`gpulease run -- command`, which is not left behind."""
    program = subprocess.Popen(
        [sys.executable, "-c", RUN, str(grace_s), *command],
        env=environ(GPULEASE_URL=daemon.url),
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield program
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Pid of the rank, once it has told it."""
    place = tmp_path / "rank"

    def pid() -> int:
        wait_until(lambda: place.exists() and place.read_text())
        return int(place.read_text())

    yield pid
    with suppress(OSError, ValueError):
        os.kill(int(place.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_descendant_of_the_command_outlives_a_lost_lease(daemon, tmp_path, rank, capfd, launcher: str) -> None:
    words = [sys.executable, "-c", RANK, str(tmp_path / "rank")]
    start = f"import subprocess; subprocess.Popen({words!r})"
    program = LAUNCHERS[launcher].format(
        start=start, orphan=f"subprocess.run(['sh', '-c', '\"$@\" &', 'sh', *{words!r}])"
    )
    with started(daemon, sys.executable, "-c", program) as run:
        pid = rank()
        daemon.end("L-1", "revoked")
        assert run.wait(60) == 4
        assert not alive(pid)
    assert "L-1 ended before the command did\n" in capfd.readouterr().err


def test_a_command_that_ends_because_no_daemon_answers_is_not_told_that_its_lease_has_ended(
    daemon: FakeDaemon, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    with started(daemon, "sh", "-c", 'touch "$0"; sleep 60', str(begun)) as run:
        wait_until(begun.exists)
        daemon.fault = lambda line: "503"
        assert run.wait(60) == 4
    said = capfd.readouterr().err
    assert "L-1 was not renewed for its --ttl" in said
    assert "ended before" not in said
    assert "a longer --ttl lets it go on without one for as long" in said


def test_a_command_that_exits_within_the_grace_period_is_not_killed(daemon: FakeDaemon, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    program = f"""
import os, signal, subprocess, sys, time
def save(*_):
    time.sleep(0.3)
    open({str(saved)!r}, "w").write("whole")
    os._exit(0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, save)
    open({str(saved)!r}, "w").write("part")
signal.pause()
"""
    with started(daemon, sys.executable, "-c", program, grace_s=45.0) as run:
        wait_until(lambda: saved.exists() and saved.read_text() == "part")
        daemon.end("L-1", "revoked")
        assert run.wait(60) == 4
    assert saved.read_text() == "whole"


def test_a_command_whose_lease_is_preempted_gets_sigterm_at_the_notice(daemon, tmp_path: Path, capfd) -> None:
    saved = tmp_path / "checkpoint"
    program = f"trap 'echo whole > {saved}; exit 3' TERM; echo part > {saved}; while :; do sleep 0.05; done"
    with started(daemon, "sh", "-c", program) as run:
        wait_until(lambda: saved.exists() and saved.read_text() == "part\n")
        daemon.only_lease()["preempt_at"] = "2026-01-01T12:00:00Z"
        assert run.wait(60) == 3
    assert saved.read_text() == "whole\n"
    assert "L-1 is preempted: the command gets SIGTERM now, and ends with the lease\n" in capfd.readouterr().err
    assert daemon.only_lease()["end_reason"] == "released"


@pytest.mark.parametrize("waits", [False, True])
def test_a_terminal_that_is_closed_ends_no_wait_and_keeps_no_notice_from_the_command(
    daemon: FakeDaemon, tmp_path: Path, waits: bool
) -> None:
    """As of a program that was started with `setsid` or `disown`: it gets no SIGHUP, and cannot write any more."""
    saved = tmp_path / "checkpoint"
    command = f"trap 'echo whole > {saved}; exit 3' TERM; echo part > {saved}; while :; do sleep 0.05; done"
    terminal, stderr = os.openpty()
    daemon.free = not waits
    words = [sys.executable, "-m", "gpulease_cli", "run", "--wait", "50s", "--ttl", "2s", "--", "sh", "-c", command]
    with subprocess.Popen(words, env=environ(GPULEASE_URL=daemon.url), stderr=stderr, start_new_session=True) as run:
        try:
            os.close(stderr)
            wait_until(lambda: daemon.count("explain") if waits else saved.exists())
            os.close(terminal)
            if waits:
                before = daemon.count("explain")
                wait_until(lambda: daemon.count("explain") > before + 1)  # it has tried to write meanwhile
                daemon.grant("L-1")
            wait_until(lambda: saved.exists() and saved.read_text() == "part\n")
            daemon.only_lease()["preempt_at"] = "2026-01-01T12:00:00Z"
            assert run.wait(60) == 3
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert saved.read_text() == "whole\n"


def test_a_wait_keeps_its_place_for_as_long_as_it_may_last_while_no_daemon_answers(daemon: FakeDaemon) -> None:
    program = "import sys, gpulease_cli.wait_progress as it; it.RETRY_S = 0.5; from gpulease_cli import main"
    words = [sys.executable, "-c", f"{program}; sys.exit(main(sys.argv[1:]))", "run", "--wait", "5m", "--", "true"]
    daemon.free = False
    with subprocess.Popen(words, env=environ(GPULEASE_URL=daemon.url), start_new_session=True) as run:
        try:
            wait_until(lambda: daemon.count("wait_while=queued"))
            daemon.stop()
            since_s = time.monotonic()
            wait_until(lambda: time.monotonic() > since_s + 3.0 or run.poll() is not None)
            assert run.poll() is None
            daemon.start()
            daemon.grant("L-1")
            assert run.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert len(daemon.leases) == 1


def test_a_command_that_had_the_notice_is_killed_when_its_lease_ends(daemon: FakeDaemon, tmp_path: Path) -> None:
    """It had its time to save since the notice; a lost lease that no one has announced gives it the grace."""
    told, ticks, grace_s = tmp_path / "told", tmp_path / "ticks", 2.0
    program = f"""
import signal, time
count = 0
def tell(*_):
    global count
    count += 1
    open({str(told)!r}, "w").write(str(count))
signal.signal(signal.SIGTERM, tell)
tell()
while True:
    time.sleep(0.02)
    if count > 2:
        open({str(ticks)!r}, "a").write(".")
"""
    with started(daemon, sys.executable, "-c", program, grace_s=grace_s) as run:
        wait_until(lambda: told.exists() and told.read_text() == "1")
        daemon.only_lease()["preempt_at"] = "2026-01-01T12:00:00Z"
        wait_until(lambda: told.read_text() == "2")
        noticed_s = time.monotonic()
        wait_until(lambda: time.monotonic() > noticed_s + grace_s)
        daemon.end("L-1", "preempted")
        assert run.wait(60) == 4
    ticked_s = 0.02 * len(ticks.read_text() if ticks.exists() else "")
    assert ticked_s < grace_s / 2, "it went on for others to wait"


def test_a_command_in_a_lease_ends_when_that_was_told_to_end_though_no_daemon_answers(daemon: FakeDaemon) -> None:
    daemon.new_lease({})
    daemon.only_lease().update(ends_in_s=0.5, preempt_at="2026-01-01T12:00:00Z")
    with Client(daemon.url) as client:
        lease = client.lease_by_id("L-1")
        daemon.stop()
        lost: list[BorrowedLease] = []
        told: list[BorrowedLease] = []
        with BorrowedLease(client, lease, lease.gpus, lost.append, told.append) as borrowed:
            assert borrowed.lost.wait(30)
            wait_until(lambda: lost == [borrowed])
        assert told == [borrowed], "once, as it learns of it"


def test_a_command_that_has_stopped_itself_ends_with_the_program(daemon: FakeDaemon, tmp_path: Path) -> None:
    """As a shell in which `suspend` was typed, when its terminal is closed."""
    place = tmp_path / "pid"
    with started(daemon, "sh", "-c", f"trap 'exit 3' TERM; echo $$ > {place}; kill -STOP $$; exit 9") as program:
        wait_until(lambda: place.exists() and place.read_text().endswith("\n"))
        state = Path(f"/proc/{int(place.read_text())}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 3


def test_processes_left_behind_by_a_command_stay(daemon: FakeDaemon, tmp_path: Path, rank) -> None:
    words = [sys.executable, "-c", RANK, str(tmp_path / "rank")]
    with started(daemon, "sh", "-c", '"$@" & while ! [ -s "$4" ]; do sleep 0.01; done; exit 5', "sh", *words) as run:
        assert run.wait(60) == 5
        assert alive(rank())
    assert daemon.only_lease()["end_reason"] == "released"


def test_orphans_that_end_while_the_command_runs_leave_no_zombies(daemon: FakeDaemon, tmp_path: Path) -> None:
    started_all, go_on = tmp_path / "started all", tmp_path / "go on"
    orphans = 'for i in 1 2 3; do sh -c "true & exit"; sh -c "sleep 0.05 & exit"; done'
    script = f'{orphans}; touch "$0"; while ! [ -e "$1" ]; do sleep 0.05; done'
    with started(daemon, "sh", "-c", script, str(started_all), str(go_on)) as run:

        def names() -> list[str]:
            (guard,) = children(run.pid)
            found = []
            for pid in children(guard):
                with suppress(OSError):  # it is reaped at this moment
                    found.append(Path(f"/proc/{pid}/comm").read_text().strip())
            return found

        wait_until(started_all.exists)
        wait_until(lambda: names() == ["sh"], story=lambda: str(names()))
        go_on.touch()
        assert run.wait(60) == 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("victim", ["gpulease run", "its guard"])
def test_nothing_of_the_command_outlives_a_program_that_is_killed(
    daemon: FakeDaemon, tmp_path: Path, rank, launcher: str, victim: str
) -> None:
    """Its lease ends with it, and what went on would be on GPUs that no one holds."""
    words = [sys.executable, "-c", RANK, str(tmp_path / "rank")]
    start = f"import subprocess; subprocess.Popen({words!r})"
    program = LAUNCHERS[launcher].format(
        start=start, orphan=f"subprocess.run(['sh', '-c', '\"$@\" &', 'sh', *{words!r}])"
    )
    with started(daemon, sys.executable, "-c", program) as run:
        pid = rank()
        (guard,) = children(run.pid)
        (command,) = [child for child in children(guard) if child != pid]
        os.kill(run.pid if victim == "gpulease run" else guard, signal.SIGKILL)
        assert run.wait(60) == (-signal.SIGKILL if victim == "gpulease run" else 128 + signal.SIGKILL)
        wait_until(lambda: not any(map(alive, (pid, command, guard))))


def test_the_command_ends_when_its_guard_is_killed_with_the_program(daemon: FakeDaemon, tmp_path: Path) -> None:
    """As by the kernel that runs out of memory, or SIGKILL to a whole session."""
    started_all = tmp_path / "started"
    with started(
        daemon, sys.executable, "-c", f"import signal\nopen({str(started_all)!r}, 'w')\nsignal.pause()"
    ) as run:
        wait_until(started_all.exists)
        (guard,) = children(run.pid)
        (command,) = children(guard)
        try:
            os.kill(guard, signal.SIGSTOP)  # so that it cannot act before it dies
            os.kill(run.pid, signal.SIGKILL)
            os.kill(guard, signal.SIGKILL)
            wait_until(lambda: not any(map(alive, (run.pid, guard, command))))
        finally:
            with suppress(ProcessLookupError):
                os.kill(command, signal.SIGKILL)


def test_a_command_that_cannot_be_executed_is_named(daemon: FakeDaemon, tmp_path: Path, capfd) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF nothing")
    (tmp_path / "broken").chmod(0o755)
    with started(daemon, str(tmp_path / "broken")) as run:
        assert run.wait(60) == 126
    assert "the command was not started" in capfd.readouterr().err


def test_the_exit_code_is_passed_on_even_if_sigchld_was_ignored(daemon: FakeDaemon) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with started(daemon, "sh", "-c", "exit 7", preexec_fn=ignore) as run:
        assert run.wait(60) == 7
