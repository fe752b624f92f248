"""Reads the daemon's answer to a report, also that of a daemon which is newer than this worker.

| the daemon says | the worker |
|---|---|
| a field that it does not know | passes over it |
| a word that it does not know, in a lease | carries it |
| a job with such a word, or of another shape | refuses that job alone, with the reason; all others go on |
| the same of a job that it has started already | goes on with it, and stops it when it is told to |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpulease_protocol.codec import from_json, is_known
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import JobSpec
from gpulease_protocol.node_protocol import DesiredState, JobOrder

UPGRADE = "upgrade gpulease on this node to the version of the daemon"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableOrder(JobOrder):
    """An order that this worker understands only as far as it follows and stops a job. It starts none."""

    problem: str
    """Why the job cannot be started."""


def read_desired_state(document: Any) -> DesiredState:
    """The desired state. Raises ValueError for an answer that is none, and for a job without id or lease."""
    try:
        orders = document.get("jobs", [])
        return replace(from_json(DesiredState, document | {"jobs": []}), jobs=tuple(map(_read_order, orders)))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a DesiredState: {error}") from error


def _read_order(document: Any) -> JobOrder:
    try:
        order = from_json(JobOrder, document)
    except ValueError as error:
        return _unreadable(document, f"its order is {error}; {UPGRADE}")
    words = {"launcher": order.spec.launcher, "mask": order.spec.mask}
    unknown = [f"{name} {word.value!r}" for name, word in words.items() if word is not None and not is_known(word)]
    if unknown:
        return _unreadable(document, f"it does not know {' and '.join(unknown)}; {UPGRADE}")
    return order


def _unreadable(document: Any, problem: str) -> UnreadableOrder:
    return UnreadableOrder(
        job_id=document["job_id"],
        attempt=document.get("attempt", 1),
        lease_id=document["lease_id"],
        stop=document.get("stop") is True,
        grace_s=document.get("grace_s", 35.0),
        gpus=(),
        spec=JobSpec(command=(), gpus=0),
        env={},
        problem=problem,
    )
