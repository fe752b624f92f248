"""What the commands draw on a terminal: a table in place, and a line while they wait in the queue."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease import Client, JobRequest, LeaseState
from gpulease_cli.screen import ENTER, LEAVE, TOP
from tests.cli.programs import Program, environ, wait_until
from tests.daemon import daemon
from tests.imported_program import completed

SEQUENCE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Terminal:
    """The program on a terminal of its own, and all that it has drawn there."""

    def __init__(self, url: str, *arguments: str, columns: int = 120, rows: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.drawn = ""
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "gpulease_cli", *arguments],
            env=environ(GPULEASE_URL=url, TERM="xterm") | {"COLUMNS": "", "LINES": ""},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.drawn += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # no process has it open any more
                return

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def settings(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._ours)

    def shows(self, text: str) -> None:
        wait_until(lambda: text in self.drawn, 60, lambda: repr(self.drawn[-2000:]))

    def end(self, number: int | None = None) -> int:
        """The exit code, after a signal if one is given."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(60)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(60)
        os.close(self._ours)


@pytest.fixture
def terminal(url: str) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, url: str = url, **size: int) -> Terminal:
        opened.append(Terminal(url, *arguments, **size))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def frames(drawn: str) -> list[list[str]]:
    """The lines of each whole picture, without colours."""
    return [SEQUENCE.sub("", part).split("\r\n") for part in drawn.split(TOP)[1:-1]]


def test_watch_redraws_in_place_and_restores_the_screen(client: Client, terminal: Callable[..., Terminal]) -> None:
    watching = terminal("status", "--watch")
    watching.shows("free")
    with client.lease(1, wait_s=60, label="night run"):
        watching.shows("night run")
    assert watching.end(signal.SIGINT) == 0
    assert watching.drawn.startswith(ENTER)
    assert watching.drawn.endswith(LEAVE)
    assert all("every 1s, q quits" in lines[0] for lines in frames(watching.drawn))
    assert {lines[2][:3] for lines in frames(watching.drawn)} == {"GPU"}
    assert {len(lines) for lines in frames(watching.drawn)} == {9}


def test_watch_crops_the_table_to_the_screen(client: Client, terminal: Callable[..., Terminal]) -> None:
    watching = terminal("status", "--watch", columns=40, rows=4)
    watching.shows("... and 7 more lines")
    wait_until(lambda: watching.drawn.count(TOP) > 2, 40)
    assert watching.end(signal.SIGINT) == 0
    for lines in frames(watching.drawn):
        assert len(lines) == 4
        assert max(map(len, lines)) < 40


@pytest.mark.parametrize("words", [("run",), ("acquire",), ("submit", "--launcher", "plain", "--follow")], ids=" ".join)
def test_the_place_in_the_queue_is_one_line_that_is_removed_after_the_wait(
    words: tuple[str, ...], client: Client, terminal: Callable[..., Terminal]
) -> None:
    wait = () if words[0] == "submit" else ("--wait", "5m")
    program = () if words[0] == "acquire" else ("--", "echo", "it", "runs")
    with client.lease(4, wait_s=60, label="sweep 12"):
        waiting = terminal(*words, *wait, *program, columns=100)
        waiting.shows("s, 1st in the queue: GPUs 0-3: ")
        times = re.compile(r"waiting (\d+)s")
        wait_until(lambda: len(set(times.findall(waiting.drawn))) > 1, 40)
        drawn = waiting.drawn
        assert "\n" not in drawn.partition("waiting ")[2]
        assert max(len(line) for line in SEQUENCE.sub("", drawn).split("\r")) < 100
    assert waiting.end() == 0
    after = waiting.drawn.rpartition("\r\x1b[K")[2]
    assert ("export CUDA_VISIBLE_DEVICES=" if words[0] == "acquire" else "it runs\r\n") in after
    said = 'to bind this shell to them, enter the lines below; or next time: eval "$('
    assert (said in after) == (words[0] == "acquire")
    for lease in client.leases(LeaseState.ACTIVE):
        client.release(lease.id, lease.fencing_token)


def test_a_wait_without_success_ends_with_only_the_error(client: Client, terminal: Callable[..., Terminal]) -> None:
    with client.lease(4, wait_s=60):
        waiting = terminal("run", "--wait", "4s", "--", "true")
        assert waiting.end() == 75
    assert waiting.drawn.rpartition("\r\x1b[K")[2].startswith("gpulease: not now\r\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gpulease sta", "status"),
        ("gpulease node dr", "drain"),
        ("gpulease serve --max-bypass-", "--max-bypass-s"),
        ("gpulease status --dae", "--daemon-user"),
        ("gpulease run --mask ind", "indices"),
    ],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    asked = {"_GPULEASE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert completed((), environ() | asked, timeout_s=60).stdout.split() == [f"plain,{offered}"]


def test_cancel_of_all_own_jobs_asks_first(client: Client, terminal: Callable[..., Terminal]) -> None:
    with client.lease(4, wait_s=60):
        job = client.submit(JobRequest(command=["true"], launcher="plain", name="precious"))
        refusing, agreeing = (terminal("cancel", "--mine") for _ in range(2))
        for asked in (refusing, agreeing):
            asked.shows("Cancel 1 job? [y/N]")
            assert "precious" in asked.drawn
        refusing.type("n\n")
        assert refusing.end() == 1
        assert not client.job(job.id).ended
        agreeing.type("y\n")
        assert agreeing.end() == 0
        assert client.job(job.id).ended


@pytest.mark.parametrize(("columns", "longest_bar"), [(80, 8), (160, 20)])
def test_top_draws_bars_jobs_and_the_queue_and_obeys_keys(
    client: Client, terminal: Callable[..., Terminal], columns: int, longest_bar: int
) -> None:
    with client.lease(1, wait_s=60, label="night run"):
        submit = {"command": ["sleep", "600"], "launcher": "plain", "name": "trains", "timeout_s": 900.0}
        running, waiting = (client.submit(JobRequest(**submit, gpus=gpus)) for gpus in (1, 4))  # type: ignore[arg-type]
        watched = terminal("top", columns=columns, rows=40)
        try:
            watched.shows("night run")
            watched.shows("PLACE")
            wait_until(lambda: "█" in watched.drawn, 60, lambda: watched.drawn[-3000:])
            watched.type("s")
            watched.shows("s: util")
            watched.type("q")
            assert watched.end() == 0
        finally:
            for job in (running, waiting):
                client.cancel_job(job.id, 0)
    assert watched.drawn.startswith(ENTER)
    assert watched.drawn.endswith(LEAVE)
    shown = frames(watched.drawn)[-1]
    assert max(map(len, shown)) < columns
    assert "trains" in "".join(shown)
    assert max(len(bar) for bar in re.findall("[█▏▎▍▌▋▊▉·]+", "".join(shown))) == longest_bar


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was(terminal: Callable[..., Terminal], number: int) -> None:
    watched = terminal("top")
    before = watched.settings()
    watched.shows("GPUs free")
    assert watched.settings() != before
    assert watched.end(number) == 0
    assert watched.drawn.endswith(LEAVE)
    assert watched.settings() == before


@pytest.mark.budget(25)
def test_top_keeps_the_last_picture_while_the_daemon_is_away(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2") as running:
        watched = terminal("top", url=running.url)
        watched.shows("2 of 2 GPUs free")
        running.kill()
        watched.shows("Trying again.")
        drawn = len(watched.drawn)
        wait_until(lambda: "H100" in watched.drawn[drawn:], 60, lambda: watched.drawn[-2000:])
        running.start()
        wait_until(lambda: "Trying again." not in watched.drawn.split(TOP)[-2], 60, lambda: watched.drawn[-2000:])
        watched.type("q")
        assert watched.end() == 0


def test_top_in_a_pipe_says_what_to_use(gpulease: Program) -> None:
    refused = gpulease("top")
    assert (refused.returncode, "Use gpulease status." in refused.stderr) == (2, True)


def test_own_jobs_are_bold_and_failed_ones_red(client: Client, terminal: Callable[..., Terminal]) -> None:
    for end in ("true", "false"):
        client.wait_job(client.submit(JobRequest(command=[end], launcher="plain", name=f"ends-{end}")).id, 60)
    listed = terminal("jobs", columns=80)
    assert listed.end() == 0
    rows = [line for line in listed.drawn.splitlines() if "ends-" in line]
    assert {line[:4] for line in rows if "ends-true" in line} == {"\x1b[1m"}
    assert {line[:5] for line in rows if "ends-false" in line} == {"\x1b[31m"}
    assert max(len(SEQUENCE.sub("", line)) for line in listed.drawn.splitlines()) <= 80


def test_a_narrow_list_of_gpus_shows_their_states(client: Client, terminal: Callable[..., Terminal]) -> None:
    listed = terminal("gpu", "list", columns=40)
    assert listed.end() == 0
    head, *rows = SEQUENCE.sub("", listed.drawn).splitlines()
    assert head.split()[:4] == ["NODE", "GPU", "STATE", "UUID"]
    for gpu, row in zip(client.gpus(), rows, strict=True):
        assert gpu.uuid[:13] in row
        assert len(row) <= 40


def test_tables_of_limits_tokens_and_reservations_fit_the_terminal(
    client: Client, terminal: Callable[..., Terminal], gpulease: Program
) -> None:
    def make(line: str) -> str:
        made = gpulease(*line.split(), "--json")
        assert made.returncode == 0, made.stderr
        return str(json.loads(made.stdout).get("id"))

    members = " ".join(f"--member {name}" for name in ("ada", "bob", "carol", "dave", "erin"))
    make(f"limits set @vision --gpus 16 --gpu-hours 500 --window 7d {members}")
    token = make("token create --user ada --max-gpus 2 --gpu-hours-per-day 16 --note course")
    reservation = make("reservations add --gpu 0 --from 200d --to 201d --group vision --reason course")
    try:
        for noun, told in (("limits", "@vision"), ("token", "token-"), ("reservations", "reservation-")):
            listed = terminal(noun, "list", columns=80)
            listed.end()
            table = SEQUENCE.sub("", listed.drawn).splitlines()
            assert max(map(len, table)) <= 80
            assert any(line.startswith(told) for line in table)
    finally:  # other tests have the same daemon
        gpulease("reservations", "cancel", reservation)
        gpulease("token", "revoke", token)
        gpulease("limits", "remove", "@vision")
    assert (client.limits(), client.reservations()) == ((), ())
    for one in client.reservations():
        client.cancel_reservation(one.id)
