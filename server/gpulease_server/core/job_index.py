"""Which jobs are on which node, and how far arrays are."""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import JobState, PartState
from gpulease_server.core.fleet import discard
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.records import JobRecord


@dataclass(slots=True)
class JobIndex:
    """Indexes of the ledger's jobs. A part of the ledger, which calls `put`."""

    of_node: dict[str, dict[str, None]] = field(default_factory=dict)
    """By node: ids of the jobs that have GPUs there and have not ended, in the order of their starts."""
    gangs: dict[str, None] = field(default_factory=dict)
    """Ids of those that run on several nodes and for which time counts: they are yet to start, or are to end."""
    gang_times: dict[str, GangTimes] = field(default_factory=dict)
    """By id: since when each of these waits."""
    growing: dict[str, float | None] = field(default_factory=dict)
    """Ids of the elastic jobs that run on fewer nodes than they may; since when, on the monotonic clock, see
    `core.elastic_growth`."""
    running_in_array: Counter[str] = field(default_factory=Counter)
    """By array, how many of its jobs have GPUs."""
    live_in_array: Counter[str] = field(default_factory=Counter)
    """By array, how many of its jobs have not ended."""
    failed_in_array: dict[str, str] = field(default_factory=dict)
    """By array: one of its jobs that has ended, and has not succeeded. Until all of its jobs have ended."""

    def put(self, before: JobRecord | None, record: JobRecord) -> None:
        """Add or change a job."""
        self._put_on_node(before, record)
        if _waits_for_parts(record):
            self.gangs.setdefault(record.job.id)
        elif record.job.id in self.gangs:
            del self.gangs[record.job.id]
            self.gang_times.pop(record.job.id, None)
        if _may_grow(record):
            self.growing.setdefault(record.job.id)
        else:
            self.growing.pop(record.job.id, None)
        array, state = record.job.array_id, record.job.state
        if array is None:
            return
        was_live = before is not None and not before.job.state.final
        _add(self.running_in_array, array, _is_running(record) - (before is not None and _is_running(before)))
        if state.final and state is not JobState.SUCCEEDED:
            self.failed_in_array.setdefault(array, record.job.id)
        if was_live is state.final:
            _add(self.live_in_array, array, -1 if was_live else 1)
            if array not in self.live_in_array:
                self.failed_in_array.pop(array, None)

    def _put_on_node(self, before: JobRecord | None, record: JobRecord) -> None:
        """Note where a job runs. One that stays there keeps its place in the order."""
        former, nodes, job_id = _nodes_of(before), _nodes_of(record), record.job.id
        if former == nodes:
            return
        for node in former.keys() - nodes.keys():
            discard(self.of_node, node, job_id)
        for node in nodes:
            self.of_node.setdefault(node, {}).setdefault(job_id)

    def put_times(self, times: GangTimes) -> None:
        """Note since when a job on several nodes waits, unless it has ended."""
        if times.job_id in self.gangs:
            self.gang_times[times.job_id] = times


def _waits_for_parts(record: JobRecord) -> bool:
    """True for a job on several nodes of which a part may be late: to be prepared, or to end."""
    if not record.job.members or record.job.state.final:
        return False
    told_to_stop = record.cancelled_at, record.parts_stopped_at, record.job.preempt_at
    stops = told_to_stop != (None, None, None)
    return stops or record.go_at is None or any(one.failure is not None for one in record.job.members)


def _may_grow(record: JobRecord) -> bool:
    """True for an elastic job on fewer nodes than it may, of which all parts run: where one is done, so is it soon."""
    most = record.spec.max_nodes
    return (
        most is not None
        and record.job.state is JobState.RUNNING
        and len(record.job.members) < most
        and all(one.state is PartState.RUNNING for one in record.job.members)
        and not _waits_for_parts(record)
    )


def _is_running(record: JobRecord) -> bool:
    return record.job.state is not JobState.QUEUED and not record.job.state.final


def _nodes_of(record: JobRecord | None) -> dict[str, None]:
    """The nodes on which a job that has not ended has GPUs, by rank."""
    if record is None or record.job.state.final:
        return {}
    return dict.fromkeys(gpu.node for gpu in record.job.gpus)


def _add(counts: Counter[str], key: str, number: int) -> None:
    counts[key] += number
    if not counts[key]:
        del counts[key]
