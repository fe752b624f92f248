"""Converts records to rows and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sqlalchemy import Row, Table

from gpulease_protocol.budgets import Budget
from gpulease_protocol.codec import field_name, from_json, to_json, wire_name
from gpulease_protocol.model import (
    Demand,
    Device,
    EndReason,
    Event,
    Holder,
    Job,
    JobAttempt,
    JobDependency,
    JobSpec,
    JobState,
    Lease,
    LeaseState,
    Liveness,
    NodeMode,
)
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_server.core.presentation import JOB_VIEW_FIELDS
from gpulease_server.core.records import (
    BudgetRecord,
    GpuRecord,
    JobRecord,
    KeyRecord,
    LeaseRecord,
    NodeRecord,
    WatchedOwner,
)
from gpulease_server.store import tables

StoredChange = LeaseRecord | JobRecord | GpuRecord | NodeRecord | BudgetRecord | KeyRecord | Event
WATCH_COLUMNS = ("watched_by", "owner_realm", "owner_pid", "owner_start_ticks", "owner_user")


def to_row(change: StoredChange) -> tuple[Table, dict[str, Any]]:
    """The table and the row of a change."""
    match change:
        case LeaseRecord():
            return tables.lease, _lease_row(change)
        case JobRecord():
            return tables.job, _job_row(change)
        case GpuRecord(device=device):
            return tables.gpu, _fields(change) | {"uuid": device.uuid, "device": to_json(device)}
        case NodeRecord():
            return tables.node, _fields(change)
        case BudgetRecord(budget=budget):
            row = _fields(change) | {"budget": to_json(budget)}
            del row["counted_at_s"]
            return tables.token_budget, row
        case KeyRecord():
            return tables.idempotency_key, _fields(change)
        case Event():
            return tables.event, _fields(change) | {"gpus": list(change.gpus)}


def _lease_row(record: LeaseRecord) -> dict[str, Any]:
    row = _fields(record.lease) | {
        "number": record.number,
        "cause": record.cause,
        "port": record.port,
        "renewed_at": record.renewed_at,
        "holder": to_json(record.lease.holder),
        "demand": to_json(record.lease.demand),
        "gpus": [to_json(device) for device in record.lease.gpus],
        **_watch_columns(record.watched_owner),
    }
    del row["expires_at"], row["ends_at"], row["position"], row["problems"]
    return row


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
    row = {name: value for name, value in _fields(record.job).items() if name not in JOB_VIEW_FIELDS} | {
        "number": record.number,
        "user_name": record.job.user,
        "spec": to_json(record.spec),
        "gpus": [to_json(device) for device in record.job.gpus],
        "grace_s": record.grace_s,
        "cancelled_at": record.cancelled_at,
        "log_directory": record.log_directory,
        "attempt_history": [to_json(attempt) for attempt in record.job.attempt_history] or None,
        "after": [to_json(dependency) for dependency in record.job.after] or None,
        "uid": record.uid,
        "gid": record.gid,
    }
    del row["launcher"], row["command"], row["user"]
    return row


def lease_record(row: Row[Any]) -> LeaseRecord:
    """A lease as it was stored."""
    values = _values(row)
    own = {name: values.pop(name) for name in ("number", "cause", "port", "renewed_at")}
    own["watched_owner"] = _watch({name: values.pop(name) for name in WATCH_COLUMNS})
    values["state"] = LeaseState(values["state"])
    values["liveness"] = Liveness(values["liveness"])
    values["end_reason"] = None if values["end_reason"] is None else EndReason(values["end_reason"])
    values["holder"] = from_json(Holder, values["holder"])
    values["demand"] = from_json(Demand, values["demand"])
    values["gpus"] = tuple(from_json(Device, item) for item in values["gpus"])
    return LeaseRecord(lease=Lease(**values), **own)


def job_record(row: Row[Any]) -> JobRecord:
    """A job as it was stored."""
    values = _values(row)
    own = {name: values.pop(name) for name in ("number", "grace_s", "cancelled_at", "log_directory", "uid", "gid")}
    spec = from_json(JobSpec, values.pop("spec"))
    values["state"] = JobState(values["state"])
    values["user"] = values.pop("user_name")
    values["attempt_history"] = tuple(from_json(JobAttempt, item) for item in values["attempt_history"] or ())
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


def key_record(row: Row[Any]) -> KeyRecord:
    """An Idempotency-Key as it was stored."""
    return KeyRecord(**_values(row))


def event(row: Row[Any]) -> Event:
    """An event as it was stored."""
    values = _values(row)
    return Event(**values | {"gpus": tuple(values["gpus"])})


def _fields(noun: Any) -> dict[str, Any]:
    return {wire_name(item.name): getattr(noun, item.name) for item in fields(noun)}


def _values(row: Row[Any]) -> dict[str, Any]:
    return {field_name(column): value for column, value in row._mapping.items()}
