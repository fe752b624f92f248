"""Progress of a wait on stderr: on a terminal one line, redrawn every second, with the place in the queue; elsewhere a
line whenever the reason changes."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

import click

from gpulease.client import Client
from gpulease.sansio.release_retries import DEBTS
from gpulease_cli import output
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, Unavailable
from gpulease_protocol.model import Job, JobState, Lease
from gpulease_protocol.obstacle_groups import describe_wait
from gpulease_protocol.status_table import format_duration, printable

LOG = logging.getLogger("gpulease")
QUIET_S = 0.3
"""No progress is shown for a request that is granted within this time."""
CLEAR_LINE = "\x1b[K"
"""Clears a terminal's line from the cursor on."""
NO_DAEMON = "; the daemon does not answer, and is asked again"
"""What a wait says while it cannot be asked why it waits."""
PASSING_NUMBER = re.compile(r"\d+\.\d+|\d+ s\b")
"""Hours that were used, or seconds that are left, in a sentence: they change while its meaning does not."""
POLL_S = 1.0
"""Time between two queries for the reason of a wait."""
RETRY_S = 30.0
"""How long a daemon may be away, at least, before a command gives up."""


def patient_client(wait_s: float) -> Client:
    """A client for a wait in the queue, which goes on through an outage of the daemon for as long as it may last."""
    return Client(retry_s=max(wait_s, RETRY_S))


def wait_for_job(client: Client, job_id: str, until: Callable[[Job], bool]) -> Job:
    """The job once `until` is true of it; meanwhile shows its progress."""
    job = client.wait_job(job_id, QUIET_S, until=lambda job: until(job) or job.state is not JobState.QUEUED)
    progress = _Progress(client, job_id, job.created_at)
    try:
        while not until(job):
            if job.state is JobState.QUEUED:
                progress.show_reason(job.lease_id, job.reason)
            else:
                places = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus)
                gpus = f" on GPU{'s' if len(job.gpus) > 1 else ''} {places}" if places else ""
                progress.show_once(f"is {job.state}{gpus}.")
            job = _next_state(client, job, until)
    finally:
        progress.close()
    return job


class QueueProgress:
    """Shows from a thread why a request waits, until it no longer waits or the block ends.

    `start` is for `on_queued` of the request. After `close` nothing more is written to stderr.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = threading.Event()
        self._progress: _Progress | None = None
        self._warnings = _WarningsBelow(self)

    def __enter__(self) -> QueueProgress:
        LOG.addHandler(self._warnings)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        LOG.removeHandler(self._warnings)
        gave_up = kind is KeyboardInterrupt and self._progress is not None and not self._closed.is_set()
        self.close()
        if gave_up:
            owed = DEBTS.owed_to(self._client.destination)
            what = "the daemon ends the request when it is back" if owed else "the request is out of the queue"
            output.say(f"gpulease: gave up; {what}\n")
            raise click.exceptions.Exit(128 + signal.SIGINT) from None

    def start(self, lease: Lease) -> None:
        """Begin to show why this request waits."""
        self._progress = progress = _Progress(self._client, lease.id, lease.created_at)
        threading.Thread(target=self._watch, args=(progress, lease.id), daemon=True).start()

    def close(self) -> None:
        """Stop, and remove the line from the terminal."""
        self._closed.set()
        if self._progress is not None:
            self._progress.close()

    def wipe(self) -> None:
        """Remove the line from the terminal until it is drawn again."""
        # Not once it is closed: then there is no line, and a forked child may never get the lock.
        if self._progress is not None and not self._closed.is_set():
            self._progress.wipe()

    def _watch(self, progress: _Progress, lease_id: str) -> None:
        self._closed.wait(QUIET_S)
        while not self._closed.is_set() and progress.show_reason(lease_id):
            self._closed.wait(POLL_S)


class _WarningsBelow(logging.Handler):
    """Writes warnings of the library to stderr as Python does without a handler, but not into the line of a wait."""

    def __init__(self, progress: QueueProgress) -> None:
        super().__init__(logging.WARNING)
        self._queue_progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue_progress.wipe()
            output.say(f"{self.format(record)}\n")
        except Exception:  # as every handler: who logs a warning does not fail by it
            self.handleError(record)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the block runs, SIGTERM, SIGHUP and Ctrl-\\ end it as Ctrl-C does: its request does not outlive it."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    taken = [number for number, action in before.items() if action is signal.SIG_DFL]  # under nohup one is ignored
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    except (KeyboardInterrupt, click.exceptions.Exit):
        if received:
            raise click.exceptions.Exit(128 + received[0]) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, before[number])


@contextmanager
def hint_on_interrupt(job_id: str, command: str) -> Iterator[None]:
    """When Ctrl-C ends the block, says that the job continues, and how to come back to it or end it."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{job_id} continues; `gpulease {command} {job_id}` returns to it,")
        sys.stderr.write(f" `gpulease cancel {job_id}` ends it\n")
        raise


class _Progress:
    """Lines on stderr about one wait; remembers what was printed last."""

    def __init__(self, client: Client, subject: str, since: datetime) -> None:
        self._client = client
        self._subject = subject
        self._since = since
        self._last: object = None
        self._drawn = False
        self._closed = False
        self._lock = threading.Lock()

    def show_once(self, sentence: str, key: object = None) -> None:
        """Print a sentence, unless it (or its `key`) was the last one."""
        key = sentence if key is None else key
        with self._lock:
            if key != self._last and not self._closed:
                self._last = key
                self._wipe()
                output.say(printable(f"{self._subject} {sentence}", 2000) + "\n")

    def close(self) -> None:
        """Stop. Printed lines stay; the redrawn line is removed."""
        with self._lock:
            self._closed = True
        self.wipe()

    def wipe(self) -> None:
        """Remove the redrawn line until it is drawn again."""
        with self._lock:
            self._wipe()

    def _draw(self, what: str) -> None:
        """Redraw the terminal's last line: how long it has waited, and `what`."""
        waited = format_duration((datetime.now(UTC) - self._since).total_seconds())
        columns = shutil.get_terminal_size().columns
        with self._lock:
            if not self._closed:
                line = printable(f"waiting {waited}{what}", max(columns - 1, 20))
                output.say(f"\r{line}{CLEAR_LINE}")
                self._drawn, self._last = True, None

    def _wipe(self) -> None:
        if self._drawn:
            output.say(f"\r{CLEAR_LINE}")
            self._drawn = False

    def show_reason(self, lease_id: str, fallback: str | None = None) -> bool:
        """Show why a request waits; False if it does not wait. A failed query is repeated at the next call."""
        try:
            explanation = self._client.explain(lease_id)
        except (DaemonUnavailable, Unavailable):  # for as long as the request itself is retried, the line goes on
            self._show(NO_DAEMON, NO_DAEMON)
            return True
        except GpuleaseError:
            if fallback is not None:  # between two attempts a job has no request
                self.show_once(f"waits. {fallback}")
            return fallback is not None
        if explanation.verdict not in ("not_now", "never"):
            return False
        # Not the words about GPUs: they say for how long a lease has been held. A limit changes only when it is set.
        obstacles = tuple(
            (one.code, one.uuid, one.lease_id, one.sentence if one.code == "over_limit" else "")
            for one in explanation.obstacles
        )
        why = "" if obstacles else PASSING_NUMBER.sub("", explanation.sentence.partition(". ")[0].rstrip("."))
        self._show(describe_wait(explanation), (explanation.position, obstacles, why))
        return True

    def _show(self, what: str, key: object) -> None:
        """On a terminal redraw the line with `what`; elsewhere print it, unless its `key` was the last one."""
        if sys.stderr.isatty():
            self._draw(what)
        else:
            self.show_once(f"waits{what}.", key)


def _next_state(client: Client, job: Job, until: Callable[[Job], bool]) -> Job:
    """The job when its state changes or, while it is queued, after `POLL_S`."""
    wait_s = POLL_S if job.state is JobState.QUEUED else None
    return client.wait_job(job.id, wait_s, until=lambda now: until(now) or now.state is not job.state)
