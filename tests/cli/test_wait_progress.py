"""The line that a wait shows outlives an outage of the daemon."""

from __future__ import annotations

import io
import logging
import queue
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_cli import wait_progress
from gpulease_protocol.errors import DaemonUnavailable, NotFound, Unavailable
from gpulease_protocol.explanation import Explanation, Obstacle

WAITS = Explanation(verdict="not_now", sentence="Not now: asked for 2 GPUs.", position=1)


class Answers:
    """Answers each `explain` with the next of these, and after that says that there is no such lease."""

    def __init__(self, *answers: Explanation | Exception) -> None:
        self._answers = list(answers)
        self.last_was_asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def explain(self, _lease_id: str) -> Explanation:
        if not self._answers:
            self.last_was_asked.put(None)
            raise NotFound("There is no such lease.")
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("outage", [DaemonUnavailable("No daemon answers."), Unavailable("The database is away.")])
def test_a_wait_is_shown_again_after_an_outage(
    outage: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_progress, "QUIET_S", 0.0)
    monkeypatch.setattr(wait_progress, "POLL_S", 0.0)
    client: Any = Answers(WAITS, outage, outage, WAITS)
    lease: Any = SimpleNamespace(id="lease-1", created_at=datetime.now(UTC))
    with wait_progress.QueueProgress(client) as progress:
        progress.start(lease)
        client.last_was_asked.get(timeout=10)
    assert capsys.readouterr().err.splitlines() == [
        "lease-1 waits, 1st in the queue: asked for 2 GPUs.",
        "lease-1 waits; the daemon does not answer, and is asked again.",
        "lease-1 waits, 1st in the queue: asked for 2 GPUs.",
    ]


def test_a_wait_for_a_limit_is_shown_again_when_the_limit_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_progress, "QUIET_S", 0.0)
    monkeypatch.setattr(wait_progress, "POLL_S", 0.0)
    said = "Node a has 4 GPUs; ada may have {}"
    first, second = (
        replace(
            WAITS,
            obstacles=(
                Obstacle(
                    uuid="GPU-1",
                    node="a",
                    index=0,
                    code="over_limit",
                    sentence=said.format(most),
                ),
            ),
        )
        for most in (2, 3)
    )
    client: Any = Answers(first, first, second)
    lease: Any = SimpleNamespace(id="lease-1", created_at=datetime.now(UTC))
    with wait_progress.QueueProgress(client) as progress:
        progress.start(lease)
        client.last_was_asked.get(timeout=10)
    assert capsys.readouterr().err.splitlines() == [
        "lease-1 waits, 1st in the queue: Node a has 4 GPUs; ada may have 2.",
        "lease-1 waits, 1st in the queue: Node a has 4 GPUs; ada may have 3.",
    ]


def test_on_a_terminal_the_time_goes_on_in_an_outage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    client: Any = Answers(DaemonUnavailable("No daemon answers."))
    progress = wait_progress._Progress(client, "lease-1", datetime.now(UTC) - timedelta(seconds=75))
    assert progress.show_reason("lease-1"), "it is asked again"
    assert "waiting 1m 15s; the daemon does not answer" in capsys.readouterr().err


def test_a_warning_of_the_library_is_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_progress, "QUIET_S", 0.0)
    monkeypatch.setattr(wait_progress, "POLL_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    client: Any = Answers(WAITS)
    lease: Any = SimpleNamespace(id="lease-1", created_at=datetime.now(UTC))
    with wait_progress.QueueProgress(client) as progress:
        progress.start(lease)
        client.last_was_asked.get(timeout=10)
        logging.getLogger("gpulease").warning("Request %s is not withdrawn yet.", "lease-1")
    shown = capsys.readouterr().err
    assert "in the queue: asked for 2 GPUs\x1b[K\r\x1b[KRequest lease-1 is not withdrawn yet.\n" in shown
    assert not any(isinstance(one, wait_progress._WarningsBelow) for one in logging.getLogger("gpulease").handlers)


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_warning_ends_nothing_where_stderr_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Answers()
    with wait_progress.QueueProgress(client):
        monkeypatch.setattr("sys.stderr", Gone())
        logging.getLogger("gpulease").warning("Lease %s ends soon.", "lease-1")


def test_off_a_terminal_another_limit_is_printed_and_a_pause_that_gets_shorter_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_progress, "QUIET_S", 0.0)
    monkeypatch.setattr(wait_progress, "POLL_S", 0.0)
    pauses, has = "job job-1 pauses for another {} s before its next attempt", "user ann has 2 GPUs; the limit is {}"
    first = "2 newer requests of this user started first, the first of them 8 s ago."
    sentences = [
        f"{pauses.format(4)}; number 1 in the queue.",
        f"{pauses.format(3)}; number 1 in the queue.",
        f"{has.format(2)}; number 1 in the queue.",
        f"{has.format(3)}; number 1 in the queue, behind 1 of higher priority.",
        f"{has.format(3)}; number 1 in the queue, behind 1 of higher priority. {first}",
    ]
    client: Any = Answers(
        *(Explanation(verdict="not_now", sentence=f"Not now: {one}", position=1) for one in sentences)
    )
    lease: Any = SimpleNamespace(id="lease-1", created_at=datetime.now(UTC))
    with wait_progress.QueueProgress(client) as progress:
        progress.start(lease)
        client.last_was_asked.get(timeout=10)
    assert capsys.readouterr().err.splitlines() == [
        f"lease-1 waits, 1st in the queue: {pauses.format(4)}.",
        f"lease-1 waits, 1st in the queue: {has.format(2)}.",
        f"lease-1 waits, 1st in the queue: {has.format(3)}; behind 1 of higher priority.",
    ]
