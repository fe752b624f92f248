"""A great ledger: 10,000 GPUs, 5,000 active leases on them, 50,000 ended ones."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpulease_protocol.model import Demand, Device, EndReason, Holder, Lease, LeaseState, Liveness
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Change, GpuRecord, LeaseRecord, NodeRecord
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.core.build import GIB, uuid

GPUS, ACTIVE, ENDED = 10_000, 5_000, 50_000
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def device(index: int) -> Device:
    """One of eight on its node."""
    return Device(
        uuid=uuid(index),
        node=f"node-{index // 8}",
        index=index % 8,
        pci_bus_id="00000000:1B:00.0",
        name="NVIDIA H100 80GB HBM3",
        memory_total_bytes=80 * GIB,
    )


def lease(number: int, gpus: tuple[Device, ...]) -> LeaseRecord:
    """An active lease."""
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "21000",
        "GPULEASE_LEASE_ID": f"lease-{number:016x}",
        "GPULEASE_LEASE_TOKEN": str(number),
    }
    at = BEGUN + timedelta(seconds=number)
    noun = Lease(
        id=f"lease-{number:016x}",
        state=LeaseState.ACTIVE,
        holder=Holder(user="ann", host="a", label="sweep"),
        demand=Demand(count=len(gpus)),
        gpus=gpus,
        env=env,
        fencing_token=number,
        ttl_s=60.0,
        liveness=Liveness.HEARTBEAT,
        created_at=at,
        granted_at=at,
    )
    return LeaseRecord(lease=noun, number=number, cause="request-1", port=21000, renewed_at=at)


def large_ledger(file: Path, gpus: int = GPUS, active: int = ACTIVE, ended: int = ENDED) -> str:
    """Make it; its URL. The ended leases are copies of one, each with its own number, token and end."""
    url = f"sqlite:///{file}"
    upgrade(url)
    store = Store(url)
    devices = [device(index) for index in range(gpus)]
    each = gpus // active
    changes: list[Change] = [NodeRecord(name=f"node-{number}", host="a") for number in range(gpus // 8)]
    model = lease(1, tuple(devices[:each]))
    over = {"state": LeaseState.ENDED, "end_reason": EndReason.RELEASED, "ended_at": BEGUN}
    changes.append(_with(model, **over))
    for number in range(active):
        held = tuple(devices[number * each : (number + 1) * each])
        token = ended + 1 + number
        changes.append(lease(token, held))
        changes += [GpuRecord(device=one, lease_id=f"lease-{token:016x}", fencing_token=token) for one in held]
    ledger = Ledger(next_number=ended + active + 1, next_token=ended + active + 1)
    store.write(changes, ledger)
    store.close()
    with closing(sqlite3.connect(file)) as connection, connection:
        _multiply(connection, ended)
    return url


def _with(record: LeaseRecord, **what: object) -> LeaseRecord:
    return replace(record, lease=replace(record.lease, **what))  # type: ignore[arg-type]


def _multiply(connection: sqlite3.Connection, ended: int) -> None:
    columns = [row[1] for row in connection.execute("PRAGMA table_info(lease)")]
    own = {
        "id": "printf('lease-%016x', n)",
        "number": "n",
        "token": "n",
        "ended_at": "strftime('%Y-%m-%d %H:%M:%f000', '2026-01-01', (n * 7919 % 1000003) || ' seconds')",
    }
    chosen = ", ".join(own.get(name, f'"{name}"') for name in columns)
    connection.execute(
        f"WITH RECURSIVE numbers(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM numbers WHERE n < {ended})"
        f" INSERT INTO lease SELECT {chosen} FROM lease JOIN numbers WHERE number = 1"
    )
