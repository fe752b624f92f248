"""Where a training might take a second lease, or two trainings one: what users do, on a real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import Program, environ
from tests.daemon import eventually

RANK = """
import os, sys, gpulease
wishes = eval(sys.argv[1])
try:
    said = gpulease.find_usable_cuda_devices(**wishes)
except Exception as error:
    said = type(error).__name__ + " " + str(error)
print(said, flush=True)
sys.stdin.read()
"""
LAUNCHER = f"""
import os, subprocess, sys
wishes = sys.argv[1:]
ranks = []
for rank, wish in enumerate(wishes):
    place = {{"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": os.environ["PORT"]}}
    ranks.append(subprocess.Popen([sys.executable, "-c", {RANK!r}, wish], env=os.environ | place, text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    print(ranks[-1].stdout.readline().strip(), flush=True)
sys.stdin.read()
for rank in ranks:
    rank.communicate()
"""
"""Starts one rank for each wish, as a launcher would, the next when the one before has found its GPUs."""


def launched(url: str, *wishes: str, port: int = 29500, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *wishes],
        env=environ(GPULEASE_URL=url, PORT=str(port)) | more,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def said(process: subprocess.Popen[str], lines: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(lines)]


def lines(program: str, python: Program, **more: str) -> list[str]:
    result = python(program, **more)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().split("\n")


def test_a_program_that_calls_exec_keeps_its_lease_and_releases_it(client: Client, python: Program) -> None:
    after = """
import gpulease
find = gpulease.find_usable_cuda_devices
print(find(2), find(1), len(gpulease.Client().leases("active")), len(gpulease.reserved_leases()))
try:
    find(3)
except RuntimeError as error:
    print(type(error).__name__)
gpulease.reserved_leases()[0].release()
print(len(gpulease.Client().leases("active")))
"""
    program = f"""
import os, sys, gpulease
print(gpulease.find_usable_cuda_devices(2, wait_s=60), flush=True)
os.execv(sys.executable, [sys.executable, "-c", {after!r}])
"""
    assert lines(program, python) == ["[0, 1]", "[0, 1] [0] 1 1", "InUse", "0"]


def test_a_call_in_a_signal_handler_that_interrupts_another_is_refused(client: Client, python: Program) -> None:
    program = """
import os, signal, threading, gpulease
from gpulease import find_devices
def handler(*_):
    try:
        gpulease.find_usable_cuda_devices(1)
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
signal.signal(signal.SIGUSR1, handler)
reserve = find_devices._reserve
def interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGUSR1)
    return reserve(*arguments, **options)
find_devices._reserve = interrupted
print(gpulease.find_usable_cuda_devices(1, wait_s=60), gpulease.find_usable_cuda_devices(1))
"""
    assert lines(program, python) == ["InUse", "[0] [0]"]


def test_two_trainings_started_from_a_rank_being_debugged_take_a_lease_each(client: Client, url: str) -> None:
    left = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    wish = "{'num_devices': 2, 'wait_s': 60}"
    with launched(url, wish, wish, port=29501, **left) as one, launched(url, wish, wish, port=29502, **left) as two:
        found = [said(one, 2), said(two, 2)]
        held = client.leases(LeaseState.ACTIVE)
        for launcher in (one, two):
            launcher.communicate("", timeout=60)
    assert sorted(found) == [["[0, 1]"] * 2, ["[2, 3]"] * 2]
    assert {lease.holder.owner_pid for lease in held} == {one.pid, two.pid}


def test_two_trainings_of_one_parent_at_different_ports_take_a_lease_each(client: Client, url: str) -> None:
    program = LAUNCHER.replace('os.environ["PORT"]', "str(29600 + rank)")
    wish = "{'num_devices': 2, 'wait_s': 60}"
    command = [sys.executable, "-c", program, wish, wish]
    with subprocess.Popen(
        command, env=environ(GPULEASE_URL=url), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert said(parent, 2) == ["[0, 1]", "[2, 3]"]
        assert len(client.leases(LeaseState.ACTIVE)) == 2
        parent.communicate("", timeout=60)


def test_a_rank_that_asks_for_something_else_is_refused_and_takes_no_lease(client: Client, url: str) -> None:
    wishes = [f"{{'num_devices': 2, 'wait_s': 60, 'label': 'rank {rank}'}}" for rank in range(2)]
    with launched(url, *wishes) as launcher:
        first, second = said(launcher, 2)
        assert first == "[0, 1]"
        assert second.startswith("InUse Another rank")
        assert len(client.leases(LeaseState.ACTIVE)) == 1
        launcher.communicate("", timeout=60)


def test_numbers_follow_a_mask_that_is_changed_before_cuda_starts(client: Client, python: Program) -> None:
    program = """
import os, gpulease
find = gpulease.find_usable_cuda_devices
print(find(2, wait_s=60))
os.environ["CUDA_VISIBLE_DEVICES"] = "3,1,0"
print(find(2), find(-1), find(1))
os.environ["CUDA_VISIBLE_DEVICES"] = "3"
try:
    find(2)
except RuntimeError as error:
    print(type(error).__name__)
del os.environ["CUDA_VISIBLE_DEVICES"]
print(find(2))
"""
    assert lines(program, python) == ["[0, 1]", "[1, 2] [1, 2] [1]", "UnknownOrdinals", "[0, 1]"]


def test_a_rank_of_a_launcher_that_left_its_shell_does_not_share_with_others(client: Client, url: str) -> None:
    """A script that starts ranks in the background and ends leaves them to process 1, and others theirs as well."""
    program = f"""
import os, subprocess, sys
place = {{"LOCAL_RANK": "0", "WORLD_SIZE": "2"}}
waits = "import os, time\\nwhile os.getppid() == int(sys.argv[2]): time.sleep(0.01)\\n"
program = "import sys\\n" + waits + {RANK!r}
command = [sys.executable, "-c", program, "{{'num_devices': 1, 'wait_s': 60}}", str(os.getpid())]
print(os.getpid(), flush=True)
subprocess.Popen(command, env=os.environ | place, start_new_session=True)
"""
    found = []
    running = []
    for _ in range(2):
        script = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environ(GPULEASE_URL=url),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(script)
        found.append(said(script, 2)[1])
    assert sorted(found) == ["[0]", "[1]"]
    assert not [lease for lease in client.leases(LeaseState.ACTIVE) if lease.holder.owner_pid in (1, os.getppid())]
    for script in running:
        script.communicate("", timeout=60)


SPAWNED = """
import multiprocessing, os, sys, gpulease

def rank(number, say, go):
    os.environ |= {"LOCAL_RANK": str(number), "RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    try:
        found = gpulease.find_usable_cuda_devices(2, wait_s=60)
    except Exception as error:
        found = type(error).__name__
    say.put((number, found))
    go.wait()

if __name__ == "__main__":
    kind = multiprocessing.get_context(sys.argv[1])
    for training in range(2):
        say, go = kind.Queue(), kind.Event()
        ranks = [kind.Process(target=rank, args=(number, say, go)) for number in range(2)]
        [one.start() for one in ranks]
        found = sorted(say.get() for _ in ranks)
        print(found, [one.liveness.value for one in gpulease.Client().leases("active")], flush=True)
        go.set()
        [one.join() for one in ranks]
    print(len(gpulease.Client().leases("active")), flush=True)
"""
"""As a notebook with notebook_launcher: two trainings, one after the other, whose ranks ask and not the notebook."""


@pytest.mark.budget(20)
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_ranks_that_multiprocessing_started_share_one_lease_that_ends_with_them(
    client: Client, url: str, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "notebook.py").write_text(SPAWNED)
    command = [sys.executable, str(tmp_path / "notebook.py"), kind]
    environment = environ(GPULEASE_URL=url)
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    *trainings, left = result.stdout.strip().split("\n")
    # The GPUs of the first may still drain when the second asks.
    shared = {f"[(0, {gpus}), (1, {gpus})] ['heartbeat']" for gpus in ("[0, 1]", "[2, 3]")}
    assert (len(trainings), set(trainings) <= shared, left) == (2, True, "0"), result.stdout + result.stderr


POOL = """
import multiprocessing, os, sys, time, gpulease

def child(say):
    lease = gpulease.Client().lease(count=1, wait_s=60, ttl_s=600)
    say.put(os.getpid())
    lease.lost.wait()
    try:
        gpulease.find_usable_cuda_devices(1)
    except gpulease.LeaseLost:
        open(sys.argv[1], "w").write("LeaseLost")
    time.sleep(600)

if __name__ == "__main__":
    say = multiprocessing.Queue()
    multiprocessing.Process(target=child, args=(say,)).start()
    print(say.get(), flush=True)
    time.sleep(600)
"""


@pytest.mark.budget(15)
def test_the_child_of_a_pool_whose_parent_is_killed_gives_back_what_it_holds_and_takes_no_more(
    client: Client, url: str, tmp_path: Path
) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "pool.py"), str(tmp_path / "said")]
    with subprocess.Popen(command, env=environ(GPULEASE_URL=url), text=True, stdout=subprocess.PIPE) as parent:
        child = int(said(parent, 1)[0])
        try:
            (held,) = client.leases(LeaseState.ACTIVE)
            assert held.holder.owner_pid == child
            parent.kill()
            parent.wait()
            eventually(lambda: client.lease_by_id(held.id).end_reason == "released", 60)
            eventually(lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text() == "LeaseLost", 60)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_wait_that_is_no_time_is_refused_by_name(client: Client, python: Program) -> None:
    program = """
import gpulease
calls = [
    lambda wait_s: gpulease.find_usable_cuda_devices(1, wait_s=wait_s),
    lambda wait_s: gpulease.usable_cuda_devices(1, wait_s=wait_s).__enter__(),
    lambda wait_s: gpulease.Client().lease(1, wait_s=wait_s),
]
for call in calls:
    for wait_s in ("10m", -1, float("nan")):
        try:
            print(call(wait_s))
        except gpulease.InvalidRequest as error:
            print(error.detail)
"""
    said = [f"wait_s: must be 0 or more seconds, not {wait_s}." for wait_s in ("'10m'", "-1", "nan")]
    assert lines(program, python) == said * 3
