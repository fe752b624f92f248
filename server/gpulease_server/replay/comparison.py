"""Replays a recording under the present policy and under another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun
from gpulease_server.core.limit_records import LimitRecord
from gpulease_server.core.policy import Policy
from gpulease_server.replay.database_recording import recorded_waits
from gpulease_server.replay.measures import PolicyOutcome, mean, measure, percentile, waiting_over_time
from gpulease_server.replay.recorded_requests import RecordedRequest, Recording
from gpulease_server.replay.virtual_daemon import Outcome, replay

PARTS = 142
"""Points of a plot: two in each of its columns."""


class Rules(NamedTuple):
    """What is tried."""

    policy: Policy
    requests: list[RecordedRequest]
    """Those of the recording in the form that is tried."""
    limits: tuple[LimitRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWaits(Noun):
    """How long the requests waited when they were recorded."""

    requests: int
    """Those of which it is known."""
    wait_mean_s: float
    wait_median_s: float
    wait_p99_s: float
    wait_max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison(Noun):
    """What `gpulease policy replay --json` prints."""

    nodes: int
    gpus: int
    left_out: int
    """Requests of the period that were never granted: how long they would have held GPUs is not known."""
    recorded: RecordedWaits | None
    """Null for a trace that does not say how long requests waited."""
    now: PolicyOutcome
    """Under the policy of the configuration."""
    tried: PolicyOutcome | None
    """Under the policy that the options say; null where they change nothing."""


def compare(
    recording: Recording,
    now: Policy,
    tried: Rules | None,
    on_progress: Callable[[float], None] | None = None,
) -> PolicyComparison:
    """Replay a recording under the present policy and the limits that are set, and under what is tried.

    `on_progress` is told the share that is done, now and then. Raises `InvalidRequest` where no request can be granted.
    """
    runs = [Rules(now, recording.requests, recording.limits), *([] if tried is None else [tried])]
    replays: list[list[Outcome]] = []
    for policy, requests, limits in runs:
        told = partial(_tell, on_progress, len(replays), len(runs))
        replays.append(replay(recording.nodes, requests, policy, recording.begin_at, on_progress=told, limits=limits))
    try:
        found = [measure(outcomes, recording.gpus) for outcomes in replays]
    except ValueError:
        detail = f"None of the {len(recording.requests)} requests can be granted on these nodes."
        raise InvalidRequest(detail, remedy="Give more or larger nodes with --gpus, as in 4x8.") from None
    end_s = max(one.end_s for one in found)
    found = [
        replace(one, waiting=waiting_over_time(outcomes, end_s, PARTS))
        for one, outcomes in zip(found, replays, strict=True)
    ]
    return PolicyComparison(
        nodes=len(recording.nodes),
        gpus=recording.gpus,
        left_out=recording.left_out,
        recorded=_recorded(recording),
        now=found[0],
        tried=found[1] if len(found) > 1 else None,
    )


def _tell(on_progress: Callable[[float], None] | None, done: int, runs: int, share: float) -> None:
    if on_progress is not None:
        on_progress((done + share) / runs)


def _recorded(recording: Recording) -> RecordedWaits | None:
    waits = recorded_waits(recording.requests)
    if not waits:
        return None
    return RecordedWaits(
        requests=len(waits),
        wait_mean_s=mean(waits),
        wait_median_s=percentile(waits, 0.5),
        wait_p99_s=percentile(waits, 0.99),
        wait_max_s=waits[-1],
    )
