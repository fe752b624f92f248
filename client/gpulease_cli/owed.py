"""What `gpulease acquire` owes when it ends while no daemon answers: a process that outlives it says it.

The request of an `acquire` belongs to its shell, or with --detach to no process, so that its end tells the daemon
nothing. A daemon that comes back would keep the request for its whole ttl, and grant GPUs to a shell that knows nothing
of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from gpulease.client import Client
from gpulease.sansio.failover import Failover
from gpulease.sansio.release_retries import DEBTS, Debt
from gpulease_protocol import endpoints
from gpulease_protocol.requests import LeaseRequest

KEEP_TRYING_S = 3600.0
"""How long that process waits for a daemon."""
POLL_S = 1.0


@contextmanager
def settled_later(client: Client) -> Iterator[None]:
    """At the end of the block, have another process say what is still owed to the daemon of this client."""
    try:
        yield
    finally:
        owed = [_written(debt) for debt in DEBTS.owed_to(client.destination)]
        if owed:
            nothing = subprocess.DEVNULL
            command = [sys.executable, "-P", "-m", "gpulease_cli.owed", *owed]
            subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _written(debt: Debt) -> str:
    """A debt as text: the id of a lease, or a request that may or may not have arrived."""
    if debt.request is None:
        return json.dumps({"lease_id": debt.lease_id})
    return json.dumps({"body": debt.request.body, "key": debt.request.idempotency_key})


def _read(text: str, failover: Failover) -> Debt:
    match json.loads(text):
        case {"lease_id": lease_id}:
            return Debt(failover, lease_id=lease_id)
        case {"body": body, "key": key}:
            return Debt(failover, request=replace(endpoints.request_lease(LeaseRequest(), key), body=body))
    raise ValueError(text)


def main(owed: list[str]) -> None:
    """Withdraw these requests, or release them if they were granted, as soon as a daemon answers."""
    until_s = time.monotonic() + KEEP_TRYING_S
    with Client() as client:
        for text in owed:
            DEBTS.add(_read(text, Failover(client.destination)))
        DEBTS.settle_in_background()
        while DEBTS.owed_to(client.destination) and time.monotonic() < until_s:
            time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
