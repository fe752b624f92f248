"""The Snakemake executor: Snakemake's own tests, the page, and workflows of which something is killed."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.sweep_events import most_at_once
from tests.tools.sweep import FREED_WITHIN_S, TOOLS, Sweep, freed, overlaps

pytestmark = pytest.mark.slow

PLUGIN = ROOT / "integrations" / "snakemake-executor-plugin-gpulease"
WORKFLOW = """
rule all:
    input: "cpu", expand("trial/{n}", n=range(12))
rule trial:
    output: "trial/{n}"
    resources: gpu=1
    shell: "python -c 'import trial; trial.hold({wildcards.n})' && touch {output}"
rule cpu:
    output: "cpu"
    shell: "echo \\"[$CUDA_VISIBLE_DEVICES]\\" > {output}"
"""
FAILS = """
rule all:
    input: "here", "leased", "large", "wrong"
rule here:
    output: "here"
    shell: "echo said here; exit 3"
rule leased:
    output: "leased"
    resources: gpu=1
    shell: "echo said leased; exit 4"
rule large:
    output: "large"
    resources: gpu=99
    shell: "touch {output}"
rule wrong:
    output: "wrong"
    resources: gpu="two"
    shell: "touch {output}"
"""
COMMAND = [str(TOOLS / "snakemake"), "--executor", "gpulease", "--jobs", "10", "--latency-wait", "0"]


def paths(*more: str) -> str:
    return os.pathsep.join([str(PLUGIN), str(ROOT / "tests" / "tools"), *more])


@pytest.mark.budget(60)
@pytest.mark.parametrize(
    ("chosen", "jobs"),
    [
        ("TestOnGpus", 5 + 4),
        # The tests below have rules without GPUs, in workflows in which other rules have some.
        pytest.param("TestWithoutGpus", 0, marks=pytest.mark.soak),
    ],
)
def test_it_passes_the_suite_of_snakemake(sweep: Sweep, chosen: str, jobs: int) -> None:
    suite = [str(TOOLS / "python"), "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={PLUGIN}", "-k", chosen, "-p"]
    printed = sweep.run_command([*suite, "no:cacheprovider", str(PLUGIN / "tests")], PYTHONPATH=paths())
    assert re.search(r"^2 passed", printed, re.MULTILINE), printed
    submitted = [event["kind"] for event in sweep.events()].count("job.submitted")
    assert submitted == jobs, "those of two workflows; what runs without GPUs asks for nothing"


@pytest.mark.budget(60)
def test_the_page_runs(sweep: Sweep) -> None:
    workflow, command, *_ = blocks(ROOT / "docs" / "tools" / "snakemake.md")
    (sweep.place / "Snakefile").write_text(workflow.text)
    printed = sweep.run_command(["bash", "-ec", command.text], PYTHONPATH=paths())
    assert printed.splitlines()[-1].endswith(" 0.1"), printed
    assert 1 < most_at_once(sweep.events()) <= 4


@pytest.mark.budget(120)
def test_twelve_jobs_of_which_one_is_killed(sweep: Sweep, running: DaemonProcess) -> None:
    (sweep.place / "Snakefile").write_text(WORKFLOW)
    command = [*COMMAND, "--retries", "1"]
    program = sweep.start_command(command, TRIAL_S="2", TRIAL_STAYS="2", PYTHONPATH=paths())
    killed = sweep.wait_for_trial(2)
    (lease,) = [lease for lease in running.leases("active") if {str(g["index"]) for g in lease["gpus"]} & killed.gpus]
    after = freed(running, [lease["id"]], lambda: os.kill(killed.pid, signal.SIGKILL))
    assert after.seconds < FREED_WITHIN_S
    sweep.wait(program)
    assert (sweep.place / "cpu").read_text() == "[]\n"
    trials = [trial for trial in sweep.trials() if trial.pid != killed.pid]
    assert sorted(trial.number for trial in trials) == list(range(12)), "the killed one was tried again"
    assert overlaps(trials) == []
    assert most_at_once(sweep.events()) == 4


@pytest.mark.budget(60)
def test_a_job_that_fails_says_why(sweep: Sweep) -> None:
    (sweep.place / "Snakefile").write_text(FAILS)
    program = sweep.start_command([*COMMAND, "--keep-going"], PYTHONPATH=paths())
    assert program.wait(120) == 1
    printed = sweep.output()
    for words in ("said here", "exited with code", "said leased", "The end of `gpulease logs job-"):
        assert words in printed, printed
    assert re.search(r"gpulease: .*99 GPUs", printed), printed
    assert "gpu='two' is not a number of GPUs. Write gpu=1" in printed, printed


@pytest.mark.budget(60)
def test_an_interrupted_workflow_leaves_nothing(sweep: Sweep, running: DaemonProcess) -> None:
    (sweep.place / "Snakefile").write_text(WORKFLOW)
    program = sweep.start_command(COMMAND, TRIAL_S="300", PYTHONPATH=paths())
    sweep.wait_for_trials(4)
    program.send_signal(signal.SIGINT)
    program.wait(60)
    eventually(lambda: not running.leases("active") and not running.leases("queued"), 60, sweep.output)
    eventually(lambda: running.gpu_states().count("free") == 4, 60, running.story)
