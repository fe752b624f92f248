"""One entrance for everything that can happen."""

from __future__ import annotations

import itertools

from gpulease_protocol.model import EndReason, LeaseState
from gpulease_server.core.calendar_changes import (
    end_reservations,
    on_reservation_cancelled,
    on_reservation_requested,
)
from gpulease_server.core.elastic_growth import watch_elastic
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_run import watch_gangs
from gpulease_server.core.gpu import node_problem, unheard_nodes
from gpulease_server.core.happenings import (
    AnswerLost,
    BearerTokenChanged,
    CancelRequested,
    CordonRequested,
    Happening,
    JobSubmitted,
    KeepRequested,
    LeaseRequested,
    LimitsChanged,
    NodeForgetRequested,
    NodeModeRequested,
    NodeReported,
    ReleaseRequested,
    RenewalRequested,
    ReservationCancelled,
    ReservationRequested,
    Ticked,
    WaiterPolled,
)
from gpulease_server.core.job import STOPPED_BY_DAEMON, cancel_job, on_cancel_requested, on_job_submitted
from gpulease_server.core.keep import on_keep_requested
from gpulease_server.core.late_jobs import end_late_jobs
from gpulease_server.core.lease import (
    end_timed,
    expire,
    on_answer_lost,
    on_lease_requested,
    on_release_requested,
    on_renewal_requested,
    on_waiter_polled,
)
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.limit_changes import on_limits_changed
from gpulease_server.core.maintenance import on_cordon_requested, on_node_mode_requested
from gpulease_server.core.node import on_node_reported
from gpulease_server.core.node_loss import forget_nodes, lose_silent_nodes, on_node_forget_requested
from gpulease_server.core.preemption import watch_preemptions
from gpulease_server.core.reclaim import reclaim_idle
from gpulease_server.core.records import Deadline, KeyRemoved
from gpulease_server.core.shadow_time import JOB_GRACE_S
from gpulease_server.core.token_budgets import spent_leases
from gpulease_server.core.turn import Turn


def decide(turn: Turn, happening: Happening) -> None:  # noqa: C901, PLR0912 - one case for each
    """Decide on one happening; its effects are in the turn. `settle` closes the turn."""
    turn.cause = happening.cause
    match happening:
        case LeaseRequested():
            on_lease_requested(turn, happening)
        case RenewalRequested():
            on_renewal_requested(turn, happening)
        case ReleaseRequested():
            on_release_requested(turn, happening)
        case KeepRequested():
            on_keep_requested(turn, happening)
        case WaiterPolled():
            on_waiter_polled(turn, happening)
        case AnswerLost():
            on_answer_lost(turn, happening)
        case JobSubmitted():
            on_job_submitted(turn, happening)
        case CancelRequested():
            on_cancel_requested(turn, happening)
        case NodeReported():
            on_node_reported(turn, happening)
        case NodeModeRequested():
            on_node_mode_requested(turn, happening)
        case NodeForgetRequested():
            on_node_forget_requested(turn, happening)
        case CordonRequested():
            on_cordon_requested(turn, happening)
        case BearerTokenChanged():
            turn.emit(happening.kind, reason=happening.reason)
            turn.answer(happening.cause, None)
        case LimitsChanged():
            on_limits_changed(turn, happening)
        case ReservationRequested():
            on_reservation_requested(turn, happening)
        case ReservationCancelled():
            on_reservation_cancelled(turn, happening)
        case Ticked():
            on_ticked(turn, happening)


def on_ticked(turn: Turn, ticked: Ticked) -> None:
    """End what is due. Time in which the daemon could hear no holder is added to every deadline first."""
    if ticked.stalled_s > 0:
        for lease_id, at_s in list(turn.ledger.deadlines.items()):
            turn.put(Deadline(lease_id, at_s + ticked.stalled_s))
    end_timed(turn)
    _end_spent_leases(turn)
    expire(turn)  # after those that no renewal revives
    reclaim_idle(turn, ticked.since_last_s, ticked.stalled_s)
    _notice_silence(turn)
    lose_silent_nodes(turn, max(ticked.since_last_s - ticked.stalled_s, 0.0))
    watch_gangs(turn, ticked.stalled_s)
    watch_elastic(turn)
    forget_nodes(turn)
    end_reservations(turn)
    end_late_jobs(turn)
    watch_preemptions(turn, ticked.stalled_s)
    _forget_keys(turn)


def _end_spent_leases(turn: Turn) -> None:
    """End the leases of tokens that have used up their budgets. Jobs are stopped; one that was cancelled with a long
    grace has what any other has from here."""
    for record, why in list(spent_leases(turn.ledger, turn.now)):
        job = turn.ledger.live_jobs.get(record.lease.job_id or "")
        if job is None:
            turn.emit("lease.budget_spent", lease_id=record.lease.id, reason=why)
            end_lease(turn, record, EndReason.BUDGET_SPENT)
        elif job.cancelled_at is None or job.grace_s > JOB_GRACE_S:
            turn.emit("lease.budget_spent", lease_id=record.lease.id, job_id=job.job.id, reason=why)
            cancel_job(turn, job, min(job.grace_s, JOB_GRACE_S), STOPPED_BY_DAEMON + why)


def _notice_silence(turn: Turn) -> None:
    for name in dict.fromkeys([*unheard_nodes(turn.ledger, turn.now, turn.policy), *turn.ledger.out_of_use]):
        observation = turn.ledger.node_observations.get(name)
        if observation is not None and observation.problem is None:
            problem = node_problem(turn.ledger, observation.node, turn.now, turn.policy)
            if problem is not None:
                turn.put(replace(observation, problem=problem, observed_at_s=None))
                turn.emit("node.unknown", node=observation.node, reason=problem)


def _forget_keys(turn: Turn) -> None:
    if len(turn.ledger.keys_known_since) < len(turn.ledger.keys):
        # Keys of an earlier process: only the wall clock could tell their age. All are older than those of this one.
        known = turn.ledger.keys_known_since
        earlier = dict.fromkeys((key for key in turn.ledger.keys if key not in known), turn.now.mono_s)
        turn.ledger.keys_known_since = earlier | known
    oldest_s = turn.now.mono_s - turn.policy.key_lifetime_s
    surplus = len(turn.ledger.keys) - turn.policy.max_keys
    for number, (key, since_s) in enumerate(list(itertools.islice(turn.ledger.keys_known_since.items(), 1000))):
        if since_s > oldest_s and number >= surplus:
            break
        made = turn.ledger.leases.get(turn.ledger.keys[key].result_id)
        if made is not None and made.lease.state is not LeaseState.ENDED:
            # The ranks of a training run that is started again after days ask by it for the lease that they still have.
            del turn.ledger.keys_known_since[key]
            turn.ledger.keys_known_since[key] = turn.now.mono_s
        else:
            turn.put(KeyRemoved(key))
