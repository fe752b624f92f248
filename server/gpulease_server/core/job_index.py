"""Which jobs are on which node, and how far arrays are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gpulease_protocol.model import JobState
from gpulease_server.core.fleet import discard
from gpulease_server.core.records import JobRecord


@dataclass(slots=True)
class JobIndex:
    """Indexes of the ledger's jobs. A part of the ledger, which calls `put`."""

    of_node: dict[str, dict[str, None]] = field(default_factory=dict)
    """By node: ids of the jobs that have GPUs there and have not ended, in the order of their starts."""
    running_in_array: Counter[str] = field(default_factory=Counter)
    """By array, how many of its jobs have GPUs."""
    live_in_array: Counter[str] = field(default_factory=Counter)
    """By array, how many of its jobs have not ended."""
    failed_in_array: dict[str, str] = field(default_factory=dict)
    """By array: one of its jobs that has ended, and has not succeeded. Until all of its jobs have ended."""

    def put(self, before: JobRecord | None, record: JobRecord) -> None:
        """Add or change a job."""
        self._put_on_node(before, record)
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
        former, node = _node_of(before), _node_of(record)
        if former == node:
            return
        if former is not None:
            discard(self.of_node, former, record.job.id)
        if node is not None:
            self.of_node.setdefault(node, {})[record.job.id] = None


def _is_running(record: JobRecord) -> bool:
    return record.job.state is not JobState.QUEUED and not record.job.state.final


def _node_of(record: JobRecord | None) -> str | None:
    """The node on which a job that has not ended has GPUs."""
    if record is None or record.job.state.final or not record.job.gpus:
        return None
    return record.job.gpus[0].node


def _add(counts: Counter[str], key: str, number: int) -> None:
    counts[key] += number
    if not counts[key]:
        del counts[key]
