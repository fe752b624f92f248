"""Usage: what each user has used lately, by which their requests are ordered within one priority.

How it is counted
-----------------
The GPU-seconds that a user's leases hold, each GPU weighted by its model, decay with a half-life `h`: of what was used
`h` seconds ago half counts. With a constant number of held GPUs `r` the sum follows exactly from a former one:

    used(t + d) = used(t) * 2^(-d/h) + r * h/ln 2 * (1 - 2^(-d/h))

So each grant and each end of a lease, and nothing else, changes a row (`UsageRecord`); what follows for a later moment
is computed. While a lease is held an *entry charge* counts beside that: its declared time, at most an hour, for each of
its GPUs. So the first grants of a user count before they have lasted. It goes with the end of the lease, which leaves
what was held: how requests are split, cancelled or asked for again changes no one's usage.

All is counted from the first day, whether the order uses it or not, on the monotonic clock. Over a restart the wall
clock tells how much time has passed.

How it orders
-------------
The usages of two users that hold nothing decay alike, so their order stays. `log2(usage) + t/h` of a user is constant
in time, which is what an index needs. Usages are compared in *steps* of 5 %: users on one step are served in order of
arrival. Whatever is below one GPU-hour is on the lowest step. A user's step is found again with each grant and end,
and those of all who wait or hold GPUs every `RECOUNT_S`, while anyone waits: usage grows while GPUs are held, and
decays to the lowest step.

Usages are not divided by the capacity of the fleet: that would change no comparison.

| what happens | what follows |
|---|---|
| a lease is granted, grows, shrinks, ends, is revived | its user's row is written in that transaction |
| the daemon is killed, or another takes over | the row goes on; the time between counts for what is still held |
| the weights change over a restart | what was used stays; what is held counts with the new ones |
| the first start of a version that counts | what is held counts from then on |
| the wall clock is put back over a restart | no time has passed |
| a user's usage has decayed to nothing | the row is removed at the next start |
| GPUs are held for a request | its step stays, and no user falls to where they would pass it, see `core.order` |
| users are in one group of limits | nothing, unless the group has a share: then it goes first, see `core.group_usage` |
"""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.group_usage import step_changes
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.order_records import UsageRemoved
from gpulease_server.core.turn import Turn
from gpulease_server.core.usage import entry_time_s, usage_of, weight_of

RECOUNT_S = 300.0
"""How often the steps of all who wait or hold GPUs are found again."""
NOTHING_S = 1.0
"""GPU-seconds: a record of less is removed."""


def put_steps(turn: Turn, users: Iterable[str | None], counted_at_s: float | None = None) -> None:
    """Put users on the steps of their present usages, if these order their requests."""
    if turn.policy.fair_share:
        for change in step_changes(turn.ledger, users, turn.now, turn.policy, counted_at_s):
            turn.put(change)


def recount_usage(turn: Turn) -> None:
    """Bring up to date what time alone changes; and once after a ledger was read from the database, all of it."""
    ledger, policy = turn.ledger, turn.policy
    if not ledger.usage_recounted:
        ledger.usage_recounted = True
        _begin(turn)
    if not policy.fair_share or not ledger.queue:
        return
    since_s = ledger.steps_counted_at_s
    if since_s is None or turn.now.mono_s - since_s >= RECOUNT_S:
        # Those who hold GPUs may ask for more: `dry_run` goes by the steps that are known.
        put_steps(turn, _users([*ledger.limits.queued, *ledger.limits.gpus]), turn.now.mono_s)
    elif turn.pending:
        put_steps(turn, _users(turn.pending.count))


def _users(keys: Iterable[LimitKey]) -> list[str | None]:
    return [key.name for key in keys if key.kind is LimitKind.USER]


def _begin(turn: Turn) -> None:
    """Count up to now, and what is held by the present weights."""
    ledger, policy = turn.ledger, turn.policy
    held: dict[str, float] = {}
    entries_s: dict[str, float] = {}
    for record in ledger.leases.values():
        if record.lease.state is LeaseState.ACTIVE:
            user, weight = record.lease.holder.user or "", weight_of(record.lease.gpus, policy)
            held[user] = held.get(user, 0.0) + weight
            entries_s[user] = entries_s.get(user, 0.0) + weight * entry_time_s(record.lease)
    for user in dict.fromkeys([*ledger.usage, *held]):
        usage = usage_of(ledger, user, turn.now, policy)
        if user not in held and usage.used_s < NOTHING_S:
            turn.put(UsageRemoved(user))
        else:
            turn.put(replace(usage, held=held.get(user, 0.0), entry_s=entries_s.get(user, 0.0)))
