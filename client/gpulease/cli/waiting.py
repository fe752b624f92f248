"""Says on stderr what a command waits for: once, and again whenever that has changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulease.client import Client
from gpulease.errors import GpuleaseError
from gpulease.model import Job, JobState, Lease
from gpulease.table import plain

AT_ONCE_S = 0.3
"""What is granted within this time is not said to wait."""
LOOK_S = 1.0
"""How often the reason of a wait is asked for."""


def wait_for_job(client: Client, job_id: str, until: Callable[[Job], bool]) -> Job:
    """The job once `until` says so; meanwhile says where it stands."""
    told = _Told(client, f"job {job_id}")
    job = client.wait_job(job_id, AT_ONCE_S, until=lambda job: until(job) or job.state is not JobState.QUEUED)
    while not until(job):
        if job.state is JobState.QUEUED:
            told.why(job.lease_id, job.reason)
        else:
            where = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus)
            told.once(f"is {job.state}{f' on GPU {where}' if where else ''}.")
        job = _after(client, job, until)
    return job


def say_why_queued(client: Client) -> Callable[[Lease], None]:
    """For `on_queued` of a request: says why it waits, from a thread that ends when it does not wait any more."""

    def watch(lease: Lease) -> None:
        told = _Told(client, f"request {lease.id}")
        time.sleep(AT_ONCE_S)
        while told.why(lease.id):
            time.sleep(LOOK_S)

    return lambda lease: threading.Thread(target=watch, args=(lease,), daemon=True).start()


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

    def __init__(self, client: Client, what: str) -> None:
        self._client = client
        self._what = what
        self._last: object = None

    def once(self, sentence: str, key: object = None) -> None:
        """Say it, unless it was said last."""
        key = sentence if key is None else key
        if key != self._last:
            self._last = key
            sys.stderr.write(plain(f"{self._what} {sentence}", 2000) + "\n")
            sys.stderr.flush()

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
        # Not the sentence: it says until when a lease lasts, which every renewal changes.
        ways = tuple((obstacle.code, obstacle.uuid, obstacle.lease_id) for obstacle in explanation.obstacles)
        self.once(f"waits. {explanation.sentence}", (explanation.position, ways))
        return True


def _after(client: Client, job: Job, until: Callable[[Job], bool]) -> Job:
    """The job when its state is another, or, while it is queued, after LOOK_S."""
    wait_s = LOOK_S if job.state is JobState.QUEUED else None
    return client.wait_job(job.id, wait_s, until=lambda now: until(now) or now.state is not job.state)
