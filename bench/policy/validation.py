"""Is the replay to be believed? Before anything is said of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bench.policy import traces
from bench.policy.small_models import by_arrival, erlang_wait_s, schedule, two_queues
from bench.policy.traces import SERVICE_S
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.replay.measures import mean
from gpulease_server.replay.recorded_requests import RecordedRequest, ReplayedNode, uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, replay

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
DRAIN_S = 1e-6
"""Less than any figure shows."""
MANY = 10**9
UNLIMITED = UserLimits(queued=0, queued_bytes=0, interactive_gpus=0, interactive_s=0.0)
STRICT = Policy(limits=UNLIMITED, max_queued=MANY, max_queued_bytes=2**60, max_bypass=0)
FIT_FIRST = Policy(limits=UNLIMITED, max_queued=MANY, max_queued_bytes=2**60, max_bypass=MANY, max_bypass_s=1e12)


class Check(NamedTuple):
    """One question, and two figures that should agree."""

    what: str
    found: str
    beside: str
    verdict: str


def checks(pollux_files: Sequence[Path], *, poisson_requests: int = 200_000) -> Iterator[Check]:
    """All of them. Without files of Pollux those are left out."""
    yield from _of_sixty_jobs()
    yield from _of_queueing_theory(poisson_requests)
    yield from _of_published_figures(pollux_files)
    for number, file in _numbered(pollux_files):
        requests = traces.pollux(file)
        for rule, policy, greedy in (("strict order", STRICT, False), ("fit first", FIT_FIRST, True)):
            what = f"Pollux workload {number}, 64 GPUs of one pool, {rule}: mean completion"
            yield _beside_model(what, requests, uniform_nodes(1, 64), policy, greedy=greedy)


def _of_sixty_jobs() -> Iterator[Check]:
    for nodes, gpus in ((1, 8), (2, 4), (4, 4), (8, 4)):
        fleet = uniform_nodes(nodes, gpus)
        requests = list(traces.on_nodes(traces.tiresias(), fleet))
        for rule, policy, greedy in (("strict order", STRICT, False), ("fit first", FIT_FIRST, True)):
            what = f"Tiresias' 60 jobs, {nodes} x {gpus} GPUs, {rule}: mean completion"
            yield _beside_model(what, requests, fleet, policy, greedy=greedy)


def _beside_model(
    what: str, requests: list[RecordedRequest], fleet: tuple[ReplayedNode, ...], policy: Policy, *, greedy: bool
) -> Check:
    ours = replay(fleet, requests, policy, BEGUN, DRAIN_S)
    model = schedule(requests, [len(node.gpus) for node in fleet], by_arrival, greedy=greedy)
    starts = {one.request.id: one.granted_at_s or 0.0 for one in model}
    other = sum(abs((one.granted_at_s or 0.0) - starts[one.request.id]) > 0.5 for one in ours)
    verdict = "the same start of every job" if not other else f"{other} of {len(ours)} start at another time"
    return Check(what, f"{completion_s(ours):,.1f} s", f"a model of 60 lines: {completion_s(model):,.1f} s", verdict)


def _of_queueing_theory(number: int) -> Iterator[Check]:
    """The small model with so many requests beside the formula, and the core beside the model with a tenth of them."""
    for gpus, load in ((1, 0.6), (8, 0.8)):
        outcomes = schedule(traces.poisson(number, gpus, load), [gpus], by_arrival, greedy=False)
        found_s = mean([(one.granted_at_s or 0.0) - one.request.asked_at_s for one in outcomes])
        expected_s = erlang_wait_s(gpus, load, SERVICE_S)
        of = f"requests of a Poisson process, {gpus} GPU{'s'[: gpus > 1]}, load {load}"
        difference = f"{found_s / expected_s - 1:+.1%}"
        yield Check(
            f"{number:,} {of}, small model: mean wait",
            f"{found_s:,.0f} s",
            f"Erlang C: {expected_s:,.0f} s",
            difference,
        )
        requests = traces.poisson(number // 10, gpus, load)
        what = f"{number // 10:,} {of}, strict order: mean completion"
        yield _beside_model(what, requests, uniform_nodes(1, gpus), STRICT, greedy=False)


def _of_published_figures(pollux_files: Sequence[Path]) -> Iterator[Check]:
    for number, file in _numbered(pollux_files):
        found_s, published_s = mean(two_queues(traces.pollux(file), 64)), traces.POLLUX_PUBLISHED_S[number]
        fitted = " (fitted)" if number == traces.FITTED_WORKLOAD else ""
        what = f"Pollux workload {number}, 64 GPUs, Tiresias' two queues in our small model: mean completion"
        difference = f"{found_s / published_s - 1:+.1%}{fitted}"
        yield Check(what, f"{found_s:,.0f} s", f"published for this file: {published_s:,.0f} s", difference)


def _numbered(files: Sequence[Path]) -> list[tuple[int, Path]]:
    return sorted((int(file.stem.rpartition("-")[2]), file) for file in files)


def completion_s(outcomes: Sequence[Outcome]) -> float:
    """The mean time from request to end."""
    return mean([(one.ended_at_s or 0.0) - one.request.asked_at_s for one in outcomes])
