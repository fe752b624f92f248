"""What `gpulease acquire` owes when it ends while no daemon answers: a process that outlives it says it.

The request of an `acquire` belongs to its shell, or with --detach to no process, so that its end tells the daemon
nothing. A daemon that comes back would keep the request for its whole ttl, and grant GPUs to a shell that knows nothing
of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.client import Client
from gpulease.sansio.failover import Failover
from gpulease.sansio.release_retries import DEBTS, Debt

KEEP_TRYING_S = 3600.0
"""How long that process waits for a daemon."""
POLL_S = 1.0


@contextmanager
def settled_later(client: Client) -> Iterator[None]:
    """At the end of the block, have another process say what is still owed to the daemon of this client."""
    try:
        yield
    finally:
        owed = [debt.lease_id for debt in DEBTS.owed_to(client.destination) if debt.lease_id is not None]
        if owed:
            nothing = subprocess.DEVNULL
            command = [sys.executable, "-P", "-m", "gpulease_cli.owed", *owed]
            subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def main(lease_ids: list[str]) -> None:
    """Withdraw these requests, or release them if they were granted, as soon as a daemon answers."""
    until_s = time.monotonic() + KEEP_TRYING_S
    with Client() as client:
        for lease_id in lease_ids:
            DEBTS.add(Debt(Failover(client.destination), lease_id=lease_id))
        DEBTS.settle_in_background()
        while DEBTS.owed_to(client.destination) and time.monotonic() < until_s:
            time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
