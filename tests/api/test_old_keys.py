"""An Idempotency-Key of something that has left the daemon's memory is answered from the database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from gpulease_protocol.errors import LeaseLost, NotFound
from gpulease_protocol.model import JobState
from gpulease_protocol.requests import CancelRequest, HolderProof, JobRequest, LeaseRequest
from gpulease_protocol.tokens import Role
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.routes import jobs, leases
from gpulease_server.core import ledger as ledger_module
from gpulease_server.core.happenings import IdempotencyKey
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import report, writing

ROOT = Caller("root", 0, 0, Role.ADMIN, "socket")
JOB = JobRequest(command=("sleep", "100"), launcher="plain", environment={"KEY": "secret"})  # type: ignore[arg-type]


def key(text: str) -> IdempotencyKey:
    return IdempotencyKey(key=text, fingerprint=text)


def test_the_key_of_an_old_job_and_of_an_old_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENDED_IN_MEMORY", 1)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)

    async def main() -> None:
        async with asyncio.timeout(30), writing(url) as (writer, store):
            nothing: Any = None
            daemon = DaemonState(
                writer=writer, store=store, tickets=DesiredStateTickets(), recorder=nothing, host="here"
            )
            peer = PeerCredentials(uid=0, local=True, connection=ConnectionType.SOCKET)
            http = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, asyncio.Event().wait)

            async def submit(text: str) -> Any:
                return await jobs.submit(
                    await jobs.job_submitted(JOB, key(text), daemon, ROOT, peer), daemon, Response()
                )

            async def lease(text: str) -> Any:
                requested = await leases.lease_requested(LeaseRequest(count=4), key(text), daemon, ROOT, peer)
                return await leases.request_lease(requested, daemon, ROOT, http, Response())

            await report(writer)
            await lease("the lease that all others wait for")
            waits = await lease("lease")
            await leases.release(waits.id, HolderProof(), daemon, ROOT)
            made = [await submit(f"job {number}") for number in range(3)]
            for job in made:
                await jobs.cancel(job.id, CancelRequest(), daemon)
            assert made[0].id not in daemon.ledger.jobs
            again = await submit("job 0")
            assert (again.id, again.state) == (made[0].id, JobState.CANCELLED)
            with pytest.raises(LeaseLost):
                await lease("lease")
            assert _environments(store) == [{}, {}, {}]
            _forget_jobs(store)
            with pytest.raises(NotFound, match="pruned"):
                await submit("job 0")

    asyncio.run(main())


def _environments(store: Store) -> list[dict[str, str]]:
    return [record.spec.environment for record in store.jobs((), None, 10)[0]]


def _forget_jobs(store: Store) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM job")
