"""The Hydra launcher: Hydra's own suites, the page, and sweeps of which something is killed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.sweep_events import most_at_once
from tests.tools.sweep import FREED_WITHIN_S, TOOLS, Sweep, freed, leases_of, overlaps

pytestmark = pytest.mark.slow

PLUGIN = ROOT / "integrations" / "hydra-gpulease-launcher"
PATH = f"{PLUGIN}:{Path(__file__).parent}"
# Without `if __name__ == "__main__"`: a trial does not import the program.
SCRIPT = """
import hydra, trial

@hydra.main(version_base=None)
def main(cfg):
    trial.hold(cfg.n)
    if cfg.n == 19:
        raise ValueError("nineteen is too much")

main()
"""
TRIALS = 20
ABOUT_LAUNCHERS = (
    "not (strict or 2_optimizers or mandatory or different_filename or sweep_dir"
    " or subdir:override_dirname or orig_dir)"
)
"""The other ones are about what Hydra composes before it launches, or a second time about names and directories."""
LAUNCH = ("--multirun", "hydra/launcher=gpulease", "hydra.launcher.n_jobs=6")


@pytest.mark.budget(60)
@pytest.mark.parametrize(
    ("chosen", "passed"), [(ABOUT_LAUNCHERS, 9), pytest.param("test", 21, id="all", marks=pytest.mark.soak)]
)
def test_it_passes_the_suites_of_hydra(sweep: Sweep, chosen: str, passed: int) -> None:
    suite = [str(TOOLS / "python"), "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={PLUGIN}", "-k", chosen, "-p"]
    printed = sweep.run_command([*suite, "no:cacheprovider", str(PLUGIN / "tests")], PYTHONPATH=str(PLUGIN))
    assert re.search(rf"^{passed} passed", printed, re.MULTILINE), printed
    assert most_at_once(sweep.events()) <= 4


def test_the_page_runs(sweep: Sweep) -> None:
    script, command, *_ = blocks(ROOT / "docs" / "tools" / "hydra.md")
    (sweep.place / "train.py").write_text(script.text)
    printed = sweep.run_command(["bash", "-ec", command.text], PYTHONPATH=str(PLUGIN))
    # Jobs that print at the same time may share a line.
    assert len(re.findall(r"lr 0\.\d+ on GPU-[0-9a-f-]{36}", printed)) == 6, printed
    assert 1 < most_at_once(sweep.events()) <= 4


def test_the_trials_of_submitit_become_jobs(sweep: Sweep) -> None:
    launch = ("--multirun", "hydra/launcher=submitit_gpulease", "hydra.launcher.gpus_per_node=2")
    sweep.run(SCRIPT, *launch, "+n=0,1", PYTHONPATH=PATH)
    sweep.check(2, gpus_each=2)
    assert [event["kind"] for event in sweep.events()].count("job.submitted") == 2


@pytest.mark.budget(60)
def test_twenty_trials_of_which_one_is_killed(sweep: Sweep) -> None:
    numbers = ",".join(map(str, range(TRIALS)))
    program = sweep.start(SCRIPT, *LAUNCH, f"+n={numbers}", PYTHONPATH=PATH, TRIAL_S="1", TRIAL_STAYS="2")
    killed = sweep.wait_for_trial(2)
    (lease,) = [lease for lease in sweep.running.leases("active") if lease_index(lease) in killed.gpus]
    killed_at_s = time.time()
    after = freed(sweep.running, [lease["id"]], lambda: os.kill(killed.pid, signal.SIGKILL))
    with pytest.raises(AssertionError):
        sweep.wait(program)
    trials = sweep.trials()
    assert sorted(trial.number for trial in trials) == list(range(TRIALS)), sweep.output()
    assert [trial.number for trial in trials if trial.ended_s == float("inf")] == [killed.number]
    others = [trial for trial in trials if trial.number != killed.number]
    assert overlaps([*others, dataclasses.replace(killed, ended_s=killed_at_s)]) == []
    assert most_at_once(sweep.events()) == 4
    assert after.seconds < FREED_WITHIN_S
    # The sweeper raises the first error; the launcher names each.
    printed = sweep.output()
    assert re.search(rf"#{killed.number} failed: ProcessDied\(.*SIGKILL", printed), printed
    assert "#19 failed: ValueError('nineteen is too much')" in printed, printed
    assert f"Error executing job with overrides: ['+n={killed.number}']" in printed, printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_trial_outlives_the_sweep(sweep: Sweep, running: DaemonProcess, number: signal.Signals) -> None:
    program = sweep.start(SCRIPT, *LAUNCH, "+n=0,1,2,3,4,5", PYTHONPATH=PATH, TRIAL_S="300")
    sweep.wait_for_trials(4)
    eventually(lambda: len(running.leases("queued")) == 2, 60, sweep.output)
    after = freed(running, leases_of(running), lambda: os.kill(program.pid, number))
    assert after.seconds < FREED_WITHIN_S
    running.wait_free()  # no process of a trial is left
    eventually(lambda: program.poll() is not None and not running.leases("queued"), 30, sweep.output)


def test_a_trial_that_gets_no_gpu_says_who_is_in_the_way(sweep: Sweep, running: DaemonProcess) -> None:
    running.request_lease(4, label="the others")
    program = sweep.start(SCRIPT, *LAUNCH, "+n=0", "hydra.launcher.wait_s=0.5", PYTHONPATH=PATH)
    assert program.wait(120) == 1
    assert re.search(r"#0 failed: NotNow\(.*the others", sweep.output(), re.DOTALL), sweep.output()
    running.give_everything_back()


def lease_index(lease: dict[str, object]) -> str:
    """The index of the one GPU of a lease."""
    (gpu,) = lease["gpus"]  # type: ignore[misc]
    return str(gpu["index"])
