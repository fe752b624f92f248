"""Between the first request after a start and the moment at which the ledger is in memory: nothing is known yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpulease.access import Role
from gpulease.errors import Unavailable
from gpulease.model import Holder, Job, Lease, LeaseState
from gpulease.wire import CancelRequest, HolderProof, JobRequest
from gpulease_server.api import jobs, leases
from gpulease_server.api.callers import Caller
from gpulease_server.api.daemon import Daemon
from gpulease_server.core.happenings import JobSubmitted
from gpulease_server.core.turn import Policy
from gpulease_server.runtime import ids
from gpulease_server.runtime.tickets import Tickets
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from tests.runtime.faulty import ask, report, writing

ROOT = Caller("root", 0, 0, Role.ADMIN, "socket")


def test_nobody_is_told_that_his_lease_or_job_is_over(tmp_path: Path) -> None:
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
                cause=ids.make("request"),
                job_id=ids.make("job"),
                lease_id=ids.make("lease"),
                name="",
                spec=asked.spec(),
                demand=asked.demand(),
                holder=Holder(),
            )
            job: Any = await before.submit(submitted)
            assert isinstance(job, Job)
            started: Any = None
            after = Daemon(
                writer=Writer(store, Policy()), store=store, tickets=Tickets(), recorder=started, host="here"
            )
            proof = HolderProof(token=lease.token)
            for call in (
                leases.renew(lease.id, proof, after),
                leases.release(lease.id, proof, after, ROOT),
                jobs.cancel(job.id, CancelRequest(), after),
            ):
                with pytest.raises(Unavailable):
                    await call

    asyncio.run(main())
