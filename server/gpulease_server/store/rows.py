"""Rows to nouns and back: the one place that knows both."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sqlalchemy import Row, Table

from gpulease.exchange import LeaseOwner
from gpulease.model import (
    Demand,
    Device,
    EndReason,
    Event,
    Holder,
    Job,
    JobSpec,
    JobState,
    Lease,
    LeaseState,
    Liveness,
    NodeMode,
)
from gpulease.wire import from_json, to_json

from ..core.ledger import GpuRecord, JobRecord, KeyRecord, LeaseRecord, NodeRecord, OwnerWatch
from . import tables

Stored = LeaseRecord | JobRecord | GpuRecord | NodeRecord | KeyRecord | Event
WATCH_COLUMNS = ("watched_by", "owner_realm", "owner_pid", "owner_start_ticks")


def to_row(change: Stored) -> tuple[Table, dict[str, Any]]:
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
        **_watch_columns(record.watched),
    }
    del row["expires_at"], row["position"], row["problems"]
    return row


def _watch_columns(watched: OwnerWatch | None) -> dict[str, Any]:
    if watched is None:
        return dict.fromkeys(WATCH_COLUMNS)
    return {
        "watched_by": watched.node,
        "owner_realm": watched.realm,
        "owner_pid": watched.owner.pid,
        "owner_start_ticks": watched.owner.start_ticks,
    }


def _watch(columns: dict[str, Any]) -> OwnerWatch | None:
    if columns["watched_by"] is None:
        return None
    owner = LeaseOwner(pid=columns["owner_pid"], start_ticks=columns["owner_start_ticks"])
    return OwnerWatch(node=columns["watched_by"], realm=columns["owner_realm"], owner=owner)


def _job_row(record: JobRecord) -> dict[str, Any]:
    row = _fields(record.job) | {
        "number": record.number,
        "user_name": record.job.user,
        "spec": to_json(record.spec),
        "gpus": [to_json(device) for device in record.job.gpus],
        "grace_s": record.grace_s,
        "cancelled_at": record.cancelled_at,
        "log_directory": record.log_directory,
        "uid": record.uid,
        "gid": record.gid,
    }
    del row["launcher"], row["command"], row["user"]
    return row


def lease_record(row: Row[Any]) -> LeaseRecord:
    """A lease as it was stored."""
    values = dict(row._mapping)
    own = {name: values.pop(name) for name in ("number", "cause", "port", "renewed_at")}
    own["watched"] = _watch({name: values.pop(name) for name in WATCH_COLUMNS})
    values["state"] = LeaseState(values["state"])
    values["liveness"] = Liveness(values["liveness"])
    values["end_reason"] = None if values["end_reason"] is None else EndReason(values["end_reason"])
    values["holder"] = from_json(Holder, values["holder"])
    values["demand"] = from_json(Demand, values["demand"])
    values["gpus"] = tuple(from_json(Device, item) for item in values["gpus"])
    return LeaseRecord(lease=Lease(**values), **own)


def job_record(row: Row[Any]) -> JobRecord:
    """A job as it was stored."""
    values = dict(row._mapping)
    own = {name: values.pop(name) for name in ("number", "grace_s", "cancelled_at", "log_directory", "uid", "gid")}
    spec = from_json(JobSpec, values.pop("spec"))
    values["state"] = JobState(values["state"])
    values["user"] = values.pop("user_name")
    values["gpus"] = tuple(from_json(Device, item) for item in values["gpus"])
    return JobRecord(job=Job(launcher=spec.launcher, command=spec.command, **values), spec=spec, **own)


def gpu_record(row: Row[Any]) -> GpuRecord:
    """A GPU as it was stored."""
    values = dict(row._mapping)
    del values["uuid"]
    return GpuRecord(**values | {"device": from_json(Device, values["device"])})


def node_record(row: Row[Any]) -> NodeRecord:
    """A node as it was stored."""
    return NodeRecord(**{**row._mapping, "mode": NodeMode(row._mapping["mode"])})


def key_record(row: Row[Any]) -> KeyRecord:
    """An Idempotency-Key as it was stored."""
    return KeyRecord(**row._mapping)


def event_noun(row: Row[Any]) -> Event:
    """An event as it was stored."""
    return Event(**{**row._mapping, "gpus": tuple(row._mapping["gpus"])})


def _fields(noun: Any) -> dict[str, Any]:
    return {item.name: getattr(noun, item.name) for item in fields(noun)}
