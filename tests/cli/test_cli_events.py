"""`gpulease events`: the history in words and as JSON, what comes, and what is gone."""

from __future__ import annotations

import getpass
import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

import gpulease_server
from gpulease import Client
from gpulease_cli.commands.events import format_event
from gpulease_protocol.events import KINDS
from gpulease_protocol.model import Event, JobState
from gpulease_protocol.tokens import Role, TokenRequest
from tests.cli.programs import Program, environ, wait_until
from tests.daemon import daemon

AT = datetime(2026, 11, 22, 9, 8, 7, 654321, tzinfo=datetime.now(UTC).astimezone().tzinfo)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            Event(
                seq=7,
                at=AT,
                kind="lease.granted",
                cause="request-0123456789abcdef",
                lease_id="lease-1",
                node="gpubox",
                gpus=("GPU-bf4cfdfc-6704", "GPU-09c729ea-5efa"),
                fencing_token=3,
            ),
            "2026-11-22 09:08:07       7  lease.granted     lease-1 on gpubox GPU-bf4cfdfc, GPU-09c729ea",
        ),
        (
            Event(
                seq=1234567, at=AT, kind="job.ended", cause="report-1", lease_id="lease-1", job_id="job-2", reason="x"
            ),
            "2026-11-22 09:08:07  1234567  job.ended         lease-1 job-2: x",
        ),
        (
            Event(seq=8, at=AT, kind="node.unknown", cause="tick", node="gpubox", reason="silent\x1b[2J\nfor 3 s"),
            "2026-11-22 09:08:07       8  node.unknown      on gpubox: silent?[2J?for 3 s",
        ),
        (
            Event(seq=9, at=AT, kind="ledger.recovered", cause="recovery"),
            "2026-11-22 09:08:07       9  ledger.recovered",
        ),
        (
            Event(seq=10, at=AT, kind="token.revoked", cause="request-1", reason="token-1 of user ann, by root"),
            "2026-11-22 09:08:07      10  token.revoked     token-1 of user ann, by root",
        ),
    ],
)
def test_an_event_on_one_line(event: Event, line: str) -> None:
    assert format_event(event) == line


def test_on_a_terminal_an_event_is_short() -> None:
    today = datetime.now(UTC)
    event = Event(
        seq=7,
        at=today,
        kind="job.ended",
        cause="report-1",
        lease_id="lease-3e1f8e2a3b70f12d",
        job_id="job-82c4b92c1f47e880",
        reason="It ran longer than its time limit of 2 s.",
    )
    shown = format_event(event, 79)
    assert shown.startswith(f"{today.astimezone():%H:%M:%S}       7  job.ended         job-82c4b92c: It ran longer")
    assert len(shown) <= 79
    old = format_event(Event(seq=7, at=AT, kind="x", cause="tick", reason="long " * 40), 60)
    assert (old[:19], len(old), old[-1]) == ("2026-11-22 09:08:07", 60, "…")


def test_json_prints_one_event_of_the_rest_api_per_line(client: Client, gpulease: Program, url: str) -> None:
    with client.lease(1, wait_s=60):
        pass
    shown = [json.loads(line) for line in gpulease("events", "--after", "0", "--json").stdout.splitlines()]
    curl = ["curl", "-s", "--unix-socket", url.removeprefix("unix://"), "http://d/v1/events?limit=1000"]
    page = json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)["items"]
    first = page[: len(shown)]  # more may have happened since
    assert [(one["seq"], one["kind"], set(one)) for one in shown] == [
        (one["seq"], one["kind"], set(one)) for one in first
    ]
    assert len(shown) > 2


def test_without_a_number_the_newest_are_shown_and_with_it_those_after(client: Client, gpulease: Program) -> None:
    with client.lease(1, wait_s=60) as lease:
        pass
    wait_until(lambda: all(gpu.state == "free" for gpu in client.gpus()))
    everything = gpulease("events", "--after", "0").stdout.splitlines()
    assert gpulease("events", "--limit", "2").stdout.splitlines() == everything[-2:]
    assert gpulease("events").stdout.splitlines() == everything[-50:]
    assert gpulease("events", "--after", "2", "--limit", "3").stdout.splitlines() == everything[2:5]
    assert gpulease("events", "--after", "999999999").stdout == ""
    granted = next(line for line in everything if "lease.granted" in line and lease.id in line)
    assert "request-" not in granted


def test_the_newest_are_those_that_the_caller_may_see(client: Client, gpulease: Program) -> None:
    with client.lease(1, wait_s=60):
        pass
    wait_until(lambda: all(gpu.state == "free" for gpu in client.gpus()))
    viewer = client.create_token(TokenRequest(user="ann", role=Role.VIEWER))
    for _ in range(9):
        client.revoke_token(client.create_token(TokenRequest(user="bob")).id)
    newest = gpulease("events", "--limit", "2", GPULEASE_TOKEN=viewer.bearer).stdout.splitlines()
    everything = gpulease("events", "--after", "0").stdout.splitlines()
    assert "token.revoked" in everything[-1]
    assert newest == [line for line in everything if "token." not in line][-2:]


def test_events_are_chosen_by_time_and_subject(client: Client, gpulease: Program) -> None:
    with client.lease(1, wait_s=60, label="chosen") as lease:
        pass
    wait_until(lambda: all(gpu.state == "free" for gpu in client.gpus()))

    def kinds(*options: str) -> list[str]:
        lines = gpulease("events", "--json", *options).stdout.splitlines()
        return [event["kind"] for event in map(json.loads, lines) if event["lease_id"] == lease.id]

    everything = kinds("--after", "0")
    assert {"lease.granted", "lease.ended"} < set(everything)
    assert kinds("--lease", lease.id, "--limit", "1000") == everything
    assert kinds("--lease", lease.id[:14], "--kind", "lease.granted", "--since", "1h") == ["lease.granted"]
    assert kinds("--gpu", lease.gpus[0].uuid[:12], "--kind", "lease.ended", "--limit", "1") == ["lease.ended"]
    assert kinds("--user", getpass.getuser(), "--since", "1h", "--kind", "lease.granted") == ["lease.granted"]
    assert kinds("--until", "1h", "--after", "0") == kinds("--node", "no-such-node") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "noon"], "'noon' is no time; write it like 03:00"),
        (["--since", "25:00"], "'25:00' is no time"),
        (["--gpu", "77"], "There is no GPU 77"),
        (["--job", "no-such-job"], "no-such-job"),
        (["--follow", "--kind", "lease", "--user", "ada"], "--follow shows all events, and takes no --kind or --user."),
    ],
)
def test_what_is_no_choice_of_events_is_said(gpulease: Program, options: list[str], said: str) -> None:
    refused = gpulease("events", *options)
    assert refused.returncode != 0
    assert said in refused.stderr
    assert refused.stdout == ""


@contextmanager
def following(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`gpulease events --follow`, with its output read line by line."""
    # Tests that run in the background of a script inherit an ignored SIGINT, which no terminal would.
    program = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "gpulease_cli", "events", "-f", *options],
        env=environ(GPULEASE_URL=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def read_until(program: subprocess.Popen[str], *words: str) -> list[str]:
    """What it writes, up to the line that has all these words."""
    assert program.stdout is not None
    lines = []
    for line in program.stdout:
        lines.append(line)
        if all(word in line for word in words):
            return lines
    raise AssertionError(f"it ended: {program.stderr and program.stderr.read()}; {lines}")


def test_follow_continues_after_a_daemon_restart_without_a_gap(tmp_path: Path) -> None:
    with daemon(tmp_path) as running, following(running.url, "--after", "0", "--json") as program:
        with running.client() as client, client.lease(1, wait_s=60) as lease:
            before = read_until(program, "lease.granted", lease.id)
        running.stop()
        running.start()
        with running.client() as client, client.lease(1, wait_s=60) as lease:
            after = read_until(program, "lease.granted", lease.id)
        seqs = [json.loads(line)["seq"] for line in before + after]
        assert seqs == list(range(1, len(seqs) + 1)), "one is missing, or was shown twice"
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert program.stderr is not None
        assert program.stderr.read() == ""


def test_follow_with_a_limit_ends_by_itself(client: Client, url: str) -> None:
    with client.lease(1, wait_s=60):
        pass  # there are events, also where this is the first test
    with following(url, "--after", "0", "--limit", "2") as program:
        assert len(program.communicate(timeout=60)[0].splitlines()) == 2
        assert program.returncode == 0


def test_pruned_events_are_refused_with_the_first_that_is_kept(gpulease: Program, tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        with running.client() as client, client.lease(1, wait_s=60):
            pass
        running.stop()
        with closing(sqlite3.connect(running.data_dir / "gpulease.db")) as database, database:
            database.execute("DELETE FROM event WHERE seq <= 3")
            database.execute("INSERT INTO pruned (id, seq) VALUES (1, 3) ON CONFLICT (id) DO UPDATE SET seq = 3")
        running.start()
        for form in ([], ["--follow"], ["--json"]):
            refused = gpulease("events", "--after", "1", *form, GPULEASE_URL=running.url)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert refused.stderr.splitlines() == [
                "gpulease: events pruned",
                "  why: Events 2 to 3 have been pruned.",
                "  do:  Continue with after=3, and read the current state from leases, jobs and GPUs.",
            ]
        newest = gpulease("events", "--limit", "1000", GPULEASE_URL=running.url).stdout.splitlines()
        assert newest[0].split()[2] == "4"


def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(gpulease: Program) -> None:
    unknown = gpulease("events", "--kind", "nonsense")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "there is no kind 'nonsense'" in unknown.stderr
    assert "Name one of gpu, job, lease, ledger, limits, node, reservation, token." in unknown.stderr
    mistyped = gpulease("events", "--kind", "lease.grantd", "--json")
    assert mistyped.returncode == 2
    assert "lease.granted, " in mistyped.stderr
    assert gpulease("events", "--kind", "node.forgotten").returncode == 0, "there is such a kind, and nothing to show"


def test_the_kinds_are_those_that_the_daemon_records() -> None:
    sources = "\n".join(path.read_text() for path in Path(gpulease_server.__path__[0]).rglob("*.py"))
    recorded = set(re.findall(rf'"((?:{"|".join(KINDS)})\.[a-z_]+)"', sources)) - {"job.id", "lease.id"}  # columns
    recorded |= {f"job.{state}" for state in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)}  # else job.ended
    recorded |= {"job.grown", "job.shrunk", "job.regrouped"}
    assert recorded == {f"{noun}.{verb}" for noun, verbs in KINDS.items() for verb in verbs}


def test_the_times_in_the_reason_of_an_event_are_those_of_this_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        reason = "reservation-1 for user ada, 2026-11-22 23:30:00 UTC to 2026-11-23 01:00:00 UTC, by root"
        line = format_event(Event(seq=1, at=AT, kind="reservation.created", cause="request-1", reason=reason))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "2026-11-23 08:30:00 to 2026-11-23 10:00:00, by root" in line
