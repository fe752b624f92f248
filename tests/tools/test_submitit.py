"""The submitit executor: submitit's own tests, the page, and jobs whose tasks and whose submitter are killed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time

import pytest

from tests.daemon import FINAL, DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.sweep_events import most_at_once
from tests.tools.sweep import FREED_WITHIN_S, TOOLS, Sweep, freed, overlaps

pytestmark = pytest.mark.slow

JOBS = 20
SUBMIT = """
import submitit, trial
executor = submitit.AutoExecutor(folder="log", cluster="gpulease")
jobs = executor.map_array(trial.hold, range(20))
print("submitted", flush=True)
jobs[-1].wait()
"""
COLLECT = """
import sys
from gpulease.integrations.submitit_executor import GpuleaseJob
jobs = [GpuleaseJob("log", job_id) for job_id in sys.argv[1:]]
print([job.result().startswith("GPU-") if job.exception() is None else job.state for job in jobs])
"""
# A function of the main module, so that cloudpickle sends it by value.
LIFE = '''
import os, signal, time, submitit

class Counted:
    """It is told to save itself when its time is nearly over, as here at once, and starts again from there."""
    def __call__(self, starts):
        self.starts = starts
        while starts < 3:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(300)
        return starts
    def checkpoint(self, starts):
        return submitit.helpers.DelayedSubmission(self, self.starts + 1)

def visible():
    environment = submitit.JobEnvironment()
    return environment.cluster, environment.global_rank, len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

def said():
    return os.environ.get("SAID")

def fails():
    raise ValueError("this one fails")

executor = submitit.AutoExecutor(folder="log/%j", cluster="gpulease")
executor.update_parameters(gpus_per_node=2, tasks_per_node=2, gpulease_setup=["export SAID=hello"])
two = executor.submit(visible)
assert two.results() == [("gpulease", 0, 2), ("gpulease", 1, 2)], two.results()
assert two.state == "COMPLETED", two.get_info()
assert not two.watcher.is_done(executor.submit(time.sleep, 0).cancel_at_deletion().job_id)
executor.update_parameters(gpus_per_node=1, tasks_per_node=1)
assert executor.submit(said).result() == "hello"
failed = executor.submit(fails)
assert "this one fails" in str(failed.exception())
assert failed.state == "FAILED", failed.get_info()

counted = executor.submit(Counted(), 1)
assert counted.result() == 3, counted.stderr()
assert counted.stdout().count("Requeued job") == 2, counted.stdout()

executor.update_parameters(gpus_per_node=4)
sleeping = executor.submit(time.sleep, 300)
waiting = executor.submit(time.sleep, 300)
while sleeping.get_info()["State"] != "RUNNING" or not sleeping.paths.stdout.exists():
    time.sleep(0.1)
assert waiting.get_info()["State"] == "PENDING", waiting.get_info()
sleeping.cancel()
waiting.cancel()
for job in (sleeping, waiting):
    job.wait()
    assert job.state == "CANCELLED", job.get_info()
try:
    executor.update_parameters(nodes=2)
except ValueError as error:
    print(error)
'''


@pytest.mark.budget(30)
def test_it_passes_the_tests_of_submitit(sweep: Sweep) -> None:
    module = "submitit/core/test_plugins.py"
    # They compare the installed executors with a list of submitit's own.
    out = [f"--deselect={module}::test_find_good_plugin", f"--deselect={module}::test_skip_bad_plugin"]
    suite = [str(TOOLS / "python"), "-m", "pytest", "-v", "-c", os.devnull, "-p", "no:cacheprovider", "--pyargs"]
    where = next((TOOLS.parent / "lib").glob("python*/site-packages"))
    printed = sweep.run_command([*suite, "submitit.core.test_plugins", f"--rootdir={where}", *out])
    assert re.search(r"12 passed, 2 deselected", printed), printed
    assert "test_executors[GpuleaseExecutor] PASSED" in printed, printed


def test_the_page_runs(sweep: Sweep) -> None:
    script, command = blocks(ROOT / "docs" / "tools" / "submitit.md")
    printed = run_page(sweep, script.text, command.text)
    assert "best: 0.1\n" in printed
    logs = [path.read_text() for path in sweep.place.glob("log/job-*/*_0_log.out")]
    assert len([log for log in logs if re.search(r"^lr 0\.\d+ on GPU-[0-9a-f-]{36}$", log, re.MULTILINE)]) == 6
    assert 1 < most_at_once(sweep.events()) <= 4


def run_page(sweep: Sweep, script: str, command: str) -> str:
    """What a page's command prints."""
    (sweep.place / "train.py").write_text(script)
    return sweep.run_command(["bash", "-ec", command])


@pytest.mark.budget(90)
def test_jobs_live_through_cancel_failure_checkpoint_and_tasks(sweep: Sweep) -> None:
    assert "Use nodes=1" in sweep.run(LIFE)


@pytest.mark.budget(90)
def test_twenty_jobs_of_which_one_is_killed_and_their_submitter_too(sweep: Sweep, running: DaemonProcess) -> None:
    program = sweep.start(SUBMIT, TRIAL_S="1.5", TRIAL_STAYS="2")
    eventually(lambda: "submitted" in sweep.output(), 120, sweep.output)
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    killed = sweep.wait_for_trial(2)
    (lease,) = [lease for lease in running.leases("active") if {str(g["index"]) for g in lease["gpus"]} & killed.gpus]
    killed_at_s = time.time()
    after = freed(running, [lease["id"]], lambda: os.kill(killed.pid, signal.SIGKILL))
    assert after.seconds < FREED_WITHIN_S
    jobs = [event["job_id"] for event in sweep.events() if event["kind"] == "job.submitted"]
    assert len(jobs) == JOBS, sweep.events()
    eventually(lambda: all(running.job(job)["state"] in FINAL for job in jobs), 200, sweep.output)
    trials = sweep.trials()
    assert sorted(trial.number for trial in trials) == list(range(JOBS)), sweep.output()
    assert [trial.number for trial in trials if trial.ended_s == float("inf")] == [killed.number]
    others = [trial for trial in trials if trial.number != killed.number]
    assert overlaps([*others, dataclasses.replace(killed, ended_s=killed_at_s)]) == []
    assert most_at_once(sweep.events()) == 4
    expected: list[object] = [True] * JOBS
    expected[killed.number] = "FAILED"
    assert str(expected) in sweep.run(COLLECT, *jobs), sweep.output()
