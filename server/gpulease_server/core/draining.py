"""What an ended lease has left on a GPU, and when the GPU is clean.

A GPU is clean in three senses (ARCHITECTURE.md, "When a GPU is clean"): the driver lists no process, nothing of the
former holder has its device file open, and its memory is back at what it was while the GPU was free. A pid that is gone
proves none of them.

Who else has the device file open, of no lease and listed nowhere, is a stranger: a monitor, a notebook. The worker
leaves out all others (`gpulease_worker.probe.opener_classifier`). A stranger delays and never keeps the GPU:

| processes | files open by the lease | by others | memory | the GPU |
|---|---|---|---|---|
| some | any | any | any | drains, without limit |
| none | some | any | any | drains, without limit |
| none | none | none | back | is clean at once |
| none | none | some | back | is clean `retained_memory_s` after processes, own files and memory were first clean |
| none | none | any | not back | is clean when memory has fallen no further for `retained_memory_s` |

Which strangers there are is asked for nothing but the names in `gpu.clean`, so that a new one every few seconds delays
no longer than one that stays. Both times start again when a process is listed again or the lease's own open it again.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading, Process
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import observed_at, reading_of
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuObservation, GpuRecord, NodeObservation
from gpulease_server.core.turn import Turn
from gpulease_server.core.wording import describe_processes, gibibytes

MEMORY_STEP_BYTES = 2**20
"""Memory that changes by less than this is taken not to change."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is left on a draining GPU."""

    processes: tuple[Process, ...]
    """Listed by the driver."""
    openers: tuple[Process, ...]
    """The lease's own: not listed, and has the device file open or mapped."""
    strangers: tuple[Process, ...]
    """Of no lease, not listed, and has the device file open or mapped."""
    checked: bool
    """Open device files were checked, and the GPU is healthy enough to trust its process lists."""
    memory_back: bool
    """Memory is at its baseline, or the baseline is not known."""

    @property
    def none_of_lease(self) -> bool:
        """True when no process is listed on the GPU, and none of the lease has its device file open."""
        return self.checked and not self.processes and not self.openers


def find_leftovers(gpu: GpuRecord, reading: GpuReading, policy: Policy) -> Leftovers:
    """What this reading shows left on a draining GPU."""
    listed = occupants(reading)
    pids = {process.pid for process in listed}
    openers: list[Process] = []
    strangers: list[Process] = []
    for one in reading.opened_by or ():
        if not one.bystander and one.pid not in pids:
            (openers if one.lease_id == gpu.lease_id else strangers).append(one)
    return Leftovers(
        processes=listed,
        openers=tuple(openers),
        strangers=tuple(strangers),
        checked=reading.opened_by is not None and reading.health == "ok",
        memory_back=_memory_back(gpu, reading, policy),
    )


def _memory_back(gpu: GpuRecord, reading: GpuReading, policy: Policy) -> bool:
    if gpu.baseline_bytes is None:
        return True
    used = reading.memory_used_bytes
    return used is not None and used <= gpu.baseline_bytes + policy.memory_tolerance_bytes


def observe_draining(
    turn: Turn, gpu: GpuRecord, reading: GpuReading, watch: GpuObservation, observed_at_s: float
) -> GpuObservation:
    """Follow a draining GPU through one reading that was begun after the end of its lease; name what is left behind."""
    since_s = turn.ledger.draining_since[gpu.device.uuid]
    leftovers = find_leftovers(gpu, reading, turn.policy)
    left = (*leftovers.processes, *leftovers.openers)
    pids = tuple(sorted(process.pid for process in left))
    if pids and pids != watch.leftovers and observed_at_s - since_s >= turn.policy.leftover_after_s:
        turn.emit(
            "gpu.leftover",
            lease_id=gpu.lease_id,
            node=gpu.device.node,
            gpus=(gpu.device.uuid,),
            reason="left behind: " + describe_processes(left, turn.policy),
        )
        watch = replace(watch, leftovers=pids)
    if reading.opened_by is None and reading.health == "ok" and not left:
        return watch  # a look at open files takes longer than this reading
    if not leftovers.none_of_lease:
        return replace(watch, quiet_since_s=None, lowest_bytes=None, clean_since_s=None)
    if leftovers.memory_back and (watch.clean_since_s is None or watch.clean_since_s <= since_s):
        watch = replace(watch, clean_since_s=observed_at_s)
    return follow_memory(watch, reading.memory_used_bytes, observed_at_s, turn.policy, since_s)


def follow_memory(
    watch: GpuObservation, used: int | None, observed_at_s: float, policy: Policy, since_s: float = float("-inf")
) -> GpuObservation:
    """Note since when the memory of a GPU that was left has fallen no further."""
    lowest = watch.lowest_bytes
    rose = used is not None and lowest is not None and used > lowest + policy.memory_tolerance_bytes
    fell = used is not None and (lowest is None or used < lowest - MEMORY_STEP_BYTES)
    if watch.quiet_since_s is None or watch.quiet_since_s <= since_s or fell or rose:
        return replace(watch, quiet_since_s=observed_at_s, lowest_bytes=used)
    return watch


def free_clean_gpus(turn: Turn, observation: NodeObservation, readings: Mapping[str, GpuReading]) -> None:
    """Free each draining GPU that these readings of an observation, begun after the end of its lease, show clean.

    One that they do not show goes on draining. Costs what they show, however many GPUs drain elsewhere.
    """
    draining_since = turn.ledger.draining_since
    for uuid in [uuid for uuid in readings if uuid in draining_since]:
        reading, since_s = readings[uuid], draining_since[uuid]
        gpu, at_s = turn.ledger.gpus[uuid], observed_at(observation, uuid)
        if gpu.device.node != observation.node or at_s is None or at_s <= since_s:
            continue
        leftovers, watch = find_leftovers(gpu, reading, turn.policy), observation.gpus[uuid]
        if not leftovers.none_of_lease:
            continue
        plain = leftovers.memory_back and not leftovers.strangers
        settled_s = watch.clean_since_s if leftovers.memory_back else watch.quiet_since_s
        waited = settled_s is not None and at_s - settled_s >= turn.policy.retained_memory_s
        if not (plain or waited):
            continue
        freed = replace(gpu, lease_id=None, draining=False)
        if not leftovers.memory_back:
            freed = replace(freed, baseline_bytes=reading.memory_used_bytes)
        turn.emit(
            "gpu.clean",
            node=observation.node,
            gpus=(uuid,),
            lease_id=gpu.lease_id,
            reason=_caveats(reading, leftovers, turn.policy),
        )
        turn.put(freed)


def _caveats(reading: GpuReading, leftovers: Leftovers, policy: Policy) -> str | None:
    """Caveats to record in `gpu.clean`; None if all three checks passed outright."""
    notes = []
    if leftovers.strangers:
        notes.append(f"device file still open by {describe_processes(leftovers.strangers, policy)}")
    if not leftovers.memory_back:
        amount = "an unknown amount" if reading.memory_used_bytes is None else gibibytes(reading.memory_used_bytes)
        notes.append(f"memory retained by the driver: {amount}")
    if reading.unreadable_processes is None:
        notes.append("its device file is not known, so open files were not checked")
    elif reading.unreadable_processes:
        number = reading.unreadable_processes
        note = f"the open files of {number} process{'' if number == 1 else 'es'} could not be read"
        if reading.unreadable_process is not None:
            note += f", such as {describe_processes((reading.unreadable_process,), policy)}"
        notes.append(note)
    return "; ".join(notes) or None


def describe_leftovers(ledger: Ledger, gpu: GpuRecord, policy: Policy) -> str:
    """What keeps a draining GPU from being clean, as the end of its `reason`; empty when nothing is known."""
    reading = reading_of(ledger, gpu)
    if reading is None:
        return ""
    leftovers = find_leftovers(gpu, reading, policy)
    if leftovers.processes or leftovers.openers:
        verb = "is" if len(leftovers.processes) == 1 else "are"
        running = f"{describe_processes(leftovers.processes, policy)} {verb} still running"
        opened = f"its device file is kept open by {describe_processes(leftovers.openers, policy)} of that lease"
        return ": " + "; ".join(
            part for part in (running if leftovers.processes else "", opened if leftovers.openers else "") if part
        )
    if reading.opened_by is None:
        return ": open device files are still being checked"
    if leftovers.checked and not leftovers.memory_back:
        used = reading.memory_used_bytes
        now, before = "an unknown amount" if used is None else gibibytes(used), gibibytes(gpu.baseline_bytes or 0)
        return f": no process is left, but {now} of memory is in use, {before} while it was free"
    if leftovers.checked and leftovers.strangers:
        delay = f"which delays it by at most {policy.retained_memory_s:g} s"
        strangers = describe_processes(leftovers.strangers, policy)
        return f": nothing of that lease is left; {strangers} has its device file open, {delay}"
    return ""
