"""A holder is told of a grant out of the queue only when the database says so, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import LeaseState
from gpulease_protocol.requests import HolderProof, LeaseRequest
from gpulease_protocol.tokens import Role
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.routes import leases
from gpulease_server.core.happenings import IdempotencyKey
from gpulease_server.runtime.reading_age import DesiredStateTickets
from tests.runtime.faults import Fate, recovered, report, writing

ROOT = Caller("root", 0, 0, Role.ADMIN, "socket")
KEY = IdempotencyKey(key="k", fingerprint="k")


@pytest.mark.parametrize("ask_again", ["with a poll", "under its key"])
def test_no_holder_is_told_of_a_grant_that_the_database_does_not_know_as_told(sqlite_url: str, ask_again: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), writing(sqlite_url) as (writer, store):
            nothing: Any = None
            tickets = DesiredStateTickets()
            daemon = DaemonState(writer=writer, store=store, tickets=tickets, recorder=nothing, host="here")
            peer = PeerCredentials(uid=0, local=True, connection=ConnectionType.SOCKET)
            http = Request({"type": "http", "method": "GET", "path": "/", "headers": []}, asyncio.Event().wait)

            async def request(key: IdempotencyKey | None) -> Any:
                requested = await leases.lease_requested(LeaseRequest(count=4), key, daemon, ROOT, peer)
                return await leases.request_lease(requested, daemon, ROOT, http, Response())

            async def ask() -> Any:
                if ask_again == "with a poll":
                    return await leases.show_lease(waits.id, daemon, ROOT, http)
                return await request(KEY)

            await report(writer)
            holder, waits = await request(None), await request(KEY)
            await leases.release(holder.id, HolderProof(fencing_token=holder.fencing_token), daemon, ROOT)
            await report(writer)
            assert waits.id in daemon.ledger.unclaimed
            store.fates = [Fate.FAILED]
            with pytest.raises(Unavailable):
                await ask()
            await recovered(writer)
            assert waits.id in daemon.ledger.unclaimed
            assert (await ask()).state is LeaseState.ACTIVE
            assert waits.id not in daemon.ledger.unclaimed
            assert store.load().leases[waits.id].renewed_at is not None

    asyncio.run(main())
