"""The frame of the table: it refuses to measure beside other programs, and says what a figure is compared with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import jobs
from bench.__main__ import parser
from bench.clients import Load, http_answer, measured
from bench.peers import NotInstalled
from bench.peers.empty_endpoint import empty_endpoint
from bench.peers.etcd import etcd
from bench.table.load import ForeignLoad, Usage, wait_for_quiet
from bench.table.questions import QUESTIONS, question
from bench.table.rows import Row, Target, markdown

ROOT = Path(__file__).parents[2]
README = (ROOT / "bench" / "README.md").read_text()
BURN = "import time\nwhile time.process_time() < {seconds}: pass"


@contextmanager
def busy_program() -> Iterator[None]:
    """Another program that computes until the close."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_no_table_is_printed_beside_another_busy_program() -> None:
    with busy_program():
        ran = run_bench("--only", "nodes", "--quick", "--patience-s", "0")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.search(r"Other programs use \d\.\d of \d+ cores.*--beside-load", ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_table_that_was_measured_beside_load_says_so() -> None:
    ran = run_bench("--only", "decisions", "--quick", "--beside-load")
    assert ran.returncode == 0, ran.stderr
    heading, table, load = ran.stdout.split("\n\n")
    assert re.search(r"\d+ cores.*Linux.*Python.*commit.*Other programs used \d", heading)
    assert "--beside-load" in heading
    assert re.search(r"other programs used \d", load)
    first, *_ = table.splitlines()[2:]
    assert re.search(r"\| one decision, 1,000 GPUs.* x \|.*\| (met|\*\*missed\*\*) \|$", first)


class Machine:
    """A machine on which other programs use some cores for some seconds."""

    def __init__(self, cores: float, until_s: float) -> None:
        self.cores, self.until_s, self.at_s = cores, until_s, 0.0

    def usage(self) -> Usage:
        return Usage(self.at_s, 1000 + self.cores * min(self.at_s, self.until_s) + 3 * self.at_s, 3 * self.at_s)

    def pause(self, seconds: float) -> None:
        self.at_s += seconds


def test_what_the_measurement_uses_itself_is_no_foreign_load() -> None:
    machine = Machine(cores=0.25, until_s=1000)
    assert wait_for_quiet(60, machine.usage, machine.pause) == pytest.approx(0.25)


def test_a_question_waits_until_other_programs_have_ended() -> None:
    machine = Machine(cores=1.5, until_s=20)
    assert wait_for_quiet(60, machine.usage, machine.pause) <= 0.5
    assert machine.at_s >= 20


def test_a_question_does_not_wait_forever() -> None:
    machine = Machine(cores=1.5, until_s=1000)
    with pytest.raises(ForeignLoad, match=r"Other programs use 1\.5 of"):
        wait_for_quiet(60, machine.usage, machine.pause)
    assert machine.at_s <= 70


def test_the_time_of_descendants_is_our_own_also_when_they_have_ended() -> None:
    before = Usage.now()
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    assert Usage.now().own_s - before.own_s >= 0.25


def test_the_time_of_a_process_that_detached_itself_is_our_own() -> None:
    burns = BURN.format(seconds=0.3)
    detached = f"import os\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        exec({burns!r})\n"
    program = (
        "import subprocess, sys, time\n"
        "from bench.table.load import Usage, become_subreaper\n"
        "from bench.table.run import await_end\n"
        "become_subreaper()\n"
        "before, here_s, found_s, until_s = Usage.now(), time.process_time(), 0.0, time.monotonic() + 30\n"
        f"await_end(subprocess.Popen([sys.executable, '-c', {detached!r}]))\n"
        "while found_s < 0.25 and time.monotonic() < until_s:\n"
        "    found_s = Usage.now().own_s - before.own_s - (time.process_time() - here_s)\n"
        "sys.exit(found_s < 0.25)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_a_row_says_whether_its_target_is_met() -> None:
    rows = [
        Row(question="a", target=Target(bound=1, at_least=True), figure=0.914, formerly="0.11 x", beside="5,800/s"),
        Row(question="b", target=Target(bound=10), figure=9.5, unit="ms"),
        Row(question="c", target=Target(bound=40, at_least=True), figure=40, unit="/s"),
        Row(question="d", target=Target(bound=2), beside="not installed: apt-get install some"),
        Row(question="e", figure=12_345.6, unit="/s"),
    ]
    assert markdown(rows).splitlines()[2:] == [
        "| a | 0.11 x | 1 x or more | 0.91 x | 5,800/s | **missed** |",
        "| b |  | under 10 ms | 9.5 ms |  | met |",
        "| c |  | 40/s or more | 40/s |  | met |",
        "| d |  | under 2 x | not measured | not installed: apt-get install some |  |",
        "| e |  |  | 12,346/s |  |  |",
    ]


def test_a_peer_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotInstalled, match="apt-get install etcd-server"), etcd(tmp_path):
        pass


def test_jobs_are_measured_without_a_peer_that_is_missing() -> None:
    why = "not installed: apt-get install slurm-wlm"
    found = {"gpulease": [9.0, 11.0, 10.0], "GNU parallel": [200.0]}
    rows = {row.question: row for row in jobs.rates(100, found, {"tuned Slurm": why}, [(0.1, 0.2, 0.3)])}
    assert (rows["100 jobs of no work through 8 GPUs, as an array"].figure) == 10
    slurm = rows["100 jobs of no work through 8 GPUs, as an array: of tuned Slurm"]
    assert (slurm.figure, slurm.verdict, slurm.beside) == (None, "", why)
    assert rows["100 jobs of no work through 8 GPUs, as an array: of GNU parallel"].figure == 0.05


def test_clients_measure_an_endpoint_and_what_they_use_themselves(tmp_path: Path) -> None:
    lease = {"id": "one", "token": 7, "state": "active"}
    with empty_endpoint(json.dumps(lease).encode(), tmp_path) as (port, _):
        found = measured(Load(pattern="leases", port=port, clients=4, seconds=0.5))
    assert set(found.p50_s) == {"acquire", "release"}
    assert found.requests > found.rate * 0.5 > 10
    assert 0 < found.p50_s["acquire"] <= found.p99_s["acquire"] < 5
    assert 0 < found.cores < 2


def test_an_answer_is_cut_at_its_length() -> None:
    answer = b'HTTP/1.1 201 Created\r\nContent-Length: 4\r\nX-Other: 1\r\n\r\n{"a"'
    assert http_answer(answer) == b'{"a"'
    for length in range(len(answer)):
        assert http_answer(answer[:length]) is None


def test_an_error_of_the_server_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="403 Forbidden"):
        http_answer(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_there_and_explained(name: str) -> None:
    assert callable(question(name))
    assert f"| `{name}` |" in README


def test_every_option_is_explained() -> None:
    options = [word for line in parser().format_help().splitlines() for word in re.findall(r"^  (--[a-z-]+)", line)]
    assert len(options) > 3
    assert [option for option in options if f"`{option}" not in README and option not in README] == []
