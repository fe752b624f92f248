"""What a turn writes is what SQLAlchemy would write of the same values, and what an older release reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import JSON, Engine, Table, insert, text

from gpulease_protocol.budgets import Budget
from gpulease_protocol.codec import from_json, to_json
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
    Launcher,
    Lease,
    LeaseMember,
    LeaseState,
    Liveness,
    Mask,
    NodeMode,
    Selection,
)
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import ReservationRemoved
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import GpuTimeRecord, GpuTimeRemoved, LimitRecord, LimitRemoved
from gpulease_server.core.order_records import UsageRecord
from gpulease_server.core.preemption_records import Preemption, PreemptionRemoved
from gpulease_server.core.records import (
    BudgetRecord,
    BudgetRemoved,
    Change,
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
from gpulease_server.store.ledger_store import Store

WHOLE_SECOND = datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC)
AT = datetime(2026, 3, 1, 9, 5, 7, 80_001, tzinfo=timezone(timedelta(hours=2)))
DEVICE = Device(uuid="GPU-0", node="a", index=0, pci_bus_id="0:1", name="H100", memory_total_bytes=2**36)
BARE = Device(uuid="GPU-1", node="a", index=1)
HOLDER = Holder(user="ann", host="a", owner_pid=7, label="Zoë", agent="x", session="\U0001f600", token_id="t")
DEMAND = Demand(selection=Selection.LISTED, count=2, indices=(0, 1), among=("GPU-0",), min_free_memory_bytes=1)
LEASE = LeaseRecord(
    lease=Lease(
        id="lease-1",
        state=LeaseState.ENDED,
        end_reason=EndReason.EXPIRED,
        holder=HOLDER,
        demand=DEMAND,
        gpus=(DEVICE, BARE),
        members=(LeaseMember(rank=0, node="a", address="10.0.0.1", gpus=(DEVICE,), env={"NNODES": "2"}),),
        env={"A": "\udc80", "B": ""},
        fencing_token=3,
        ttl_s=60,
        liveness=Liveness.PROCESS,
        job_id="job-1",
        created_at=AT,
        granted_at=WHOLE_SECOND,
        expires_at=AT,
        ended_at=AT,
        ends_at=AT,
        position=1,
        problems=("one",),
    ),
    number=2**40,
    cause="request-1",
    port=21000,
    renewed_at=AT,
    watched_owner=WatchedOwner(node="a", realm="here", owner=LeaseOwner(pid=7, start_ticks=2**40, user="ann")),
)
QUEUED = LeaseRecord(
    lease=Lease(
        id="lease-2",
        state=LeaseState.QUEUED,
        holder=Holder(),
        demand=Demand(),
        ttl_s=0.5,
        liveness=Liveness.HEARTBEAT,
        created_at=WHOLE_SECOND,
    ),
    number=2,
    cause="request-2",
)
SPEC = JobSpec(
    command=("a.py", "--name", "ü"),
    gpus=2,
    launcher=Launcher.PLAIN,
    environment={"K": "\x00 \x7f \u2028 </script>", "P": "x" * 4000},
    timeout_s=1e-7,
    retries=2,
    limits={"nofile": (64, -1), "core": (2**63 - 1, 0)},
    mask=Mask.UUIDS,
)
ATTEMPT = JobAttempt(number=1, lease_id="lease-1", exit_code=-9, reason='"', started_at=AT, ended_at=WHOLE_SECOND)
JOB = JobRecord(
    job=Job(
        id="job-1",
        name="\U0001f600 %s %(x)s :x",
        state=JobState.FAILED,
        reason="it's",
        lease_id="lease-1",
        user="ann",
        launcher=SPEC.launcher,
        command=SPEC.command,
        gpus=(DEVICE,),
        members=(JobMember(rank=0, node="a", address="10.0.0.1", failure=1, reason="Zoë"),),
        exit_code=1,
        traceback="T\n",
        attempts=2,
        attempt_history=(ATTEMPT, ATTEMPT),
        after=(JobDependency(job="job-0", when="ended"),),
        array_id="array-1",
        array_index=0,
        array_at_most=3,
        preempt_at=AT,
        preempted=2,
        created_at=AT,
        started_at=AT,
        ended_at=AT,
    ),
    spec=SPEC,
    number=4,
    grace_s=7.25,
    log_directory="/log",
    uid=2**32 - 1,
    gid=0,
    cancelled_at=AT,
    go_at=AT,
    parts_stopped_at=AT,
    regroups=3,
    grows_at=AT,
    stuck_on=("a",),
    fenced=True,
)
BARE_JOB = JobRecord(
    job=Job(id="job-2", state=JobState.QUEUED, lease_id="lease-2", launcher=SPEC.launcher, command=(), created_at=AT),
    spec=from_json(JobSpec, {"command": [], "gpus": 1, "launcher": "newer"}),
    number=5,
)
NODE = NodeRecord(name="a", host="a", driver_version="580", mode=NodeMode.PAUSED, mode_reason="r", seen_at=AT)
GPU = GpuRecord(device=DEVICE, lease_id="lease-1", draining=True, fencing_token=3, baseline_bytes=0, cordoned=True)
KEY = KeyRecord(key="k\U0001f600", fingerprint="f", result_id="lease-1", at=AT)
BUDGET = BudgetRecord(
    token_id="t", budget=Budget(max_gpus=1, gpu_hours_per_day=0.1), day=date(2026, 3, 1), used_s=1e9, counted_at=AT
)
USAGE = UsageRecord(user="ada \U0001f600", used_s=1e9 / 3, held=2.5, entry_s=1e-9, counted_at=AT)
LIMITS = LimitRecord(
    kind=LimitKind.GROUP,
    name="vision lab",
    limits=Limits(max_gpus=4, gpu_hours=1.5, window_s=7200.0),
    members=("ada", "Zoë"),
    set_at=AT,
    set_by="root",
)
GPU_TIME = GpuTimeRecord(kind=LimitKind.TOKEN, name="t", width_s=300.0, parts=(0.0, 1e9), counted_at=AT)
RESERVATION = Reservation(
    id="reservation-1",
    gpus=(DEVICE,),
    from_at=AT,
    to_at=AT,
    user="Zoë \U0001f600",
    reason="course",
    made_at=AT,
    made_by="root",
)
PREEMPTION = Preemption(lease_id="lease-1", victims=("lease-2",), gpus=("GPU-0",), noticed_at=AT, preempt_at=AT)
EVENT = Event(seq=9, at=AT, kind="lease.granted", cause="c", lease_id="l", gpus=("GPU-0", "GPU-1"), fencing_token=3)


def lease_values(record: LeaseRecord) -> dict[str, Any]:
    """The columns of a lease, one by one."""
    lease, watched = record.lease, record.watched_owner
    names = "id state end_reason env ttl_s liveness job_id created_at granted_at ended_at"
    return {name: getattr(lease, name) for name in names.split()} | {
        "token": lease.fencing_token,
        "holder": to_json(lease.holder),
        "demand": to_json(lease.demand),
        "gpus": [to_json(one) for one in lease.gpus],
        "members": [to_json(one) for one in lease.members] or None,
        "kept": lease.kept and to_json(lease.kept),
        "number": record.number,
        "place": record.place,
        "cause": record.cause,
        "port": record.port,
        "renewed_at": record.renewed_at,
        "watched_by": watched and watched.node,
        "owner_realm": watched and watched.realm,
        "owner_pid": watched and watched.owner.pid,
        "owner_start_ticks": watched and watched.owner.start_ticks,
        "owner_user": watched and watched.owner.user,
    }


def job_values(record: JobRecord) -> dict[str, Any]:
    """The columns of a job, one by one."""
    job = record.job
    names = "id name state reason lease_id exit_code traceback attempts array_id array_index array_at_most preempted"
    return {name: getattr(job, name) for name in f"{names} created_at started_at ended_at preempt_at".split()} | {
        "user_name": job.user,
        "spec": to_json(record.spec),
        "gpus": [to_json(one) for one in job.gpus],
        "attempt_history": [to_json(one) for one in job.attempt_history] or None,
        "after": [to_json(one) for one in job.after] or None,
        "members": [to_json(one) for one in job.members] or None,
        "go_at": record.go_at,
        "parts_stopped_at": record.parts_stopped_at,
        "regroups": record.regroups,
        "grows_at": record.grows_at,
        "stuck_on": list(record.stuck_on) or None,
        "fenced": record.fenced,
        "number": record.number,
        "grace_s": record.grace_s,
        "log_directory": record.log_directory,
        "cancelled_at": record.cancelled_at,
        "uid": record.uid,
        "gid": record.gid,
    }


EXPECTED: list[tuple[Table, Change, dict[str, Any]]] = [
    (tables.lease, LEASE, lease_values(LEASE)),
    (tables.lease, QUEUED, lease_values(QUEUED)),
    (tables.job, JOB, job_values(JOB)),
    (tables.job, BARE_JOB, job_values(BARE_JOB)),
    (
        tables.node,
        NODE,
        {
            "name": "a",
            "host": "a",
            "driver_version": "580",
            "simulated": False,
            "mode": "paused",
            "mode_reason": "r",
            "mode_by": None,
            "seen_at": AT,
        },
    ),
    (
        tables.gpu,
        GPU,
        {
            "uuid": "GPU-0",
            "device": to_json(DEVICE),
            "lease_id": "lease-1",
            "draining": True,
            "token": 3,
            "baseline_bytes": 0,
            "cordoned": True,
        },
    ),
    (tables.idempotency_key, KEY, {"key": KEY.key, "fingerprint": "f", "made": "lease-1", "at": AT}),
    (
        tables.token_budget,
        BUDGET,
        {
            "token_id": "t",
            "budget": to_json(BUDGET.budget),
            "day": BUDGET.day,
            "used_s": BUDGET.used_s,
            "counted_at": AT,
        },
    ),
    (
        tables.user_usage,
        USAGE,
        {"user_name": USAGE.user, "used_s": 1e9 / 3, "held": 2.5, "entry_s": 1e-9, "counted_at": AT},
    ),
    (
        tables.usage_limit,
        LIMITS,
        {
            "id": "group vision lab",
            "limits": to_json(LIMITS.limits),
            "members": ["ada", "Zoë"],
            "set_at": AT,
            "set_by": "root",
        },
    ),
    (
        tables.gpu_time,
        GPU_TIME,
        {"id": "token t", "width_s": 300.0, "parts": [0.0, 1e9], "counted_at": AT},
    ),
    (
        tables.reservation,
        RESERVATION,
        {
            "id": "reservation-1",
            "gpus": [to_json(DEVICE)],
            "from_at": AT,
            "to_at": AT,
            "user_name": RESERVATION.user,
            "group_name": None,
            "reason": "course",
            "made_at": AT,
            "made_by": "root",
        },
    ),
    (
        tables.preemption,
        PREEMPTION,
        {"lease_id": "lease-1", "victims": ["lease-2"], "gpus": ["GPU-0"], "noticed_at": AT, "preempt_at": AT},
    ),
    (
        tables.event,
        EVENT,
        {
            "seq": 9,
            "at": AT,
            "kind": EVENT.kind,
            "cause": "c",
            "lease_id": "l",
            "job_id": None,
            "node": None,
            "gpus": ["GPU-0", "GPU-1"],
            "token": 3,
            "reason": None,
        },
    ),
]


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    yield store
    store.close()


def stored(engine: Engine, table: Table) -> list[dict[str, Any]]:
    """The rows as the driver reads them, but for the spaces in JSON columns."""
    with engine.connect() as connection:
        found = [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {table.name}"))]
    return [{name: in_order(value) if is_json(table, name) else value for name, value in row.items()} for row in found]


def is_json(table: Table, column: str) -> bool:
    return isinstance(table.c[column].type, JSON)


def in_order(value: Any) -> str | None:
    """JSON with its keys in the order that they have. The driver of SQLite has its text, psycopg has decoded it."""
    return None if value is None else json.dumps(json.loads(value) if isinstance(value, str) else value)


@pytest.mark.parametrize(("table", "change", "values"), EXPECTED, ids=lambda part: getattr(part, "name", ""))
def test_a_row_is_what_sqlalchemy_writes(store: Store, table: Table, change: Change, values: dict[str, Any]) -> None:
    with store.writing() as connection:
        connection.execute(insert(table), values)
    (expected,) = stored(store.engine, table)
    for name in expected:
        assert not is_json(table, name) or expected[name] == in_order(values[name])
    with store.writing() as connection:
        connection.execute(table.delete())
    store.write([change], Ledger())
    assert stored(store.engine, table) == [expected]
    if table is not tables.event:
        with store.writing() as connection:
            key = next(iter(table.primary_key))
            others = {column: None for column in table.columns if column.nullable}
            connection.execute(table.update().values(others or {key: key}))
        store.write([change], Ledger())
        assert stored(store.engine, table) == [expected], "the row was not overwritten whole"


def test_a_record_of_each_kind_is_read_back(store: Store) -> None:
    store.write([change for _, change, _ in EXPECTED], Ledger())
    lease, job, bare = store.lease("lease-1"), store.job("job-1"), store.job("job-2")
    views = {"expires_at": None, "ends_at": None, "position": None, "problems": ()}
    assert lease == replace(LEASE, lease=replace(LEASE.lease, **views))
    assert job == JOB
    assert bare is not None
    assert bare.spec == BARE_JOB.spec, "a word of a newer version does not come back"
    ledger = store.load()
    assert (ledger.gpus["GPU-0"], ledger.nodes["a"], ledger.keys[KEY.key]) == (GPU, NODE, KEY)
    assert ledger.budgets["t"] == BUDGET
    assert ledger.usage[USAGE.user] == USAGE
    assert ledger.limits.records == {LIMITS.key: LIMITS}
    assert ledger.limits.gpu_time == {GPU_TIME.key: GPU_TIME}
    assert ledger.calendar.closed_to("bob", None, None) == {DEVICE.uuid}
    assert ledger.preemptions == {"lease-1": PREEMPTION}
    assert store.history(0, 10)[0] == [EVENT]


def test_the_text_of_a_json_column_is_ascii(store: Store) -> None:
    """A PostgreSQL database may have an encoding that lacks the character. Half of a surrogate pair has none at all."""
    store.write([LEASE], Ledger())
    with store.engine.connect() as connection:
        holder, env = connection.execute(text("SELECT CAST(holder AS TEXT), CAST(env AS TEXT) FROM lease")).one()
    assert "Zo\\u00eb" in holder
    assert "\\udc80" in env
    assert holder.isascii()


@pytest.mark.parametrize("gone", [True, False], ids=["removed last", "written last"])
def test_what_a_turn_does_last_to_a_record_is_what_is_stored(store: Store, gone: bool) -> None:
    written: list[Change] = [GPU, NODE, KEY, BUDGET, LIMITS, GPU_TIME, RESERVATION, PREEMPTION]
    removed: list[Change] = [GpuRemoved("GPU-0"), NodeRemoved("a"), KeyRemoved(KEY.key), BudgetRemoved("t")]
    removed += [LimitRemoved(LIMITS.key), GpuTimeRemoved(GPU_TIME.key), ReservationRemoved(RESERVATION.id)]
    removed += [PreemptionRemoved(PREEMPTION.lease_id)]
    older = [replace(GPU, cordoned=False), replace(NODE, host="b"), replace(KEY, fingerprint="g"), BUDGET]
    older += [replace(LIMITS, set_by="eve"), replace(GPU_TIME, parts=()), replace(RESERVATION, reason=None)]
    older += [replace(PREEMPTION, victims=())]
    store.write(written, Ledger())
    store.write([*older, *written, *removed] if gone else [*older, *removed, *written], Ledger())
    ledger = store.load()
    found = [*ledger.gpus.values(), *ledger.nodes.values(), *ledger.keys.values(), *ledger.budgets.values()]
    found += [*ledger.limits.records.values(), *ledger.limits.gpu_time.values(), *ledger.calendar.entries.values()]
    found += [*ledger.preemptions.values()]
    assert found == ([] if gone else written)
