"""Why GPUs are closed to a request: who has reserved them, and what it could declare."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from gpulease_protocol.explanation import Obstacle
from gpulease_protocol.model import Lease
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import END_MARGIN_S
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import mismatch
from gpulease_server.core.user_limits import UserUsage
from gpulease_server.core.wording import duration

MIN_TIME_S = 60.0
"""No shorter time is proposed."""
ASKING_S = 30.0
"""What passes until it is asked for."""


def calendar_obstacles(
    users: UserUsage, lease: Lease, ledger: Ledger, closed: frozenset[str], others: Mapping[str, Obstacle]
) -> dict[str, Obstacle]:
    """By UUID, the GPUs that the request could use and that are closed to it. `others`: what else keeps it from GPUs.
    That is said too where the window has not begun: a shorter time alone would not help."""
    holder, found = lease.holder, dict[str, Obstacle]()
    group, until = users.index.group_of.get(holder.user), users.latest_end(lease)
    described: dict[str, tuple[str, str]] = {}
    for uuid in closed & ledger.gpus.keys():
        gpu = ledger.gpus[uuid]
        entry = ledger.calendar.first_in_the_way(uuid, holder.user, group, until)
        if entry is None or users.now is None or mismatch(lease.demand, gpu) is not None:
            continue
        if entry.id not in described:
            described[entry.id] = describe_reservation(entry), _time_to_declare(lease, entry, users.now.at)
        what, to_declare = described[entry.id]
        sentence, other = f"GPU {gpu.device.index} of {gpu.device.node} is {what}.{to_declare}", others.get(uuid)
        if other is None or other.code == "ends_too_soon" or entry.from_at <= users.now.at:
            other = Obstacle(uuid=uuid, node=gpu.device.node, index=gpu.device.index, code="reserved", sentence="")
        else:
            sentence = f"{other.sentence} It is {what}.{to_declare}"
        found[uuid] = replace(other, code="reserved", sentence=sentence, since=entry.from_at, until=entry.to_at)
    return found


def describe_reservation(entry: Reservation) -> str:
    """A reservation in words: "reserved for user ada from ... to ... UTC (course; res-1)"."""
    whom = f"user {entry.user}" if entry.group is None else f"group {entry.group}"
    times = f"from {entry.from_at:%Y-%m-%d %H:%M} to {entry.to_at:%Y-%m-%d %H:%M} UTC"
    return f"reserved for {whom} {times} ({entry.reason + '; ' if entry.reason else ''}{entry.id})"


def _time_to_declare(lease: Lease, entry: Reservation, now: datetime) -> str:
    left_s = (entry.from_at - now).total_seconds() - END_MARGIN_S - ASKING_S
    if left_s < MIN_TIME_S:
        too_late = f" What others run there must end {duration(END_MARGIN_S)} before that: it is too late for any."
        return too_late if now < entry.from_at else ""
    name = "`time_s` (`--time`)" if lease.job_id is None else "`timeout_s` (`--timeout`)"
    time_s = lease.demand.time_s
    says = "declares no time" if time_s is None else f"may take {duration(time_s)}"
    return f" The request {says}; with {name} of at most {int(left_s)} s it could use the GPU before that."
