"""When the next tick can change anything. Until then the daemon sleeps, unless something happens.

What may become due with time alone, and from when on it is due:

| what | from when on |
|---|---|
| a request waits: its pause ends, its token has a new day, its verdict has waited long enough | at once |
| a job on several nodes is yet to start, or is to end, see `core.gang_run` | at once |
| an elastic job runs on fewer nodes than it may, see `core.elastic_growth` | at once |
| a request has had others end for it: it has left the queue | at once |
| there are reservations: one ends, and the wall clock may jump | at once |
| a lease was told when its idle GPUs are taken back | at once |
| a lease of a token while there are budgets: a day ends, and the wall clock may jump | at once |
| a deadline of a lease, or the end of its declared time | its time |
| a pause of a request that has left the queue | its end |
| a node is silent, or has not reported since the start: its silence is counted | at once |
| a node was silent: its count is dropped | at once |
| any other node | `silence_s` after the oldest last report |
| an Idempotency-Key | `key_lifetime_s` after it became known |
| a key without a time, or one too many | at once |

"At once" is with the next tick, `runtime.writer.TICK_S` after the last one. The times are bounds from below: a tick may
find that nothing was due, but a tick before them changes nothing. The tests check that of every tick of a test, see
`tests/core/build.py`. Each look costs the same, however much the ledger has.
"""

from __future__ import annotations

from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy

AT_ONCE, NEVER = float("-inf"), float("inf")


def next_tick_s(ledger: Ledger, pending: PendingRequests, policy: Policy) -> float:
    """The monotonic time before which no tick changes anything, if nothing else happens; `AT_ONCE` or `NEVER`."""
    if pending or ledger.queue or ledger.unreported or ledger.silent_s or ledger.job_index.gangs:
        return AT_ONCE
    if (
        ledger.calendar.entries
        or ledger.preemptions
        or ledger.reclaims.notices
        or ledger.job_index.growing
        or (ledger.budgets and ledger.leases_of_tokens)
    ):
        return AT_ONCE
    deadline_s = min(due.heap[0][0] if due.heap else NEVER for due in (ledger.due, ledger.ends_due))
    pause_s = ledger.demand_classes.pauses[0][0] if ledger.demand_classes.pauses else NEVER
    reported = next(iter(ledger.node_observations.values()), None)
    silent_s = NEVER if reported is None else reported.reported_at_s + policy.silence_s
    return min(deadline_s, pause_s, silent_s, _forget_key_s(ledger, policy))


def _forget_key_s(ledger: Ledger, policy: Policy) -> float:
    if len(ledger.keys_known_since) < len(ledger.keys) or len(ledger.keys) > policy.max_keys:
        return AT_ONCE
    since_s = next(iter(ledger.keys_known_since.values()), NEVER)
    return since_s + policy.key_lifetime_s
