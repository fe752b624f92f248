"""`python -m bench.hardware` on stand-ins for NVML and CUDA: it runs, marks contradictions and survives hangs.

These tests show that the steps measure; the results depend on a real driver.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.hardware import findings, lifecycle, run
from bench.hardware.checks import CHECKS, Check
from bench.hardware.findings import Report, Row, Verdict
from bench.hardware.machine import Machine
from bench.hardware.run import Survey
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import ComputeMode, GpuReading, Process
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.processes import lease_claims, procfs
from tests.client.stand_in_cuda import Card, Cuda, machine
from tests.gpu.subjects import Subject, SubjectFailed, SubjectHangs, choose, in_the_way, once
from tests.worker.build import until
from tests.worker.stand_in import EVERY, HANGS, NOT_SUPPORTED, POOR, THIRD, WHOLE, Driver

pytestmark = [pytest.mark.slow, pytest.mark.busy("compute")]

ROOT = Path(__file__).parents[2]
MIB = 1024**2
CARDS = tuple(Card(f"abcdef0000000000000000000000000{index}") for index in (1, 0, 2))
IDLE = (("count", EVERY, 3), ("idle", 0, 1))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Three GPUs of both libraries: the first in PCI order is prohibited, the others are idle."""
    place = tmp_path_factory.mktemp("driver")
    made = Driver(place)
    cuda = Cuda(place)
    for index in range(3):
        (place / f"nvidia{index}").touch()
    made.environment |= {
        "STAND_IN_CUDA": machine(*CARDS),
        "STAND_IN_CALLS": str(cuda.calls),
        "GPULEASE_DEVICE_FILES": str(place / "nvidia"),
    }
    return made


@pytest.fixture
def on_stand_ins(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Let programs that this test starts load the stand-ins."""
    driver.says(*IDLE)
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    return driver


def command(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.hardware", "--quick", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def table(text: str) -> list[list[str]]:
    """The rows of the first table, each with its cells."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.count("|") >= 7]


def verdicts(rows: Sequence[Sequence[str]], step: str) -> list[str]:
    return [row[4] for row in rows if row[0] == step]


@pytest.mark.timeout(200)
def test_one_command_prints_a_row_for_each_question_and_marks_what_contradicts(driver: Driver) -> None:
    driver.says(*IDLE)
    ran = command(driver.environment, "--only", "A,C,E,F,G,K")
    head, *rows = table(ran.stdout)
    assert head == list(findings.HEADER)
    assert {row[0] for row in rows} == set("ACEFGK"), ran.stderr
    assert all(len(row) == len(head) and row[1] and row[2] for row in rows)
    assert f"Left alone: {POOR.uuid}, its compute mode is prohibited." in ran.stdout
    assert f"Used: {WHOLE.uuid}." in ran.stdout

    # Nothing of torch can be asked with a torch that has no CUDA: the rows say so, and are no failure.
    torch = [row for row in rows if "torch" in row[2] and row[4] == "not run"]
    assert {row[0] for row in torch} == {"E", "K"}
    assert set(verdicts(rows, "F")) <= {"as expected", "noted", "not run"}
    assert "as expected" in verdicts(rows, "F"), "CUDA starts under the mask of a lease"

    # A stand-in lists no context. On a driver that did so, a GPU in use would be granted.
    (context,) = [row for row in rows if row[1] == "a context: does it show at once?"]
    assert context[4:] == ["**CONTRADICTS**", "yes: a GPU in use is never granted: core/gpu.py, core/draining.py"]
    assert ran.returncode == 1

    assert "| what | median us | p99 us | max us |" in ran.stdout
    assert "| `nvmlDeviceGetComputeRunningProcesses_v3` |" in ran.stdout
    assert "Who opens which device file:" in ran.stdout


def test_steps_that_cannot_run_are_no_failure_and_gpus_in_use_are_left_alone(driver: Driver) -> None:
    driver.says(("count", EVERY, 1))  # the only one is in use
    ran = command(driver.environment, "--only", "D,G,I,L,M", "--xid")
    _, *rows = table(ran.stdout)
    assert [row[0] for row in rows] == ["D", "G", "I", "L", "M"]
    assert {row[4] for row in rows} == {"not run"}
    assert f"Left alone: {WHOLE.uuid}, in use by" in ran.stdout
    assert "pid 4194305" in ran.stdout
    assert "Used: no GPU" in ran.stdout
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("fails", ["", "802"], ids=["CUDA starts all the same", "CUDA does not start"])
def test_a_gpu_whose_fabric_is_not_ready_is_used_where_cuda_starts(driver: Driver, fails: str) -> None:
    driver.says(*IDLE, ("fabric", 0, 2), ("fabric", 2, 2))
    ran = command({**driver.environment, "STAND_IN_FAILS": fails}, "--only", "F")
    _, *rows = table(ran.stdout)
    assert f"Used: {'no GPU' if fails else WHOLE.uuid}" in ran.stdout
    assert ("as expected" in verdicts(rows, "F")) is (not fails)
    assert ("its health is fabric_not_ready" in ran.stdout) is bool(fails)


@pytest.mark.timeout(200)
def test_tests_on_hardware_skip_what_needs_a_torch_with_cuda(driver: Driver) -> None:
    driver.says(*IDLE)
    words = ("-m", "pytest", "tests/gpu/test_training_on_hardware.py", "-q", "-rs", "-n", "0", "-p", "no:cacheprovider")
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=driver.environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (ran.returncode, "1 skipped" in ran.stdout) == (0, True), ran.stdout
    assert "has no CUDA" in ran.stdout


def test_without_a_driver_there_is_one_line_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")  # found before that of a host with a driver
    ran = command({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (ran.returncode, ran.stdout.count("\n")) == (2, 1)
    assert ran.stdout.startswith("Nothing to check: NVML does not answer")


def test_the_table_of_calls_goes_on_where_the_driver_tells_of_no_xids(driver: Driver) -> None:
    driver.says(*IDLE, ("nvmlEventSetCreate", EVERY, NOT_SUPPORTED))
    here = [sys.executable, "-m", "bench.probe", "--here"]
    ran = subprocess.run(here, cwd=ROOT, env=driver.environment, capture_output=True, text=True, timeout=60, check=True)
    assert "The driver tells of no Xids: it has no event sets." in ran.stdout
    assert "| what | median us | p99 us | max us |" in ran.stdout
    assert "wait for an Xid" not in ran.stdout


def test_a_step_that_hangs_costs_the_rows_it_owes_and_leaves_nothing_behind(on_stand_ins: Driver) -> None:
    check = next(check for check in CHECKS if check.letter == "C")
    reading = Reading(gpus=(WHOLE, THIRD), driver_version="580.95.05")
    on_stand_ins.says(*IDLE, ("nvmlDeviceGetTemperature", EVERY, HANGS))
    (row,) = run.take(check, Survey(reading, THIRD, {}), quick=True, left_s=15)
    assert isinstance(row, Row)
    assert (row.step, row.verdict) == ("C", Verdict.HUNG)
    assert "calls of NVML as the machine is" in row.asked
    assert not steps_of("C")


def test_a_step_that_breaks_says_so(on_stand_ins: Driver) -> None:
    unknown = Check("Z", "no such step", CHECKS[0].measure, 20)
    (row,) = run.take(unknown, Survey(Reading(gpus=(THIRD,)), None, {}), quick=True, left_s=60)
    assert isinstance(row, Row)
    assert row.verdict is Verdict.BROKE
    assert "StopIteration" in row.found


def test_when_the_time_is_over_the_rest_is_not_begun() -> None:
    (row,) = run.take(CHECKS[0], Survey(Reading(gpus=(THIRD,)), None, {}), quick=True, left_s=1)
    assert isinstance(row, Row)
    assert row.verdict is Verdict.NOT_RUN


def steps_of(letter: str) -> list[int]:
    """Processes of a step that this test has started."""
    ours = f"bench.hardware.step {letter}"
    return [pid for pid in process_tree.all_pids() if ours in (procfs.command_of(pid) or "")]


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        pytest.param(THIRD, None, id="it is unused"),
        pytest.param(GpuReading(uuid="G", node="n", index=0, processes=(Process(pid=7),)), "pid 7", id="in use"),
        pytest.param(GpuReading(uuid="G", node="n", index=0, health="mig"), "health is mig", id="not sound"),
        pytest.param(
            GpuReading(uuid="G", node="n", index=0, memory_used_bytes=2048 * MIB), "2048 MiB", id="used by the unlisted"
        ),
        pytest.param(
            GpuReading(uuid="G", node="n", index=0, memory_used_bytes=MIB, hidden_use=True), "1 MiB", id="hidden use"
        ),
        pytest.param(
            GpuReading(uuid="G", node="n", index=0, compute_mode=ComputeMode.PROHIBITED), "prohibited", id="prohibited"
        ),
    ],
)
def test_only_an_unused_gpu_is_used(gpu: GpuReading, why: str | None) -> None:
    found = in_the_way(gpu)
    assert (found is None) == (why is None)
    assert why is None or why in (found or "")
    assert choose(Reading(gpus=(gpu,)))[0] == (gpu if why is None else None)


def test_what_differs_is_grave_only_where_gpulease_relies_on_it(tmp_path: Path) -> None:
    report = Report("T", tmp_path / "rows")
    report.judge("one?", "yes", "yes", holds=True, relies="a.py")
    report.judge("two?", "no", "yes", holds=False)
    report.judge("three | four?", "no", "yes", holds=False, relies="b.py")
    with report.asking("five?"):
        raise SubjectHangs("it hangs")
    with report.asking("six?"):
        raise SubjectFailed("it cannot")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"row": {"st')  # it was killed while it wrote
    rows, asking = findings.read(tmp_path / "rows")
    assert asking == "six?"
    assert [row.verdict for row in rows if isinstance(row, Row)] == [
        Verdict.AS_EXPECTED,
        Verdict.DIFFERS,
        Verdict.CONTRADICTS,
        Verdict.HUNG,
        Verdict.NOT_RUN,
    ]
    assert isinstance(rows[2], Row)
    assert findings.shown(rows[2]) == "| T | three \\| four? | no | yes | **CONTRADICTS** | yes: b.py |"


@pytest.mark.parametrize(("daemon_costs", "verdict"), [(0.0, Verdict.AS_EXPECTED), (0.05, Verdict.DIFFERS)])
def test_a_gpu_that_slows_down_as_it_warms_does_not_count_against_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon_costs: float, verdict: Verdict
) -> None:
    measured: list[str] = []

    class Warms:
        """A subject whose steps take longer and longer, up to a tenth, as a GPU's do until it is warm."""

        pid = 0

        def __init__(self, mask: str, lease: str = "") -> None:
            self.lease = lease

        def do(self, *_: object, within_s: float) -> dict[str, float]:
            measured.append(self.lease)
            took_ms = (1.2 - 0.2 * 0.5 ** len(measured)) * (1 + daemon_costs * bool(self.lease))
            return {"median": took_ms, "p99": took_ms, "max": took_ms, "steps": 1}

    monkeypatch.setattr(lifecycle, "Subject", lambda **words: nullcontext(Warms(**words)))
    monkeypatch.setattr(lifecycle, "serving", lambda *_: nullcontext())
    monkeypatch.setattr(lifecycle, "leased", lambda *_: nullcontext({"id": "lease-x"}))
    monkeypatch.setattr(lifecycle, "release", lambda *_: None)
    monkeypatch.setattr(Machine, "taken", lambda _: None)
    report = Report("K", tmp_path / "rows")
    lifecycle.steps(Machine(report=report, reading=Reading(), gpu=THIRD, torch=None, quick=False, place=tmp_path))
    rows = [row for row in findings.read(tmp_path / "rows")[0] if isinstance(row, Row)]
    assert [row.verdict for row in rows] == [verdict, verdict], [row.found for row in rows]


def test_a_subject_takes_steps_and_what_it_forks_ends_with_it(on_stand_ins: Driver) -> None:
    with Subject(mask=CARDS[1].uuid, lease="lease-x") as subject:
        assert subject.do("devices") is None
        assert subject.do("context") == "context"
        assert subject.do("devices") == [CARDS[1].uuid]
        assert lease_claims.claim_of(subject.pid, {"lease-x": os.getuid()}) == "lease-x"
        child = ProcessId.of(subject.do("fork"))
        assert child is not None
        with pytest.raises(SubjectFailed, match="cuMemAlloc_v2"):
            subject.do("memory", MIB)
        with pytest.raises(SubjectHangs, match="torch_steps did not come back"):
            subject.do("torch_steps", 1, within_s=0)
        subject.kill()
        assert child.alive(), "a forked worker outlives its rank"
    until(lambda: not child.alive(), "the forked child ends with the block")
    with pytest.raises(SubjectFailed, match="cuInit answers with error 100"):
        once("init", mask="", within_s=60)
