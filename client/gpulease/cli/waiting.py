"""Says on stderr what a command waits for: on a terminal in one line that is drawn anew every second, with the place in
the queue; elsewhere once, and again whenever that has changed."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from gpulease.client import Client
from gpulease.errors import GpuleaseError
from gpulease.explanation import Explanation
from gpulease.model import Job, JobState, Lease
from gpulease.table import duration, plain

AT_ONCE_S = 0.3
"""What is granted within this time is not said to wait."""
CLEAR_LINE = "\x1b[K"
"""Clears a terminal's line from the cursor on."""
LOOK_S = 1.0
"""How often the reason of a wait is asked for."""


def wait_for_job(client: Client, job_id: str, until: Callable[[Job], bool]) -> Job:
    """The job once `until` says so; meanwhile says where it stands."""
    job = client.wait_job(job_id, AT_ONCE_S, until=lambda job: until(job) or job.state is not JobState.QUEUED)
    told = _Told(client, f"job {job_id}", job.created_at)
    try:
        while not until(job):
            if job.state is JobState.QUEUED:
                told.why(job.lease_id, job.reason)
            else:
                where = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus)
                told.once(f"is {job.state}{f' on GPU {where}' if where else ''}.")
            job = _after(client, job, until)
    finally:
        told.close()
    return job


class QueueWatch:
    """Says why a request waits, from a thread, until it does not wait any more or the block ends.

    `watch` is for `on_queued` of the request. After `close` nothing more is written, so that stderr is the caller's.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = threading.Event()
        self._told: _Told | None = None

    def __enter__(self) -> QueueWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, lease: Lease) -> None:
        """Begin to say why this request waits."""
        self._told = told = _Told(self._client, f"request {lease.id}", lease.created_at)
        threading.Thread(target=self._watch, args=(told, lease.id), daemon=True).start()

    def close(self) -> None:
        """Say no more, and take the line off the terminal."""
        self._over.set()
        if self._told is not None:
            self._told.close()

    def _watch(self, told: _Told, lease_id: str) -> None:
        self._over.wait(AT_ONCE_S)
        while not self._over.is_set() and told.why(lease_id):
            self._over.wait(LOOK_S)


@contextmanager
def interruptible(job_id: str, again: str) -> Iterator[None]:
    """When Ctrl-C ends the block, says that the job goes on, and what to do about it."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\njob {job_id} goes on; `gpulease {again} {job_id}` comes back to it,")
        sys.stderr.write(f" `gpulease cancel {job_id}` ends it\n")
        raise


class _Told:
    """What was said last."""

    def __init__(self, client: Client, what: str, since: datetime) -> None:
        self._client = client
        self._what = what
        self._since = since
        self._last: object = None
        self._drawn = False
        self._closed = False
        self._lock = threading.Lock()

    def once(self, sentence: str, key: object = None) -> None:
        """Say it, unless it was said last."""
        key = sentence if key is None else key
        with self._lock:
            if key != self._last and not self._closed:
                self._last = key
                self._wipe()
                sys.stderr.write(plain(f"{self._what} {sentence}", 2000) + "\n")
                sys.stderr.flush()

    def close(self) -> None:
        """Say no more. What was said once stays; the line that is drawn anew goes."""
        with self._lock:
            self._closed = True
            self._wipe()
            sys.stderr.flush()

    def _draw(self, explanation: Explanation) -> None:
        """Where it stands, in the terminal's last line."""
        waited = duration((datetime.now(UTC) - self._since).total_seconds())
        place = f", place {explanation.position} in the queue" if explanation.position else ""
        why = explanation.sentence.removeprefix("Not now: ")
        columns = shutil.get_terminal_size().columns
        with self._lock:
            if not self._closed:
                line = plain(f"{self._what} waits for {waited}{place}: {why}", max(columns - 1, 20))
                sys.stderr.write(f"\r{line}{CLEAR_LINE}")
                sys.stderr.flush()
                self._drawn, self._last = True, None

    def _wipe(self) -> None:
        if self._drawn:
            sys.stderr.write(f"\r{CLEAR_LINE}")
            self._drawn = False

    def why(self, lease_id: str, instead: str | None = None) -> bool:
        """Say why a request waits; False when it does not. What cannot be told now is told at the next look."""
        try:
            explanation = self._client.explain(lease_id)
        except GpuleaseError:
            if instead is not None:  # between two attempts a job has no request
                self.once(f"waits. {instead}")
            return instead is not None
        if explanation.verdict not in ("not_now", "never"):
            return False
        if sys.stderr.isatty():
            self._draw(explanation)
            return True
        # Not the sentence: it says until when a lease lasts, which every renewal changes.
        ways = tuple((obstacle.code, obstacle.uuid, obstacle.lease_id) for obstacle in explanation.obstacles)
        self.once(f"waits. {explanation.sentence}", (explanation.position, ways))
        return True


def _after(client: Client, job: Job, until: Callable[[Job], bool]) -> Job:
    """The job when its state is another, or, while it is queued, after LOOK_S."""
    wait_s = LOOK_S if job.state is JobState.QUEUED else None
    return client.wait_job(job.id, wait_s, until=lambda now: until(now) or now.state is not job.state)
