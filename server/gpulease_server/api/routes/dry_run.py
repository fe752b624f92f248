"""The answer to a request that is not made: what would become of it."""

from __future__ import annotations

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Lease, LeaseState, Liveness
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core import dependencies
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.happenings import JobSubmitted, LeaseRequested
from gpulease_server.core.job import too_many_waiting
from gpulease_server.core.user_limits import timed_demand


def explain_unmade(daemon: DaemonState, request: LeaseRequested | JobSubmitted) -> Explanation:
    """What would become of a request now, from the committed ledger. Raises what the request would be refused with, but
    for `never_fits` and `not_now`, which are verdicts."""
    explanation = _explain(daemon, request)
    if isinstance(explanation, GpuleaseError):
        raise explanation
    return explanation


def _explain(daemon: DaemonState, request: LeaseRequested | JobSubmitted) -> Explanation | GpuleaseError:
    ledger, further_jobs, queue, lease_id = daemon.ledger, 0, True, ""
    if isinstance(request, JobSubmitted):
        refused = request.after_refused or dependencies.check(ledger, request.after, request.after_live)
        if refused is not None:
            return refused
        further_jobs = len(request.jobs) - 1
    else:
        queue, lease_id = request.queue, request.lease_id
    demand = timed_demand(ledger, request, daemon.policy)
    if isinstance(demand, GpuleaseError):
        return demand
    lease = Lease(
        id=lease_id,
        state=LeaseState.QUEUED,
        holder=request.holder,
        demand=demand,
        ttl_s=0.0,
        liveness=Liveness.JOB,
        created_at=daemon.now().at,
    )
    unmet = tuple(one for one in getattr(request, "after", ()) if ledger.is_live(one.job))
    if unmet and isinstance(request, JobSubmitted) and (full := too_many_waiting(ledger, request, daemon.policy)):
        return full
    found = dry_run(
        ledger, lease, daemon.now(), daemon.policy, further_jobs=further_jobs, queue=queue, budget=request.budget
    )
    if unmet and not isinstance(found, GpuleaseError) and found.verdict != "never":
        sentence = f"Not now: {dependencies.describe(unmet)}; then it joins the queue."
        return Explanation(verdict="not_now", sentence=sentence, after=tuple(one.job for one in unmet))
    return found
