"""For how long the GPUs of a lease have done nothing, where idle GPUs are taken back. See docs/design/0016.

Nothing is known that no reading has shown: a reading without a utilization, one of an unhealthy GPU, and a gap in which
the node is unknown each begin the time again from 0. It begins when its first reading arrives and ends when its last
one was begun, so it is never longer than the GPU was idle.

Utilization is part of every reading, also of those that repeat the processes of an earlier one, and so is as recent as
the ticket of the reading, not as that of its oldest part (`gpulease_protocol.node_protocol`). Work counts however old
the reading is that shows it.
"""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading, GpuState, Lease
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import silence_limit_s, state_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuObservation, GpuRecord, Instant
from gpulease_server.core.turn import Turn


@dataclass(frozen=True, slots=True)
class IdleTime:
    """A time in which no reading of any GPU of a lease has shown work, on the monotonic clock."""

    since_s: float
    until_s: float
    """The last reading of each GPU was begun no earlier than this."""
    readings: int
    """At least so many of each GPU."""

    @property
    def lasted_s(self) -> float:
        """How long it is."""
        return self.until_s - self.since_s


def observe_idle(
    turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuObservation, begun_at_s: float
) -> GpuObservation:
    """What is kept of a GPU that a lease holds or drains after, with whether this reading shows it idle. Costs nothing
    without a rule."""
    is_asked = gpu.lease_id in turn.ledger.reclaims.leases
    if not is_asked or reading.utilization_ratio != 0 or reading.health != "ok":
        return known if known.idle_since_s is None else replace(known, idle_since_s=None, idle_readings=0)
    if begun_at_s <= max(known.since_s, known.idle_read_s):
        return known
    before = turn.ledger.node_observations.get(gpu.device.node)
    is_gap = begun_at_s - known.idle_read_s > silence_limit_s(before, turn.policy)
    if known.idle_since_s is None or is_gap:
        return replace(known, idle_since_s=turn.now.mono_s, idle_read_s=begun_at_s, idle_readings=1)
    return replace(known, idle_read_s=begun_at_s, idle_readings=known.idle_readings + 1)


def idle_time(ledger: Ledger, lease: Lease, now: Instant, policy: Policy) -> IdleTime | None:
    """For how long all GPUs of an active lease have been idle; None where one is not, or is not known to be."""
    held, found = ledger.held_by(lease), list[GpuObservation]()
    for gpu in held:
        observation = ledger.node_observations.get(gpu.device.node)
        watch = None if observation is None else observation.gpus.get(gpu.device.uuid)
        if watch is None or watch.lease_id != lease.id or watch.idle_since_s is None:
            return None
        if now.mono_s - watch.idle_read_s > silence_limit_s(observation, policy):
            return None
        if state_of(ledger, gpu, now, policy) is not GpuState.LEASED:
            return None
        found.append(watch)
    if not found or len(held) < len(lease.gpus):
        return None
    since_s = max(watch.idle_since_s or 0.0 for watch in found)
    until_s = min(watch.idle_read_s for watch in found)
    return IdleTime(since_s, until_s, min(watch.idle_readings for watch in found))
