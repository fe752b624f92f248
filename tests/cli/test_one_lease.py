"""Where a training might take a second lease, or two trainings one: what users do, on a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys

from gpulease import Client, LeaseState

from .programs import Program, environ

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


def test_a_program_that_replaces_itself_keeps_its_lease_and_gives_it_back(client: Client, python: Program) -> None:
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
print(gpulease.find_usable_cuda_devices(2, wait_s=20), flush=True)
os.execv(sys.executable, [sys.executable, "-c", {after!r}])
"""
    assert lines(program, python) == ["[0, 1]", "[0, 1] [0] 1 1", "InUse", "0"]


def test_a_call_in_a_signal_handler_that_interrupts_another_is_refused(client: Client, python: Program) -> None:
    program = """
import os, signal, threading, gpulease
from gpulease import devices
def handler(*_):
    try:
        gpulease.find_usable_cuda_devices(1)
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
signal.signal(signal.SIGUSR1, handler)
reserve = devices._reserve
def interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGUSR1)
    return reserve(*arguments, **options)
devices._reserve = interrupted
print(gpulease.find_usable_cuda_devices(1, wait_s=20), gpulease.find_usable_cuda_devices(1))
"""
    assert lines(program, python) == ["InUse", "[0] [0]"]


def test_two_trainings_started_where_somebody_was_debugging_a_rank_take_a_lease_each(client: Client, url: str) -> None:
    left = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    wish = "{'num_devices': 2, 'wait_s': 20}"
    with launched(url, wish, wish, port=29501, **left) as one, launched(url, wish, wish, port=29502, **left) as two:
        found = [said(one, 2), said(two, 2)]
        held = client.leases(LeaseState.ACTIVE)
        for launcher in (one, two):
            launcher.communicate("", timeout=30)
    assert sorted(found) == [["[0, 1]"] * 2, ["[2, 3]"] * 2]
    assert {lease.holder.owner_pid for lease in held} == {one.pid, two.pid}


def test_two_trainings_of_one_parent_that_meet_at_different_ports_take_a_lease_each(client: Client, url: str) -> None:
    program = LAUNCHER.replace('os.environ["PORT"]', "str(29600 + rank)")
    wish = "{'num_devices': 2, 'wait_s': 20}"
    command = [sys.executable, "-c", program, wish, wish]
    with subprocess.Popen(
        command, env=environ(GPULEASE_URL=url), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert said(parent, 2) == ["[0, 1]", "[2, 3]"]
        assert len(client.leases(LeaseState.ACTIVE)) == 2
        parent.communicate("", timeout=30)


def test_a_rank_that_asks_for_something_else_is_told_and_takes_no_lease_of_its_own(client: Client, url: str) -> None:
    wishes = [f"{{'num_devices': 2, 'wait_s': 20, 'label': 'rank {rank}'}}" for rank in range(2)]
    with launched(url, *wishes) as launcher:
        first, second = said(launcher, 2)
        assert first == "[0, 1]"
        assert second.startswith("InUse Another rank")
        assert len(client.leases(LeaseState.ACTIVE)) == 1
        launcher.communicate("", timeout=30)


def test_numbers_follow_a_mask_that_is_changed_before_cuda_starts(client: Client, python: Program) -> None:
    program = """
import os, gpulease
find = gpulease.find_usable_cuda_devices
print(find(2, wait_s=20))
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
command = [sys.executable, "-c", program, "{{'num_devices': 1, 'wait_s': 20}}", str(os.getpid())]
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
        script.communicate("", timeout=30)
