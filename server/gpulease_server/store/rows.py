"""Converts records to rows and back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, Table

from gpulease_protocol.budgets import Budget
from gpulease_protocol.codec import field_name, from_json, wire_name
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import (
    Demand,
    Device,
    EndReason,
    Event,
    Holder,
    Job,
    JobAttempt,
    JobDependency,
    JobMember,
    JobSpec,
    JobState,
    Lease,
    LeaseKeep,
    LeaseMember,
    LeaseState,
    Liveness,
    NodeMode,
)
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import ReservationRemoved
from gpulease_server.core.limit_records import GpuTimeRecord, GpuTimeRemoved, LimitRecord, LimitRemoved
from gpulease_server.core.order_records import UsageRecord, UsageRemoved
from gpulease_server.core.preemption_records import Preemption, PreemptionRemoved, with_consent
from gpulease_server.core.presentation import JOB_VIEW_FIELDS
from gpulease_server.core.records import (
    BudgetRecord,
    BudgetRemoved,
    GpuRecord,
    GpuRemoved,
    JobRecord,
    KeyRecord,
    KeyRemoved,
    LeaseRecord,
    NodeRecord,
    NodeRemoved,
    WatchedOwner,
)
from gpulease_server.store import tables

Removal = (
    GpuRemoved
    | NodeRemoved
    | BudgetRemoved
    | LimitRemoved
    | GpuTimeRemoved
    | KeyRemoved
    | UsageRemoved
    | ReservationRemoved
    | PreemptionRemoved
)
Record = (
    LeaseRecord
    | JobRecord
    | GpuRecord
    | NodeRecord
    | BudgetRecord
    | LimitRecord
    | GpuTimeRecord
    | KeyRecord
    | UsageRecord
    | Reservation
    | Preemption
)
Stored = Record | Removal
PLACES: dict[type, tuple[Table, Callable[[Any], str]]] = {
    LeaseRecord: (tables.lease, attrgetter("lease.id")),
    JobRecord: (tables.job, attrgetter("job.id")),
    GpuRecord: (tables.gpu, attrgetter("device.uuid")),
    GpuRemoved: (tables.gpu, attrgetter("uuid")),
    NodeRecord: (tables.node, attrgetter("name")),
    NodeRemoved: (tables.node, attrgetter("name")),
    BudgetRecord: (tables.token_budget, attrgetter("token_id")),
    BudgetRemoved: (tables.token_budget, attrgetter("token_id")),
    LimitRecord: (tables.usage_limit, lambda change: str(change.key)),
    LimitRemoved: (tables.usage_limit, lambda change: str(change.key)),
    GpuTimeRecord: (tables.gpu_time, lambda change: str(change.key)),
    GpuTimeRemoved: (tables.gpu_time, lambda change: str(change.key)),
    Reservation: (tables.reservation, attrgetter("id")),
    ReservationRemoved: (tables.reservation, attrgetter("id")),
    Preemption: (tables.preemption, attrgetter("lease_id")),
    PreemptionRemoved: (tables.preemption, attrgetter("lease_id")),
    UsageRecord: (tables.user_usage, attrgetter("user")),
    UsageRemoved: (tables.user_usage, attrgetter("user")),
    KeyRecord: (tables.idempotency_key, attrgetter("key")),
    KeyRemoved: (tables.idempotency_key, attrgetter("key")),
}
"""The table of each stored change, and its key there."""
WATCH_COLUMNS = ("watched_by", "owner_realm", "owner_pid", "owner_start_ticks", "owner_user")
JOB_RECORD_COLUMNS = (
    *("number", "grace_s", "cancelled_at", "log_directory", "uid", "gid"),
    *("fenced", "go_at", "parts_stopped_at", "regroups", "grows_at", "stuck_on"),
)
COMPUTED: dict[type, Collection[str]] = {
    Lease: (
        *("expires_at", "ends_at", "position", "held_for_s", "idle_s", "problems", "preempt_at", "reclaim_at"),
        "ends_in_s",
        *("expected_at", "expected_basis", "expected_from", "expected_until", "expected_samples"),
    ),
    Job: (*JOB_VIEW_FIELDS, "launcher", "command", "user"),
    GpuRecord: ("drains_since_s",),
    BudgetRecord: ("counted_at_s",),
    LimitRecord: ("kind", "name"),
    GpuTimeRecord: ("kind", "name", "counted_at_s"),
    UsageRecord: ("counted_at_s", "user"),
    Reservation: ("user", "group"),
    Preemption: ("end_s",),
}
"""Fields that are no columns: they follow from other ones, or from what is only in memory."""


def place(change: Stored) -> tuple[Table, str]:
    """The table of a record that is stored or removed, and its key there."""
    table, key = PLACES[type(change)]
    return table, key(change)


def to_row(change: Record | Event) -> tuple[Table, dict[str, Any]]:  # noqa: C901 - one case for each
    """The table and the row of a change; in JSON columns the nouns themselves, which `dialects.json_text` writes."""
    match change:
        case Event():
            return tables.event, _fields(change)
        case LeaseRecord():
            return tables.lease, _lease_row(change)
        case JobRecord():
            return tables.job, _job_row(change)
        case GpuRecord(device=device):
            return tables.gpu, _fields(change) | {"uuid": device.uuid}
        case NodeRecord():
            return tables.node, _fields(change)
        case BudgetRecord():
            return tables.token_budget, _fields(change)
        case LimitRecord():
            return tables.usage_limit, _fields(change) | {"id": str(change.key)}
        case GpuTimeRecord():
            return tables.gpu_time, _fields(change) | {"id": str(change.key)}
        case UsageRecord():
            return tables.user_usage, _fields(change) | {"user_name": change.user}
        case Reservation(user=user, group=group):
            return tables.reservation, _fields(change) | {"user_name": user, "group_name": group}
        case Preemption():
            return tables.preemption, _fields(change)
        case KeyRecord():
            return tables.idempotency_key, _fields(change)


def _lease_row(record: LeaseRecord) -> dict[str, Any]:
    return _fields(record.lease) | {
        "members": record.lease.members or None,
        "number": record.number,
        "place": record.place,
        "cause": record.cause,
        "port": record.port,
        "renewed_at": record.renewed_at,
        **_watch_columns(record.watched_owner),
    }


def _watch_columns(watched: WatchedOwner | None) -> dict[str, Any]:
    if watched is None:
        return dict.fromkeys(WATCH_COLUMNS)
    return {
        "watched_by": watched.node,
        "owner_realm": watched.realm,
        "owner_pid": watched.owner.pid,
        "owner_start_ticks": watched.owner.start_ticks,
        "owner_user": watched.owner.user,
    }


def _watch(columns: dict[str, Any]) -> WatchedOwner | None:
    if columns["watched_by"] is None:
        return None
    owner = LeaseOwner(pid=columns["owner_pid"], start_ticks=columns["owner_start_ticks"], user=columns["owner_user"])
    return WatchedOwner(node=columns["watched_by"], realm=columns["owner_realm"], owner=owner)


def _job_row(record: JobRecord) -> dict[str, Any]:
    return _fields(record.job) | {
        "number": record.number,
        "user_name": record.job.user,
        "spec": record.spec,
        "grace_s": record.grace_s,
        "cancelled_at": record.cancelled_at,
        "go_at": record.go_at,
        "parts_stopped_at": record.parts_stopped_at,
        "regroups": record.regroups,
        "grows_at": record.grows_at,
        "stuck_on": record.stuck_on or None,
        "members": record.job.members or None,
        "log_directory": record.log_directory,
        "attempt_history": record.job.attempt_history or None,
        "after": record.job.after or None,
        "uid": record.uid,
        "gid": record.gid,
        "fenced": record.fenced,
    }


def lease_record(row: Row[Any]) -> LeaseRecord:
    """A lease as it was stored."""
    values = _values(row)
    own = {name: values.pop(name) for name in ("number", "place", "cause", "port", "renewed_at")}
    own["watched_owner"] = _watch({name: values.pop(name) for name in WATCH_COLUMNS})
    values["state"] = LeaseState(values["state"])
    values["liveness"] = Liveness(values["liveness"])
    values["end_reason"] = None if values["end_reason"] is None else from_json(EndReason, values["end_reason"])
    values["holder"] = from_json(Holder, values["holder"])
    values["demand"] = with_consent(from_json(Demand, values["demand"]))
    values["gpus"] = tuple(from_json(Device, item) for item in values["gpus"])
    values["members"] = tuple(from_json(LeaseMember, item) for item in values["members"] or ())
    values["kept"] = None if values["kept"] is None else from_json(LeaseKeep, values["kept"])
    return LeaseRecord(lease=Lease(**values), **own)


def job_record(row: Row[Any]) -> JobRecord:
    """A job as it was stored."""
    values = _values(row)
    own = {name: values.pop(name) for name in JOB_RECORD_COLUMNS}
    own["stuck_on"] = tuple(own["stuck_on"] or ())
    spec = from_json(JobSpec, values.pop("spec"))
    values["state"] = JobState(values["state"])
    values["user"] = values.pop("user_name")
    values["attempt_history"] = tuple(from_json(JobAttempt, item) for item in values["attempt_history"] or ())
    values["members"] = tuple(from_json(JobMember, item) for item in values["members"] or ())
    values["after"] = tuple(from_json(JobDependency, item) for item in values["after"] or ())
    values["gpus"] = tuple(from_json(Device, item) for item in values["gpus"])
    return JobRecord(job=Job(launcher=spec.launcher, command=spec.command, **values), spec=spec, **own)


def gpu_record(row: Row[Any]) -> GpuRecord:
    """A GPU as it was stored."""
    values = _values(row)
    del values["uuid"]
    return GpuRecord(**values | {"device": from_json(Device, values["device"])})


def node_record(row: Row[Any]) -> NodeRecord:
    """A node as it was stored."""
    values = _values(row)
    return NodeRecord(**values | {"mode": NodeMode(values["mode"])})


def budget_record(row: Row[Any]) -> BudgetRecord:
    """A budget as it was stored."""
    values = _values(row)
    return BudgetRecord(**values | {"budget": from_json(Budget, values["budget"])})


def usage_record(row: Row[Any]) -> UsageRecord:
    """What a user has used as it was stored."""
    values = _values(row)
    return UsageRecord(user=values.pop("user_name"), **values)


def reservation(row: Row[Any]) -> Reservation:
    """A reservation as it was stored."""
    values = _values(row)
    whom = {"user": values.pop("user_name"), "group": values.pop("group_name")}
    gpus = tuple(from_json(Device, item) for item in values.pop("gpus"))
    return Reservation(gpus=gpus, **whom, **values)


def preemption(row: Row[Any]) -> Preemption:
    """For whom leases end as it was stored."""
    values = _values(row)
    return Preemption(**values | {"victims": tuple(values["victims"]), "gpus": tuple(values["gpus"])})


def limit_record(row: Row[Any]) -> LimitRecord:
    """Limits as they were stored."""
    values = _values(row)
    read = {"limits": from_json(Limits, values["limits"]), "members": tuple(values["members"])}
    return LimitRecord(**_kind_and_name(values) | read)


def gpu_time_record(row: Row[Any]) -> GpuTimeRecord:
    """GPU time as it was stored."""
    values = _values(row)
    return GpuTimeRecord(**_kind_and_name(values) | {"parts": tuple(values["parts"])})


def _kind_and_name(values: dict[str, Any]) -> dict[str, Any]:
    kind, _, name = values.pop("id").partition(" ")
    return values | {"kind": LimitKind(kind), "name": name}


def key_record(row: Row[Any]) -> KeyRecord:
    """An Idempotency-Key as it was stored."""
    return KeyRecord(**_values(row))


def event(row: Row[Any]) -> Event:
    """An event as it was stored."""
    values = _values(row)
    return Event(**values | {"gpus": tuple(values["gpus"])})


def _fields(noun: Any) -> dict[str, Any]:
    columns, values = _own_columns(noun.__class__)
    return dict(zip(columns, values(noun), strict=True))


@cache
def _own_columns(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The columns that hold fields of a class of their own, and what takes their values from an object of it."""
    names = [item.name for item in fields(kind) if item.name not in COMPUTED.get(kind, ())]
    return tuple(map(wire_name, names)), attrgetter(*names)


def _values(row: Row[Any]) -> dict[str, Any]:
    return {field_name(column): value for column, value in row._mapping.items()}
