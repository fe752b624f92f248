"""What a turn records of the budgets of bearer tokens, and of GPU time that limits count; `core.token_budgets` and
`core.gpu_time` have the rules."""

from __future__ import annotations

from datetime import timedelta

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Lease
from gpulease_server.core import gpu_time
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.records import BudgetRemoved
from gpulease_server.core.token_budgets import counted, new_budget
from gpulease_server.core.turn import Turn

KEPT = timedelta(days=2)
"""The budget of a token without leases is forgotten so long after its last use."""


def enter_budget(turn: Turn, token_id: str | None, budget: Budget | None) -> None:
    """Have the budget of a request's token in the ledger. Those of tokens that are not used any more leave it."""
    if token_id is None or budget is None or token_id in turn.ledger.budgets:
        return
    for other in list(turn.ledger.budgets.values()):
        if other.counted_at < turn.now.at - KEPT and other.token_id not in turn.ledger.leases_of_tokens:
            turn.put(BudgetRemoved(other.token_id))
    turn.put(new_budget(token_id, budget, turn.now))


def count_gpu_time(turn: Turn, lease: Lease) -> None:
    """Count the GPU time of a lease's token up to now, and that of those who have a limit of it. To be called before a
    lease takes GPUs, or gives them back."""
    record = turn.ledger.budgets.get(lease.holder.token_id or "")
    if record is not None:
        turn.put(counted(turn.ledger, record, turn.now))
    if turn.ledger.limits.gpu_time:
        for key in turn.ledger.limits.keys_of(lease.holder):
            count_window(turn, key)


def count_window(turn: Turn, key: LimitKey) -> None:
    """Count the GPU time of a user, a group or a token up to now, where there is a limit of it."""
    record = turn.ledger.limits.gpu_time.get(key)
    if record is not None:
        turn.put(gpu_time.counted(record, turn.ledger.limits.gpus[key], turn.now))
