"""Who ends for whom, and when, in words; see `core.preemption`."""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.explanation import Preempts
from gpulease_protocol.model import Device, Lease, LeaseState
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.gpu import is_cordoned
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.preempted_gpus import preemptions_held
from gpulease_server.core.preemption_records import MAX_PREEMPTED, Preemption, is_preemptible
from gpulease_server.core.records import JobRecord, LeaseRecord
from gpulease_server.core.victim_choice import MAX_TTL_S
from gpulease_server.core.wording import describe_places, some_of

MAY_END = " It is preemptible: after a notice, it may end for the first request that waits."
PREEMPTED_OFTEN = " It is not preempted again, as its job was twice."
HEARD_TOO_LATE = (
    " It is preemptible, but ends for no one: with a `ttl_s` of over 15 minutes its holder would hear of it too late."
)


def preempted_for(reservations: Reservations, record: LeaseRecord) -> Preempts | None:
    """What ends so that a request can start; None where nothing does."""
    ledger = reservations.ledger
    one = ledger.preemptions.get(record.lease.id)
    if one is None:
        return None
    active = tuple(lease.id for lease in _active(ledger, one.victims))
    is_held = any(held is one for held, _ in preemptions_held(reservations))
    known = [ledger.gpus[uuid] for uuid in one.gpus if uuid in ledger.gpus] if is_held else []
    held = [gpu.device for gpu in known if not is_cordoned(ledger, gpu)]
    gpus = tuple(gpu.uuid for gpu in sorted(held, key=lambda gpu: (gpu.node, gpu.index)))
    return Preempts(leases=active, by=one.preempt_at, gpus=gpus)


def describe_preemption(ledger: Ledger, record: LeaseRecord, preempts: Preempts | None) -> str:
    """The same in words, after a space. `preempts`: what `preempted_for` says."""
    if preempts is None:
        return ""
    gpus = [ledger.gpus[uuid].device for uuid in ledger.preemptions[record.lease.id].gpus if uuid in ledger.gpus]
    still = _held([gpu for gpu in gpus if gpu.uuid in preempts.gpus], "held for it")
    held = "; ".join(
        filter(None, [still, _held([gpu for gpu in gpus if gpu.uuid not in preempts.gpus], "no longer held for it")])
    )
    if not preempts.leases:
        return f" Nothing more ends for it; {held}." if held else ""
    said = some_of([_named(lease) for lease in _active(ledger, preempts.leases)])
    return f" It preempts {said}, by {preempts.by:%Y-%m-%d %H:%M:%S} UTC{'; ' + held if held else ''}."


def _held(gpus: list[Device], how: str) -> str:
    return f"{describe_places(gpus)} {'is' if len(gpus) == 1 else 'are'} {how}" if gpus else ""


def describe_victim(ledger: Ledger, record: LeaseRecord, policy: Policy) -> str:
    """For whom an active lease ends, and when, or that it may, after a space; empty where it cannot."""
    lease, one = record.lease, _preemption_of(ledger, record.lease)
    job = ledger.live_jobs.get(lease.job_id or "")
    at = job.job.preempt_at if job is not None else None if one is None else one.preempt_at
    if at is None:
        return _may_end(lease, job) if policy.preemption and is_preemptible(lease.demand) else ""
    waiting = None if one is None else ledger.leases.get(one.lease_id)
    whom = ""
    if waiting is not None:
        asked = waiting.lease
        whom = f", so that {asked.id} of user {asked.holder.user} with priority {asked.demand.priority} can start"
    back = " Its job is queued again, at its old place." if job is not None else ""
    return f" It ends by {at:%Y-%m-%d %H:%M:%S} UTC, preempted{whom}.{back}"


def _may_end(lease: Lease, job: JobRecord | None) -> str:
    """Whether a preemptible lease may end for others; see `victim_choice.may_be_preempted`."""
    if job is not None and job.cancelled_at is not None:
        return ""
    if job is not None:
        return PREEMPTED_OFTEN if job.job.preempted >= MAX_PREEMPTED else MAY_END
    return HEARD_TOO_LATE if lease.ttl_s > MAX_TTL_S else MAY_END


def _active(ledger: Ledger, ids: Iterable[str]) -> list[Lease]:
    known = (ledger.leases.get(lease_id) for lease_id in ids)
    return [found.lease for found in known if found is not None and found.lease.state is LeaseState.ACTIVE]


def _preemption_of(ledger: Ledger, lease: Lease) -> Preemption | None:
    return ledger.preemptions.get(ledger.preempting.get(lease.id, ""))


def _named(lease: Lease) -> str:
    what = f"{lease.id} of user {lease.holder.user}"
    return what if lease.job_id is None else f"job {lease.job_id} of user {lease.holder.user}"
