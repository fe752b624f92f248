"""`acquire` that is ended, or whose output no one gets, holds nothing; programs whose standard streams are closed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import environ, wait_until
from tests.daemon import PATIENT, DaemonProcess, daemon

GPULEASE = [sys.executable, "-m", "gpulease_cli"]


def held(client: Client) -> int:
    """How many leases are active or waited for."""
    return len(client.leases(LeaseState.ACTIVE)) + len(client.leases(LeaseState.QUEUED))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_request_is_withdrawn_when_acquire_is_ended_though_its_shell_goes_on(
    client: Client, url: str, number: signal.Signals
) -> None:
    with client.lease(4, wait_s=60):
        command = ["env", f"--default-signal={number.name[3:]}", *GPULEASE, "acquire", "--wait", "1h"]
        with subprocess.Popen(command, env=environ(GPULEASE_URL=url), stderr=subprocess.PIPE, text=True) as waiting:
            try:
                wait_until(lambda: client.leases(LeaseState.QUEUED))
                waiting.send_signal(number)
                assert waiting.wait(60) == 128 + number
            finally:
                waiting.kill()
        assert not client.leases(LeaseState.QUEUED), "the owner is the shell, this process, which lives"


def test_a_request_is_withdrawn_also_when_acquire_is_ended_while_the_daemon_is_away(tmp_path: Path) -> None:
    with daemon(tmp_path) as running, ExitStack() as opened:
        address = f"unix://{running.socket}"
        client = opened.enter_context(Client(address))
        opened.enter_context(client.lease(4, wait_s=60))
        waiting = [
            opened.enter_context(
                subprocess.Popen(
                    ["env", "--default-signal=INT", *GPULEASE, "acquire", "--wait", "1h", *words],
                    env=environ(GPULEASE_URL=address),
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for words in ([], ["--detach"])
        ]
        for one in waiting:
            assert "waits, " in one.stderr.readline()
        running.kill()
        for one in waiting:
            one.send_signal(signal.SIGINT)
            assert "the daemon ends the request when it is back" in one.stderr.read()
        running.start()
        wait_until(lambda: not client.leases(LeaseState.QUEUED))
        assert held(client) == 1


def test_a_request_without_an_answer_is_withdrawn_when_acquire_has_ended(tmp_path: Path) -> None:
    """It has arrived, and the daemon went away before it answered: no one knows its id."""
    running = DaemonProcess(tmp_path / "d", "--simulate", "4", environment=PATIENT)
    command = ["env", "--default-signal=INT", *GPULEASE, "acquire", "--wait", "1h", "--node", "any", "--detach"]
    with socket.create_server(("127.0.0.1", running.port)) as away:
        away.settimeout(60)
        with subprocess.Popen(command, env=environ(GPULEASE_URL=running.url), stderr=subprocess.PIPE) as waiting:
            connection, _ = away.accept()
            with connection:
                connection.settimeout(60)
                sent = connection.recv(65536)
                assert sent.startswith(b"POST /v1/leases"), sent
                while not sent.endswith(b"}"):
                    sent += connection.recv(65536)
                away.close()
                waiting.send_signal(signal.SIGINT)
            assert waiting.wait(60) == 130
    try:
        running.start()
        with socket.create_connection(("127.0.0.1", running.port), 60) as arriving:
            arriving.sendall(sent)
            assert arriving.recv(65536)  # 201, or 410 where it has been withdrawn before
        with Client(running.url) as client:
            wait_until(lambda: client.leases(LeaseState.ENDED))
            assert held(client) == 0
    finally:
        running.stop()


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 1), ("a closed pipe", 141)])
@pytest.mark.parametrize("words", [("--json",), ()])
def test_a_lease_that_could_not_be_printed_is_given_back(
    client: Client, url: str, place: str, code: int, words: tuple[str, ...]
) -> None:
    reader, output = os.pipe()
    os.close(reader)
    if place == "/dev/full":
        os.dup2(os.open(place, os.O_WRONLY), output)
    result = subprocess.run(
        [*GPULEASE, "acquire", "--detach", "--wait", "1m", *words],
        env=environ(GPULEASE_URL=url),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(output)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    assert ("why: No space left on device" in result.stderr) is (place == "/dev/full")
    assert held(client) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_though_standard_streams_are_closed(
    client: Client, url: str, tmp_path: Path, closed: str
) -> None:
    shown = tmp_path / "shown"
    looks = f"readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2 | tee {shown}; exit 7"
    script = f'exec "$@" {closed}'
    result = subprocess.run(
        ["sh", "-c", script, "sh", *GPULEASE, "run", "--wait", "1m", "--", "sh", "-c", looks],
        env=environ(GPULEASE_URL=url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 7, result.stderr
    assert shown.read_text().count("/dev/null") >= closed.count("-"), "no pipe or file of gpulease took their place"
