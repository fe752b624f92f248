"""What a lease that ended has left on a GPU, and when there is nothing left.

A GPU is clean in three senses (ARCHITECTURE.md, "When a GPU is clean"): the driver lists no process, nothing of the
former holder has its device file open, and its memory is back at what it was while the GPU was free. A pid that is gone
proves none of them.

Who else has the device file open, of no lease and listed nowhere, is a stranger: a monitor, a notebook. The worker
leaves out all others (`gpulease_worker.openers`). A stranger delays and never keeps the GPU:

| list | open by the lease's own | strangers | memory | the GPU |
|---|---|---|---|---|
| somebody | any | any | any | drains, without limit |
| empty | somebody | any | any | drains, without limit |
| empty | nobody | none | back | is clean at once |
| empty | nobody | some | back | is clean `retained_memory_s` after list, own files and memory were first clean |
| empty | nobody | any | not back | is clean when memory has fallen no further for `retained_memory_s` |

Which strangers there are is asked for nothing but the names in `gpu.clean`, so that a new one every few seconds delays
no longer than one that stays. Both times begin anew when a process is listed again or the lease's own open it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpulease.model import GpuReading, Process

from .gpu import observed_at, occupants, reading_of
from .ledger import GpuGone, GpuRecord, GpuWatch, Ledger, Sighting
from .turn import Policy, Turn

MEMORY_STEP_BYTES = 2**20
"""Memory that changes by less than this is taken not to change."""
NAMED = 4
"""So many processes are named in one sentence."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left on a draining GPU."""

    processes: tuple[Process, ...]
    """Listed by the driver."""
    openers: tuple[Process, ...]
    """The lease's own: not listed, and has the device file open or mapped."""
    strangers: tuple[Process, ...]
    """Of no lease, not listed, and has the device file open or mapped."""
    looked: bool
    """Somebody has looked for open device files, and the GPU is healthy enough to believe its process lists."""
    memory_back: bool
    """Memory is at its baseline, or nobody can tell."""

    @property
    def nobody(self) -> bool:
        """True when no process of the lease is left in either sense, and no other is listed."""
        return self.looked and not self.processes and not self.openers


def remains_of(gpu: GpuRecord, reading: GpuReading, policy: Policy) -> Remains:
    """What this reading shows left on a draining GPU."""
    listed = occupants(reading)
    pids = {process.pid for process in listed}
    opened_by = [one for one in reading.opened_by or () if not one.bystander and one.pid not in pids]
    return Remains(
        processes=listed,
        openers=tuple(process for process in opened_by if process.lease_id == gpu.lease_id),
        strangers=tuple(process for process in opened_by if process.lease_id != gpu.lease_id),
        looked=reading.opened_by is not None and reading.health == "ok",
        memory_back=_memory_back(gpu, reading, policy),
    )


def _memory_back(gpu: GpuRecord, reading: GpuReading, policy: Policy) -> bool:
    if gpu.baseline_bytes is None:
        return True
    used = reading.memory_used_bytes
    return used is not None and used <= gpu.baseline_bytes + policy.memory_tolerance_bytes


def watch_draining(turn: Turn, gpu: GpuRecord, reading: GpuReading, watch: GpuWatch, observed_at_s: float) -> GpuWatch:
    """Follow a draining GPU through one reading that was begun after the end of its lease; name what is left behind."""
    since_s = turn.ledger.draining_since[gpu.device.uuid]
    remains = remains_of(gpu, reading, turn.policy)
    left = (*remains.processes, *remains.openers)
    pids = tuple(sorted(process.pid for process in left))
    if pids and pids != watch.leftovers and observed_at_s - since_s >= turn.policy.leftover_after_s:
        turn.event(
            "gpu.leftover",
            lease_id=gpu.lease_id,
            node=gpu.device.node,
            gpus=(gpu.device.uuid,),
            reason="left behind: " + named(left, turn.policy),
        )
        watch = replace(watch, leftovers=pids)
    if reading.opened_by is None and reading.health == "ok" and not left:
        return watch  # a look at open files takes longer than this reading
    if not remains.nobody:
        return replace(watch, quiet_since_s=None, lowest_bytes=None, clean_since_s=None)
    if remains.memory_back and (watch.clean_since_s is None or watch.clean_since_s <= since_s):
        watch = replace(watch, clean_since_s=observed_at_s)
    used, lowest = reading.memory_used_bytes, watch.lowest_bytes
    rose = used is not None and lowest is not None and used > lowest + turn.policy.memory_tolerance_bytes
    fell = used is not None and (lowest is None or used < lowest - MEMORY_STEP_BYTES)
    if watch.quiet_since_s is None or watch.quiet_since_s <= since_s or fell or rose:
        return replace(watch, quiet_since_s=observed_at_s, lowest_bytes=used)
    return watch


def free_clean(turn: Turn, sighting: Sighting) -> None:
    """Free each draining GPU that a reading begun after the end of its lease shows clean.

    One that is not shown drains on: a driver that starts anew leaves out a GPU that it cannot reach for a moment, and
    nobody has seen it clean. One that stays away was taken out, with all that was on it, and is forgotten.
    """
    for uuid, since_s in list(turn.ledger.draining_since.items()):
        gpu, reading, at_s = turn.ledger.gpus[uuid], sighting.readings.get(uuid), observed_at(sighting, uuid)
        if gpu.device.node != sighting.node or at_s is None or at_s <= since_s:
            continue
        if reading is None:
            missing_s = sighting.watches[uuid].missing_since_s
            if missing_s is None or at_s - missing_s < turn.policy.gone_after_s:
                continue
            turn.event("gpu.gone", node=sighting.node, gpus=(uuid,), lease_id=gpu.lease_id)
            turn.put(replace(gpu, lease_id=None, draining=False) if gpu.cordoned else GpuGone(uuid))
            continue
        remains, watch = remains_of(gpu, reading, turn.policy), sighting.watches[uuid]
        if not remains.nobody:
            continue
        plain = remains.memory_back and not remains.strangers
        settled_s = watch.clean_since_s if remains.memory_back else watch.quiet_since_s
        waited = settled_s is not None and at_s - settled_s >= turn.policy.retained_memory_s
        if not (plain or waited):
            continue
        freed = replace(gpu, lease_id=None, draining=False)
        if not remains.memory_back:
            freed = replace(freed, baseline_bytes=reading.memory_used_bytes)
        turn.event(
            "gpu.clean",
            node=sighting.node,
            gpus=(uuid,),
            lease_id=gpu.lease_id,
            reason=_how_clean(reading, remains, turn.policy),
        )
        turn.put(freed)


def _how_clean(reading: GpuReading, remains: Remains, policy: Policy) -> str | None:
    """What a clean GPU was freed in spite of; None when all three senses were plain."""
    notes = []
    if remains.strangers:
        notes.append(f"device file still open by {_some(remains.strangers, policy)}")
    if not remains.memory_back:
        amount = "an unknown amount" if reading.memory_used_bytes is None else gibibytes(reading.memory_used_bytes)
        notes.append(f"memory retained by the driver: {amount}")
    if reading.unreadable_processes is None:
        notes.append("its device file is not known, so nobody looked for open ones")
    elif reading.unreadable_processes:
        notes.append(f"the open files of {reading.unreadable_processes} processes could not be read")
    return "; ".join(notes) or None


def left_words(ledger: Ledger, gpu: GpuRecord, policy: Policy) -> str:
    """What keeps a draining GPU, to end a sentence that says whose remains they are; empty when nothing is known."""
    reading = reading_of(ledger, gpu)
    if reading is None:
        return ""
    remains = remains_of(gpu, reading, policy)
    if remains.processes or remains.openers:
        left = f"{_some(remains.processes, policy)} left" if remains.processes else ""
        kept = f"its device file is kept open by {_some(remains.openers, policy)} of that lease"
        return ": " + "; ".join(filter(None, (left, kept if remains.openers else "")))
    if reading.opened_by is None:
        return ": who has its device file open is being looked for"
    if remains.looked and not remains.memory_back:
        used = reading.memory_used_bytes
        now = "unknown" if used is None else f"{gibibytes(used)} in use"
        return f": no process is left, but its memory is {now}, {gibibytes(gpu.baseline_bytes or 0)} while it was free"
    if remains.looked and remains.strangers:
        delay = f"which delays it by at most {policy.retained_memory_s:g} s"
        return f": nothing of that lease is left; {_some(remains.strangers, policy)} has its device file open, {delay}"
    return ""


def _some(processes: Sequence[Process], policy: Policy) -> str:
    more = f" and {len(processes) - NAMED} more" if len(processes) > NAMED else ""
    return named(processes[:NAMED], policy) + more


def named(processes: Iterable[Process], policy: Policy) -> str:
    """Processes in words: pid, user and command of each, as far as they are known and may be told."""
    return ", ".join(_words(process, policy.show_commands) for process in processes)


def _words(process: Process, command_too: bool) -> str:
    user = f" of {process.user}" if process.user else ""
    command = f" ({process.command[:60]})" if process.command and command_too else ""
    return f"pid {process.pid}{user}{command}"


def gibibytes(amount: int) -> str:
    """An amount of memory in words."""
    return f"{amount / 2**30:.1f} GiB"
