"""The whole worker, in a process of its own, against a small real HTTP server that plays the daemon."""

from __future__ import annotations

import json
import os
import resource
import signal
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol import codec
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, realm
from gpulease_protocol.model import ComputeMode, LeaseState
from gpulease_protocol.node_protocol import (
    PAUSED,
    DesiredState,
    JobElsewhere,
    JobOrder,
    LeaseOwner,
    NodeLease,
    NodeReport,
    OwnerReport,
    OwnerState,
    RunState,
)
from gpulease_worker.jobs import cgroup, job_records
from gpulease_worker.probe.simulation import idle_gpus
from tests.worker.build import kill, lease, living, number_in, order, python, spec, under, until
from tests.worker.stand_in import EVERY, HANGS, LINKS, NOT_SUPPORTED, POOR, THIRD, WHOLE, Driver

GPU = idle_gpus(2, "n")[0].uuid
RUN = (
    "import sys; from pathlib import Path; from gpulease_worker.main import run; "
    "from gpulease_worker.settings import WorkerSettings as W; "
    "sys.exit(run(W(url=sys.argv[1], node='n', data_dir=Path(sys.argv[2]), simulate='2', "
    "with_parent=sys.argv[3] == 'with', poll_s=float(sys.argv[4]))))"
)

ON_NVML = RUN.replace("simulate='2', ", "").replace("))))", "), processes_s=3600)))")
"""The same on NVML, with process lists only when they are asked for."""


def patient(code: str) -> str:
    """The same, with time for a reading that a busy machine delays."""
    return code.replace("poll_s=", "probe_deadline_s=20, poll_s=")


class Daemon:
    """What a daemon would keep: the last report, and what it wants. Answers after the report's hold, or on news."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.desired = DesiredState(ticket=0)
        self.reports: list[tuple[float, NodeReport]] = []
        self.paths: set[str] = set()
        self.status = 200
        self.news = 0
        self.running = True

    def want(self, leases: Sequence[NodeLease] = (), jobs: Sequence[JobOrder] = ()) -> None:
        """Say what should be true from now on."""
        self._change(leases=tuple(leases), jobs=tuple(jobs))

    def watch(self, *owners: LeaseOwner) -> None:
        """Say which processes own leases."""
        self._change(owners=owners)

    def pause(self, paused: bool) -> None:
        """Have NVML closed, or opened again."""
        self._change(paused=paused)

    def _change(self, **what: Any) -> None:
        with self.turn:
            self.desired = replace(self.desired, **what)
            self.news += 1
            self.turn.notify_all()

    def exchange(self, path: str, report: NodeReport) -> tuple[int, dict[str, Any]]:
        with self.turn:
            self.paths.add(path)
            self.reports.append((time.monotonic(), report))
            self.turn.notify_all()
            news = self.news
            asked = self.turn.wait_for(lambda: self.news != news or not self.running, report.hold_s)
            self.desired = replace(self.desired, ticket=self.desired.ticket + 1, complete=asked)
            return self.status, codec.to_json(self.desired)

    def report(self, condition: Callable[[NodeReport], bool], what: str, deadline_s: float = 60.0) -> NodeReport:
        """The last report if it fulfils a condition, else the first to come that does, however many have come since."""
        with self.turn:
            seen = max(0, len(self.reports) - 1)

            def found() -> NodeReport | None:
                nonlocal seen
                new = [report for _, report in self.reports[seen:]]
                seen = len(self.reports)
                return next(filter(condition, new), None)

            report = self.turn.wait_for(found, deadline_s)
            assert report is not None, f"not within {deadline_s} s: {what}; last: {self.reports[-1:]}"
            return report

    def job(self, state: RunState) -> NodeReport:
        return self.report(lambda report: [job.state for job in report.jobs] == [state], f"the job is {state}")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    daemon_: Daemon


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    daemon_: Daemon


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.daemon_.exchange(self.path, codec.from_json(NodeReport, body))  # type: ignore[attr-defined]
        payload = json.dumps(answer).encode()
        with suppress(ConnectionError):  # the worker has cancelled it for news of its own
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    def log_message(self, format: str, *words: object) -> None:
        pass


def serving(server: Server | UnixServer, daemon: Daemon) -> Iterator[Daemon]:
    server.daemon_ = daemon
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield daemon
    finally:
        with daemon.turn:
            daemon.running = False
            daemon.turn.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()


class Host:
    """Starts workers on one data directory and ends them."""

    def __init__(self, data_dir: Path, url: str) -> None:
        self.data_dir = data_dir
        self.url = url
        self.started: list[subprocess.Popen[bytes]] = []

    def worker(self, *, poll_s: float = 1.0, code: str = RUN, **members: Any) -> subprocess.Popen[bytes]:
        command = python("-c", code, self.url, str(self.data_dir), "without", str(poll_s))
        self.started.append(subprocess.Popen(command, **members))
        return self.started[-1]

    def close(self) -> None:
        for worker in self.started:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()


@pytest.fixture
def tcp() -> Iterator[tuple[Daemon, str]]:
    server = Server(("127.0.0.1", 0), Answer)
    for daemon in serving(server, Daemon()):
        yield daemon, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def daemon(tcp: tuple[Daemon, str]) -> Daemon:
    return tcp[0]


@pytest.fixture
def host(tmp_path: Path, tcp: tuple[Daemon, str]) -> Iterator[Host]:
    found = Host(tmp_path / "data", tcp[1])
    yield found
    found.close()


def test_a_report_names_the_last_answer_before_the_reading(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=0.05, code=patient(RUN))
    report = daemon.report(lambda report: len(report.gpus) == 2 and (report.ticket or 0) > 3, "readings")
    assert report.simulated
    assert report.problem is None
    assert report.hold_s == 0.05
    assert daemon.paths == {"/v1/nodes/n/exchange"}
    with daemon.turn:
        tickets = [report.ticket for _, report in daemon.reports]
    assert tickets == [None, *range(1, len(tickets))]


def test_a_partial_reading_names_the_answer_before_its_oldest_part(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    library = Driver(tmp_path)
    host.worker(poll_s=0.05, code=patient(ON_NVML), env={**os.environ, **library.environment})
    first = daemon.report(lambda report: report.gpus == (POOR, WHOLE) and (report.seen or 0) > 3, "readings")
    assert first.links == LINKS
    assert first.ticket is None, "processes were read when there was no answer yet, and not since"
    library.says(("gone", 0, 1), ("nvmlDeviceGetPowerUsage", 0, NOT_SUPPORTED))
    between = daemon.report(lambda report: report.gpus[1].power_w is None, "power is read every time")
    assert between.gpus[1].processes, "and processes are repeated"
    assert between.ticket is None
    daemon.want([lease("asked", GPU)])
    whole = daemon.report(lambda report: not report.gpus[1].processes, "the daemon asked for a whole one")
    assert (whole.ticket or 0) > (between.seen or 0), "begun after it was asked for"
    later = daemon.report(lambda report: (report.seen or 0) > (whole.seen or 0) + 3, "the daemon no longer asks")
    with daemon.turn:
        reports = [report for _, report in daemon.reports if report.gpus]
        whole_tickets = {report.ticket for report in reports if not report.gpus[1].processes}
    assert later.ticket in whole_tickets
    assert (later.seen or 0) > (later.ticket or 0)


@pytest.mark.slow
def test_the_end_of_a_probe_is_reported_at_once(daemon: Daemon, host: Host) -> None:
    worker = host.worker(poll_s=12)
    daemon.report(lambda report: len(report.gpus) == 2, "a reading")
    (probe,) = process_tree.descendants(worker.pid)
    begun = time.monotonic()
    kill(probe.pid)
    daemon.report(lambda report: report.problem is not None, "the probe is gone")
    assert time.monotonic() - begun < 11, "before the 12 s for which the request was held"
    daemon.want()
    daemon.report(lambda report: report.problem is None, "another took its place")


@pytest.mark.alone
def test_a_hung_driver_is_reported_within_three_seconds_by_default(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    library = Driver(tmp_path)
    code = ON_NVML.replace(", processes_s=3600", "")
    worker = host.worker(code=code, env={**os.environ, **library.environment})
    daemon.report(lambda report: len(report.gpus) == 2 and (report.seen or 0) > 1, "readings")
    (probe,) = probes_of(worker)
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 5 and len(took_s) < 3):  # the machine may keep the worker from running
        library.says()
        daemon.report(lambda report: report.problem is None, "it answers")
        begun = time.monotonic()
        library.says(("nvmlDeviceGetPowerUsage", 0, HANGS))
        problem = daemon.report(lambda report: report.problem is not None, "the driver hangs").problem
        took_s.append(time.monotonic() - begun)
    assert took_s[-1] < 5, "1 s until it is read, 2 s for the reading, and what a busy machine takes"
    assert problem is not None
    assert problem.startswith("nvmlDeviceGetPowerUsage did not answer within 2 s; the driver is busy or hangs")
    late = daemon.reports[-1][1].seen or 0
    daemon.report(lambda report: (report.seen or 0) > late and report.problem is not None, "it goes on reporting")
    library.says()
    report = daemon.report(lambda report: report.gpus == (POOR, WHOLE), "it answers again")
    assert (report.read_s or 0) > 2
    assert probes_of(worker) == [probe], "another would have stood behind the same driver"


def test_a_late_reading_is_reported_when_it_arrives(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    library = Driver(tmp_path)
    host.worker(poll_s=12, code=ON_NVML, env={**os.environ, **library.environment})
    daemon.report(lambda report: len(report.gpus) == 2, "readings")
    library.says(("nvmlDeviceGetPowerUsage", 0, HANGS))
    daemon.want([lease("asked", GPU)])
    daemon.report(lambda report: report.problem is not None, "the driver hangs")
    begun = time.monotonic()
    library.says()
    daemon.report(lambda report: report.gpus == (POOR, WHOLE), "it answers again")
    assert time.monotonic() - begun < 11, "and not at the next turn"


def test_a_slow_change_of_compute_mode_delays_nothing_else(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3), ("nvmlDeviceSetComputeMode", EVERY, HANGS))
    code = RUN.replace("simulate='2', ", "manage_compute_mode=True, ")
    worker = host.worker(code=code, env={**os.environ, **library.environment})
    whole = daemon.report(lambda report: len(report.gpus) == 3, "readings")
    assert {gpu.uuid: gpu.compute_mode for gpu in whole.gpus}[THIRD.uuid] is ComputeMode.DEFAULT
    (probe,) = probes_of(worker)
    daemon.want([lease("mine", THIRD.uuid)])
    begun = time.monotonic()
    busy = "nvmlDeviceSetComputeMode did not answer within 2 s"
    daemon.report(lambda report: busy in (report.problem or ""), "the driver is busy")
    assert time.monotonic() - begun < 30
    daemon.want([lease("mine", THIRD.uuid)], [order("job-1", spec("true"))])
    daemon.job(RunState.EXITED)
    library.says(("count", EVERY, 3))
    daemon.report(
        lambda report: [gpu.compute_mode for gpu in report.gpus[2:]] == [ComputeMode.EXCLUSIVE_PROCESS],
        "the driver answers again, and has set it",
    )
    assert probes_of(worker) == [probe], "no answer was taken for that to another question"


@pytest.mark.slow
def test_while_a_gpu_drains_only_that_gpu_is_read_again(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    """Process lists are expensive, and those of the other seven GPUs say nothing about this one."""
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    host.worker(poll_s=20, code=patient(ON_NVML), env={**os.environ, **library.environment})
    daemon.report(lambda report: len(report.gpus) == 3, "readings")
    daemon.want([lease("ended", THIRD.uuid, state=LeaseState.ENDED)])
    whole = daemon.report(lambda report: (report.ticket or 0) > 0, "the daemon asked for a whole one")
    assert (whole.reread, whole.reading_ticket) == ((), whole.ticket)
    library.says(("count", EVERY, 3), ("gone", 0, 1))
    parts = daemon.report(
        lambda report: report.reading_ticket != report.ticket, "and then only for the one that drains"
    )
    assert parts.reread == (THIRD.uuid,)
    assert parts.ticket == whole.ticket, "the others are as old as they were"
    assert parts.gpus[1].processes, "their processes are repeated"
    daemon.report(lambda report: (report.reading_ticket or 0) > (parts.reading_ticket or 0) + 1, "again and again")


@pytest.fixture
def waits_for_scans(tmp_path: Path) -> dict[str, str]:
    """Variables under which the first reading waits for the scan of open files, however busy this machine is."""
    code = "from gpulease_worker.probe import open_file_scanner; open_file_scanner.SHORT_WAIT_S = 60.0"
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "start")}


def test_a_gpu_is_reported_alone_as_soon_as_its_lease_has_ended(
    daemon: Daemon, host: Host, tmp_path: Path, waits_for_scans: dict[str, str]
) -> None:
    library = Driver(tmp_path)
    library.says(("count", EVERY, 3))
    daemon.desired = replace(daemon.desired, takes_partial=True)
    host.worker(code=patient(ON_NVML), env=waits_for_scans | library.environment)
    before = daemon.report(lambda report: len(report.gpus) == 3, "readings")
    daemon.want([lease("ended", THIRD.uuid, state=LeaseState.ENDED)])
    whole = daemon.report(lambda report: (report.ticket or 0) > (before.ticket or 0), "a whole one")
    with daemon.turn:
        (partial,) = [report for _, report in daemon.reports if report.partial]
    (shown,) = partial.gpus
    assert replace(shown, unreadable_processes=None, unreadable_process=None) == replace(THIRD, opened_by=())
    assert partial.reread == (THIRD.uuid,)
    assert (partial.ticket, partial.reading_ticket, partial.seen) == (None, whole.ticket, whole.ticket)
    assert len(whole.gpus) == 3, "it follows at once, and was begun before the answer to the partial one"
    assert (whole.seen or 0) > (whole.ticket or 0)


def test_a_daemon_that_takes_no_partial_reports_gets_none(
    daemon: Daemon, host: Host, waits_for_scans: dict[str, str]
) -> None:
    host.worker(code=patient(RUN), env=waits_for_scans)
    before = daemon.report(lambda report: len(report.gpus) == 2, "a reading")
    daemon.want([lease("ended", GPU, state=LeaseState.ENDED)])
    daemon.report(lambda report: (report.ticket or 0) > (before.ticket or 0) + 1, "it drains, and is read again")
    with daemon.turn:
        assert all(len(report.gpus) == 2 for _, report in daemon.reports if report.problem is None)


def test_a_worker_reports_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for daemon in serving(UnixServer(str(path), Answer), Daemon()):
        host = Host(tmp_path / "data", f"unix://{path}")
        try:
            host.worker()
            daemon.report(lambda report: len(report.gpus) == 2, "a reading")
        finally:
            host.close()


def test_processes_of_a_lease_are_reported_at_once_when_the_daemon_asks(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=60)
    daemon.report(lambda report: True, "a first report")
    mine = f"lease-{os.urandom(4).hex()}"
    with under(mine) as process:
        try:
            daemon.want([lease(mine, GPU)])
            report = daemon.report(lambda report: any(gpu.processes for gpu in report.gpus), "the process", 30)
        finally:
            process.kill()
    assert [(seen.pid, seen.lease_id) for seen in report.gpus[0].processes] == [(process.pid, mine)]


def test_readings_are_frequent_while_a_lease_drains(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=20)
    daemon.report(lambda report: True, "a first report")
    daemon.want([lease("ended", GPU, state=LeaseState.ENDED)])
    daemon.report(lambda _: any(report.hold_s == 0.02 for _, report in daemon.reports), "the first pause is short")
    daemon.report(lambda report: report.hold_s == 1.0, "the later ones are longer")
    daemon.want()
    daemon.report(lambda report: report.hold_s == 20, "back to the ordinary pause")


def test_the_end_of_a_job_replaces_a_request_in_flight(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    host.worker(poll_s=40)
    daemon.report(lambda report: True, "a first report")
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done; exit 4"))
    daemon.want([lease(job.lease_id, GPU)], [job])
    daemon.job(RunState.RUNNING)
    begun = time.monotonic()
    go.touch()
    report = daemon.job(RunState.EXITED)
    assert time.monotonic() - begun < 30, "long before the 40 s for which the request was held"
    assert report.jobs[0].exit_code == 4
    assert report.jobs[0].log_directory == str(host.data_dir / "jobs" / "j" / "logs")
    daemon.want()
    daemon.report(lambda report: not report.jobs, "forgotten")


def test_news_of_a_job_comes_with_the_last_reading_and_puts_no_reading_off(
    daemon: Daemon, host: Host, tmp_path: Path
) -> None:
    daemon.desired = replace(daemon.desired, takes_partial=True)
    host.worker(poll_s=40)
    while len(daemon.report(lambda _: bool(daemon.reports), "a report").gpus) < 2:  # the probe is starting
        seen = len(daemon.reports)
        daemon.want()
        daemon.report(lambda _, seen=seen: len(daemon.reports) > seen, "an answer is followed by a report")
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done; exit 4"))
    daemon.want([lease(job.lease_id, GPU)], [job])
    running = daemon.job(RunState.RUNNING)
    go.touch()
    exited = daemon.job(RunState.EXITED)
    (read,) = {report.read_s for _, report in daemon.reports if report.jobs}
    assert exited.repeated
    assert (exited.read_s, exited.ticket, exited.gpus) == (read, running.ticket, running.gpus)
    assert exited.hold_s < running.hold_s <= 40, "the next reading is due when it was due before"
    daemon.want()
    daemon.report(lambda report: not report.jobs and not report.repeated, "an answer is followed by a reading")


def test_a_job_outlives_its_worker_and_the_next_finds_it(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = order("j", spec("sh", "-c", f"echo $$ >> {note}; sleep 60; exit 1"))
    first = host.worker()
    daemon.want([lease(job.lease_id, GPU)], [job])
    before = daemon.job(RunState.RUNNING)
    until(lambda: number_in(note), "it is up")
    kill(first.pid)
    first.wait()
    pid = number_in(note)
    assert ProcessId.of(pid) is not None
    second = host.worker()
    daemon.report(lambda report: report.worker_id != before.worker_id and report.jobs == before.jobs, "found again")
    after = daemon.report(lambda report: report.ticket is not None and bool(report.gpus), "a reading")
    assert pid in {process.pid for process in after.gpus[0].processes}
    second.terminate()
    assert second.wait(60) == 0, "SIGTERM ends a worker"
    assert ProcessId.of(pid) is not None, "and leaves its jobs alone"
    host.worker()
    daemon.want([lease(job.lease_id, GPU)], [replace(job, stop=True, grace_s=5)])
    report = daemon.job(RunState.EXITED)
    assert report.jobs[0].exit_code == 143
    assert len(note.read_text().splitlines()) == 1
    assert not living(job.lease_id)


def test_a_worker_names_the_jobs_that_run_under_another_data_directory_until_it_is_answered(
    daemon: Daemon, host: Host, tmp_path: Path
) -> None:
    job = order("j", spec("sleep", "60"))
    first = host.worker()
    daemon.want([lease(job.lease_id, GPU)], [job])
    before = daemon.job(RunState.RUNNING)
    assert before.jobs_elsewhere == ()
    kill(first.pid)
    first.wait()
    daemon.status = 403
    moved = Host(tmp_path / "moved", host.url)
    try:
        moved.worker(poll_s=0.1)
        elsewhere = JobElsewhere(job_id="j", attempt=1, data_dir=str(host.data_dir))
        daemon.report(lambda report: elsewhere in report.jobs_elsewhere, "it names the job")
        daemon.want()
        daemon.status = 200
        daemon.report(lambda report: report.worker_id != before.worker_id and bool(report.gpus), "it is answered")
        assert daemon.reports[-1][1].jobs_elsewhere == ()
    finally:
        moved.close()
    assert living(job.lease_id)
    host.worker()
    daemon.want([lease(job.lease_id, GPU)], [replace(job, stop=True, grace_s=5)])
    daemon.job(RunState.EXITED)


def test_jobs_continue_while_the_daemon_refuses_reports(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=0.1)
    job = order("j", spec("sh", "-c", "exit 2"))
    daemon.want([lease(job.lease_id, GPU)], [job])
    daemon.report(lambda report: bool(report.jobs), "ordered")
    with daemon.turn:
        daemon.status = 503
    until((host.data_dir / "jobs" / "j" / job_records.EXIT).exists, "it has ended")
    with daemon.turn:
        daemon.status = 200
    assert daemon.job(RunState.EXITED).jobs[0].exit_code == 2


def test_an_order_that_the_worker_cannot_read_costs_no_other(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=0.1)
    newer: Any = codec.to_json(order("newer", spec("true"))) | {"spec": {"steps": []}}
    daemon.want([lease("mine", GPU)], [newer, order("known", spec("true"))])

    def both_ended(report: NodeReport) -> bool:
        return {job.job_id: job.state for job in report.jobs} == dict.fromkeys(("newer", "known"), RunState.EXITED)

    ended = {job.job_id: job for job in daemon.report(both_ended, "both have ended").jobs}
    assert ended["known"].exit_code == 0
    assert "upgrade gpulease on this node" in (ended["newer"].reason or "")


def test_a_daemon_that_starts_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s"
    host = Host(tmp_path / "data", f"unix://{path}")
    try:
        worker = host.worker(stderr=subprocess.PIPE)
        assert worker.stderr is not None
        assert any(b"cannot report to the daemon at unix://" in line for line in worker.stderr)
        for daemon in serving(UnixServer(str(path), Answer), Daemon()):
            daemon.report(lambda report: len(report.gpus) == 2, "a reading")
            host.close()
    finally:
        host.close()


def test_a_worker_says_at_its_start_that_it_cannot_limit_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cgroup.SWITCH, "off")
    host = Host(tmp_path / "data", f"unix://{tmp_path / 's'}")
    try:
        worker = host.worker(stderr=subprocess.PIPE)
        assert worker.stderr is not None
        assert b"pids.max of 32768 is not set for jobs: this worker cannot have cgroups" in worker.stderr.readline()
    finally:
        host.close()


def test_a_second_worker_waits_for_the_first_to_end(daemon: Daemon, host: Host) -> None:
    first = host.worker(poll_s=0.05)
    known = daemon.report(lambda report: True, "the first reports").worker_id
    second = host.worker(poll_s=0.05)
    until(lambda: ProcessId.of(second.pid), "it has begun")
    first.terminate()
    daemon.report(lambda report: report.worker_id != known, "the second reports")
    assert second.poll() is None


@pytest.mark.slow
def test_a_second_worker_on_one_data_directory_is_refused(daemon: Daemon, host: Host) -> None:
    host.worker()
    daemon.report(lambda report: True, "the first reports")
    second = host.worker(stderr=subprocess.PIPE)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert said.decode() == (
        f"gpulease worker: Another worker uses {host.data_dir}."
        " Stop it; for another daemon, give this one its own --data-dir.\n"
    )


def test_a_worker_that_inherits_sigchld_as_ignored_does_not_ignore_it(daemon: Daemon, host: Host) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        worker = host.worker()
    finally:
        signal.signal(signal.SIGCHLD, before)
    daemon.report(lambda report: True, "it reports")
    status = Path(f"/proc/{worker.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert not ignored & 1 << (signal.SIGCHLD - 1)


def test_a_worker_ends_with_its_parent_and_its_probe_with_it(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys; w = subprocess.Popen(sys.argv[2:]); "
        "open(sys.argv[1], 'w').write(f'{w.pid}\\n'); w.wait()"
    )
    command = python("-c", RUN, host.url, str(host.data_dir), "with", "1.0")
    with subprocess.Popen(python("-c", script, str(note), *command)) as parent:
        pid = until(lambda: number_in(note), "the worker has begun")
        daemon.report(lambda report: len(report.gpus) == 2, "a reading")
        worker = ProcessId.of(pid)
        below = process_tree.descendants(pid)
        assert worker is not None
        assert below, "the probe"
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not worker.alive() and not any(one.alive() for one in below), "both have ended")


def probes_of(worker: subprocess.Popen[bytes]) -> list[int]:
    """The probe processes that a worker has now."""
    found = []
    for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
            if b"gpulease_worker.probe.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def test_a_paused_node_has_no_probe_until_it_is_resumed(daemon: Daemon, host: Host) -> None:
    worker = host.worker(poll_s=0.2)
    daemon.report(lambda report: len(report.gpus) == 2, "the GPUs are read")
    (probe,) = probes_of(worker)
    daemon.pause(True)
    report = daemon.report(lambda report: report.problem == PAUSED, "the worker says that it is paused")
    assert not report.gpus
    assert not probes_of(worker), "NVML would still be open"
    assert not Path(f"/proc/{probe}").exists()
    daemon.pause(False)
    daemon.report(lambda report: len(report.gpus) == 2, "the GPUs are read again")
    assert probes_of(worker) != [probe]


def test_a_worker_that_starts_on_a_paused_node_does_not_open_nvml(daemon: Daemon, host: Host) -> None:
    daemon.pause(True)
    worker = host.worker(poll_s=0.2)
    daemon.report(lambda report: report.problem == PAUSED, "the worker says that it is paused")
    assert not probes_of(worker)
    assert not [report for _, report in daemon.reports if report.gpus], "it read before it was told"


def test_the_end_of_an_owner_is_reported_at_once_and_by_the_next_worker(daemon: Daemon, host: Host) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = ProcessId.of(child.pid)
        assert identity is not None
        owner = LeaseOwner(pid=child.pid, start_ticks=identity.start_ticks)
        first = host.worker(poll_s=60)
        former = daemon.report(lambda report: True, "its first report").worker_id
        daemon.watch(owner)
        seen = daemon.report(lambda report: bool(report.owners), "the owner")
        assert seen.realm == realm()
        assert [(one.owner, one.state) for one in seen.owners] == [(owner, OwnerState.ALIVE)]
        child.kill()
        child.wait()
        gone = [OwnerReport(owner=owner, state=OwnerState.GONE)]
        daemon.report(lambda report: list(report.owners) == gone, "its end, long before the poll ends", 30)
        kill(first.pid)
        first.wait()
        host.worker(poll_s=20)
        daemon.report(lambda report: report.worker_id != former, "the first report of the next worker")
        daemon.watch(owner)
        daemon.report(lambda report: list(report.owners) == gone, "its end, by the next worker")
        daemon.watch()
        daemon.report(lambda report: not report.owners, "no word of it any more")


def test_two_workers_of_one_host_never_report_the_same_gpu(tmp_path: Path) -> None:
    library = Driver(tmp_path)
    environment = {**os.environ, **library.environment}
    with ExitStack() as stack:
        daemons, hosts = [], []
        for name in ("first", "second"):
            server = Server(("127.0.0.1", 0), Answer)
            daemons.append(stack.enter_context(contextmanager(serving)(server, Daemon())))
            hosts.append(Host(tmp_path / name, f"http://127.0.0.1:{server.server_address[1]}"))
            stack.callback(hosts[-1].close)
        worker = hosts[0].worker(poll_s=0.05, code=ON_NVML, env=environment)
        first = daemons[0].report(lambda report: len(report.gpus) == 2, "the first worker has the GPUs")
        hosts[1].worker(poll_s=0.05, code=ON_NVML, env=environment)
        second = daemons[1].report(lambda report: bool(report.claimed_elsewhere), "the second one says who has them")
        assert second.problem is None
        assert [one.device.uuid for one in second.claimed_elsewhere] == [gpu.uuid for gpu in first.gpus]
        assert all(f"pid {worker.pid}, user " in one.reason for one in second.claimed_elsewhere)
        assert not set(first.ports_reserved) & set(second.ports_reserved)
        assert len(first.ports_reserved) == len(second.ports_reserved) == 16
        assert not any(report.gpus for _, report in daemons[1].reports)
        daemons[0].pause(True)
        daemons[0].report(lambda report: report.problem == PAUSED, "a paused worker keeps its claims: its leases go on")
        assert daemons[1].report(lambda report: (report.seen or 0) > (second.seen or 0) + 3, "more").claimed_elsewhere
        kill(worker.pid)
        daemons[1].report(lambda report: len(report.gpus) == 2, "no one has them any more")
        assert not daemons[1].reports[-1][1].claimed_elsewhere


@pytest.mark.budget(20)
def test_a_job_with_a_fence_ends_once_no_daemon_has_answered_its_worker_for_so_long(daemon: Daemon, host: Host) -> None:
    host.worker(poll_s=0.2)
    daemon.want(jobs=[order("fenced", spec("sleep", "600", fence_s=10.0))])
    assert daemon.job(RunState.RUNNING).jobs[0].fence_s == 10.0
    with daemon.turn:
        daemon.status = 503
    (ended,) = daemon.job(RunState.EXITED).jobs
    assert ended.reason == "No daemon has answered this node for 10 s, which is the job's fence (fence_s)."


def test_a_worker_raises_its_own_limit_of_open_files_and_its_jobs_keep_theirs(daemon: Daemon, host: Host) -> None:
    limits = (200, 3000)
    worker = host.worker(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    job = order("j", spec("sh", "-c", 'test "$(ulimit -Sn) $(ulimit -Hn)" = "200 3000"'))
    asked = order("k", spec("sh", "-c", 'test "$(ulimit -Sn)" = 2500', limits={"nofile": (2500, -1)}))
    daemon.want([lease(job.lease_id, GPU), lease(asked.lease_id, idle_gpus(2, "n")[1].uuid)], [job, asked])
    report = daemon.report(lambda report: [one.exit_code for one in report.jobs] == [0, 0], "both have what is theirs")
    assert len(report.jobs) == 2
    assert resource.prlimit(worker.pid, resource.RLIMIT_NOFILE) == (3000, 3000), "of a thousand owners it watched 100"
