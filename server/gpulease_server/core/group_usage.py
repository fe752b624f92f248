"""Fair share between groups: the step of a request's group comes before that of its user.

Which groups take part
----------------------
Those that the configuration names (`Policy.group_shares`), each with a *share*: for how many users it counts. Their
members are those of the group of limits of that name (`core.limit_index`), of which a user is in one at most. Where
none is named all is as `core.fair_share` says. A user in no such group is ordered as if alone in a group with a share
of 1.

How it orders
-------------
The usage of a group is the sum of what its present members have used, also before they joined it: what a user has used
goes with them into another group. It is divided by the share, and put on a step as a user's usage is.
The order is that of these steps first. Users of groups on one step are ordered by their own steps, whether they are of
one group or not; then arrival decides. So neither requests in parts, nor requests that are cancelled and made again,
nor requests of another member get a group more.

Both steps are one number, so that an index of users has one: that of the group times `WIDTH`, and that of the user.

Cost
----
The sum is kept (`Ledger.group_usage`), and goes on with each grant and end of a member as the row of a user does. It is
summed up again when the members of the group change, and every `RECOUNT_S`. A change of usage moves what its user waits
for; and what the other members wait for only where it puts the group on another step.

| what happens | what follows |
|---|---|
| a user joins a group or leaves it, or the group is removed | all who wait are put on their steps in that turn |
| a group that is named does not exist | nothing, until it is made |
| the limits of a group are changed | nothing: which limits it has makes no difference to the order |
| a member asks who has asked for nothing for long | their request is on the step of the group |
| a member is granted GPUs in the middle of a walk | what all members wait for moves back at once |
| the daemon is killed, or another takes over | the sums follow from what is stored of the users |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from gpulease_protocol.limits import LimitKind
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.order_records import GroupUsage, UsageRecord, UsageSteps
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.core.usage import LOWEST_S, counted, ordering_s, step_of, usage_of

WIDTH = 2**32
"""More than the steps that there are."""


def group_of(ledger: Ledger, user: str | None, policy: Policy) -> str | None:
    """The group that orders a user's requests first, by its usage; None for a user in none."""
    if not policy.group_shares:
        return None
    group = ledger.limits.group_of.get(user)
    return group if group in shares(policy.group_shares) else None


@lru_cache(8)
def shares(group_shares: tuple[tuple[str, float], ...]) -> Mapping[str, float]:
    """By group, for how many users it counts."""
    return dict(group_shares)


def group_usage(ledger: Ledger, group: str, now: Instant, policy: Policy, *, again: bool = False) -> UsageRecord:
    """What the members of a group have used up to now. `again`: the sum, also where it is known from before."""
    known = ledger.group_usage.get(group)
    if known is not None and not again:
        return counted(known.usage, now, policy)
    found = [usage_of(ledger, user, now, policy) for user in _members(ledger, group) if user in ledger.usage]
    return UsageRecord(
        user=group,
        used_s=math.fsum(one.used_s for one in found),
        held=math.fsum(one.held for one in found),
        entry_s=math.fsum(one.entry_s for one in found),
        counted_at=now.at,
        counted_at_s=now.mono_s,
    )


def step_changes(
    ledger: Ledger,
    users: Iterable[str | None],
    now: Instant,
    policy: Policy,
    counted_at_s: float | None = None,
    changed: UsageRecord | None = None,
) -> list[GroupUsage | UsageSteps]:
    """What puts users on the steps of their present usages, and with them the members of their groups whose steps are
    others now. `counted_at_s`: set where these are all who wait; `changed`: the usage of one of them from now on."""
    asked, groups = dict.fromkeys(users), dict[str, GroupUsage]()
    for user in list(asked):
        group = group_of(ledger, user, policy)
        if group is not None and group not in groups:
            usage = group_usage(ledger, group, now, policy, again=counted_at_s is not None)
            if changed is not None:
                usage = _with_change(usage, changed, usage_of(ledger, user, now, policy))
            groups[group] = GroupUsage(group, usage, _group_step(group, ordering_s(usage), now, policy))
    changes = list[GroupUsage | UsageSteps]()
    for one in groups.values():
        before = ledger.group_usage.get(one.group)
        if before is None or before.step != one.step:
            known = ledger.demand_classes
            members = _members(ledger, one.group)
            asked |= {user: None for user in members if user in known.of_user or user in known.steps}
        if before is None or before.step != one.step or changed is not None or counted_at_s is not None:
            changes.append(one)

    def step(user: str | None) -> int:
        is_changed = changed is not None and changed.user == (user or "")
        used_s = ordering_s(changed if is_changed and changed is not None else usage_of(ledger, user, now, policy))
        group, own = group_of(ledger, user, policy), step_of(used_s, now.mono_s, policy)
        return _joined(own if group is None else groups[group].step, own, policy)

    lowest = step_of(0.0, now.mono_s, policy)
    steps = tuple((user, step(user)) for user in asked)
    return [*changes, UsageSteps(steps, _joined(lowest, lowest, policy), counted_at_s)]


def used_step(ledger: Ledger, user: str | None, now: Instant, policy: Policy) -> int:
    """The step of what a user, and the group of that user, have used without entry charges; the very lowest for less
    than counts."""
    used_s, group = usage_of(ledger, user, now, policy).used_s, group_of(ledger, user, policy)
    own = step_of(used_s, now.mono_s, policy) if used_s > LOWEST_S else 0
    if group is None:
        return _joined(own, own, policy)
    of_group_s = group_usage(ledger, group, now, policy).used_s
    counts = of_group_s > LOWEST_S * shares(policy.group_shares)[group]
    return _joined(_group_step(group, of_group_s, now, policy) if counts else 0, own, policy)


def _joined(of_group: int, own: int, policy: Policy) -> int:
    return of_group * WIDTH + own if policy.group_shares else own


def _group_step(group: str, used_s: float, now: Instant, policy: Policy) -> int:
    return step_of(used_s / shares(policy.group_shares)[group], now.mono_s, policy)


def _with_change(usage: UsageRecord, changed: UsageRecord, before: UsageRecord) -> UsageRecord:
    """The sum of a group after a change of one member."""
    held, entry_s = usage.held + changed.held - before.held, usage.entry_s + changed.entry_s - before.entry_s
    return replace(usage, held=max(0.0, held), entry_s=max(0.0, entry_s))


def _members(ledger: Ledger, group: str) -> tuple[str, ...]:
    record = ledger.limits.records.get(LimitKey(LimitKind.GROUP, group))
    return () if record is None else record.members
