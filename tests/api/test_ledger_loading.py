"""Between the first request after a start and the moment at which the ledger is in memory: nothing is known yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Holder, Job, Lease, LeaseState
from gpulease_protocol.requests import CancelRequest, HolderProof, JobRequest
from gpulease_protocol.tokens import Role
from gpulease_server.api.app import create_app
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.routes import jobs, leases
from gpulease_server.core.happenings import JobSubmitted, SubmittedJob
from gpulease_server.core.policy import Policy
from gpulease_server.runtime import ids
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from tests.runtime.faults import ask, report, writing

ROOT = Caller("root", 0, 0, Role.ADMIN, "socket")


def test_no_lease_or_job_seems_to_have_ended(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)

    async def main() -> None:
        async with asyncio.timeout(30), writing(url) as (before, store):
            await report(before)
            lease: Any = await before.submit(ask())
            assert isinstance(lease, Lease)
            assert lease.state is LeaseState.ACTIVE
            asked = JobRequest(command=("sleep", "100"), launcher="plain")
            submitted = JobSubmitted(
                cause=ids.new_id("request"),
                jobs=(SubmittedJob(job_id=ids.new_id("job"), lease_id=ids.new_id("lease"), spec=asked.spec()),),
                name="",
                demand=asked.demand(),
                holder=Holder(),
            )
            job: Any = await before.submit(submitted)
            assert isinstance(job, Job)
            started: Any = None
            after = DaemonState(
                writer=Writer(store, Policy()),
                store=store,
                tickets=DesiredStateTickets(),
                recorder=started,
                host="here",
            )
            proof = HolderProof(fencing_token=lease.fencing_token)
            for call in (
                leases.renew(lease.id, proof, after),
                leases.release(lease.id, proof, after, ROOT),
                jobs.cancel(job.id, CancelRequest(), after),
            ):
                with pytest.raises(Unavailable):
                    await call

    asyncio.run(main())


def test_no_answer_shows_an_empty_ledger(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)

    async def main() -> None:
        async with asyncio.timeout(30), writing(url) as (before, store):
            await report(before)
            lease: Any = await before.submit(ask())
            started: Any = None
            writer = Writer(store, Policy())
            app = create_app(
                DaemonState(writer=writer, store=store, tickets=DesiredStateTickets(), recorder=started, host="here")
            )

            async def of_root(scope: Scope, receive: Receive, send: Send) -> None:
                scope["state"] = {"peer": PeerCredentials(uid=0, local=True, connection=ConnectionType.SOCKET)}
                await app(scope, receive, send)

            paths = ("/v1/gpus", "/v1/nodes", f"/v1/leases/{lease.id}", "/v1/leases", "/v1/jobs", "/")
            async with httpx2.AsyncClient(
                transport=httpx2.ASGITransport(of_root), base_url="http://localhost"
            ) as client:
                for path in paths:
                    answer = await client.get(path)
                    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), path
                assert (await client.get("/healthz")).status_code == 200
                running = asyncio.create_task(writer.run())
                while not writer.has_loaded:  # noqa: ASYNC110 - only the writer knows
                    await asyncio.sleep(0.001)
                assert [(await client.get(path)).status_code for path in paths] == [200] * len(paths)
                assert (await client.get("/v1/gpus")).json()["items"]
                running.cancel()
                await asyncio.wait({running})

    asyncio.run(main())
