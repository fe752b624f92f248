"""The joblib backend: its page, twenty calls with more jobs than GPUs, and what is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.tools.sweep import FREED_WITHIN_S, Sweep, freed, leases_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = blocks(ROOT / "docs" / "tools" / "joblib.md")
SCRIPT = """
import os, signal, sys, joblib, trial
from gpulease.integrations import joblib_backend

def one(number):
    trial.hold(number)
    return number

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    joblib_backend.register()
    with joblib.parallel_config(backend="gpulease", n_jobs=8):
        calls = joblib.Parallel()
        if sys.argv[1:]:
            calls(joblib.delayed(one)(n) for n in range(4))
        assert calls(joblib.delayed(one)(n) for n in range(20)) == list(range(20))
        assert calls(joblib.delayed(lambda n: n * n)(n) for n in range(3)) == [0, 1, 4]
        try:
            calls(joblib.delayed(die)() for _ in range(2))
        except Exception as error:
            print("died:", type(error).__name__)
        assert calls([joblib.delayed(len)("ab")]) == [2], "the backend goes on after a failure"
"""
ONE_AT_A_TIME = """
import joblib, trial
from gpulease.integrations import joblib_backend

if __name__ == "__main__":
    joblib_backend.register()
    with joblib.parallel_config(backend="gpulease"%s):
        joblib.Parallel()(joblib.delayed(trial.hold)(number) for number in range(4))
"""


@pytest.mark.budget(90)
def test_twenty_calls_wait_for_four_gpus(sweep: Sweep) -> None:
    assert "died: ProcessDied" in sweep.run(SCRIPT)
    sweep.check(20, at_once=4)


@pytest.mark.parametrize(
    ("arguments", "gpus_each", "at_once"),
    [("", 1, None), (", n_jobs=1", 1, 1), (", n_jobs=-1, gpus_per_task=4", 4, 1)],
    ids=["without n_jobs", "one job", "as many as there are GPUs for, one"],
)
def test_calls_have_leases_also_one_at_a_time(
    sweep: Sweep, arguments: str, gpus_each: int, at_once: int | None
) -> None:
    sweep.run(ONE_AT_A_TIME % arguments)
    sweep.check(4, gpus_each=gpus_each, at_once=at_once)


@pytest.mark.parametrize("victim", ["a call", "the program"])
def test_the_gpus_of_what_is_killed_are_free_within_seconds(sweep: Sweep, running: DaemonProcess, victim: str) -> None:
    program = sweep.start(SCRIPT, "four", TRIAL_S="300")
    try:
        calls = sweep.wait_for_trials(4)
        pid = calls[0].pid if victim == "a call" else program.pid
        after = freed(running, leases_of(running, program.pid), lambda: os.kill(pid, signal.SIGKILL))
        eventually(lambda: not any(Path(f"/proc/{call.pid}/exe").exists() for call in calls), 60)
    finally:
        program.kill()
        program.wait(60)
        sweep.close()
    assert after.seconds < FREED_WITHIN_S


def test_the_page_is_as_it_says(sweep: Sweep) -> None:
    script, command = PAGE
    (sweep.place / str(script.note("saved as"))).write_text(script.text)
    assert "best 6" in sweep.run_command(["bash", "-ec", command.text.replace("python", sys.executable)])
