"""`pytest --gpulease`, with and without pytest-xdist, on a daemon of four simulated GPUs."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.tools.sweep import FREED_WITHIN_S, Sweep, freed, leases_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
PAGE = blocks(ROOT / "docs" / "tools" / "pytest.md")
TRIALS = """
import os, signal, time
from pathlib import Path
import pytest, trial

@pytest.mark.parametrize("number", range(20))
def test_training(number):
    crashed = Path("crashed")
    if number == 7 and not crashed.exists():
        crashed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    trial.hold(number)
"""
LONG = """
import os
import trial

def test_training():
    trial.hold(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
"""
SEEN = """
import os
import pytest

def test_free():
    print("mask", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("AT_CONFTEST"), "end")

@pytest.mark.gpus
def test_one(): pass

@pytest.mark.gpus(2)
def test_two(): pass
"""
CONFTEST = "import os; os.environ['AT_CONFTEST'] = str(os.environ.get('CUDA_VISIBLE_DEVICES'))"


def typed(sweep: Sweep, *options: str, code: int = 0, **environment: str) -> str:
    """What `pytest` prints with these options, over the tests `SEEN`."""
    (sweep.place / "conftest.py").write_text(CONFTEST)
    (sweep.place / "test_seen.py").write_text(SEEN)
    (sweep.place / "output").unlink(missing_ok=True)
    process = sweep.start_command([*PYTEST, "-s", "-rs", *options], **{"GPULEASE_WAIT_S": "0"} | environment)
    assert process.wait(120) == code, sweep.output()
    return sweep.output()


def test_a_suite_of_twenty_tests_goes_through_four_gpus_though_a_worker_crashes(sweep: Sweep) -> None:
    """Each process starts slowly, as on a busy machine: also the one that replaces the worker."""
    (sweep.place / "test_trials.py").write_text(TRIALS)
    slow = sweep.place / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text("import time; time.sleep(1.5)")
    path = os.pathsep.join(filter(None, [str(slow), sweep.environment().get("PYTHONPATH")]))
    process = sweep.start_command([*PYTEST, "--gpulease", "-n", "6"], PYTHONPATH=path)

    assert process.wait(120) == 1, sweep.output()

    printed = sweep.output()
    assert "4 workers on GPU" in printed
    assert "6 were asked for" in printed
    assert "19 passed" in printed, printed
    assert re.search(r"1 failed.* in ", printed), printed
    trials = sweep.trials()
    assert sorted(trial.number for trial in trials) == [number for number in range(20) if number != 7]
    gpus = {trial.pid: trial.gpus for trial in trials}
    assert "replacing crashed worker" in printed
    assert {len(has) for has in gpus.values()} == {1}
    assert len(set(gpus.values())) == 4
    eventually(lambda: not sweep.running.leases("active"), 60)
    assert len([event for event in sweep.events() if event["kind"] == "lease.granted"]) == 4


@pytest.mark.parametrize("victim", ["a worker", "the controller"])
def test_the_gpus_of_what_is_killed_are_free_within_seconds(sweep: Sweep, running: DaemonProcess, victim: str) -> None:
    (sweep.place / "test_long.py").write_text(LONG)
    options = ("--gpulease", "-n", "4", "--dist", "each", "--max-worker-restart", "0")
    process = sweep.start_command([*PYTEST, *options], TRIAL_S="300")
    try:
        workers = sweep.wait_for_trials(4)
        one = workers[0]
        uuid = next(gpu["uuid"] for gpu in running.gpus() if str(gpu["index"]) in one.gpus)
        lease = next(lease["id"] for lease in running.leases("active") if lease["gpus"][0]["uuid"] == uuid)
        if victim == "a worker":
            after = freed(running, [lease], lambda: os.kill(one.pid, signal.SIGKILL))
            assert len(running.leases("active")) == 3
        else:
            after = freed(running, leases_of(running, process.pid), lambda: os.kill(process.pid, signal.SIGKILL))
            eventually(lambda: not any(Path(f"/proc/{trial.pid}").exists() for trial in workers), 60)
    finally:
        process.kill()
        process.wait(60)
        sweep.close()
    assert after.seconds < FREED_WITHIN_S
    running.wait_free()


def test_one_process_sees_its_gpus_before_its_conftest(sweep: Sweep, running: DaemonProcess) -> None:
    printed = typed(sweep, "--gpulease")
    found = re.search(r"mask (\S+) (\S+) end", printed)
    assert found is not None, printed
    assert re.fullmatch(r"GPU-[0-9a-f-]{36}", found[1])
    assert found[1] == found[2]
    assert "needs 2 GPUs, 1 leased: pytest --gpulease=2" in printed
    assert "2 passed, 1 skipped" in printed
    assert "3 passed" in typed(sweep, "--gpulease=2")
    assert running.leases("active") == []


def test_without_the_option_nothing_changes(sweep: Sweep) -> None:
    printed = typed(sweep, CUDA_VISIBLE_DEVICES="7", GPULEASE_URL="http://127.0.0.1:9")
    assert "mask 7 7 end" in printed
    assert "3 passed" in printed
    assert "gpulease:" not in printed
    assert "lease" not in typed(sweep, "--gpulease", "--collect-only").partition("collected")[2]
    assert sweep.events() == []


def test_who_gets_no_gpus_reads_who_has_them_or_skips(sweep: Sweep, running: DaemonProcess) -> None:
    held = running.request_lease(4, label="sweep of bob")
    refused = typed(sweep, "--gpulease", code=4)
    assert "ERROR: --gpulease: You requested to find 1 devices but only 0 are currently available." in refused
    assert "sweep of bob" in refused
    assert "--gpulease-wait=10m" in refused
    waited = typed(sweep, "--gpulease", "-n", "2", "--gpulease-wait", "0.2", "--gpulease-or-skip")
    assert "1 passed, 2 skipped" in waited
    skipped = typed(sweep, "--gpulease", "--gpulease-or-skip")
    assert "1 passed, 2 skipped" in skipped
    assert "needs 1 GPU, there are none: You requested" in skipped
    assert "mask   end" in skipped
    running.release(held)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpulease", "test_seen.py"), "'test_seen.py' is no number of GPUs. Write --gpulease=1, or"),
        (("--gpulease=5",), "this machine only has 4 GPUs"),
        (("--gpulease", "--gpulease-wait=soon"), "--gpulease-wait: 'soon' is not a duration"),
        (("--gpulease", "--tx", "ssh=other", "--dist", "load"), "--gpulease leases GPUs of this host"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(sweep: Sweep, options: tuple[str, ...], message: str) -> None:
    assert message in typed(sweep, *options, code=4)


def test_workers_share_out_the_gpus_of_a_surrounding_lease(sweep: Sweep, running: DaemonProcess) -> None:
    (sweep.place / "test_trials.py").write_text(LONG)
    command = [sys.executable, "-m", "gpulease_cli", "run", "-n", "2", "--", *PYTEST, "--gpulease", "-n", "3"]
    printed = sweep.run_command([*command, "--dist", "each"])
    assert "2 passed" in printed
    assert "3 were asked for" in printed
    assert {len(trial.gpus) for trial in sweep.trials()} == {1}
    assert len({gpu for trial in sweep.trials() for gpu in trial.gpus}) == 2
    assert len([event for event in sweep.events() if event["kind"] == "lease.granted"]) == 1


def test_the_page_is_as_it_says(sweep: Sweep) -> None:
    for block in PAGE:
        if (name := block.note("saved as")) is not None:
            (sweep.place / name).write_text(block.text)
        elif block.language == "bash":
            printed = sweep.run_command(["bash", "-ec", block.text])
            assert re.findall(r"(\d+) passed", printed) == ["20", "1"], printed
            assert "1 skipped" in printed
