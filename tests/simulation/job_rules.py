"""Jobs that are preempted, judged by the event log. Imports nothing of the product.

A line `submitted` has `job_id`, and `sent_s`, when the job was first asked for. Jobs have no retries, and no one sets
the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.rules_starvation import Waiting
from tests.simulation.usage_rules import has_gpus

if TYPE_CHECKING:
    from tests.simulation.checker import Seen

Line = dict[str, Any]
MAX_PREEMPTED = 2
"""So often a job is preempted; then it goes first."""


@dataclass
class Jobs:
    """What is known of jobs, and of the attempts that follow when they were preempted."""

    seen: Seen
    job_of: dict[str, str] = field(default_factory=dict)
    """By lease."""
    since_s: dict[str, float] = field(default_factory=dict)
    """By job, when it joined the queue, or was granted GPUs at once."""
    preempted: dict[str, int] = field(default_factory=dict)
    """By lease of an attempt that follows when a job was preempted: how often that was."""

    def __post_init__(self) -> None:
        times: dict[str, int] = {}
        self._sent = {line["job_id"]: line["sent_s"] for line in self.seen.of["submitted"]}
        for event in self.seen.log:
            if (job := event.get("job_id")) is None:
                continue
            self.job_of[event["lease_id"]] = job
            if event["kind"] in ("lease.queued", "lease.granted"):
                self.since_s.setdefault(job, max(self.seen.moments(event), default=math.inf))
            if event["kind"] == "job.preempted":
                times[job] = times.get(job, 0) + 1
                self.preempted[event["lease_id"]] = times[job]

    def is_newer(self, waiting: Waiting, one: str, other: str) -> bool:
        """True for a request, or job, that was surely asked for after a job had its place."""
        sent_s = self._sent.get(self.job_of[one], 0.0) if one in self.job_of else waiting.sent.get(one, 0.0)
        return sent_s > self.since_s.get(self.job_of[other], math.inf)

    def goes_first(self, lease: str) -> bool:
        """True for an attempt that goes before all others."""
        return self.preempted.get(lease, 0) >= MAX_PREEMPTED


def preempted_jobs_keep_their_place(seen: Seen) -> Iterator[str]:
    """No grant of a newer request of no higher priority passes a job that was preempted and waits again, and that it
    would have served; none at all one that was preempted twice, but for older ones, of which each may go first, too.
    Those for whom leases end have what ends for them. Of the grants that pass, one of `max_overtakes + 1` may be of one
    that goes first because it has waited longest."""
    jobs = Jobs(seen)
    for bounds in seen.of["passes"] if jobs.preempted else ():
        waiting, grants, passes = Waiting(seen), 0, 0
        for event, _ in waiting.events():
            granted, gpus = event["lease_id"], len(set(event["gpus"]) - waiting.nodes.closed)
            if event["kind"] != "lease.granted":
                continue
            grants += 1
            for job in waiting.since if granted not in waiting.preempt else ():
                is_passed = job in jobs.preempted and job in waiting.demands and waiting.demands[job]["count"] <= gpus
                if job == granted or not is_passed or has_gpus(seen, event, job):
                    continue
                is_newer, is_first = jobs.is_newer(waiting, granted, job), jobs.goes_first(job)
                if is_first != jobs.goes_first(granted):
                    passes += is_first
                else:
                    passes += is_newer and (is_first or waiting.rank(granted) >= waiting.rank(job))
                if passes > grants // (bounds["max_overtakes"] + 1):
                    times = jobs.preempted[job]
                    yield f"seq {event['seq']}: {granted} is granted, and {job} waits, preempted {times} times"
                    passes = -1000


def preempted_twice_and_no_more(seen: Seen) -> Iterator[str]:
    """A job that was preempted twice keeps what it gets then."""
    jobs = Jobs(seen)
    for event in seen.events("lease.preempting"):
        if jobs.goes_first(event["lease_id"]):
            yield f"seq {event['seq']}: {event['lease_id']} is to end, and its job was preempted twice"


def preempted_jobs_start_again(seen: Seen) -> Iterator[str]:
    """Once everything is calm, each job that was preempted has started again, as often as that was."""
    granted = {event["lease_id"] for event in seen.events("lease.granted")}
    for lease in Jobs(seen).preempted if seen.of["over"] else ():
        if lease not in granted:
            yield f"{lease} follows an attempt that was preempted, and never started"
